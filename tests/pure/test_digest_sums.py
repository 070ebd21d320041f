"""Digests: sums that add up however a value is cut, hashes that any bit changes, files that may be cut or hostile."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.autograd.lazy import GroupedProduct, Product, RowSum
from mpitrain.compare.bounds import gap, precision_of
from mpitrain.compare.wholes import Seen, part_of, tensors, wholes
from mpitrain.debug.digests import sums
from mpitrain.debug.digests.batches import hashes
from mpitrain.debug.digests.entries import Entry
from mpitrain.debug.digests.files import LONGEST_LINE, RankDigests, name_of, read
from mpitrain.debug.digests.passes import Which
from mpitrain.debug.digests.sums import Sums
from mpitrain.debug.digests.weights import COLUMNS, PLACES, block_of, factors, run_of
from mpitrain.debug.digests.writing import Writer
from mpitrain.errors import DataError

RANDOM = np.random.default_rng(0)
BEGIN = {
    "is": "begin",
    "executor": 0,
    "rank": 0,
    "sizes": {},
    "coords": {},
    "dtype": "float64",
    "parameters": [],
    "states": {},
}


def close(a: Any, b: Any) -> None:
    assert [x is None for x in a] == [y is None for y in b]
    np.testing.assert_allclose([x for x in a if x is not None], [y for y in b if y is not None], rtol=1e-11, atol=1e-11)


def added(parts: list[Sums]) -> list[float]:
    return [sum(values) for values in zip(*parts, strict=True)]  # type: ignore[arg-type]


def test_slices_add_up_to_the_whole() -> None:
    x = RANDOM.normal(size=(12, 10))
    r, c = factors(PLACES, np.arange(12)), run_of(COLUMNS, 0, 10)
    whole = sums.of_array(x, r, c)
    cut = [
        sums.of_array(x[i : i + 4, j : j + 5], factors(PLACES, np.arange(i, i + 4)), run_of(COLUMNS, j, 5))
        for i in (0, 4, 8)
        for j in (0, 5)
    ]
    close(whole, added(cut))
    assert whole.both == pytest.approx(float(r @ x @ c))
    assert whole.rows == pytest.approx(float(r @ x.sum(1)))


def test_linear_sums_of_summands_add_up() -> None:
    x, y = RANDOM.normal(size=(2, 6, 4))
    r, c = factors(PLACES, np.arange(6)), run_of(COLUMNS, 0, 4)
    total, parts = sums.of_array(x + y, r, c), [sums.of_array(each, r, c) for each in (x, y)]
    for name in ("plain", "rows", "columns", "both"):
        assert getattr(total, name) == pytest.approx(sum(getattr(part, name) for part in parts))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (), (1,), (5,)])
def test_small_and_empty_arrays(shape: tuple[int, ...]) -> None:
    x = np.full(shape, 2.0, np.float32)
    rectangle = tuple(slice(0, length) for length in shape)
    of = sums.of_slab(x, rectangle)
    assert (of.elements, of.plain, of.size, of.squares) == (x.size, 2.0 * x.size, 2.0 * x.size, 4.0 * x.size)
    assert sums.exact(x, shape, rectangle) != 0 or not x.size


def test_recipes_have_the_sums_of_what_they_make() -> None:
    a, b = RANDOM.normal(size=(6, 9)), RANDOM.normal(size=(9, 4))
    r, c = sums.factors_of_slab((slice(2, 8), slice(4, 8)))
    close(sums.of_gradient(Product(a, b, np.dtype("f8")), r, c)[:2], sums.of_array(a @ b, r, c)[:2])
    close(sums.of_gradient(Product(a, b, np.dtype("f8")), r, c)[4:], sums.of_array(a @ b, r, c)[4:])
    ids, rows = np.array([3, 0, 3, 5]), RANDOM.normal(size=(4, 4))
    table = RowSum(ids, rows, (6, 4))
    close(sums.of_gradient(table, r, c)[4:], sums.of_array(table.unrounded(), r, c)[4:])
    of_groups = GroupedProduct(RANDOM.normal(size=(7, 3)), RANDOM.normal(size=(7, 5)), (4, 0, 3), np.dtype("f8"))
    rectangle = (slice(1, 4), slice(0, 3), slice(5, 10))
    r, c = sums.factors_of_slab(rectangle)
    found = sums.of_gradient(of_groups, r, c, sums.inner_factors(rectangle))
    assert found is not None
    whole = sums.of_array(of_groups.unrounded(), r, c)
    close([*found[:2], *found[4:]], [*whole[:2], *whole[4:]])


def test_the_exact_hash_adds_up_and_any_bit_or_place_changes_it() -> None:
    x = RANDOM.normal(size=(6, 4)).astype(np.float32)
    whole = sums.exact(x, (6, 4), (slice(0, 6), slice(0, 4)))
    parts = [
        sums.exact(x[i : i + 3, j : j + 2], (6, 4), (slice(i, i + 3), slice(j, j + 2))) for i in (0, 3) for j in (0, 2)
    ]
    assert whole == sum(parts) % (1 << 64)
    for place in np.ndindex(6, 4):
        y = x.copy()
        y[place] = np.nextafter(y[place], np.float32(9))
        assert sums.exact(y, (6, 4), (slice(0, 6), slice(0, 4))) != whole
    assert sums.exact(x[[1, 0, 2, 3, 4, 5]], (6, 4), (slice(0, 6), slice(0, 4))) != whole


def test_factors_are_of_both_signs_and_never_small() -> None:
    found = factors(PLACES, np.arange(4000))
    assert 0.5 <= np.abs(found).min() <= np.abs(found).max() < 1.5
    assert abs(found.mean()) < 0.05
    assert len(np.unique(found)) == 4000
    assert not np.array_equal(found[:10], factors(COLUMNS, np.arange(10)))
    np.testing.assert_array_equal(
        block_of(COLUMNS, (0, 2), (2, 3)), np.outer(run_of(COLUMNS, 0, 2), run_of(COLUMNS, 2, 3)).reshape(-1)
    )


@dataclass
class Rows:
    inputs: np.ndarray
    places: np.ndarray
    positions: np.ndarray


def test_a_batch_is_the_same_in_any_parts_and_another_with_any_two_tokens_swapped() -> None:
    tokens, places, positions = RANDOM.integers(0, 9, (4, 6)), np.arange(4), np.arange(6)
    whole = hashes(Rows(tokens, places, positions))["inputs"]
    parts = [
        hashes(Rows(tokens[i::2, j : j + 3], places[i::2], positions[j : j + 3]))["inputs"]
        for i in (0, 1)
        for j in (0, 3)
    ]
    assert whole == sum(parts) % (1 << 64)
    tokens[0, 0], tokens[1, 0], tokens[0, 1] = 3, 4, 5
    before = hashes(Rows(tokens, places, positions))["inputs"]
    for at in (([0, 1], 0), (0, [0, 1])):  # two rows, two tokens of a row
        other = tokens.copy()
        other[at] = other[at][::-1]
        assert hashes(Rows(other, places, positions))["inputs"] != before
    points = RANDOM.normal(size=(4, 3))
    assert hashes({"x": points}) == hashes({"x": points[::-1]})  # of rows that nobody has numbered the order is free


@pytest.mark.parametrize(("word", "plain", "elements"), [("S", 3.0, 4), ("P", 3.0, 2), ("R", 1.0, 2)])
def test_passes_add_up_as_the_value_lies_over_replicas(word: str, plain: float, elements: int) -> None:
    which = Which(0, "block", "linear", 0, "linear", "a.py:1", 0)
    one, two = sums.of_array(np.full(2, 0.5)), sums.of_array(np.full(2, 1.0))
    entry = Entry(which, "F", 0, {"edp": word}, one, 7)
    entry.add(two if word != "R" else one, 7)
    assert (entry.of.plain, entry.of.elements, entry.passes, entry.spoiled) == (plain, elements, 2, False)
    entry.add(two, 8)
    assert entry.spoiled == (word == "R")  # it should be the same in all passes


# ------------------------------------------------------------------------------------------------------ adding up ranks


def seen(rank: int, coords: dict[str, int], lies: dict[str, str], x: np.ndarray) -> Seen:
    of = sums.of_array(x)
    return Seen(rank, coords, 0, ["linear", "a.py:1", 3, lies], [*of, sums.crc(x), 1])


KEY = ("F", 0, "block", "linear", 0, 0)
NAME = ("F", "block", "linear", 0, 0)


@pytest.mark.parametrize(("word", "elements", "plain"), [("S", 8, 12.0), ("P", 4, 12.0), ("R", 4, 4.0)])
def test_ranks_add_up_as_the_value_lies(word: str, elements: int, plain: float) -> None:
    one, two = np.full((2, 2), 1.0), np.full((2, 2), 1.0 if word == "R" else 2.0)
    ranks = [seen(0, {"tp": 0}, {"tp": word}, one), seen(1, {"tp": 1}, {"tp": word}, two)]
    (whole,) = wholes({KEY: ranks}, {"tp": 2}).values()
    assert (whole.of.elements, whole.of.plain) == (elements, plain)
    assert (whole.of.size is None) == (word == "P")
    assert whole.of.split is None


def test_ranks_that_should_hold_the_same_and_do_not_are_told() -> None:
    x = RANDOM.normal(size=(2, 2))
    ranks = [seen(r, {"edp": r}, {"edp": "R"}, x * (1 + 1e-15 * (r == 2))) for r in range(4)]
    (whole,) = wholes({KEY: ranks}, {"edp": 4}).values()
    assert whole.of.split is not None
    assert (whole.of.split.odd, whole.of.split.others) == ((2,), (0, 1, 3))


def test_what_cannot_be_added_up_is_left_out() -> None:
    x = RANDOM.normal(size=(2, 2))
    two = {"tp": 2}
    assert not wholes({KEY: [seen(0, {"tp": 0}, {"tp": "S"}, x)]}, two)  # a rank is missing
    unknown = [seen(r, {"tp": r}, {"tp": "?"}, x * r) for r in (0, 1)]
    assert not wholes({KEY: unknown}, two)
    own = [seen(r, {"tp": r}, {"tp": "O"}, x) for r in (0, 1)]
    assert not wholes({KEY: own}, two)
    on_two_stages = {KEY: [seen(0, {}, {}, x)], (KEY[0], 1, *KEY[2:]): [seen(1, {}, {}, x)]}
    assert not wholes(on_two_stages, {})


def test_slabs_of_a_parameter_count_once_each() -> None:
    x = RANDOM.normal(size=(4, 3))
    places = [(slice(0, 2), slice(0, 3)), (slice(2, 4), slice(0, 3))]

    def told(place: tuple[slice, ...]) -> tuple[list[Any], list[Any]]:
        slab = ["w", [4, 3], [[p.start, p.stop] for p in place]]
        part = x[place]
        return [slab], [[*sums.of_slab(part, place), sums.exact(part, (4, 3), place)]]

    held = [(rank, *told(places[rank % 2])) for rank in range(4)]
    found = tensors(held, has_hash=True)["w"]
    whole = (slice(0, 4), slice(0, 3))
    assert found.exact == sums.exact(x, (4, 3), whole)
    assert found.of.both == pytest.approx(sums.of_slab(x, whole).both)
    assert not found.problem
    assert "6 of its 12" in tensors(held[::2], has_hash=True)["w"].problem


# --------------------------------------------------------------------------------------------------------------- bounds


def parts(x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
    return tuple(part_of([*sums.of_array(z), 0], 0) for z in (x, y))  # type: ignore[return-value]


def test_a_difference_is_large_or_small_against_the_size_of_the_value() -> None:
    x = RANDOM.normal(size=(20, 5))
    relative = precision_of(["float64", "float64"], 64).relative(10)
    for factor, parted in ((1 + 1e-13, False), (1 + 1e-8, True)):
        found = gap(*parts(x, x * factor), relative, 0.0)
        assert found is not None
        assert (found.share > 1) == parted
    assert gap(*parts(x, x[:10]), relative, 0.0) is None  # not as many elements
    nan = gap(*parts(x, np.where(x == x[0, 0], np.nan, x)), relative, 0.0)
    assert nan is not None
    assert nan.share == np.inf


def test_coarser_precisions_allow_more() -> None:
    allowed = [precision_of([name, "float64"], 64).relative(50) for name in ("float64", "float32", "bfloat16")]
    assert allowed[0] == 1e-10 < 1e-6 < allowed[1] < 1e-3 < allowed[2]
    assert precision_of(["float32", "what"], 64).name == "what"  # nobody knows: coarse


# ---------------------------------------------------------------------------------------------------------------- files


def record(step: int, loss: float) -> dict[str, Any]:
    values = [[[*KEY], ["linear", "a.py:1", 3, {"tp": "S"}], [1, loss, None, 1.0, None, None, None, 7, 1]]]
    return {"is": "step", "executor": 0, "step": step, "values": values, "numbers": {"loss": loss}}


def test_files_give_back_what_was_written_also_cut_ones(tmp_path: Path) -> None:
    path = tmp_path / name_of(0)
    writer = Writer(path, 1 << 20, True)
    for each in (BEGIN, record(1, 0.5), record(2, 0.25)):
        writer(each)
    writer.close()
    found = RankDigests(path)
    assert found.steps == [(0, 1), (0, 2)]
    assert found.step(0, 2)["values"] == [tuple(record(2, 0.25)["values"][0])]
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        for step in (cut := RankDigests(path)).steps:
            assert cut.step(*step)["numbers"]["loss"] == 2.0 ** -step[1]
    path.write_bytes(data[:-5])  # a run that was killed goes on in the same folder
    writer = Writer(path, 1 << 20, True)
    for each in (BEGIN, record(2, 0.125)):
        writer(each)
    assert RankDigests(path).step(0, 2)["numbers"]["loss"] == 0.125
    assert RankDigests(path).step(0, 1)["values"]


def test_a_full_file_ends_the_digests_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer(tmp_path / name_of(0), 900, True)
    for each in (BEGIN, *(record(step, 0.5) for step in range(1, 9))):
        writer(each)
    assert capsys.readouterr().err.count("goes without digests") == 1
    assert os.path.getsize(tmp_path / name_of(0)) <= 900
    assert RankDigests(tmp_path / name_of(0)).steps


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("")
    os.symlink(tmp_path / "target", tmp_path / name_of(0))
    with pytest.raises(OSError, match="symbolic"):
        Writer(tmp_path / name_of(0), 900, True)
    with pytest.raises(DataError):
        read(tmp_path)


HOSTILE = [
    "",
    "[]",
    "nonsense",
    '{"is": "begin"}',
    json.dumps({**BEGIN, "sizes": {"tp": 1e300}}),
    json.dumps({**BEGIN, "parameters": [["w", [4], [[0]]]]}),
    json.dumps({**BEGIN, "rank": True}),
    json.dumps(BEGIN) + '\n{"is": "keys", "first": 0, "keys": [[["F"], []]]}',
    json.dumps(BEGIN) + '\n{"is": "keys", "first": 7, "keys": []}',
    json.dumps(BEGIN) + "\n" + "[" * 100_000,
    json.dumps(BEGIN) + '\n{"is": "step", "executor": 0, "step": 1, "values": [[0, [1]], [-1, []], 3, [9, null]]}',
    json.dumps(BEGIN) + '\n{"is": "step", "executor": 0, "step": 99999999999999999999}',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_digest_is_not_believed(text: str, tmp_path: Path) -> None:
    (tmp_path / name_of(0)).write_text(text + "\n")
    try:
        ranks = read(tmp_path)
    except DataError:
        return
    for of in ranks.values():
        for step in of.steps:
            assert of.step(*step)["values"] == []
    assert LONGEST_LINE < 1 << 30

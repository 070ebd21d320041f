"""What ranks compare in checked mode: fingerprints, the words of a call in the source, and the order of calls."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.comm import call_order, site
from mpitrain.comm.call_order import CallOrder, Swap
from mpitrain.comm.fingerprint import WORDS, Fingerprint, differ, fingerprint, tell_apart
from mpitrain.comm.page import stable_hash
from mpitrain.comm.site import caller_of, words_of
from mpitrain.comm.slices import told_lengths

HERE = "test_fingerprint.py"


def made(
    verb: str = "all_reduce", shape: tuple[int, ...] = (4, 2), how: tuple[Any, ...] = ("sum", None)
) -> Fingerprint:
    return fingerprint(41, verb, np.zeros(shape), how, (7, "a.py:3"), False)


# -- fingerprints


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=90))
def test_a_fingerprint_arrives_as_it_was_sent(name: str) -> None:
    mine = made()._replace(site=f"{name}:12")
    packed = mine.pack()
    assert len(packed) == 8 * WORDS
    there = Fingerprint.unpack(packed)
    assert there[:-1] == mine[:-1]
    assert mine.site.endswith(there.site.lstrip("�"))
    assert there.site.endswith(":12")


def test_it_reads_as_reports_have_it() -> None:
    assert made().told(False) == "all_reduce (4, 2) float64 at a.py:3"
    assert made().told(True) == "all_reduce (4, 2) float64 sum at a.py:3"
    assert made("barrier", (), ()).told(True) == "barrier () float64 at a.py:3"
    prints = [made(), made(), made("broadcast", (4, 2), (1,)), made()]
    assert tell_apart(prints, (10, 11, 12, 13)) == (
        "ranks 10,11,13 all_reduce (4, 2) float64 at a.py:3; rank 12 broadcast (4, 2) float64 at a.py:3"
    )
    numbered = [made(), made()._replace(number="42")]
    assert tell_apart(numbered, (0, 1)).startswith("rank 0 (call 41) all_reduce (4, 2)")
    assert differ(numbered)


def test_a_report_of_many_ranks_in_many_places_is_short() -> None:
    prints = [made(shape=(rank % 7, 1)) for rank in range(1000)]
    said = tell_apart(prints, range(1000))
    assert len(said) < 400
    assert said.startswith("ranks 0,7,14,21,28,35,42,49,...,987,994 all_reduce (0, 1) float64 at a.py:3; ranks 1,8,")
    assert said.endswith("; 428 more elsewhere")


def test_the_shapes_of_an_all_to_all_may_differ_and_those_of_others_may_not() -> None:
    def uneven(length: int) -> Fingerprint:
        return made("all_to_all", (length, 2), (0, 0, [1, length - 1], [1, 2]))

    assert not differ([uneven(3), uneven(4)])
    assert uneven(3).even == ""
    assert made("all_to_all", (4, 2), (0, 0, [2, 2], [2, 2])).even == "even"
    assert differ([made(shape=(3,)), made(shape=(4,))])


def test_lengths_of_slices_are_compared_and_the_slice_of_a_rank_is_not() -> None:
    def of_rank(rank: int, *counts: int) -> Fingerprint:
        return made("all_gather", (counts[rank], 2), (0, counts, None))

    assert not differ([of_rank(0, 3, 0, 4), of_rank(1, 3, 0, 4), of_rank(2, 3, 0, 4)])
    assert differ([of_rank(0, 3, 0, 4), of_rank(1, 3, 1, 4)])
    assert differ([of_rank(0, 3, 0, 4), of_rank(1, 2, 1, 4)])
    assert differ([of_rank(0, 3, 0), made("all_gather", (3, 2), (0, None, None))])
    assert of_rank(1, 3, 0, 4).told(True) == "all_gather (7, 2) float64 dim 0 in slices of 3,0,4 at a.py:3"
    scattered = made("reduce_scatter", (7, 2), (0, [3, 0, 4], None))
    assert scattered.told(True) == "reduce_scatter (7, 2) float64 dim 0 in slices of 3,0,4 at a.py:3"
    assert made("reduce_scatter", (6, 2), (0, None, None)).how == "dim 0"


def test_sums_in_rank_order_are_other_calls_than_those_of_the_library() -> None:
    for verb, how in (
        ("all_reduce", "sum"),
        ("iall_reduce", "max"),
        ("reduce_scatter", "dim 0"),
        ("ireduce_scatter", "dim 0"),
        ("iall_gather", "dim 0"),
    ):
        arguments = (how, None) if "reduce" in verb and "scatter" not in verb else (0, None, None)
        made_in_order = fingerprint(1, verb, np.zeros((4, 2)), arguments, (7, "a.py:3"), True)
        assert made_in_order.how == how + (" in rank order" if "reduce" in verb else "")


def test_many_lengths_are_compared_by_a_number_that_stands_for_them() -> None:
    one = [100_000 + rank for rank in range(1000)]
    other = [*one[:-2], one[-1], one[-2]]
    texts = [told_lengths(counts) for counts in (one, other, one)]
    assert texts[0] == texts[2] != texts[1]
    assert texts[0].startswith("100000,100001,100002,...")
    assert max(map(len, texts)) <= 40
    longest = [
        fingerprint(
            10**9, "ireduce_scatter", np.zeros((1,) * 33, "c16"), (0, counts, None), (2**64 - 1, "a.py:3"), True
        )
        for counts in (one, other)
    ]
    assert differ(longest)
    assert all(Fingerprint.unpack(each.pack())[:-1] == each[:-1] for each in longest)


# -- the words of a call


def here() -> FrameType:
    return sys._getframe(1)


def test_one_call_on_two_lines_has_the_same_words_and_another_one_other_words() -> None:
    def call(first: int, second: int = 0) -> str:
        return words_of(sys._getframe(1))

    a = b = 1
    found = [
        call(a),
        call(a, 2),
        call(  # over several lines
            b
        ),
    ]
    again = [
        call(a),
        call(b),
    ]
    name = f"{HERE} test_one_call_on_two_lines_has_the_same_words_and_another_one_other_words"
    if sys.version_info >= (3, 11):
        assert found == [f"{name} call(a)", f"{name} call(a, 2)", f"{name} call( # over several lines b )"]
    else:
        assert found == [f"{name} call(a),", f"{name} call(a, 2),", f"{name} call(  # over several lines"]
    assert again[0] == found[0]
    assert again[1] not in found
    inside = (lambda: call(a))()
    assert inside != found[0]  # another function


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not know where in its line a call stands")
def test_two_calls_in_one_line_have_their_own_words() -> None:
    a, b = words_of(here()), words_of(sys._getframe())
    assert a.endswith(" words_of(here())") or a.endswith(" here()")
    assert a != b


def test_without_positions_the_line_stands_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    words = words_of(here())
    assert words == f"{HERE} test_without_positions_the_line_stands_for_the_call words = words_of(here())"


def test_without_source_the_place_in_the_bytecode_stands_for_the_call() -> None:
    scope: dict[str, Any] = {"words_of": words_of, "sys": sys}
    code = "def two():\n    return words_of(sys._getframe()), words_of(sys._getframe())"
    exec(compile(code, "/nowhere/found.py", "exec"), scope)
    one, other = scope["two"]()
    assert one != other
    assert one.startswith("found.py two ")
    assert scope["two"]() == (one, other)


def test_the_way_through_the_plumbing_tells_two_functions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def one() -> tuple[FrameType | None, int]:
        return caller_of(sys._getframe())

    def other() -> tuple[FrameType | None, int]:
        return caller_of(sys._getframe())

    assert one()[0] is not None
    assert one()[1] == other()[1] == 0  # no plumbing here
    monkeypatch.setattr(site, "_PLUMBING", (__file__,))
    assert one()[1] != other()[1]
    assert one()[1] == one()[1]


# -- the order of calls

PLACES = [stable_hash("place", n) for n in range(8)]


def told(*columns: list[int]) -> list[tuple[int, Swap]]:
    """What is told of these members' calls: (number of the call, what)."""
    order = CallOrder()
    rows = list(zip(*columns, strict=True))
    found = [(number, order.swap("sum", number, [PLACES[n] for n in row])) for number, row in enumerate(rows, start=1)]
    return [(number, swap) for number, swap in found if swap is not None]


def test_two_calls_that_are_swapped_are_told_at_the_second() -> None:
    assert told([0, 1, 2, 3], [0, 2, 1, 3]) == [(3, Swap(0, 1, 2))]
    assert told([0, 1], [0, 1], [1, 0], [0, 1]) == [(2, Swap(1, 2, 1))]
    assert told([0, 1, 2], [1, 2, 0]) == [(3, Swap(0, 1, 1))]


def test_a_call_too_many_is_told_within_a_turn_of_the_loop() -> None:
    assert told([0, 1, 2, 0, 1, 2, 0], [0, 7, 1, 2, 0, 1, 2])[0] == (5, Swap(0, 1, 3))


def test_ranks_with_lines_of_their_own_are_let_through() -> None:
    assert told([0, 1] * 50, [2, 3] * 50, [2, 1] * 50) == []
    assert told([4, 0, 1], [5, 1, 0]) == [(3, Swap(0, 1, 2))]  # and yet a swap among them is told
    assert told([4, 5], [0, 1], [1, 0]) == [(2, Swap(1, 2, 1))]


@given(st.permutations(range(8)))
def test_any_other_order_of_the_same_calls_is_told(order: list[int]) -> None:
    assert bool(told(list(range(8)), order)) == (order != list(range(8)))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(4, 7)), max_size=200))
def test_no_order_of_calls_that_one_rank_alone_makes_is_told(calls: list[tuple[int, int]]) -> None:
    assert told([one for one, _ in calls], [other for _, other in calls]) == []


def test_calls_of_different_kinds_and_of_long_ago_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    order = CallOrder()
    assert order.swap("broadcast root 0", 1, [1, 2]) is None
    assert order.swap("broadcast root 1", 2, [2, 1]) is None  # roots that take turns
    monkeypatch.setattr(call_order, "_KEPT", 3)
    order = CallOrder()
    for number, place in enumerate(PLACES, start=1):
        assert order.swap("sum", number, [place, 5]) is None
    (difference,) = order._kinds["sum"]
    assert len(difference._seen) == 3

"""ZeRO on ranks that are threads: every stage in every layout is one rank's run, with equal bits where that can be."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_experts
import checks_zero as checks
from checks_layouts import SIZES, equals_one_rank, train

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config import parse
from mpitrain.config_rules import check_layout
from mpitrain.errors import ConfigError, DataError
from mpitrain.models.gpt import GPT
from mpitrain.optim.adam import AdamW
from mpitrain.parallel.data import FlatReducer
from mpitrain.parallel.zero import RowReducer
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

slow = pytest.mark.slow


def ranks_of(how: dict[str, Any]) -> int:
    return int(how.get("dp", 1) * how.get("tp", 1) * how.get("cp", 1) * how.get("pp", 1))


def run(ranks: int, check: Any, *args: Any, **how: Any) -> None:
    LocalWorld(ranks, timeout=60).run(lambda: check(world(), *args, **how))


# --------------------------------------------------------------------------------------------------------- every layout


def stages_of(cases: Any) -> list[Any]:
    """Each case at each stage; two of three are slow, others with the next case."""
    return [
        pytest.param(case, zero, marks=slow if zero != 1 + place % 3 else ())
        for place, case in enumerate(cases)
        for zero in checks.STAGES
    ]


@pytest.mark.parametrize(("name", "zero"), stages_of(checks.LAYOUTS))
def test_every_stage_in_every_layout_is_the_run_of_one_rank(name: str, zero: int) -> None:
    """T23.1, C46: loss, norm, gradients, weights, moments and evaluation, each with something else beside it."""
    how = checks.how_of(name, [*checks.LAYOUTS].index(name), zero)
    run(ranks_of(how), equals_one_rank, **how)


def everything() -> list[Any]:
    """Every layout at every stage with everything beside it, tied and not, with one and with four micro-batches."""
    found = []
    cases = product(checks.LAYOUTS, checks.STAGES, range(len(checks.EXTRAS)), (False, True), (1, 4), (0, 1, 2048))
    for number, (name, zero, extra, tied, micros, bucket_bytes) in enumerate(cases):
        how = {**checks.LAYOUTS[name], **checks.EXTRAS[extra], "zero": zero, "tied": tied, "steps": 3}
        if "adafactor" in how:
            how.pop("sgd", None)
        if "chunks" not in how:
            how["micros"] = micros
        how |= {"prefetch": (0, 1, 3)[number % 3], "bucket_bytes": bucket_bytes, "batch": 8 * how.get("dp", 1)}
        found.append(pytest.param(how, id=f"{number} {name} zero{zero}"))
    return found


@slow
@pytest.mark.parametrize("how", everything()[::11])
def test_so_it_is_with_everything_beside_it(how: dict[str, Any]) -> None:
    run(ranks_of(how), equals_one_rank, **how)


EXPERTS = [
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2, "micros": 2, "adafactor": True},
    {"dp": 4, "ep": 4, "bucket_bytes": 2048},
    {"dp": 4, "ep": 2, "tp": 2, "sp": True, "overlap": True, "recompute": ("blocks.*",)},
    {"dp": 2, "ep": 2, "cp": 2, "recompute": ("blocks.*.mlp",), "bucket_bytes": 2048},
    {"pp": 2, "dp": 2, "ep": 2, "micros": 4, "schedule": "zb-h1"},
]


@pytest.mark.parametrize(("how", "zero"), stages_of(EXPERTS), ids=str)
def test_so_it_is_with_experts_whose_weights_are_dealt_out_over_those_who_share_them(
    how: dict[str, Any], zero: int
) -> None:
    routing = checks_experts.router("switch" if zero == 1 else "gshard", 1.0)
    run(ranks_of(how), equals_one_rank, sizes=checks_experts.sizes(routing), zero=zero, steps=2, **how)


@pytest.mark.parametrize("zero", checks.STAGES)
def test_experts_may_get_no_token(zero: int) -> None:
    """C53: all tokens go to one, so ranks that hold the others have nothing to send but zeros."""
    how = {"dp": 4, "ep": 2, "empty_rank": 0, "zero": zero}
    run(4, checks_experts.one_expert_has_all_tokens, checks_experts.router("switch", 1.25), **how)


# ----------------------------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize(
    "how",
    [
        {"dp": 2},
        {"dp": 3, "micros": 4},
        {"dp": 4, "micros": 2, "bucket_bytes": 2048},
        {"dp": 8, "sgd": True},
        {"dp": 2, "tp": 2, "sp": True, "bucket_bytes": 1},
        {"dp": 2, "cp": 2, "adafactor": True},
        {"pp": 2, "dp": 2, "micros": 4, "schedule": "zb-h1"},
        {"dp": 4, "dtype": "float16"},
        {"dp": 2, "dtype": "float32", "micros": 2, "recompute": ("blocks.*",)},
    ],
    ids=str,
)
def test_stages_have_the_same_bits_where_they_add_in_the_same_order(how: dict[str, Any]) -> None:
    """T23.1: also in float32 and in halves, whose gradients travel as halves in every stage."""
    run(ranks_of(how), checks.stages_have_the_same_bits, tied=how.get("pp", 1) == 1, **how)


@pytest.mark.parametrize("how", [{"dp": 4, "micros": 2}, {"pp": 2, "dp": 2, "micros": 2, "tied": True}], ids=str)
def test_neither_buckets_nor_prefetch_change_a_bit(how: dict[str, Any]) -> None:
    run(4, checks.nothing_depends_on_messages, **how)


@pytest.mark.parametrize(
    ("ranks", "how"), [(4, {"dp": 4}), (4, {"dp": 2, "pp": 2, "micros": 2}), (2, {"dp": 2, "micros": 2})]
)
def test_stages_skip_the_same_steps(ranks: int, how: dict[str, Any]) -> None:
    run(ranks, checks.a_skipped_step_changes_nothing, **how)


@pytest.mark.parametrize("zero", checks.STAGES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_nobody_uses_has_a_gradient_of_zero(ranks: int, zero: int) -> None:
    """Also on one rank, where nothing is dealt out whatever is asked for."""
    run(ranks, checks.a_matrix_that_nobody_uses, zero)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("method", ["adamw", "adafactor"])
def test_parameters_of_1_7_13_and_1001_elements(ranks: int, method: str) -> None:
    """C54, T23.5: on eight ranks only some have one of the vectors of seven; a matrix is used by some ranks' data."""
    run(ranks, checks.odd_parameters, method=method, micros=1 + ranks % 2)


@pytest.mark.parametrize(
    "how", [{"clip": 0.3}, {"bucket_bytes": 64, "overlap": True, "micros": 3}, {"prefetch": 0}, {"method": "sgd"}]
)
def test_so_with_clipping_tiny_buckets_and_without_prefetch(how: dict[str, Any]) -> None:
    run(8, checks.odd_parameters, **how)


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("method", ["adamw", "adafactor"])
def test_a_run_goes_on_on_any_number_of_ranks_and_at_any_stage(tmp_path: Path, method: str) -> None:
    """C55, T23.6: four ranks, six, one, eight, four: what is read is what was saved, and the run is one rank's."""
    before, done = None, 0
    straight = LocalWorld(1).run(lambda: checks.Run(world(), method=method).steps(0, 10).found())[0]
    for ranks, zero in ((4, 1), (6, 3), (1, 2), (8, 0), (4, 2)):
        args = str(tmp_path), zero, done, done + 2, method
        found = LocalWorld(ranks).run(lambda args=args: checks.go_on(world(), *args))
        loaded, after = found[0]
        if before is not None:
            checks.same_state(loaded, before)
        before, done = after, done + 2
    checks.same_state(before, straight, exact=False)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_back_on_the_same_ranks_a_run_has_the_bits_of_one_that_was_not_broken_off(tmp_path: Path, zero: int) -> None:
    """C55, through another number of ranks, which changes nothing of what was saved."""

    def straight() -> Any:
        return checks.Run(world(), zero).steps(0, 4).found()

    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    LocalWorld(4).run(lambda: checks.go_on(world(), first, zero, 0, 2))

    def copied() -> None:
        run = checks.Run(world(), 1).load(checks.folder_of(first, 2))
        run.save(Path(second), 2)

    LocalWorld(6).run(copied)
    _, after = LocalWorld(4).run(lambda: checks.go_on(world(), second, zero, 2, 4))[0]
    checks.same_state(after, LocalWorld(4).run(straight)[0])


# ----------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("zero", checks.STAGES)
def test_a_run_does_not_depend_on_being_looked_at(zero: int) -> None:
    """Evaluation after a step brings the weights, and drops what was on its way."""
    how = {"sizes": replace(SIZES, layers=1), "dp": 2, "zero": zero, "steps": 2}

    def main() -> None:
        checks.same_bits(train(world(), **how), train(world(), **how), "twice the same")

    LocalWorld(2).run(main)


def test_ranks_may_have_other_numbers_of_batches_unless_they_hold_rows_of_each_others_weights() -> None:
    """In stage 3 every rank takes part in every pass, so it is refused on all of them before any hangs."""

    def main(zero: int) -> float:
        run = checks.Run(world(), zero).steps(0, 1)
        dp = run.mesh.dp
        return run.executor.evaluate([checks.numbers_of(9 + n).share(dp.rank, dp.size) for n in range(1 + dp.rank)])

    losses = {loss for zero in (0, 1, 2) for loss in LocalWorld(2).run(main, zero)}
    assert len(losses) == 1
    with pytest.raises(DataError, match="rank 0 ran out of batches, after 1, while rank 1 has more"):
        LocalWorld(2, timeout=30).run(main, 3)


# -------------------------------------------------------------------------------------------------------------- refused


def test_an_optimizer_over_whole_parameters_is_refused_on_all_ranks() -> None:
    def main() -> None:
        mesh = Mesh(world())
        model = GPT(SIZES, mesh, zero=1)
        with pytest.raises(ConfigError, match=r"AdamW\(model\.shares\(\)"):
            Executor(model, AdamW(model.parameters()), mesh, complete("1f1b", ranks=1, microbatches=1))

    LocalWorld(2).run(main)


@pytest.mark.parametrize(
    ("zero", "call", "overlap"), [(1, 3, True), (2, 2, True), (2, 4, False), (3, 1, False), (3, 4, True)]
)
def test_a_step_that_an_error_has_ended_is_made_once_more(zero: int, call: int, overlap: bool) -> None:
    run(2, checks.a_step_that_broke_off, zero, call, overlap)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_part_of_the_model_that_no_pass_comes_to_has_a_gradient_of_zero(zero: int) -> None:
    run(2, checks.a_part_that_no_pass_comes_to, zero)


@pytest.mark.parametrize(("zero", "cut"), [(0, True), (2, False)])
def test_a_reducer_of_another_kind_of_gradients_is_refused(zero: int, cut: bool) -> None:
    def main() -> None:
        mesh = Mesh(world())
        model = GPT(SIZES, mesh, zero=zero)
        reducer = RowReducer(model, mesh) if cut else FlatReducer(model.flats, mesh)
        with pytest.raises(ConfigError, match=f"the model has zero {zero}, but {type(reducer).__name__} is"):
            Executor(model, AdamW(model.shares()), mesh, complete("1f1b", ranks=1, microbatches=1), reducer=reducer)

    LocalWorld(2).run(main)


def test_a_stage_that_there_is_not_and_ranks_of_other_stages_are_refused() -> None:
    def other() -> None:
        mesh = Mesh(world())
        model = GPT(SIZES, mesh, zero=1 + mesh.world.rank)
        with pytest.raises(ConfigError, match=r"rank 1 updates by AdamW \(zero 2\) .*, rank 0 by AdamW \(zero 1\)"):
            Executor(model, AdamW(model.shares()), mesh, complete("1f1b", ranks=1, microbatches=1))

    LocalWorld(2).run(other)
    with pytest.raises(ConfigError, match="ZeRO has the stages 1, 2 and 3"):
        LocalWorld(1).run(lambda: GPT(SIZES, Mesh(world()), zero=4))


@pytest.mark.parametrize("flags", ["--schedule pipedream --microbatches 1 --clip 0", "--schedule pipedream-2bw"])
def test_schedules_that_do_not_drain_are_refused_by_name(flags: str) -> None:
    words = f"--pp 2 --zero 1 --layers 4 --steps 1 --microbatches 2 --batch 16 {flags}".split()
    with pytest.raises(ConfigError, match=rf"{flags.split()[1]} and --zero 1"):
        check_layout(parse(words), 2)

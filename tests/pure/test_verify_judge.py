"""The judge of `mpitrain verify`, on runs that are made by hand: what is equal, and what must never pass.

`run` makes the records of a tiny training run on any mesh; a test then spoils one number of one rank.
"""

from __future__ import annotations

import copy
import io
from itertools import product

import numpy as np
import pytest

from mpitrain.debug.capture import Record, read, write
from mpitrain.parallel.expert.counted import vector
from mpitrain.spec import INVARIANT, REPLICATE, Shard, Spec, slab
from mpitrain.verify.judge import judge
from mpitrain.verify.layouts import parse
from mpitrain.verify.suspect import hints

SHAPES = {"table": (6, 4), "up": (4, 8), "bias": (8,), "norm": (4,), "scale": ()}
SPECS = {
    "table": Spec({"tp": Shard(0)}),
    "up": Spec({"tp": Shard(1)}),
    "bias": Spec({"tp": Shard(0)}),
    "norm": Spec({"tp": REPLICATE}),
    "scale": Spec({"tp": INVARIANT}),
}
DECAYS = {"table": True, "up": True, "bias": False, "norm": False, "scale": False}
ORDER = ["scale", "norm", "bias", "up", "table"]
KINDS = ("gradient", "weight", "first_moment")


def value(kind: str, name: str, step: int) -> np.ndarray:
    seed = [KINDS.index(kind), list(SHAPES).index(name), step]
    return np.random.default_rng(seed).normal(size=SHAPES[name])


def held(stage: int, stages: int) -> list[str]:
    """What a stage holds: the first and the last share the table, those between hold nothing."""
    ends = {0: ["table", "up"], stages - 1: ["table", "bias", "norm", "scale"]}
    return list(SHAPES) if stages == 1 else ends.get(stage, [])


def run(dp: int = 1, tp: int = 1, steps: int = 2, pp: int = 1) -> list[list[Record]]:
    """The records of every rank of a run without a fault."""
    sizes = {"pp": pp, "edp": dp, "ep": 1, "cp": 1, "tp": tp}
    ranks = []
    for rank, (q, i, j) in enumerate(product(range(pp), range(dp), range(tp))):
        coords = {"pp": q, "edp": i, "ep": 0, "cp": 0, "tp": j}
        slabs = {name: slab(SHAPES[name], SPECS[name], coords, sizes) for name in held(q, pp)}

        def vector(kind: str, step: int, slabs: dict[str, tuple[slice, ...]] = slabs) -> np.ndarray:
            parts = [value(kind, name, step)[(..., *slabs[name])].reshape(-1) for name in slabs]
            return np.concatenate([np.empty(0), *parts])

        parameters = [
            [name, list(SHAPES[name]), [[s.start, s.stop] for s in slabs[name]], DECAYS[name]] for name in slabs
        ]
        begin = {"is": "begin", "rank": rank, "executor": 0, "sizes": sizes, "coords": coords, "parameters": parameters}
        records = [Record(begin, {"weight": vector("weight", 0)})]
        for step in range(1, steps + 1):
            own = 2.0 + i if q == pp - 1 else 0.0
            facts = {"is": "step", "executor": 0, "step": step, "order": ORDER, "own loss": own}
            facts |= {"targets": 8, "loss": 3.0 / step, "norm": 2.0, "learning rate": 0.1, "updates": step}
            records.append(Record(facts, {kind: vector(kind, step) for kind in KINDS}))
        ranks.append(records)
    return ranks


def spoiled(ranks: list[list[Record]]) -> list[list[Record]]:
    return copy.deepcopy(ranks)


def place_of(records: list[Record], name: str) -> slice:
    """Where a parameter lies in the vectors of a rank."""
    start = 0
    for other, _, rectangle, _ in records[0].facts["parameters"]:
        size = int(np.prod([b - a for a, b in rectangle], dtype=int))
        if other == name:
            return slice(start, start + size)
        start += size
    raise AssertionError(name)


def change(ranks, name, kind, step, which, how) -> list[list[Record]]:
    """The run with one tensor of one step changed on some ranks."""
    ranks = spoiled(ranks)
    for rank in which:
        vector = ranks[rank][step].arrays[kind]
        place = place_of(ranks[rank], name)
        vector[place] = how(vector[place])
    return ranks


ALONE = run()[0]


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 4), (2, 4), (1, 5)])
def test_a_run_without_a_fault_is_equal_on_every_mesh(dp, tp):
    verdict = judge(ALONE, run(dp, tp))
    assert verdict.ok, verdict.first
    assert verdict.steps == 2
    assert verdict.first is None
    # own parts before the steps, then all kinds of both; targets loss norm rate updates
    assert len(verdict.findings) == 5 + 2 * (3 * 5 + 5)
    assert all(finding.difference.error == 0 for finding in verdict.findings)


@pytest.mark.parametrize(("pp", "dp", "tp"), [(2, 1, 1), (2, 2, 1), (2, 1, 2), (3, 1, 1), (4, 2, 2)])
def test_stages_that_hold_their_own_tensors_or_none_make_a_whole(pp, dp, tp):
    verdict = judge(ALONE, run(dp, tp, pp=pp))
    assert verdict.ok, verdict.first
    assert len(verdict.findings) == len(judge(ALONE, run()).findings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_one_wrong_element_on_any_stage_is_found(kind, name):
    ranks = run(pp=3)
    stage = 0 if name in held(0, 3) else 2

    def spoil(slab):
        slab[-1] *= 1 + 1e-7
        return slab

    first = judge(ALONE, change(ranks, name, kind, 2, [stage], spoil)).first
    assert (first.step, first.kind, first.name) == (2, kind, name)


@pytest.mark.parametrize(("dp", "which", "axes"), [(1, [0], ("pp",)), (2, [0, 1], ("pp",)), (2, [5], ("pp", "edp"))])
def test_copies_of_a_tied_weight_must_have_the_same_bits_on_both_ends(dp, which, axes):
    """C44."""
    ranks = change(run(dp, pp=3), "table", "weight", 1, which, lambda a: a * (1 + 2.0**-52))
    first = judge(ALONE, ranks).first
    assert (first.name, first.split.axes) == ("table", axes)
    (said,) = (hint for hint in hints(first, parse(f"pp3,dp{dp}")) if hint.label == "replicas")
    assert said.text.endswith(f"along {' and '.join(axes).replace('edp', 'dp')} (the two stages that share it)")
    assert judge(ALONE, change(run(pp=3), "table", "gradient", 1, [0], lambda a: a * (1 + 1e-15))).ok


def test_a_tensor_that_its_stage_lacks_is_found():
    first = judge(ALONE, without(run(pp=2), "up", [0])).first
    assert (first.name, first.problem) == ("up", "no rank of the layout has it")
    assert judge(ALONE, without(run(pp=2), "table", [0])).ok  # one of two copies


def test_ranks_of_tp_must_compute_the_same_loss_on_the_last_stage():
    ranks = spoiled(run(tp=2, pp=2))
    ranks[3][1].facts["own loss"] += 1e-12
    first = judge(ALONE, ranks).first
    assert (first.kind, first.split.ranks, first.split.axes) == ("loss before it is summed", (2, 3), ("tp",))


def test_findings_come_in_the_order_of_execution():
    names = [(f.step, f.kind, f.name) for f in judge(ALONE, run(2, 2)).findings]
    assert names[:5] == [(1, "initial weight", name) for name in SHAPES]
    assert names[5:7] == [(1, "targets", ""), (1, "loss", "")]
    assert names[7:12] == [(1, "gradient", name) for name in ORDER]
    assert names[12:15] == [(1, "norm", ""), (1, "learning rate", ""), (1, "updates", "")]
    assert names[15:25] == [(1, kind, name) for kind in ("weight", "first_moment") for name in SHAPES]
    assert names[25] == (2, "targets", "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("step", [1, 2])
def test_one_wrong_element_of_any_tensor_on_any_rank_is_found(kind, name, rank, step):
    ranks = run(2, 2)
    place = place_of(ranks[rank], name)

    def spoil(slab):
        slab[-1] *= 1 + 1e-7
        return slab

    verdict = judge(ALONE, change(ranks, name, kind, step, [rank], spoil))
    assert place.stop > place.start
    assert not verdict.ok
    assert (verdict.first.step, verdict.first.kind, verdict.first.name) == (step, kind, name)


@pytest.mark.parametrize("number", ["targets", "loss", "norm", "learning rate", "updates"])
@pytest.mark.parametrize("ranks_off", [[0], [3], [0, 1, 2, 3]])
def test_a_wrong_number_is_found_also_where_one_rank_reports_it(number, ranks_off):
    ranks = spoiled(run(2, 2))
    for rank in ranks_off:
        ranks[rank][2].facts[number] *= 2
    first = judge(ALONE, ranks).first
    assert (first.step, first.kind) == (2, number)
    if len(ranks_off) == 4:
        assert (first.difference.factor, first.problem) == (2.0, "")
    else:
        assert "rank 0 reports" in first.problem


def test_numbers_of_which_no_sum_of_floats_is_part_must_be_exact():
    ranks = spoiled(run(2, 1))
    for records in ranks:
        records[1].facts["learning rate"] *= 1 + 1e-14
        records[1].facts["loss"] *= 1 + 1e-14
    assert [f.kind for f in judge(ALONE, ranks).findings if not f.ok] == ["learning rate"]


def test_initial_weights_are_compared_before_the_first_step():
    first = judge(ALONE, change(run(2, 1), "up", "weight", 0, [0, 1], lambda a: a + 1e-3)).first
    assert (first.what, first.step) == ("initial weight of up", 1)


@pytest.mark.parametrize("rank", range(4))
def test_ranks_of_a_tp_axis_must_compute_the_same_loss(rank):
    ranks = spoiled(run(2, 2))
    ranks[rank][1].facts["own loss"] += 1e-12
    first = judge(ALONE, ranks).first
    assert first.kind == "loss before it is summed"
    assert first.split.axes == ("tp",)


# ---------------------------------------------------------------------------------------------------------- replicas


def test_weights_of_replicas_must_have_the_same_bits_and_gradients_must_be_within_the_bound():
    nudge = lambda a: a * (1 + 1e-15)  # noqa: E731
    first = judge(ALONE, change(run(2, 2), "norm", "weight", 1, [3], nudge)).first
    assert first.difference.ok
    assert first.problem.startswith("ranks 1 and 3 hold the same part and differ by")
    assert judge(ALONE, change(run(2, 2), "norm", "gradient", 1, [3], nudge)).ok
    assert not judge(ALONE, change(run(2, 2), "norm", "gradient", 1, [3], lambda a: a * (1 + 1e-9))).ok


def test_a_sign_of_zero_is_a_difference_of_bits():
    zeros = lambda sign: lambda a: np.full_like(a, sign * 0.0)  # noqa: E731
    alone = change([ALONE], "norm", "weight", 1, [0], zeros(1.0))[0]
    ranks = change(run(2, 1), "norm", "weight", 1, [0], zeros(1.0))
    first = judge(alone, change(ranks, "norm", "weight", 1, [1], zeros(-1.0))).first
    assert first.problem == "ranks 0 and 1 hold the same part and differ in their bits"


@pytest.mark.parametrize(
    ("name", "which", "axes"),
    [
        ("norm", [1, 3], ("tp",)),
        ("norm", [2, 3], ("edp",)),
        ("norm", [3], ("edp", "tp")),
        ("up", [2], ("edp",)),  # its tp neighbours hold other parts
        ("scale", [1], ("edp", "tp")),
    ],
)
def test_replicas_that_differ_name_the_axes_along_which_they_do(name, which, axes):
    first = judge(ALONE, change(run(2, 2), name, "weight", 1, which, lambda a: a + 1e-3)).first
    assert (first.name, first.split.axes) == (name, axes)


def test_only_the_ranks_whose_part_is_wrong_are_named():
    first = judge(ALONE, change(run(2, 2), "up", "gradient", 1, [1, 3], lambda a: 2 * a)).first
    assert (first.name, first.ranks, first.problem) == ("up", (1, 3), "")
    assert judge(ALONE, change(run(2, 2), "up", "gradient", 1, range(4), lambda a: 2 * a)).first.ranks == ()


# ------------------------------------------------------------------------------------------------ what is not there


def test_nothing_to_compare_is_not_equality():
    assert not judge([], []).ok
    assert not judge([], [[], []]).ok
    assert not judge(ALONE[:1], [records[:1] for records in run(2, 1)]).ok


@pytest.mark.parametrize("rank", range(2))
def test_a_step_that_one_rank_lacks_is_found(rank):
    ranks = spoiled(run(2, 1))
    del ranks[rank][-1]
    first = judge(ALONE, ranks).first
    assert (first.step, first.problem) == (2, f"rank {rank} of the layout ended before the end of step 2")


def test_a_step_that_only_the_layout_makes_is_found():
    first = judge(ALONE[:-1], run(2, 1)).first
    assert (first.step, first.problem) == (2, "one rank alone ended before step 2, which the layout made")


def test_a_rank_without_any_record_is_found():
    ranks = run(2, 1)
    assert judge(ALONE, [ranks[0], []]).first.problem == "rank 1 of the layout ended before the end of step 1"
    assert judge(ALONE, [[], []]).first.problem == "the layout ended before the end of step 1"


def test_ranks_at_different_executors_are_found():
    ranks = spoiled(run(2, 1))
    ranks[1][2].facts["step"] = 3
    assert "different executors" in judge(ALONE, ranks).first.problem


def without(ranks, name, which):
    """The run in which some ranks do not have a parameter at all."""
    ranks = spoiled(ranks)
    for rank in which:
        place = place_of(ranks[rank], name)
        for record in ranks[rank]:
            for kind, array in record.arrays.items():
                record.arrays[kind] = np.delete(array, place)
        parameters = ranks[rank][0].facts["parameters"]
        parameters[:] = [entry for entry in parameters if entry[0] != name]
    return ranks


def test_a_tensor_that_nobody_has_is_found():
    for name in SHAPES:
        first = judge(ALONE, without(run(1, 2), name, [0, 1])).first
        assert (first.name, first.problem) == (name, "no rank of the layout has it")
        (alone,) = without([ALONE], name, [0])
        assert judge(alone, run(1, 2)).first.problem == "one rank alone has no such tensor"


def test_a_part_that_nobody_holds_is_found():
    first = judge(ALONE, without(run(1, 2), "up", [1])).first
    assert (first.name, first.problem) == ("up", "no rank holds 16 of its 32 elements")


def test_a_tensor_of_another_shape_is_found():
    ranks = spoiled(run(2, 1))
    for records in ranks:
        (entry,) = (entry for entry in records[0].facts["parameters"] if entry[0] == "up")
        entry[1:3] = [[8, 4], [[0, 8], [0, 4]]]
    assert judge(ALONE, ranks).first.problem == "is (8, 4) in the layout, (4, 8) on one rank"
    assert "is (8, 4) as a whole on one rank, (4, 8) on rank 1" in judge(ALONE, [ranks[0], run(2, 1)[1]]).first.problem


def test_a_part_that_does_not_lie_in_the_tensor_is_found():
    ranks = spoiled(run(1, 2))
    (entry,) = (entry for entry in ranks[1][0].facts["parameters"] if entry[0] == "up")
    entry[2] = [[0, 4], [6, 10]]
    assert judge(ALONE, ranks).first.problem == "rank 1 holds a part of it that does not lie in (4, 8)"


def test_a_kind_of_state_that_some_ranks_lack_is_found():
    ranks = spoiled(run(2, 1))
    del ranks[1][2].arrays["first_moment"]
    first = judge(ALONE, ranks).first
    assert (first.step, first.kind) == (2, "first_moment")
    assert "rank 1 came to no end of the step" in first.problem
    alone = spoiled([ALONE])[0]
    del alone[1].arrays["first_moment"]
    assert judge(alone, run(2, 1)).first.problem == "one rank alone has none"


def test_a_vector_of_another_length_is_found():
    ranks = spoiled(run(2, 1))
    ranks[1][1].arrays["first_moment"] = ranks[1][1].arrays["first_moment"][:-1]
    assert judge(ALONE, ranks).first.problem == "rank 1 keeps 68 numbers of it for 69 of the model"


def test_nan_is_found_and_comes_first_in_the_table():
    ranks = change(run(2, 1), "up", "gradient", 2, [0, 1], lambda a: np.full_like(a, np.nan))
    ranks = change(ranks, "norm", "weight", 1, [0, 1], lambda a: a * 1e9)
    verdict = judge(ALONE, ranks)
    assert verdict.worst()[0].what == "gradient of up"
    assert verdict.first.what == "weight of norm"


def test_the_table_has_each_tensor_at_its_worst_step():
    ranks = change(run(2, 1), "up", "weight", 1, [0, 1], lambda a: a * (1 + 1e-8))
    ranks = change(ranks, "up", "weight", 2, [0, 1], lambda a: a * (1 + 1e-6))
    worst = judge(ALONE, ranks).worst()
    assert (worst[0].what, worst[0].step) == ("weight of up", 2)
    assert len({(f.kind, f.name) for f in worst}) == len(worst) == 5 + 5 + 3 * 5


# ------------------------------------------------------------------------------------------------------------- noise


LARGEST = max(np.abs(value("gradient", name, 1)).max() for name in SHAPES)
STEP = max(np.abs(value("weight", name, 1) - value("weight", name, 0)).max() for name in SHAPES if name != "bias")


def judged_with(name="bias", gradient=1e-17, layouts_gradient=-3e-17, gap=0.9e-6 * STEP, which=(0, 1)):
    """A run in which one tensor stays at zero and has small gradients, against one in which it has moved by `gap`."""
    fill = lambda number: lambda a: np.full_like(a, number)  # noqa: E731
    alone, ranks = [ALONE], run(2, 1)
    for step in (1, 2):
        alone = change(alone, name, "gradient", step, [0], fill(gradient))
        ranks = change(ranks, name, "gradient", step, [0, 1], fill(layouts_gradient))
    for step in (0, 1, 2):
        alone = change(alone, name, "weight", step, [0], fill(0.0))
        ranks = change(ranks, name, "weight", step, [0, 1], fill(0.0))
    return judge(alone[0], change(ranks, name, "weight", 1, which, fill(gap)))


SMALL = 1e-6 * LARGEST  # a gradient of which AdamW makes 1e-10 of a step
ALIKE = {"gradient": SMALL, "layouts_gradient": SMALL * (1 + 1e-11)}


def test_a_weight_with_next_to_no_gradient_may_differ_by_what_rounding_does_to_it():
    verdict = judged_with()
    assert verdict.ok, verdict.first
    assert verdict.moved == (8, pytest.approx(0.9e-6 * STEP))
    assert judged_with(gradient=0.0).ok
    assert judged_with(**ALIKE, gap=0.9e-8 * STEP).ok
    assert judge(ALONE, run(2, 1)).moved == (0, 0.0)


@pytest.mark.parametrize(
    "how",
    [
        {"gap": 1.1e-6 * STEP},
        {"which": (0,)},  # replicas
        {**ALIKE, "gap": 1.1e-8 * STEP},
        {"gradient": 1e-17, "layouts_gradient": SMALL, "gap": 1.1e-8 * STEP},  # as the larger of the two allows
        {"gradient": 0.0, "layouts_gradient": 0.0, "gap": 1e-12 * STEP},  # nothing moves it
        {"name": "up", "gap": 1e-7 * STEP},  # decays
        {"gap": np.nan},
        {"layouts_gradient": np.nan},
    ],
    ids=str,
)
def test_but_not_by_more_nor_elsewhere(how):
    verdict = judged_with(**how)
    assert any(f.kind == "weight" and not f.ok for f in verdict.findings)


# ------------------------------------------------------------------------------------------------------------ routing


def routed(ranks, change=lambda counted, rank: None):
    """The run with two layers of four experts; `change` may spoil what a rank reports of step 2."""
    ranks = spoiled(ranks)
    for rank, records in enumerate(ranks):
        for record in records[1:]:
            step = record.facts["step"]
            layers = {
                f"blocks.{n}.mlp": vector(
                    np.array([7, 9, 8 + n, 8 - n]),
                    dropped=3,
                    tokens=32,
                    entropy=40.5,
                    balance=8.25 * (n + 1),
                    z=15.0 / step,
                )
                for n in (0, 1)
            }
            record.facts.update(rows=8, counted={name: numbers.tolist() for name, numbers in layers.items()})
        change(records[2].facts["counted"], rank)
    return ranks


EXPERTS = routed(run())[0]


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_a_run_with_experts_is_equal_and_every_layer_is_compared(dp, tp):
    verdict = judge(EXPERTS, routed(run(dp, tp)))
    assert verdict.ok
    assert judge(ALONE, run(dp, tp)).ok
    kinds = [(f.kind, f.name) for f in verdict.findings if f.step == 2]
    layers = ["blocks.0.mlp", "blocks.1.mlp"]
    assert kinds[:2] == [("choices", name) for name in layers]
    sums = ("router entropy", "balance loss", "z-loss")
    assert sorted(kinds[2:8]) == sorted((kind, name) for kind in sums for name in layers)
    assert kinds[8:10] == [("targets", ""), ("rows", "")]


def test_one_token_that_chose_another_expert_is_found_first_and_is_told_from_a_bug():
    def other(counted, rank):
        counted["blocks.1.mlp"][0] += 1
        counted["blocks.1.mlp"][2] -= 1

    verdict = judge(EXPERTS, change(routed(run(2), other), "up", "gradient", 2, [0, 1], lambda a: a + 0.01))
    assert (verdict.first.step, verdict.first.what) == (2, "choices of blocks.1.mlp")
    found = {hint.label: hint.text for hint in hints(verdict.first, parse("dp2,ep2"))}
    assert found["error"] == "1 at [0], allowed 0: must be exactly equal"
    assert found["how"].startswith("so few that a token may have chosen between two experts whose probabilities")

    def many(counted, rank):
        counted["blocks.1.mlp"][0] += 5

    verdict = judge(EXPERTS, routed(run(2), many))
    found = {hint.label: hint.text for hint in hints(verdict.first, parse("dp2,ep2"))}
    assert found["how"].endswith("other factors elsewhere")


@pytest.mark.parametrize(
    ("place", "what"),
    [(4, "choices"), (5, "choices"), (6, "choices"), (7, "router entropy"), (8, "balance loss"), (9, "z-loss")],
)
def test_every_number_of_a_layer_is_compared_and_ranks_must_report_it_alike(place, what):
    def on_all(counted, rank):
        counted["blocks.0.mlp"][place] += 1e-6

    verdict = judge(EXPERTS, routed(run(2), on_all))
    assert verdict.first.what == f"{what} of blocks.0.mlp"

    def on_one(counted, rank):
        counted["blocks.0.mlp"][place] *= 1 + rank * 2.0**-52
        counted["blocks.0.mlp"][place] += rank * 1e-300

    verdict = judge(EXPERTS, routed(run(2), on_one))
    assert verdict.first.what == "choices of blocks.0.mlp"
    assert verdict.first.problem == "ranks 0 and 1 report other numbers"


def test_a_sum_of_losses_may_differ_by_rounding():
    def rounded(counted, rank):
        for numbers in counted.values():
            numbers[-3:] = [x * (1 + 1e-14) for x in numbers[-3:]]

    assert judge(EXPERTS, routed(run(2), rounded)).ok


def test_a_layer_that_one_side_counts_nothing_of_is_found():
    def without(counted, rank):
        counted.pop("blocks.1.mlp")

    assert judge(EXPERTS, routed(run(2), without)).first.what == "choices of blocks.1.mlp"
    assert judge(EXPERTS, run(2)).first.what == "choices of blocks.0.mlp"
    assert judge(ALONE, routed(run(2))).first.problem == "one rank alone has counted none of it, or other numbers"


def test_rows_must_be_exactly_equal():
    ranks = routed(run(2))
    for records in ranks:
        records[1].facts["rows"] = 9
    assert judge(EXPERTS, ranks).first.what == "rows"


# ------------------------------------------------------------------------------------------------------------- hints


def said(ranks, layout: str, alone=()):
    first = judge(ALONE, ranks).first
    return {hint.label: hint.text for hint in hints(first, parse(layout), [(parse(a), word) for a, word in alone])}


def times(factor, dp=2, tp=1, name="up", kind="gradient"):
    return change(run(dp, tp), name, kind, 1, range(dp * tp), lambda a: factor * a)


def test_a_factor_of_two_over_an_axis_of_two_is_called_doubled():
    found = said(times(2), "dp2")
    assert found["how"] == "2 times the value everywhere: doubled over an axis of size 2 (dp)"
    assert found["suspect"] == "dp"


def test_factors_are_read_by_the_sizes_of_the_axes():
    half = said(times(0.5), "dp2")["how"]
    assert half == "1/2 of the value everywhere: not summed, or averaged, over an axis of size 2 (dp)"
    assert said(times(4, 2, 4), "dp2,tp4")["how"].endswith("over an axis of size 4 (tp)")
    assert said(times(2, 2, 2), "dp2,tp2")["how"].endswith("over an axis of size 2 (dp or tp)")
    assert said(times(4, 2, 2), "dp2,tp2")["how"].endswith("over axes whose sizes multiply to 4")
    assert said(times(3), "dp2")["how"] == "3 times the value everywhere"
    assert said(times(0), "dp2")["how"].startswith("zero everywhere")
    assert said(times(-1), "dp2")["how"].startswith("the sign is turned")
    assert said(times(np.nan), "dp2")["how"].startswith("not a number")
    assert "other factors elsewhere" in said(change(run(2), "up", "gradient", 1, [0, 1], lambda a: a + 1), "dp2")["how"]


def test_a_tied_weight_is_counted_on_two_stages_of_however_many():
    assert said(times(2, 1, name="table"), "pp3")["how"].endswith("doubled over the two ends of pp")
    assert said(times(0.5, 1, name="table"), "pp4")["how"].endswith("not summed, or averaged, over the two ends of pp")
    assert said(times(2, 1, name="table"), "pp2")["how"].endswith("over an axis of size 2 (pp)")


def test_a_schedule_is_the_suspect_where_its_axis_is_equal_without_it():
    found = said(times(2, 1), "pp2,zb-h1", [("pp2", "equal")])
    assert found["suspect"] == "schedule zb-h1 on pp"
    assert said(times(2, 1), "pp2,zb-h1", [("pp2", "differs")])["suspect"] == "pp"
    parts = [("pp2", "equal"), ("pp2,zb-h1", "differs"), ("dp2", "equal")]
    assert said(times(2, 2), "pp2,dp2,zb-h1", parts)["suspect"] == "pp2,zb-h1"


def test_experts_are_the_suspect_where_dp_is_equal_without_them():
    assert said(times(2), "dp2,ep2")["how"].endswith("doubled over an axis of size 2 (dp or ep)")
    assert said(times(2), "dp2,ep2", [("dp2", "equal")])["suspect"] == "ep"
    assert said(times(2), "dp4,ep2", [("dp4", "equal"), ("dp2,ep2", "differs")])["suspect"] == "ep"
    assert said(times(2), "dp4,ep2", [("dp4", "differs"), ("dp2,ep2", "differs")])["suspect"] == "dp"
    assert said(times(2), "dp4,ep2", [("dp4", "equal"), ("dp2,ep2", "equal")])["suspect"].startswith(
        "dp and ep together"
    )
    parts = [("dp2", "equal"), ("dp2,ep2", "equal"), ("tp2", "differs")]
    assert said(times(2), "dp2,ep2,tp2", parts)["suspect"] == "tp"


def test_what_is_left_of_dp_beside_experts_is_counted_as_well():
    assert said(times(2), "dp4,ep2")["how"].endswith("doubled over an axis of size 2 (ep or edp)")
    assert said(times(3), "dp6,ep2")["how"].endswith("over an axis of size 3 (edp)")
    assert said(times(8), "dp4,ep2")["how"] == "8 times the value everywhere"


def test_a_norm_in_which_everything_is_counted_twice_is_the_root_of_two():
    ranks = spoiled(run(2, 1))
    for records in ranks:
        records[1].facts["norm"] *= 2**0.5
    assert "everything counted 2 times over an axis of size 2 (dp)" in said(ranks, "dp2")["how"]


@pytest.mark.parametrize(
    ("layout", "factor", "axes", "ways"),
    [
        ("dp2", 2, "dp", "mesh.dp.rank, mesh.dp.size"),
        ("cp2", 2, "cp", "positions=model.positions_here"),
        ("dp2,cp4,tp2", 4, "cp", "positions=model.positions_here"),
        ("dp2,cp2", 2, "dp or cp", "mesh.dp.rank, mesh.dp.size; positions=model.positions_here"),
        ("dp2,cp2", 4, "dp and cp", "mesh.dp.rank, mesh.dp.size; positions=model.positions_here"),
        ("dp4,tp2", 4, "dp", "mesh.dp.rank, mesh.dp.size"),
    ],
)
def test_targets_that_several_ranks_counted_are_said_to_be_the_same_part_of_the_batch(layout, factor, axes, ways):
    ranks = spoiled(run(2))
    for records in ranks:
        records[1].facts["targets"] *= factor
    found = said(ranks, layout)
    assert found["how"] == f"the ranks of {axes} counted the same targets: each rank must get its own part ({ways})"
    assert found["error"] == f"{8 * (factor - 1)}, allowed 0: must be exactly equal"
    assert found["suspect"] == axes.replace("and", "or")


def test_targets_are_not_counted_over_tp():
    ranks = spoiled(run(2))
    for records in ranks:
        records[1].facts["targets"] *= 2
    assert said(ranks, "tp2,dp3")["how"] == "2 times the value everywhere"


def test_replicas_decide_between_axes_that_a_factor_leaves_open():
    ranks = change(run(2, 2), "norm", "gradient", 1, [1, 3], lambda a: 2 * a)
    found = said(ranks, "dp2,tp2")
    assert found["replicas"].endswith("along tp")
    assert found["suspect"] == "tp"
    assert said(times(2, 2, 2), "dp2,tp2")["suspect"] == "dp or tp"


def test_axes_alone_decide_over_everything_else():
    ranks = times(2, 2, 2)
    assert said(ranks, "dp2,tp2", [("dp2", "equal"), ("tp2", "differs")])["suspect"] == "tp"
    assert said(ranks, "dp2,tp2", [("dp2", "equal"), ("tp2", "failed")])["suspect"] == "tp"
    assert said(ranks, "dp2,tp2,sp", [("dp2", "equal"), ("tp2", "equal"), ("tp2,sp", "differs")])["suspect"] == "tp2,sp"
    assert said(ranks, "dp2,tp2", [("dp2", "differs"), ("tp2", "differs")])["suspect"] == "dp and tp"
    assert said(ranks, "dp2,tp2", [("dp2", "equal"), ("tp2", "equal")])["suspect"].startswith("dp and tp together")
    assert said(ranks, "tp4,sp", [("tp4", "equal")])["suspect"] == "sequence parallelism on tp"


# ------------------------------------------------------------------------------------------------------------- files


def test_records_come_back_from_a_file_bit_by_bit(tmp_path):
    path = tmp_path / "records"
    records = run(2, 2)[3]
    records[1].facts["loss"] = float("nan")
    records[2].arrays["weight"][0] = np.nan
    with open(path, "wb") as file:
        for record in records:
            write(file, record)
    back = list(read(path))
    assert len(back) == len(records)
    for mine, theirs in zip(back, records, strict=True):
        assert str(mine.facts) == str(theirs.facts)
        assert list(mine.arrays) == list(theirs.arrays)
        assert all(mine.arrays[kind].tobytes() == theirs.arrays[kind].tobytes() for kind in mine.arrays)


def test_a_file_that_was_cut_off_anywhere_is_read_up_to_its_last_whole_record(tmp_path):
    path = tmp_path / "records"
    file, ends = io.BytesIO(), [0]
    for record in run()[0]:
        write(file, record)
        ends.append(file.tell())
    data = file.getvalue()
    for length in [*range(0, len(data), 37), *ends]:
        path.write_bytes(data[:length])
        assert len(list(read(path))) == sum(end <= length for end in ends) - 1

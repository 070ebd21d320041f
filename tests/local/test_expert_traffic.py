"""Experts: every layout sends what the formulas say, to the byte, once it is known which tokens went where (T16.5)."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_ledger as checks

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.debug.expert_rows import ExpertRows
from mpitrain.events import listen
from mpitrain.plan.traffic import Rows, Step, traffic
from mpitrain.routing import Routing

slow = pytest.mark.slow
SWITCH = replace(checks.SIZES, routing=Routing(4, capacity_factor=1.0))
GSHARD = replace(checks.SIZES, routing=Routing(4, 2, "gshard", z_loss=0.1, jitter=0.01))
DROPLESS = replace(checks.SIZES, routing=Routing(4, 2, "topk", None, renormalize=True, every=2))
LAYOUTS = [
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2, "tp": 2},
    {"dp": 4, "ep": 2, "tp": 2, "sequence_parallel": True},
    {"dp": 2, "ep": 2, "pp": 2, "microbatches": 2},
    {"dp": 2, "ep": 2, "cp": 2},
]


def run(sizes=SWITCH, **how):
    ranks = how.get("dp", 1) * how.get("tp", 1) * how.get("cp", 1) * how.get("pp", 1)
    LocalWorld(ranks).run(lambda: checks.sends_what_was_predicted(world(), sizes, **how))


def name(layout):
    return " ".join(f"{axis}{size}" for axis, size in layout.items())


@pytest.mark.parametrize(
    ("sizes", "recompute"),
    [
        pytest.param(SWITCH, "none", id="switch"),
        pytest.param(SWITCH, "full", id="switch, recompute", marks=slow),
        pytest.param(DROPLESS, "none", id="dropless", marks=slow),
        pytest.param(DROPLESS, "full", id="dropless, recompute"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_every_layout_sends_what_was_predicted(layout, sizes, recompute):
    run(sizes, recompute=recompute, **layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_halves_travel_as_halves_and_what_routers_say_in_full(layout):
    run(GSHARD, dtype=np.float16, **layout)


@pytest.mark.parametrize("layout", [LAYOUTS[0], {**LAYOUTS[2], "recompute": "full"}], ids=name)
def test_by_halves_as_many_bytes_go_in_twice_the_messages(layout):
    run(expert_overlap=True, **layout)
    step = Step(SWITCH, 16, **layout)
    whole, halves = (traffic(replace(step, expert_overlap=overlap)).sums() for overlap in (False, True))
    key = "ep", "experts", "all_to_all"
    assert halves.pop(key) == (2 * whole[key][0], whole.pop(key)[1])
    assert halves == whole


@pytest.mark.parametrize("sp", [False, True])
def test_branches_with_scales(sp):
    run(GSHARD, dtype=np.float16, scaled=True, dp=2, ep=2, tp=2, sequence_parallel=sp)


@pytest.mark.parametrize("again", ["blocks.1.mlp", "blocks.1.attention", "blocks.0"])
def test_a_part_that_runs_forward_twice(again):
    run(recomputed=frozenset({again}), dp=2, ep=2, tp=2)


@pytest.mark.parametrize(
    "how",
    [
        {"pp": 2, "schedule": "zb-h1", "stages": (2, 0)},
        pytest.param({"pp": 4, "schedule": "interleaved", "stages": (0, 1, 0, 0, 0, 1, 0, 0)}, marks=slow),
    ],
    ids=lambda how: how["schedule"],
)
def test_stages_that_have_experts_and_stages_that_have_none(how):
    run(replace(GSHARD, tied=True), dp=2, ep=2, microbatches=4, **how)


def test_slices_of_sequences_whose_experts_take_all():
    sizes = replace(SWITCH, routing=Routing(4, capacity_factor=None, balance_loss=0.0))
    run(sizes, dp=2, ep=2, pp=2, microbatches=2, schedule="terapipe", slices=(9, 7))


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2}], ids=name)
def test_adafactor_sums_what_is_asked_of_all_experts_over_ep_as_well(layout):
    run(optimizer="adafactor", **layout)


@pytest.mark.parametrize("sizes", [SWITCH, DROPLESS], ids=["switch", "dropless"])
def test_padding_goes_nowhere(sizes):
    run(sizes, dp=2, ep=2, documents=True)


def test_where_every_place_is_taken_a_layer_sends_four_times_all_places():
    """T16.5: beta E C b h, at the door (e-1)/e of it; every token asks both experts, which take half of them: C = 8."""
    step = Step(replace(SWITCH, routing=Routing(2, 2, "topk", 0.5)), batch=16, dp=2, ep=2)

    def main():
        return checks.listened_with_rows(world(), step)

    for ledger, rows in LocalWorld(2).run(main):
        assert rows.found == {0: [(2 * 8 * 8, 2 * 8 * 8)], 1: [(2 * 8 * 8, 2 * 8 * 8)]}
        places = 4 * 2 * 8 * 8 * 16  # beta E C b h
        assert checks.measured(ledger)["ep", "experts", "all_to_all"] == (2 * 4, 2 * 4 * places // 2)
        assert checks.measured(ledger) == checks.predicted(step)


def test_without_the_rows_the_formula_is_a_bound_over_the_ranks_of_ep():
    step = Step(GSHARD, batch=16, dp=4, ep=4)
    found = LocalWorld(4).run(lambda: checks.listened(world(), step))
    sent = [checks.measured(ledger)["ep", "experts", "all_to_all"][1] for ledger in found]
    assert sum(sent) < 4 * traffic(step).total("ep", "experts")
    assert str(traffic(step)).startswith("at most ")
    assert not str(traffic(replace(step, expert_rows={0: [Rows(9, 9)], 1: [Rows(0, 3)]}))).startswith("at most ")


def test_buckets_of_experts_send_the_same_bytes_in_more_calls():
    step = Step(SWITCH, batch=16, dp=2, ep=2, tp=2, recompute="full")
    for ledger, rows in LocalWorld(4).run(lambda: checks.listened_with_rows(world(), step, bucket_bytes=512)):
        found, here = checks.measured(ledger), replace(step, tp_rank=0, expert_rows=rows.found)
        for key, (calls, sent) in checks.predicted(here).items():
            if key[0] == "dp+cp":
                continue  # the vocabulary does not divide over tp
            assert found[key][1] == sent
            assert found[key][0] == calls or key == ("edp+cp", "gradients", "all_reduce")


def test_rows_are_those_of_the_last_step_pass_by_pass():
    step = Step(replace(DROPLESS, layers=4), batch=16, microbatches=2, dp=2, ep=2)

    def main():
        _, executor, tokens = checks.built(world(), step)
        rows = ExpertRows()
        with listen(rows):
            for batch in tokens.batches(16, world().rank, 2, stop_step=2):
                executor.step(batch)
        return rows.found

    here, there = LocalWorld(2).run(main)
    assert list(here) == list(there) == [1, 3]
    for block in here:
        assert [sent for sent, _ in here[block]] == [2 * 4 * 16] * 2  # both choices of all
        for mine, theirs in zip(here[block], there[block], strict=True):
            assert mine[0] + theirs[0] == mine[1] + theirs[1]

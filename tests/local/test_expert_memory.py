"""Experts: a rank holds what the formulas say, to the byte and module by module, when it is known which tokens came."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_memory as checks

from mpitrain.backend import dtype_of
from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import World, world
from mpitrain.debug import owners
from mpitrain.debug.memory import MemoryLedger
from mpitrain.events import listen
from mpitrain.pipeline.check import check
from mpitrain.pipeline.passes import complete
from mpitrain.plan.memory import peak, segments_of
from mpitrain.plan.memory.choice import recomputed_blocks
from mpitrain.plan.memory.peak import peak_with_scratch
from mpitrain.plan.traffic import Step
from mpitrain.routing import Routing

slow = pytest.mark.slow
SWITCH = replace(checks.SIZES, routing=Routing(4, capacity_factor=1.0))
GSHARD = replace(checks.SIZES, routing=Routing(4, 2, "gshard", z_loss=0.1, jitter=0.01))
DROPLESS = replace(checks.SIZES, dropout=0.0, routing=Routing(4, 1, "switch", None, every=2))
TOPK = replace(checks.SIZES, routing=Routing(4, 3, "topk", 0.5, balance_loss=0.0))
ALL = {"switch": SWITCH, "gshard": GSHARD, "dropless": DROPLESS, "topk": TOPK}
SP = {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True}


def run(sizes=SWITCH, **how):
    ranks = how.get("dp", 1) * how.get("tp", 1) * how.get("cp", 1) * how.get("pp", 1)
    LocalWorld(ranks).run(lambda: checks.holds_what_was_predicted(world(), sizes, **how))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("switch", {}),
        ("topk", {"dp": 2, "microbatches": 2}),
        ("gshard", {"dp": 2, "ep": 2, "microbatches": 2}),
        ("dropless", {"dp": 4, "ep": 4}),
        ("gshard", {"dp": 2, "ep": 2, "tp": 2}),
        ("topk", SP),
        ("dropless", SP),
        ("switch", {"dp": 2, "ep": 2, "cp": 2}),
    ],
    ids=str,
)
def test_every_layout_holds_what_was_predicted(kind, layout):
    run(ALL[kind], optimizer="adamw", **layout)


@pytest.mark.parametrize("recompute", ["full", pytest.param("none", marks=slow)])
@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2}, SP], ids=str)
@pytest.mark.parametrize("kind", ["gshard", pytest.param("dropless", marks=slow)])
def test_with_and_without_what_is_made_again(kind, layout, recompute):
    run(ALL[kind], recompute=recompute, **layout)


@pytest.mark.parametrize("experts", [4, 8])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_half_of_the_experts_at_a_time(experts, recompute):
    """A half of one expert gets its rows in order; larger ones sort them."""
    sizes = replace(DROPLESS, routing=replace(DROPLESS.routing, experts=experts))
    run(sizes, dp=2, ep=2, expert_overlap=True, recompute=recompute)


@pytest.mark.parametrize("kind", ["gshard", "switch"])
@pytest.mark.parametrize("recomputed", [{"blocks.1.mlp"}, {"blocks.0", "blocks.1.attention"}], ids=sorted)
@pytest.mark.parametrize("sp", [False, True])
def test_parts_that_are_made_again(kind, recomputed, sp):
    """Noise makes the router's input anew, without it that is what the part has kept."""
    run(ALL[kind], tp=2, sequence_parallel=sp, recomputed=frozenset(recomputed))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_halves(layout, scaled):
    run(GSHARD, dtype=np.dtype(np.float16), scaled=scaled, optimizer="adamw", **layout)


@pytest.mark.parametrize("name", [pytest.param("bfloat16", marks=slow), "float64"])
def test_every_precision(name):
    run(GSHARD, dtype=dtype_of(name), dp=2, ep=2)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_of_a_pipeline(schedule, recompute):
    """Passes of different numbers of tokens are in flight together."""
    run(GSHARD, dp=2, ep=2, pp=2, microbatches=4, schedule=schedule, recompute=recompute)


def test_slices_of_sequences():
    sizes = replace(SWITCH, routing=Routing(4, capacity_factor=None, balance_loss=0.0))
    run(sizes, dp=2, ep=2, pp=2, microbatches=2, schedule="terapipe", slices=(9, 7))


@pytest.mark.parametrize("kind", ALL)
def test_which_tokens_are_padding_is_kept(kind):
    run(ALL[kind], dp=2, ep=2, padded=True)


# ------------------------------------------------------------------------------------------------------------- bounds


def measured(step, favour=None):
    """The most that activations of a rank hold; `favour`: the expert to which almost all tokens go."""
    _, executor, tokens = checks.built(world(), step)
    if favour is not None:
        for block in executor.model.blocks:
            block.norm2.bias.data[...] = 10.0
            block.mlp.router.weight.data[...] = 0.0
            block.mlp.router.weight.data[:, favour] = 1.0
    ledger = MemoryLedger()
    with listen(ledger):
        executor.step(tokens.batch_at(0, step.batch, world().rank, world().size))
    return ledger.largest[owners.ACTIVATIONS]


@pytest.mark.parametrize("kind", ["switch", "gshard"])
@pytest.mark.parametrize("favour", [None, 0, 3])
def test_no_rank_can_hold_more_than_what_every_place_makes(kind, favour):
    step = Step(ALL[kind], 16, dp=2, ep=2)
    most = peak(step.at_most(), complete("1f1b", ranks=1, microbatches=1)[0])
    found = LocalWorld(2).run(lambda: measured(step, favour))
    assert max(found) <= most
    if favour is not None:
        busy, idle = found[favour // 2], found[1 - favour // 2]
        assert busy > idle


def test_a_rank_whose_experts_are_asked_by_all_holds_as_much_as_can_be():
    """Without a capacity the most is what it gets when every token of all ranks comes to it."""
    step = Step(replace(DROPLESS, routing=replace(DROPLESS.routing, every=1)), 16, dp=2, ep=2)
    most = peak(step.at_most(), complete("1f1b", ranks=1, microbatches=1)[0])
    full, empty = LocalWorld(2).run(lambda: measured(step, 1))
    masks = 2 * 8 * (16 - 1) * 4 * 4  # at_most thinks of padding
    assert full == most - masks
    assert empty < full


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_a_budget_is_kept_whatever_comes(share):
    """Blocks are chosen for the most that can come, so what comes fits."""
    sizes = replace(SWITCH, layers=4, routing=replace(SWITCH.routing, capacity_factor=1.25))
    step, rows = Step(sizes, 16, dp=2, ep=2), complete("1f1b", ranks=1, microbatches=1)
    budget = round(share * peak_with_scratch(step.at_most(), rows[0]))
    again = recomputed_blocks(step, rows[0], check(rows), budget)
    assert 0 < len(again) < 5
    for favour in (None, 1):
        found = LocalWorld(2).run(lambda favour=favour: measured(replace(step, recomputed=again), favour))
        assert max(found) <= budget


def test_blocks_with_experts_are_worth_more_to_a_budget():
    step = Step(replace(SWITCH, layers=4, routing=replace(SWITCH.routing, every=2)), 16, dp=2, ep=2).at_most()
    whole = {segment.name: segment.whole for segment in segments_of(step, 0)}
    assert whole["blocks.0"] == whole["blocks.2"] < whole["blocks.1"] == whole["blocks.3"]


def test_the_sum_is_what_is_alive():
    """Within 2 %, when an action or an op ends."""
    sizes = replace(checks.WIDE, routing=Routing(4, every=2))
    checks.every_owner_is_needed(World(Alone(), "none"), checks.STAYS | checks.COMES, sizes=sizes, every=9)

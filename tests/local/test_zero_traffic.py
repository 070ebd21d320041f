"""ZeRO: every layout sends what the formulas say, to the byte and call by call (T23.3)."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_ledger as checks

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.plan.traffic import Step, traffic
from mpitrain.routing import Routing

slow = pytest.mark.slow
STAGES = (1, 2, 3)
SWITCH = replace(checks.SIZES, routing=Routing(4, capacity_factor=1.0))
LAYOUTS = [
    {"dp": 2},
    {"dp": 3},
    {"dp": 4},
    {"dp": 2, "cp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "tp": 2, "sequence_parallel": True},
    {"tp": 2, "sequence_parallel": True},
]
PIPELINES = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "interleaved", "stages": (1, 0, 1, 0)},
    {"schedule": "zb-h1"},
    {"schedule": "terapipe", "slices": (9, 7)},
]


def run(sizes=checks.SIZES, **how):
    ranks = how.get("dp", 1) * how.get("tp", 1) * how.get("cp", 1) * how.get("pp", 1)
    LocalWorld(ranks).run(lambda: checks.sends_what_was_predicted(world(), sizes, **how))


def name(layout):
    return " ".join(f"{axis}{size}" for axis, size in layout.items())


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=slow), 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_every_layout_sends_what_was_predicted(layout, microbatches, zero):
    """The vocabulary of 17 divides over no axis, and most tensors over no three ranks."""
    batch = 4 * microbatches * layout.get("dp", 1)
    run(batch=batch, microbatches=microbatches, zero=zero, **layout)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("how", PIPELINES, ids=lambda how: how["schedule"])
@pytest.mark.parametrize("tied", [pytest.param(False, marks=slow), True])
def test_every_pipeline_that_drains(how, zero, tied):
    run(replace(checks.SIZES, tied=tied), dp=2, pp=2, microbatches=4, zero=zero, **how)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "tp": 2, "sequence_parallel": True}], ids=name)
def test_halves_travel_as_halves(layout, zero):
    run(dtype=np.float16, microbatches=2, zero=zero, **layout)


@pytest.mark.parametrize("zero", [1, 3])
def test_branches_with_scales_send_halves_and_the_stream_sends_float32(zero):
    run(dtype=np.float16, scaled=True, dp=2, microbatches=2, zero=zero)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=slow), pytest.param(2, marks=slow), 3])
@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"dp": 2, "ep": 2, "cp": 2}], ids=name)
def test_experts_are_dealt_out_over_the_ranks_that_share_them(layout, zero):
    """Over edp and cp, which with as many ranks of dp as of ep are none."""
    run(SWITCH, microbatches=2, zero=zero, **layout)


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=slow)])
def test_experts_of_stages_and_of_tensor_parallel_ranks(zero):
    run(SWITCH, dp=2, ep=2, pp=2, microbatches=2, zero=zero)
    run(SWITCH, dp=4, ep=2, tp=2, sequence_parallel=True, zero=zero)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("how", [{"recompute": "full"}, {"recomputed": frozenset({"blocks.0.attention"})}], ids=str)
def test_what_is_made_again_uses_the_weights_that_came_for_backward(how, zero):
    """ALGORITHMS 23: no third gather."""
    run(dp=2, tp=2, microbatches=2, zero=zero, **how)


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=slow), 3])
@pytest.mark.parametrize(
    "layout",
    [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "sequence_parallel": True}, {"dp": 4, "cp": 2}],
    ids=name,
)
def test_adafactor_sums_over_the_ranks_that_keep_other_rows(layout, zero):
    run(optimizer="adafactor", steps=2, zero=zero, **layout)


@pytest.mark.parametrize(("zero", "overlap"), [(1, True), (2, False), (3, True), (3, False)])
@pytest.mark.parametrize(
    "how",
    [{}, {"tp": 2, "sequence_parallel": True}, {"pp": 2, "schedule": "interleaved", "stages": (1, 0, 0, 1)}],
    ids=name,
)
def test_small_buckets_are_more_messages_of_as_many_bytes(how, zero, overlap):
    run(dp=2, microbatches=2, bucket_bytes=2048, overlap=overlap, zero=zero, **how)
    step = Step(checks.SIZES, 16, dp=2, zero=zero)
    whole, parts = (traffic(replace(step, bucket_bytes=size)).sums() for size in (2**20, 2048))
    key = "dp+cp", "gradients", "reduce_scatter"
    assert whole[key][1] == parts[key][1]
    assert whole[key][0] < parts[key][0]


@pytest.mark.parametrize("prefetch", [0, 2, 9])
def test_what_is_fetched_ahead_is_fetched_once(prefetch):
    run(dp=2, zero=3, microbatches=2, prefetch=prefetch)
    run(dp=2, pp=2, zero=3, microbatches=2, prefetch=prefetch, schedule="zb-h1")


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=slow)])
def test_tensors_with_fewer_rows_than_ranks_travel_all_the_same(zero):
    run(replace(checks.SIX, vocab=5, tied=True), dp=24, batch=24, zero=zero)


@pytest.mark.parametrize("zero", STAGES)
def test_one_rank_sends_nothing(zero):
    run(zero=zero)
    run(dp=1, tp=2, zero=zero)  # and nobody shares what tp cuts


@pytest.mark.parametrize(("zero", "microbatches", "times"), [(1, 1, 2), (2, 1, 2), (3, 1, 3), (2, 4, 5), (3, 4, 12)])
def test_the_bytes_of_the_paper(zero, microbatches, times):
    """T23.3: 2, 2 and 3 Psi (d-1)/d; with four micro-batches 5 and 12."""
    for ranks in (2, 4):
        step = Step(checks.SIZES, 16, microbatches, dp=ranks, zero=zero)
        for ledger in LocalWorld(ranks).run(lambda step=step: checks.listened(world(), step)):
            sums = checks.measured(ledger)
            sent = sum(nbytes for (_, cause, _), (_, nbytes) in sums.items() if cause in ("gradients", "weights"))
            assert sent == times * 4 * checks.SIZES.num_parameters * (ranks - 1) / ranks

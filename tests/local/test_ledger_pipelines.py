"""Every rank of every pipeline sends what the formulas say (T30.11), under each schedule and with the other axes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_ledger as checks
from checks_layouts import layouts, name_of

from mpitrain import startup
from mpitrain.assemble import slice_lengths
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.config import Config
from mpitrain.debug.ledger import Ledger, in_step
from mpitrain.events import listen
from mpitrain.models.gpt import GPTConfig
from mpitrain.pipeline.partition import Partition
from mpitrain.plan.traffic import Line, Step, Traffic


def run(ranks, sizes=checks.SIZES, **how):
    LocalWorld(ranks).run(lambda: checks.sends_what_was_predicted(world(), sizes, **how))


PIPELINES = {
    # name: schedule, blocks of each stage on 2 ranks, whether the table is tied, what else there is to say
    "gpipe": ("gpipe", (1, 2), True, {"microbatches": 2}),
    "1f1b": ("1f1b", (2, 1), False, {"microbatches": 4}),
    "1f1b tied, 1 micro": ("1f1b", (2, 1), True, {}),
    "2 stages a rank": ("interleaved", (1, 0, 1, 1), True, {"microbatches": 4}),
    "3 stages a rank": ("interleaved", (0, 1, 0, 1, 1, 0), False, {"microbatches": 2}),
    "zb-h1": ("zb-h1", (0, 3), False, {"microbatches": 4}),
    "zb-h1 tied": ("zb-h1", (1, 2), True, {"microbatches": 1}),
    "terapipe": ("terapipe", (3, 0), True, {"microbatches": 2, "slices": (7, 5, 3, 1)}),
    "terapipe, equal slices": ("terapipe", (1, 2), False, {"microbatches": 1, "slices": (4, 4, 4, 4)}),
    "pipedream": ("pipedream", (1, 2), False, {"row": 3}),
    "2bw": ("pipedream-2bw", (2, 1), True, {"microbatches": 2, "row": 3}),
    "2bw that clips": ("pipedream-2bw", (2, 1), False, {"microbatches": 2, "clip": 1.0}),
}
LAYOUTS = [*layouts(1), *layouts(2)]
ANY_LAYOUT = ("gpipe", "1f1b", "interleaved", "zb-h1")  # the others go together with dp and tp alone


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        pytest.param(name, case, id=f"{name}, {name_of(case)}".rstrip(", "))
        for name, (schedule, *_) in PIPELINES.items()
        for case in LAYOUTS
        if schedule in ANY_LAYOUT or (case["cp"] == 1 and not case["sp"])
    ],
)
def test_every_pipeline_sends_what_was_predicted(name, rest):
    """T30.11 for pp, with each other axis; a vocabulary that no tp divides, uneven and empty stages."""
    schedule, stages, tied, how = PIPELINES[name]
    sizes = replace(checks.SIZES, layers=3, tied=tied)
    layout = {"dp": rest["dp"], "tp": rest["tp"], "cp": rest["cp"], "sequence_parallel": rest["sp"]}
    ranks = 2 * rest["dp"] * rest["tp"] * rest["cp"]
    run(ranks, sizes, pp=2, schedule=schedule, stages=stages, **layout, **how)


@pytest.mark.parametrize(
    ("tied", "rest"), [(False, {"dp": 2}), (True, {"tp": 2, "sequence_parallel": True})], ids=["dp", "tied tp sp"]
)
@pytest.mark.parametrize(
    ("pp", "stages", "schedule"),
    [
        (3, (0, 2, 0), "1f1b"),  # ends without blocks
        (3, (1, 0, 1), "zb-h1"),  # a middle without parameters
        (4, None, "gpipe"),  # what a model of 2 blocks gets on 4 ranks by itself
        (4, (0, 0, 0, 0, 0, 0, 2, 0), "interleaved"),  # a rank with nothing, twice
    ],
)
def test_stages_without_blocks_send_activations_and_no_gradients(pp, stages, schedule, tied, rest):
    run(2 * pp, replace(checks.SIZES, tied=tied), pp=pp, stages=stages, schedule=schedule, microbatches=4, **rest)


def test_ranks_of_a_stage_that_hold_no_word_send_their_empty_sum():
    run(8, replace(checks.SIZES, vocab=1, tied=True), pp=2, stages=(0, 2), dp=2, tp=2, sequence_parallel=True)


def test_four_axes_at_once():
    run(16, pp=2, dp=2, cp=2, tp=2, sequence_parallel=True, microbatches=2)


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", (1, 1)), ("zb-h1", (1, 1)), ("interleaved", (1, 0, 1, 0))])
def test_buckets_of_a_pipeline_leave_during_its_last_backward(schedule, stages):
    step = Step(checks.SIZES, 16, microbatches=2, pp=2, dp=2, partition=Partition(stages))
    ledgers = LocalWorld(4).run(lambda: checks.listened(world(), step, bucket_bytes=512, schedule=schedule))
    for rank, ledger in enumerate(ledgers):
        expected = checks.predicted(replace(step, pp_rank=rank // 2))
        assert {key: sent for key, (_, sent) in checks.measured(ledger).items()} == {
            key: sent for key, (_, sent) in expected.items()
        }
        early = {p.action for p in ledger.by(lambda place: place) if p.axis == "dp+cp" and p.action != "COUNT"}
        assert early >= ({"W"} if schedule == "zb-h1" else {"B"})


def test_each_of_two_stages_sends_the_bytes_of_the_specification():
    """T30.10: 65,536 bytes over pp on each of the two stages, 524,288 over tp."""
    sizes = GPTConfig(vocab=16, layers=4, width=64, heads=4, seq_len=32)
    step = Step(sizes, batch=8, microbatches=4, tp=2, pp=2)
    for rank, ledger in enumerate(LocalWorld(4).run(lambda: checks.listened(world(), step))):
        sums = checks.measured(ledger)
        assert sums["tp", "layers", "all_reduce"][1] == 524_288
        assert sums["pp", ("activations", "activation gradients")[rank // 2], "send"] == (4, 65_536)
        assert sum(sent for (axis, *_), (_, sent) in sums.items() if axis == "pp") == 65_536


def test_all_that_a_pipeline_sends_is_part_of_a_step():
    """The end of a row, too: the waits for its last sends, and where steps overlap their one agreement."""

    def main():
        step = Step(checks.SIZES, batch=8, pp=2, row=3)
        _, executor, tokens = checks.built(world(), step, schedule="pipedream")
        executor.run(list(tokens.batches(8, 0, 1, stop_step=2)))  # ranks compare the first two batches
        ledger = Ledger()
        with listen(ledger):
            executor.run(list(tokens.batches(8, 0, 1, stop_step=3)))
        return ledger

    for ledger in LocalWorld(2).run(main):
        assert all(in_step(place) for place in ledger.by(lambda place: place))
        assert ledger.steps == 3
        assert 0 < ledger.share() < 1
        assert "outside of steps" not in ledger.table()


@pytest.mark.parametrize("given", [{"tp": 2}, {"schedule": "terapipe", "slices": 3}, {"schedule": "interleaved"}])
def test_the_start_block_tells_what_the_busiest_rank_of_a_pipeline_sends(given):
    config = Config(layers=3, width=16, heads=8, seq_len=16, batch=16, microbatches=2, pp=2, **given)
    slices = slice_lengths(config, replace(checks.SIZES, layers=3))
    stages = (1, 1, 0, 1) if config.schedule == "interleaved" else (2, 1)
    step = Step(
        replace(checks.SIZES, layers=3),
        16,
        microbatches=2,
        tp=config.tp,
        pp=2,
        partition=Partition(stages),
        slices=None if slices is None else tuple(slices),
    )

    def main():
        mesh, executor, _ = checks.built(world(), step, schedule=config.schedule)
        sums = checks.measured(checks.listened(world(), step, schedule=config.schedule))
        return sum(sent for _, sent in sums.values()), startup._traffic(config, mesh, executor.model)

    found = LocalWorld(2 * config.tp).run(main)
    most = Traffic((Line("world", "all", "send", 2, 1, max(sent for sent, _ in found)),))
    assert {said.partition(":")[0] for _, said in found} == {f"at most {most}"}

"""`--recompute-budget`: the fewest blocks whose activations fit, as a ledger measures them."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
from checks_memory import built

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.debug.memory import MemoryLedger
from mpitrain.errors import ConfigError
from mpitrain.events import listen
from mpitrain.models.gpt import GPTConfig
from mpitrain.pipeline.check import check
from mpitrain.pipeline.partition import Partition
from mpitrain.pipeline.passes import complete
from mpitrain.plan.memory import choice
from mpitrain.plan.memory.peak import peak_with_scratch
from mpitrain.plan.traffic import Step

SIZES = GPTConfig(vocab=17, layers=4, width=16, heads=4, seq_len=16, dropout=0.1)
CASES = {
    "one rank": (Step(SIZES, 4), "1f1b", 1),
    "micro-batches": (Step(SIZES, 8, 4), "gpipe", 1),
    "tp": (Step(SIZES, 4, tp=2, sequence_parallel=True), "1f1b", 1),
    "pp": (Step(SIZES, 8, 4, pp=2), "1f1b", 1),
    "interleaved": (Step(SIZES, 8, 4, pp=2, partition=Partition((1, 1, 1, 1))), "interleaved", 2),
    "two halves": (Step(SIZES, 8, 4, pp=2), "zb-h1", 1),
}


class Both(MemoryLedger):
    """The most that activations and second forwards hold at once."""

    most = 0

    def _look(self, *where):
        super()._look(*where)
        self.most = max(self.most, self.now.get("activations", 0) + self.now.get("recompute scratch", 0))


def rows_of(step, schedule, chunks):
    return complete(schedule, ranks=step.pp, microbatches=step.microbatches, chunks=chunks)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("again", [(), (0,), (0, 1, 2), (0, 1, 2, 3)], ids=str)
def test_what_is_bounded_is_what_a_ledger_measures(name, again):
    step, schedule, chunks = CASES[name]
    step = replace(step, recomputed=frozenset(f"blocks.{number}" for number in again))

    def main():
        here = replace(step, pp_rank=world().rank // step.tp, tp_rank=world().rank % step.tp)
        _, executor, tokens = built(world(), here, schedule)
        ledger = Both()
        with listen(ledger):
            executor.step(tokens.batch_at(0, step.batch))
        predicted = peak_with_scratch(here, rows_of(here, schedule, chunks)[here.pp_rank])
        if schedule == "zb-h1":  # what backward has passed is counted as if it were still there
            assert ledger.most <= predicted <= 1.5 * ledger.most
        else:
            assert ledger.most == predicted

    LocalWorld(step.pp * step.tp).run(main)


@pytest.mark.parametrize("name", CASES)
def test_the_fewest_blocks_that_fit_are_made_again(name):
    """One block fewer would not fit, whatever the budget."""
    step, schedule, chunks = CASES[name]
    rows = rows_of(step, schedule, chunks)
    for rank in range(step.pp):
        here = replace(step, pp_rank=rank)
        blocks = [f"blocks.{number}" for stage in here.stages for number in here.blocks_of(stage)]
        sizes = [
            peak_with_scratch(replace(here, recomputed=frozenset(blocks[:number])), rows[rank])
            for number in range(len(blocks) + 1)
        ]
        assert sizes == sorted(sizes, reverse=True)
        for number, size in enumerate(sizes):
            chosen = choice.recomputed_blocks(here, rows[rank], check(rows), size)
            assert len(chosen) == sizes.index(size), (rank, number)
        with pytest.raises(ConfigError, match=rf"--recompute-budget .* all of its {len(blocks)} blocks made again"):
            choice.recomputed_blocks(here, rows[rank], check(rows), sizes[-1] - 1)


@pytest.mark.parametrize("asked", ["0.005", "0.001", "1e-06"])
def test_a_budget_is_told_as_it_was_asked_for(asked):
    step, schedule, chunks = next(iter(CASES.values()))
    rows = rows_of(step, schedule, chunks)
    with pytest.raises(ConfigError, match=rf"--recompute-budget {re.escape(asked)}: rank 0"):
        choice.recomputed_blocks(step, rows[0], check(rows), round(float(asked) * 2**20))

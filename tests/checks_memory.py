"""What ranks hold is what was predicted, to the byte, module by module: checks that any world can run."""

from __future__ import annotations

import functools
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from checks_ledger import rank_of, with_documents

from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug import owners
from mpitrain.debug.expert_rows import ExpertRows
from mpitrain.debug.memory import MemoryLedger
from mpitrain.events import Event, listen
from mpitrain.memory.gist import Gist
from mpitrain.models.families import build
from mpitrain.models.gpt import GPTConfig
from mpitrain.models.llama import LlamaConfig
from mpitrain.models.sizes import DecoderConfig
from mpitrain.models.transformer import branches
from mpitrain.nn.module import mark_recompute
from mpitrain.optim.adam import AdamW
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.scaler import BlockScaler
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.zero import RowReducer
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import Partition
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.plan.memory import by_path, freed, gathered, model_state, of_stage, peak, scratch
from mpitrain.plan.traffic import Step

SIZES = GPTConfig(vocab=17, layers=2, width=16, heads=8, seq_len=16, dropout=0.1)
SIX = GPTConfig(vocab=13, layers=2, width=12, heads=6, seq_len=12, dropout=0.1)  # for 3 and 6 ranks
LLAMA = LlamaConfig(vocab=17, layers=2, width=32, heads=8, kv_heads=4, seq_len=16, hidden=40)
SIX_LLAMA = LlamaConfig(vocab=13, layers=2, width=24, heads=6, kv_heads=6, seq_len=12, hidden=18)
WIDE = GPTConfig(vocab=64, layers=4, width=64, heads=4, seq_len=32, dropout=0.1)
"""Large enough for what is not counted (small vectors, hashes of a whole batch) to be far below 2 %."""

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": AdamW,
    "sgd": functools.partial(Sgd, momentum=0.9),
}


def built(
    world: World, step: Step, schedule: str = "1f1b", optimizer: str = "sgd", xp: Any = np
) -> tuple[Mesh, Executor, Tokens]:
    """A model on the layout of a step, what trains it, and numbers to learn."""
    mesh = Mesh(world, pp=step.pp, dp=step.dp, tp=step.tp, cp=step.cp, ep=step.ep)
    model = build(
        step.sizes,
        mesh,
        sequence_parallel=step.sequence_parallel,
        cp_attention=step.cp_attention,
        partition=step.partition,
        dtype=step.dtype,
        keep_scores=step.recompute == "none",
        scales=BlockScaler(branches(step.sizes.layers)) if step.scaled else None,
        expert_overlap=step.expert_overlap,
        zero=step.zero,
        prefetch=step.prefetch,
        freeze=step.freeze,
        xp=xp,
    )
    again = [f"blocks.{n}" for n in range(step.sizes.layers) if step.is_recomputed(n)]
    mark_recompute(model, again if step.recomputed is None else sorted(step.recomputed), mesh.pp.exchange)
    rows = functools.partial(
        complete, schedule, ranks=step.pp, microbatches=step.microbatches, chunks=step.v, slices=len(step.lengths)
    )
    versions = SCHEDULES[schedule].versions
    executor = Executor(
        model,
        OPTIMIZERS[optimizer](model.shares()),
        mesh,
        (lambda batches: rows(batches=batches)) if versions else rows(),
        versions=versions,
        slices=step.slices,
        scaler=model.branch_scales,
        reducer=RowReducer(model, mesh, step.bucket_bytes) if step.zero else None,
        policy=None if step.gist is None else Gist(step.gist),
    )
    numbers = (np.arange(40 * step.sizes.seq_len + 2) * 7919 % step.sizes.vocab).astype(np.uint16)
    corpus = Corpus(numbers, numbers, step.sizes.vocab, "bytes", "numbers", (), (), "")
    return mesh, executor, Tokens(corpus, step.sizes.seq_len)


class Expected:
    """A listener that keeps the books of what the formulas say, and compares after every action."""

    def __init__(self, step: Step, ledger: MemoryLedger, row: Any, rows: ExpertRows | None = None) -> None:
        self.step, self.ledger, self.rows = step, ledger, rows
        self.split = {action.stage for action in row if action.kind == "W"}
        self.paths: Counter[str] = Counter()
        self.compared = 0

    def __call__(self, event: Event) -> None:
        if event.kind != "action" or event.phase != "end":
            return
        action = event.info["action"]
        part, parts = action.part or 0, len(self.step.lengths)
        if action.kind in ("F", "B", "W"):
            micro = action.micro or 0
            step = self.step if self.rows is None else replace(self.step, expert_rows=self.rows.found)
            saved = of_stage(step, action.stage, part, micro)
        if action.kind == "F":
            self.paths.update(by_path(saved))
        elif action.kind in ("B", "W"):
            after = of_stage(step, action.stage, part + 1, micro) if part + 1 < parts else []
            self.paths.subtract(by_path(freed(action.kind, saved, after, action.stage in self.split)))
        expected = {path: nbytes for path, nbytes in self.paths.items() if nbytes}
        assert self.ledger.paths == expected, (action, _difference(self.ledger.paths, expected))
        assert self.ledger.now.get(owners.ACTIVATIONS, 0) == sum(expected.values())
        self.compared += 1


def _difference(found: dict[str, int], expected: dict[str, int]) -> dict[str, tuple[int, int]]:
    paths = {*found, *expected}
    return {p: (found.get(p, 0), expected.get(p, 0)) for p in paths if found.get(p, 0) != expected.get(p, 0)}


def holds_what_was_predicted(
    world: World,
    sizes: DecoderConfig = SIZES,
    *,
    batch: int = 16,
    schedule: str = "1f1b",
    stages: tuple[int, ...] | None = None,
    optimizer: str = "sgd",
    **how: Any,
) -> None:
    """Train on this rank, and compare activations after every action, and what stays between steps.

    `padded` (of the step): the last three tokens of every sequence are padding.
    """
    step = Step(
        sizes,
        batch,
        **rank_of(world.rank, how),
        partition=None if stages is None else Partition(stages),
        **how,
    )
    mesh, executor, tokens = built(world, step, schedule, optimizer)
    ledger = MemoryLedger()
    batches = [
        (with_documents(each) if step.packed else each).part(executor.model.positions_here)
        for each in tokens.batches(step.batch, mesh.dp.rank, mesh.dp.size, stop_step=2 * step.row)
    ]
    if step.padded:
        batches = [replace(each, lengths=np.full_like(each.row_lengths, sizes.seq_len - 3)) for each in batches]
    row = executor._plan(step.row).row
    rows = ExpertRows() if sizes.routing is not None else None
    expected = Expected(step, ledger, row, rows)
    steps = []
    with listen(ledger), listen(rows or (lambda event: None)), listen(expected):
        for first in range(0, len(batches), step.row):
            executor.run(batches[first : first + step.row])
            steps.append(step if rows is None else replace(step, expert_rows=rows.found))
    assert expected.compared == 2 * len(row)
    assert ledger.largest.get(owners.ACTIVATIONS, 0) == max(peak(each, row) for each in steps)
    state = model_state(step, optimizer)
    held = [ledger.now.get(owner, 0) for owner in (owners.WEIGHTS, owners.MASTERS, owners.GRADIENTS, owners.STATE)]
    assert held == [*state[:4]]
    assert ledger.now.get(owners.CONSTANTS, 0) == state.constants
    assert ledger.largest.get(owners.GATHERED, 0) == gathered(step)
    assert executor.model.resident is None or executor.model.resident.peak == gathered(step)
    assert ledger.now.get(owners.GATHERED, 0) == ledger.now.get(owners.WHOLE, 0) == 0
    assert ledger.now.get(owners.SCRATCH, 0) == 0
    assert ledger.largest.get(owners.SCRATCH, 0) == max(scratch(each, row) for each in steps)


# ---------------------------------------------------------------------------------------------- beside what is alive


class Alive:
    """A listener that asks tracemalloc, when an action or an op ends, how much of NumPy's memory is alive.

    Attributes:
        found: (bytes alive, the ledger's owners, where) of each time.
    """

    def __init__(self, ledger: MemoryLedger, before: int, every: int) -> None:
        self.ledger, self.before, self.every = ledger, before, every
        self.found: list[tuple[int, dict[str, int], str]] = []
        self.heard = 0

    def __call__(self, event: Event) -> None:
        if event.phase == "end" and event.kind in ("op", "action"):
            self.heard += 1
            if event.kind == "action" or self.heard % self.every == 0:
                where = f"{event.name} {event.info.get('path', '')}"
                self.found.append((alive() - self.before, dict(self.ledger.now), where))


def alive() -> int:
    """Bytes of arrays that exist now: tracemalloc's NumPy domain.

    As `take_snapshot().filter_traces(...)` says, without an object for each of a hundred thousand traces.
    """
    domain = np.lib.tracemalloc_domain
    return sum(trace[1] for trace in tracemalloc._get_traces() if trace[0] == domain)


def sums_to_what_is_alive(
    world: World,
    sizes: DecoderConfig = WIDE,
    *,
    batch: int = 8,
    schedule: str = "1f1b",
    optimizer: str = "adamw",
    every: int = 5,
    stages: tuple[int, ...] | None = None,
    **how: Any,
) -> dict[str, float]:
    """Train while tracemalloc runs: owner -> by how much the sum would at worst miss what is alive without it.

    Raises:
        AssertionError: with all owners it misses by more than 2 %.
    """
    tracemalloc.start()
    try:
        before = alive()
        pp_rank = world.rank // (world.size // how.get("pp", 1))
        step = Step(sizes, batch, pp_rank=pp_rank, partition=None if stages is None else Partition(stages), **how)
        mesh, executor, tokens = built(world, step, schedule, optimizer)
        ledger = MemoryLedger()
        seen = Alive(ledger, before, every)
        with listen(ledger), listen(seen):
            for each in tokens.batches(batch, mesh.dp.rank, mesh.dp.size, stop_step=2):
                executor.step(each.part(executor.model.positions_here))
    finally:
        tracemalloc.stop()
    for total_alive, now, where in seen.found:
        miss = abs(sum(now.values()) - total_alive) / total_alive
        assert miss < 0.02, (f"{100 * miss:.2f} %", where, total_alive, now)
    names = {owner for _, now, _ in seen.found for owner in now}

    def without(owner: str) -> float:
        return max(abs(sum(now.values()) - now.get(owner, 0) - there) / there for there, now, _ in seen.found)

    return {owner: without(owner) for owner in names}


def every_owner_is_needed(world: World, wanted: set[str], **how: Any) -> None:
    """The sum is that of what is alive within 2 %, and would not be without any one of these owners."""
    missed = sums_to_what_is_alive(world, **how)
    assert {owner for owner, share in missed.items() if share > 0.02} >= wanted, missed


STAYS = {owners.WEIGHTS, owners.GRADIENTS, owners.STATE}
COMES = {owners.ACTIVATIONS, owners.PASSING, owners.BACKWARD}


# On two ranks, for real MPI: each is a process of its own, so that tracemalloc sees one.


def replicas(world: World) -> None:
    every_owner_is_needed(world, STAYS | COMES, dp=2)


def sequence_parallel_ranks(world: World) -> None:
    every_owner_is_needed(world, STAYS | COMES, tp=2, sequence_parallel=True, optimizer="sgd")


def a_pipeline(world: World) -> None:
    every_owner_is_needed(world, STAYS | COMES, pp=2, microbatches=4)


def a_pipeline_that_parts_backward(world: World) -> None:
    every_owner_is_needed(world, STAYS | COMES, pp=2, microbatches=4, schedule="zb-h1")


def a_pipeline_that_recomputes(world: World) -> None:
    wanted = STAYS | COMES | {owners.SCRATCH}
    every_owner_is_needed(world, wanted, pp=2, microbatches=4, recompute="full", optimizer="sgd")


def ranks_that_keep_rows_of_gradients(world: World) -> None:
    every_owner_is_needed(world, STAYS | COMES | {owners.WHOLE}, dp=2, zero=2)


def ranks_that_keep_rows_of_weights(world: World) -> None:
    every_owner_is_needed(world, STAYS | COMES | {owners.WHOLE, owners.GATHERED}, dp=2, zero=3)


CHECKS: list[Callable[[World], None]] = [
    replicas,
    sequence_parallel_ranks,
    a_pipeline,
    a_pipeline_that_parts_backward,
    a_pipeline_that_recomputes,
    ranks_that_keep_rows_of_gradients,
    ranks_that_keep_rows_of_weights,
]

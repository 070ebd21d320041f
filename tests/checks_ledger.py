"""What ranks send is what was predicted, to the byte, for every axis, cause and verb: checks that any world can run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Batch, Tokens
from mpitrain.debug.expert_rows import ExpertRows
from mpitrain.debug.ledger import Ledger, Place, in_step
from mpitrain.events import listen
from mpitrain.models.families import build
from mpitrain.models.gpt import GPTConfig
from mpitrain.models.llama import LlamaConfig
from mpitrain.models.sizes import DecoderConfig
from mpitrain.models.transformer import branches
from mpitrain.nn.module import mark_recompute
from mpitrain.optim import Adafactor, AdamW, Sgd
from mpitrain.optim.scaler import BlockScaler
from mpitrain.parallel.data import BucketedReducer, Reducer
from mpitrain.parallel.local_sgd import LocalSgd
from mpitrain.parallel.powersgd import PowerSgd
from mpitrain.parallel.stale import Stale, StaleWorkers
from mpitrain.parallel.zero import RowReducer
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import Partition
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.plan.traffic import Step, cause_of, traffic
from mpitrain.routing import Routing

SIZES = GPTConfig(vocab=17, layers=2, width=16, heads=8, seq_len=16)
SIX = GPTConfig(vocab=13, layers=2, width=12, heads=6, seq_len=12)  # for 3 and 6 ranks
LLAMA = LlamaConfig(vocab=17, layers=2, width=32, heads=8, kv_heads=4, seq_len=16, hidden=40)
SIX_LLAMA = LlamaConfig(vocab=13, layers=2, width=24, heads=6, seq_len=12, hidden=18)
OPTIMIZERS = {"adamw": Sgd, "adafactor": Adafactor}  # who sends nothing is all one
Sums = dict[tuple[str, str, str], tuple[int, int]]


def built(
    world: World,
    step: Step,
    bucket_bytes: int = 0,
    schedule: str = "1f1b",
    clip: float = 0.0,
    overlap: bool = False,
    staleness: int = 0,
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
    )
    again = [f"blocks.{n}" for n in range(step.sizes.layers) if step.is_recomputed(n)]
    mark_recompute(model, again if step.recomputed is None else sorted(step.recomputed), mesh.pp.exchange)
    reducer: Reducer | None = BucketedReducer(model.flats, mesh, bucket_bytes) if bucket_bytes else None
    if step.zero:
        reducer = RowReducer(model, mesh, step.bucket_bytes, overlap=overlap)
    if step.compression is not None:
        rank, exact, worth = step.compression
        reducer = PowerSgd(model.flats, mesh, rank, exact=exact, worth=worth)
    keeps_moments = step.workers is not None and step.workers.moments == 2
    optimizer = (AdamW if keeps_moments else OPTIMIZERS[step.optimizer])(model.shares(), mesh=mesh)
    if step.workers is not None and step.workers.steps:
        reducer = LocalSgd(model.flats, mesh, optimizer, step.workers.steps, step.workers.moments > 0)
    elif staleness:
        reducer = (Stale if step.workers is None else StaleWorkers)(model.flats, mesh, staleness)
    of_batches = functools.partial(
        complete,
        schedule,
        ranks=step.pp,
        microbatches=step.microbatches,
        chunks=step.v,
        slices=len(step.lengths),
    )
    versions = SCHEDULES[schedule].versions
    executor = Executor(
        model,
        optimizer,
        mesh,
        (lambda batches: of_batches(batches=batches)) if versions else of_batches(),
        reducer=reducer,
        clip=clip,
        versions=versions,
        slices=step.slices,
        scaler=model.branch_scales,
    )
    numbers = (np.arange(40 * step.sizes.seq_len + 2) * 7919 % step.sizes.vocab).astype(np.uint16)
    corpus = Corpus(numbers, numbers, step.sizes.vocab, "bytes", "numbers", (), (), "")
    return mesh, executor, Tokens(corpus, step.sizes.seq_len)


def listened(world: World, step: Step, steps: int = 1, documents: bool = False, **how: Any) -> Ledger:
    """A ledger that has heard this rank train, `steps` rows of `step.row` batches, or times `step.period` of them."""
    return listened_with_rows(world, step, steps, documents, **how)[0]


def listened_with_rows(
    world: World, step: Step, steps: int = 1, documents: bool = False, **how: Any
) -> tuple[Ledger, ExpertRows]:
    """The same, with what the last step sent to experts."""
    mesh, executor, tokens = built(world, step, **how)
    ledger, rows = Ledger(), ExpertRows()
    batches = [
        (with_documents(batch) if documents else batch).part(executor.model.positions_here)
        for batch in tokens.batches(step.batch, mesh.dp.rank, mesh.dp.size, stop_step=steps * step.row * step.period)
    ]
    with listen(ledger), listen(rows):
        for first in range(0, len(batches), step.row):
            executor.run(batches[first : first + step.row])
    assert ledger.steps == len(batches)
    return ledger, rows


def with_documents(batch: Batch) -> Batch:
    """Rows whose first quarter is a document of its own: most blocks of keys are seen by nobody."""
    rows, length = batch.inputs.shape
    return replace(
        batch, documents=np.repeat(np.arange(length) >= length // 4, rows).reshape(length, rows).T.astype(int)
    )


def rank_of(rank: int, layout: Mapping[str, Any]) -> dict[str, int]:
    """Which rank of each axis a rank of the world is."""
    found = {}
    for axis in ("tp", "cp", "dp"):
        rank, found[f"{axis}_rank"] = divmod(rank, layout.get(axis, 1))
    return {**found, "pp_rank": rank}


def measured(ledger: Ledger) -> Sums:
    """(axis, cause, verb) -> (calls, bytes) of all steps."""

    def name(place: Place) -> tuple[str, str, str]:
        return place.axis, cause_of(place.axis, place.action, place.path, place.op), place.verb

    sums = ledger.by(name, in_step)
    return {key: (amount.calls, round(amount.bytes)) for key, amount in sums.items() if amount.calls}


def predicted(step: Step, steps: int = 1) -> Sums:
    return {key: (steps * calls, round(steps * sent)) for key, (calls, sent) in traffic(step).sums().items()}


def sends_what_was_predicted(
    world: World,
    sizes: DecoderConfig = SIZES,
    *,
    batch: int = 16,
    steps: int = 1,
    documents: bool = False,
    schedule: str = "1f1b",
    stages: tuple[int, ...] | None = None,
    clip: float = 0.0,
    overlap: bool = False,
    staleness: int = 0,
    **how: Any,
) -> None:
    """Train, on this rank, and compare; `stages`: blocks of each stage, one stage a rank unless given."""
    step = Step(
        sizes,
        batch,
        **rank_of(world.rank, how),
        partition=None if stages is None else Partition(stages),
        **how,
    )
    how_run = {"schedule": schedule, "clip": clip, "overlap": overlap, "staleness": staleness}
    ledger, rows = listened_with_rows(world, step, steps, documents, **how_run)
    if sizes.routing is not None:
        step = replace(step, expert_rows=rows.found)
    assert measured(ledger) == predicted(step, steps)


# On four ranks, for real MPI.


def replicas_of_tensor_parallel_ranks(world: World) -> None:
    sends_what_was_predicted(world, dp=2, tp=2, steps=2)


def sequence_parallel_with_micro_batches(world: World) -> None:
    sends_what_was_predicted(world, replace(SIZES, tied=True), tp=4, sequence_parallel=True, microbatches=2)


def a_ring_of_tensor_parallel_ranks(world: World) -> None:
    sends_what_was_predicted(world, tp=2, cp=2, dtype=np.float64)


def whole_keys_on_every_rank(world: World) -> None:
    sends_what_was_predicted(world, replace(SIZES, kv_heads=2), tp=4)


def a_tied_pipeline_of_sequence_parallel_ranks(world: World) -> None:
    sends_what_was_predicted(
        world, replace(SIZES, tied=True), pp=2, tp=2, sequence_parallel=True, microbatches=4, schedule="zb-h1"
    )


def four_ranks_with_two_stages_each_some_of_them_empty(world: World) -> None:
    sends_what_was_predicted(
        world, pp=4, stages=(0, 1, 0, 0, 0, 1, 0, 0), microbatches=4, schedule="interleaved", steps=2
    )


def experts_of_sequence_parallel_ranks(world: World) -> None:
    sizes = replace(SIZES, routing=Routing(4, 2, "gshard"))
    sends_what_was_predicted(world, sizes, dp=2, ep=2, tp=2, sequence_parallel=True, recompute="full")


def rows_of_weights_over_replicas_and_sequence_parallel_ranks(world: World) -> None:
    sends_what_was_predicted(world, dp=2, tp=2, sequence_parallel=True, microbatches=2, zero=3, overlap=True)


def rows_of_gradients_of_a_tied_pipeline(world: World) -> None:
    sizes = replace(SIZES, tied=True)
    sends_what_was_predicted(world, sizes, pp=2, dp=2, microbatches=4, schedule="zb-h1", zero=2, bucket_bytes=2048)


CHECKS: list[Callable[[World], None]] = [
    replicas_of_tensor_parallel_ranks,
    sequence_parallel_with_micro_batches,
    a_ring_of_tensor_parallel_ranks,
    whole_keys_on_every_rank,
    a_tied_pipeline_of_sequence_parallel_ranks,
    four_ranks_with_two_stages_each_some_of_them_empty,
    experts_of_sequence_parallel_ranks,
    rows_of_weights_over_replicas_and_sequence_parallel_ranks,
    rows_of_gradients_of_a_tied_pipeline,
]

"""Asynchronous schemes on ranks against their replay (asynchronous_oracle.py), as checks that any world can run.

Every rank replays the scheme alone, with the batches of all workers, so the reference is made where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import asynchronous_oracle as oracle
import numpy as np

from mpitrain.autograd.ops import IGNORE
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Batch, Tokens
from mpitrain.debug.compare import compare
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW, Optimizer, Sgd
from mpitrain.parallel.data import Reducer
from mpitrain.parallel.local_sgd import LocalSgd
from mpitrain.parallel.stale import Stale, StaleWorkers
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

SIZES = GPTConfig(vocab=17, layers=2, width=12, heads=2, seq_len=6, dropout=0.1)
CLIP = 0.6  # shorter than most gradients of the first steps
METHODS: dict[str, Callable[..., Optimizer]] = {
    # The true gradient of a key's bias is zero, and AdamW divides the noise that is left by eps: a larger one keeps it
    # below the digits that are compared.
    "adamw": lambda parameters: AdamW(parameters, lr=2e-3, eps=1e-6, weight_decay=0.1),
    "sgd": lambda parameters: Sgd(parameters, lr=0.1, momentum=0.9),
    "plain": lambda parameters: Sgd(parameters, lr=0.1),
}
Kinds = dict[str, dict[str, np.ndarray]]


def tokens_of(sizes: GPTConfig) -> Tokens:
    numbers = (np.arange(4000) * 7919 % 104729 % sizes.vocab).astype(np.uint8)
    return Tokens(Corpus(numbers, numbers, sizes.vocab, "bytes", "numbers", (), (), ""), sizes.seq_len, seed=5)


def batches_of(sizes: GPTConfig, batch: int, worker: int, workers: int, steps: int) -> list[Batch]:
    """A worker's batches; the later a row's place, the fewer targets it has, so that workers have other numbers."""
    found = []
    for each in tokens_of(sizes).batches(batch, worker, workers, stop_step=steps):
        targets = each.targets.copy()
        for row, place in enumerate(each.places):
            targets[row, : int(place + each.step) % 5] = IGNORE
        found.append(replace(each, targets=targets))
    return found


def trained(
    world: World,
    scheme: Callable[[GPT, Optimizer, Mesh], Reducer],
    *,
    method: str,
    steps: int,
    batch: int = 12,
    micros: int = 1,
    clip: float = CLIP,
    sizes: GPTConfig = SIZES,
    schedule: str = "1f1b",
    sequence_parallel: bool = False,
    **axes: int,
) -> tuple[GPT, Executor, Kinds]:
    """What this rank holds after so many steps, and what its steps told."""
    mesh = Mesh(world, **axes)
    model = GPT(sizes, mesh, seed=3, dtype=np.float64, sequence_parallel=sequence_parallel)
    optimizer = METHODS[method](model.parameters())
    rows = complete(schedule, ranks=mesh.pp.size, microbatches=micros)
    executor = Executor(model, optimizer, mesh, rows, reducer=scheme(model, optimizer, mesh), clip=clip)
    losses, norms = [], []
    for each in batches_of(sizes, batch, mesh.dp.rank, mesh.dp.size, steps):
        losses.append(executor.step(each.part(model.positions_here)))
        assert executor.report is not None
        norms.append(executor.report.grad_norm)
    told = {"losses": {"loss": np.array(losses)}, "norms": {"norm": np.array(norms)}}
    return model, executor, {**told, **held(model, optimizer)}


def held(model: GPT, optimizer: Optimizer) -> Kinds:
    weights = {p.name: p.data.copy() for p in model.parameters()}
    return {"weights": weights, **{k: {n: a.copy() for n, a in of.items()} for k, of in optimizer.state_dict().items()}}


def whole_model(method: str, sizes: GPTConfig = SIZES) -> tuple[GPT, Optimizer]:
    model = GPT(sizes, Mesh(World(Alone(), "none")), seed=3, dtype=np.float64)
    return model, METHODS[method](model.parameters())


def same(mine: Kinds, model: GPT, whole: Kinds) -> None:
    """What a rank holds against the rectangles of whole tensors."""
    rectangles = {p.name: p.rectangle for p in model.parameters()}
    for kind, tensors in mine.items():
        parts = {name: whole[kind][name][rectangles.get(name, ...)] for name in tensors}
        worst = compare(tensors, parts)[0]
        assert worst.ok, f"{kind}: {worst}"


def whole_of(model: GPT, mine: Kinds) -> Kinds:
    """What one rank holds, as whole tensors of the same run on one rank would be given."""
    assert all(p.data.shape == p.full_shape for p in model.parameters())
    return mine


def in_words(told: oracle.Told) -> Kinds:
    return {"losses": {"loss": np.array(told.losses)}, "norms": {"norm": np.array(told.norms)}}


def stale_equals_its_replay(
    world: World, staleness: int, method: str = "adamw", steps: int = 5, batch: int = 12, start: int = 0, **how: Any
) -> None:
    sizes, clip = how.get("sizes", SIZES), how.get("clip", CLIP)
    model, executor, mine = trained(
        world,
        lambda model, _, mesh: Stale(model.flats, mesh, staleness, start),
        method=method,
        steps=steps,
        batch=batch,
        **how,
    )
    assert executor.optimizer.updates == max(0, steps - staleness)
    whole, optimizer = whole_model(method, sizes)
    told = oracle.one_by_one(whole, optimizer, batches_of(sizes, batch, 0, 1, steps), staleness, clip or np.inf, start)
    same(mine, model, {**in_words(told), **held(whole, optimizer)})


def stale_workers_equal_their_replay(
    world: World, staleness: int, method: str = "adamw", steps: int = 5, batch: int = 12, **how: Any
) -> None:
    sizes, clip = how.get("sizes", SIZES), how.get("clip", CLIP)
    model, executor, mine = trained(
        world,
        lambda model, _, mesh: StaleWorkers(model.flats, mesh, staleness),
        method=method,
        steps=steps,
        batch=batch,
        **how,
    )
    assert executor.optimizer.updates == steps
    whole, optimizer = whole_model(method, sizes)
    told = oracle.side_by_side(whole, optimizer, of_workers(executor, sizes, batch, steps), staleness, clip or np.inf)
    same(mine, model, {**in_words(told), **held(whole, optimizer)})


def local_sgd_equals_its_replay(
    world: World,
    local_steps: int,
    method: str = "adamw",
    steps: int = 5,
    batch: int = 12,
    moments: bool = False,
    **how: Any,
) -> None:
    """At the end, wherever that is between two averages; and what an evaluation sees then."""
    sizes, clip = how.get("sizes", SIZES), how.get("clip", CLIP)
    model, executor, mine = trained(
        world,
        lambda model, optimizer, mesh: LocalSgd(model.flats, mesh, optimizer, local_steps, moments),
        method=method,
        steps=steps,
        batch=batch,
        **how,
    )
    mesh = executor.mesh
    models, optimizers = zip(*(whole_model(method, sizes) for _ in range(mesh.edp.size)), strict=True)
    per_worker = of_workers(executor, sizes, batch, steps)
    told = oracle.apart(models, optimizers, per_worker, local_steps, moments, clip or np.inf)
    at = mesh.edp.rank
    same(mine, model, {**in_words(told), **held(models[at], optimizers[at])})
    learned = [sum(b[w].count for b in per_worker[steps - steps % local_steps :]) for w in range(mesh.edp.size)]
    if steps % local_steps:
        oracle.average([[p.data for p in each.parameters()] for each in models], np.array(learned, float))
    with executor.reducer.whole():
        same({"weights": held(model, executor.optimizer)["weights"]}, model, held(models[0], optimizers[0]))
    for name, array in held(model, executor.optimizer)["weights"].items():
        assert array.tobytes() == mine["weights"][name].tobytes(), f"{name} did not come back"


def of_workers(executor: Executor, sizes: GPTConfig, batch: int, steps: int) -> Sequence[Sequence[Batch]]:
    """Of each step the batch of each worker, which is those of the ranks of ep together."""
    mesh = executor.mesh
    ep = mesh.ep.size
    parts = [batches_of(sizes, batch, rank, mesh.dp.size, steps) for rank in range(mesh.dp.size)]
    return [[joined([parts[w * ep + e][t] for e in range(ep)]) for w in range(mesh.edp.size)] for t in range(steps)]


def joined(batches: Sequence[Batch]) -> Batch:
    names = ("inputs", "targets", "places")
    return replace(batches[0], **{name: np.concatenate([getattr(b, name) for b in batches]) for name in names})


# On four ranks, for real MPI.


def stale_gradients_of_a_tied_pipeline(world: World) -> None:
    stale_equals_its_replay(world, 2, pp=2, micros=2, sizes=replace(SIZES, tied=True))


def stale_workers_of_tensor_parallel_ranks(world: World) -> None:
    stale_workers_equal_their_replay(world, 2, tp=2, sequence_parallel=True)


def four_workers_that_learn_apart(world: World) -> None:
    local_sgd_equals_its_replay(world, 2, batch=16, micros=2, moments=True)


CHECKS: list[Callable[[World], None]] = [
    stale_gradients_of_a_tied_pipeline,
    stale_workers_of_tensor_parallel_ranks,
    four_workers_that_learn_apart,
]

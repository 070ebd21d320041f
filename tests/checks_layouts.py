"""Any layout against one rank, as checks that any world can run: threads here, MPI's ranks in tests/mpi.

Every rank trains alone too (a world of one needs no partner), so the reference is made where it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from mpitrain.checkpoint.layout import counted_here
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Batch, Tokens
from mpitrain.debug.compare import compare
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.adam import AdamW
from mpitrain.parallel.replicas import check_replicas
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

SIZES = GPTConfig(vocab=17, layers=2, width=16, heads=8, seq_len=16, dropout=0.2)
SIX = GPTConfig(vocab=13, layers=2, width=12, heads=6, seq_len=12, dropout=0.2)  # for 3 and 6 ranks
FIVE = GPTConfig(vocab=11, layers=1, width=20, heads=5, seq_len=20, dropout=0.2)
BATCH = 24
STEPS = 4
Found = dict[str, dict[str, np.ndarray]]


def whole(world: World, mesh: Mesh, parameters: Iterable[Parameter], arrays: Iterable[np.ndarray]) -> dict[str, Any]:
    """Full tensors from the slabs of all ranks: every rank that counts a slab brings it, the others bring zeros."""
    found = {}
    for p, array in zip(parameters, arrays, strict=True):
        full = np.zeros(p.full_shape)
        if counted_here(p.spec, mesh.coords):
            full[p.rectangle] = array
        found[p.name] = world.all_reduce(full)
    return found


def train(
    world: World,
    *,
    sizes: GPTConfig = SIZES,
    micros: int = 1,
    steps: int = STEPS,
    batch: int = BATCH,
    documents: bool = False,
    sp: bool = False,
    kind: str = "ring",
    **axes: int,
) -> Found:
    """Losses and norms, the gradients of the first step, the last weights and moments, all whole."""
    mesh = Mesh(world, **axes)
    model = GPT(sizes, mesh, sequence_parallel=sp, cp_attention=kind, seed=3, dtype=np.float64)
    # The true gradient of a key's bias is zero, and AdamW divides the noise that is left by eps: a larger one keeps it
    # below the digits that are compared.
    optimizer = AdamW(model.parameters(), lr=2e-3, eps=1e-6, weight_decay=0.1)
    executor = Executor(model, optimizer, mesh, with_update(one_stage(micros)), clip=0.5)
    numbers = (np.arange(20_000) * 7919 % 104729 % sizes.vocab).astype(np.uint16)
    corpus = Corpus(numbers[:19_000], numbers[19_000:], sizes.vocab, "bytes", "numbers", (), (), "")
    tokens = Tokens(corpus, sizes.seq_len, seed=5)
    losses, norms, gradients = [], [], {}
    for rows in tokens.batches(batch, mesh.dp.rank, mesh.dp.size, stop_step=steps):
        here = with_documents(rows) if documents else rows
        losses.append(executor.step(here.part(model.positions_here)))
        assert executor.report is not None
        norms.append(executor.report.grad_norm)
        gradients = gradients or whole(world, mesh, model.parameters(), [p.grad for p in model.parameters()])
        check_replicas(model.parameters(), mesh, f"after step {len(losses)}")
    states = optimizer.state_dict()
    return {
        "losses": {"loss": np.array(losses), "validation": np.array(executor.evaluate(few(tokens, mesh, model)))},
        "norms": {"norm": np.array(norms)},
        "gradients": gradients,
        "weights": whole(world, mesh, model.parameters(), [p.data for p in model.parameters()]),
        **{
            kind: whole(world, mesh, model.parameters(), [of[p.name] for p in model.parameters()])
            for kind, of in states.items()
        },
    }


def few(tokens: Tokens, mesh: Mesh, model: GPT) -> list[Batch]:
    """Some validation windows: the first two batches of 30 rows."""
    return list(tokens.validation(30, mesh.dp.rank, mesh.dp.size, model.positions_here))[:2]


def with_documents(batch: Batch) -> Batch:
    """Rows that hold several documents of different lengths and end in padding, which are no targets."""
    length = batch.inputs.shape[1]
    ends = 1 + (batch.places[:, None] * 5 + np.array([2, 3])) % (length - 2)
    documents = (np.arange(length) >= ends[:, :1]).astype(np.int64) + (np.arange(length) >= ends[:, 1:])
    documents[np.arange(length) >= length - batch.places[:, None] % 4] = -1
    targets = np.where(documents < 0, -100, batch.targets)
    return replace(batch, documents=documents, targets=targets)


@functools.cache
def _alone(**how: Any) -> Found:
    return train(World(Alone(), "none"), **how)


def equals_one_rank(world: World, *, tied: bool = False, **how: Any) -> None:
    """Train on this world and alone, and compare everything by the rule of `debug.compare`."""
    how["sizes"] = replace(how.get("sizes", SIZES), tied=tied)
    layout = {"dp", "tp", "cp", "sp", "kind", "micros"}
    reference = _alone(**{name: value for name, value in how.items() if name not in layout})
    for kind, tensors in train(world, **how).items():
        worst = compare(tensors, reference[kind])[0]
        assert worst.ok, f"{kind}: {worst}"


def layouts(ranks: int) -> list[dict[str, Any]]:
    """Every dp x tp x cp over so many ranks, where tp > 1 with and without sequence parallelism."""
    found: list[dict[str, Any]] = []
    for tp in (n for n in range(1, ranks + 1) if ranks % n == 0):
        for cp in (n for n in range(1, ranks // tp + 1) if ranks // tp % n == 0):
            for sp in (False, True) if tp > 1 else (False,):
                found.append({"dp": ranks // tp // cp, "tp": tp, "cp": cp, "sp": sp})
    return found


def name_of(layout: dict[str, Any]) -> str:
    """`dp2 tp2 sp`"""
    return " ".join(
        (name if value is True else f"{name}{value}" if not isinstance(value, str) else value)
        for name, value in layout.items()
        if value not in (1, False)
    )


# On four ranks, for real MPI: each kind of parallelism, alone and with others.


def tensor_and_data(world: World) -> None:
    equals_one_rank(world, dp=2, tp=2)


def tensor_with_sequence(world: World) -> None:
    equals_one_rank(world, tp=4, sp=True, tied=True)


def context_by_ring(world: World) -> None:
    equals_one_rank(world, cp=4, micros=2)


def context_by_ulysses_and_tensor(world: World) -> None:
    equals_one_rank(world, cp=2, tp=2, kind="ulysses")


def context_by_two_rings(world: World) -> None:
    equals_one_rank(world, cp=2, dp=2, kind="rsa")


def context_tensor_and_sequence(world: World) -> None:
    equals_one_rank(world, cp=2, tp=2, sp=True, tied=True)


def grouped_heads_with_more_ranks_than_heads_of_keys(world: World) -> None:
    equals_one_rank(world, tp=4, sizes=replace(SIZES, kv_heads=2))


def documents_and_padding(world: World) -> None:
    equals_one_rank(world, cp=2, tp=2, documents=True)


def messages_above_the_eager_limit(world: World) -> None:
    """The stream of a rank has 256 KiB, a block of keys 64 KiB."""
    large = GPTConfig(vocab=257, layers=1, width=64, heads=4, seq_len=128)
    equals_one_rank(world, cp=2, tp=2, sp=True, sizes=large, steps=2, batch=8)
    equals_one_rank(world, cp=4, sizes=large, steps=2, batch=8)


CHECKS: list[Callable[[World], None]] = [
    tensor_and_data,
    tensor_with_sequence,
    context_by_ring,
    context_by_ulysses_and_tensor,
    context_by_two_rings,
    context_tensor_and_sequence,
    grouped_heads_with_more_ranks_than_heads_of_keys,
    documents_and_padding,
    messages_above_the_eager_limit,
]

"""Data parallelism against one rank, as checks that any world can run: threads here, MPI's ranks in tests/mpi.

Every rank trains alone too (a world of one needs no partner), so the reference is made where it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.backend import to_host
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.compare import compare
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim.adam import AdamW
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.data import BucketedReducer, FlatReducer, Reducer
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

SIZES = GPTConfig(vocab=17, layers=2, width=12, heads=2, seq_len=6, dropout=0.2)
LARGE = GPTConfig(vocab=64, layers=1, width=96, heads=2, seq_len=8)  # 1 MiB of gradients in float64
BATCH = 96
STEPS = 20


def train(
    world: World,
    micros: int,
    *,
    sizes: GPTConfig = SIZES,
    bucket_bytes: int = 0,
    sgd: bool = False,
    steps: int = STEPS,
    tp: int = 1,
    xp: Any = np,
) -> dict[str, dict[str, np.ndarray]]:
    """Losses and norms of all steps, the first gradients, the last weights and state: kind -> name -> host array."""
    mesh = Mesh(world, tp=tp)
    model = GPT(sizes, mesh, seed=3, dtype=np.float64, xp=xp)
    optimizer: Optimizer
    if sgd:
        optimizer = Sgd(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    else:
        # The true gradient of a key's bias is zero, and AdamW divides the noise that is left by eps = 1e-8: at larger
        # rates than this such a weight is noise within the digits that are compared.
        optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    reducer: Reducer = FlatReducer(model.flats, mesh)
    if bucket_bytes:
        reducer = BucketedReducer(model.flats, mesh, bucket_bytes)
    rows = with_update(one_stage(micros))
    executor = Executor(model, optimizer, mesh, rows, reducer=reducer, clip=0.5)
    numbers = (np.arange(5000) * 7919 % 104729 % 17).astype(np.uint8)
    tokens = Tokens(Corpus(numbers[:4500], numbers[4500:], 17, "bytes", "numbers", (), (), ""), sizes.seq_len, seed=5)
    losses, norms, gradients = [], [], {}
    for batch in tokens.batches(BATCH, mesh.dp.rank, mesh.dp.size, stop_step=steps):
        losses.append(executor.step(batch))
        assert executor.report is not None
        norms.append(executor.report.grad_norm)
        gradients = gradients or {p.name: to_host(p.grad).copy() for p in model.parameters()}
    return {
        "losses": {"loss": np.array(losses)},
        "norms": {"norm": np.array(norms)},
        "gradients": gradients,
        "weights": {p.name: to_host(p.data).copy() for p in model.parameters()},
        **{kind: {name: to_host(a).copy() for name, a in of.items()} for kind, of in optimizer.state_dict().items()},
    }


@functools.cache
def _alone(**how: Any) -> dict[str, dict[str, np.ndarray]]:
    return train(World(Alone(), "none"), 1, **how)


def equals_one_rank(world: World, micros: int, **how: Any) -> None:
    """Train on this world and alone, and compare everything by the rule of `debug.compare`."""
    whole = _alone(**{name: value for name, value in how.items() if name != "bucket_bytes"})
    for kind, tensors in train(world, micros, **how).items():
        worst = compare(tensors, whole[kind])[0]
        assert worst.ok, f"{kind}: {worst}"


def one_micro_batch(world: World) -> None:
    """Dropout on, 20 steps of AdamW."""
    equals_one_rank(world, 1)


def two_micro_batches(world: World) -> None:
    equals_one_rank(world, 2)


def four_micro_batches(world: World) -> None:
    equals_one_rank(world, 4)


def buckets(world: World) -> None:
    equals_one_rank(world, 2, bucket_bytes=4096)


def a_tied_head(world: World) -> None:
    equals_one_rank(world, 1, sizes=GPTConfig(**{**vars(SIZES), "tied": True}))


def sgd_with_momentum(world: World) -> None:
    equals_one_rank(world, 1, sgd=True)


def messages_above_the_eager_limit(world: World) -> None:
    equals_one_rank(world, 1, sizes=LARGE, steps=3)
    equals_one_rank(world, 1, sizes=LARGE, steps=3, bucket_bytes=200_000)


def buckets_give_the_bits_of_one_message_in_deterministic_mode(world: World) -> None:
    before = world.deterministic
    world.set_deterministic(True)
    flat, cut = (train(world, 2, steps=5, bucket_bytes=size) for size in (0, 4096))
    world.set_deterministic(before)
    for kind, tensors in flat.items():
        for name, array in tensors.items():
            assert array.tobytes() == cut[kind][name].tobytes(), (kind, name)


def replicas_hold_the_same_bits(world: World) -> None:
    weights = train(world, 1, steps=5)["weights"]
    found = world.exchange({name: array.tobytes().hex() for name, array in weights.items()})
    assert all(other == found[0] for other in found)


CHECKS: list[Callable[[World], None]] = [
    one_micro_batch,
    two_micro_batches,
    four_micro_batches,
    buckets,
    a_tied_head,
    sgd_with_momentum,
    messages_above_the_eager_limit,
    buckets_give_the_bits_of_one_message_in_deterministic_mode,
    replicas_hold_the_same_bits,
]

"""Offload, as checks that any world of 2 ranks can run: the same bits as without, on every layout.

`train` makes a few steps and tells what came of them on this rank.  What it is compared with is the same run with
everything here; ZeRO's stage 3 where parameters are offloaded.
"""

from __future__ import annotations

import tempfile
from typing import Any, NamedTuple

import numpy as np

from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.tokens import Batch
from mpitrain.memory.home import Home
from mpitrain.memory.io_thread import Moved
from mpitrain.memory.offload import Offload, region_of
from mpitrain.memory.policy import Policy
from mpitrain.memory.store import open_store
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

SIZES = GPTConfig(vocab=50, layers=3, width=32, heads=4, seq_len=16, dropout=0.1)
STEPS, ROWS, SLOTS, SLOT = 3, 8, 8, 2**21


class Outcome(NamedTuple):
    """Losses, the last norm, weights and optimizer state of this rank; bytes moved in the last step; peaks."""

    losses: list[float]
    norm: float
    weights: dict[str, np.ndarray]
    state: dict[str, dict[str, np.ndarray]]
    moved: Moved
    resident: int
    in_flight: int

    def equals(self, other: Outcome) -> bool:
        """To the last bit."""
        return (
            (self.losses, self.norm) == (other.losses, other.norm)
            and _same(self.weights, other.weights)
            and all(_same(of, other.state[kind]) for kind, of in self.state.items())
        )


def _same(mine: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> bool:
    return mine.keys() == others.keys() and all(np.array_equal(mine[name], others[name]) for name in mine)


def train(
    world: World,
    what: str = "",
    where: str = "host",
    *,
    dtype: Any = np.float64,
    zero: int = 0,
    micros: int = 2,
    schedule: str = "1f1b",
    optimizer: type = AdamW,
    recompute: bool = False,
    tied: bool = False,
    inner: Policy | None = None,
    prefetch: int = 1,
    group: int = 2**14,
    sizes: GPTConfig = SIZES,
    clip: float = 0.5,
    xp: Any = np,
    **axes: int,
) -> Outcome:
    """Some steps with some letters of "oap" (optimizer, activations, parameters) offloaded."""
    sizes = GPTConfig(**{**sizes.__dict__, "tied": tied})
    mesh = Mesh(world, **axes)
    kinds = ("first_moment", "second_moment") if optimizer is AdamW else ("velocity",)
    home = Home(
        lambda regions: open_store(where, regions, like=xp.empty(0), rank=world.rank, pending=2**16),
        kinds=kinds if "o" in what else (),
        masters="o" in what,
        others=[region_of(SLOTS, SLOT)] if "a" in what else (),
    )
    parameters = "p" in what
    model = GPT(
        sizes, mesh, seed=1, dtype=dtype, zero=3 if parameters else zero, prefetch=prefetch, xp=xp,
        home=home if parameters else None,
    )  # fmt: skip
    for block in model.blocks:
        block.recompute = recompute
    if what and not parameters:
        home.take_in(model.flats)
    keep = home.keep if "o" in what else None
    numbers = {} if optimizer is AdamW else {"momentum": 0.9}
    update = optimizer(model.shares(), lr=1e-2, keep=keep, window=1000, ahead=prefetch, **numbers)
    policy = inner
    if "a" in what:
        policy = Offload(home.store, slots=SLOTS, slot_bytes=SLOT, group=group, distance=prefetch, inner=inner)
    rows = complete(
        schedule, ranks=mesh.pp.size, microbatches=micros, slices=2 if schedule == "terapipe" else 1,
        chunks=model.num_stages // mesh.pp.size, offload=prefetch if "a" in what else None,
    )  # fmt: skip
    lengths = [8, 8] if schedule == "terapipe" else None
    executor = Executor(model, update, mesh, rows, clip=clip, policy=policy, slices=lengths)
    random, losses, before, moved = np.random.default_rng(0), [], Moved(), Moved()
    for step in range(STEPS):
        tokens = random.integers(0, sizes.vocab, (ROWS, sizes.seq_len + 1))
        mine = np.arange(ROWS).reshape(mesh.dp.size, -1)[mesh.dp.rank]
        batch = Batch(tokens[mine, :-1], tokens[mine, 1:], mine, np.arange(sizes.seq_len), step)
        losses.append(executor.step(batch))
        if parameters:  # a placeholder has no memory
            assert all(not any(p.data.strides) for p in model.parameters())
        if what:
            home.store.flush()
            moved = home.store.moved.since(before)
            before = Moved(**home.store.moved.__dict__)
    outcome = Outcome(
        losses,
        executor.report.grad_norm,
        {p.name: np.array(p.master) for p in model.shares()},
        {kind: {name: np.array(a) for name, a in of.items()} for kind, of in update.state_dict().items()},
        moved,
        model.resident.peak if model.resident is not None else 0,
        0,
    )
    home.close()
    return outcome


def _equal(world: World, what: str, where: str = "host", *, zero: int = 0, **how: Any) -> None:
    base = train(world, zero=3 if "p" in what else zero, **how)
    assert train(world, what, where, zero=zero, **how).equals(base), (what, where, zero, how)


def _disk() -> str:
    return f"hdf5:{tempfile.gettempdir()}/mpitrain-offload-checks"


def data_parallel_all_together(world: World) -> None:
    world.set_deterministic()
    _equal(world, "oap", dp=2)
    _equal(world, "oap", _disk(), dp=2, dtype=np.float16)


def data_parallel_with_stages_of_zero(world: World) -> None:
    world.set_deterministic()
    for zero in (0, 1, 2):
        _equal(world, "oa", zero=zero, dp=2, dtype=np.float16)


def tensor_parallel(world: World) -> None:
    world.set_deterministic()
    _equal(world, "oap", _disk(), tp=2)


def pipelines(world: World) -> None:
    world.set_deterministic()
    for schedule in ("1f1b", "zb-h1", "gpipe", "terapipe"):
        _equal(world, "oa" if schedule == "terapipe" else "oap", schedule=schedule, pp=2, micros=4)


def tied_on_one_stage(world: World) -> None:
    world.set_deterministic()
    _equal(world, "op", tied=True, dp=2)
    _equal(world, "op", tied=True, tp=2)


FEW = [data_parallel_all_together, tensor_parallel]
MORE = [data_parallel_with_stages_of_zero, pipelines, tied_on_one_stage]
CHECKS = [*FEW, *MORE]

"""How far backward goes where weights are frozen: of which values of the model gradients are wanted.

A value wants a gradient if a weight that is trained went into it.  So everything after the first such weight does, and
of what comes before it nothing: no op of it keeps anything, and no message goes back through it.

    x    norm1    qkv    attention    proj   + bias    norm2    up    gelu    down   + bias    x'
         enters   norm1  qkv                 stream    norm2          up             down      leaves
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from mpitrain.models.sizes import DecoderConfig
from mpitrain.nn.freezing import is_frozen
from mpitrain.plan.traffic.slabs import all_slabs
from mpitrain.plan.traffic.step import Step

Trains = Callable[..., bool]
"""Whether a weight is trained whose name is one of these, or begins with one."""


class OfBlock(NamedTuple):
    """Of which values of a block gradients are wanted, in the order in which forward makes them.

    Attributes:
        enters: what comes into it.
        norm1, qkv, proj: what is made of it in the first branch, without the last bias.
        stream: that of both.
        norm2, up, act, down: what is made of it in the second branch; act: of up and its bias.
        leaves: what the block makes.
        router: the weights that a router gives to experts.
        trained: names of the matrices whose own gradient is wanted: `qkv`, `proj`, `up`, ...
    """

    enters: bool = True
    norm1: bool = True
    qkv: bool = True
    proj: bool = True
    stream: bool = True
    norm2: bool = True
    up: bool = True
    act: bool = True
    down: bool = True
    leaves: bool = True
    router: bool = True
    trained: frozenset[str] = frozenset(("qkv", "proj", "gate", "up", "down", "router"))


class WayBack(NamedTuple):
    """Of the whole model.

    Attributes:
        table: whether the gradient of the token table is wanted.
        embedding: whether that of what comes out of the embedding is.
        blocks: of each block, by its number.
        norm: whether that of what the last norm makes is.
        head: whether that of the head's own matrix is, which may be the table.
        parts: of every part, whether anything goes back through it.
        lowest: the first part that has a weight which is trained.
    """

    table: bool
    embedding: bool
    blocks: tuple[OfBlock, ...]
    norm: bool
    head: bool
    parts: dict[str, bool]
    lowest: str


def way_back(step: Step) -> WayBack:
    """Where gradients go in a step; everywhere, unless something is frozen."""
    return _way_back(step.sizes, step.freeze)


def trains_from(step: Step) -> int:
    """The first stage that backward comes to."""
    lowest = way_back(step).lowest
    if not lowest.startswith("blocks."):
        return step.last_stage if lowest in ("norm", "head") else 0
    number = int(lowest.partition(".")[2])
    return next(stage for stage in range(step.last_stage + 1) if number in step.blocks_of(stage))


def again(step: Step, branch: str) -> int:
    """Blocks of this rank whose attention, or mlp, runs forward twice; where nothing goes back none does."""
    return sum(runs_twice(step, number, branch) for number in step.numbers)


def runs_twice(step: Step, number: int, branch: str) -> bool:
    """Whether a block's attention, or its mlp, runs forward once more in backward."""
    back = way_back(step).blocks[number]
    if step.is_recomputed(number):
        return back.leaves
    return step.is_recomputed(number, branch) and (back.proj if branch == "attention" else back.down)


@lru_cache(maxsize=64)
def _way_back(sizes: DecoderConfig, freeze: tuple[str, ...]) -> WayBack:
    blocks = range(sizes.layers)
    if not freeze:
        parts = dict.fromkeys(("table", "positions", *(f"blocks.{n}" for n in blocks), "norm", "head"), True)
        return WayBack(True, True, tuple(OfBlock() for _ in blocks), True, True, parts, "table")
    names = [slab.name for slab in all_slabs(Step(sizes, 1))]
    trained = {name for name in names if not is_frozen(name, freeze)}

    def trains(*beginnings: str) -> bool:
        return any(name == start or name.startswith(f"{start}.") for start in beginnings for name in trained)

    table = trains("table")
    embedding = back = table or trains("positions")
    found = []
    for number in blocks:
        found.append(_of_block(f"blocks.{number}", back, trains))
        back = found[-1].leaves
    norm = back or trains("norm")
    head = table if sizes.tied else trains("head")
    parts = {"table": table, "positions": embedding, "norm": norm, "head": True}
    parts.update((f"blocks.{number}", of.leaves) for number, of in enumerate(found))
    order = ["table", "positions", *(f"blocks.{number}" for number in blocks), "norm", "head"]
    lowest = next((part for part in order if trains(part)), "head")
    return WayBack(table, embedding, tuple(found), norm, head, parts, lowest)


def _of_block(name: str, enters: bool, trains: Trains) -> OfBlock:
    attention, mlp = f"{name}.attention", f"{name}.mlp"
    norm1 = enters or trains(f"{name}.norm1")
    qkv = norm1 or trains(f"{attention}.qkv", f"{attention}.q", f"{attention}.kv")
    proj = qkv or trains(f"{attention}.proj.weight")
    stream = enters or proj or trains(f"{attention}.proj.bias")
    norm2 = stream or trains(f"{name}.norm2")
    router = norm2 or trains(f"{mlp}.router")
    up = norm2 or trains(f"{mlp}.gate", f"{mlp}.up.weight", f"{mlp}.experts.up")
    act = up or trains(f"{mlp}.up.bias")
    down = act or trains(f"{mlp}.down.weight", f"{mlp}.experts.down")
    made = down or (router and trains(f"{mlp}.router"))
    leaves = stream or made or trains(f"{mlp}.down.bias")
    of_matrices = {
        "qkv": (f"{attention}.qkv.weight", f"{attention}.q.weight", f"{attention}.kv.weight"),
        "proj": (f"{attention}.proj.weight",),
        "gate": (f"{mlp}.gate.weight",),
        "up": (f"{mlp}.up.weight", f"{mlp}.experts.up"),
        "down": (f"{mlp}.down.weight", f"{mlp}.experts.down"),
        "router": (f"{mlp}.router.weight",),
    }
    matrices = frozenset(matrix for matrix, weights in of_matrices.items() if trains(*weights))
    return OfBlock(enters, norm1, qkv, proj, stream, norm2, up, act, down, leaves, router, matrices)

"""Small layers, cut over tp or whole, and what one forward and backward pass of them gives, put together again.

`evaluate` runs a layer on some ranks, plain or with the stream cut along the sequence.  What it finds is the same on
any layout: full tensors, and gradients after the one rule.  Biases and norms start at random, so that one that is added
twice, or not at all, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.checkpoint.layout import counted_here
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.events import Event, listen
from mpitrain.nn import init
from mpitrain.nn.layers import LayerNorm, Linear
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel.data import FlatReducer
from mpitrain.parallel.grouped import GroupedColumns
from mpitrain.parallel.sequence import between
from mpitrain.parallel.tensor import ColumnLinear, RowLinear
from mpitrain.spec import Spec

BATCH, LENGTH, WIDTH, HEADS = 2, 12, 24, 12  # what 1, 2, 3 and 4 ranks divide


class Message(NamedTuple):
    """One message as the rank's listeners see it: which verb, on which axis, of how many elements."""

    verb: str
    axis: str
    size: int


class Found(NamedTuple):
    """What one pass gives: y, the gradient of x, those of the parameters; what this rank sent meanwhile."""

    y: np.ndarray
    dx: np.ndarray
    grads: dict[str, np.ndarray]
    forward: list[Message]
    backward: list[Message]
    sent: int
    own_grads: dict[str, np.ndarray]  # before the sum over the ranks


class Mlp(Module):
    """down(gelu(up(x))); `cut` over tp, or of layers that know no rank."""

    def __init__(self, tp: Communicator, sp: bool = False, name: str = "mlp", cut: bool = True) -> None:
        super().__init__(name)
        self.up: Module = Linear(f"{name}.up", WIDTH, 4 * WIDTH)
        self.down: Module = Linear(f"{name}.down", 4 * WIDTH, WIDTH)
        if cut:
            self.up = ColumnLinear(f"{name}.up", WIDTH, 4 * WIDTH, tp, sequence_parallel=sp)
            self.down = RowLinear(f"{name}.down", 4 * WIDTH, WIDTH, tp, sequence_parallel=sp)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(ops.gelu_tanh(self.up(x)))


class SelfAttention(Module):
    """proj(attention(qkv(x))), heads cut over tp; or of layers that know no rank."""

    def __init__(self, tp: Communicator, sp: bool = False, name: str = "attention", cut: bool = True) -> None:
        super().__init__(name)
        self.heads = HEADS // tp.size if cut else HEADS
        self.qkv: Module = Linear(f"{name}.qkv", WIDTH, 3 * WIDTH)
        self.proj: Module = Linear(f"{name}.proj", WIDTH, WIDTH)
        if cut:
            self.qkv = ColumnLinear(f"{name}.qkv", WIDTH, 3 * WIDTH, tp, sequence_parallel=sp)
            self.proj = RowLinear(f"{name}.proj", WIDTH, WIDTH, tp, sequence_parallel=sp)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(ops.attention(self.qkv(x), self.heads))


class GroupedAttention(Module):
    """Attention whose heads of queries share heads of keys and values."""

    def __init__(self, tp: Communicator, sp: bool, heads: int, kv_heads: int, width: int) -> None:
        super().__init__("grouped")
        self.heads = heads // tp.size
        self.columns = GroupedColumns("grouped", width, heads, kv_heads, tp, sequence_parallel=sp)
        self.proj = RowLinear("grouped.proj", width, width, tp, sequence_parallel=sp)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(ops.attention(self.columns(x), self.heads, self.columns.kv_heads))


class Norms(Module):
    """Three norms, one after the other, and nothing else: no message of their own."""

    def __init__(self, tp: Communicator, sp: bool = False, name: str = "norms", spec: Spec | None = None) -> None:
        super().__init__(name)
        spec = between(sp) if spec is None else spec
        self.norms = [LayerNorm(f"{name}.{i}", WIDTH, spec=spec) for i in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = ops.tanh(norm(x))
        return x


class Chain(Module):
    """Modules one after the other."""

    def __init__(self, *links: Module) -> None:
        super().__init__("chain")
        self.links = list(links)

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(x)
        return x


def whole(mesh: Mesh, parameters: Iterable[Parameter], arrays: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Full tensors from the slabs of all ranks: the rank that counts a slab brings it, the others bring zeros."""
    found = {}
    for p, array in zip(parameters, arrays, strict=True):
        full = np.zeros(p.full_shape)
        if counted_here(p.spec, mesh.coords):
            full[p.rectangle] = array
        found[p.name] = mesh.world.all_reduce(full)
    return found


def messages(into: list[Message]) -> Callable[[Event], None]:
    """A listener that writes down every message of this rank."""

    def hear(event: Event) -> None:
        if (event.kind, event.phase) == ("message", "begin"):
            into.append(Message(event.name, event.info["axis"], event.info["array"].size))

    return hear


def sent(axis: Communicator) -> int:
    """Bytes that this rank has sent over an axis so far."""
    return sum(axis.sent_bytes.values())


def pass_of(layer: Module, mesh: Mesh, sp: bool, shape: tuple[int, ...]) -> Found:
    """Forward and backward of a layer whose weights are made, on this rank."""
    length = shape[1] // mesh.tp.size if sp else shape[1]
    here = slice(mesh.tp.rank * length, (mesh.tp.rank + 1) * length) if sp else slice(None)
    draw = np.random.default_rng(0)
    x = Tensor(draw.standard_normal(shape)[:, here], requires_grad=True)
    seed = draw.standard_normal(shape)[:, here]
    layer.start_step()
    before = sent(mesh.tp)
    forward: list[Message] = []
    backward: list[Message] = []
    with listen(messages(forward)), Tape() as tape:
        y = layer(x)
    with listen(messages(backward)):
        dx = tape.run_backward([(y, seed)])[x]
    bytes_sent = sent(mesh.tp) - before
    parameters = layer.parameters()
    own = {p.name: p.grad.copy() for p in parameters}
    FlatReducer(layer.flats, mesh).finish()
    y_whole, dx_whole = (mesh.tp.all_gather(a, 1) if sp else a for a in (y.data, dx))
    grads = whole(mesh, parameters, [p.grad for p in parameters])
    return Found(y_whole, dx_whole, grads, forward, backward, bytes_sent, own)


def evaluate(
    make: Callable[[Communicator, bool], Module],
    tp: int,
    sp: bool = False,
    shape: tuple[int, ...] = (BATCH, LENGTH, WIDTH),
    seed: int = 3,
) -> list[Found]:
    """What each rank finds.

    Args:
        make: the layer for an axis, plain or sequence parallel.
        tp: number of ranks.
        sp: whether the stream is cut along the sequence.
        shape: of the whole stream.
        seed: of the weights.
    """

    def main() -> Found:
        mesh = Mesh(world(), tp=tp)
        layer = make(mesh.tp, sp)
        for p in layer.parameters():
            if len(p.full_shape) == 1:
                p.init = init.normal(1.0)
        layer.materialize(mesh, seed=seed, dtype=np.float64)
        return pass_of(layer, mesh, sp, shape)

    return LocalWorld(tp).run(main)


def assert_same(found: Found, serial: Found, tolerance: float = 1e-12) -> None:
    """Values and gradients are those of the serial layer, in units of the largest element of each tensor."""
    pairs: dict[str, tuple[Any, Any]] = {"y": (found.y, serial.y), "dx": (found.dx, serial.dx)}
    assert found.grads.keys() == serial.grads.keys()
    pairs.update((name, (found.grads[name], grad)) for name, grad in serial.grads.items())
    for name, (mine, truth) in pairs.items():
        assert mine.shape == truth.shape
        gap, scale = np.abs(mine - truth).max(), np.abs(truth).max()
        assert gap <= tolerance * scale, f"{name}: {gap:.2e} beside {scale:.2e}"

"""Lesson 5: between two cut layers the ranks share the sequence: the same bytes are sent, and less is kept.

    mpitrain local -n 4 examples/05_sequence_parallel.py       (or: mpirun -n 4 python examples/05_sequence_parallel.py)

y = x + dropout(down(gelu(up(norm(x))))), with up and down cut over tp, and the stream in two ways:

    plain      x  -- norm --  --copy-->        [up ... down]  --all_reduce-->      dropout, +      every rank all of it
    sequence   x  -- norm --  --all_gather-->  [up ... down]  --reduce_scatter-->  dropout, +      every rank a slice

An all-reduce is a reduce-scatter and an all-gather.  Prints both side by side, and compares them with one rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.events import Event, listen
from mpitrain.nn.layers import LayerNorm, Residual
from mpitrain.nn.module import Module
from mpitrain.parallel.data import FlatReducer
from mpitrain.parallel.sequence import between
from mpitrain.parallel.tensor import ColumnLinear, RowLinear
from mpitrain.rng import Draw

BATCH, LENGTH, WIDTH = 2, 24, 12


class Block(Module):
    """Half a transformer layer."""

    def __init__(self, mesh: Mesh, sequence_parallel: bool) -> None:
        super().__init__("block")
        # Every rank then uses norm and bias for its own tokens: Replicate on tp, so their gradients are summed.
        self.norm = LayerNorm("norm", WIDTH, spec=between(sequence_parallel))
        self.up = ColumnLinear("up", WIDTH, 4 * WIDTH, mesh.tp, sequence_parallel=sequence_parallel)
        self.down = RowLinear("down", 4 * WIDTH, WIDTH, mesh.tp, sequence_parallel=sequence_parallel)
        self.residual = Residual("residual", 0.25)

    def forward(self, x: Tensor, draw: Draw) -> Tensor:
        hidden = ops.gelu_tanh(self.up(self.norm(x)))
        return self.residual(x, self.down(hidden, add_bias=False), self.down.bias, draw)


class Pass(NamedTuple):
    """What one forward and backward pass gives on one rank."""

    values: dict[str, np.ndarray]  # y and the gradient of x, put together again, and the gradients of the weights
    where: dict[str, tuple[slice, ...]]  # a weight's rectangle
    facts: dict[str, str]


def run(sequence_parallel: bool) -> Pass:
    """Forward and backward with given numbers, on all ranks of the surrounding world."""
    mesh = Mesh(world(), tp=world().size)
    block = Block(mesh, sequence_parallel)
    block.materialize(mesh, seed=1, dtype=np.float64)
    block.start_step()
    length = LENGTH // mesh.tp.size if sequence_parallel else LENGTH
    mine = slice(mesh.tp.rank * length, (mesh.tp.rank + 1) * length) if sequence_parallel else slice(0, LENGTH)
    random = np.random.default_rng(1)
    whole_x, whole_seed = random.normal(size=(2, BATCH, LENGTH, WIDTH))
    x = Tensor(np.ascontiguousarray(whole_x[:, mine]), requires_grad=True)
    # A mask follows from a token's place and position, not from the rank that draws it.
    draw = Draw(seed=1, step=0, places=np.arange(BATCH), positions=np.arange(LENGTH)[mine])
    sent: list[str] = []

    def hear(event: Event) -> None:
        if (event.kind, event.phase) == ("message", "begin"):
            sent.append(event.name)

    with listen(hear):
        with Tape() as tape:
            y = block(x, draw)
        forward, kept = len(sent), tape.nbytes
        dx = tape.run_backward([(y, whole_seed[:, mine])])[x]
    summand = block.norm.weight.grad[1]
    facts = {
        "stream on a rank": f"{x.shape}",
        "forward sends": " ".join(sent[:forward]) or "nothing",
        "backward sends": " ".join(sent[forward:]) or "nothing",
        "bytes sent by a rank": f"{sum(mesh.tp.sent_bytes.values()):,}",
        "bytes kept for backward": f"{kept:,}",
        "norm.weight is": f"{block.norm.weight.spec.state('tp')}",
        "its second gradient": " ".join(f"{g:.2f}" for g in mesh.tp.exchange(summand)),
    }
    FlatReducer(block.flats, mesh).finish()  # the one rule: summed over the axes where a parameter is Replicate
    facts["after the one rule"] = " ".join(f"{g:.2f}" for g in mesh.tp.exchange(block.norm.weight.grad[1]))
    join = (lambda a: mesh.tp.all_gather(a, 1)) if sequence_parallel else (lambda a: a)
    values = {"y": join(y.data), "dx": join(dx), **{p.name: p.grad for p in block.parameters()}}
    return Pass(values, {p.name: p.rectangle for p in block.parameters()}, facts)


def main() -> float:
    """Print the lesson; return the largest difference of a value or gradient on any rank."""
    ranks = world()
    plain, sequence = run(False), run(True)
    [one] = LocalWorld(1).run(run, False)  # the same function, in a world of one rank
    worst = 0.0
    for found in (plain, sequence):
        for name, value in found.values.items():
            truth = one.values[name][found.where.get(name, ...)]
            worst = max(worst, float(np.abs(value - truth).max() / np.abs(truth).max()))
    worst = float(ranks.all_reduce(np.array(worst), "max"))
    if ranks.rank == 0:
        print(f"{ranks.size} ranks{'':<18} {'plain':<28} sequence parallel\n")
        for name, fact in plain.facts.items():
            print(f"{name:<25} {fact:<28} {sequence.facts[name]}")
        print(f"\nlargest difference of a value or gradient to those of one rank: {worst:.1e}")
    assert worst < 1e-12, worst
    return worst


if __name__ == "__main__":
    main()

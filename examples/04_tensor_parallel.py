"""Lesson 4: a layer that is cut over ranks is still that layer, if two collectives stand at its ends.

    mpitrain local -n 4 examples/04_tensor_parallel.py          (or: mpirun -n 4 python examples/04_tensor_parallel.py)

y = gelu(x W + b) V + c, with W cut by columns and V by rows, so that each rank computes some of the hidden units:

    x  --copy-->  gelu(x W_i + b_i) V_i  --all_reduce-->  + c  =  y

Prints what a rank holds, its tape, its messages, and what three mistakes would do.  The library's ColumnLinear and
RowLinear are these lines.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpitrain import collectives
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.events import Event, listen
from mpitrain.nn import init
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.spec import Shard

WIDTH, HIDDEN = 8, 24


class Mlp(Module):
    """The layer: this rank's slabs of it, and where the messages stand."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__("mlp")
        self.tp = mesh.tp
        self.w = Parameter("mlp.w", (WIDTH, HIDDEN), {"tp": Shard(1)}, init=init.fan_in())
        self.b = Parameter("mlp.b", (HIDDEN,), {"tp": Shard(0)}, init=init.normal(1.0))
        self.v = Parameter("mlp.v", (HIDDEN, WIDTH), {"tp": Shard(0)}, init=init.fan_in())
        self.c = Parameter("mlp.c", (WIDTH,), init=init.normal(1.0))  # Invariant on tp: one value that all hold

    def forward(self, x, enter=collectives.copy, leave=collectives.all_reduce, bias_first=False):
        # gelu works on each column alone, so columns can be cut; it could not on summands: gelu(p + q) is not theirs.
        part = ops.gelu_tanh(enter(x, self.tp) @ self.w + self.b) @ self.v
        return leave(part + self.c, self.tp) if bias_first else leave(part, self.tp) + self.c


class Pass(NamedTuple):
    """What one forward and backward pass gives on one rank."""

    mlp: Mlp
    y: np.ndarray
    dx: np.ndarray
    tape: str
    forward: list[str]  # what it sent
    backward: list[str]


def run(**how) -> Pass:
    """Forward and backward on all ranks of the surrounding world."""
    mesh = Mesh(world(), tp=world().size)
    mlp = Mlp(mesh)
    mlp.materialize(mesh, seed=1, dtype=np.float64)
    mlp.start_step()
    random = np.random.default_rng(1)  # the batch is the same on all ranks of tp
    x, seed = Tensor(random.normal(size=(3, WIDTH)), requires_grad=True), random.normal(size=(3, WIDTH))
    sent: list[str] = []

    def hear(event: Event) -> None:
        if (event.kind, event.phase) == ("message", "begin"):
            sent.append(f"{event.name} {event.info['array'].shape}")

    with listen(hear):
        with Tape() as tape:
            y = mlp(x, **how)
        text, forward = str(tape), len(sent)
        dx = tape.run_backward([(y, seed)])[x]
    return Pass(mlp, y.data, dx, text, sent[:forward], sent[forward:])


def gap(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference, relative to the largest element."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def main() -> float:
    """Print the lesson; return the largest difference of a value or gradient, on any rank, to those of one rank."""
    tp = world()

    def say(text: str = "") -> None:
        if tp.rank == 0:
            print(text)

    mine = run()
    [one] = LocalWorld(1).run(run)  # the same function, in a world of one rank
    say(f"{tp.size} ranks.  Rank 0 holds:\n")
    for p in mine.mlp.parameters():
        say(f"    {p.name}  {p.data.shape!s:<8} of {p.full_shape!s:<8} {p.spec.state('tp')}")
    say("\n    ".join(["\nIts tape:\n", *mine.tape.splitlines()]))
    say(f"\nIt sends forward: {mine.forward or 'nothing'}, backward: {mine.backward or 'nothing'}\n\nMistakes:\n")
    wrong = run(bias_first=True)
    biases = float(np.mean((wrong.y - one.y) / one.mlp.c.data))
    say(f"    the bias added before the sum        y is wrong by {biases:.2f} biases")
    wrong = run(enter=lambda x, axis: x)
    say(f"    copy left out                        the gradient of x has an error of {gap(wrong.dx, one.dx):.0%}")
    wrong = run(leave=collectives.sum_everywhere)
    factor = float(np.median(wrong.dx / one.dx))
    say(f"    sum_everywhere where y is one value  gradients are {factor:.2f} times what they should be\n")
    pairs = [(mine.y, one.y), (mine.dx, one.dx)]
    pairs += [(p.grad, q.grad[p.rectangle]) for p, q in zip(mine.mlp.parameters(), one.mlp.parameters(), strict=True)]
    worst = float(tp.all_reduce(np.array(max(gap(a, b) for a, b in pairs)), "max"))
    say(f"largest difference of a value or gradient to those of one rank: {worst:.1e}")
    assert worst < 1e-12, worst
    return worst


if __name__ == "__main__":
    main()

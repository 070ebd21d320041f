"""Lesson 2: a value across ranks is in one of four states; a collective is an arrow, its backward that of the duals.

    mpitrain local -n 4 examples/02_collectives.py            (or: mpirun -n 4 python examples/02_collectives.py)

Prints the table of states and arrows, what two gathers do to a gradient, and for every arrow the adjoint identity

    <F x, g> = <x, F* g>

in which <,> adds over the ranks, and counts once what is Invariant.  On one rank, too, where nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpitrain import collectives
from mpitrain.autograd import Tape, Tensor
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.spec import State, dual

ROWS = 2  # of each rank's slice

ARROWS: dict[str, Callable[[Tensor, Communicator], Tensor]] = {
    "copy": collectives.copy,
    "all_reduce": collectives.all_reduce,
    "sum_everywhere": collectives.sum_everywhere,
    "all_gather": lambda x, axis: collectives.all_gather(x, axis, dim=0),
    "reduce_scatter": lambda x, axis: collectives.reduce_scatter(x, axis, dim=0),
    "gather": lambda x, axis: collectives.gather(x, axis, dim=0),
    "split": lambda x, axis: collectives.split(x, axis, dim=0),
    "all_to_all": lambda x, axis: collectives.all_to_all(x, axis, i=0, j=1),
    "shift": lambda x, axis: collectives.shift(x, axis, k=1),
}


def draw(state: State, axis: Communicator, seed: int) -> np.ndarray:
    """Random numbers in a state: the same on every rank, or the rank's own; a slice, or the whole."""
    is_own = state.name in ("Partial", "Shard")
    whole = [ROWS * axis.size, ROWS * axis.size]
    if state.dim is not None:
        whole[state.dim] = ROWS
    return np.random.default_rng([seed, axis.rank if is_own else 0]).normal(size=whole)


def dot(a: np.ndarray, b: np.ndarray, state: State, axis: Communicator) -> float:
    """<a, b> over the ranks."""
    mine = np.vdot(a, b)
    return float(mine if state.name == "Invariant" else axis.all_reduce(np.array(mine)))


def adjoint_difference(name: str, axis: Communicator) -> tuple[State, State, float]:
    """The states of an arrow, and how far its backward is from its adjoint."""
    with Tape() as tape:
        ARROWS[name](Tensor(np.zeros((ROWS * axis.size,) * 2), requires_grad=True), axis)
    (node,) = tape.nodes
    start, end = node.function.states(**node.static)

    x = Tensor(draw(start, axis, seed=1), requires_grad=True)
    with Tape() as tape:
        y = ARROWS[name](x, axis)
    g = draw(dual(end), axis, seed=2)  # a gradient in the state that the gradient of y has
    tape.run_backward([(y, g)])
    left, right = dot(y.data, g, end, axis), dot(x.data, tape.grads[x], start, axis)
    return start, end, abs(left - right) / max(abs(left), 1e-300)


def gradient_of(name: str, axis: Communicator) -> np.ndarray:
    """The gradient of a slice that was gathered, where every rank finds the gradient 1 for the whole."""
    x = Tensor(np.full((1, 1), 1.0 + axis.rank), requires_grad=True)
    with Tape() as tape:
        y = ARROWS[name](x, axis)
    tape.run_backward([(y, np.ones(y.shape))])
    return tape.grads[x]


def main() -> float:
    """Print the lesson; return the largest difference of an adjoint."""
    mesh = Mesh(world())
    axis = mesh.dp

    def say(text: str = "") -> None:
        if mesh.is_reporter:
            print(text)

    say(f"{axis.size} ranks\n")
    say(f"{'function':<16} {'arrow':<28} {'backward':<28} |<Fx,g> - <x,F*g>|")
    worst = 0.0
    for name in ARROWS:
        start, end, difference = adjoint_difference(name, axis)
        worst = max(worst, difference)
        say(f"{name:<16} {f'{start} -> {end}':<28} {f'{dual(end)} -> {dual(start)}':<28} {difference:.1e}")

    mine, same = gradient_of("all_gather", axis), gradient_of("gather", axis)
    say("\nTwo gathers, the same forward.  Every rank has the gradient 1 for the whole:")
    say(f"    all_gather: each rank's 1 is its own part of the work, they add up: {mine.item():.0f}")
    say(f"    gather:     the ranks hold one value, and its gradient once:        {same.item():.0f}")
    say(f"\nlargest difference of an adjoint: {worst:.1e}")
    assert worst < 1e-12, worst
    return worst


if __name__ == "__main__":
    main()

"""Every differentiable message is the adjoint of its backward, on every dim and number of ranks.

For an arrow F from state a to state b:   <F x, g>_b = <x, F* g>_a,   where the product sums over the ranks, except in
state Invariant, whose value counts once.  x lies in a, g in the dual of b.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import collectives
from mpitrain.autograd import ops  # noqa: F401  (installs operators)
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.collectives import ARROWS, AllToAll, Arrow
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.errors import ShapeError
from mpitrain.spec import INVARIANT, REPLICATE, State, dual

RANKS = (1, 2, 3, 4, 8)


def draw(axis: Communicator, state: State, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A value in `state`: the same on all ranks where the state says so."""
    alike = state in (INVARIANT, REPLICATE)
    return np.random.default_rng((seed, 0 if alike else axis.rank + 1)).standard_normal(shape)


def product(axis: Communicator, state: State, a: np.ndarray, b: np.ndarray) -> float:
    """The inner product of a value in `state` with its gradient."""
    here = float((a * b).sum())
    return here if state == INVARIANT else float(axis.all_reduce(np.array(here)))


def statics(arrow: type[Arrow], n: int) -> list[dict[str, Any]]:
    """All ways to call an arrow on tensors of three dims."""
    sides = [side.argument for side in arrow.arrow if not isinstance(side, State)]
    if arrow is AllToAll:
        uneven = [[(a + 2 * b) % 3 for b in range(n)] for a in range(n)]
        even = [{"i": i, "j": j, "counts": None} for i in range(3) for j in range(3)]
        return even + [{"i": d, "j": d, "counts": uneven} for d in range(3)]
    if arrow is collectives.Pick:
        return [{"dim": dim, "start": n // 2, "stop": n} for dim in range(3)]
    if arrow is collectives.Shift:
        return [{"k": k, "dim": dim} for k in (-1, 0, 1, 2, n) for dim in (0, 2)]
    return [{"dim": dim} for dim in range(3)] if "dim" in sides else [{}]


def check_adjoint(arrow: type[Arrow]) -> None:
    axis = world()
    n, me = axis.size, axis.rank
    for static in statics(arrow, n):
        shape = [2 * n, 3 * n, n]
        if static.get("counts") is not None:
            table = static["counts"]
            static = {**static, "counts": (table[me], [row[me] for row in table])}
            shape[static["j"]] = sum(table[me])
        start, end = arrow.states(**static)
        x = draw(axis, start, tuple(shape), 1)
        keep = x.copy()
        y, saved = arrow.forward(x, axis=axis, **static)
        g = draw(axis, dual(end), y.shape, 2)
        (back,) = arrow.backward(g, *saved, wanted=(True,), axis=axis, **static)
        assert (back.shape, back.dtype) == (x.shape, x.dtype)
        assert (x == keep).all()
        left, right = product(axis, end, y, g), product(axis, start, x, back)
        assert abs(left - right) <= 1e-12 * max(1.0, abs(left)), (static, left, right)
        for value, state in ((y, end), (back, dual(start))):  # what claims to be the same everywhere is
            if state in (INVARIANT, REPLICATE):
                for other in np.split(axis.all_gather(value.reshape(1, -1)), n):
                    assert other.tobytes() == value.tobytes()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("arrow", ARROWS, ids=lambda arrow: arrow.title())
def test_an_arrow_is_the_adjoint_of_its_backward(arrow: type[Arrow], ranks: int) -> None:
    LocalWorld(ranks).run(check_adjoint, arrow)


def test_every_arrow_goes_back_along_the_duals() -> None:
    """The table: backward is an arrow from the dual of the end to the dual of the start, which undoes or repeats it."""
    table = {arrow.title(): arrow.states(**statics(arrow, 2)[0]) for arrow in ARROWS}
    back = {
        "copy": "sum",
        "all_reduce": "nothing",
        "sum_everywhere": "sum_everywhere",
        "all_gather": "reduce_scatter",
        "reduce_scatter": "all_gather",
        "gather": "split",
        "split": "gather",
        "pick": "nothing",
        "all_to_all": "all_to_all",
        "shift": "shift",
    }
    assert back.keys() == table.keys()
    for name, reverse in back.items():
        start, end = table[name]
        if reverse in table:
            assert (dual(end), dual(start)) == table[reverse]


def test_an_arrow_prints_its_states() -> None:
    assert collectives.AllGather.arrow_text(axis=None, dim=0) == "Shard(0) -> Replicate"
    assert collectives.AllReduce.arrow_text(axis=None) == "Partial -> Invariant"
    assert AllToAll.arrow_text(axis=None, i=1, j=2, counts=None) == "Shard(1) -> Shard(2)"

    def main() -> str:
        with Tape() as tape:
            collectives.all_gather(Tensor(np.ones((2, 3)), requires_grad=True), world(), dim=1)
        return str(tape)

    assert "all_gather(%0; world, dim=1)  Shard(1) -> Replicate" in LocalWorld(2).run(main)[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_column_and_row_block_has_the_gradient_of_the_whole(ranks: int) -> None:
    """T3.1: y = g(f(x) W) with the summed dim of W cut over the ranks; dx is the serial one, not ranks times it."""

    def main() -> None:
        axis = world()
        draw = np.random.default_rng(0)
        x, w1, w2, seed = (draw.standard_normal(shape) for shape in ((3, 5), (5, 8), (8, 5), (3, 5)))
        mine = slice(axis.rank * 8 // axis.size, (axis.rank + 1) * 8 // axis.size)
        leaf, up, down = (Tensor(a.copy(), requires_grad=True) for a in (x, w1[:, mine], w2[mine]))
        with Tape() as tape:
            y = collectives.all_reduce(collectives.copy(leaf, axis) @ up @ down, axis)
        np.testing.assert_allclose(y.data, x @ w1 @ w2, rtol=1e-12, atol=1e-12)
        grads = tape.run_backward([(y, seed)])
        np.testing.assert_allclose(grads[leaf], seed @ w2.T @ w1.T, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(grads[up], (x.T @ seed @ w2.T)[:, mine], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(grads[down], ((x @ w1).T @ seed)[mine], rtol=1e-12, atol=1e-12)

    LocalWorld(ranks).run(main)


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence parallel"])
def test_a_chain_of_six_blocks_has_the_gradient_of_the_whole(sequence: bool) -> None:
    """T3.3: an error of one factor t a block would grow to t**6.  T3.2: through all-gather and reduce-scatter, too."""

    def main() -> None:
        axis = world()
        draw = np.random.default_rng(1)
        weights = [(draw.standard_normal((6, 8)) / 3, draw.standard_normal((8, 6)) / 3) for _ in range(6)]
        x, seed = draw.standard_normal((4, 6)), draw.standard_normal((4, 6))
        truth, back = x, seed
        for up, down in weights:
            truth = truth @ up @ down
        for up, down in reversed(weights):
            back = back @ down.T @ up.T
        mine = slice(axis.rank * 8 // axis.size, (axis.rank + 1) * 8 // axis.size)
        rows = slice(axis.rank * 4 // axis.size, (axis.rank + 1) * 4 // axis.size)
        leaf = Tensor(x, requires_grad=True)
        with Tape() as tape:
            h = collectives.split(leaf, axis, 0) if sequence else leaf
            for up, down in weights:
                whole = collectives.all_gather(h, axis, 0) if sequence else collectives.copy(h, axis)
                part = whole @ Tensor(up[:, mine].copy()) @ Tensor(down[mine].copy())
                h = collectives.reduce_scatter(part, axis, 0) if sequence else collectives.all_reduce(part, axis)
                if sequence:
                    assert h.shape == (4 // axis.size, 6)
            y = collectives.gather(h, axis, 0) if sequence else h
        np.testing.assert_allclose(y.data, truth, rtol=1e-12, atol=1e-12)
        assert not sequence or (y.data[rows] == h.data).all()
        np.testing.assert_allclose(tape.run_backward([(y, seed)])[leaf], back, rtol=1e-12, atol=1e-12)

    LocalWorld(4).run(main)


def test_ulysses_and_back_is_nothing() -> None:
    def main() -> None:
        axis = world()
        x = Tensor(np.random.default_rng(axis.rank).standard_normal((2, 4, 3)), requires_grad=True)
        with Tape() as tape:
            y = collectives.all_to_all(collectives.all_to_all(x, axis, 0, 1), axis, 1, 0)
        assert (y.data == x.data).all()
        assert (tape.run_backward([(y, x.data)])[x] == x.data).all()

    LocalWorld(4).run(main)


def test_the_maximum_is_a_constant() -> None:
    def main() -> None:
        axis = world()
        x = Tensor(np.array([1.0 * axis.rank, -axis.rank]), requires_grad=True)
        with Tape() as tape:
            top = collectives.max_over(x, axis)
        assert top.data.tolist() == [axis.size - 1.0, 0.0]
        assert not top.requires_grad
        assert len(tape) == 0

    LocalWorld(3).run(main)


def test_half_precision_goes_through_every_arrow() -> None:
    def main() -> None:
        axis = world()
        x = Tensor(np.ones((4, 4), np.float16), requires_grad=True)
        for function in (collectives.copy, collectives.all_reduce, collectives.all_gather, collectives.reduce_scatter):
            with Tape() as tape:
                y = function(x, axis)
            assert y.dtype == np.float16
            assert tape.run_backward([(y, np.ones(y.shape, np.float16))])[x].dtype == np.float16

    LocalWorld(2).run(main)


def test_a_dim_that_does_not_divide_is_refused() -> None:
    def main() -> None:
        with pytest.raises(
            ShapeError, match=r"split: dim 0 of shape \(3, 2\) is not divisible by axis world of size 2"
        ):
            collectives.split(Tensor(np.ones((3, 2))), world())

    LocalWorld(2).run(main)

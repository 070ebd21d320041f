"""Adafactor: a second moment kept as the sums of its rows and columns, and steps that are relative to the weights.

AdamW keeps two numbers a weight.  Adafactor keeps n + m for a matrix of n x m: the row sums R and the column sums C of
the squared gradient.  The matrix of rank one that has these sums is R C / sum(R).

    V = R C / sum(R)          second moment: every element, from a sum of its row and one of its column
    U = G / sqrt(V)           direction, about 1 in every element
    X = X - alpha U           alpha = RMS(X) rho: a step is a share of the weights, whatever their scale

R, C, RMS(X) and RMS(U) are of the *logical* tensor.  Where ranks hold parts of it, each of these numbers is a sum over
the ranks: `update` hands out its own summands where it needs such sums, twice, and is given the sums.  So the method is
one straight function, and whoever drives it (`Adafactor`) packs the summands of all parameters into one message.

Paper: Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mpitrain import kernels
from mpitrain.backend import Array, array_module
from mpitrain.comm.mesh import Mesh
from mpitrain.kernels.blocks import row_blocks, vector_blocks
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.groups import Group, Treatment
from mpitrain.optim.logical import Cut, LogicalSums, Sums
from mpitrain.optim.optimizer import Optimizer, StateTensor, require
from mpitrain.spec import slab_shape


class Hyper(NamedTuple):
    """Numbers of an update, by the letters of the paper.

    update: t, counted from 1; lr: the largest relative step; beta1: decay of the mean of directions, 0 keeps none;
    power: beta2 is 1 - t^-power; eps1: added to squared gradients; eps2: the least scale of weights; clip: d, the
    largest RMS of a direction; weight_decay: decoupled.
    """

    update: int
    lr: float = 1e-2
    beta1: float = 0.0
    power: float = 0.8
    eps1: float = 1e-30
    eps2: float = 1e-3
    clip: float = 1.0
    weight_decay: float = 0.0


def update(
    p: Array, g: Array, state: Mapping[str, Array], hyper: Hyper, shape: tuple[int, ...], counts: bool = True
) -> Generator[Sums, Sums, None]:
    """One update in place of the weights p (X) and their state by the gradient g (G), which is kept.

        rho = min(lr, 1 / sqrt(t))          alpha = max(eps2, RMS(X)) rho          beta2 = 1 - t^-0.8
        R = beta2 R + (1 - beta2) row sums of (G^2 + eps1)                         C likewise, of columns
        V = (R / sum R) C                   in this order: R C would underflow where gradients are tiny
        U = G / sqrt(V)                     U = U / max(1, RMS(U) / d)
        M = beta1 M + (1 - beta1) U         only with beta1; else M = U
        X = X - lr weight_decay X - alpha M                                        alpha of the X before

    A vector or a scalar keeps V itself, V = beta2 V + (1 - beta2) (G^2 + eps1).  Of a tensor of more dims the last two
    make matrices, each with row and column sums of its own, as one of each expert in (E, a, b); RMS is over all of
    them, as in torch.optim.Adafactor.

    Weights decay by lr, not by alpha, as in torch.optim.Adafactor and in AdamW.

    Args:
        p: this rank's part of the weights.
        g: of their gradient, of the same shape and dtype.
        state: `row_sums` (..., n) and `column_sums` (..., m), or `second_moment`; `first_moment` with beta1.
        hyper: the numbers of this update.
        shape: of the logical tensor.
        counts: of the ranks that hold other columns of the same rows, whether this one brings the sum of what R was.

    Yields:
        Twice: this part's summands; the logical tensor's sums are sent back.  Alone, they are the same.
    """
    xp = array_module(p)
    fresh = float(hyper.update) ** -hyper.power  # 1 - beta2
    size = math.prod(shape)
    squares = _scalar(kernels.sum_of_squares(p), p)
    if len(shape) > 1:
        n, m = shape[-2:]
        r, c = state["row_sums"], state["column_sums"]
        p, g = _matrices(p), _matrices(g)
        rows, columns = _sums_of_squares(g)
        rows, columns = rows.reshape(r.shape), columns.reshape(c.shape)
        total = rows.sum(-1) * fresh + (r.sum(-1) * (1.0 - fresh) if counts else 0.0)
        sums = yield {"rows": rows, "columns": columns, "matrix": total, "tensor": squares}
        _decay_into(r, sums["rows"] + m * hyper.eps1, fresh)
        _decay_into(c, sums["columns"] + n * hyper.eps1, fresh)
        total = sums["matrix"] + (fresh * n * m) * hyper.eps1
        by_row, by_column = xp.sqrt(total[..., None] / r), 1.0 / xp.sqrt(c)  # 1 / sqrt of (R / sum R) and of C
    else:
        v = state["second_moment"].reshape(-1)
        p, g = p.reshape(-1), g.reshape(-1)
        sums = yield {"tensor": squares}
        _decay_into(v, g * g + hyper.eps1, fresh)
    scale = xp.maximum(xp.sqrt(sums["tensor"] / size), hyper.eps2)
    alpha = scale * min(hyper.lr, hyper.update**-0.5)

    def directions() -> Iterator[tuple[Any, Array]]:
        return _factored(g, by_row, by_column) if len(shape) > 1 else _full(g, v)

    # U is made twice, in blocks, and never as a whole: that would be as much memory as the method saves.
    norm = sum((kernels.sum_of_squares(u) for _, u in directions()), start=0.0)
    sums = yield {"tensor": _scalar(norm, p)}
    shrink = 1.0 / xp.maximum(xp.sqrt(sums["tensor"] / size) / hyper.clip, 1.0)
    if hyper.weight_decay:
        p *= 1.0 - hyper.lr * hyper.weight_decay
    mean = state["first_moment"].reshape(p.shape) if hyper.beta1 else None
    for block, u in directions():
        u *= shrink
        if mean is not None:
            _decay_into(mean[block], u, 1.0 - hyper.beta1)
            xp.multiply(mean[block], alpha, out=u)
        else:
            u *= alpha
        p[block] -= u


def alone(course: Generator[Sums, Sums, None]) -> None:
    """Run an `update` of a tensor that is whole here: its own summands are the sums."""
    with suppress(StopIteration):
        course.send(course.send(next(course)))


def _factored(g: Array, by_row: Array, by_column: Array) -> Iterator[tuple[Any, Array]]:
    """(block, its directions) over matrices (k, n, m)."""
    by_row, by_column = by_row.reshape(*g.shape[:-1], 1), by_column.reshape(g.shape[0], 1, g.shape[-1])
    for ks, ns in _blocks(g):
        u = g[ks, ns] * by_column[ks]
        u *= by_row[ks, ns]
        yield (ks, ns), u


def _full(g: Array, v: Array) -> Iterator[tuple[Any, Array]]:
    """(block, its directions) over a vector."""
    xp = array_module(g)
    for block, u in vector_blocks(g):
        xp.sqrt(v[block], out=u)
        xp.divide(g[block], u, out=u)
        yield block, u


def _sums_of_squares(g: Array) -> tuple[Array, Array]:
    """Of matrices (k, n, m) the sums over rows (k, n) and over columns (k, m).

    Plain additions in a fixed order, so that copies of a tensor on two ranks get the same bits.
    """
    xp = array_module(g)
    rows, columns = xp.zeros(g.shape[:-1], g.dtype), xp.zeros((g.shape[0], g.shape[-1]), g.dtype)
    for ks, ns in _blocks(g):
        squares = g[ks, ns] * g[ks, ns]
        rows[ks, ns] = squares.sum(-1)
        columns[ks] += squares.sum(-2)
    return rows, columns


def _blocks(g: Array) -> Iterator[tuple[slice, slice]]:
    """Matrices, or rows of one, that stay in a core's cache together."""
    xp, (k, n, m) = array_module(g), g.shape
    for ks in row_blocks(xp, k, n * m):
        for ns in row_blocks(xp, n, m * (ks.stop - ks.start)):
            yield ks, ns


def _matrices(x: Array) -> Array:
    """A view (k, n, m), whatever dims come before the last two."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _decay_into(mean: Array, new: Array, share: float) -> None:
    """mean = (1 - share) mean + share new, in place."""
    mean *= 1.0 - share
    mean += new * share


def _scalar(value: Any, like: Array) -> Array:
    """A number as an array without dims, of the dtype and on the device of another."""
    return array_module(like).asarray(value, dtype=like.dtype)


# ------------------------------------------------------------------------------------------------------- the optimizer


class Adafactor(Optimizer):
    """Adafactor; the numbers of torch.optim.Adafactor where gradients are well above its eps.

    Args:
        parameters: what to train.
        mesh: the layout; needed where ranks hold parts of a parameter.
        lr: the largest relative step of a `step` that is given none.
        beta1: decay rate of the mean of directions, in [0, 1); 0 keeps none.
        eps: (added to squared gradients, least scale of weights); those of the paper unless given.  The root of the
            first is the size of a gradient below which it moves ever less; rounding in a gradient whose true value is
            zero, as that of a key's bias, is far above 1e-15 in float32.
        clip: largest RMS of a tensor's direction; independent of clipping the gradient.
        power: the second moment's decay rate is 1 - t^-power; above 0, at most 1.
        weight_decay: decoupled, times lr; applies to the parameters with `decay`.
        groups: other learning rates and decays by name (`mpitrain.optim.groups`).

    A fused projection (queries, keys and values in one matrix) is one matrix: what is factored is the logical tensor,
    so it does not depend on the layout.

    Raises:
        ConfigError: a value is out of its range, or a parameter is cut and there is no mesh, or it is cut over pp,
            whose ranks update at different times.

    Memory: n + m numbers of the masters' dtype for a matrix (n, m), and as many as weights with beta1.
    Cost: two all-gathers a step for each set of axes over which parameters are cut: 2 and the row or column sums that
    are not whole here for each of them in the first, one number for each in the second.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        *,
        mesh: Mesh | None = None,
        lr: float = 1e-2,
        beta1: float = 0.0,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip: float = 1.0,
        power: float = 0.8,
        weight_decay: float = 0.0,
        groups: Sequence[Group] = (),
    ) -> None:
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, groups=groups, mesh=mesh)
        require("beta1", beta1, 0 <= beta1 < 1, "at least 0, below 1")
        require("eps1", eps[0], eps[0] >= 1e-37, "1e-37 or more, which is not 0 in float32")
        require("eps2", eps[1], eps[1] >= 0, "0 or more")
        require("clip", clip, clip > 0, "above 0")
        require("power", power, 0 < power <= 1, "above 0, at most 1")
        self.kinds = ("row_sums", "column_sums", "second_moment", *(("first_moment",) if beta1 else ()))
        self.eps = eps
        self._hyper = Hyper(0, lr, beta1, power, *eps, clip)
        self._places = [
            _Place(
                p, treatment, {kind: t for kind in self.kinds if (t := _state_of(p, kind)) is not None}, Cut.of(p, mesh)
            )
            for p, treatment in zip(self.parameters, self.treatments, strict=True)
        ]
        self._tensors = {
            kind: {place.parameter.name: place.state[kind] for place in self._places if kind in place.state}
            for kind in self.kinds
        }
        self._cut = [place for place in self._places if place.cut.is_cut]
        self._sum = LogicalSums([place.cut for place in self._cut], mesh)

    def _update_all(self, lr: float) -> None:
        courses = [self._course(place, lr) for place in self._cut]
        sums = self._sum([next(course) for course in courses])
        sums = self._sum([course.send(own) for course, own in zip(courses, sums, strict=True)])
        for course, own in zip(courses, sums, strict=True):
            with suppress(StopIteration):
                course.send(own)
        for place in self._places:
            if not place.cut.is_cut:
                alone(self._course(place, lr))
            place.parameter.refresh()

    def _course(self, place: _Place, lr: float) -> Generator[Sums, Sums, None]:
        p, (decay, rate) = place.parameter, place.treatment
        hyper = self._hyper._replace(update=self.updates, lr=lr * rate, weight_decay=decay)
        state = {kind: tensor.array for kind, tensor in place.state.items()}
        return update(p.master, p.grad, state, hyper, p.full_shape, place.cut.counts)

    def state_tensors(self) -> dict[str, dict[str, StateTensor]]:
        return self._tensors


class _Place(NamedTuple):
    """A parameter, how it is treated, what is kept for it, and how it is cut."""

    parameter: Parameter
    treatment: Treatment
    state: dict[str, StateTensor]
    cut: Cut


def _state_of(p: Parameter, kind: str) -> StateTensor | None:
    """A zero tensor of this kind; None where a parameter has none."""
    ndim = len(p.full_shape)
    summed = {"row_sums": ndim - 1, "column_sums": ndim - 2}.get(kind)  # the dim that is gone
    if kind != "first_moment" and (summed is None) == (ndim > 1):
        return None
    shape, rectangle, spec = p.full_shape, p.rectangle, p.spec
    if summed is not None:
        shape, rectangle = shape[:summed] + shape[summed + 1 :], rectangle[:summed] + rectangle[summed + 1 :]
        spec = spec.without(summed)
    array = array_module(p.master).zeros(slab_shape(rectangle), p.master.dtype)
    return StateTensor(array, shape, rectangle, spec)

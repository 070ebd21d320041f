"""Tokens on their way to experts and back.

    gates           of a token's probabilities those of the experts that it chose
    take_rows       the tokens that go to experts, a copy for each choice
    permute_rows    rows in another order
    grouped_matmul  each group of rows times its own matrix
    combine         what a token's experts made of it, weighted with its gates
    jitter          noise on the router's input

Which token goes where is no matter of gradients: it comes as arrays of whole numbers.  A group, and all of the rows,
may be empty.  All ops but `normalized_gates` are linear in their first input; `grouped_matmul` in its weights and
`combine` in its gates as well, each with the other held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import GroupedProduct, RowSum, groups, rounded, widened
from mpitrain.autograd.needs import NEAR
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, at_hand
from mpitrain.errors import ShapeError
from mpitrain.kernels.blocks import rows_of
from mpitrain.kernels.reference.products import product_dtype


class Gates(Function):
    """The probabilities of the experts that each token chose; linear in them.  Saves where they stood."""

    linear = (0,)

    @staticmethod
    def forward(p: Array, ids: Array) -> tuple[Array, tuple[Any, ...]]:
        places = _places(p, ids)
        return array_module(p).take(p.reshape(-1), places).reshape(ids.shape), (places, p.shape)

    @staticmethod
    def backward(grad: Array, places: Array, shape: tuple[int, ...], *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return rounded(_spread(widened(grad), places, shape), grad.dtype), None


class NormalizedGates(Function):
    """The same over their sum, which is not linear.  Saves their places, the result and the sum."""

    @staticmethod
    def forward(p: Array, ids: Array) -> tuple[Array, tuple[Any, ...]]:
        places = _places(p, ids)
        chosen = widened(array_module(p).take(p.reshape(-1), places).reshape(ids.shape))
        total = chosen.sum(-1, keepdims=True)
        y = rounded(chosen / total, p.dtype)
        return y, (places, y, total, p.shape)

    @staticmethod
    def backward(
        grad: Array, places: Array, y: Array, total: Array, shape: tuple[int, ...], *, wanted: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        g, y = widened(grad), widened(y)
        return rounded(_spread((g - (g * y).sum(-1, keepdims=True)) / total, places, shape), grad.dtype), None


def _places(p: Array, ids: Array) -> Array:
    """(t, k): where the chosen stand in the flattened p."""
    flat = ids.reshape(rows_of(ids))
    return flat + array_module(p).arange(flat.shape[0])[:, None] * p.shape[-1]


def _spread(grad: Array, places: Array, shape: tuple[int, ...]) -> Array:
    """Gradients of the chosen among zeros; an expert that a token chose twice gets both."""
    dp = array_module(grad).zeros(math.prod(shape), grad.dtype)
    g = grad.reshape(places.shape)
    for choice in range(places.shape[1]):  # of one choice no two places are the same
        dp[places[:, choice]] += g[:, choice]
    return dp.reshape(shape)


class TakeRows(Function):
    """Rows by number, some several times, some never; linear.  Saves the numbers."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, rows: Array) -> tuple[Array, tuple[Any, ...]]:
        return array_module(x).take(x.reshape(rows_of(x)), rows, axis=0), (rows, x.shape)

    @staticmethod
    def backward(grad: Array, rows: Array, shape: tuple[int, ...], *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return RowSum(rows, grad, (math.prod(shape[:-1]), shape[-1])).array().reshape(shape), None


class PermuteRows(Function):
    """Rows in another order; linear.  Saves the order."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, order: Array) -> tuple[Array, tuple[Any, ...]]:
        return array_module(x).take(x, order, axis=0), (order,)

    @staticmethod
    def backward(grad: Array, order: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        xp = array_module(grad)
        back = xp.empty_like(order)
        back[order] = xp.arange(order.size, dtype=order.dtype)
        return xp.take(grad, back, axis=0), None


class GroupedMatmul(Function):
    """Each group of rows times its own matrix; linear in either.  Saves both; dw is a `GroupedProduct`."""

    linear = (0,)
    bilinear = True
    needs = (NEAR,)

    @staticmethod
    def forward(x: Array, w: Array, *, counts: tuple[int, ...]) -> tuple[Array, tuple[Any, ...]]:
        y = array_module(x).empty((x.shape[0], w.shape[2]), product_dtype(x, w))
        for matrix, rows in zip(w, groups(counts), strict=True):
            if rows.start < rows.stop:
                kernels.matmul(x[rows], matrix, out=y[rows])
        return y, (x, w)

    @staticmethod
    def backward(
        grad: Array, x: Array, w: Array, *, wanted: tuple[bool, ...], counts: tuple[int, ...]
    ) -> tuple[Any, ...]:
        if wanted[0] and wanted[1]:
            grad = kernels.factor(grad)
        dx = None
        if wanted[0]:
            dx = array_module(x).empty(x.shape, x.dtype)
            for matrix, rows in zip(w, groups(counts), strict=True):
                if rows.start < rows.stop:
                    kernels.matmul(grad[rows], matrix.T, out=dx[rows])
        return dx, GroupedProduct(x, grad, counts, w.dtype) if wanted[1] else None


class Combine(Function):
    """The weighted sum of what a token's experts gave; linear in either.  Saves that, the gates, the places."""

    linear = (0,)
    bilinear = True
    undivided = True

    @staticmethod
    def forward(out: Array, gates: Array, places: Array) -> tuple[Array, tuple[Any, ...]]:
        y = kernels.combine(out, gates.reshape(rows_of(gates)), places.reshape(rows_of(places)))
        return y.reshape(*places.shape[:-1], out.shape[1]), (out, gates, places)

    @staticmethod
    def backward(grad: Array, out: Array, gates: Array, places: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        flat = gates.reshape(rows_of(gates)), places.reshape(rows_of(places))
        d_out, d_gates = kernels.combine_backward(grad.reshape(rows_of(grad)), out, *flat)
        return d_out, rounded(d_gates.reshape(gates.shape), gates.dtype), None


class Jitter(Function):
    """Multiply each element with a random number near 1; linear.  Saves the hashes of the rows."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, rows: Array, *, amount: float) -> tuple[Array, tuple[Any, ...]]:
        return kernels.jitter(x, rows, amount), (rows,)

    @staticmethod
    def backward(grad: Array, rows: Array, *, wanted: tuple[bool, ...], amount: float) -> tuple[Any, ...]:
        return kernels.jitter(grad, rows, amount), None


# ------------------------------------------------------------------------------------------------------- as functions


def gates(p: Tensor, ids: Array, renormalize: bool = False) -> Tensor:
    """Of a token's probabilities those of the experts that it chose.

    Args:
        p: (..., E).
        ids: int64 (..., k), numbers of experts.
        renormalize: over their sum, so that a token's gates sum to 1.

    Returns:
        (..., k) of p's dtype.

    Raises:
        ShapeError: the shapes do not go together, or an expert is none of the E.
    """
    if p.ndim == 0 or ids.shape[:-1] != p.shape[:-1]:
        raise ShapeError(f"gates: p {p.shape} and ids {ids.shape} do not go together")
    _check_numbers("gates: ids", ids, p.shape[-1])
    return NormalizedGates.apply(p, ids) if renormalize else Gates.apply(p, ids)


def take_rows(x: Tensor, rows: Array) -> Tensor:
    """x[rows], the leading dims of x counted as one.

    Args:
        x: (..., h).
        rows: int64 (n,), in any order, the same one several times or not at all.

    Returns:
        (n, h).

    Raises:
        ShapeError: x has no such row.
    """
    if x.ndim == 0 or rows.ndim != 1:
        raise ShapeError(f"take_rows: rows {rows.shape} of x {x.shape}: rows are (n,)")
    _check_numbers("take_rows: rows", rows, rows_of(x.data)[0])
    return TakeRows.apply(x, rows)


def permute_rows(x: Tensor, order: Array) -> Tensor:
    """x[order].

    Args:
        x: (n, h).
        order: int64 (n,), each row once.

    Raises:
        ShapeError: a row is missing or comes twice.
    """
    if x.ndim != 2 or order.shape != x.shape[:1]:
        raise ShapeError(f"permute_rows: order {order.shape} of x {x.shape}")
    _check_numbers("permute_rows: order", order, x.shape[0], once=True)
    return PermuteRows.apply(x, order)


def grouped_matmul(x: Tensor, w: Tensor, counts: Sequence[int]) -> Tensor:
    """Each group of rows times its own matrix: what experts do with their tokens.

    Args:
        x: (n, a), sorted by group.
        w: (g, a, b).
        counts: how many rows each of the g groups has; 0 is a group without rows.

    Returns:
        (n, b) of the dtype that x and w promote to.

    Raises:
        ShapeError: the shapes do not go together, or the counts are not those of so many groups and rows.

    Cost: 2 a b floating-point operations a row, 4 a b in backward; a call of BLAS for each group that has rows.
    """
    numbers = tuple(int(count) for count in counts)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ShapeError(f"grouped_matmul: x {x.shape} and w {w.shape} do not go together")
    if len(numbers) != w.shape[0] or sum(numbers) != x.shape[0] or min(numbers, default=0) < 0:
        raise ShapeError(f"grouped_matmul: x {x.shape} and w {w.shape}, but counts of rows {numbers}")
    return GroupedMatmul.apply(x, w, counts=numbers)


def combine(out: Tensor, gates: Tensor, places: Array) -> Tensor:
    """What a token's experts made of it: the sum over its choices j of gates_j out[places_j].

    Sums are formed in at least float32, in the order of the choices, and rounded once.

    Args:
        out: (n, h).
        gates: (..., k), float32 or float64.
        places: int64 (..., k), rows of `out`, each at most once; -1: a choice that came to nothing.

    Returns:
        (..., h) of out's dtype; 0 where a token has no place.

    Raises:
        ShapeError: the shapes do not go together; a place is no row; two choices have the same place.
    """
    if out.ndim != 2 or places.ndim == 0 or gates.shape != places.shape:
        raise ShapeError(f"combine: out {out.shape}, gates {gates.shape} and places {places.shape}")
    _check_numbers("combine: places", places, out.shape[0], lowest=-1, once=True)
    return Combine.apply(out, gates, places)


def jitter(x: Tensor, rows: Array, amount: float) -> Tensor:
    """x times uniform numbers of [1 - amount, 1 + amount]: the same rows give the same numbers.

    Args:
        x: (..., d).
        rows: uint64 (...), the random stream of each row (`Draw.rows`).
        amount: in [0, 1); 0 gives x itself.

    Raises:
        ShapeError: rows is not x's shape without the last dim.

    Source: Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, appendix F.
    """
    if rows.shape != x.shape[:-1]:
        raise ShapeError(f"jitter: x {x.shape} wants rows {x.shape[:-1]}, got {rows.shape}")
    return Jitter.apply(x, rows, amount=float(amount)) if amount else x


def _check_numbers(what: str, numbers: Array, end: int, lowest: int = 0, once: bool = False) -> None:
    """Refuse what is no number from `lowest` to below `end`, and where it matters what comes twice.

    Numbers on a device are taken on trust: it would have to be waited for.
    """
    if numbers.dtype.kind not in "iu":
        raise ShapeError(f"{what} are integers, these are {numbers.dtype}")
    if not at_hand(numbers) or not numbers.size:
        return
    if numbers.min() < lowest or numbers.max() >= end:
        raise ShapeError(f"{what} reach from {numbers.min()} to {numbers.max()}, but there are {end}")
    if once:
        times = np.bincount(numbers[numbers >= 0], minlength=1)
        if times.max() > 1:
            raise ShapeError(f"{what}: {times.argmax()} comes {times.max()} times, once is meant")

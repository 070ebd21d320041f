"""Products of tensors by the letters of their dims: `einsum("bij,bjk->bik", a, b)`.

A letter that the result has not is summed over.  However many operands there are, two are multiplied at a time, in the
order that needs the fewest multiplications; each such product is one `Contract` on the tape, which is a product of
matrices, or of batches of them.  What concerns one operand alone comes before it: a letter twice is a diagonal, a
letter that nobody else has is a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import Product, rounded, summed, widened
from mpitrain.autograd.needs import NEAR
from mpitrain.autograd.ops.index import Getitem
from mpitrain.autograd.ops.letters import Operand, Tree, plan
from mpitrain.autograd.ops.reduce import Sum
from mpitrain.autograd.ops.shape import Reshape, Transpose
from mpitrain.autograd.ops.single import common_half
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, wide
from mpitrain.errors import ShapeError

MOST_OPERANDS = 10  # the best order of more would take long to find


class Contract(Function):
    """Two operands multiplied, and summed over the letters that both have and the result has not.

    `letters` are those of a, b and the result: none twice in one of them, and none of a or b nowhere else.
    """

    linear = (0,)
    bilinear = True
    saved_for = MappingProxyType({0: 1, 1: 0})
    needs = (NEAR, NEAR)

    @staticmethod
    def forward(a: Array, b: Array, *, letters: tuple[str, str, str]) -> tuple[Array, tuple[Any, ...]]:
        half = common_half(a, b)
        y = _contract(a, b, letters)
        return y if half is None else rounded(y, half), (a, b, a.dtype, b.dtype)

    @staticmethod
    def backward(
        grad: Array,
        a: Array | None,
        b: Array | None,
        a_dtype: Any,
        b_dtype: Any,
        *,
        wanted: tuple[bool, ...],
        letters: tuple[str, str, str],
    ) -> tuple[Any, ...]:
        of_a, of_b, of_y = letters
        if wanted[0] and wanted[1]:
            grad = kernels.factor(grad)
        da = _gradient(grad, b, (of_y, of_b, of_a), a_dtype) if wanted[0] else None
        return da, _gradient(a, grad, (of_a, of_y, of_b), b_dtype) if wanted[1] else None


class _Roles(NamedTuple):
    """Letters by what happens to them."""

    batch: str  # in both operands and in the result
    left: str  # in a and the result
    right: str  # in b and the result
    summed: str  # in both operands

    @classmethod
    def of(cls, a: str, b: str, y: str) -> _Roles:
        return cls(
            "".join([c for c in y if c in a and c in b]),
            "".join([c for c in y if c not in b]),
            "".join([c for c in y if c not in a]),
            "".join([c for c in a if c not in y]),
        )


def _contract(a: Array, b: Array, letters: tuple[str, str, str], dtype: Any = None) -> Array:
    """The product as an array, of halves in float32; of `dtype` where one is given."""
    of_a, of_b, of_y = letters
    roles = _Roles.of(*letters)
    sizes = {**dict(zip(of_a, a.shape, strict=True)), **dict(zip(of_b, b.shape, strict=True))}
    if not roles.summed or not (roles.left or roles.right):
        # Products of matrices with one row and one column each would be one call for each element.
        a, b = widened(a), widened(b)
        y = _spread(a, of_a, of_y + roles.summed) * _spread(b, of_b, of_y + roles.summed)
        if roles.summed:
            y = y.sum(axis=tuple(range(len(of_y), y.ndim)))
        return y if dtype is None or y.dtype == dtype else y.astype(dtype)
    if roles.batch + roles.right + roles.left == of_y:  # the result then lies in its own order
        a, b, of_a, of_b = b, a, of_b, of_a
        roles = roles._replace(left=roles.right, right=roles.left)
    compute = wide(np.result_type(a.dtype, b.dtype)) if dtype is None else dtype
    product = kernels.matmul(*_matrices(a, b, of_a, of_b, roles), dtype=compute)
    order = roles.batch + roles.left + roles.right
    y = product.reshape(tuple([sizes[c] for c in order]))
    return y if order == of_y else y.transpose([order.index(c) for c in of_y])


def _matrices(a: Array, b: Array, of_a: str, of_b: str, roles: _Roles) -> tuple[Array, Array]:
    """The factors as matrices (..., left, summed) and (..., summed, right), behind the dims of the batch."""

    def matrix(x: Array, letters: str, rows: str, columns: str) -> Array:
        x = x.transpose([letters.index(c) for c in roles.batch + rows + columns])
        n = len(roles.batch)
        m = n + len(rows)
        return x.reshape((*x.shape[:n], math.prod(x.shape[n:m]), math.prod(x.shape[m:])))

    return matrix(a, of_a, roles.left, roles.summed), matrix(b, of_b, roles.summed, roles.right)


def _spread(x: Array, letters: str, all_letters: str) -> Array:
    """x with its dims in the order of `all_letters`, and dims of length 1 for those that it has not."""
    x = x.transpose([letters.index(c) for c in all_letters if c in letters])
    lengths = iter(x.shape)
    return x.reshape(tuple([next(lengths) if c in letters else 1 for c in all_letters]))


def _gradient(p: Array, q: Array, letters: tuple[str, str, str], dtype: Any) -> Any:
    """The gradient of an operand of `dtype`, the product of the other two; of a matrix, a recipe."""
    roles = _Roles.of(*letters)
    if not roles.batch and roles.summed and len(roles.left) == len(roles.right) == 1:
        left, right = _matrices(p, q, letters[0], letters[1], roles)
        turned = roles.left + roles.right != letters[2]
        return Product(right.T, left.T, dtype) if turned else Product(left, right, dtype)
    return summed(_contract(p, q, letters, wide(dtype)), dtype)


# ------------------------------------------------------------------------------------------------------- as a function


def einsum(subscripts: str, *operands: Any) -> Tensor:
    """The product of some tensors by the letters of their dims, as `numpy.einsum` writes it.

        einsum("ij,jk->ik", a, b)            a @ b
        einsum("bshd,bthd->bhst", q, k)      scores of attention
        einsum("...ij->...ji", x)            the last two dims swapped
        einsum("ii->i", x)                   the diagonal
        einsum("ij,j,jk,kl->il", a, v, b, c) any number of operands, two at a time in the cheapest order

    Args:
        subscripts: one letter for each dim of each operand, commas between operands, and behind `->` the letters of the
            result; without `->` those that stand once, in alphabetical order.  A letter that the result has not is
            summed over, one that stands twice in an operand is its diagonal, `...` stands for dims without a letter,
            which broadcast.
        operands: as many tensors or arrays.

    Raises:
        ShapeError: the letters do not go together with the shapes.

    Cost: as matmul; where dims do not lie as products of matrices want them, a copy of the operand.
    """
    if not 1 <= len(operands) <= MOST_OPERANDS:
        raise ShapeError(
            f"einsum {subscripts!r}: {len(operands)} operands; from 1 to {MOST_OPERANDS} can be multiplied"
        )
    how = plan(subscripts, tuple([tuple(x.shape) for x in operands]))
    ready = [_alone(x, alone) for x, alone in zip(operands, how.operands, strict=True)]
    if len(ready) > 1:
        return _multiply(ready, how.output, how.tree, ())[0]
    ((x, letters),) = ready
    return Transpose.apply(x, dims=tuple([letters.index(c) for c in how.output]))


def _alone(x: Any, how: Operand) -> tuple[Any, str]:
    """An operand and its letters, with what concerns no other one done."""
    letters = how.letters
    if how.squeezed:
        kept = [d for d in range(len(letters)) if d not in how.squeezed]
        x = Reshape.apply(x, shape=tuple([x.shape[d] for d in kept]))
        letters = "".join([letters[d] for d in kept])
    for c in how.diagonals:
        x, letters = _diagonal(x, letters, c)
    if how.totals:
        dims = tuple([letters.index(c) for c in how.totals])
        x = Sum.apply(x, dims=dims, keepdims=False)
        letters = "".join([c for c in letters if c not in how.totals])
    return x, letters


def _diagonal(x: Any, letters: str, c: str) -> tuple[Any, str]:
    """The elements for which all places with letter c are the same, along one last dim."""
    at = [d for d, letter in enumerate(letters) if letter == c]
    rest = [d for d in range(len(letters)) if d not in at]
    x = Transpose.apply(x, dims=(*rest, *at))
    n, before = x.shape[-1], x.shape[: len(rest)]
    step = sum([n**k for k in range(len(at))]) or 1
    flat = Reshape.apply(x, shape=(*before, n ** len(at)))
    return Getitem.apply(flat, index=(..., slice(None, None, step))), "".join([letters[d] for d in rest]) + c


def _multiply(
    operands: Sequence[tuple[Any, str]], output: str, tree: Tree, outside: tuple[Tree, ...]
) -> tuple[Any, str]:
    """What a tree of products gives, and its letters.

    Args:
        operands: each with its letters.
        output: letters of the result.
        tree: which of them to multiply.
        outside: what its product will meet later.
    """
    if isinstance(tree, int):
        return operands[tree]
    one, other = tree
    a, of_a = _multiply(operands, output, one, (*outside, other))
    b, of_b = _multiply(operands, output, other, (*outside, one))
    if not outside:
        of_y = output
    else:
        later = set(output).union(*[_letters(operands, each) for each in outside])
        kept = [c for c in dict.fromkeys(of_a + of_b) if c in later]
        of_y = "".join(sorted(kept, key=lambda c: (not (c in of_a and c in of_b), c not in of_a)))
    return Contract.apply(a, b, letters=(of_a, of_b, of_y)), of_y


def _letters(operands: Sequence[tuple[Any, str]], tree: Tree) -> set[str]:
    """All letters of the operands in a tree."""
    if isinstance(tree, int):
        return set(operands[tree][1])
    return _letters(operands, tree[0]) | _letters(operands, tree[1])

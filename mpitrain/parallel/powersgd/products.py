"""The two computations whose bits all ranks must share: an orthonormal basis, and the product of two thin factors.

Every rank has the same sums P and Q after a message, and makes the same gradient of them by itself.  A BLAS would do,
if all ranks had the same one on the same processor; a mixed cluster has not, and its replicas would drift apart.  So
both are written in elementwise operations in an order of their own: an addition, a product, a quotient, a root are the
same bits everywhere, and NumPy adds along a dim in an order that the shape alone decides.  No message has to hand out a
basis that one rank has made.

What each rank computes for itself, before it is summed, is left to the BLAS.
"""

from __future__ import annotations

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.blocks import row_blocks


def orthonormal(x: Array) -> Array:
    """An orthonormal basis of the columns of each matrix, by Householder's reflections.

    Whatever the columns are, equal, zero or more than there are rows, those of the result are orthonormal: a column
    that brings nothing new gets a direction that is none of the others'.  So nothing is added to `x` before, as is done
    where columns are only made orthogonal to each other and then divided by their length (DALL-E adds 1e-6 I), and
    `result @ result.T @ x` is `x` up to rounding also where columns depend on each other.

    Args:
        x: (..., n, r), of any float dtype.

    Returns:
        (..., n, r) in x.dtype, computed in float64; of r > n columns the last r - n are zero.

    Cost: 4 n r^2 operations a matrix.
    Source: Golub and Van Loan, Matrix Computations, algorithms 5.1.1 and 5.1.5.
    """
    xp = array_module(x)
    n, r = x.shape[-2:]
    work = x.astype(np.float64)
    mirrors = []
    for j in range(min(n, r)):
        v = work[..., j:, j].copy()
        length = xp.sqrt((v * v).sum(-1))
        first = v[..., 0].copy()
        v[..., 0] += xp.copysign(length, first)  # away from zero, so that no digits cancel
        half = length * (length + xp.abs(first))  # of the square of v's length
        weighted = v / xp.where(half == 0, 1.0, half)[..., None]  # a column of zeros is mirrored by nothing
        mirrors.append((v, weighted))
        _mirror(work[..., j:, j + 1 :], v, weighted)
    basis = xp.zeros_like(work)
    for j in range(min(n, r)):
        basis[..., j, j] = 1.0
    for j, (v, weighted) in reversed([*enumerate(mirrors)]):
        _mirror(basis[..., j:, j:], v, weighted)
    return basis.astype(x.dtype)


def _mirror(x: Array, v: Array, weighted: Array) -> None:
    """x - weighted v^T x, in place."""
    x -= weighted[..., :, None] * (v[..., :, None] * x).sum(-2)[..., None, :]


def outer_sum(p: Array, q: Array, out: Array) -> None:
    """out = p q^T, one column of both after the other.

    Args:
        p: (k, n, r).
        q: (k, m, r).
        out: (k, n, m), of the same dtype.

    Cost: 2 r passes over `out`, in cache.
    """
    xp = array_module(out)
    n, m, r = out.shape[-2], out.shape[-1], p.shape[-1]
    columns = [xp.ascontiguousarray(q[..., j])[:, None, :] for j in range(r)]
    for rows in row_blocks(xp, n, m):
        block, left = out[:, rows], p[:, rows]
        if not r:
            block[...] = 0
        for j, right in enumerate(columns):
            if j == 0:
                xp.multiply(left[..., :1], right, out=block)
            else:
                block += left[..., j : j + 1] * right


def unit_columns(q: Array) -> Array:
    """q with each column divided by its length; what is zero stays zero.

    They span the same, but P = D Q is then as large as D is, not as its square, which for small gradients lies where
    floats lose bits.
    """
    xp = array_module(q)
    squares = (q.astype(np.float64) ** 2).sum(-2)
    lengths = xp.sqrt(squares)
    return (q / xp.where(lengths == 0, 1.0, lengths)[..., None, :]).astype(q.dtype)

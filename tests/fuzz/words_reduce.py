"""Words that sum along dims: reductions, softmax, products of matrices."""

from __future__ import annotations

import numpy as np
from fuzz.vocabulary import Op


def dims_tuple(x, dim):
    dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else dim
    return tuple(d % x.ndim for d in dims)


def draw_dim(g, x):
    """None, a number, or several, also none of them, also counted from the end."""
    ndim = g.env[x].ndim
    if ndim == 0 or g.chance(0.2):
        return g.choose((None, ())) if g.chance(0.3) else None
    if g.chance(0.5):
        return g.integer(-ndim, ndim)
    dims = g.sample(range(ndim), g.integer(0 if g.chance(0.1) else 1, ndim + 1))
    return tuple(d - ndim if g.chance(0.3) else d for d in dims)


def draw_reduction(least):
    def draw(g):
        x = g.value()
        dim = draw_dim(g, x)
        lengths = [g.env[x].shape[d] for d in dims_tuple(g.env[x], dim)]
        if np.prod(lengths, dtype=int) < least:
            return None
        return [x], {"dim": dim, "keepdims": g.chance(0.4)}

    return draw


def draw_var(g):
    correction = g.choose((0, 0, 1))
    drawn = draw_reduction(1 + correction)(g)
    return drawn and (drawn[0], {**drawn[1], "correction": correction})


def draw_std(g):
    """Of elements that differ: where they do not, rounding alone decides the slope, in PyTorch too."""
    drawn = draw_var(g)
    if drawn is None:
        return None
    (x,), static = drawn
    spread = np.ptp(g.env[x], axis=dims_tuple(g.env[x], static["dim"]))
    return drawn if np.min(spread, initial=1) > 0.01 else None


def lines(f):
    """A reduction from one of vectors: `f` sees the reduced dims as one, the last."""

    def naive(x, dim, keepdims, **more):
        dims = dims_tuple(x, dim)
        rest = [d for d in range(x.ndim) if d not in dims]
        flat = x.transpose(rest + list(dims)).reshape(
            *[x.shape[d] for d in rest], int(np.prod([x.shape[d] for d in dims], dtype=int))
        )
        y = f(flat, **more)
        return y.reshape([1 if d in dims else n for d, n in enumerate(x.shape)]) if keepdims else y

    return naive


def torch_lines(f):
    def torch(t, x, dim, keepdims, **more):
        dims = dims_tuple(x, dim)
        if not dims:  # to PyTorch () means all
            return f(t, x.unsqueeze(-1), (-1,), False, **more)
        return f(t, x, dims, keepdims, **more)

    return torch


def extreme(x, dim, keepdims):
    """Which elements are the largest; NumPy's sign of it tells ties and order apart."""
    dims = dims_tuple(x, dim)
    return x == x.max(axis=dims, keepdims=True)


def lowest(x, dim, keepdims):
    return extreme(-x, dim, keepdims)


def logsumexp(x):
    highest = x.max(-1)
    return highest + np.log(sum(np.exp(x[..., i] - highest) for i in range(x.shape[-1])))


def var(x, correction):
    n = x.shape[-1]
    mean = x.sum(-1) / n
    return sum((x[..., i] - mean) ** 2 for i in range(n)) / (n - correction)


def product(x):
    y = np.ones(x.shape[:-1])
    for i in range(x.shape[-1]):
        y = y * x[..., i]
    return y


def torch_product(t, x, dims, keepdims):
    for dim in dims:
        x = x.prod(dim, keepdim=True)
    return x if keepdims else x.squeeze(dims)


def draw_cumsum(g):
    x = g.value(lambda a: a.ndim > 0)
    return x and ([x], {"dim": g.dim(x)})


def cumsum(x, dim):
    y = np.moveaxis(np.zeros(x.shape), dim, 0)
    for i, part in enumerate(np.moveaxis(x, dim, 0)):
        y[i] = part + (y[i - 1] if i else 0)
    return np.moveaxis(y, 0, dim)


def reduction(name, naive, torch, draw=None, calls=None, **more):
    calls = calls or (f"ops.{name}({{0}}, {{dim}}, {{keepdims}})", f"{{0}}.{name}({{dim}}, keepdims={{keepdims}})")
    return Op(name, draw or draw_reduction(1), calls, lines(naive), torch_lines(torch), **more)


def draw_softmax(g):
    x = g.value(lambda a: a.ndim > 0)
    if x is None:
        return None
    shape = g.env[x].shape
    mask = g.mask(g.fitting_shape(shape)) if g.chance(0.5) else None
    return [x], {"dim": g.integer(-len(shape), len(shape)), "mask": mask}


def softmax(x, dim, mask):
    if not x.size:
        return x
    e = np.exp(x - x.max()) if np.ptp(x) < 200 else np.exp(x - x.max(axis=dim, keepdims=True))
    if mask is not None:
        # From the largest that is allowed, else all that is left may be 0.
        allowed = np.where(mask, x, -np.inf).max(axis=dim, keepdims=True)
        e = np.where(mask, np.exp(np.minimum(x - np.where(np.isfinite(allowed), allowed, 0), 0)), 0.0)
    total = e.sum(axis=dim, keepdims=True)
    return e / np.where(total == 0, 1, total)


def torch_softmax(t, x, dim, mask):
    if mask is None:
        return t.softmax(x, dim)
    allowed = t.from_numpy(np.broadcast_to(mask, x.shape).copy())
    return t.softmax(x.masked_fill(~allowed, -1e30), dim) * allowed


def draw_log_softmax(g):
    x = g.value(lambda a: a.ndim > 0)
    return x and ([x], {"dim": g.integer(-g.env[x].ndim, g.env[x].ndim)})


def log_softmax(x, dim):
    if not x.size:
        return x
    return x - np.expand_dims(logsumexp(np.moveaxis(x, dim, -1)), dim)


def draw_matmul(g):
    a = g.value(lambda a: a.ndim > 0)
    if a is None:
        return None
    array = g.env[a]
    left = g.chance(0.5) or g.has_no_gradient(a)
    k = array.shape[-1] if left else array.shape[-2 if array.ndim > 1 else 0]

    def suits(b):
        if b.ndim == 0 or b.shape[-2 if b.ndim > 1 and left else -1] != k:
            return False
        batch, other = array.shape[:-2], b.shape[:-2]
        return all(m == n or 1 in (m, n) for m, n in zip(batch[::-1], other[::-1], strict=False))

    b = g.value(suits) if g.chance(0.4) else None
    if b is None:
        batch = g.operand_shape(array.shape[:-2]) if g.chance(0.6) else ()
        n = g.length()
        shape = g.choose(((k,), (*batch, k, n) if left else (*batch, n, k)))
        b = g.weight(shape) if g.chance(0.5) else g.leaf(shape, roles=("tensor", "tensor", "constant", "array"))
    return [a, b] if left else [b, a], {}


def matmul(a, b):
    """Products written out and summed."""
    a_rows = a[None, :] if a.ndim == 1 else a
    b_columns = b[:, None] if b.ndim == 1 else b
    y = (a_rows[..., :, :, None] * b_columns[..., None, :, :]).sum(-2)
    if b.ndim == 1:
        y = y[..., 0]
    return y[..., 0, :] if a.ndim == 1 and b.ndim > 1 else y[..., 0] if a.ndim == 1 else y


WORDS = [
    reduction("sum", lambda x: x.sum(-1), lambda t, x, d, k: x.sum(d, keepdim=k), draw=draw_reduction(0),
              weight=1.5),
    reduction("mean", lambda x: x.sum(-1) / x.shape[-1], lambda t, x, d, k: x.mean(d, keepdim=k)),
    reduction("max", lambda x: np.sort(x)[..., -1], lambda t, x, d, k: x.amax(d, keepdim=k), choices=extreme),
    reduction("min", lambda x: np.sort(x)[..., 0], lambda t, x, d, k: x.amin(d, keepdim=k), choices=lowest),
    reduction("logsumexp", logsumexp, lambda t, x, d, k: t.logsumexp(x, d, keepdim=k),
              calls=("ops.logsumexp({0}, {dim}, {keepdims})",),
              blur="ops.sum({0} * shake({0}), {dim}, {keepdims})"),
    reduction("var", var, lambda t, x, d, k, correction: t.var(x, d, correction=correction, keepdim=k),
              draw=draw_var, calls=("ops.var({0}, {dim}, {keepdims}, {correction})",
                                    "{0}.var({dim}, keepdims={keepdims}, correction={correction})"),
              blur="ops.mean({0} * {0} * shake({0}), {dim}, {keepdims})"),
    reduction("std", lambda x, correction: var(x, correction) ** 0.5,
              lambda t, x, d, k, correction: t.std(x, d, correction=correction, keepdim=k),
              draw=draw_std, calls=("ops.std({0}, {dim}, {keepdims}, {correction})",
                                    "{0}.std({dim}, keepdims={keepdims}, correction={correction})"),
              blur="ops.mean({0} * shake({0}), {dim}, {keepdims})"),
    reduction("prod", product, torch_product, draw=draw_reduction(0)),
    Op("cumsum", draw_cumsum, ("ops.cumsum({0}, {dim})", "{0}.cumsum({dim})"), cumsum,
       lambda t, x, dim: t.cumsum(x, dim)),
    Op("softmax", draw_softmax, ("ops.softmax({0}, {dim}, {mask})", "ops.softmax({0}, dim={dim}, mask={mask})"),
       softmax, torch_softmax, blur="{0} * shake({0})"),
    Op("log_softmax", draw_log_softmax, ("ops.log_softmax({0}, {dim})",), log_softmax,
       lambda t, x, dim: t.log_softmax(x, dim), blur="{0} * shake({0})"),
    Op("matmul", draw_matmul, ("{0} @ {1}", "ops.matmul({0}, {1})"), matmul, lambda t, a, b: t.matmul(a, b), weight=2),
]  # fmt: skip

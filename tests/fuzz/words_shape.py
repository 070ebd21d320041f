"""Words that move elements and compute nothing."""

from __future__ import annotations

import math

import numpy as np
from fuzz.vocabulary import Op


def draw_reshape(g):
    x = g.value()
    shape = list(g.env[x].shape)
    kind = g.choose(("merge", "cut", "ones", "flat", "shuffle"))
    if kind == "merge" and len(shape) > 1:
        at = g.integer(0, len(shape) - 1)
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    elif kind == "cut" and shape:
        at = g.integer(0, len(shape))
        parts = [n for n in range(1, shape[at] + 1) if shape[at] % n == 0] or [3]
        n = g.choose(parts)
        shape[at : at + 1] = [n, shape[at] // n]
    elif kind == "ones":
        shape.insert(g.integer(0, len(shape) + 1), 1)
    elif kind == "flat":
        shape = [math.prod(shape)]
    else:
        g.rng.shuffle(shape)
    if len(shape) > 5:
        return None
    given = list(shape)
    if shape and g.chance(0.4):
        at = g.integer(0, len(shape))
        if math.prod(given[:at] + given[at + 1 :]):
            given[at] = -1
    return [x], {"shape": tuple(given)}


def draw_transpose(g):
    x = g.value(weights=True)
    ndim = g.env[x].ndim
    if g.chance(0.3):
        return [x], {"dims": ()}
    dims = g.sample(range(ndim), ndim)
    return [x], {"dims": tuple(d - ndim if g.chance(0.3) else d for d in dims)}


def draw_swap(g):
    x = g.value(lambda a: a.ndim > 0, weights=True)
    return x and ([x], {"one": g.dim(x), "other": g.dim(x)})


def swap(x, one, other):
    dims = list(range(x.ndim))
    dims[one], dims[other] = dims[other], dims[one]
    return x.transpose(dims)


def draw_broadcast_to(g):
    x = g.value(lambda a: a.size <= 60 and a.ndim < 5)
    if x is None:
        return None
    shape = [g.length() if n == 1 and g.chance(0.7) else n for n in g.env[x].shape]
    front = [g.length() for _ in range(min(g.integer(0, 3), 5 - len(shape)))]
    return [x], {"shape": (*front, *shape)}


def draw_concat(g):
    x = g.value(lambda a: a.ndim > 0)
    if x is None:
        return None
    shape = g.env[x].shape
    dim = g.integer(0, len(shape))

    def suits(a):
        return a.ndim == len(shape) and a.shape[:dim] + a.shape[dim + 1 :] == shape[:dim] + shape[dim + 1 :]

    inputs = [x]
    for _ in range(g.integer(0, 3)):
        other = g.value(suits) if g.chance(0.6) else None
        inputs.append(other or g.leaf((*shape[:dim], g.length(), *shape[dim + 1 :])))
    g.rng.shuffle(inputs)
    return inputs, {"dim": dim - len(shape) if g.chance(0.3) else dim}


def draw_stack(g):
    x = g.value(lambda a: a.ndim < 5)
    if x is None:
        return None
    shape = g.env[x].shape
    inputs = [x] + [
        (g.value(lambda a: a.shape == shape) if g.chance(0.7) else None) or g.leaf(shape)
        for _ in range(g.integer(0, 3))
    ]
    g.rng.shuffle(inputs)
    return inputs, {"dim": g.integer(-len(shape) - 1, len(shape) + 1)}


def stack(*parts, dim):
    y = np.empty((len(parts), *parts[0].shape))
    for i, part in enumerate(parts):
        y[i] = part
    return np.moveaxis(y, 0, dim)


def draw_split(g):
    x = g.value(lambda a: a.ndim > 0)
    if x is None:
        return None
    dim = g.dim(x)
    n = g.env[x].shape[dim]
    if g.chance(0.4):
        parts = g.choose([k for k in range(1, max(n, 2) + 1) if n % k == 0])
        return [x], {"parts": parts, "dim": dim}
    cuts = sorted(g.integer(0, n + 1) for _ in range(g.integer(0, 3)))
    return [x], {"parts": tuple(b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)), "dim": dim}


def lengths(x, parts, dim):
    return [x.shape[dim] // parts] * parts if isinstance(parts, int) else list(parts)


def split(x, parts, dim):
    x = np.moveaxis(x, dim, 0)
    pieces, start = [], 0
    for n in lengths(x, parts, 0):
        pieces.append(np.moveaxis(x[start : start + n], 0, dim))
        start += n
    return tuple(pieces)


def draw_pad(g):
    x = g.value()
    widths = tuple((g.choose((0, 0, 1, 2)), g.choose((0, 0, 1, 2))) for _ in g.env[x].shape)
    return [x], {"widths": widths, "value": g.choose((0.0, 0.0, 1.5, 2, np.float64(0.5)))}


def pad(x, widths, value):
    y = np.full([before + n + after for n, (before, after) in zip(x.shape, widths, strict=True)], float(value))
    y[tuple(slice(before, before + n) for n, (before, _) in zip(x.shape, widths, strict=True))] = x
    return y


def torch_pad(t, x, widths, value):
    flat = [n for pair in reversed(widths) for n in pair]
    return t.nn.functional.pad(x, flat, value=float(value)) if flat else x


def draw_squeeze(g):
    x = g.value(lambda a: 1 in a.shape) or g.value()
    ones = [i for i, n in enumerate(g.env[x].shape) if n == 1]
    if not ones or g.chance(0.3):
        return [x], {"dim": None}
    if g.chance(0.5):
        return [x], {"dim": g.choose(ones) - (g.env[x].ndim if g.chance(0.4) else 0)}
    return [x], {"dim": tuple(g.sample(ones, g.integer(0, len(ones) + 1)))}


def torch_squeeze(t, x, dim):
    return x.squeeze() if dim is None else x.squeeze(dim) if dim != () else x * 1


def draw_expand(g):
    x = g.value(lambda a: a.ndim < 5)
    return x and ([x], {"dim": g.integer(-g.env[x].ndim - 1, g.env[x].ndim + 1)})


def draw_flip(g):
    x = g.value()
    ndim = g.env[x].ndim
    if ndim == 0 or g.chance(0.2):
        return [x], {"dim": None}
    if g.chance(0.5):
        return [x], {"dim": g.integer(-ndim, ndim)}
    return [x], {"dim": tuple(g.sample(range(ndim), g.integer(0, ndim + 1)))}


def torch_flip(t, x, dim):
    return t.flip(x, tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else dim)


def draw_roll(g):
    x = g.value(lambda a: a.ndim > 0)
    return x and ([x], {"shift": g.integer(-9, 10), "dim": g.dim(x)})


def draw_tile(g):
    x = g.value(lambda a: a.size <= 60 and a.ndim < 5)
    if x is None:
        return None
    ndim = g.env[x].ndim
    if g.chance(0.3):
        return [x], {"counts": g.integer(0, 4)}
    return [x], {"counts": tuple(g.choose((0, 1, 1, 1, 2, 2, 3)) for _ in range(g.integer(0, min(ndim + 2, 6))))}


def torch_tile(t, x, counts):
    return x.tile((counts,) if isinstance(counts, int) else counts)


def draw_repeat(g):
    x = g.value(lambda a: a.ndim > 0 and a.size <= 80)
    return x and ([x], {"count": g.integer(0, 4), "dim": g.dim(x)})


def repeat(x, count, dim):
    parts = [part for part in np.moveaxis(x, dim, 0) for _ in range(count)]
    y = np.stack(parts) if parts else np.zeros((0, *np.moveaxis(x, dim, 0).shape[1:]))
    return np.moveaxis(y, 0, dim)


def draw_cast(g):
    return [g.value(weights=True)], {"dtype": g.choose(g.dtypes)}


WORDS = [
    Op("reshape", draw_reshape, ("{0}.reshape({shape})", "ops.reshape({0}, *{shape})"),
       lambda x, shape: np.array(list(x.flat)).reshape(shape), lambda t, x, shape: x.reshape(shape), weight=1.5),
    Op("transpose", draw_transpose, ("ops.transpose({0}, *{dims})", "{0}.transpose({dims})"),
       lambda x, dims: np.transpose(x, dims or None), lambda t, x, dims: x.permute(dims or tuple(range(x.ndim))[::-1]),
       weight=1.5),
    Op("swap", draw_swap, ("ops.swap({0}, {one}, {other})", "{0}.swap({one}, {other})"), swap,
       lambda t, x, one, other: x.transpose(one, other)),
    Op("broadcast_to", draw_broadcast_to, ("ops.broadcast_to({0}, {shape})",),
       lambda x, shape: np.zeros(shape) + x, lambda t, x, shape: x.expand(shape)),
    Op("concat", draw_concat, ("ops.concat([{all}], {dim})",), lambda *x, dim: np.concatenate(x, dim),
       lambda t, *x, dim: t.cat(x, dim)),
    Op("stack", draw_stack, ("ops.stack([{all}], {dim})",), stack, lambda t, *x, dim: t.stack(x, dim)),
    Op("split", draw_split, ("ops.split({0}, {parts}, {dim})",), split,
       lambda t, x, parts, dim: t.split(x, lengths(x, parts, dim), dim)),
    Op("pad", draw_pad, ("ops.pad({0}, {widths}, {value})",), pad, torch_pad),
    Op("squeeze", draw_squeeze, ("ops.squeeze({0}, {dim})", "{0}.squeeze({dim})"),
       lambda x, dim: np.squeeze(x, dim), torch_squeeze),
    Op("expand", draw_expand, ("ops.expand({0}, {dim})",), lambda x, dim: np.expand_dims(x, dim),
       lambda t, x, dim: x.unsqueeze(dim)),
    Op("flip", draw_flip, ("ops.flip({0}, {dim})",), lambda x, dim: np.flip(x, dim), torch_flip),
    Op("roll", draw_roll, ("ops.roll({0}, {shift}, {dim})",), lambda x, shift, dim: np.roll(x, shift, dim),
       lambda t, x, shift, dim: t.roll(x, shift, dim)),
    Op("tile", draw_tile, ("ops.tile({0}, {counts})",), lambda x, counts: np.tile(x, counts), torch_tile),
    Op("repeat", draw_repeat, ("ops.repeat({0}, {count}, {dim})",), repeat,
       lambda t, x, count, dim: x.repeat_interleave(count, dim)),
    Op("cast", draw_cast, ("ops.cast({0}, {dtype})", "{0}.astype({dtype})"), lambda x, dtype: x,
       lambda t, x, dtype: x, dtype=lambda dtypes, static: np.dtype(static["dtype"])),
]  # fmt: skip

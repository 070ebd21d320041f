"""Words that pick elements by their place."""

from __future__ import annotations

import numpy as np
from fuzz.vocabulary import Op


def draw_slice(g, n):
    def bound():
        return None if g.chance(0.4) else g.integer(-n - 1, n + 2)

    return slice(bound(), bound(), g.choose((None, None, 1, 2, -1, -1, -2, 3)))


def draw_getitem(g):
    x = g.value()
    shape = g.env[x].shape
    if g.chance(0.35) and shape:
        return draw_fancy(g, x, shape)
    if g.chance(0.25) and shape:
        return draw_places(g, x, shape)
    items = []
    for n in shape[: g.integer(0, len(shape) + 1)]:
        if g.chance(0.35) and n:
            i = g.integer(-n, n)
            items.append(np.int64(i) if g.chance(0.3) else i)
        else:
            items.append(draw_slice(g, n))
    if g.chance(0.3):
        items.insert(g.integer(0, len(items) + 1), None)
    if g.chance(0.3):
        front = len(items) if g.chance(0.5) else g.integer(0, len(items) + 1)
        if front == len(items) or all(isinstance(i, slice) or i is None for i in items[front:]):
            items.insert(front, Ellipsis)
    index = items[0] if len(items) == 1 and g.chance(0.8) else tuple(items)
    if items[front_of(items) :] and Ellipsis in [i for i in items if not isinstance(i, np.generic)]:
        try:  # behind the dots a slice was drawn for another dim; that is as good, a number may not be
            g.env[x][index]
        except IndexError:
            return None
    return [x], {"index": index}


def front_of(items):
    return next((i for i, item in enumerate(items) if item is Ellipsis), len(items))


def draw_fancy(g, x, shape):
    """One array of integers, alone or among slices."""
    dim = g.integer(0, len(shape))
    n = shape[dim]
    ids = g.integers(-n, n, g.choose(((3,), (2, 3), (1,), (0,), (5,)))) if n else np.zeros((0,), int)
    given = ids.tolist() if ids.ndim == 1 and ids.size and g.chance(0.3) else ids
    if g.chance(0.3) and dim == len(shape) - 1:
        return [x], {"index": (Ellipsis, given)}
    before = [draw_slice(g, m) if g.chance(0.5) else slice(None) for m in shape[:dim]]
    after = [draw_slice(g, m) for m in shape[dim + 1 :][: g.integer(0, 3)]] if g.chance(0.4) else []
    if not before and not after and g.chance(0.7):
        return [x], {"index": given}
    return [x], {"index": (*before, given, *after)}


def draw_places(g, x, shape):
    """Masks and arrays of integers, which broadcast, among numbers, slices and None."""
    lengths = g.choose(((), (1,), (3,), (2, 3), (0,)))
    items, masked, dim = [], None, 0
    while dim < len(shape):
        kind = g.choose(("array", "array", "slice", "number", "mask", "new", "stop"))
        if kind == "stop":
            break
        if kind == "new":
            items.append(None)
            continue
        n = shape[dim]
        if kind == "mask" and masked is None:
            masked = g.mask(shape[dim : dim + g.integer(1, 3)])
            items.append(masked)
            lengths = g.choose(((), (1,), (int(masked.sum()),)))
            dim += masked.ndim
            continue
        if kind == "slice":
            items.append(draw_slice(g, n))
        elif n == 0:
            items.append(slice(None))
        elif kind == "number":
            items.append(g.integer(-n, n))
        else:
            ids = g.integers(-n, n, [m if g.chance(0.8) else 1 for m in lengths][g.integer(0, 2) if lengths else 0 :])
            items.append(ids.tolist() if ids.ndim == 1 and ids.size and g.chance(0.2) else ids)
        dim += 1
    if g.chance(0.3):
        items.append(Ellipsis)
    index = tuple(items)
    try:
        y = g.env[x][index]
    except IndexError:
        return None
    if y.ndim > 6 or not any(isinstance(item, (list, np.ndarray)) for item in items):
        return None
    return [x], {"index": index}


def picked(shape, index):
    """The place in the flattened array of each element that an index picks."""
    return np.arange(int(np.prod(shape, dtype=int))).reshape(shape)[index]


def torch_getitem(t, x, index):
    return x.reshape(-1)[t.from_numpy(np.array(picked(tuple(x.shape), index)))]


def draw_take(g):
    x = g.value(lambda a: a.ndim > 0, weights=True)
    if x is None or g.chance(0.15):
        shape = (g.choose((128, 256, 300)), 1) if g.chance(0.15) else (g.integer(1, 6), g.length())
        x = g.leaf(shape, ("parameter", "parameter", "tensor"))
    dim = g.dim(x)
    n = g.env[x].shape[dim]
    shape = g.choose(((), (3,), (2, 3), (6,), (1,), (0,), (2, 0), (2, 1, 2)))
    if g.env[x].ndim + len(shape) > 6:
        return None
    ids = g.integers(-n, n, shape) if n else np.zeros((0,), int)
    if g.chance(0.3):
        ids = np.clip(ids, 0, 127).astype(g.choose((np.int8, np.uint8, np.int32, np.uint64)))
    return [x], {"ids": ids, "dim": dim}


def take(x, ids, dim):
    front = np.moveaxis(x, dim, 0)
    y = np.empty((ids.size, *front.shape[1:]))
    for row, i in enumerate(ids.flat):
        y[row] = front[int(i)]
    dim %= x.ndim
    y = y.reshape((*ids.shape, *front.shape[1:]))
    return np.moveaxis(y, range(ids.ndim), range(dim, dim + ids.ndim))


def torch_take(t, x, ids, dim):
    places = np.arange(int(np.prod(x.shape, dtype=int))).reshape(tuple(x.shape))
    return x.reshape(-1)[t.from_numpy(np.array(np.take(places, ids.astype(np.int64), axis=dim)))]


def draw_gather(g):
    x = g.value(lambda a: a.ndim > 0)
    if x is None:
        return None
    dim = g.dim(x)
    shape = list(g.env[x].shape)
    n = shape[dim]
    shape[dim] = g.length() if n else 0
    ids = g.integers(-n, n, shape) if n else np.zeros(shape, int)
    if g.chance(0.2):
        ids = np.clip(ids, 0, 127).astype(g.choose((np.int8, np.uint8, np.int32, np.uint64)))
    return [x], {"ids": ids, "dim": dim}


def gather(x, ids, dim):
    y = np.empty(ids.shape)
    for at in np.ndindex(ids.shape):
        place = list(at)
        place[dim] = int(ids[at])
        y[at] = x[tuple(place)]
    return y


def torch_gather(t, x, ids, dim):
    n = x.shape[dim]
    return t.gather(x, dim, t.from_numpy(np.where(ids < 0, ids.astype(np.int64) + n, ids.astype(np.int64))))


WORDS = [
    Op("getitem", draw_getitem, ("{0}[{index}]", "ops.getitem({0}, {index})"), lambda x, index: x[index],
       torch_getitem, weight=3),
    Op("take", draw_take, ("ops.take({0}, {ids}, {dim})", "ops.take({0}, dim={dim}, ids=Tensor({ids}))"), take,
       torch_take, weight=1.5),
    Op("gather_along", draw_gather, ("ops.gather_along({0}, {ids}, {dim})",), gather, torch_gather),
]  # fmt: skip

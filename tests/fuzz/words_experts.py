"""Words of tokens on their way to experts and back."""

from __future__ import annotations

import numpy as np
from fuzz.vocabulary import Op, first_dtype
from fuzz.words_fused import WEIGHTS

from mpitrain.rng import uniform


def draw_gates(g):
    p = g.value(lambda a: a.ndim > 0 and a.shape[-1] > 0)
    if p is None:
        return None
    experts = g.env[p].shape[-1]
    shares = experts > 1 and g.chance(0.4)  # of one expert the share is 1, and its gradient nothing but rounding
    p = g.positive(p) if shares else p
    k = g.integer(1 + shares, min(experts, 4) + 1)
    ids = g.integers(0, experts, (*g.env[p].shape[:-1], k))
    if shares or g.chance(0.5):  # each at most once, as a router has it
        ids = (ids[..., :1] + np.arange(k)) % experts
    return [p], {"ids": ids, "renormalize": shares}


def gates(p, ids, renormalize):
    chosen = np.empty(ids.shape)
    for at in np.ndindex(ids.shape):
        chosen[at] = p[(*at[:-1], ids[at])]
    return chosen / chosen.sum(-1, keepdims=True) if renormalize else chosen


def torch_gates(t, p, ids, renormalize):
    chosen = t.gather(p, -1, t.from_numpy(ids))
    return chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen


def draw_take_rows(g):
    x = g.value(lambda a: a.ndim > 0)
    if x is None:
        return None
    height = int(np.prod(g.env[x].shape[:-1], dtype=int))
    n = g.choose((0, 1, 3, 5, 8)) if height else 0
    return [x], {"rows": g.integers(0, max(1, height), (n,))}


def take_rows(x, rows):
    flat = x.reshape(int(np.prod(x.shape[:-1], dtype=int)), x.shape[-1])
    y = np.empty((rows.size, x.shape[-1]))
    for i, row in enumerate(rows):
        y[i] = flat[row]
    return y


def torch_take_rows(t, x, rows):
    return x.reshape(int(np.prod(x.shape[:-1], dtype=int)), x.shape[-1])[t.from_numpy(rows)]


def draw_permute_rows(g):
    x = g.value(lambda a: a.ndim == 2)
    if x is None:
        x = g.leaf((g.integer(0, 6), g.length()))
    return [x], {"order": np.argsort(g.words((g.env[x].shape[0],))).astype(np.int64)}


def draw_grouped_matmul(g):
    x = g.value(lambda a: a.ndim == 2)
    if x is None or g.chance(0.3):
        x = g.leaf((g.choose((0, 1, 4, 7)), g.length()))
    n, a = g.env[x].shape
    w = g.value(lambda w: w.ndim == 3 and w.shape[1] == a and w.shape[0] > 0, weights=True) if g.chance(0.5) else None
    w = w or g.leaf((g.choose((1, 2, 4)), a, g.length(wide=True)), roles=WEIGHTS)
    groups = g.env[w].shape[0]
    cuts = sorted(g.integer(0, n + 1) for _ in range(groups - 1))
    return [x, w], {"counts": tuple(int(c) for c in np.diff([0, *cuts, n]))}


def grouped_matmul(x, w, counts):
    y, i = np.zeros((x.shape[0], w.shape[2])), 0
    for j, count in enumerate(counts):
        for _ in range(count):
            y[i] = x[i] @ w[j]
            i += 1
    return y


def torch_grouped_matmul(t, x, w, counts):
    parts = t.split(x, list(counts))
    return t.cat([part @ matrix for part, matrix in zip(parts, w, strict=True)])


def draw_combine(g):
    out = g.value(lambda a: a.ndim == 2)
    if out is None or g.chance(0.3):
        out = g.leaf((g.choose((0, 1, 4, 7)), g.length()))
    n = g.env[out].shape[0]
    tokens, k = g.choose(((3,), (2, 2), (0,), (1, 4), (5,))), g.choose((1, 2, 3))
    size = int(np.prod(tokens, dtype=int)) * k
    places = np.full(size, -1)
    order = np.argsort(g.words((n,)))[:size]
    places[np.argsort(g.words((size,)))[: order.size]] = order
    gates = g.leaf((*tokens, k), dtype="float64" if g.kinds[out] == "float64" else "float32")
    return [out, gates], {"places": places.reshape(*tokens, k)}


def combine(out, gates, places):
    y = np.zeros((*places.shape[:-1], out.shape[1]))
    for at in np.ndindex(places.shape):
        if places[at] >= 0:
            y[at[:-1]] += gates[at] * out[places[at]]
    return y


def torch_combine(t, out, gates, places):
    rows = t.cat([out, out.new_zeros(1, out.shape[1])])  # -1 is a row of zeros
    return (gates.unsqueeze(-1) * rows[t.from_numpy(places)]).sum(-2)


def draw_jitter(g):
    x = g.value(lambda a: a.ndim > 0)
    if x is None:
        return None
    return [x], {"rows": g.words(g.env[x].shape[:-1]), "amount": g.choose((0.01, 0.1, 0.5, 0.9))}


def jitter(x, rows, amount):
    return x * (1 - amount + 2 * amount * uniform(rows, x.shape[-1]))


WORDS = [
    Op("gates", draw_gates, ("ops.gates({0}, {ids}, {renormalize})",), gates, torch_gates),
    Op("take_rows", draw_take_rows, ("ops.take_rows({0}, {rows})",), take_rows,
       torch_take_rows),
    Op("permute_rows", draw_permute_rows, ("ops.permute_rows({0}, {order})",), lambda x, order: x[order],
       lambda t, x, order: x[t.from_numpy(order)]),
    Op("grouped_matmul", draw_grouped_matmul, ("ops.grouped_matmul({0}, {1}, {counts})",), grouped_matmul,
       torch_grouped_matmul),
    Op("combine", draw_combine, ("ops.combine({0}, {1}, {places})",), combine, torch_combine, dtype=first_dtype),
    Op("jitter", draw_jitter, ("ops.jitter({0}, {rows}, {amount})",), jitter,
       lambda t, x, rows, amount: x * t.from_numpy(np.asarray(1 - amount + 2 * amount * uniform(rows, x.shape[-1])))),
]  # fmt: skip

"""Words that are whole layers."""

from __future__ import annotations

import math

import numpy as np
from fuzz.vocabulary import Op, first_dtype

from mpitrain.rng import words32

ERF = np.vectorize(math.erf, otypes=[float])
WEIGHTS = ("parameter", "parameter", "parameter", "tensor", "constant")


def draw_linear(g):
    x = g.value(lambda a: a.ndim > 0)
    if x is None:
        return None
    n = g.env[x].shape[-1]
    w = g.value(lambda a: a.ndim == 2 and a.shape[0] == n, weights=True) if g.chance(0.6) else None
    w = w or g.weight((n, g.length(wide=True)))
    m = g.env[w].shape[1]
    if g.chance(0.3):
        return [x, w], {}
    b = g.value(lambda a: a.shape == (m,), weights=True) if g.chance(0.5) else None
    return [x, w, b or g.weight((m,))], {}


def bias_of(g, x, shape):
    """Something that can be the bias of x, of its dtype."""
    found = g.value(lambda a: a.shape == shape, weights=True, dtype=g.kinds[x]) if g.chance(0.5) else None
    return found or g.leaf(shape, roles=WEIGHTS, dtype=g.kinds[x])


def draw_gelu(g):
    x = g.value()
    if g.env[x].ndim == 0 or g.chance(0.5):
        return [x], {}
    return [x, bias_of(g, x, g.env[x].shape[-1:])], {}


def gelu_tanh(x, b=0.0):
    z = x + b
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def gelu_erf(x, b=0.0):
    z = x + b
    return 0.5 * z * (1 + ERF(z / math.sqrt(2)))


def torch_gelu(kind):
    return lambda t, x, b=0.0: t.nn.functional.gelu(x + b, approximate=kind)


def draw_residual(g):
    x = g.value(lambda a: a.ndim > 0)
    if x is None:
        return None
    shape = g.env[x].shape
    y = g.value(lambda a: a.shape == shape, dtype=g.kinds[x]) if g.chance(0.6) else None
    inputs = [x, y or g.leaf(shape, dtype=g.kinds[x])]
    if g.chance(0.5):
        g.rng.shuffle(inputs)
    if g.chance(0.6):
        inputs.append(bias_of(g, x, shape[-1:]))
    rows = g.words(shape[:-1]) if g.chance(0.5) else None
    return inputs, {"rows": rows, "p": g.choose((0.1, 0.5, 0.9, 0.0)) if rows is not None else 0.0}


def residual(x, y, b=0.0, *, rows, p):
    return x + (y + b) * (1 if rows is None else keep(x, rows, p))


def torch_residual(t, x, y, b=0.0, *, rows, p):
    return x + (y + b) * (1 if rows is None else t.from_numpy(np.asarray(keep(x, rows, p))))


def draw_residual_norm(g):
    drawn = draw_residual(g)
    if drawn is None or not g.env[drawn[0][0]].shape[-1]:
        return None
    inputs, static = drawn
    if len(inputs) == 2:
        inputs.append(g.number(None))
    shape = g.env[inputs[0]].shape[-1:]
    return [*inputs, g.weight(shape), g.weight(shape)], {**static, "eps": g.choose((1e-5, 1e-3, 0.1))}


def residual_norm(x, y, b, weight, bias, *, rows, p, eps):
    total = residual(x, y, 0.0 if b is None else b, rows=rows, p=p)
    return total, layer_norm(total, weight, bias, eps)


def torch_residual_norm(t, x, y, b, weight, bias, *, rows, p, eps):
    total = torch_residual(t, x, y, 0.0 if b is None else b, rows=rows, p=p)
    return total, torch_layer_norm(t, total, weight, bias, eps)


def linear(x, w, b=0.0):
    return (x[..., :, None] * w).sum(-2) + b


def linear_dtype(dtypes, static):
    return np.result_type(*dtypes[:2])  # a bias does not promote


def draw_layer_norm(g):
    x = g.value(lambda a: a.ndim > 0 and a.shape[-1] > 0)
    if x is None:
        return None
    shape = g.env[x].shape[-1:]
    pair = [
        (g.value(lambda a: a.shape == shape, weights=True) if g.chance(0.5) else None) or g.weight(shape)
        for _ in range(2)
    ]
    return [x, *pair], {"eps": g.choose((1e-5, 1e-5, 1e-3, 0.1))}


def layer_norm(x, weight, bias, eps):
    n = x.shape[-1]
    mean = x.sum(-1, keepdims=True) / n
    variance = ((x - mean) ** 2).sum(-1, keepdims=True) / n
    return (x - mean) / np.sqrt(variance + eps) * weight + bias


def torch_layer_norm(t, x, weight, bias, eps):
    return t.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def draw_attention(g):
    x = g.value(lambda a: a.ndim == 3 and a.shape[2] >= 3 and a.shape[1] > 0 and groupings(a.shape[2]))
    if x is None or g.chance(0.5):
        b, s = g.choose((0, 1, 1, 2, 2, 3)), g.choose((1, 1, 2, 3, 4, 5, 7, 12))
        kv_heads, group, width = g.choose((1, 1, 2, 3)), g.choose((1, 1, 2, 3)), g.choose((1, 2, 3, 4, 5, 8, 11))
        x = g.leaf((b, s, kv_heads * (group + 2) * width))
    b, s, width = g.env[x].shape
    heads, kv_heads = g.choose(groupings(width))
    static = {"heads": heads, "kv_heads": kv_heads, "causal": g.chance(0.5), "mask": None, "rows": None, "drop": 0.0}
    if g.chance(0.5):
        shape = g.choose(((b, s), (b, s, s), (b, 1, s, s), (b, heads, s, s), (1, 1, 1, s), (1, heads, s, 1)))
        static["mask"] = g.mask(shape)
    if g.chance(0.4):
        static["rows"] = g.words((b, heads, s))
        static["drop"] = g.choose((0.1, 0.5, 0.9, 0.0))
    static["window"] = g.choose((1, 2, 3, 5, 20)) if static["causal"] and g.chance(0.4) else None
    static["keep_scores"] = g.chance(0.4)
    return [x], static


def groupings(width):
    """(heads, kv_heads) of which a packed array of this width may be."""
    pairs = [(kv * group, kv) for kv in range(1, 5) for group in range(1, 4)]
    return [(heads, kv) for heads, kv in pairs if width % (heads + 2 * kv) == 0]


def allowed(shape, heads, causal, mask, rows, drop, window):
    """(b, heads, s, s): which scores count, and by what each probability is multiplied."""
    b, s = shape[:2]
    see = np.ones((b, heads, s, s), bool)
    if causal:
        see &= np.arange(s)[:, None] >= np.arange(s)
    if window is not None:
        see &= np.arange(s)[:, None] - np.arange(s) < window
    if mask is not None:
        see &= mask[:, None, None, :] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
    factor = np.ones((b, heads, s, s))
    if drop:
        factor = (words32(rows, s) >= round(drop * 2**32)) / (1 - drop)
    return see, factor


def attention(qkv, heads, kv_heads, causal, mask, rows, drop, window, keep_scores=False):
    """Head by head, query by query."""
    b, s, width = qkv.shape
    d, group = width // (heads + 2 * kv_heads), heads // kv_heads
    see, factor = allowed(qkv.shape, heads, causal, mask, rows, drop, window)
    y = np.zeros((b, s, heads * d))
    for i in range(b):
        for h in range(heads):
            first = h // group * (group + 2)
            q, k, v = (qkv[i, :, p * d : (p + 1) * d] for p in (first + h % group, first + group, first + group + 1))
            scores = np.where(see[i, h], q @ k.T / math.sqrt(d), -np.inf)
            highest = scores.max(1, keepdims=True)
            p = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
            p /= np.maximum(p.sum(1, keepdims=True), 1e-300)
            y[i, :, h * d : (h + 1) * d] = (p * factor[i, h]) @ v
    return y


def torch_attention(t, qkv, heads, kv_heads, causal, mask, rows, drop, window, keep_scores=False):
    b, s, width = qkv.shape
    d, group = width // (heads + 2 * kv_heads), heads // kv_heads
    see, factor = (t.from_numpy(np.array(a)) for a in allowed(qkv.shape, heads, causal, mask, rows, drop, window))
    parts = qkv.reshape(b, s, kv_heads, group + 2, d).permute(0, 2, 3, 1, 4)
    q = parts[:, :, :group].reshape(b, heads, s, d)
    k, v = (parts[:, :, i].repeat_interleave(group, 1) for i in (group, group + 1))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(d)).masked_fill(~see, -1e30)
    p = t.softmax(scores, -1) * see * factor
    return (p @ v).transpose(1, 2).reshape(b, s, heads * d)


def draw_slice_attention(g):
    """Attention of the last of some slices; each may be any value that fits, the same one several times, too."""
    (x,), static = draw_attention(g)
    b, s, width = g.env[x].shape
    past, kind = [], g.kinds[x]
    for _ in range(g.choose((0, 1, 1, 2, 3))):
        fits = g.value(lambda a: a.ndim == 3 and (a.shape[0], a.shape[2]) == (b, width), dtype=kind)
        past.append(fits if fits and g.chance(0.4) else g.leaf((b, g.choose((0, 1, 1, 2, 3, 5)), width), dtype=kind))
    heads, t = static["heads"], s + sum(g.env[each].shape[1] for each in past)
    del static["causal"], static["keep_scores"]
    # A window that reaches into the first slice: those that no query sees would not even be on the tape.
    least = t - s - (g.env[past[0]].shape[1] if past else 0) + 2
    static["window"] = g.integer(least, t + 3) if g.chance(0.3) else None
    if static["mask"] is not None:
        shape = g.choose(((b, t), (b, s, t), (b, heads, s, t), (1, 1, 1, t), (1, heads, s, 1)))
        static["mask"] = g.mask(shape)
    return [x, *past], static


def of_slice(whole):
    """Attention of the last slice by that of the whole sequence."""

    def last(x, *past, heads, kv_heads, mask, rows, drop, window):
        b, s, _ = x.shape
        before = sum(each.shape[1] for each in past)
        t = before + s
        if mask is not None:
            mask = mask[:, None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
            mask = np.concatenate([np.ones((b, heads, before, t), bool), np.broadcast_to(mask, (b, heads, s, t))], 2)
        if rows is not None:
            rows = np.concatenate([np.zeros((b, heads, before), np.uint64), rows], 2)
        return whole([*past, x], heads, kv_heads, True, mask, rows, drop, window)[:, before:]

    return last


def draw_cross_entropy(g):
    x = g.value(lambda a: a.ndim > 0 and a.shape[-1] > 0)
    if x is None:
        return None
    *rows, v = g.env[x].shape
    ignore = g.choose((-100, -100, -1, 0))
    targets = g.integers(0, v, rows)
    if g.chance(0.6):
        targets = np.where(g.mask(tuple(rows)), targets, ignore)
    elif g.chance(0.4):
        targets = np.asarray(targets).astype(g.choose((np.int8, np.uint8, np.int32, np.uint64)))
    return [x], {"targets": np.asarray(targets), "ignore": ignore}


def cross_entropy(x, targets, ignore):
    total = 0.0
    for row, target in zip(x.reshape(-1, x.shape[-1]), targets.reshape(-1), strict=True):
        if target != ignore:
            highest = row.max()
            total += highest + math.log(np.exp(row - highest).sum()) - row[target]
    return np.asarray(total)


def torch_cross_entropy(t, x, targets, ignore):
    flat = x.reshape(-1, x.shape[-1])
    if not flat.shape[0]:
        return x.sum()
    return t.nn.functional.cross_entropy(
        flat, t.from_numpy(targets.reshape(-1).astype(np.int64)), ignore_index=ignore, reduction="sum"
    )


def at_least_single(dtypes, static):
    return np.result_type(np.float32, dtypes[0])


def draw_dropout(g):
    x = g.value(lambda a: a.ndim > 0)
    if x is None:
        return None
    return [x], {"rows": g.words(g.env[x].shape[:-1]), "p": g.choose((0.1, 0.5, 0.5, 0.9, 0.0, 1.0))}


def keep(x, rows, p):
    if p == 1:
        return np.zeros(x.shape)
    return (words32(rows, x.shape[-1]) >= round(p * 2**32)) / (1 - p)


def norm_blur(x, weight):
    """What a norm may lose: the digits that a row's mean takes, before it divides by the row's deviation.

    In backward that error meets another division.  Size and deviation stand still here, else the slope of this term
    would vanish where that of the norm does.
    """
    deviation = f"({x}.var(-1, True) + {{eps}}).detach() ** -0.5"
    return f"(1 + {x} * {deviation} * (1 + abs({x}).detach() * {deviation})) * shake({x}) * {weight}"


TOTAL = "ops.residual({0}, {1}, {2}, rows={rows}, p={p})"
GELU_BLUR = "sum([{all}]) * shake({0})"
PACKED = "*{0}.shape[:2], {kv_heads}, {heads} // {kv_heads} + 2, {0}.shape[2] // ({heads} + 2 * {kv_heads})"
EACH_HEAD = "(x[..., :-2, :] + x[..., -2:-1, :] + x[..., -1:, :]).reshape(*x.shape[:2], {heads} * x.shape[4])"
ATTENTION_BLUR = f"(lambda y: y * shake(y))((lambda x: {EACH_HEAD})(({{0}} * (1 + {{0}})).reshape({PACKED})))"
"""By a term of each query, its key and its value."""
JOINED = f"(lambda all: (all * (1 + all)).reshape({PACKED.replace('{0}', 'all')}))(ops.concat([{{all}}], 1))"
SLICE_BLUR = (
    "(lambda y: y * shake(y))((lambda each, own: each[:, :own] + each[:, own:].sum(1, True))"
    f"((lambda x: {EACH_HEAD})({JOINED}), {{0}}.shape[1]))"
)
"""The same, and terms of all earlier keys and values."""

WORDS = [
    Op("linear", draw_linear, ("ops.linear({all})",), linear,
       lambda t, x, w, b=None: x @ w if b is None else x @ w + b, dtype=linear_dtype, roundings=2, weight=2),
    Op("layer_norm", draw_layer_norm, ("ops.layer_norm({0}, {1}, {2}, {eps})",), layer_norm, torch_layer_norm,
       dtype=first_dtype, weight=1.5, blur=norm_blur("{0}", "{1}")),
    Op("attention", draw_attention,
       ("ops.attention({0}, {heads}, {kv_heads}, causal={causal}, mask={mask}, rows={rows}, drop={drop},"
        " keep_scores={keep_scores}, window={window})",), attention,
       torch_attention, blur=ATTENTION_BLUR, weight=1.5),
    Op("slice_attention", draw_slice_attention,
       ("ops.slice_attention({0}, [{all}][1:], {heads}, {kv_heads}, mask={mask}, rows={rows}, drop={drop},"
        " window={window})",),
       of_slice(lambda slices, *how: attention(np.concatenate(slices, 1), *how)),
       lambda t, *inputs, **static: of_slice(lambda slices, *how: torch_attention(t, t.cat(slices, 1), *how))(
           *inputs, **static), blur=SLICE_BLUR),
    Op("softmax_cross_entropy", draw_cross_entropy, ("ops.softmax_cross_entropy({0}, {targets}, {ignore})",),
       cross_entropy, torch_cross_entropy, dtype=at_least_single, blur="({0} * shake({0})).sum()"),
    Op("dropout", draw_dropout, ("ops.dropout({0}, {rows}, {p})",), lambda x, rows, p: x * keep(x, rows, p),
       lambda t, x, rows, p: x * t.from_numpy(np.asarray(keep(x, rows, p))), roundings=2),
    Op("residual", draw_residual, ("ops.residual({all}, rows={rows}, p={p})",), residual, torch_residual, roundings=3,
       weight=1.5),
    Op("residual_norm", draw_residual_norm,
       ("ops.residual_norm({0}, {1}, {2}, {3}, {4}, rows={rows}, p={p}, eps={eps})",), residual_norm,
       torch_residual_norm, dtype=first_dtype, blur=f"(None, {norm_blur(TOTAL, '{3}')})", roundings=None, weight=1.5),
    Op("gelu_tanh", draw_gelu, ("ops.gelu_tanh({all})",), gelu_tanh, torch_gelu("tanh"), blur=GELU_BLUR),
    Op("gelu_erf", draw_gelu, ("ops.gelu_erf({all})",), gelu_erf, torch_gelu("none"), blur=GELU_BLUR),
]  # fmt: skip

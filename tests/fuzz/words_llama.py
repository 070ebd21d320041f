"""Words that Llama is made of."""

from __future__ import annotations

import numpy as np
from fuzz.vocabulary import Op, first_dtype
from fuzz.words_fused import draw_attention, draw_residual, residual, torch_residual


def draw_rms_norm(g):
    x = g.value(lambda a: a.ndim > 0 and a.shape[-1] > 0)
    if x is None:
        return None
    shape = g.env[x].shape[-1:]
    weight = g.value(lambda a: a.shape == shape, weights=True) if g.chance(0.5) else None
    return [x, weight or g.weight(shape)], {"eps": g.choose((1e-5, 1e-5, 1e-3, 0.1))}


def rms_norm(x, weight, eps):
    square = sum(x[..., i] ** 2 for i in range(x.shape[-1])) / x.shape[-1]
    return x / np.sqrt(square + eps)[..., None] * weight


def torch_rms_norm(t, x, weight, eps):
    return x * t.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def draw_residual_rms_norm(g):
    drawn = draw_residual(g)
    if drawn is None or not g.env[drawn[0][0]].shape[-1]:
        return None
    inputs, static = drawn
    if len(inputs) == 2:
        inputs.append(g.number(None))
    weight = g.weight(g.env[inputs[0]].shape[-1:])
    return [*inputs, weight], {**static, "eps": g.choose((1e-5, 1e-3, 0.1))}


def residual_rms_norm(x, y, b, weight, *, rows, p, eps):
    total = residual(x, y, 0.0 if b is None else b, rows=rows, p=p)
    return total, rms_norm(total, weight, eps)


def torch_residual_rms_norm(t, x, y, b, weight, *, rows, p, eps):
    total = torch_residual(t, x, y, 0.0 if b is None else b, rows=rows, p=p)
    return total, torch_rms_norm(t, total, weight, eps)


def draw_swiglu(g):
    gate = g.value(lambda a: a.ndim > 0)
    if gate is None:
        return None
    shape = g.env[gate].shape
    up = g.value(lambda a: a.shape == shape, dtype=g.kinds[gate]) if g.chance(0.6) else None
    inputs = [gate, up or g.leaf(shape, dtype=g.kinds[gate])]
    if g.chance(0.5):
        g.rng.shuffle(inputs)
    return inputs, {}


def draw_rotary(g):
    (x,), static = draw_attention(g)
    b, s, width = g.env[x].shape
    heads, kv_heads = static["heads"], static["kv_heads"]
    d = width // (heads + 2 * kv_heads)
    if d % 2:
        return None
    shape = (s, d // 2) if g.chance(0.6) else (b, s, d // 2)
    angles = 7 * g.numbers.random(shape)
    return [x], {"heads": heads, "kv_heads": kv_heads, "cos": np.cos(angles), "sin": np.sin(angles)}


def rotary(qkv, heads, kv_heads, cos, sin):
    """Head by head, pair by pair."""
    width = qkv.shape[2]
    d, members = width // (heads + 2 * kv_heads), heads // kv_heads + 2
    y = qkv.copy()
    for head in range(heads + 2 * kv_heads):
        if head % members == members - 1:
            continue  # values
        for i in range(d // 2):
            one, other = head * d + i, head * d + i + d // 2
            c, n = cos[..., i], sin[..., i]
            y[..., one] = qkv[..., one] * c - qkv[..., other] * n
            y[..., other] = qkv[..., other] * c + qkv[..., one] * n
    return y


def torch_rotary(t, qkv, heads, kv_heads, cos, sin):
    b, s, width = qkv.shape
    d = width // (heads + 2 * kv_heads)
    parts = qkv.reshape(b, s, kv_heads, heads // kv_heads + 2, d)
    cos, sin = (t.from_numpy(x).unsqueeze(-2).unsqueeze(-2) for x in (cos, sin))
    one, other = parts[..., :-1, : d // 2], parts[..., :-1, d // 2 :]
    turned = t.cat([one * cos - other * sin, other * cos + one * sin], -1)
    return t.cat([turned, parts[..., -1:, :]], -2).reshape(b, s, width)


def draw_pack_rotary(g):
    """Queries of the width of some value, and keys and values of their own."""
    drawn = draw_rotary(g)
    if drawn is None:
        return None
    (x,), static = drawn
    b, s, width = g.env[x].shape
    heads, kv_heads = static["heads"], static["kv_heads"]
    d = width // (heads + 2 * kv_heads)
    parts = (b, s, heads * d), (b, s, 2 * kv_heads * d)
    found = [g.value(lambda a, shape=shape: a.shape == shape, dtype=g.kinds[x]) for shape in parts]
    return [name or g.leaf(shape, dtype=g.kinds[x]) for name, shape in zip(found, parts, strict=True)], static


def packed(q, kv, heads, kv_heads):
    """Group by group: its queries, its key, its value."""
    d, g = q.shape[2] // heads, heads // kv_heads
    whole = []
    for group in range(kv_heads):
        whole += [q[..., group * g * d : (group + 1) * g * d], kv[..., 2 * group * d : 2 * (group + 1) * d]]
    return whole


def pack_rotary(q, kv, heads, kv_heads, cos, sin):
    return rotary(np.concatenate(packed(q, kv, heads, kv_heads), -1), heads, kv_heads, cos, sin)


def torch_pack_rotary(t, q, kv, heads, kv_heads, cos, sin):
    return torch_rotary(t, t.cat(packed(q, kv, heads, kv_heads), -1), heads, kv_heads, cos, sin)


def rms_blur(x, weight):
    """What the slope loses where a row is short: it divides by the size of the row, and takes that away again."""
    return f"{x} * (({x} * {x}).mean(-1, True) + {{eps}}).detach() ** -0.5 * shake({x}) * {weight}"


TOTAL = "ops.residual({0}, {1}, {2}, rows={rows}, p={p})"

WORDS = [
    Op("rms_norm", draw_rms_norm, ("ops.rms_norm({0}, {1}, {eps})",), rms_norm, torch_rms_norm, dtype=first_dtype,
       blur=rms_blur("{0}", "{1}"), weight=1.5),
    Op("residual_rms_norm", draw_residual_rms_norm,
       ("ops.residual_rms_norm({0}, {1}, {2}, {3}, rows={rows}, p={p}, eps={eps})",), residual_rms_norm,
       torch_residual_rms_norm, dtype=first_dtype, blur=f"(None, {rms_blur(TOTAL, '{3}')})", roundings=None,
       weight=1.5),
    Op("swiglu", draw_swiglu, ("ops.swiglu({0}, {1})",), lambda gate, up: gate / (1 + np.exp(-gate)) * up,
       lambda t, gate, up: t.nn.functional.silu(gate) * up, blur="({0} + 1) * shake({0}) * {1}", weight=1.5),
    Op("rotary", draw_rotary, ("ops.rotary({0}, {heads}, {kv_heads}, {cos}, {sin})",), rotary, torch_rotary,
       dtype=first_dtype, weight=1.5),
    Op("pack_rotary", draw_pack_rotary, ("ops.pack_rotary({0}, {1}, {heads}, {kv_heads}, {cos}, {sin})",), pack_rotary,
       torch_pack_rotary, dtype=first_dtype, weight=1.0),
]  # fmt: skip

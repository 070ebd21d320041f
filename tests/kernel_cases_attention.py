"""Cases of attention, forward and backward: its whole contract, on arrays as callers have them.

Backward is given an output and a logarithm as inputs, those of the same numbers in float64, and is the function of them
that its formula says.  Of halves weights and slopes are rounded on the way, which `rounded` allows for.
"""

import functools
import math

import numpy as np
from kernel_case import Case, Wide, normal

from mpitrain.autograd.ops.attention import by_head, split_heads
from mpitrain.kernels import reference
from mpitrain.kernels.blocks import kept_scores
from mpitrain.rng import absorb, stream_key

HALVES = ("float16", "bfloat16")
PLAIN = {"causal": False, "mask": None, "rows": None, "drop": 0.0, "keys": None, "since": None, "firsts": None}
FORWARD, BACKWARD = 2.0, 3.0  # `rounded`: the weights and what comes of it; slopes, weights and sums of both


def hashes(b, h, s):
    key = stream_key(7, "attention", 1)
    return absorb(absorb(absorb(key, np.arange(b))[:, None], np.arange(h)[None])[:, :, None], np.arange(s)[None, None])


# ------------------------------------------------------------------------------------------------------------- arrays


def apart(b, h, s, t, d, more=None, change=None, **how):
    """make: q, k, v and grad by themselves; y and lse as float64 gives them."""

    def make(rng):
        made = {name: normal(rng, b, h, n, d) for name, n in (("q", s), ("k", t), ("v", t), ("grad", s))}
        made |= PLAIN | how | {name: x(rng) for name, x in (more or {}).items()} | {"scale": 1 / math.sqrt(d)}
        if change is not None:
            change(made)
        with np.errstate(all="ignore"):
            y = np.empty((b, h, s, d))
            lse = reference.attention(made["q"], made["k"], made["v"], y, **setting(made))
        return made | {"y": y, "lse": in_single(lse)}

    return make


def packed(b, heads, kv_heads, s, d, **how):
    """make: as a layer of `heads` has them, of which `kv_heads` groups share keys and values; one of each group."""

    def make(rng):
        qkv, grad = normal(rng, b, s, (heads + 2 * kv_heads) * d), normal(rng, b, s, heads * d)
        made = {"qkv": qkv, "grad": grad, "heads": heads, "kv_heads": kv_heads, "scale": 1 / math.sqrt(d)} | PLAIN | how
        q, k, v = split_heads(qkv, heads, kv_heads)
        y = np.zeros_like(grad)
        lse = reference.attention(q[:, :, -1], k, v, by_head(y, heads, kv_heads)[:, :, -1], **setting(made))
        return made | {"y": y, "lse": in_single(lse)}

    return make


def in_single(lse):
    """The lowest number, of a query that sees no key, is another one in each precision."""
    return Wide(np.maximum(lse, np.finfo(np.float32).min))


def setting(made):
    return {name: made[name] for name in ("scale", *PLAIN)}


def parts(a):
    """(q, k, v) of either, and a function that gives (b, h, s, d) of an array like the output."""
    if not hasattr(a, "qkv"):
        return a.q, a.k, a.v, lambda x: x
    q, k, v = split_heads(a.qkv, a.heads, a.kv_heads)
    return q[:, :, -1], k, v, lambda x: by_head(x, a.heads, a.kv_heads)[:, :, -1]


# -------------------------------------------------------------------------------------------------------------- calls


def forward(k, a, scores=False, wide=False):
    q, keys, v, of_heads = parts(a)
    dtype = a.lse.dtype if wide else a.dtype
    out = a.xp.full(a.y.shape, 7.0, dtype)
    kept = _room(a, q, keys) if scores else None
    lse = k.attention(q, keys, v, of_heads(out), scores=kept, **setting(vars(a)))
    return out, lse, kept


def backward(k, a, scores=False, wide=False):
    q, keys, v, of_heads = parts(a)
    dtype = a.lse.dtype if wide else a.dtype
    kept = None
    if scores:
        kept = _room(a, q, keys)
        k.attention(q, keys, v, a.xp.empty(q.shape, q.dtype), scores=kept, **setting(vars(a)))
    if hasattr(a, "qkv"):
        whole = a.xp.full(a.qkv.shape, 7.0, dtype)
        dq, dk, dv = split_heads(whole, a.heads, a.kv_heads)
        results, dq = (whole,), dq[:, :, -1]
    else:
        results = dq, dk, dv = tuple(a.xp.full(x.shape, 7.0, dtype) for x in (q, keys, v))
    given = of_heads(a.grad), q, keys, v, of_heads(a.y), a.lse
    k.attention_backward(*given, dq, dk, dv, scores=kept, **setting(vars(a)))
    return results


def _room(a, q, k):
    count = kept_scores(q.shape[2], k.shape[2], a.causal, a.since)
    return a.xp.full((*q.shape[:2], count), 7.0, a.lse.dtype)


def backward_with_a_broadcast_gradient(k, a):
    a.grad = a.xp.broadcast_to(a.grad[:, :, :1, :1], a.grad.shape)
    return backward(k, a)


def both(name, make, of_halves=True, **more):
    """A forward and a backward case."""
    dtypes = {} if of_halves else {"dtypes": ("float64", "float32")}
    calls = {key: more.pop(key) for key in ("scores", "wide") if key in more}
    return {
        f"{kernel} {name}": Case(
            kernel, make, functools.partial(call, **calls) if calls else call, rounded=rounded, **(dtypes | more)
        )
        for kernel, call, rounded in (("attention", forward, FORWARD), ("attention_backward", backward, BACKWARD))
    }


# -------------------------------------------------------------------------------------------------------------- cases


def documents(b, s):
    """Side by side, with padding behind; of the last sample any keys at all, in no order."""

    def make(rng):
        firsts = np.maximum.accumulate(np.where(rng.random((b, s)) < 0.1, np.arange(s), 0), axis=1)
        firsts[:, s - s // 7 :] = np.arange(s - s // 7, s) + 1
        firsts[-1] = rng.integers(-5, s + 5, s)
        return firsts

    return make


def random_mask(*shape):
    def make(rng):
        mask = rng.random(shape) > 0.3
        mask[:, :, : 1 + shape[2] // 5] = False  # queries that see none, in some of the forms
        return mask

    return make


def dropped(b, h, s, t):
    """Weights that are dropped, of keys with numbers of their own, and some that may not be seen."""
    keys = np.arange(t)[::-1] * 3 + 1
    return {"rows": hashes(b, h, s), "drop": 0.3, "keys": keys}


def of_identity(made):
    """Values, and gradients, that show each weight by itself."""
    for name in ("v", "grad"):
        made[name] = np.broadcast_to(np.eye(*made[name].shape[2:]), made[name].shape).copy()


def not_numbers(made):
    made["q"][0, 0, 1] = np.nan
    made["q"][0, 0, 3, 0] = np.inf


def large(made):
    made["q"] *= 30.0


CASES = {
    **both("packed, causal, 2x70x20", packed(1, 2, 2, 70, 20, causal=True)),
    **both("1x1x1", apart(1, 1, 1, 1, 1)),
    **both(
        "37 on 70, mask and dropout",
        apart(2, 1, 37, 70, 16, {"mask": random_mask(2, 1, 37, 70)}, **dropped(2, 1, 37, 70)),
    ),
    "attention each weight": Case(
        "attention",
        apart(1, 1, 40, 33, 33, change=of_identity, **dropped(1, 1, 40, 33)),
        forward,
        masks=(0,),
        rounded=2,
    ),
    "attention_backward each weight": Case(
        "attention_backward",
        apart(1, 1, 33, 40, 33, change=of_identity, **dropped(1, 1, 33, 40)),
        backward,
        masks=(2,),
        rounded=3,
    ),
    "attention no keys": Case("attention", apart(1, 2, 5, 0, 3), forward),
    "attention no queries": Case("attention", apart(1, 2, 0, 5, 3), forward, by_reference=True),
    "attention_backward no keys": Case("attention_backward", apart(1, 2, 5, 0, 3), backward, by_reference=True),
    "attention_backward no queries": Case("attention_backward", apart(1, 2, 0, 5, 3), backward, by_reference=True),
    "attention not a number": Case(
        "attention", apart(1, 1, 20, 20, 8, change=not_numbers, causal=True), forward, rounded=2
    ),
    # ------------------------------------------------------------------------------ where slow tests are asked for
    **both("packed, causal, 1x2x130x64", packed(1, 2, 2, 130, 64, causal=True), cost="slow"),
    **both("packed, groups, 2x4:2x65x32", packed(2, 4, 2, 65, 32), cost="slow"),
    **both("65 on 129", apart(2, 1, 65, 129, 24), cost="slow"),
    **both("129 on 2", apart(1, 2, 129, 2, 7), cost="slow"),
    **both("1 on 300", apart(2, 2, 1, 300, 40), cost="slow"),
    **both("window of 20", apart(1, 2, 150, 150, 12, causal=True, since=-19), cost="slow"),
    **both("window of 2", apart(1, 1, 70, 70, 8, causal=True, since=-1), cost="slow"),
    **both("chunks apart, since 33", apart(1, 1, 70, 129, 8, since=33), cost="slow"),
    **both("chunks apart, none seen", apart(1, 1, 70, 40, 8, since=60), cost="slow"),
    **both("chunks apart, since -100", apart(1, 1, 129, 70, 8, since=-100), cost="slow"),
    **both("documents", apart(3, 2, 140, 140, 9, {"firsts": documents(3, 140)}, causal=True), cost="slow"),
    **both(
        "documents and window",
        apart(2, 1, 140, 140, 9, {"firsts": documents(2, 140)}, causal=True, since=-30),
        cost="slow",
    ),
    **both("documents, not causal", apart(2, 1, 70, 70, 9, {"firsts": documents(2, 70)}), cost="slow"),
    **both("nothing seen", apart(1, 2, 33, 40, 8, {"mask": lambda rng: np.zeros((1, 1, 1, 1), bool)}), cost="slow"),
    **both("large scores", apart(1, 1, 70, 70, 16, change=large), factor=300.0, cost="slow"),
    **both("kept scores", packed(1, 2, 2, 150, 16, causal=True), scores=True, cost="slow"),
    **both("kept scores, window", packed(1, 2, 2, 200, 16, causal=True, since=-69), scores=True, cost="slow"),
    **both(
        "kept scores, documents",
        apart(2, 1, 150, 150, 8, {"firsts": documents(2, 150)}, causal=True),
        scores=True,
        cost="slow",
    ),
    **both(
        "kept scores, 40 on 90",
        apart(1, 2, 40, 90, 8, {"mask": random_mask(1, 1, 40, 90)}, **dropped(1, 2, 40, 90)),
        scores=True,
        cost="slow",
    ),
    **both("float32 results", apart(1, 2, 70, 40, 16), wide=True, dtypes=HALVES, cost="slow"),
    "attention_backward broadcast gradient": Case(
        "attention_backward",
        apart(1, 2, 40, 40, 16, causal=True),
        backward_with_a_broadcast_gradient,
        rounded=4,
        cost="slow",
    ),
}
for _form in ((2, 1, 1, 70), (1, 3, 1, 70), (2, 3, 37, 70), (1, 1, 37, 1)):
    CASES |= both(
        f"mask {'x'.join(map(str, _form))}", apart(2, 3, 37, 70, 5, {"mask": random_mask(*_form)}), cost="slow"
    )
for _width in (63, 65, 128, 200, 256, 257):
    CASES |= both(f"heads of {_width}", apart(1, 1, 70, 70, _width, causal=True), cost="slow", factor=2.0)
    how = dropped(1, 1, 33, 90)
    CASES |= both(
        f"heads of {_width}, more keys",
        apart(1, 1, 33, 90, _width, {"mask": random_mask(1, 1, 33, 90)}, **how),
        cost="slow",
        factor=2.0,
    )
for _width in (64, 128, 256):
    CASES |= both(
        f"packed, causal, 1x2x1024x{_width}", packed(1, 2, 2, 1024, _width, causal=True), cost="gpu", factor=10.0
    )
    CASES |= both(
        f"1x2x1000 on 1500x{_width}",
        apart(1, 2, 1000, 1500, _width, **dropped(1, 2, 1000, 1500)),
        cost="gpu",
        factor=10.0,
    )

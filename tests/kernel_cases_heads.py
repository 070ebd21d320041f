"""Cases of kernels that move whole rows: rotary positions, and tokens on their way from experts."""

import numpy as np
from kernel_case import Case, Wide, normal


def rotaries():
    def make(rng, b, s, heads, kv_heads, d, own=False):
        angle = 3 * normal(rng, *((b, s, d // 2) if own else (s, d // 2)))
        return {
            "qkv": normal(rng, b, s, (heads + 2 * kv_heads) * d),
            "q": normal(rng, b, s, heads * d),
            "kv": normal(rng, b, s, 2 * kv_heads * d),
            "cos": Wide(np.cos(angle)),
            "sin": Wide(np.sin(angle)),
            "heads": (heads, kv_heads),
        }

    def whole(k, a):
        return k.rotary(a.qkv, *a.heads, a.cos, a.sin)

    def cut(k, a):
        return k.rotary(a.qkv[:, 1:], *a.heads, a.cos[1:], -a.sin[1:])

    def pack(k, a):
        return k.rotary_pack(a.q, a.kv, *a.heads, a.cos, a.sin)

    def unpack(k, a):
        return k.rotary_unpack(a.qkv, *a.heads, a.cos, -a.sin)

    made = {}
    for name, call in (("rotary", whole), ("rotary_pack", pack), ("rotary_unpack", unpack)):
        sizes = {
            "1 token": (1, 1, 1, 1, 2),
            "2x3, 4 heads in 2 groups of 16": (2, 3, 4, 2, 16),
            "2x3, 3 heads of 6": (2, 3, 3, 3, 6),
            "1x2, 6 heads in 1 group of 94": (1, 2, 6, 1, 94),
            "positions of its own": (2, 3, 2, 1, 8, True),
            "no token": (1, 0, 2, 1, 8),
        }
        for words, size in sizes.items():
            made[f"{name} {words}"] = Case(name, lambda rng, size=size: make(rng, *size), call, by_reference=0 in size)
        made[f"{name} 2x1024, 12 heads of 64"] = Case(name, lambda rng: make(rng, 2, 1024, 12, 4, 64), call, cost="gpu")
    made["rotary, cut"] = Case("rotary", lambda rng: make(rng, 2, 4, 2, 2, 8), cut)
    return made


def choices():
    def make(rng, t, k, n, h):
        """Each of t tokens has k of n rows of h numbers; a quarter of the choices came to nothing."""
        places = rng.permutation(n)[: t * k].reshape(t, k)
        places[rng.random((t, k)) < 0.25] = -1
        gates, out = rng.random((t, k)), normal(rng, n, h)
        gates[places < 0] = np.nan
        out[np.setdiff1d(np.arange(n), places)] = np.nan  # nobody's rows
        return {"g": normal(rng, t, h), "out": out, "gates": Wide(gates), "places": places}

    def nobody(rng):
        return {**make(rng, 3, 2, 8, 5), "places": np.full((3, 2), -1)}

    def forward(k, a):
        return k.combine(a.out, a.gates, a.places)

    def backward(k, a):
        return k.combine_backward(a.g, a.out, a.gates, a.places)

    made = {}
    for name, call in (("combine", forward), ("combine_backward", backward)):
        for size in ((1, 1, 2, 1), (7, 2, 20, 33), (3, 4, 12, 132), (2, 2, 5, 1100), (0, 2, 3, 8)):
            t, k, n, h = size
            words = f"{t} tokens, {k} of {n}x{h}"
            made[f"{name} {words}"] = Case(name, lambda rng, size=size: make(rng, *size), call, by_reference=0 in size)
        made[f"{name} nobody"] = Case(name, nobody, call)
        made[f"{name} 4096 tokens"] = Case(name, lambda rng: make(rng, 4096, 2, 9000, 768), call, cost="gpu")
    return made


CASES = {**rotaries(), **choices()}

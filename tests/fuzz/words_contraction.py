"""The word whose dims have letters."""

from __future__ import annotations

import math

import numpy as np
from fuzz.vocabulary import Op

PRODUCTS = 3000  # of all letters, for the naive sum over them
ROLES = ("tensor", "tensor", "tensor", "parameter", "constant", "array")


class Letters:
    """Names for dims, with the length that each has."""

    def __init__(self, g) -> None:
        self.g = g
        self.sizes: dict[str, int] = {}
        self.free = g.sample("abcdefghijklmnopqrstuvwxyzABCDXYZ", 20)

    def of(self, shape) -> str:
        """Letters for a given shape: old ones where the lengths allow it, also twice."""
        text = ""
        here: dict[str, int] = {}
        for n in shape:
            fits = [c for c, m in self.sizes.items() if here.get(c, n) == n and (m == n or 1 in (m, n))]
            c = self.g.choose(fits) if fits and self.g.chance(0.6) else self.new()
            here[c] = n
            self.sizes[c] = n if self.sizes.get(c, 1) == 1 else self.sizes[c]
            text += c
        return text

    def some(self) -> tuple[str, tuple[int, ...]]:
        """Letters and lengths of a new operand."""
        text = ""
        for _ in range(self.g.integer(0, 4)):
            old = self.g.chance(0.65) and list(self.sizes)
            c = self.g.choose(old) if old else self.new()
            self.sizes.setdefault(c, self.g.length())
            text += c
        lengths = [1 if text.count(c) == 1 and self.g.chance(0.1) else self.sizes[c] for c in text]
        return text, tuple(lengths)

    def new(self) -> str:
        return self.free.pop()


def draw_einsum(g):
    letters = Letters(g)
    dots = g.chance(0.3)
    first = g.value(lambda a: a.ndim <= 4)
    if first is None:
        return None
    shape = g.env[first].shape
    batch: tuple[int, ...] = ()
    if dots:
        n = g.integer(0, min(len(shape), 2) + 1)
        at = g.integer(0, len(shape) - n + 1)
        batch = shape[at : at + n]
        texts = [letters.of(shape[:at]) + "..." + letters.of(shape[at + n :])]
        if any(texts[0].count(c) > 1 for c in letters.sizes):
            return None  # letters of the same dim were drawn apart
    else:
        texts = [letters.of(shape)]
    inputs = [first]
    for _ in range(g.choose((0, 1, 1, 1, 2, 2, 3))):
        other = g.value(lambda a: a.ndim <= 3) if g.chance(0.35) else None
        if other is not None:
            texts.append(letters.of(g.env[other].shape))
            inputs.append(other)
            continue
        text, lengths = letters.some()
        if dots and g.chance(0.6):
            mine = g.fitting_shape(batch)
            at = g.integer(0, len(text) + 1)
            text, lengths = f"{text[:at]}...{text[at:]}", (*lengths[:at], *mine, *lengths[at:])
        texts.append(text)
        inputs.append(g.leaf(lengths, roles=ROLES))
    if math.prod(letters.sizes.values()) * math.prod(batch) > PRODUCTS:
        return None
    return inputs, {"subscripts": ",".join(texts) + output_of(g, letters, dots)}


def output_of(g, letters, dots) -> str:
    if g.chance(0.15):
        return ""
    kept = [c for c in letters.sizes if g.chance(0.6)]
    g.rng.shuffle(kept)
    if dots:
        kept.insert(g.integer(0, len(kept) + 1), "...")
    return " -> " + "".join(kept)


WORDS = [
    Op("einsum", draw_einsum, ("ops.einsum({subscripts}, {all})",),
       lambda *inputs, subscripts: np.einsum(subscripts, *inputs),
       lambda t, *inputs, subscripts: t.einsum(subscripts, *inputs), roundings=None, weight=2),
]  # fmt: skip

"""How a tensor here and those of another tool hold the same elements in another order.

    Pair("blocks.0.attention.qkv.weight", ("h.0.attn.c_attn.weight",), here="w (h p d)", there="w (p h d)")

reads: both are matrices; the columns of the one go through queries, keys and values (p) of each head (h), those of the
other through the heads of all queries, then of all keys, then of all values.  A letter that only `here` has counts the
tensors of the other tool, as `p` in

    Pair("blocks.0.attention.kv.weight", (k_proj, v_proj), here="w (g p d)", there="(g d) w")
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

_DIM = re.compile(r"\(([a-z ]+)\)|([a-z])")


class Pair(NamedTuple):
    """A tensor here, and the one or more of another tool that hold its elements.

    Attributes:
        ours: its name here.
        theirs: the names there.
        here, there: what the dims of each go through, slowest first; there: of each of theirs.
        sizes: letter -> how many.
    """

    ours: str
    theirs: tuple[str, ...]
    here: str
    there: str
    sizes: Mapping[str, int]

    @property
    def our_shape(self) -> tuple[int, ...]:
        """Of ours."""
        return self._shape(self.here)

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Of each of theirs."""
        return self._shape(self.there)

    def views(self, ours: np.ndarray) -> list[np.ndarray]:
        """Of each of theirs its elements in ours, a dim for each letter of `there`."""
        whole = ours.reshape([self.sizes[letter] for letter in _letters(self.here)])
        here, there = _letters(self.here), _letters(self.there)
        order = [here.index(letter) for letter in there]
        counting = [here.index(letter) for letter in here if letter not in there]
        return list(whole.transpose(counting + order)) if counting else [whole.transpose(order)]

    def apart(self, theirs: np.ndarray) -> np.ndarray:
        """One of theirs, a dim for each letter."""
        return theirs.reshape([self.sizes[letter] for letter in _letters(self.there)])

    def _shape(self, pattern: str) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[letter] for letter in dim) for dim in _dims(pattern))


def _dims(pattern: str) -> list[list[str]]:
    return [(group or single).split() for group, single in _DIM.findall(pattern)]


def _letters(pattern: str) -> list[str]:
    return [letter for dim in _dims(pattern) for letter in dim]

"""Keys and values of the tokens that a model has seen, so that the next token needs no second look at them.

    fill   the tokens of some texts in one pass, (b, s): attention as in training; keys and values stay here
    step   one more token of each text, (1, b): the texts stand side by side where a sequence's tokens do, since all
           that is no attention treats each token by itself; each attends to the keys of its own text

Texts of several lengths are filled together, shorter ones with anything behind their end: no earlier token sees what
comes later, and what comes later is overwritten.

Where no query sees more than the newest `window` keys, only so many have a place: the key at position p stands at
p mod window, and that of p - window, which nobody will see again, goes.

Shapes: b texts, s tokens, w the packed width of `ops.attention`, d width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.autograd import ops
from mpitrain.autograd.function import Function
from mpitrain.autograd.ops.attention import Attention, split_heads
from mpitrain.autograd.program import Programs
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, is_half, to_device
from mpitrain.errors import GraphError


class CachedAttention(Function):
    """Attention of one more token of each text on the keys and values that a cache has kept, and these then join."""

    like = Attention

    @staticmethod
    def forward(qkv: Array, *, cache: Cache, name: str, heads: int, kv_heads: int) -> tuple[Array, tuple[Any, ...]]:
        return cache.step(name, qkv, heads, kv_heads), ()

    @staticmethod
    def backward(grad: Array, **_: Any) -> tuple[Any, ...]:
        raise GraphError("a text that is written with a cache has no gradient: its keys and values are not on a tape.")


class Cache:
    """Keys and values of some texts, those of the heads and blocks of this rank.

    Args:
        lengths: tokens of each text that the first pass brings.
        capacity: tokens of the longest text that there can be; or of the window, if less are seen at a time.
        layers: of each layer of attention on this rank its name, and how many heads of keys and values of which width
            are here.
        like: an array of the model's, where its activations are and of their dtype.
        window: keys that a query sees at most, its own the last; None: all earlier ones.

    Attributes:
        lengths: int64 (b,) tokens of each text that are in it.
        coming: int64 (b,) how many the next pass brings: the texts, then one each time.
        programs: of the steps that are made with it.

    Cost: 2 b capacity * heads * d numbers a layer, taken when it is made.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        capacity: int,
        layers: Mapping[str, tuple[int, int]],
        like: Array,
        window: int | None = None,
    ) -> None:
        self.lengths = np.zeros(len(lengths), np.int64)
        self.window = window
        self.coming = np.asarray(lengths, np.int64)
        self._places = capacity if window is None else min(window, capacity)
        self._like = like
        xp = array_module(like)
        self._kept = {
            name: xp.zeros((2, len(lengths), heads, self._places, d), like.dtype) for name, (heads, d) in layers.items()
        }
        self._at: Any = 0
        self._rows = array_module(like).arange(len(lengths))
        self._mask: Array | None = None
        self._seen = 0
        self.programs = Programs()
        self._prepare()

    @property
    def nbytes(self) -> int:
        """Of all keys and values."""
        return sum(kept.nbytes for kept in self._kept.values())

    @property
    def is_empty(self) -> bool:
        """Whether the first pass, which fills it, is still to come."""
        return not self.lengths.any()

    def advance(self) -> None:
        """What came in the last pass counts from here on: one more token of each text is the next one."""
        self.lengths = self.lengths + self.coming
        self.coming = np.ones_like(self.coming)
        self._prepare()

    def attention(self, name: str, qkv: Tensor, heads: int, kv_heads: int) -> Tensor:
        """Attention of one layer on what is here and what comes, which stays here.

        Args:
            name: of the layer.
            qkv: packed as for `ops.attention`: (b, s, w) in the pass that fills, else (1, at least b, w).
            heads, kv_heads: in it.

        Returns:
            (b, s, heads d), or (1, at least b, heads d) with 0 behind the texts.
        """
        if self.is_empty:
            more: dict[str, Any] = {} if self.window is None else {"window": self.window}
            self._fill(self._kept[name], *split_heads(qkv.data, heads, kv_heads)[1:])
            return ops.attention(qkv, heads, kv_heads, **more)
        return CachedAttention.apply(qkv, cache=self, name=name, heads=heads, kv_heads=kv_heads)

    def _fill(self, kept: Array, k: Array, v: Array) -> None:
        """Keep keys and values (b, kv, s, d) of whole texts: all, or the newest of each."""
        longest = int(self.coming.max())
        if longest <= self._places:
            for into, new in zip(kept, (k, v), strict=True):
                into[:, :, :longest] = new[:, :, :longest]
            return
        for text, length in enumerate(self.coming):
            at = np.arange(max(0, length - self._places), length)
            places = to_device(at % self._places, self._like)
            for into, new in zip(kept, (k, v), strict=True):
                into[text][:, places] = new[text, :, at[0] : at[-1] + 1]

    def step(self, name: str, qkv: Array, heads: int, kv_heads: int) -> Array:
        """One token of each text (1, >= b, w): its key and value are kept, its query sees those of its text."""
        b, g = len(self.lengths), heads // kv_heads
        parts = qkv[0, :b].reshape(b, kv_heads, g + 2, -1)
        keys, values = self._kept[name]
        if b == 1:
            keys[:, :, self._at], values[:, :, self._at] = parts[:, :, g], parts[:, :, g + 1]
        else:
            keys[self._rows, :, self._at], values[self._rows, :, self._at] = parts[:, :, g], parts[:, :, g + 1]
        y = array_module(qkv).empty((1, qkv.shape[1], heads * parts.shape[3]), qkv.dtype)
        y[0, b:] = 0.0
        out = y[0, :b].reshape(b, kv_heads, g, -1)
        _attend(parts[:, :, :g], keys[:, :, : self._seen], values[:, :, : self._seen], self._mask, out)
        return y

    def _prepare(self) -> None:
        """What all layers of a pass have in common: where new keys go, and which are seen."""
        if self.is_empty:
            return
        at = self.lengths % self._places
        self._at = int(at[0]) if len(at) == 1 else to_device(at, self._like)
        seen = np.minimum(self.lengths + 1, self._places)
        self._seen = int(seen.max())
        if (seen == self._seen).all():
            self._mask = None
        else:
            self._mask = to_device(np.arange(self._seen) < seen[:, None], self._like)[:, None, None, :]


def _attend(q: Array, keys: Array, values: Array, mask: Array | None, out: Array) -> None:
    """Write softmax(q k^T / sqrt(d)) v into `out`; of halves by the kernel, which widens as it goes.

    For a few queries a product is a pass over the keys, and the blocks into which the kernel cuts many of them cost
    two or three times that.

    Args:
        q: (b, kv, g, d): the queries of a group stand where those of a sequence do, since all see the same keys and
            none is later.  out alike.
        keys: (b, kv, t, d); values alike.
        mask: bool (b, 1, 1, t), True where there is a key of the text; None: everywhere.
    """
    scale = q.shape[3] ** -0.5
    if is_half(q.dtype):
        how: dict[str, Any] = {"scale": scale, "causal": False, "mask": mask, "rows": None, "drop": 0.0}
        kernels.attention(q, keys, values, out, **how)
        return
    xp = array_module(q)
    p = xp.matmul(q * scale, keys.swapaxes(2, 3))
    if mask is not None:
        p = xp.where(mask, p, -np.inf)  # a text has a key, that of its newest token
    p -= p.max(axis=3, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(axis=3, keepdims=True)
    out[...] = xp.matmul(p, values)

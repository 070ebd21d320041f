"""Angles of rotary positions: how fast each pair of a head turns, and the tables that `ops.rotary` takes.

    pair i of a head of width d turns by theta^(-2i/d) a token, i < d/2

Models that were trained on short sequences and then on long ones turn slower: that is a `Scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, to_host, wide
from mpitrain.errors import ConfigError

KINDS = ("linear", "llama3")
"""Ways to turn slower, by the names that checkpoints of other tools have for them."""


@dataclass(frozen=True)
class Scaling:
    """How the pairs of a head turn slower than they would.

    Attributes:
        kind: `linear`: all of them `factor` times slower; `llama3`: those whose wavelength is longer than
            original / low, while those shorter than original / high turn as before, and between the two it is mixed.
        factor: how many times slower, at least 1.
        low, high: Llama 3's factors of low and of high frequencies, low < high.
        original: tokens of the sequences that the model was trained on before.

    Raises:
        ConfigError: another kind, or numbers that make no sense.

    Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation",
    arXiv:2306.15595 (linear); Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv:2407.21783, and the code
    that came with Llama 3.1 (llama3).
    """

    kind: str
    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"rotary positions: scaling {self.kind!r}; there are {' and '.join(KINDS)}.")
        if not 1.0 <= self.factor < math.inf:
            raise ConfigError(f"rotary positions: a scaling factor of {self.factor}; it is at least 1.")
        if self.kind == "llama3" and not (0.0 < self.low < self.high < math.inf and self.original >= 1):
            raise ConfigError(
                f"rotary positions: scaling with low {self.low}, high {self.high}, original {self.original};"
                " it wants 0 < low < high and original of at least 1."
            )


def frequencies(dim: int, theta: float = 10_000.0, scaling: Scaling | None = None) -> tuple[float, ...]:
    """How far each pair turns a token, in radians.

    Args:
        dim: width of a head, even.
        theta: the base of the wavelengths.
        scaling: for longer sequences; None: none.

    Returns:
        dim / 2 numbers, fastest first.

    Raises:
        ConfigError: dim is odd, or theta not above 0.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.
    """
    if dim < 2 or dim % 2:
        raise ConfigError(f"rotary positions: heads of width {dim} are not made of pairs; take an even width.")
    if not 0.0 < theta < math.inf:
        raise ConfigError(f"rotary positions: theta is {theta}; it is a number above 0.")
    plain = (theta ** (-i / dim) for i in range(0, dim, 2))
    return tuple(plain) if scaling is None else tuple(_slower(f, scaling) for f in plain)


def _slower(frequency: float, scaling: Scaling) -> float:
    slow = frequency / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original * frequency / (2.0 * math.pi)  # within the sequences of before
    share = (turns - scaling.low) / (scaling.high - scaling.low)  # of what it was
    share = min(1.0, max(0.0, share))
    return share * frequency + (1.0 - share) * slow


def tables(positions: Array, speeds: Sequence[float], dtype: Any) -> tuple[Array, Array]:
    """Cosines and sines of the angles at some positions, as `ops.rotary` takes them.

    Args:
        positions: integers (s,), or (b, s) where samples have positions of their own.
        speeds: of each pair, as `frequencies` gives them.
        dtype: of the model; tables of halves are float32.

    Returns:
        (cos, sin), both (s, d/2) or (b, s, d/2).

    Cost: 2 s d/2 functions in float64: an angle of many turns has no digits to lose.
    """
    xp = array_module(positions)
    angles = positions[..., None] * xp.asarray(np.array(speeds, np.float64))
    precision = wide(dtype)
    return xp.cos(angles).astype(precision, copy=False), xp.sin(angles).astype(precision, copy=False)


class Rotary:
    """The tables of a model, made when they are first needed.

    Args:
        dim: width of a head, even.
        seq_len: the longest sequence.
        theta, scaling: as for `frequencies`.

    Raises:
        ConfigError: as `frequencies`.

    Cost: seq_len d/2 cosines and as many sines, for as long as the model lives; where a rank holds tokens that do not
        follow each other, a copy of theirs as well.
    """

    def __init__(self, dim: int, seq_len: int, theta: float = 10_000.0, scaling: Scaling | None = None) -> None:
        self.seq_len = seq_len
        self.speeds = frequencies(dim, theta, scaling)
        self._whole: tuple[Array, Array] | None = None
        self._apart: tuple[bytes, tuple[Array, Array]] | None = None  # of tokens that do not follow each other

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The tables that there are now."""
        return (*(self._whole or ()), *(self._apart[1] if self._apart is not None else ()))

    def turns(self, length: int, positions: Array | None, like: Array) -> tuple[Array, Array]:
        """Cosines and sines for some tokens of a sequence.

        Args:
            length: how many.
            positions: int64 (length,) places in the sequence, ascending; None: the first ones.
            like: an array of the model: its dtype, where it lives.

        Returns:
            (length, d/2) each: a view of the tables where the tokens follow each other, else those of the last call
            if it was for the same ones, as on a rank of a context-parallel axis.
        """
        if self._whole is None:
            self._whole = tables(array_module(like).arange(self.seq_len), self.speeds, like.dtype)
        if length == self.seq_len and positions is None:
            return self._whole
        places = np.arange(length) if positions is None else np.asarray(to_host(positions))
        first, apart = int(places.flat[0]) if places.size else 0, places.tobytes()
        if places.ndim == 1 and np.array_equal(places, np.arange(first, first + length)):
            cos, sin = (table[first : first + length] for table in self._whole)
            return cos, sin
        if self._apart is None or self._apart[0] != apart:
            rows = array_module(like).asarray(places)
            cos, sin = (table[rows] for table in self._whole)
            self._apart = apart, (cos, sin)
        return self._apart[1]

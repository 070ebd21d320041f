"""Floats of 16, 10 or 8 bits, as many to a word of 32 bits as fit: what is saved is rounded, what is computed is not.

    16 bits   1-5-10   2 to a word   relative error 2^-11   from 6.1e-5    to 65,504    steps of 6.0e-8 below
    10 bits   1-5-4    3 to a word                  2^-5    from 6.1e-5    to 63,488             3.8e-6
     8 bits   1-4-3    4 to a word                  2^-4    from 0.0156    to 240                0.0020

1-e-m is a sign, e bits of exponent, m of mantissa, as IEEE 754 has them, with numbers below the smallest exponent.
Rounding is to the nearest, ties to even; what is closer to 0 than to the smallest number becomes 0; what is beyond the
largest, infinity too, becomes the largest; NaN stays NaN.

Source: Jain et al. 2018, "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA, section IV-B (DPR).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.backend import Array, array_module, is_half, wide

BLOCK = 3 << 15
"""Elements that are rounded together on the CPU, where scratch stays in cache; whole words of each format."""


class Narrow:
    """A format of so many bits.

    Args:
        bits: 16, 10 or 8.

    Attributes:
        exponent, mantissa: bits of either.
        per_word: elements to a word.
        largest: number; least: normal number, below which steps are `step`.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.exponent, self.mantissa = {16: (5, 10), 10: (5, 4), 8: (4, 3)}[bits]
        self.per_word = 32 // bits
        bias = (1 << (self.exponent - 1)) - 1
        self.largest = (2.0 - 2.0**-self.mantissa) * 2.0**bias
        self.least = 2.0 ** (1 - bias)
        self.step = self.least * 2.0**-self.mantissa
        # Seen from float16: how many digits of the mantissa there are less, and what its exponents are counted from.
        self._less = 10 - self.mantissa
        self._scale = 2.0 ** (15 - bias)
        self._top = (((1 << self.exponent) - 1) << self.mantissa) - 1  # code of the largest number; above are NaN

    def nbytes(self, size: int) -> int:
        """Bytes of so many elements."""
        return 4 * -(-size // self.per_word)

    def error(self, x: Array) -> Array:
        """By how much each element may come back changed at most, within the range: half a step."""
        xp = array_module(x)
        return xp.maximum(xp.abs(x) * 2.0 ** -(self.mantissa + 1), self.step / 2)

    def encode(self, array: Array) -> Array:
        """Its words, uint32, one dim."""
        xp = array_module(array)
        flat = array.reshape(-1)
        words = xp.empty(self.nbytes(flat.size) // 4, np.uint32)
        for start, stop in _blocks(xp, flat.size):
            part = flat[start:stop]
            codes = self._codes(xp, kernels.widen(part) if is_half(part.dtype) else part)
            into = words[start // self.per_word : -(-stop // self.per_word)]
            if codes.size != into.size * self.per_word:  # the last word is not full
                full = xp.zeros(into.size * self.per_word, codes.dtype)
                full[: codes.size] = codes
                codes = full
            into[...] = codes.view(np.uint32) if self.bits != 10 else _thirds(codes)
        return words

    def decode(self, words: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """The numbers that words stand for."""
        xp = array_module(words)
        size = math.prod(shape)
        flat = xp.empty(size, dtype)
        for start, stop in _blocks(xp, size):
            part = words[start // self.per_word : -(-stop // self.per_word)]
            flat[start:stop] = self._numbers(xp, part, wide(dtype))[: stop - start]
        return flat.reshape(shape)

    def _codes(self, xp: Any, x: Array) -> Array:
        """The code of each element of a block: of its float16 without the last digits of the mantissa."""
        halves, x = self._halves(xp, x)
        codes = halves.view(np.uint16)
        if not self._less:
            return codes
        sign, size = codes >> np.uint16(15), codes & np.uint16(0x7FFF)
        xp.copyto(size, np.uint16((self._top + 2) << self._less), where=size > np.uint16(0x7C00))  # NaN
        # To the nearest, a tie to the even neighbour; a carry out of the mantissa is the next exponent.  What is a tie
        # only because float16 has rounded it first goes to the side on which it was.
        tie = 1 << (self._less - 1)
        at = xp.flatnonzero(size & np.uint16(2 * tie - 1) == tie)
        was, is_now = xp.abs(x[at]), xp.abs(halves[at].astype(x.dtype))
        size[at] += (was > is_now).astype(np.uint16)
        size[at] -= (was < is_now).astype(np.uint16)
        codes = size >> np.uint16(self._less)
        codes &= np.uint16(1)
        codes += size
        codes += np.uint16(tie - 1)
        codes >>= np.uint16(self._less)
        sign <<= np.uint16(self.bits - 1)
        codes |= sign
        return codes.astype(np.uint8) if self.bits == 8 else codes

    def _halves(self, xp: Any, x: Array) -> tuple[Array, Array]:
        """A block within the range, as float16 that counts exponents from its own start, and as it is."""
        x = xp.clip(x, -self.largest, self.largest)
        if self._scale != 1.0:
            x *= x.dtype.type(1.0 / self._scale)
        return kernels.narrow(x, np.float16) if x.dtype == np.float32 else x.astype(np.float16), x

    def _numbers(self, xp: Any, words: Array, dtype: Any) -> Array:
        """The numbers of a block of words, in float32 or float64."""
        if self.bits == 16:
            return _widened(words.view(np.float16), dtype)
        if self.bits == 10:
            codes = xp.empty((words.size, 3), np.uint16)
            for place in range(3):
                codes[:, place] = words >> np.uint32(10 * place) & np.uint32(0x3FF)
            return _widened((codes.reshape(-1) << np.uint16(self._less)).view(np.float16), dtype)
        codes = words.view(np.uint8).astype(np.uint16)
        size = codes & np.uint16(0x7F)
        codes &= np.uint16(0x80)
        codes <<= np.uint16(8)
        codes |= size << np.uint16(self._less)
        x = _widened(codes.view(np.float16), dtype)
        x *= x.dtype.type(self._scale)
        xp.copyto(x, x.dtype.type(np.nan), where=size > np.uint16(self._top))
        return x

    def __repr__(self) -> str:
        return f"{self.bits} bits an element"


def _thirds(codes: Array) -> Array:
    """Words of three codes of ten bits, the first in the lowest."""
    columns = codes.reshape(-1, 3)
    words = columns[:, 0].astype(np.uint32)
    for place in (1, 2):
        words |= columns[:, place].astype(np.uint32) << np.uint32(10 * place)
    return words


def _widened(halves: Array, dtype: Any) -> Array:
    """float16 in float32 or float64, exactly."""
    return kernels.widen(halves) if dtype == np.float32 else halves.astype(dtype)


def _blocks(xp: Any, size: int) -> Iterator[tuple[int, int]]:
    """Where elements that are worked on together start and stop."""
    most = BLOCK if xp is np else max(size, 1)
    for start in range(0, size, most):
        yield start, min(start + most, size)

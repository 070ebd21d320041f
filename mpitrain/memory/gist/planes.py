"""Bit planes: whole numbers of so many bits each, a bit of all of them to a plane; signs and masks are one plane.

    n elements, b bits        b ceil(n / 8) bytes

Source: Jain et al. 2018, "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA, section IV-A
(Binarize).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.autograd.needs import SIGN, Need
from mpitrain.backend import Array, array_module


class Planes:
    """Numbers from 0 to below `count`, in as few bits as that takes.

    Args:
        count: 2 for a bit an element.
    """

    def __init__(self, count: int) -> None:
        self.bits = max(1, (count - 1).bit_length())

    def encode(self, numbers: Array) -> tuple[Array]:
        """The planes, (bits, ceil(n / 8)) uint8.

        Args:
            numbers: bool or whole numbers, any shape.
        """
        xp = array_module(numbers)
        flat = numbers.reshape(-1)
        if flat.dtype == bool:
            return (xp.packbits(flat)[None],)
        planes = xp.empty((self.bits, -(-flat.size // 8)), np.uint8)
        for bit in range(self.bits):
            planes[bit] = xp.packbits((flat & flat.dtype.type(1 << bit)) != 0)
        return (planes,)

    def decode(self, parts: tuple[Array, ...], need: Need, shape: tuple[int, ...], dtype: Any) -> Array:
        """The numbers in their dtype; of signs which elements are above 0."""
        (planes,) = parts
        xp = array_module(planes)
        size = math.prod(shape)
        bits = (xp.unpackbits(plane)[:size] for plane in planes)
        if need == SIGN or np.dtype(dtype) == bool:
            return next(bits).view(bool).reshape(shape)
        numbers = xp.zeros(size, dtype)
        for bit, plane in enumerate(bits):
            numbers |= plane.astype(dtype) << numbers.dtype.type(bit)
        return numbers.reshape(shape)

    def __repr__(self) -> str:
        return f"{self.bits} bit{'s' * (self.bits != 1)} an element"


def signs_of(array: Array) -> Array:
    """Which elements are above 0, as bool; what is no number is not."""
    above: Array = array > 0
    return above

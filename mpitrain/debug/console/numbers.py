"""Numbers in a few words: an array's range, its length, what is not finite in it, its elements; bytes; short texts."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mpitrain.backend import Array, to_host

SHOWN = 200
"""Elements that are printed one by one; of a larger array the ends of each dim."""


class Summary(NamedTuple):
    """Of the elements that are finite: least, largest, mean; norm: the root of the sum of squares; bad: how many are
    not, and where is the first of them.
    """

    least: float
    largest: float
    mean: float
    norm: float
    bad: int
    first_bad: tuple[int, ...]


def summary(array: Array) -> Summary:
    """The numbers of an array of any dtype; NaN where there is no element."""
    host = np.asarray(to_host(array))
    values = host.astype(np.float64)
    finite = np.isfinite(values)
    bad = int(values.size - np.count_nonzero(finite))
    first = tuple(int(i) for i in np.unravel_index(int((~finite).argmax()), values.shape)) if bad else ()
    values = values[finite]
    if not values.size:
        return Summary(math.nan, math.nan, math.nan, math.nan, bad, first)
    with np.errstate(over="ignore"):
        norm = math.sqrt(float(np.square(values).sum()))
        return Summary(float(values.min()), float(values.max()), float(values.mean()), norm, bad, first)


def short(number: float) -> str:
    """Four digits: `0.1235`, `-1.2e-05`, `1,024`."""
    if math.isnan(number):
        return "-"
    if number == int(number) if math.isfinite(number) else False:
        return f"{int(number):,}" if abs(number) < 1e7 else f"{number:.4g}"
    return f"{number:.4g}"


def elements(array: Array, width: int) -> str:
    """The elements, as NumPy prints them, in lines of at most so many columns."""
    host = np.asarray(to_host(array))
    if host.dtype.kind not in "iubf":
        host = host.astype(np.float32)  # bfloat16
    return np.array2string(host, max_line_width=width, precision=5, threshold=SHOWN, edgeitems=3, separator=" ")


def nbytes(number: float) -> str:
    """`640 B`, `12.5 KiB`, `3.2 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def cut(text: str, width: int, left: bool = False) -> str:
    """A text of at most so many columns, without its end (or its beginning) where it is longer."""
    if len(text) <= width:
        return text
    return f"...{text[len(text) - width + 3 :]}" if left else f"{text[: width - 3]}..."

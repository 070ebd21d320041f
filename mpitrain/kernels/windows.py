"""A window that slides over images: which pixels it sees where, as slices instead of indexes.

Images are (b, h, w, c), channels last: a pixel is a row of numbers, as a token is.  A window of kh x kw pixels stands
on oh x ow places of an image.  Its element (dy, dx) then sees, over all places, a grid of pixels that a slice with a
step describes:

    places[:, i, j] sees x[:, i sh + dy gh - ph, j sw + dx gw - pw]

with stride s, padding p and dilation g, and nothing where that lies outside of the image: there the padding is 0.  So
whatever slides is a loop over the elements of the window, a few, each of which is one pass over all images.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from mpitrain.errors import ShapeError

Pair = tuple[int, int]
Slices = tuple[slice, slice]


class Windows(NamedTuple):
    """The places of a window on images of h x w pixels.

    Attributes:
        image: (h, w).
        window: (kh, kw).
        stride: pixels from a place to the next, down and to the right.
        padding: zeros above and below, left and right.
        dilation: pixels from an element of the window to the next.
    """

    image: Pair
    window: Pair
    stride: Pair
    padding: Pair
    dilation: Pair = (1, 1)

    @property
    def places(self) -> Pair:
        """(oh, ow): how many places there are, down and to the right."""
        down, right = (
            (n + 2 * p - k) // s + 1
            for n, k, s, p in zip(self.image, self.extent, self.stride, self.padding, strict=True)
        )
        return down, right

    @property
    def extent(self) -> Pair:
        """Pixels from the first to the last that the window sees from a place, down and to the right."""
        down, right = ((k - 1) * g + 1 for k, g in zip(self.window, self.dilation, strict=True))
        return down, right

    @property
    def overlap(self) -> bool:
        """Whether a pixel is seen from several places."""
        return any(s < k for s, k in zip(self.stride, self.extent, strict=True))

    def elements(self, start: int = 0, stop: int | None = None) -> tuple[tuple[Pair, Slices, Slices], ...]:
        """What each element of the window sees from some rows of places: those from `start` to `stop`, or all.

        Returns:
            ((dy, dx), places, pixels) in the order of rows: the places, counted from `start`, whose pixel lies in the
            image, and those pixels, one for each; without the elements that see none.
        """
        return _elements(self, start, self.places[0] if stop is None else stop)


@lru_cache(maxsize=256)
def _elements(slide: Windows, start: int, stop: int) -> tuple[tuple[Pair, Slices, Slices], ...]:
    down = [(dy, _seen(slide, 0, dy, start, stop)) for dy in range(slide.window[0])]
    right = [(dx, _seen(slide, 1, dx, 0, slide.places[1])) for dx in range(slide.window[1])]
    return tuple(
        ((dy, dx), (rows[0], columns[0]), (rows[1], columns[1]))
        for (dy, rows), (dx, columns) in product(down, right)
        if rows is not None and columns is not None
    )


def _seen(slide: Windows, dim: int, offset: int, start: int, stop: int) -> Slices | None:
    """Places of [start, stop) along a dim whose pixel at this offset is in the image, and the pixels."""
    step, first = slide.stride[dim], offset * slide.dilation[dim] - slide.padding[dim]
    low = max(start, -(first // step))  # the first i with i step + first >= 0
    high = min(stop, -((first - slide.image[dim]) // step))  # the first one with i step + first >= length
    if low >= high:
        return None
    return slice(low - start, high - start), slice(low * step + first, (high - 1) * step + first + 1, step)


def pair(value: int | Pair, op: str, name: str, least: int = 1) -> Pair:
    """One number for both directions, or two.

    Raises:
        ShapeError: something else, or a number that is too small.
    """
    both = (value, value) if not isinstance(value, (tuple, list)) else tuple(value)
    if len(both) != 2 or any(not isinstance(n, (int, np.integer)) or n < least for n in both):
        raise ShapeError(
            f"{op}: {name} {value!r}; it is a number from {least} on, or one for each of the two directions"
        )
    return int(both[0]), int(both[1])


def windows(
    op: str,
    shape: tuple[int, ...],
    window: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
) -> Windows:
    """The places of a window on images of a shape (b, h, w, c).

    Raises:
        ShapeError: no images, the window is larger than one, or places see zeros alone for longer than an image.
    """
    if len(shape) != 4:
        raise ShapeError(f"{op}: x {tuple(shape)} is not (b, h, w, c): images, rows, columns, channels")
    slide = Windows((shape[1], shape[2]), window, stride, padding, dilation)
    if any(p > n + k for p, n, k in zip(padding, slide.image, slide.extent, strict=True)):
        raise ShapeError(
            f"{op}: padding {padding[0]} x {padding[1]} is more than images of {shape[1]} x {shape[2]} and a window"
            f" over {slide.extent[0]} x {slide.extent[1]} pixels together: most places would see zeros alone"
        )
    if min(slide.places) < 1:
        spread = "" if dilation == (1, 1) else f", dilation {dilation[0]} x {dilation[1]},"
        raise ShapeError(
            f"{op}: a window of {window[0]} x {window[1]} pixels{spread} does not fit images of {shape[1]} x {shape[2]}"
            f" with padding {padding[0]} x {padding[1]}"
        )
    return slide

"""Windows: some neighbouring elements at a time, of vectors of which some live elsewhere.

    window   1        2        3        4
    fetched  1        2        3        4            ahead of the update that needs them
    updated           1        2        3        4
    written                    1        2        3        4      behind it

An elementwise update does not care where a window ends, so the numbers are those of one pass over all.  With one
window ahead at most three are here at once.

Source: Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, section 5.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpitrain.backend import Array
from mpitrain.optim.runs import Run, is_elsewhere

AHEAD = 1
"""Windows that are fetched while one is updated, unless it is said."""


class Cut(NamedTuple):
    """Elements start to stop of a run."""

    run: Run
    start: int
    stop: int


class Vector(NamedTuple):
    """Some elements: start to stop of an array, which is here or elsewhere, and whether they are written and read."""

    array: Any
    start: int
    stop: int
    is_written: bool
    is_read: bool = True

    def prefetch(self) -> None:
        """Begin to fetch them."""
        if is_elsewhere(self.array) and self.is_read:
            self.array.prefetch(self.start, self.stop)

    def take(self) -> Array:
        """The elements: a view, or a copy from elsewhere; room for them where they are only written."""
        if not is_elsewhere(self.array):
            return self.array[self.start : self.stop]
        if not self.is_read:
            return self.array.room(self.stop - self.start)
        return self.array.take(self.start, self.stop)

    def give_back(self, values: Array) -> None:
        """Write them where they live."""
        if self.is_written and is_elsewhere(self.array):
            self.array.put(self.start, values)


def windows_of(runs: Sequence[Run], elements: int) -> list[list[Cut]]:
    """Runs, cut and put together into windows of so many elements, the last one of what is left."""
    windows: list[list[Cut]] = [[]]
    room = elements
    for run in runs:
        size, at = run.weights.size, 0
        while at < size:
            if not room:
                windows.append([])
                room = elements
            stop = min(size, at + room)
            windows[-1].append(Cut(run, at, stop))
            room -= stop - at
            at = stop
    return windows if windows[0] else []


def pass_over(windows: Sequence[Sequence[Vector]], ahead: int = AHEAD) -> Iterator[list[Array]]:
    """The elements of each window, one after the other; what the caller has written into them is kept.

    Args:
        windows: the vectors of each.
        ahead: windows that are fetched while one is updated.
    """
    for number, window in enumerate(windows):
        for later in windows[number : number + 1 + ahead]:
            for vector in later:
                vector.prefetch()
        arrays = [vector.take() for vector in window]
        yield arrays
        for vector, array in zip(window, arrays, strict=True):
            vector.give_back(array)

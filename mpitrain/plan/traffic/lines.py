"""Messages of one kind as a line, and lines as a sum, a table, a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

FACTOR: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "send": lambda n: Fraction(1),
    "shift": lambda n: Fraction(1),
}
"""Bytes that a rank of n sends for each byte of the payload."""


class Line(NamedTuple):
    """Messages of one kind, of one rank and step.

    axis: over which; cause: why; verb: which; n: ranks on the axis; calls: how many; payload: bytes of each, the mean
    where they differ.
    """

    axis: str
    cause: str
    verb: str
    n: int
    calls: int
    payload: int | Fraction

    @property
    def sent(self) -> Fraction:
        """Bytes that this rank sends."""
        return self.calls * self.payload * FACTOR[self.verb](self.n)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step.

    Attributes:
        lines: one for each kind of message, those that nobody sends left out.
        row: how many steps they are of, 1 but for a row that agrees on all of its steps at once.
        at_most: whether experts may be sent less: it depends on the data, and here all of them have all they can take.
    """

    lines: tuple[Line, ...]
    row: int = 1
    at_most: bool = False

    def total(self, axis: str | None = None, cause: str | None = None) -> int:
        """Bytes, over one axis or all, for one cause or all."""
        return round(sum(line.sent for line in self.lines if axis in (None, line.axis) and cause in (None, line.cause)))

    def sums(self) -> dict[tuple[str, str, str], tuple[int, Fraction]]:
        """(axis, cause, verb) -> (calls, bytes), the most bytes first."""
        found: dict[tuple[str, str, str], tuple[int, Fraction]] = {}
        for line in self.lines:
            calls, sent = found.get(line[:3], (0, Fraction(0)))
            found[line[:3]] = calls + line.calls, sent + line.sent
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def table(self) -> str:
        """The sums as text."""
        text = [f"{self._most}{self.total():,} bytes {self._of_what}", ""]
        rows = [("bytes", "calls", "axis", "cause", "verb")]
        rows += [(f"{round(sent):,}", f"{calls:,}", *names) for names, (calls, sent) in self.sums().items()]
        w = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text += [
            f"  {x:>{w[0]}}  {n:>{w[1]}}  {axis:{w[2]}}  {cause:{w[3]}}  {verb}" for x, n, axis, cause, verb in rows
        ]
        return "\n".join(text if self.lines else text[:1])

    def __str__(self) -> str:
        """`2.3 MB a rank and step: tp 1.5 MB, dp+cp 0.8 MB`, for a start block."""
        axes = sorted({line.axis for line in self.lines}, key=lambda axis: -self.total(axis))
        large = [axis for axis in axes if self.total(axis) * 1000 >= self.total()]
        parts = ", ".join(f"{axis} {_short(self.total(axis))}" for axis in large)
        return f"{self._most}{_short(self.total())} {self._of_what}" + (f": {parts}" if len(large) > 1 else "")

    @property
    def _most(self) -> str:
        return "at most " if self.at_most else ""

    @property
    def _of_what(self) -> str:
        return "a rank and step" if self.row == 1 else f"a rank and row of {self.row} steps"


def _short(nbytes: int) -> str:
    """Three digits and a unit of 1000."""
    amount, units = float(nbytes), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while amount >= 999.5 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.0f} {units[0]}" if amount >= 99.5 or units[0] == "bytes" else f"{amount:.3g} {units[0]}"

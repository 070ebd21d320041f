"""How the texts about a trace write times, sizes and what a file says."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100
MOST_RANGES = 12
_FIRST_RANGES = 5


def plain(text: object, most: int = 60) -> str:
    """A text of a file on one line: signs that a terminal would obey replaced, a long one cut at its front.

    What a trace says is anybody's, and a name may hold what moves a cursor or colours a screen.
    """
    shown = "".join(sign if sign.isprintable() else "?" for sign in str(text)[: 10 * most])
    return shown if len(shown) <= most else f"...{shown[len(shown) - most + 3 :]}"


def ms(ns: float) -> str:
    """`0.04`, `182.43` ms, without the unit."""
    return f"{ns / 1e6:,.2f}"


def percent(part: float, whole: float) -> str:
    """`12.3`; `-` of nothing."""
    return f"{100 * part / whole:.1f}" if whole > 0 else "-"


def size(nbytes: float) -> str:
    """Three digits and a unit of 1000: `1.31 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} {unit}" if nbytes >= 99.5 or unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB"


def number(amount: float) -> str:
    """`1,234`, and a digit behind the point where the mean is not whole."""
    return f"{amount:,.0f}" if abs(amount - round(amount)) < 0.05 else f"{amount:,.1f}"


def mib(nbytes: float) -> str:
    """MiB with two digits behind the point."""
    return f"{nbytes / 2**20:,.2f}"


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7; of very many the first and the last: `1-3, 11, 21, 31, 41 ... 991`."""
    parts: list[list[int]] = []
    for one in sorted(set(numbers)):
        if parts and one == parts[-1][1] + 1:
            parts[-1][1] = one
        else:
            parts.append([one, one])
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in parts]
    if len(texts) > MOST_RANGES:
        return f"{', '.join(texts[:_FIRST_RANGES])} ... {texts[-1]}"
    return ", ".join(texts)


def count(amount: int, what: str) -> str:
    """`1 rank`, `1,200 ranks`."""
    return f"{amount:,} {what}" if amount == 1 else f"{amount:,} {what}s"


def note(text: str, width: int = WIDTH, indent: int = 2) -> str:
    """An explanation below a table, in lines of this width."""
    return textwrap.fill(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent)


def labelled(label: str, text: str, width: int = WIDTH, column: int = 11) -> str:
    """`clocks     one clock for all 8 ranks`; what is longer goes on in its column."""
    return textwrap.fill(text, width, initial_indent=f"{label:<{column}}", subsequent_indent=" " * column)


def indented(text: str) -> str:
    """A table below its heading; its lines end where the screen does, whatever names are in them."""
    return "\n".join(f"  {line}"[:WIDTH] for line in text.splitlines())

"""How the tools on checkpoints write sizes, numbers and tables: for people who read many of them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FILE_NUMBER = re.compile(r"rank-([0-9]+)\.h5")


def size(nbytes: float) -> str:
    """`612 B`, `9.8 KiB`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"


def count(number: int, what: str) -> str:
    """`1 file`, `1,200 files`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def speed(nbytes: int, seconds: float) -> str:
    """`1.5 GiB in 1.24 s, 1.2 GiB/s`."""
    return f"{size(nbytes)} in {seconds:.2f} s, {size(nbytes / max(seconds, 1e-9))}/s"


def date(seconds: float) -> str:
    """`2026-11-30 12:01:07`, here, of the seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def shape(lengths: Sequence[int]) -> str:
    """`(128, 512)`; a scalar is `()`."""
    return f"({', '.join(map(str, lengths))})"


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)


def files(names: Iterable[str]) -> str:
    """`rank 0-3` for rank-00000.h5 ... rank-00003.h5; other names as they are."""
    names = sorted(set(names))
    numbers = [_FILE_NUMBER.fullmatch(name) for name in names]
    if names and all(numbers):
        return f"rank {ranges(int(found[1]) for found in numbers if found)}"
    return ", ".join(names)


def some(items: Sequence[str], most: int = 4) -> str:
    """The first few, and how many more."""
    rest = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest


def layout(sizes: Mapping[str, Any]) -> str:
    """`dp 2, tp 4` for the axes of a mesh that have more than one rank; `one rank`."""
    known = {axis: n for axis, n in sizes.items() if type(n) is int and axis.isidentifier() and len(axis) < 20}
    whole = {"pp": known.pop("pp", 1), "dp": known.pop("edp", 1) * known.get("ep", 1), **known}
    return ", ".join(f"{axis} {n}" for axis, n in whole.items() if n != 1) or "one rank"


def table(rows: Sequence[Sequence[str]], right: str = "", indent: str = "  ") -> list[str]:
    """Rows of equal length in columns of equal width.

    Args:
        rows: cells; the first row may be the heads.
        right: numbers of the columns whose cells stand at their right edge, as in "13".
        indent: before each line.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    flush = {int(column) for column in right}
    lines = []
    for row in rows:
        cells = [f"{c:>{w}}" if i in flush else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines

"""Lines of cells as columns of text."""

from __future__ import annotations

from collections.abc import Container, Sequence


def aligned(lines: Sequence[Sequence[str]], words: Container[int] = (0,)) -> str:
    """Columns two spaces apart.

    Args:
        lines: of cells; shorter ones are filled up with empty cells.
        words: numbers of the columns that stand flush left; numbers stand flush right.
    """
    width = max(map(len, lines), default=0)
    rows = [[*line, *[""] * (width - len(line))] for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        text.append("  ".join(cell.ljust(w) if at in words else cell.rjust(w) for at, (cell, w) in enumerate(cells)))
    return "\n".join(line.rstrip() for line in text)

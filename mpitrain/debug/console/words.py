"""Numbers in commands, ranks and long lines in answers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from mpitrain.errors import ConsoleError

_DIGITS = 9


def number(text: str, name: str) -> int:
    """A whole number.

    Raises:
        ConsoleError: it is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        raise ConsoleError(f"{name} {text[:40]}: a number is needed")
    return int(text)


def rank_or(text: str, default: int, name: str) -> int:
    """`3` or `rank 3`; a default if there is nothing."""
    word = text.removeprefix("rank").strip()
    return number(word, name) if word else default


def nothing(text: str, name: str) -> None:
    """Refuse words where none belong.

    Raises:
        ConsoleError: there are some.
    """
    if text:
        raise ConsoleError(f"{name} takes nothing behind it, not {text[:40]!r}")


def runs(ranks: Iterable[int]) -> str:
    """Ranks in few characters: `0-3,6`."""
    pairs: list[list[int]] = []
    for rank in sorted(ranks):
        if pairs and rank == pairs[-1][1] + 1:
            pairs[-1][1] = rank
        else:
            pairs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}{'-' if high > low + 1 else ','}{high}" for low, high in pairs)


def named(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0-3`."""
    text = runs(ranks)
    return f"rank{'' if text.isdigit() else 's'} {text}"


def folded(line: str, width: int) -> list[str]:
    """A line in as many as it takes; what follows stands further in, and behind the same `! `."""
    if len(line) <= width:
        return [line]
    mark = "! " if line.startswith("! ") else ""
    text = line.removeprefix(mark)
    head = mark + " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(
        text.strip(), width, initial_indent=head, subsequent_indent=head + "  ", break_on_hyphens=False
    )

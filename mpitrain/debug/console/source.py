"""The lines of source that a rank is in: `list` and `stack`.

Plumbing (messages, ops, layers, this console) is left out, as in all reports; the innermost line that is left is the
one from which an op or a message comes.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from itertools import groupby
from types import FrameType
from typing import NamedTuple

from mpitrain.comm.site import caller_of, is_plumbing
from mpitrain.debug.stepper import View
from mpitrain.errors import ConsoleError

AROUND = 5  # lines before and behind the one that a rank is in
MOST_LINES = 40  # of a stack
_ROOM = 7  # columns of line numbers
_MOST_NAME = 40  # columns
_FOLDED = 3  # calls within one file of the library from which only the ends are shown
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


class _Row(NamedTuple):
    number: int
    path: str
    place: str
    name: str
    text: str


def frames(view: View) -> list[tuple[FrameType, int]]:
    """The frames of a rank that are no plumbing, each with its line, the innermost first.

    Of a rank that has failed those in which the error was raised: the rank itself is further out by now.
    """
    if view.error is not None:
        found = [(frame, line) for frame, line in _raised(view.error) if not is_plumbing(frame)]
        if found:
            return found[::-1]
    found, frame = [], None if view.event is None else view.frame  # before its first line it is in code around it
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = caller_of(frame.f_back)[0]
    return found


def _raised(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def site_of(view: View) -> str:
    """`file.py:line` of the innermost of them; "" if there is none."""
    found = frames(view)
    return f"{os.path.basename(found[0][0].f_code.co_filename)}:{found[0][1]}" if found else ""


def stack(view: View, width: int = 100) -> str:
    """The calls that a rank is in, the innermost first, each with its line of source."""
    found = frames(view)
    if not found:
        raise ConsoleError(f"rank {view.number} is in no line of its script")
    rows = []
    for n, (frame, line) in enumerate(found):
        code = frame.f_code
        place = f"{os.path.basename(code.co_filename)}:{line}"
        name = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
        rows.append(_Row(n, code.co_filename, place, name, linecache.getline(code.co_filename, line).strip()))
    left = max(len(row.place) for row in rows)
    middle = min(_MOST_NAME, max(len(row.name) for row in rows))
    lines: list[str] = []
    for path, group in groupby(rows, lambda row: row.path):
        calls = list(group)
        shown = calls if len(calls) <= _FOLDED or not path.startswith(_PACKAGE) else [calls[0], calls[-1]]
        texts = [f"#{n:<2} {place:<{left}}  {name[:middle]:<{middle}}  {text}" for n, _, place, name, text in shown]
        if shown != calls:
            texts.insert(1, f"    ... {len(calls) - 2} more of {os.path.basename(path)}")
        lines += [text[:width].rstrip() for text in texts]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES // 2 : -MOST_LINES // 2] = ["    ..."]
    return "\n".join(lines)


def listing(view: View, number: int = 0, width: int = 100) -> str:
    """The lines of source around the one that a rank is in.

    Args:
        view: of the rank.
        number: of the frame, counted as `stack` does.
        width: of a line.
    """
    found = frames(view)
    if number >= len(found):
        text = f"has a stack that ends with #{len(found) - 1}" if found else "is in no line of its script"
        raise ConsoleError(f"rank {view.number} {text}")
    frame, line = found[number]
    path = frame.f_code.co_filename
    lines = linecache.getlines(path)
    if not lines:
        raise ConsoleError(f"{path}: its source cannot be read")
    first = max(1, line - AROUND)
    shown = [f"{path}, rank {view.number}"[:width]]
    for n in range(first, min(len(lines), line + AROUND) + 1):
        shown.append(f"{n:>{_ROOM - 3}}{'->' if n == line else '  '} {lines[n - 1].rstrip()}"[:width].rstrip())
    return "\n".join(shown)

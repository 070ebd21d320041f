"""Where in the user's program a message or an op was asked for: found only when somebody asks.

Walking frames costs microseconds, so no call does it.  A report looks at the frames of the rank that waits; a listener
calls the function that comes with the event.
"""

from __future__ import annotations

import linecache
import os
import sys
from itertools import islice
from types import FrameType

from mpitrain.comm.page import FROM

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"
_PARTS = ("comm/", "autograd/", "nn/", "debug/", "collectives.py", "events.py", "faults/", "pipeline/hunter.py")
_PLUMBING = tuple(_PACKAGE + part for part in _PARTS)
_FACTOR, _MASK = 1000003, (1 << 64) - 1


def site_of(frame: FrameType | None) -> str:
    """The innermost line that is not plumbing, as `sequence.py:71`.

    Plumbing is what every model stands on, and what looks at it: this package's messages, ops, layers, events and
    their listeners.

    Args:
        frame: a frame of the thread in question, e.g. `sys._current_frames()[ident]`.

    Returns:
        `file.py:line`; "?" if every frame is plumbing or of the standard library's threading.
    """
    caller = caller_of(frame)[0]
    return "?" if caller is None else f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"


def trail_of(frame: FrameType | None, most: int = 5) -> str:
    """`site_of`, and where that was called from: `tokens.py:88 < train.py:243,201 < train_gpt.py:12`.

    Args:
        frame: as in `site_of`.
        most: files that are told, with their lines.
    """
    places: list[str] = []
    before = ""
    frame = caller_of(frame)[0]
    while frame is not None:
        path = frame.f_code.co_filename
        if path == before:
            places[-1] += f",{frame.f_lineno}"
        elif len(places) == most:
            break
        elif not path.startswith((*_PLUMBING, "<frozen")) and not path.endswith("/threading.py"):
            before = path
            places.append(f"{os.path.basename(path)}:{frame.f_lineno}")
        frame = frame.f_back
    return FROM.join(places) or "?"


def is_plumbing(frame: FrameType) -> bool:
    """Whether a frame is left out of reports, see `site_of`."""
    path = frame.f_code.co_filename
    return path.startswith(_PLUMBING) or path.endswith("/threading.py")


def caller_of(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """The innermost frame that is not plumbing, and a number for the functions of the plumbing from there to `frame`.

    The sums in the backward of two different ops, say, have the same caller, but another way to the door.
    """
    way = 0
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_PLUMBING) and not path.endswith("/threading.py"):
            break
        way = (way * _FACTOR + frame.f_code.co_firstlineno) & _MASK
        frame = frame.f_back
    return frame, way


def words_of(frame: FrameType) -> str:
    """File, function and source text of the call that a frame is in: `train.py step axis.all_reduce(loss)`.

    The line is left out: one call that stands in two lines has the same words.  Without source the place in the
    bytecode stands for the text; before Python 3.11, which does not know where in its line a call stands, all the line.
    """
    code, line = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, line).strip()
    if text and sys.version_info >= (3, 11):
        first, last, start, end = next(islice(code.co_positions(), frame.f_lasti // 2, None))
        if first is not None and last is not None and start is not None and end is not None:
            lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
            lines[-1] = lines[-1][:end]
            lines[0] = lines[0][start:]
            text = " ".join(b"".join(lines).decode(errors="replace").split())
    function = getattr(code, "co_qualname", code.co_name)
    return f"{os.path.basename(code.co_filename)} {function} {text or frame.f_lasti}"


def call_site() -> str:
    """`site_of` the caller."""
    return site_of(sys._getframe(1))

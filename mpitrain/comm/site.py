"""Where in the user's program a message or an op was asked for: found only when somebody asks.

Walking frames costs microseconds, so no call does it.  A report looks at the frames of the rank that waits; a listener
calls the function that comes with the event.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"
_PLUMBING = tuple(_PACKAGE + part for part in ("comm/", "autograd/", "nn/", "collectives.py", "events.py"))


def site_of(frame: FrameType | None) -> str:
    """The innermost line that is not plumbing, as `sequence.py:71`.

    Plumbing is what every model stands on: this package's messages, ops, layers and events.

    Args:
        frame: a frame of the thread in question, e.g. `sys._current_frames()[ident]`.

    Returns:
        `file.py:line`; "?" if every frame is plumbing or of the standard library's threading.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_PLUMBING) and not path.endswith("/threading.py"):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def call_site() -> str:
    """`site_of` the caller."""
    return site_of(sys._getframe(1))

"""The line of the program at which a message was asked for, found quickly: what a frame is, is noted once.

`mpitrain.comm.site` says what counts as a line of the program; it compares the path of each frame's file, which for
some ten frames of each message would be most of what a trace costs.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from mpitrain.comm.site import caller_of, site_of

Place = tuple[int, int]


class Sites:
    """Places of calls as small tuples, of which those of one line of code are equal."""

    def __init__(self) -> None:
        self._plumbing: dict[int, tuple[bool, CodeType]] = {}  # the code object is kept, so its id is nobody else's
        self._text: dict[Place, str] = {}

    def here(self, above: int) -> Place:
        """The innermost frame that is not plumbing, above so many callers."""
        frame: FrameType | None = sys._getframe(above)
        plumbing = self._plumbing
        while frame is not None:
            code = frame.f_code
            known = plumbing.get(id(code))
            if known is None:
                known = plumbing[id(code)] = (caller_of(frame)[0] is not frame, code)
            if not known[0]:
                place = id(code), frame.f_lasti
                if place not in self._text:
                    self._text[place] = site_of(frame)
                return place
            frame = frame.f_back
        return 0, 0

    def text(self, place: Place) -> str:
        """`sequence.py:71`; "?" where all was plumbing."""
        return self._text.get(place, "?")

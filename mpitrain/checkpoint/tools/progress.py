"""How far a tool has come: a line that is redrawn while a person watches, nothing where nobody does."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from mpitrain.checkpoint.tools.wording import size

_FIRST, _EVERY = 0.5, 0.2  # seconds: before the line appears, and between two of them
_CLEAR = "\r\x1b[K"


class Progress:
    """Bytes that are done, of all that are to be done.

    Args:
        what: is done with them: "verify".
        total: bytes.
        stream: where the line is drawn, if it is a terminal.
    """

    def __init__(self, what: str, total: int, stream: TextIO | None = None) -> None:
        self._what, self._total = what, total
        self._stream = sys.stderr if stream is None else stream
        self._done, self._drawn = 0, False
        self._began = time.perf_counter()
        self._next = self._began + _FIRST if self._stream.isatty() else float("inf")

    def add(self, nbytes: int) -> None:
        """So many more are done."""
        self._done += nbytes
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + _EVERY
            self._draw(now - self._began)

    def _draw(self, seconds: float) -> None:
        share = self._done / self._total if self._total else 1.0
        rate = self._done / seconds
        left = (self._total - self._done) / rate if rate else 0.0
        text = (
            f"{self._what}  {share:4.0%}  {size(self._done)} of {size(self._total)}  {size(rate)}/s  {left:.0f} s left"
        )
        self._stream.write(_CLEAR + text)
        self._stream.flush()
        self._drawn = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Take the line away, before something else is printed."""
        if self._drawn:
            self._stream.write(_CLEAR)
            self._stream.flush()
            self._drawn = False

"""What a rank learns from outside of its program, and where it writes: a replay learns the same, and writes elsewhere.

    seconds = heard("seconds of a step", lambda: timed(step))      a clock, a signal, what lies in a folder
    folder = place(Path("runs/a"))                                 where this run writes

Results of a message are recorded at the door.  What else decides how a run goes on passes through `heard`: a recording
keeps it, and a replay gives it again without asking.  With nobody recording it costs one look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Outside(Protocol):
    """Who stands between a rank and what is outside of it."""

    def heard(self, what: str, ask: Callable[[], Any]) -> Any:
        """The answer to a question: asked and kept, or given from a recording."""
        ...

    def place(self, path: Path) -> Path:
        """Where something is written that the program wants at `path`."""
        ...


OUTSIDE: ContextVar[Outside | None] = ContextVar("mpitrain.outside", default=None)
"""Who does so on this rank; None: nobody."""


def heard(what: str, ask: Callable[[], T]) -> T:
    """The answer to a question whose answer another run might not get: of a clock, a signal, a folder.

    Args:
        what: the question, for a reader of the recording.
        ask: answers it with what JSON holds; in a replay it is not called, and tuples have become lists.
    """
    outside = OUTSIDE.get()
    return ask() if outside is None else outside.heard(what, ask)


def place(path: Path) -> Path:
    """Where to write what belongs to `path`: there, or in a replay in a folder of the replay's own."""
    outside = OUTSIDE.get()
    return path if outside is None else outside.place(path)

"""A run that has failed: what is said of it, and with which code it ends."""

from __future__ import annotations

import os
import traceback

from mpitrain.comm.baton import Ended
from mpitrain.comm.site import is_plumbing
from mpitrain.debug.stepper import View
from mpitrain.errors import CommError, UserError

MOST_LINES = 10  # of the text of an error


def told(view: View) -> str:
    """How a rank has failed, in few lines."""
    error = view.error
    if isinstance(error, SystemExit):
        said = f": {error.code}" if isinstance(error.code, str) else ""
        return f"rank {view.number} left with exit code {code_of(error)}{said}"
    if isinstance(error, UserError):
        return f"{type(error).__name__}: {error}"
    text = f"rank {view.number} failed: {type(error).__name__}: {_text_of(error)}".rstrip(": ")
    return "\n".join(text.split("\n")[:MOST_LINES])


def _text_of(error: BaseException | None) -> str:
    """Its text, which is code of the script and may fail itself."""
    try:
        return str(error)
    except Exception as other:
        return f"its text cannot be made: {type(other).__name__}"


def has_traceback(error: BaseException | None) -> bool:
    """Whether it matters where it was raised: mistakes of the user say that themselves."""
    return error is not None and not isinstance(error, (SystemExit, UserError))


def traceback_of(view: View) -> str:
    """Where an error was raised, as Python tells it, from the script on."""
    error = view.error
    assert error is not None
    trace = error.__traceback__
    while trace is not None and is_plumbing(trace.tb_frame):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace or error.__traceback__)[:-1]
    return "".join(lines).rstrip("\n")


def place_of(error: Exception) -> str:
    """An error of our own, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {os.path.basename(last.filename)}:{last.lineno}: {error}"


def code_of(error: BaseException | None) -> int:
    """The exit code with which an error ends a run, as `mpitrain local` has it."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, Ended):
        return int(error.args[0])
    return error.exit_code if isinstance(error, UserError) and not isinstance(error, CommError) else 1

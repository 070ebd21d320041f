"""Python's debugger at a place of a replay: before a message, at a step, where something differs."""

from __future__ import annotations

import bdb
import os
import pdb
import sys
from types import FrameType, TracebackType

from mpitrain.comm.site import caller_of

_HERE = os.path.dirname(os.path.abspath(__file__)) + "/"
_STEPS = os.path.dirname(os.path.dirname(_HERE)) + "/pipeline/"


def at(frame: FrameType | None, why: str) -> None:
    """A prompt at a frame that is under way; its commands go on from there.

    Raises:
        BdbQuit: the user has ended the debugger.
    """
    if frame is None:
        return
    print(f"--- {why}", flush=True)
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    below: FrameType | None = frame
    while below is not None:
        below.f_trace = debugger.trace_dispatch
        debugger.botframe = below
        below = below.f_back
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise bdb.BdbQuit
    if debugger.stoplineno != -1 or debugger.breaks:
        sys.settrace(debugger.trace_dispatch)


def here(why: str, steps: bool = False) -> None:
    """A prompt in the program, outside of what carries its messages; `steps`: what makes its steps is program, too."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_program(frame, steps):
        frame = frame.f_back
    at(frame, why)


def after(trace: TracebackType | None, why: str) -> None:
    """A prompt where an error came from, in the innermost frame that is the program's."""
    print(f"--- {why}", flush=True)
    last, entry = trace, trace
    while entry is not None:
        if _is_program(entry.tb_frame, steps=True):
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
    pdb.post_mortem(trace)


def _is_program(frame: FrameType, steps: bool = False) -> bool:
    """Whether a frame is the program's own; `steps`: those count that make its steps."""
    path = frame.f_code.co_filename
    others = (_HERE,) if steps else (_HERE, _STEPS)
    return not path.startswith(others) and caller_of(frame)[0] is frame


def at_first_line(path: str) -> None:
    """A prompt at the first line of a script that is about to run."""

    def tracer(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename == path and frame.f_code.co_name == "<module>":
            sys.settrace(None)
            pdb.Pdb(nosigint=True).set_trace(frame)

    sys.settrace(tracer)

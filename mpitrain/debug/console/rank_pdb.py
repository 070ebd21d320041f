"""pdb in the thread of one rank, whose keyboard is the console's.

Python's debugger traces the thread that it is in, so it runs in the rank's; but a terminal belongs to the main thread,
which signals reach and which edits lines.  Each line that it asks for is therefore read there.  It reads no `.pdbrc`:
what it does comes from the keyboard alone.

    q  c     back to the console; the rank stands, or goes on, as the console says
    n  s     lines of the rank; the others go on only as far as its messages need them
"""

from __future__ import annotations

import os
import pdb
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from mpitrain.comm.site import is_plumbing

Ask = Callable[[str, Callable[[str, int], Any]], str]
"""Reads a line: (prompt, completer) -> the line; raises EOFError at the end of input."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _is_of_a_library(frame: FrameType) -> bool:
    """Whether it is of Python's library or of an installed package other than this one."""
    path = frame.f_code.co_filename
    return path.startswith((*_LIBRARIES, "<")) and not path.startswith(_PACKAGE)


class _Keyboard:
    """What pdb takes for its standard input."""

    def __init__(self, debugger: RankPdb, ask: Ask) -> None:
        self._debugger = debugger
        self._ask = ask

    def readline(self) -> str:
        """A line, or "" at the end."""
        debugger = self._debugger
        try:
            return self._ask(debugger.shown_prompt, debugger.complete) + "\n"
        except EOFError:
            return ""


class RankPdb(pdb.Pdb):
    """pdb for a rank.

    Args:
        rank: number of the rank.
        ask: reads a line.
        live: whether the rank's thread is the one that it runs in, so that lines can be stepped.
        turn: called in that thread with "asks" before lines are read, with "stays" (q) or "goes" (c) when it is left;
            says whether it is to ask in the same place again.
    """

    def __init__(
        self, rank: int, ask: Ask, live: bool = True, turn: Callable[[str], bool] = lambda what: False
    ) -> None:
        super().__init__(stdin=_Keyboard(self, ask), stdout=sys.stdout, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.shown_prompt = f"(pdb, rank {rank}) "
        self.prompt = ""
        self.use_rawinput = False
        self._left = ""
        self._rank = rank
        self._live = live
        self._turn = turn

    def enter(self, frame: FrameType) -> None:
        """Ask in the line that a frame of this thread is in, and trace it from there as it was told to."""
        self.reset()
        self._trace(frame)
        sys.settrace(None)  # not what asks
        self.set_step()
        self.interaction(frame, None)
        if not self._left or (self._left == "goes" and self.breaks):
            sys.settrace(self.trace_dispatch)

    def begin(self) -> None:
        """Ask in the first line of the script, which comes next in this thread."""
        self.reset()
        self.set_step()
        sys.settrace(self.trace_dispatch)

    def look(self, frame: FrameType | None, trace: TracebackType | None = None) -> None:
        """Ask about a frame of another thread, or about a traceback."""
        self.reset()
        self.interaction(frame, trace)

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """See bdb; without the frames that started the rank."""
        stack, place = super().get_stack(f, t)
        outer = 0
        while outer < place and is_plumbing(stack[outer][0]):
            outer += 1
        return stack[outer:], place - outer

    def stop_here(self, frame: FrameType) -> bool:
        """Not in plumbing, nor in libraries that it calls: a step into a layer ends in the layer's own forward."""
        caller: FrameType | None = frame
        while caller is not None and _is_of_a_library(caller):
            caller = caller.f_back
        return (caller is None or not is_plumbing(caller)) and super().stop_here(frame)

    def interaction(self, frame: FrameType | None, *trace: Any) -> None:
        """See pdb; whoever has left it goes on by what he left it for."""
        while True:
            self._left = ""
            self._turn("asks")
            super().interaction(frame, *trace)
            if not self._left or not self._turn(self._left) or frame is None:
                return
            self._trace(frame)

    def _trace(self, frame: FrameType) -> None:
        outer: FrameType | None = frame
        while outer is not None:
            outer.f_trace = self.trace_dispatch
            self.botframe = outer
            outer = outer.f_back
        sys.settrace(self.trace_dispatch)

    def _untrace(self) -> None:
        sys.settrace(None)
        frame: FrameType | None = self.stack[-1][0] if self.stack else None
        while frame is not None:
            frame.f_trace = None
            frame = frame.f_back
        self.set_step()

    def do_quit(self, arg: str) -> bool:
        """q(uit): back to the console, with the rank where it is."""
        self._left = "stays"
        if self._live:
            self._untrace()
        return True

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool:
        """Ctrl-D: as quit."""
        print(file=self.stdout)
        return self.do_quit(arg)

    def do_continue(self, arg: str) -> bool:
        """c(ont(inue)): all ranks go on, this one to the next line with a breakpoint of pdb's."""
        self._left = "goes"
        if self._live and self.breaks:
            self.set_continue()
        elif self._live:
            self._untrace()
        return True

    do_c = do_cont = do_continue

    def _no(self, arg: Any = None) -> bool | None:
        self.message(f"rank {self._rank} waits, or has failed: its lines can be looked at, not stepped")
        return None

    def do_step(self, arg: str) -> bool | None:
        """s(tep): to the next line, also of a function that is called."""
        return super().do_step(arg) if self._live else self._no()

    do_s = do_step

    def do_next(self, arg: str) -> bool | None:
        """n(ext): to the next line of this function."""
        return super().do_next(arg) if self._live else self._no()

    do_n = do_next

    def do_return(self, arg: str) -> bool | None:
        """r(eturn): to the end of this function."""
        return super().do_return(arg) if self._live else self._no()

    do_r = do_return

    def do_until(self, arg: str) -> bool | None:
        """unt(il) [line]: to a line below."""
        return super().do_until(arg) if self._live else self._no()

    do_unt = do_until

    def do_interact(self, arg: str) -> None:
        """There is no interpreter; statements run as they are typed, or behind an exclamation mark."""
        self.message("statements run as they are typed; those that look like a command behind !")

    def do_run(self, arg: str) -> None:
        """There is no start again."""
        self.message("a debugged run does not start again; quit, and start mpitrain debug anew")

    do_restart = do_run

"""Ranks that are threads: one that runs on and on while others wait for it is named, and all end.

A deadlock is exact there (baton.py), but a rank in an endless loop keeps the baton.  The thread that started the ranks
glances at it now and then; after the time limit it says where that rank is, as the report under MPI does (hang.py).  A
rank that a debugger holds may take as long as it likes.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

from mpitrain.comm.baton import RankStopped, Room
from mpitrain.comm.hang import SHOWN_CALLS
from mpitrain.comm.page import innermost
from mpitrain.comm.path import MAX_LINES, common_words, last_common_call, places_told
from mpitrain.comm.places import by_place, named
from mpitrain.comm.site import trail_of
from mpitrain.comm.thread_rank import Rank
from mpitrain.errors import CommError

_AWAKE = 1.0  # seconds of those between two glances that count: a suspended process stands still as a whole
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py")


class Glance:
    """Looks whether the rank that has the baton still passes it on or sends."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._signs = (-1, -1)
        self._last = time.monotonic()
        self._still = 0.0  # seconds without a sign

    def __call__(self) -> None:
        """One look.

        Raises:
            CommError: a rank has run for longer than the time limit, without a message, while others wait for one.
        """
        room, now = self._room, time.monotonic()
        if room.debugger is not None:
            return
        signs, gap = (room.turns, room.moves), now - self._last
        self._last = now
        if signs != self._signs:
            self._signs, self._still = signs, 0.0
            return
        self._still += min(gap, _AWAKE)
        waiting = [rank for rank in room.ranks if rank.waits is not None and not rank.waits.done and not rank.left]
        runs = room.holder
        if self._still <= room.timeout or runs is None or not waiting or _is_debugged(runs):
            return
        text = self._report(runs, waiting)
        # It unwinds as soon as it is back in Python; a thread that never is ends with the process.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(runs.ident), ctypes.py_object(RankStopped))
        raise CommError(text)

    def _report(self, runs: Rank, waiting: list[Rank]) -> str:
        trail = trail_of(sys._current_frames().get(runs.ident))
        last = f", after {runs.calls[-1].entry().told}" if runs.calls else " and never entered a call"
        others = [(rank.number, rank.where()) for rank in self._room.ranks if rank is not runs]
        common = last_common_call({rank.number: rank.standing() for rank in (runs, *waiting)})
        lines = [
            f"no answer for {self._room.timeout:g} s (--timeout).  Rank {runs.number} is behind: it is in no call.",
            f"  rank {runs.number} runs at {innermost(trail)}{last} (for {self._still:.0f} s)",
            *places_told(others, MAX_LINES - 2),
            "",
            *([common_words(common)] if common else []),
            "Last calls, the newest first.",
        ]
        for calls, ranks in by_place((rank.number, _last_calls(rank)) for rank in (runs, *waiting)).items():
            lines.append(f"  {named(ranks)}" + (f" at {trail}" if runs.number in ranks else ""))
            lines += [f"    {call}" for call in calls or ("none",)]
        return "\n".join(lines)


def _last_calls(rank: Rank) -> tuple[str, ...]:
    return tuple(call.entry().told for call in list(rank.calls)[: -SHOWN_CALLS - 1 : -1])


def _is_debugged(rank: Rank) -> bool:
    """Whether its thread stands in a debugger."""
    frame = sys._current_frames().get(rank.ident)
    while frame is not None:
        if os.path.basename(frame.f_code.co_filename) in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False

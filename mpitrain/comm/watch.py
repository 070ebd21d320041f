"""The look: a thread in every rank that asks twice a second whether the call it waits in can still return.

It cannot, if a partner has left without entering that call, or if ranks wait for each other in a ring.  It probably
cannot, if it has lasted longer than the time limit.  Either way the job ends with one message, instead of waiting until
somebody notices:

    CommError: rank 1 left with exit code 3 at train.py:40, but rank 0 waits for it in all_reduce on world, call 41,
      (4, 512) float32, at sequence.py:71.

    CollectiveMismatch: ranks wait for each other, none can go on.
      rank 0 waits in all_reduce on world, call 12, (2,) float64, at executor.py:170
      rank 1 waits in all_reduce on dp, call 8, (3,) float64, at train.py:14

    CommError: no answer for 300 s (--timeout).  Rank 2 is behind: it is in no call.        (more in hang.py)

The look also posts where in the program its rank is, so that others can tell when that one answers no more.  Everything
is read from the flight board; the look sends nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence

from mpitrain.comm.board import Channel, FlightBoard
from mpitrain.comm.copies import SILENCE, Copies
from mpitrain.comm.cycle import Ring, ring
from mpitrain.comm.hang import DEBUGGED, SILENT, STOPPED, Hang, Seen
from mpitrain.comm.lifeline import Lifeline
from mpitrain.comm.page import LEFT, LOOKED, UNKNOWN_CODE, WAITING, Gone
from mpitrain.comm.path import second_line
from mpitrain.comm.places import named
from mpitrain.comm.site import trail_of

LOOK_SECONDS = 0.5
LATE = 1.0  # seconds: of more that passed between two looks this process was asleep, and the time is not counted
SEND_SECONDS = 5.0
HEAD_START = 1.0  # seconds that a rank which has nothing to say leaves to the one that speaks
_STILL = {"T": STOPPED, "t": DEBUGGED}  # by the kernel's letter for the state of a process


class Watch:
    """The look of one rank."""

    def __init__(self, board: FlightBoard, lifeline: Lifeline) -> None:
        """Nothing runs before `start`."""
        self._board = board
        self._lifeline = lifeline
        self._stop = threading.Event()
        self._suspect: tuple[int, int] | None = None  # (call, partner) of the last look
        self._ring: Ring | None = None  # of the last look
        self._ring_since = 0.0
        self._half_checked: tuple[tuple[int, int, bool], ...] = ()  # of the last look
        self._copies = Copies(board.rank)
        self._ordinal = 0  # of the call whose waiting is counted
        self._waited = 0.0  # seconds of it
        self._gap = 0.0  # seconds between the last two looks
        self._thread = threading.Thread(target=self._run, name="mpitrain-look", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a look that is under way ends first."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)
        if self._board.run_folder is not None and len(self._board.pages) < len(self._board.hosts):
            self._copies.remove(self._board.run_folder)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """One look."""
        board = self._board
        board.remote.update(self._lifeline.hear())
        waiting = board.current
        self._post(threading.main_thread().ident if waiting is None else waiting[3])
        if board.run_folder is not None and len(board.pages) < len(board.hosts):
            self._copies.write(board.run_folder, board.page)
        if waiting is None:
            self._suspect = self._ring = None
            self._half_checked = ()
            return
        channel, number, ordinal, _ = waiting
        missing = self._missing(channel, number)
        if missing is not None and self._suspect == (ordinal, missing[0]) and board.current is waiting:
            self._report_missing(*missing)
        self._suspect = None if missing is None else (ordinal, missing[0])
        found = ring(board.pages, board.rank)
        if found is None or found != self._ring:
            self._ring, self._ring_since = found, time.monotonic()
        elif time.monotonic() - self._ring_since >= self._proof_seconds(found) and board.current is waiting:
            self._report_ring(found)
        mixed = self._mixed(channel, number)
        if mixed and mixed == self._half_checked and board.current is waiting:
            self._report_mixed(mixed)
        self._half_checked = mixed
        if self._seconds_in(ordinal) > board.limit and board.current is waiting:
            self._report_hang(channel)

    def _post(self, thread: int | None) -> None:
        """Post where in the program a thread of this rank is, unless that is known already."""
        page = self._board.page
        before, moment = page.looked, page.moment
        now = page.words[LOOKED] = time.monotonic_ns()
        self._gap = (now - before) / 1e9
        if thread is None or page.state == LEFT or (page.state == WAITING and page.trail):  # a call stays where it is
            return
        trail = trail_of(sys._current_frames().get(thread))
        if page.moment == moment:
            page.set_site(trail, moment)

    def _seconds_in(self, ordinal: int) -> float:
        """How long this rank has waited in its call while it was awake.

        A job that somebody suspends stands still as a whole, and goes on where it was.
        """
        since = (time.monotonic_ns() - self._board.page.since) / 1e9
        if ordinal != self._ordinal:
            self._ordinal, self._waited = ordinal, min(since, LATE)
        else:
            self._waited += min(self._gap, LATE)
        return min(self._waited, since)

    def _missing(self, channel: Channel, number: int) -> tuple[int, Gone | None] | None:
        """A partner who will never enter the call: (rank, how it left, or None if it died without a word)."""
        for rank in channel.partners:
            gone = self._board.gone(rank)
            if gone is None:
                if self._board.is_dead(rank):
                    return rank, None
            elif not gone.entered(channel.answer_key, number):
                return rank, gone
        return None

    def _all_missing(self) -> list[int]:
        """All partners that have left without entering the call of this rank."""
        if self._board.current is None:
            return []
        channel, number, *_ = self._board.current
        pages = [(rank, self._board.pages[rank]) for rank in channel.partners if rank in self._board.pages]
        pages = [(rank, page) for rank, page in pages if page.state == LEFT or self._board.is_dead(rank)]
        return [rank for rank, page in pages if not page.gone().entered(channel.answer_key, number)]

    def _mixed(self, channel: Channel, number: int) -> tuple[tuple[int, int, bool], ...]:
        """Members of a collective that all wait in it, some of which compare their calls and some do not.

        Of each: its rank, the ordinal of its call, and whether it compares.  Empty: it is not so, or cannot be seen.
        """
        pages = self._board.pages
        found = []
        for rank in sorted({self._board.rank, *channel.partners}):
            call = pages[rank].current() if rank in pages else None
            if call is None or call.peer >= 0 or call.is_wait:
                return ()
            if (call.key, call.number) != (channel.answer_key, number):
                return ()
            found.append((rank, call.ordinal, call.is_checked))
        return tuple(found) if len({is_checked for *_, is_checked in found}) > 1 else ()

    def _proof_seconds(self, found: Ring) -> float:
        """How long a ring must stand: a send that nobody takes may still end by itself."""
        calls = (self._board.pages[rank].current() for rank, _ in found)
        return SEND_SECONDS if any(call is not None and "send" in call.verb for call in calls) else 0.0

    # -- reports

    def _report_missing(self, rank: int, gone: Gone | None) -> None:
        board = self._board
        if gone is None:
            how = "died"
        else:
            how = "left" if gone.code == UNKNOWN_CODE else f"left with exit code {gone.code}"
            how += f" at {gone.where}" if gone.where else ""
        code = gone.code if gone is not None and gone.code > 0 else 1
        call, hang = board.page.current(), self.hang(())
        place = (call and call.site) or board.page.site
        what = str(call).removeprefix("wait ")
        text = f"CommError: rank {rank} {how}, but rank {board.rank} waits for it in {what}, at {place}."
        text += second_line(*hang.path([*self._all_missing(), board.rank]))
        self._end(f"left {rank}", f"{text}\n", code, silent=gone is not None and gone.spoke)

    def _report_ring(self, found: Ring) -> None:
        lines = self.hang(()).deadlock([rank for rank, _ in found])
        self._end("ring", "\n".join(lines) + "\n", 1)

    def _report_mixed(self, found: tuple[tuple[int, int, bool], ...]) -> None:
        some, others = ([rank for rank, _, is_checked in found if is_checked is on] for on in (True, False))
        compare = "compares its" if len(some) == 1 else "compare their"
        head = (
            f"CollectiveMismatch: {named(some)} {compare} calls (checked mode), {named(others)}"
            f" {'does' if len(others) == 1 else 'do'} not."
        )
        self._end("half checked", "\n".join(self.hang(()).deadlock([*some, *others], head)) + "\n", 1)

    def _end(self, what: str, text: str, code: int, *, silent: bool = False) -> None:
        """Say `text` once, then end the job; ranks of rank 0's host speak first."""
        if self._board.hosts[self._board.rank] != self._board.hosts[0]:
            time.sleep(HEAD_START)
        if not silent and self._board.claim(what):
            say(text)
        else:
            time.sleep(HEAD_START)
        self._lifeline.abort(code)

    def _report_hang(self, channel: Channel) -> None:
        hang = self.hang(channel.partners)
        path = hang.write(self._board.run_folder)
        self._end("hang", "\n".join([*hang.head(), *hang.rest(path)]) + "\n", 1)

    def hang(self, partners: Sequence[int]) -> Hang:
        """What can be seen now of all ranks; `partners` of the call that this one waits in."""
        board = self._board
        now = time.monotonic_ns()
        seen = {}
        for rank, page in board.pages.items():
            state = board.process(rank).state if rank != board.rank else ""
            seen[rank] = Seen(page.copy(), now, _STILL.get(state, ""))
        if board.run_folder is not None and len(seen) < len(board.hosts):
            self._copies.write(board.run_folder, board.page, now=True)
            others = [rank for rank in range(len(board.hosts)) if rank not in seen]
            for rank, (page, clock, age) in self._copies.read(board.run_folder, others).items():
                seen[rank] = Seen(page, clock, SILENT if age > SILENCE else "", age)
        return Hang(board.limit, board.rank, partners, seen, len(board.hosts))


def say(text: str) -> None:
    """Write to stderr in one piece, whatever state the interpreter is in."""
    try:
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:
        os.write(2, text.encode(errors="replace"))

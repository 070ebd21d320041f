"""The look: a thread in every rank that asks twice a second whether the call it waits in can still return.

It cannot, if a partner has left without entering that call, or if ranks wait for each other in a ring.  It probably
cannot, if it has lasted longer than the time limit.  Either way the job ends with one message, instead of waiting until
somebody notices:

    CommError: rank 1 left with exit code 3 at train.py:40, but rank 0 waits for it in all_reduce on world, call 41,
      (4, 512) float32, at sequence.py:71.

    CommError: no answer for 300 s (--timeout).
      ranks 0,1,3 wait in all_reduce on tp, call 41, (4, 512) float32, at sequence.py:71 (for 300 s)
      rank 2 runs since 302 s, after all_gather on tp, call 40, (2, 512) float32

    CollectiveMismatch: ranks wait for each other, none can go on.
      rank 0 waits in all_reduce on world, call 12, (2,) float64, at executor.py:170
      rank 1 waits in all_reduce on dp, call 8, (3,) float64, at train.py:14

Everything is read from the flight board; the look sends nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from mpitrain.comm.board import Channel, FlightBoard
from mpitrain.comm.cycle import Ring, ring
from mpitrain.comm.lifeline import Lifeline
from mpitrain.comm.page import LEFT, NEW, PAGE, UNKNOWN_CODE, Gone, Page
from mpitrain.comm.places import by_place, named
from mpitrain.comm.site import site_of

LOOK_SECONDS = 0.5
COPY_SECONDS = 2.0
SEND_SECONDS = 5.0
HEAD_START = 1.0  # seconds that a rank which has nothing to say leaves to the one that speaks
MAX_LINES = 5


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
        self._next_copy = 0.0
        self._thread = threading.Thread(target=self._run, name="mpitrain-look", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a look that is under way ends first."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """One look."""
        board = self._board
        board.remote.update(self._lifeline.hear())
        self._copy()
        waiting = board.current
        if waiting is None:
            self._suspect = self._ring = None
            return
        channel, number, ordinal, thread = waiting
        if not board.page.site:
            site = site_of(sys._current_frames().get(thread))
            if board.current is waiting:
                board.page.set_site(site)
        missing = self._missing(channel, number)
        if missing is not None and self._suspect == (ordinal, missing[0]) and board.current is waiting:
            self._report_missing(*missing)
        self._suspect = None if missing is None else (ordinal, missing[0])
        found = ring(board.pages, board.rank)
        if found is None or found != self._ring:
            self._ring, self._ring_since = found, time.monotonic()
        elif time.monotonic() - self._ring_since >= self._proof_seconds(found) and board.current is waiting:
            self._report_ring(found)
        if time.monotonic_ns() - board.page.since > board.limit * 1e9 and board.current is waiting:
            self._report_hang()

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
        call = board.page.current()
        text = f"CommError: rank {rank} {how}, but rank {board.rank} waits for it in {call}, at {board.page.site}.\n"
        self._end(f"left {rank}", text, code, silent=gone is not None and gone.spoke)

    def _report_ring(self, found: Ring) -> None:
        lines = [f"  rank {rank} {_place(self._board.pages[rank]).replace('wait', 'waits', 1)}" for rank, _ in found]
        if len(lines) >= MAX_LINES:
            lines[MAX_LINES - 2 :] = [f"  and {len(lines) - MAX_LINES + 2} more ranks"]
        text = "\n".join(["CollectiveMismatch: ranks wait for each other, none can go on.", *lines]) + "\n"
        self._end("ring", text, 1)

    def _report_hang(self) -> None:
        self._end("hang", self.hang_report(), 1)

    def _end(self, what: str, text: str, code: int, *, silent: bool = False) -> None:
        """Say `text` once, then end the job; ranks of rank 0's host speak first."""
        if self._board.hosts[self._board.rank] != self._board.hosts[0]:
            time.sleep(HEAD_START)
        if not silent and self._board.claim(what):
            say(text)
        else:
            time.sleep(HEAD_START)
        self._lifeline.abort(code)

    def hang_report(self) -> str:
        """Where every rank is, ranks in the same place together; at most five lines."""
        board = self._board
        now = time.monotonic_ns()
        pages = {rank: (page, now) for rank, page in board.pages.items()} | self._copies()
        places = by_place((rank, _place(page)) for rank, (page, _) in sorted(pages.items()))
        seconds = {rank: (then - page.since) / 1e9 for rank, (page, then) in pages.items()}
        lines = []
        for place, ranks in places.items():
            verb = place if len(ranks) > 1 else place.replace("wait ", "waits ", 1).replace("run", "runs", 1)
            lines.append(f"  {named(ranks)} {verb} (for {max(seconds[rank] for rank in ranks):.0f} s)")
        unseen = len(board.hosts) - len(pages)
        if unseen:
            lines.append(f"  {unseen} ranks on other hosts are not seen from here (a run folder would show them)")
        if len(lines) >= MAX_LINES:
            lines[MAX_LINES - 2 :] = [f"  and {len(lines) - MAX_LINES + 2} more places"]
        return "\n".join([f"CommError: no answer for {board.limit:g} s (--timeout).", *lines]) + "\n"

    # -- copies for the reports of other hosts

    def _copy(self) -> None:
        board, now = self._board, time.monotonic()
        if board.run_folder is None or now < self._next_copy or len(board.pages) == len(board.hosts):
            return
        self._next_copy = now + COPY_SECONDS
        folder = os.path.join(board.run_folder, "board")
        data = time.monotonic_ns().to_bytes(8, "little") + bytes(board.page.memory)
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            fd = os.open(_copy_path(folder, board.rank), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, data, 0)
            finally:
                os.close(fd)
        except OSError:  # a full disk must not end a training that goes well: the report will lack this rank
            pass

    def _copies(self) -> dict[int, tuple[Page, int]]:
        """Pages of other hosts' ranks, each with the clock of its own host when it was copied."""
        board = self._board
        found: dict[int, tuple[Page, int]] = {}
        if board.run_folder is None:
            return found
        for rank in range(len(board.hosts)):
            if rank in board.pages:
                continue
            try:
                with open(_copy_path(os.path.join(board.run_folder, "board"), rank), "rb") as file:
                    data = bytearray(file.read(PAGE + 9))
                if len(data) == PAGE + 8:
                    page = Page(memoryview(data)[8:])
                    _place(page)
                    found[rank] = (page, int.from_bytes(data[:8], "little"))
            except (OSError, ValueError, IndexError):  # not there, or not a page
                continue
        return found


def say(text: str) -> None:
    """Write to stderr in one piece, whatever state the interpreter is in."""
    try:
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:
        os.write(2, text.encode(errors="replace"))


def _place(page: Page) -> str:
    """What a rank does, in words that are equal for ranks that do the same."""
    state = page.state
    if state == LEFT:
        code = page.gone().code
        return "left" + (f" with exit code {code}" if code != UNKNOWN_CODE else "")
    call = page.current()
    if call is not None:
        return f"wait in {call}" + (f", at {page.site}" if page.site else "")
    last = page.calls()[-1:]
    if state == NEW or not last:
        return "run and never entered a call"
    return f"run, after {last[0]}"


def _copy_path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank:05d}.page")

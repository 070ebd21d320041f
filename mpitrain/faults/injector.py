"""The listener that lets faults happen, each once.

A run that is started again after a fault must not meet it again, or it would never end.  So where a run has a folder, a
fault is noted there, on the disk, before it strikes: `RUN/.faults-done/`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from mpitrain.events import LISTENERS, Event, join, leave
from mpitrain.faults.fault import Fault
from mpitrain.faults.words import plan

VARIABLE = "MPITRAIN_FAULTS"
"""The environment's, which `mpitrain.comm.world.world` reads."""
DONE = ".faults-done"
"""Folder in that of a run: the faults that have struck, a file each."""


class Ranks(Protocol):
    """A world, as far as faults need it."""

    rank: int
    size: int


class Injector:
    """The listener that lets the faults of one rank happen.

    Args:
        faults: of all ranks.
        rank: this one.

    Attributes:
        pending: place among all -> the faults of this rank that have not struck yet.
        step: the step that this rank is in, counted from 1 over all starts of the run; 0 before the first.
    """

    def __init__(self, faults: tuple[Fault, ...], rank: int) -> None:
        self.pending = {place: fault for place, fault in enumerate(faults) if fault.rank == rank}
        self.step = 0
        self._rank = rank
        self._action = ""
        self._counts = dict.fromkeys(self.pending, 0)
        self._lock = threading.Lock()  # a save in the background tells its events in a thread of its own
        self._notes: Path | None = None

    def __call__(self, event: Event) -> None:
        """See events.py."""
        if event.kind == "action":
            self._action = event.name if event.phase == "begin" else ""
            self.step = event.info.get("step", self.step)
        if event.phase != "begin" or not self.pending:
            return
        with self._lock:
            due = []
            for place, fault in self.pending.items():
                if fault.matches(event, self.step, self._action):
                    self._counts[place] += 1
                    if self._counts[place] >= fault.n:
                        due.append(place)
        for place in due:  # not taken out before its turn: if the one before raises, it strikes at the next event
            with self._lock:
                due_now = self.pending.pop(place, None)
            if due_now is not None and self._note(place, due_now):
                _say(f"[rank {self._rank}] fault injected in step {self.step} as {event.name} begins: {due_now}\n")
                due_now.strike(event.info.get("path"))

    def remember(self, run: str | os.PathLike[str]) -> None:
        """Note faults in the folder of a run before they strike, and leave out those that are noted there."""
        self._notes = Path(run) / DONE
        with self._lock:
            for place, fault in list(self.pending.items()):
                if os.path.lexists(self._notes / _note_name(place, fault)):
                    del self.pending[place]

    def _note(self, place: int, fault: Fault) -> bool:
        """Have a note of it on the disk; False if there is one already, or none can be made."""
        if self._notes is None:
            return True
        path = self._notes / _note_name(place, fault)
        try:
            for folder in (self._notes.parent, self._notes):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(path, f"{fault}\n")
            _sync_folder(self._notes)
        except OSError as error:
            if path.is_file():  # another start of the run is not over yet
                return False
            _say(f"[rank {self._rank}] fault left out, since {self._notes} cannot be written: {error.strerror}\n")
            return False
        return True


def _note_name(place: int, fault: Fault) -> str:
    """The same in every start with the same faults, also where a drawn one then strikes elsewhere."""
    return f"{place:03}-{hashlib.blake2b(fault.source.encode(), digest_size=6).hexdigest()}"


def _write(path: Path, text: str) -> None:
    """A new file that is on the disk.  Not through `mpitrain.disk`, whose events are for faults to strike at."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(file, text.encode())
        os.fsync(file)
    finally:
        os.close(file)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # of file systems that sync names by themselves
            os.fsync(folder)
    finally:
        os.close(folder)


def begin(text: str, world: Ranks, where: str = "--faults") -> Injector:
    """Let faults happen in this context from here on; see `injected`."""
    injector = Injector(plan(text, world.size, where), world.rank)
    if injector.pending:  # the other ranks pay nothing
        join(injector)
    return injector


@contextlib.contextmanager
def injected(text: str | None, world: Ranks) -> Iterator[Injector | None]:
    """Let faults happen on this rank while the block runs; every rank enters it.

        with injected("kill rank=1 at=message:all_reduce n=41", world()):
            train()

    Those that the block did not reach are told at its end, on stderr.

    Args:
        text: the faults (see `parse`); None: none.
        world: all ranks.

    Raises:
        ConfigError: see `plan`; on every rank.

    Cost: on ranks with faults a comparison for each event and fault, and what it costs to tell events; on others none.
    """
    if text is None:
        yield None
        return
    injector = begin(text, world)
    try:
        yield injector
        for fault in injector.pending.values():
            _say(f"[rank {world.rank}] fault not reached: {fault}\n")
    finally:
        leave(injector)


def remember(run: str | os.PathLike[str] | None) -> None:
    """Have all faults of this context noted in the folder of a run; see `Injector.remember`.  None: they are not."""
    for listener in LISTENERS.get() if run is not None else ():
        if isinstance(listener, Injector):
            assert run is not None
            listener.remember(run)


def _say(text: str) -> None:
    """To stderr, at once: what comes next may be the end."""
    sys.stderr.write(text)
    sys.stderr.flush()

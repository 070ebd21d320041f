"""Start runs as child processes, wait for them, and leave none behind.

A run of its own process cannot hurt the one that judges it: it may crash, hang, print, call `os._exit`, change its
surroundings.  Its output goes to a file; its records lie beside it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from mpitrain import errors
from mpitrain.blas import THREADS
from mpitrain.debug.capture import Record, read
from mpitrain.doctor.ask import outside_of_mpi
from mpitrain.doctor.launchers import ROOT, UNBOUND, in_allocation, launcher
from mpitrain.errors import LaunchError
from mpitrain.verify import stale
from mpitrain.verify.run import courses_of, records_of
from mpitrain.verify.stale import Course

PAUSE = 0.01  # seconds between two looks at the children
GRACE = 3.0  # seconds that a child has to end its own children
TAIL = 40  # lines of the output that are kept of a run that failed
MOST_LINES = 5  # of a UserError
REFUSALS = ("ConfigError", "ShapeError", "MeshError")
_USER_ERROR = re.compile(f"({'|'.join(n for n, kind in vars(errors).items() if isinstance(kind, type))})\\b.*: ")
_ERROR = re.compile(r"[A-Za-z_.]*(Error|Exception|Mismatch|Interrupt)\b")
_LAUNCHERS_WORDS = re.compile(r"^([-=])\1{19,}\n.*?^\1{20,}$", re.MULTILINE | re.DOTALL)


@dataclass
class Run:
    """One run of the script.

    Attributes:
        folder: of its own; holds the output and the records.
        ranks: how many; 0 for the plain process that is a world of one.
        command: the script and its arguments.
        states: whether it checks the states of values.
        courses: of the pipeline that it replays on one rank; empty: it trains as it is.
        over_mpi: whether mpirun started it.
        code: exit code once it has ended; None if it had to be killed.
        seconds: how long it took.
    """

    folder: Path
    ranks: int
    command: list[str]
    states: bool = False
    courses: Sequence[Course] = ()
    over_mpi: bool = False
    code: int | None = None
    seconds: float = 0.0
    _began: float = field(default=0.0, repr=False)
    _child: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _file: BinaryIO | None = field(default=None, repr=False)

    def start(self, steps: int, transport: str) -> None:
        """Start the process.

        Args:
            steps: after which the script is ended.
            transport: "local" or "mpi", where there is more than one rank.
        """
        self.folder.mkdir(mode=0o700)
        if self.courses:
            stale.write(courses_of(self.folder), self.courses)
        self.over_mpi = self.ranks > 0 and transport == "mpi"
        way = "here" if self.over_mpi or not self.ranks else "threads"
        how = [way, str(self.ranks), str(steps), "states" if self.states else "plain"]
        words = [sys.executable, "-m", "mpitrain.verify.run", str(self.folder), *how]
        env = outside_of_mpi(
            **dict.fromkeys(THREADS, "1"), MPITRAIN_DETERMINISTIC="1", MPITRAIN_TTY="0", PYTHONUNBUFFERED="1"
        )
        if self.over_mpi:
            words = [mpirun(), "-n", str(self.ranks), *words]
            env = _settings(self.folder) | env
        self._file = open(self.folder / "output", "wb")  # noqa: SIM115  (closed when it ends)
        self._began = time.monotonic()
        self._child = subprocess.Popen(
            [*words, *self.command],
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )

    def ended(self, timeout: float) -> bool:
        """Whether it has ended; one that takes longer than `timeout` seconds is ended here."""
        assert self._child is not None
        self.code = self._child.poll()
        self.seconds = time.monotonic() - self._began
        if self.code is None and self.seconds < timeout:
            return False
        self.stop()
        return True

    def stop(self) -> None:
        """End it and whatever it has started."""
        if self._child is None:
            return
        child, self._child = self._child, None
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)  # mpirun ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # whoever of its group is left
        child.wait()
        if self._file is not None:
            self._file.close()

    def records(self) -> list[Iterator[Record]]:
        """The records of each rank; of one that wrote none, none."""
        paths = [records_of(self.folder, rank) for rank in range(max(1, self.ranks))]
        return [read(path) if path.exists() else iter(()) for path in paths]

    def silent(self) -> list[int]:
        """Ranks that left no file of records."""
        return [rank for rank in range(max(1, self.ranks)) if not records_of(self.folder, rank).exists()]

    def forget(self) -> None:
        """Delete its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def output(self) -> str:
        """All that it printed, without what mpirun adds at the end (unless there is nothing else)."""
        text = (self.folder / "output").read_bytes().decode(errors="replace").replace("\r\n", "\n").replace("\0", "")
        return (_LAUNCHERS_WORDS.sub("", text).strip() or text.strip()) if self.over_mpi else text.strip()

    def tail(self) -> str:
        """The end of what it printed."""
        lines = self.output().splitlines()
        return "\n".join((["..."] if len(lines) > TAIL else []) + lines[-TAIL:])

    def reason(self) -> str:
        """How it ended, in a line: the error's own, or the last one that it printed."""
        lines = [line for line in self.output().splitlines() if line.strip(" -=")] or ["(it printed nothing)"]
        return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])

    def has_begun(self) -> bool:
        """Whether a rank has begun with a first step."""
        return any(next(records, None) is not None for records in self.records())

    def refusal(self) -> str | None:
        """The message with which the script refused its flags before it began; None if it did not.

        Only a ConfigError, ShapeError or MeshError counts, or what an argument parser says before it exits with 2: any
        other error is a failure.
        """
        if self.code != 2 or self.has_begun():
            return None
        message = self.user_error()
        if message:
            return message if message.startswith(REFUSALS) else None
        said = [line for line in self.output().splitlines() if ": error: " in line]
        return said[-1].partition(": error: ")[2] if said else None

    def user_error(self) -> str:
        """The message of the UserError that it printed last; empty if there is none."""
        lines = [line.rstrip() for line in self.output().splitlines() if line.strip()]
        for place in range(len(lines) - 1, -1, -1):
            if _USER_ERROR.match(lines[place]):
                return "\n".join(lines[place : place + MOST_LINES])
        return ""

    def state_error(self) -> str:
        """What the check of states said; empty if nothing, or if it was not made."""
        message = self.user_error() if self.states else ""
        return message if message.startswith("StateError") else ""


def run_all(runs: Sequence[Run], steps: int, transport: str, at_once: int, timeout: float) -> Iterator[Run]:
    """Run them, so many at once, and yield each when it and all before it have ended.

    Whatever ends the caller's loop ends all that still run.
    """
    waiting, started = deque(runs), deque[Run]()
    live: list[Run] = []
    try:
        while waiting or started:
            while waiting and len(live) < at_once:
                run = waiting.popleft()
                run.start(steps, transport)
                started.append(run)
                live.append(run)
            live = [run for run in live if not run.ended(timeout)]
            while started and started[0] not in live:
                yield started.popleft()
            if live:
                time.sleep(PAUSE)
    finally:
        for run in live:
            run.stop()


def mpirun() -> str:
    """The launcher.

    Raises:
        LaunchError: there is none.
    """
    found = launcher()
    if found is None:
        raise LaunchError(
            "--transport mpi: there is no mpirun on PATH or beside this Python.  Leave --transport out, or install an\n"
            'MPI: pip install "mpitrain[mpi]"; mpitrain doctor says more.'
        )
    return found


def _settings(folder: Path) -> dict[str, str]:
    """What lets mpirun start any number of ranks on this machine; in an allocation the scheduler decides."""
    if in_allocation():
        return {}
    home = {"HOME": os.environ.get("HOME") or str(folder)}
    scratch = {"TMPDIR": str(folder)}  # where nothing of another mpirun lies, which could keep this one from starting
    return ROOT | UNBOUND | home | scratch | {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_osc": "^ucx"}

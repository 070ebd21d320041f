"""A fault: what it does, to which rank, at which event."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mpitrain.events import Event

KINDS = ("action", "message", "disk", "op")
"""Kinds of events at which a fault can strike."""

ERRNOS: Mapping[str, int] = {
    **{name: getattr(errno, name) for name in "ENOSPC EIO EDQUOT EACCES EROFS ESTALE EAGAIN ENOLCK".split()},
    "ENOTSUPP": 524,  # of Linux' NFS, which refuses locks with it; not in Python's table
}

_WHOLE_WORDS = ("F", "B", "W")  # as names of actions: F is no FETCH


class InjectedFault(Exception):
    """What the fault `raise` raises.  Of no kind that anybody would catch by name."""


@dataclass(frozen=True)
class Fault:
    """One fault; prints as it is written.

    Attributes:
        how: a word of `HOWS`.
        rank: which it strikes.
        kind, name: of the event: one of `KINDS`, and how its name begins.
        n: strikes at the n-th such event, counted from 1.
        step: (first, last) step in which events count, last None: to the end of the run; None: all do.
        inside: how the name of the action begins during which events count; "": all do.
        code: exit code; seconds: to sleep; error: name of the errno.
        source: the words from which it was made; with its place among all it is what a note of it is named by.
    """

    how: str
    rank: int
    kind: str = "action"
    name: str = ""
    n: int = 1
    step: tuple[int, int | None] | None = None
    inside: str = ""
    code: int = 1
    seconds: float = 1.0
    error: str = "EIO"
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        words = [self.how, f"rank={self.rank}", f"at={self.kind}{':' * bool(self.name)}{self.name}"]
        if self.inside:
            words.append(f"in={self.inside}")
        if self.step is not None:
            first, last = self.step
            words.append(f"step={first}" + ("" if last == first else "-" if last is None else f"-{last}"))
        words.append(f"n={self.n}")
        for key in HOWS[self.how].keys:
            value = getattr(self, FIELDS.get(key, key))
            words.append(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}")
        return " ".join(words)

    def matches(self, event: Event, step: int, action: str) -> bool:
        """Whether an event counts that begins in this step, during this action ("" outside of any)."""
        if event.kind != self.kind or not _begins(event.name.replace(" ", "_"), self.name):
            return False
        if self.inside and not (action and _begins(action, self.inside)):
            return False
        return self.step is None or (self.step[0] <= step and (self.step[1] is None or step <= self.step[1]))

    def strike(self, path: str | None = None) -> None:
        """Let it happen, here and now; `path`: of the file that an error of the disk is about."""
        HOWS[self.how].strike(self, path)


def _begins(name: str, start: str) -> bool:
    """Whether a name begins so; the letter of a compute action stands for itself alone."""
    return name.startswith(start) and not (start in _WHOLE_WORDS and name[1:2].isalpha())


# -- what faults do


def _signal(number: int) -> Callable[[Fault, str | None], None]:
    return lambda fault, path: os.kill(os.getpid(), number)


def _raise(fault: Fault, path: str | None) -> None:
    raise InjectedFault(f"injected: {fault}")


def _exit(fault: Fault, path: str | None) -> None:
    sys.exit(fault.code)


def _hard_exit(fault: Fault, path: str | None) -> None:
    os._exit(fault.code)


def _crash(fault: Fault, path: str | None) -> None:
    ctypes.string_at(0)


def _interrupt(fault: Fault, path: str | None) -> None:
    raise KeyboardInterrupt


def _no_memory(fault: Fault, path: str | None) -> None:
    raise MemoryError(f"injected: {fault}")


def _sleep(fault: Fault, path: str | None) -> None:
    time.sleep(fault.seconds)


def _refuse(fault: Fault, path: str | None) -> None:
    number = ERRNOS[fault.error]
    raise OSError(number, os.strerror(number), path)


class _How(NamedTuple):
    strike: Callable[[Fault, str | None], None]
    help: str
    keys: tuple[str, ...] = ()


HOWS: Mapping[str, _How] = {
    "kill": _How(_signal(signal.SIGKILL), "the process is gone, without a word"),
    "raise": _How(_raise, "an exception out of the call"),
    "exit": _How(_exit, "sys.exit(code)", ("code",)),
    "_exit": _How(_hard_exit, "os._exit(code)", ("code",)),
    "segv": _How(_crash, "a read of address 0"),
    "term": _How(_signal(signal.SIGTERM), "SIGTERM, as from kill or a batch system"),
    "usr1": _How(_signal(signal.SIGUSR1), "SIGUSR1: save and stop"),
    "stop": _How(_signal(signal.SIGSTOP), "SIGSTOP: the process lives and does nothing"),
    "interrupt": _How(_interrupt, "KeyboardInterrupt, as from Ctrl-C"),
    "memory": _How(_no_memory, "MemoryError"),
    "slow": _How(_sleep, "sleeps for some seconds", ("seconds",)),
    "io": _How(_refuse, "the error of a disk, at=disk only", ("errno",)),
}
"""Word -> what it does."""

FIELDS = {"errno": "error", "in": "inside"}
"""Key -> field, where they differ."""

"""Work in a process of its own, which may be killed: forked, so that everything is imported already."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SECONDS = 60
"""A child that takes longer hangs, and is ended by SIGALRM."""


@dataclass(frozen=True)
class Ended:
    """How a child came to its end.

    Attributes:
        code: its exit code; negative: the signal that killed it.
        output: what it printed.
        seconds: how long it lived.
        result: what its work returned, if JSON can hold it; None if it did not come to that.
    """

    code: int
    output: str
    seconds: float
    result: Any = None

    @property
    def last_words(self) -> str:
        """Of a traceback, what was raised."""
        return self.output.strip().rpartition("\n")[2]

    @property
    def killed(self) -> bool:
        """By SIGKILL, as somebody wanted."""
        return self.code == -signal.SIGKILL


def in_child(work: Callable[[], object], kill_after: float | None = None, seconds: int = SECONDS) -> Ended:
    """Do some work in a forked child, and wait for its end.

    Args:
        work: an exception makes it exit code 1, and is printed.
        kill_after: seconds after which it is killed, wherever it is.
        seconds: that it has.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as result:
        began = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that a test runner has: it only waits
            child = os.fork()
        if child == 0:
            _live(work, output.fileno(), result.fileno(), seconds)
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        lived = time.monotonic() - began
        output.seek(0)
        result.seek(0)
        code, said = os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")
        return Ended(code, said, lived, json.loads(result.read()) if code == 0 else None)


def _live(work: Callable[[], object], output: int, result: int, seconds: int) -> None:
    """The child's life; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115  (its own)
        os.write(result, json.dumps(work()).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

"""Asking a machine without being hurt: findings, and child processes with a time limit.

Whatever can crash or hang (an MPI library, a driver, a lock on a network folder) is tried in a child, so the doctor
always answers: an answer that does not come is a finding too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One line of the report: `bad` keeps training from running, `warn` wants mending, `note` is good to know."""

    topic: str
    level: Literal["ok", "note", "warn", "bad"]
    text: str
    fix: str = ""


class Answer(NamedTuple):
    """What a child process said: its exit code (None: it did not answer in time) and its output."""

    code: int | None
    text: str

    @property
    def last_line(self) -> str:
        """The last line that says something, shortened."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip(" -*\t")]
        if self.code is None:
            return "no answer in time"
        return lines[-1][:160] if lines else f"exit code {self.code}"


def ask(command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None) -> Answer:
    """Runs a command in a session of its own for at most `seconds`; never raises, never waits for its grandchildren."""
    with tempfile.TemporaryFile() as output:  # not a pipe: a grandchild that lives on would keep a pipe open
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
            )
        except OSError as error:
            return Answer(127, str(error))
        code: int | None
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)  # lets mpirun end its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(2.0)
                os.killpg(child.pid, signal.SIGKILL)  # whoever of its group is left
            with contextlib.suppress(subprocess.TimeoutExpired):  # a child that waits for a dead disk cannot be killed
                child.wait(2.0)
        output.seek(0)
        return Answer(code, output.read().decode(errors="replace"))


def ask_python(program: str, seconds: float, env: Mapping[str, str] | None = None) -> Answer:
    """Runs a few lines in this Python."""
    return ask([sys.executable, "-c", program], seconds, env)


def outside_of_mpi(**extra: str) -> dict[str, str]:
    """The environment without the marks of a surrounding mpirun, under which a second one would refuse to start."""
    marks = ("OMPI_COMM_WORLD_", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER", "PMI_", "HYDI_", "HYDRA_", "MPITRAIN_NP")
    return {name: value for name, value in os.environ.items() if not name.startswith(marks)} | extra

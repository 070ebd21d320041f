"""run_mpi.sh and real ranks: a signal has them save, a fault starts them again, the numbers are those of one run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from interrupted import FLAGS, SCRIPT, STEPS, TEXT, last_step, outcome, undisturbed
from mpi_launch import ROOT
from this_python import shell_of_this_python

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

TOKEN = "MPITRAIN_TEST_OF_STOP"


class Job:
    """./run_mpi.sh under way in a folder, whose run is called `run` there."""

    def __init__(self, folder: Path, shell: dict[str, str], *words: str) -> None:
        self.run = folder / "run"
        self._token = uuid.uuid4().hex
        self._output = (folder / "output").open("a+")
        self.process = subprocess.Popen(
            [str(ROOT / "run_mpi.sh"), *words, *FLAGS, "--run", "run"],
            cwd=folder,
            env={**shell, TOKEN: self._token},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def processes(self) -> list[int]:
        mark = f"{TOKEN}={self._token}".encode()
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                if mark in Path(f"/proc/{int(entry)}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
        return found

    def ranks(self) -> list[int]:
        """Process ids of the Python processes."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if b"mpi4py" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]:
                    found.append(pid)
        return found

    def wait_for_step(self, step: int, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while last_step(self.run) < step:
            assert self.process.poll() is None, f"it has ended\n{self.output()}"
            assert time.monotonic() < end, f"step {step} did not come\n{self.output()}"
            time.sleep(0.02)

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def end(self, seconds: float = 120) -> int:
        """Its exit code; by then no process of it is left."""
        code = self.process.wait(seconds)
        end = time.monotonic() + 3
        while self.processes() and time.monotonic() < end:
            time.sleep(0.05)
        assert not self.processes(), self.output()
        return code

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._output.close()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return shell_of_this_python(tmp_path_factory.mktemp("shell"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, shell: dict[str, str]) -> object:
    """What the run comes to if nothing disturbs it."""
    return undisturbed(tmp_path_factory.mktemp("whole"), shell, 4)


@pytest.fixture
def start(tmp_path: Path, shell: dict[str, str]) -> Iterator[object]:
    """`start(*words)`: a job of four ranks; nothing of it outlives the test."""
    (tmp_path / "book.txt").write_text(TEXT)
    jobs: list[Job] = []

    def start(*words: str) -> Job:
        jobs.append(Job(tmp_path, shell, *words))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_job_that_is_told_to_end_saves_and_goes_on_with_the_same_bits(start, whole, name):
    job = start("-n", "4", SCRIPT)
    job.wait_for_step(15)
    os.kill(job.process.pid, getattr(signal, f"SIG{name}"))
    assert job.end() == 85, job.output()
    assert f"run_mpi.sh: SIG{name}: asked the ranks to save and stop" in job.output()
    assert 15 <= last_step(job.run) < STEPS
    again = start("-n", "4", SCRIPT, "--resume", "auto")
    assert again.end() == 0, again.output()
    assert "go on after step" in again.output()
    assert outcome(job.run) == whole


def test_a_second_signal_ends_ranks_that_do_not_hear(start):
    job = start("-n", "4", SCRIPT)
    job.wait_for_step(5)
    for pid in job.ranks():
        os.kill(pid, signal.SIGSTOP)
    os.kill(job.process.pid, signal.SIGTERM)
    time.sleep(0.5)
    assert job.process.poll() is None
    began = time.monotonic()
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.end(20) == 143, job.output()
    assert time.monotonic() - began < 10


def test_a_killed_rank_starts_the_job_again_and_the_numbers_stay_the_same(start, whole):
    job = start("-n", "4", "--restarts", "3", SCRIPT)
    for step in (15, 35):
        job.wait_for_step(step)
        os.kill(job.ranks()[2], signal.SIGKILL)
    assert job.end() == 0, job.output()
    assert job.output().count("starting again from run/checkpoints/step-000000") == 2, job.output()
    assert outcome(job.run) == whole


def test_nothing_is_left_when_run_mpi_itself_is_killed(start):
    job = start("-n", "4", SCRIPT)
    job.wait_for_step(5)
    job.process.kill()
    assert job.end() == -signal.SIGKILL

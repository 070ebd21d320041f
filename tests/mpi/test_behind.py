"""A rank that is stopped, loops or sleeps is named by the time limit, with its place; slow ranks are left alone."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from mpi_launch import Launch, Run

pytestmark = pytest.mark.mpi
SCRIPT = Path(__file__).with_name("behind_script.py")
MARGIN = 5.0  # seconds after the limit within which the report must be there


class Ended(NamedTuple):
    """How a job ended: seconds from the fall to its report, and until all processes were gone."""

    run: Run
    reported: float
    gone: float


def fall(folder: Path, how: str, rank: int, limit: int, *flags: str) -> Ended:
    """Run a training of four ranks, one of which falls behind."""
    mark = folder / "mark"
    words = (how, str(rank), str(mark), str(limit), *flags)
    with Launch(4, sys.executable, str(SCRIPT), *words, timeout=60) as job:
        said = 0.0
        while job.process.poll() is None and not said:
            time.sleep(0.02)
            said = time.time() if "CommError" in job.output() else 0.0
        run = job.wait()
        end = time.time()
    fell = float(mark.read_text())
    return Ended(run, (said or end) - fell, end - fell)


def line_of(mark: str) -> str:
    """The place in the script that a comment names."""
    lines = SCRIPT.read_text().splitlines()
    return f"{SCRIPT.name}:{1 + next(at for at, line in enumerate(lines) if line.endswith(f'# HERE it {mark}'))}"


PLACE = {"loop": line_of("loops"), "sleep": line_of("sleeps"), "SIGSTOP": ""}


def judge(ended: Ended, how: str, rank: int, limit: int, folder: Path) -> None:
    """All that must hold."""
    run, output = ended.run, ended.run.output
    print(f"{how} of rank {rank}: reported after {ended.reported:.1f} s, all gone after {ended.gone:.1f} s")
    why = "stopped (SIGSTOP)" if how == "SIGSTOP" else "in no call"
    head = f"CommError: no answer for {limit} s (--timeout).  Rank {rank} is behind: it is {why}."
    assert output.count("CommError") == output.count(head) == 1, output
    assert run.code == 1, output
    assert not run.left_behind, output
    assert limit <= ended.reported < limit + MARGIN
    assert ended.gone < limit + MARGIN
    first, second = output[output.index(head) :].splitlines()[1:3]
    if how == "SIGSTOP":
        assert first.startswith(f"  rank {rank} is stopped, last seen at {SCRIPT.name}:"), output
    else:
        assert first.startswith(f"  rank {rank} runs at {PLACE[how]}, after "), output
    assert re.match(
        r"  ranks? [\d,]+ waits? in [a-z_ ]+ on \S+.*, call \d+, .* at \w+\.py:\d+, step 3 \(for \d s\)$", second
    ), output
    report = folder / "run" / "hang-report.txt"
    assert f"Last calls, the newest first; more of them: {report}." in output, output
    whole = report.read_text()
    for each in range(4):
        assert f"\nrank {each} " in whole, whole
    assert whole.count(" s ago\n") > output.count(" s ago\n")


def test_a_stopped_rank_is_said_to_be_stopped_and_goes_with_the_others(tmp_path: Path) -> None:
    judge(fall(tmp_path, "SIGSTOP", 1, 2), "SIGSTOP", 1, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", list(PLACE))
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_rank_that_does_not_go_on_is_named_and_the_job_ends(tmp_path: Path, how: str, rank: int) -> None:
    """C71."""
    judge(fall(tmp_path, how, rank, 5), how, rank, 5, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", list(PLACE))
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_it_is_named_too_where_ranks_wait_for_others_that_wait(tmp_path: Path, how: str, rank: int) -> None:
    judge(fall(tmp_path, how, rank, 5, *"--pp 4 --microbatches 3".split()), how, rank, 5, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--dp 4", "--pp 2 --microbatches 2"])
def test_slow_ranks_are_left_alone(mpirun: Callable[..., Run], tmp_path: Path, flags: str) -> None:
    """1,000 steps in which ranks are late by up to half of the limit now and then."""
    words = ("delays", "-", "1", "2", "--steps", "1000", "--run", str(tmp_path / "run"), *flags.split())
    run = mpirun(4, sys.executable, str(SCRIPT), *words, timeout=500).check()
    assert "CommError" not in run.output

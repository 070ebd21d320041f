"""Checked mode between real MPI ranks: tests/checks_checked.py in one launch, and mistakes that end the job."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi_launch import Run

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_checked

pytestmark = pytest.mark.mpi
SCRIPT = str(Path(__file__).with_name("mismatch_script.py"))
HERE = "mismatch_script.py:"


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [check.__name__ for check in checks_checked.CHECKS])
def test_checked(checks: Callable[[str, str, int], None], name: str, ranks: int) -> None:
    checks("checks_checked", name, ranks)


@pytest.mark.parametrize(
    ("scenario", "ranks", "code", "said"),
    [
        pytest.param(
            "another_op",
            2,
            2,
            ["on axis world, call 2: rank 0 all_reduce (4,) float64 sum at", "; rank 1 all_reduce (4,) float64 max at"],
            marks=pytest.mark.slow,
        ),
        (
            "another_verb_on_one_axis_of_a_mesh",
            4,
            2,
            ["on axis tp, call 2: rank 2 all_reduce (4,) float64 at", "; rank 3 all_gather (4,) float64 at"],
        ),
        (
            "another_count_in_flight",
            2,
            2,
            ["on axis world, call 2: rank 0 iall_reduce (4,) float64", "; rank 1 iall_reduce (1048576,) float64 at"],
        ),
        pytest.param(
            "another_count_in_flight_in_rank_order",
            2,
            2,
            ["on axis world, call 2: rank 0 iall_reduce (4,) float64", "; rank 1 iall_reduce (1048576,) float64 at"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "a_longer_message",
            2,
            2,
            ["rank 0 isend (1048576,) float64 to rank 1 tag 7 at", "; rank 1 irecv (4,) float64 from rank 0 tag 7 at"],
            marks=pytest.mark.slow,
        ),
        (
            "another_tag",
            2,
            1,
            [
                "rank 1 waits in recv on world from rank 0 of it, tag 2, call 1",
                "rank 0 waits in barrier on world, call 2",
            ],
        ),
        pytest.param(
            "another_sender",
            3,
            1,
            ["rank 1 waits in recv on world from rank 2 of it, call 1", "rank 2 waits in barrier on world, call 2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "all_send_first",
            3,
            1,
            [f"rank {rank} waits in send on world to rank {(rank + 1) % 3} of it, call 1" for rank in range(3)],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "all_receive_first",
            3,
            1,
            [f"rank {rank} waits in recv on world from rank {(rank - 1) % 3} of it, call 1" for rank in range(3)],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "nobody_sends_what_was_asked_for",
            2,
            1,
            [
                "rank 1 waits for irecv on world from rank 0 of it, call 1",
                "rank 0 waits in barrier on world, call 2",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_mistake_ends_the_job_within_ten_seconds_with_both_places(
    mpirun: Callable[..., Run], scenario: str, ranks: int, code: int, said: list[str]
) -> None:
    """C73.  The launch takes its own time."""
    run = mpirun(ranks, sys.executable, SCRIPT, scenario, timeout=40)
    assert run.code == code, run.output
    assert run.seconds < 15
    assert run.output.count("CollectiveMismatch: ") == 1, run.output
    assert run.output.count(HERE) >= max(2, len(said)), run.output
    assert run.output.count("Last common call: ") == 1, run.output
    assert "Traceback" not in run.output
    for part in said:
        assert part in run.output, run.output

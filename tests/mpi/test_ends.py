"""However a job ends, it ends: at once, on all ranks, with one clear message and the right exit code."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from kill_matrix import HOWS, PHASES, cases, few_cases, run_case
from mpi_launch import Launch, Run
from often import some

pytestmark = pytest.mark.mpi
SCRIPT = str(Path(__file__).with_name("end_script.py"))
Mpirun = Callable[..., Run]
QUICK = 15.0  # launch, a fault, at most 10 s


def test_the_few_cases_are_of_the_matrix_and_have_every_way_every_phase_and_all_three_ranks() -> None:
    assert len(set(cases())) == len(HOWS) * len(PHASES) * 3 == 324
    assert set(few_cases()) <= set(cases())
    ways, phases, ranks = (set(column) for column in zip(*few_cases(), strict=True))
    assert (ways, phases, ranks) == (set(HOWS), set(PHASES), {0, 1, 3})


@pytest.mark.parametrize(("how", "phase", "rank"), some(few_cases(), 2), ids=str)
def test_one_rank_dies_and_all_are_gone_within_ten_seconds(how: str, phase: str, rank: int, tmp_path: Path) -> None:
    """C72; all of its cases: python tests/mpi/kill_matrix.py."""
    outcome = run_case(how, phase, rank, tmp_path)
    assert not outcome.trouble, f"{outcome.trouble}\n{outcome.output}"


@pytest.mark.parametrize(
    ("scenario", "call"),
    [
        ("nobody_sends", "recv on world from rank 1 of it, call 1, (4,) float64"),
        ("nobody_receives", "send on world to rank 1 of it, call 1, (2097152,) float64"),
        ("nobody_answers_a_request", "iall_reduce on world, call 2, (4,) float64"),
        ("nobody_makes_the_axis", "group on the making of axis tp, call 1"),
    ],
)
def test_a_rank_that_leaves_early_with_code_0_ends_whoever_waits_for_it(
    mpirun: Mpirun, scenario: str, call: str
) -> None:
    run = mpirun(2, sys.executable, SCRIPT, scenario, timeout=30)
    assert run.code == 1
    assert run.seconds < QUICK
    assert f"CommError: rank 1 left, but rank 0 waits for it in {call}" in run.output
    assert "at end_script.py:" in run.output


def test_ranks_that_wait_for_each_other_are_told_so_at_once(mpirun: Mpirun) -> None:
    run = mpirun(2, sys.executable, SCRIPT, "ranks_wait_for_each_other", timeout=30)
    assert run.code == 1
    assert run.seconds < QUICK
    assert run.output.count("CollectiveMismatch: ranks wait for each other, none can go on.") == 1
    assert "rank 0 waits in all_reduce on world" in run.output
    assert "rank 1 waits in all_reduce on dp" in run.output


def test_a_user_error_that_all_ranks_raise_is_printed_once_without_traceback(mpirun: Mpirun) -> None:
    run = mpirun(4, sys.executable, SCRIPT, "all_raise_a_user_error", timeout=30)
    assert run.code == 2
    assert run.output.count("MeshError: --pp 3 needs 3 ranks") == 1
    assert "Traceback" not in run.output
    assert "MPI_ABORT was invoked" not in run.output  # Open MPI's ranks left in good order


def test_a_user_error_of_one_rank_ends_all_and_is_the_only_message(mpirun: Mpirun) -> None:
    run = mpirun(4, sys.executable, SCRIPT, "one_raises_a_user_error", timeout=30)
    assert run.code == 2
    assert run.seconds < QUICK
    assert run.output.count("MeshError: only rank 1 sees it") == 1
    assert "CommError" not in run.output
    assert "Traceback" not in run.output


def test_ranks_that_all_exit_with_one_code_end_with_that_code(mpirun: Mpirun) -> None:
    run = mpirun(4, sys.executable, SCRIPT, "all_exit_with_85", timeout=30)
    assert run.code == 85
    assert "Error:" not in run.output


@pytest.mark.parametrize(
    ("scenario", "error"),
    [("interrupted", "KeyboardInterrupt"), ("a_thread_fails", "ZeroDivisionError")],
)
def test_an_exception_of_any_kind_or_thread_is_printed_once_with_its_rank(
    mpirun: Mpirun, scenario: str, error: str
) -> None:
    run = mpirun(4, sys.executable, SCRIPT, scenario, timeout=30)
    assert run.code not in (0, None)
    assert run.seconds < QUICK
    assert run.output.count("Traceback (most recent call last)") == 1
    assert "[rank 1] Traceback" in run.output
    assert error in run.output


def test_a_hard_exit_with_0_is_not_taken_for_success(mpirun: Mpirun) -> None:
    """MPICH's launcher alone would end the others and report 0."""
    run = mpirun(4, sys.executable, SCRIPT, "hard_exit_with_0", timeout=30)
    assert run.code not in (0, None)
    assert run.seconds < QUICK
    assert "rank 1 left with exit code 0 at end_script.py:" in run.output


def test_waiting_beyond_the_limit_reports_where_every_rank_is(mpirun: Mpirun) -> None:
    run = mpirun(4, sys.executable, SCRIPT, "hangs", timeout=30)
    assert run.code == 1
    assert run.seconds < QUICK
    assert "CommError: no answer for 3 s (--timeout).  Rank 1 is behind: it is in no call." in run.output
    assert "ranks 0,2,3 wait in all_reduce on world, call 2, (4, 3) float32, at end_script.py:" in run.output
    assert re.search(
        r"rank 1 runs at end_script\.py:\d+, after all_reduce on world, call 1, \(4,\) float64", run.output
    )


def test_a_rank_that_never_starts_ends_the_others_after_the_start_timeout(mpirun: Mpirun) -> None:
    run = mpirun(4, sys.executable, SCRIPT, "one_never_starts", timeout=30, env={"MPITRAIN_START_TIMEOUT": "4"})
    assert run.code not in (0, None)
    assert run.seconds < QUICK
    assert run.output.count("LaunchError: not all 4 ranks that the launcher announced") == 1


def test_ranks_die_with_their_launcher_and_leave_nothing_in_shared_memory(launcher: type[Launch]) -> None:
    def board_of(rank: int) -> str:
        mapped = Path(f"/proc/{rank}/maps").read_text().splitlines()
        (path,) = {line.split(maxsplit=5)[5] for line in mapped if "/mpitrain-board-" in line}
        return path

    with launcher(4, sys.executable, SCRIPT, "sleeps", timeout=60) as job:
        deadline = time.monotonic() + 30
        while job.output().count("under way") < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(job.ranks()) == 4, job.output()
        (board,) = {board_of(rank) for rank in job.ranks()}
        assert board.endswith(" (deleted)")  # no name even while they run
        job.process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        while job.ranks() and time.monotonic() - killed < 2:  # Open MPI's ranks alone would notice after 4 s
            time.sleep(0.05)
        assert not job.ranks()


def test_early_leavers_slow_ranks_and_caught_exits_are_no_reason_to_end(mpirun: Mpirun) -> None:
    run = mpirun(3, sys.executable, SCRIPT, "all_is_well", timeout=40).check()
    assert run.output.count("told, not fatal") >= 3  # MPICH's launcher tags the pieces of a line
    assert "Error" not in run.output.replace("LookupError", "")


def test_one_rank_under_a_launcher_ends_like_any_program(mpirun: Mpirun, tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text("import sys; from mpitrain.comm.world import world; world(); sys.exit(int(sys.argv[1]))")
    assert mpirun(1, sys.executable, str(script), "0", timeout=30).check().output == ""
    assert mpirun(1, sys.executable, str(script), "3", timeout=30).code == 3


@pytest.mark.parametrize(("fault", "code"), [("exit code=3", 3), ("raise", 1)], ids=str)
def test_the_guard_works_under_mpi4py_s_own_runner_too(mpirun: Mpirun, tmp_path: Path, fault: str, code: int) -> None:
    script = str(Path(__file__).with_name("kill_script.py"))
    word, *keys = fault.split()
    text = f"{word} rank=1 at=action:F step=2 {' '.join(keys)}"
    command = (sys.executable, "-m", "mpi4py", script, str(tmp_path / "run"))
    run = mpirun(2, *command, timeout=30, env={"MPITRAIN_FAULTS": text})
    assert run.code == code
    assert run.seconds < QUICK
    assert run.output.count("Traceback") == run.output.count("[rank 1, step 2] Traceback") == (word == "raise")


@pytest.mark.parametrize(("runner", "codes"), [((), range(1, 256)), (("-m", "mpi4py"), [4])], ids=["python", "mpi4py"])
def test_an_exit_that_is_raised_by_hand_ends_all(mpirun: Mpirun, runner: tuple[str, ...], codes: Sequence[int]) -> None:
    """Python tells nobody the code of a SystemExit that ends it; mpi4py's runner does."""
    run = mpirun(2, sys.executable, *runner, SCRIPT, "one_raises_system_exit", timeout=30)
    assert run.code in codes
    assert run.seconds < QUICK
    assert "Traceback" not in run.output

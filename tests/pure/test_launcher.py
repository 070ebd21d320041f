"""What launchers announce, and a world that disagrees (C79)."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys

import pytest

from mpitrain.comm.launcher import announced, check_size, is_task_of_slurm, one_host
from mpitrain.comm.world import world
from mpitrain.errors import LaunchError

STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, ("OMPI_COMM_WORLD_SIZE", 8)),
        ({"PMI_SIZE": "2"}, ("PMI_SIZE", 2)),
        (STEP, ("SLURM_NTASKS", 4)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, ("SLURM_STEP_NUM_TASKS", 2)),
        ({"SLURM_NTASKS": "4"}, None),  # a shell inside an allocation: nothing was launched
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({**STEP, "OMPI_COMM_WORLD_SIZE": "2"}, ("OMPI_COMM_WORLD_SIZE", 2)),  # mpirun inside a step
        ({"PMIX_RANK": "3"}, ("PMIX_RANK", 4)),
        ({"PMIX_RANK": "0"}, None),
        ({"MPITRAIN_NP": "4"}, ("MPITRAIN_NP", 4)),
        ({"MPITRAIN_NP": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, None),
    ],
)
def test_announced(environ: dict[str, str], found: tuple[str, int] | None) -> None:
    assert announced(environ) == found


@pytest.mark.parametrize(
    ("environ", "size", "words"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 1, ["started 4 ranks (OMPI_COMM_WORLD_SIZE=4)", "MPI sees 1", "train alone"]),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 1, ["belongs to Open MPI"]),
        ({"PMI_SIZE": "4"}, 1, ["PMI_SIZE=4", "belongs to MPICH", "./run_mpi.sh -n 4"]),
        ({"PMI_SIZE": "4"}, 8, ["MPI sees 8", "do not belong together"]),
        (STEP, 1, ["SLURM_NTASKS=4", "srun --mpi=pmix", "srun --mpi=list"]),
        ({"PMIX_RANK": "2"}, 1, ["at least 3 ranks (PMIX_RANK=2)"]),
        ({"MPITRAIN_NP": "4"}, 1, ["MPITRAIN_NP=4", "./run_mpi.sh -n 4"]),
        ({"OMPI_COMM_WORLD_SIZE": "2", "MPITRAIN_NP": "4"}, 2, ["MPITRAIN_NP=4 asks for 4 ranks, but MPI sees 2"]),
    ],
)  # fmt: skip
def test_a_world_of_another_size_is_refused(environ: dict[str, str], size: int, words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        check_size(environ, size)
    text = str(caught.value)
    assert [word for word in words if word not in text] == []
    assert len(text.splitlines()) <= 5


@pytest.mark.parametrize("environ", [{}, {"OMPI_COMM_WORLD_SIZE": "4", "MPITRAIN_NP": "4"}, {"PMIX_RANK": "2"}, STEP])
def test_a_world_of_the_announced_size_is_welcome(environ: dict[str, str]) -> None:
    check_size(environ, 4)


@pytest.mark.parametrize(
    ("environ", "shared"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, False),
        ({"PMI_SIZE": "8"}, False),
        ({}, False),
    ],
)
def test_only_the_launcher_of_open_mpi_says_that_all_ranks_share_a_host(environ: dict[str, str], shared: bool) -> None:
    assert one_host(environ) is shared


def test_a_task_that_slurm_started_has_its_step_daemon_for_a_parent() -> None:
    assert not is_task_of_slurm(os.getpid())
    assert not is_task_of_slurm(2**31 - 1)  # nobody
    code = "open('/proc/self/comm', 'w').write('slurmstepd'); import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert is_task_of_slurm(parent.pid)


def test_a_world_of_one_imports_no_mpi_and_is_light() -> None:
    code = (
        "import sys\nfrom mpitrain.comm.world import world\nw = world()\n"
        "assert (w.kind, w.size, w.rank) == ('alone', 1, 0)\n"
        "print([name for name in ('mpi4py', 'h5py', 'threadpoolctl') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], env=_clean(), capture_output=True, text=True, timeout=60)
    assert run.stdout == "[]\n", run.stderr


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPITRAIN_NP"])
def test_a_rank_whose_launcher_is_of_another_mpi_stops_at_once(variable: str) -> None:
    code = "from mpitrain.comm.world import world\nworld()\nprint('trains alone')"
    environ = {**_clean(), variable: "4", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert "LaunchError" in run.stderr
    assert f"{variable}=4" in run.stderr
    assert "trains alone" not in run.stdout


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MPITRAIN_NP": "4"}, "LaunchError: the launcher started 4 ranks (MPITRAIN_NP=4)"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, "LaunchError: the launcher started 4 ranks"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, ""),
        ({"MPITRAIN_NP": "4", "MPITRAIN_START_TIMEOUT": "soon"}, "LaunchError: MPITRAIN_START_TIMEOUT=soon: must be"),
    ],
)
def test_training_with_ranks_that_do_not_see_each_other_ends_with_one_message(
    variables: dict[str, str], said: str
) -> None:
    environ = {**_clean(), **variables, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [sys.executable, "-m", "mpitrain", "train", "--steps", "1"]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.startswith(said) if said else not run.stderr
    assert "Traceback" not in run.stderr


def test_deterministic_mode_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("MPITRAIN_DETERMINISTIC", text)
        assert contextvars.Context().run(lambda: world().deterministic) is expected


def _clean() -> dict[str, str]:
    """This process' environment without a launcher's words."""
    words = ("OMPI_", "PMI", "SLURM_", "MV2_", "MPITRAIN_")
    return {name: value for name, value in os.environ.items() if not name.startswith(words)}

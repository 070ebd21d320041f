"""How commands are run as a reader would type them: this Python, no installation, any number of ranks on any cores."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/mpi"))

from mpi_launch import find_mpirun  # noqa: E402
from this_python import shell_of_this_python  # noqa: E402


@pytest.fixture(autouse=True)
def _needs_mpirun(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("mpi") and find_mpirun() is None:
        pytest.skip('no mpirun beside this python nor on PATH: pip install "mpitrain[mpi]" or "mpitrain[mpich]"')


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a shell in which `python`, `mpirun`, `mpitrain` and `run_mpi.sh` are this environment's."""
    return shell_of_this_python(tmp_path_factory.mktemp("environment"))


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

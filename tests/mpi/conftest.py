"""Fixtures for tests that launch mpirun: `mpirun` (a launch), `launcher` (one under way), `checks` (many in one).

A launch costs 1-4 s, so checks that need ranks but no death are gathered: a module `tests/checks_NAME.py` holds a
list CHECKS of functions of the world, which every rank calls in the same order; worker.py runs them all in one launch,
and each is a test of its own.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi_launch import Launch, Run, find_mpirun, launch, vendor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where tests/checks_NAME.py are

WORKER = str(Path(__file__).with_name("worker.py"))


def pytest_report_header() -> str:
    mpirun = find_mpirun()
    return f"mpi: {mpirun} ({vendor(mpirun)})" if mpirun else "mpi: no mpirun"


@pytest.fixture(autouse=True)
def _needs_mpirun(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("mpi") and find_mpirun() is None:
        pytest.skip('no mpirun beside this python nor on PATH: pip install "mpitrain[mpi]" or "mpitrain[mpich]"')


@pytest.fixture
def mpirun() -> Callable[..., Run]:
    """`mpirun(4, sys.executable, "script.py", "arg", timeout=60, env={})` -> Run."""
    return launch


@pytest.fixture
def launcher() -> type[Launch]:
    """The class of a launch that the test itself steers."""
    return Launch


@pytest.fixture(scope="session")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """`checks("checks_comm", name, ranks)`: fails if that check failed on a rank.

    All checks of a module (or those of another list in it: `which="MORE"`) run in one launch, in one more for every
    check that fails, and the results serve all tests of the session.  Other words are set in the ranks' environment.
    """
    known: dict[object, dict[str, str]] = {}

    def check(module: str, name: str, ranks: int, which: str = "CHECKS", **env: str) -> None:
        key = (module, ranks, which, *env.items())
        if key not in known:
            known[key] = _run_all(module, which, ranks, env, tmp_path_factory)
        trouble = known[key][name]
        assert not trouble, f"{name} on {ranks} ranks:\n{trouble}"

    return check


def _run_all(
    module: str, which: str, ranks: int, env: dict[str, str], folders: pytest.TempPathFactory
) -> dict[str, str]:
    """Check -> "" if it passed on all ranks, else what went wrong."""
    names = [check.__name__ for check in getattr(importlib.import_module(module), which)]
    verdicts: dict[str, str] = {}
    while len(verdicts) < len(names):
        folder = folders.mktemp(module)
        words = (module, which, str(folder), str(len(verdicts)))
        run = launch(ranks, sys.executable, WORKER, *words, timeout=150, env=env)
        results = [_read(folder / f"rank-{rank}.jsonl") for rank in range(ranks)]
        for name in names[len(verdicts) :]:
            said = [result.get(name) for result in results]
            if all(trouble == "" for trouble in said):
                verdicts[name] = ""
                continue
            lines = [
                f"rank {rank}: {'did not end' if text is None else text}"
                for rank, text in enumerate(said)
                if text != ""
            ]
            verdicts[name] = "\n".join([*lines, f"launch: exit code {run.code} after {run.seconds:.1f} s", run.output])
            break
        if run.code is None:  # a hang: do not wait for more of them
            for name in names[len(verdicts) :]:
                verdicts[name] = "not run: a check before it did not end"
    return verdicts


def _read(path: Path) -> dict[str, str]:
    return dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}

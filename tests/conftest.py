"""What holds for all tests: how many run at once, which are left out, and one BLAS thread, as in each rank of many."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):  # before NumPy is imported
    os.environ.setdefault(name, "1")

# Set in many containers; each of some hundred child processes would then compile all that it imports of mpitrain.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that starts the tests in the background has them ignore these; what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)


MOST_WORKERS = 4  # each has a core for its own tests, but some of those start eight processes


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """How many processes `-n auto` shares the tests among, as `./run_mpi.sh test` does: a few cores, one each.

    Files that are named are not worth their start; output that is not captured (-s) is wanted as it comes, in order.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist's own answer
    from mpitrain.doctor.machine import cores_allowed

    cores, _ = cores_allowed()
    few = all(Path(arg.partition("::")[0]).is_file() for arg in config.args)
    return 0 if few or cores == 1 or config.option.capture == "no" else min(cores, MOST_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves slow tests out, unless the -m expression speaks of them or the command line names the test itself."""
    if "slow" in config.option.markexpr:
        return
    named = [(Path(path).resolve(), name) for path, _, name in (arg.partition("::") for arg in config.args) if name]

    def is_wanted(item: pytest.Item) -> bool:
        name = item.nodeid.partition("::")[2]
        return item.get_closest_marker("slow") is None or any(
            item.path == path and name.startswith(wanted) for path, wanted in named
        )

    left_out = [item for item in items if not is_wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_wanted(item)]


@pytest.fixture(autouse=True)
def kernels_of_the_process() -> Iterator[None]:
    """Whatever level of kernels a test selects, or its ranks agree on, the next one starts with the process's own."""
    yield
    from mpitrain import kernels

    kernels.select(None)


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Encoded texts of tests are not kept in the home of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPITRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield

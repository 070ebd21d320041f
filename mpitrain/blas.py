"""How NumPy's BLAS computes: with which code, and on how many threads.

On one family of processors OpenBLAS's own choice of code is not the fastest.

OpenBLAS chooses by the instructions that a processor has.  AMD's Zen 4 has AVX-512 but runs such an instruction as two
halves, and there OpenBLAS's AVX2 code multiplies matrices about 6 % faster than its AVX-512 code (docs/performance.md).
The choice is made when NumPy is loaded, by an environment variable, so this module is imported before NumPy is.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "OPENBLAS_CORETYPE"
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
"""Variables by which a user says how many threads a BLAS has; read when it is loaded."""
NUMPY_WAS_LOADED = "numpy" in sys.modules
"""Whether somebody loaded NumPy before: then its choice stands."""
CPUINFO = Path("/proc/cpuinfo")


def load_numpy() -> None:
    """Load NumPy with the faster code on a Zen 4.

    Nothing happens where NumPy is loaded already, or where the user has named a core type.  The variable is gone again
    afterwards, so that other libraries and child processes make their own choice.
    """
    if "numpy" in sys.modules or VARIABLE in os.environ or not is_zen4():
        return
    os.environ[VARIABLE] = "Haswell"  # its AVX2 code
    try:
        import numpy  # noqa: F401 - for what it does
    finally:
        del os.environ[VARIABLE]


def one_thread() -> None:
    """One BLAS thread in this process, unless the user has said otherwise: where ranks share cores, more only wait.

    NumPy has been loaded with the package, so its threads are taken away afterwards.
    """
    if any(name in os.environ for name in THREADS):
        return
    os.environ.update(dict.fromkeys(THREADS, "1"))  # for what is loaded later
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)


def is_zen4() -> bool:
    """An AMD processor of family 25 with AVX-512: Zen 3 shares the family without it, Zen 5 has a family of its own."""
    try:
        with CPUINFO.open(encoding="utf-8") as lines:
            first = dict(part for line in itertools.islice(lines, 30) if len(part := _fields(line)) == 2)
    except OSError:
        return False
    return (
        first.get("vendor_id") == "AuthenticAMD"
        and first.get("cpu family") == "25"
        and "avx512f" in first.get("flags", "").split()
    )


def _fields(line: str) -> list[str]:
    return [part.strip() for part in line.split(":", 1)]


def library() -> str:
    """Name, version and processor type of the BLAS library that NumPy uses, as far as it says."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return "unknown"
    found: dict[str, Any] = next((pool for pool in threadpool_info() if pool["user_api"] == "blas"), {})
    return " ".join(str(found.get(key)) for key in ("internal_api", "version", "architecture"))

"""A shell whose `python`, `mpirun`, `mpitrain` and `run_mpi.sh` are those of this Python; it installs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mpi_launch import ROOT, environment


def shell_of_this_python(place: Path) -> dict[str, str]:
    """Its variables, for ranks in excess of the cores on this machine; what they name is written into `place`."""
    (place / "mpitrain").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mpitrain "$@"\n')
    (place / "mpitrain").chmod(0o755)
    venv = Path(sys.prefix)
    if not (venv / ".mpitrain-installed-test").exists():
        venv = _stand_in(place / "venv")
    return environment(
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

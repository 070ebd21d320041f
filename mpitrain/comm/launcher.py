"""What the launcher told this process: how many ranks it started.

mpirun and srun leave the number of ranks in the environment.  If MPI then says otherwise, launcher and MPI library do
not belong together, and N processes would each train alone and overwrite each other's files.  So the two are compared
before the first message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mpitrain.errors import LaunchError
from mpitrain.options import show

# Open MPI; MPICH, Intel MPI and Slurm's pmi2; MVAPICH.  mpirun inside a Slurm step sets its own beside Slurm's.
_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_RANK = ("PMIX_RANK", "PMI_RANK")
_DIGITS = re.compile("[0-9]{1,9}")  # str.isdigit takes more for a digit than int does


def announced(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The number of ranks that was started, and the variable that says so.

    Returns:
        (variable, number); None if no launcher is to be seen.  A rank number above 0 without a size (PMIX_RANK=3)
        means at least that many and one.
    """
    for name in _MPIRUN:
        size = _number(environ, name)
        if size:
            return name, size
    if "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ:
        for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
            size = _number(environ, name)
            if size > 1:
                return name, size
            if size:
                break
    for name in _RANK:
        rank = _number(environ, name)
        if rank:
            return name, rank + 1
    size = _number(environ, "MPITRAIN_NP")
    return ("MPITRAIN_NP", size) if size > 1 else None


def is_first(environ: Mapping[str, str]) -> bool:
    """Whether this process is the first of its job, as far as its launcher says; True where nothing says anything."""
    for name in ("OMPI_COMM_WORLD_RANK", *_RANK, "MV2_COMM_WORLD_RANK", "SLURM_PROCID"):
        if _DIGITS.fullmatch(environ.get(name, "")):
            return int(environ[name]) == 0
    return True


def one_host(environ: Mapping[str, str]) -> bool:
    """Whether Open MPI's launcher says that all ranks share this host."""
    size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    return size > 0 and size == _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")


def is_task_of_slurm(parent: int) -> bool:
    """Whether that process is the one by which Slurm watches the tasks of a step: srun has started us, not mpirun."""
    try:
        with open(f"/proc/{parent}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().startswith("slurmstepd")
    except OSError:  # not Linux
        return False


def check_size(environ: Mapping[str, str], size: int) -> None:
    """Refuse a world whose size is not what the launcher started.

    Args:
        environ: this process' environment.
        size: ranks that MPI sees; 1 without MPI.

    Raises:
        LaunchError: they disagree; says which flag to check.
    """
    found = announced(environ)
    wanted = _number(environ, "MPITRAIN_NP")
    if not wanted and environ.get("MPITRAIN_NP"):
        raise LaunchError(
            f"MPITRAIN_NP={show(environ['MPITRAIN_NP'])}: must be the number of ranks that were started.\n"
            "  Unset it, or start with ./run_mpi.sh -n RANKS, which sets it."
        )
    if found is not None and (found[1] > size or (found[1] < size and found[0] not in _RANK)):
        raise LaunchError(
            f"the launcher started {_at_least(found)} ranks ({found[0]}={environ[found[0]]}), but MPI sees {size}:"
            f" {'each rank would train alone' if size == 1 else 'they do not belong together'}.\n  {_way_out(found)}"
        )
    if wanted and wanted != size:
        raise LaunchError(
            f"MPITRAIN_NP={wanted} asks for {wanted} ranks, but MPI sees {size}.\n"
            f"  Run: ./run_mpi.sh -n {wanted} ...   or unset MPITRAIN_NP."
        )


def _at_least(found: tuple[str, int]) -> str:
    return f"at least {found[1]}" if found[0] in _RANK else str(found[1])


def _way_out(found: tuple[str, int]) -> str:
    name, size = found
    if name.startswith("SLURM"):
        return (
            "Check srun's --mpi flag: `srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH (`srun --mpi=list`\n"
            f"  shows what there is), or start with the mpirun of this environment: ./run_mpi.sh -n {size} ..."
        )
    if name == "MPITRAIN_NP":
        return f"Run: ./run_mpi.sh -n {size} ...   or unset MPITRAIN_NP."
    other = "Open MPI" if name.startswith(("OMPI", "PMIX")) else "MPICH"
    return (
        f"This mpirun belongs to {other}, mpi4py is using another MPI.  Check `which mpirun`, or srun's --mpi flag;\n"
        f"  use the mpirun that came with this environment's MPI: ./run_mpi.sh -n {size} ..."
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    return int(text) if _DIGITS.fullmatch(text) else 0

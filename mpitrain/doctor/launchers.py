"""Who starts ranks here: the MPI library, its mpirun, the slots that it counts, and Slurm."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from mpitrain.doctor.ask import Finding, ask, ask_python, outside_of_mpi
from mpitrain.doctor.machine import cores_allowed

ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
UNBOUND = {  # Open MPI 5, then Open MPI 4
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


def launcher() -> str | None:
    """The mpirun on PATH, else the one beside this Python."""
    beside = Path(sys.executable).with_name("mpirun")
    return shutil.which("mpirun") or (str(beside) if beside.exists() else None)


def in_allocation() -> bool:
    """Whether a scheduler decides here what runs where."""
    return any(os.environ.get(name) for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PJM_JOBID"))


def check_mpi() -> list[Finding]:
    """The MPI library, its launcher, whether they belong together, and how many ranks the launcher starts unasked."""
    install = "./run_mpi.sh doctor   or: python -m pip install 'mpitrain[mpi]'"
    alone = "; training runs on one rank, or on threads with `mpitrain local`"
    program = "import mpi4py; mpi4py.rc.initialize = False\nfrom mpi4py import MPI\n"
    program += "print(mpi4py.__version__ + '\\n' + ' '.join(MPI.Get_library_version().split()))"
    answer = ask_python(program, 20, outside_of_mpi())
    if answer.code != 0:
        return [Finding("MPI", "warn", f"none: {answer.last_line}{alone}", install)]
    version, library = answer.text.splitlines()[-2:]
    library = library.replace("MPICH Version:", "MPICH").split(",")[0].split(" MPICH Release")[0].strip()
    findings = [Finding("MPI", "ok", f"{library}, through mpi4py {version}")]
    mpirun = launcher()
    if mpirun is None:
        fix = "load your cluster's MPI (module load ...)   or: " + install
        return [*findings, Finding("launcher", "warn", f"no mpirun on PATH or beside this Python{alone}", fix)]
    if shutil.which("mpirun") is None:
        findings.append(Finding("PATH", "note", f"{mpirun} is not on it", f'export PATH="{Path(mpirun).parent}:$PATH"'))
    is_open_mpi = "Open MPI" in library
    if is_open_mpi and os.geteuid() == 0 and not all(os.environ.get(name) for name in ROOT):
        fix = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1   (run_mpi.sh does)"
        findings.append(Finding("root", "note", "Open MPI's mpirun refuses to run as root", fix))
    if is_open_mpi and not os.environ.get("HOME"):
        findings.append(
            Finding("HOME", "note", "not set; Open MPI refuses to start", "export HOME=~   (run_mpi.sh does)")
        )
    findings.append(try_launch(mpirun, library))
    if not in_allocation():
        findings.append(try_slots(mpirun))
    return findings


def try_launch(mpirun: str, library: str) -> Finding:
    """Two ranks add two numbers: the shortest proof that launcher and library belong together."""
    started = time.monotonic()
    settings = ROOT | ({} if in_allocation() else UNBOUND) | {"HOME": os.environ.get("HOME") or tempfile.gettempdir()}
    # In one write each: lines that are written in pieces come out mixed.
    program = "import os; from mpi4py import MPI; os.write(1, b'world of %d\\n' % MPI.COMM_WORLD.allreduce(1))"
    answer = ask([mpirun, "-n", "2", sys.executable, "-c", program], 60, outside_of_mpi(**settings))
    seconds = time.monotonic() - started
    if answer.code == 0 and answer.text.count("world of 2") == 2:
        return Finding("launcher", "ok", f"{mpirun}: two ranks met in {seconds:.1f} s")
    if "world of 1" in answer.text:
        beside = Path(sys.executable).with_name("mpirun")
        fix = f"use the mpirun of {library}: which -a mpirun   (run_mpi.sh picks it)"
        if beside.exists() and not beside.samefile(mpirun):
            fix = f'export PATH="{beside.parent}:$PATH"   (run_mpi.sh does)'
        return Finding(
            "launcher", "bad", f"{mpirun} starts ranks that do not find each other: it belongs to another MPI", fix
        )
    return Finding(
        "launcher", "bad", f"{mpirun} cannot start two ranks: {answer.last_line}", f"{mpirun} -n 2 hostname   says more"
    )


def try_slots(mpirun: str) -> Finding:
    """Whether mpirun starts more ranks than cores without being told to."""
    cores, _ = cores_allowed()
    env = {name: value for name, value in outside_of_mpi(**ROOT).items() if name not in UNBOUND}
    env.setdefault("HOME", tempfile.gettempdir())
    if cores > 64:
        return Finding("slots", "ok", f"not tried with more than {cores} ranks")
    answer = ask([mpirun, "-n", str(cores + 1), "true"], 30, env)
    if answer.code == 0:
        return Finding("slots", "ok", f"{cores + 1} ranks start on {cores} cores without a setting")
    if answer.code is None:
        return Finding(
            "slots", "warn", f"mpirun -n {cores + 1} true: no answer in time", f"{mpirun} -n {cores + 1} true"
        )
    if all(os.environ.get(name) == UNBOUND[name] for name in list(UNBOUND)[:2]):
        return Finding("slots", "ok", "any number of ranks (the oversubscription settings of run_mpi.sh are in force)")
    fix = f"mpirun --oversubscribe --bind-to none -n {cores + 1} ...   (run_mpi.sh sets it)"
    return Finding("slots", "note", f"mpirun refuses more ranks than cores ({cores}) unless told", fix)


def check_slurm() -> list[Finding]:
    """The Slurm job around this process, and how srun would connect the ranks."""
    names = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_PER_TASK", "SLURM_STEP_ID")
    seen = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
    if shutil.which("srun") is None:
        return [Finding("Slurm", "warn" if seen else "ok", f"no srun on PATH{': ' if seen else ''}{' '.join(seen)}")]
    answer = ask(["srun", "--mpi=list"], 10)
    kinds = " ".join(word for word in answer.text.replace(",", " ").split() if word.startswith(("pmi", "cray")))
    job = " ".join(seen) or "srun is here, but no job is around this process"
    return [Finding("Slurm", "ok", f"{job}; srun --mpi={'|'.join(kinds.split()) or answer.last_line}")]

"""What the machine is: Python, NumPy, cores, memory, HDF5 and the current folder."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mpitrain import kernels
from mpitrain.doctor.ask import Finding, ask_python
from mpitrain.errors import ConfigError

MIB = 2**20
GIB = 2**30
SMALL_SHARED_MEMORY = 64 * MIB  # eight ranks of either MPI still start with this much (and not with 4 MiB)


def cores_allowed() -> tuple[int, str]:
    """The number of cores that this process may use, and what limits it."""
    installed = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else installed
    limit = "all of this machine" if allowed == installed else f"of {installed}; the affinity mask allows no more"
    quota, period = None, 100000
    try:
        first, second = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        quota, period = (None if first == "max" else int(first)), int(second)
    except (OSError, ValueError):
        try:
            quota = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
            period = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            pass
    if quota and quota > 0 and quota / period < allowed:
        return max(1, quota // period), f"of {installed}; the container's quota is {quota / period:g} cores"
    return allowed, limit


def check_python() -> list[Finding]:
    """This Python."""
    text = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    return [Finding("Python", "ok", text)]


def check_numpy() -> list[Finding]:
    """NumPy, its BLAS, and how many threads a product of matrices would use."""
    program = """
import json, numpy
found = {"numpy": numpy.__version__, "blas": "unknown BLAS", "threads": None}
try:
    blas = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
    found["blas"] = " ".join(str(blas.get(k, "")) for k in ("name", "version")).strip()
except Exception: pass
try:
    import threadpoolctl
    numpy.ones((2, 2)) @ numpy.ones((2, 2))
    pools = [p for p in threadpoolctl.threadpool_info() if p["user_api"] == "blas"]
    found["threads"] = max(p["num_threads"] for p in pools)
    found["blas"] = f"{pools[0]['internal_api']} {pools[0]['version']} ({pools[0].get('architecture')})"
except Exception: pass
print(json.dumps(found))
"""
    answer = ask_python(program, 30)
    if answer.code != 0:
        return [Finding("NumPy", "bad", f"does not work: {answer.last_line}", "python -m pip install --upgrade numpy")]
    found = json.loads(answer.text.splitlines()[-1])
    text, threads = f"{found['numpy']}, {found['blas']}", found["threads"]
    if threads is None:
        return [Finding("NumPy", "ok", f"{text}; threads unknown without threadpoolctl")]
    if threads > 1:
        fix = "export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1   (run_mpi.sh does)"
        return [
            Finding("NumPy", "note", f"{text}, {threads} threads in each rank: too many if ranks fill the cores", fix)
        ]
    return [Finding("NumPy", "ok", f"{text}, 1 thread in each rank")]


def check_cores() -> list[Finding]:
    """Cores and memory that this process may use, and how many processes it may start."""
    cores, limit = cores_allowed()
    findings = [Finding("cores", "ok", f"{cores}, {limit}")]
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
        allowance = Path("/sys/fs/cgroup/memory.max")
        most = allowance.read_text().strip() if allowance.exists() else "max"
        text = f"{free / GIB:.1f} GiB available" + (
            "" if most == "max" else f", the container allows {int(most) / GIB:.1f} GiB"
        )
        findings.append(
            Finding("memory", "ok" if free >= GIB else "warn", text, "" if free >= GIB else "use fewer ranks")
        )
    except (OSError, ValueError, KeyError):
        findings.append(Finding("memory", "note", "unknown: /proc/meminfo does not say"))
    processes, files = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE))
    tight = [n for n, limit in (("u", processes), ("n", files)) if 0 <= limit < 256]
    said = [str(n) if n != resource.RLIM_INFINITY else "unlimited" for n in (processes, files)]
    fix = "   ".join(f"ulimit -{name} 1024" for name in tight)
    findings.append(Finding("limits", "warn" if tight else "ok", f"{said[0]} processes, {said[1]} open files", fix))
    return findings


def check_shared_memory() -> list[Finding]:
    """Room in /dev/shm, through which the ranks of one host talk."""
    try:
        room = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return [Finding("/dev/shm", "warn", f"missing ({error.strerror})", "mount -t tmpfs -o size=1g tmpfs /dev/shm")]
    text = f"{room.free / MIB:,.0f} MiB free of {room.total / MIB:,.0f}"
    if room.free >= SMALL_SHARED_MEMORY:
        return [Finding("/dev/shm", "ok", text)]
    fix = "docker run --shm-size=1g ...; with Open MPI also: export OMPI_MCA_btl_sm_backing_directory=/tmp"
    return [Finding("/dev/shm", "warn", f"{text}: too little for many ranks", fix)]


def check_folder() -> list[Finding]:
    """Whether a run can be kept in the current folder: HDF5 works there, files can be locked, there is room."""
    program = """
import fcntl, json, os, tempfile
import h5py
found = {"h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version, "mpio": h5py.get_config().mpi}
found.update(write="", lock="")
try:
    with tempfile.TemporaryDirectory(dir=".", prefix=".mpitrain-doctor-") as folder:
        try:
            with open(os.path.join(folder, "lock"), "w") as file: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error: found["lock"] = str(error)
        path = os.path.join(folder, "x.h5")
        with h5py.File(path, "w") as file: file["x"] = [1.0]
        with h5py.File(path, "r") as file: assert file["x"][0] == 1.0
except OSError as error: found["write"] = str(error)
print(json.dumps(found))
"""
    answer = ask_python(program, 30)
    if answer.code is None:
        return [
            Finding(
                "folder", "bad", f"writing and locking a file in {os.getcwd()} gets no answer", "use another folder"
            )
        ]
    if answer.code != 0:
        return [
            Finding("HDF5", "bad", f"h5py does not work: {answer.last_line}", "python -m pip install --upgrade h5py")
        ]
    found = json.loads(answer.text.splitlines()[-1])
    driver = "with" if found["mpio"] else "without"
    findings = [Finding("HDF5", "ok", f"{found['hdf5']}, h5py {found['h5py']}, {driver} the MPI driver (not needed)")]
    free = shutil.disk_usage(".").free
    if found["write"]:
        fix = (
            "cd to a folder that you can write" if not os.access(".", os.W_OK) else "export HDF5_USE_FILE_LOCKING=FALSE"
        )
        findings.append(Finding("folder", "warn", f"no run can be kept in {os.getcwd()}: {found['write']}", fix))
    elif found["lock"]:
        text, fix = f"files in {os.getcwd()} cannot be locked: {found['lock']}", "export HDF5_USE_FILE_LOCKING=FALSE"
        findings.append(Finding("folder", "warn", text, fix))
    elif free < GIB:
        findings.append(
            Finding("folder", "warn", f"{free / MIB:.0f} MiB free in {os.getcwd()}", "make room, or use another folder")
        )
    else:
        findings.append(Finding("folder", "ok", f"{os.getcwd()}: can be written and locked, {free / GIB:.1f} GiB free"))
    return findings


def check_kernels() -> list[Finding]:
    """Which implementation of the fused numerics is in use."""
    try:
        name = kernels.wanted()
    except ConfigError as error:
        return [Finding("kernels", "bad", str(error), f"unset {kernels.VARIABLE}")]
    here = kernels.levels()
    if len(here) == 1:
        root = Path(kernels.__file__).parents[2]
        again = (
            f"-e {root}" if (root / "setup.py").exists() else "--force-reinstall --no-deps --no-binary :all: mpitrain"
        )
        fix = (
            "Debian, Ubuntu: sudo apt-get install gcc python3-dev   (elsewhere: a C compiler and Python's headers), "
            f"then: {sys.executable} -m pip install {again}"
        )
        text = "NumPy only, slower: the C kernels were not built (no C compiler, or no Python headers)"
        return [Finding("kernels", "note", text, fix)]
    chosen = f"; {kernels.VARIABLE} names it" if name != here[-1] else ""
    return [Finding("kernels", "ok", f"{name}, of {', '.join(here)}{chosen}")]


OF_EXTRAS = {"tokenizers": "hf", "safetensors": "hf", "tensorboardX": "tensorboard"}
"""Libraries that some options need, and the extra that brings each."""
OPTIONS_OF = "--tokenizer, mpitrain checkpoint import and export, --metrics tensorboard"


def check_extras() -> list[Finding]:
    """Which libraries are there that only some options need."""
    found, missing = [], []
    for name in OF_EXTRAS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if not missing:
        return [Finding("extras", "ok", ", ".join(found))]
    extras = ",".join(dict.fromkeys(OF_EXTRAS[name] for name in missing))
    fix = f"python -m pip install 'mpitrain[{extras}]'   (if you want what needs it: {OPTIONS_OF})"
    return [Finding("extras", "note", f"{', '.join(found) or 'none'}; not here: {', '.join(missing)}", fix)]

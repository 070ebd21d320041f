"""Start MPI, but not for ever: MPI_Init with a time limit.

MPI_Init returns when every rank has called it.  A rank that ends before that, even with exit code 0, leaves the others
inside, and mpi4py holds Python's lock there, so that no thread of ours could end them.  So MPI_Init_thread is called
through ctypes, which gives the lock away, from the same library that mpi4py has chosen and before mpi4py is loaded
(mpi4py then finds MPI running).  A timer thread watches the clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import threading
import time

from mpitrain.comm.launcher import announced
from mpitrain.comm.library_memory import forget_names

THREAD_MULTIPLE = 3  # in the ABIs of Open MPI and MPICH (and Intel MPI, MVAPICH, which follow MPICH)


def initialize(module: str, limit: float) -> bool:
    """Call MPI_Init_thread; if not all ranks arrive within `limit` seconds, say so and end this process.

    Args:
        module: path of mpi4py's compiled module, which is linked with the MPI library in use.
        limit: seconds.

    Returns:
        False if that module hides its MPI library: then mpi4py must start it, without a limit.

    Cost: 0.2 ... 2 s, most of it the MPI library's own start.
    """
    library = ctypes.CDLL(module)
    try:
        init = library.MPI_Init_thread
    except AttributeError:
        return False
    timer = threading.Timer(limit, _give_up, (limit,))
    timer.daemon = True
    timer.start()
    provided = ctypes.c_int()
    code = init(None, None, THREAD_MULTIPLE, ctypes.byref(provided))
    timer.cancel()
    if code != 0:
        sys.stderr.write(f"LaunchError: MPI_Init_thread failed with code {code}\n")
        sys.stderr.flush()
        os._exit(1)
    return True


def _give_up(limit: float) -> None:
    """End this process; the first on its host says why."""
    found = announced(os.environ)
    number = f"{found[1]} ranks that the launcher announced ({found[0]})" if found else "ranks"
    text = (
        f"LaunchError: not all {number} started within {limit:g} s.  A rank ended or hangs before it reached world(),\n"
        "  or the ranks were started by different commands.  Run the script with one rank to see its own error;\n"
        "  a slow start needs a larger --start-timeout (or MPITRAIN_START_TIMEOUT).\n"
    )
    claim = _claim_path()
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        first = True
    except FileExistsError:
        first = not _is_ours(claim)  # somebody else's file must not silence us
    except OSError:
        first = True  # no place to agree in: rather said twice than never
    if first:
        os.write(2, text.encode())
    time.sleep(1.0)  # the others of this host find the claim meanwhile
    if first:
        with contextlib.suppress(OSError):
            os.unlink(claim)
    forget_names()  # those who never came do not need them
    os._exit(1)


def _is_ours(path: str) -> bool:
    """Whether a rank of this user made the file; true of one that is gone again."""
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return True


def _claim_path() -> str:
    """A name that the ranks of one launcher on this host share, and no other job."""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/stat", encoding="utf-8", errors="replace") as file:
            born = file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        born = "0"
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return f"{folder}/mpitrain-start-{os.geteuid()}-{parent}-{born}"

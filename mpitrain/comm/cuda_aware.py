"""Whether an MPI library takes memory of a CUDA device: what it says of itself.

A library that does not, reads such an address as one of the host, and the process dies.  So it is asked before it is
given any, by the functions that libraries have for that.  They are no part of MPI's standard, and mpi4py has none:

    MPIX_GPU_query_support(0, &flag)     MPICH and what comes of it (Cray, MVAPICH): whether this run does
    MPIX_Query_cuda_support()            Open MPI, MPICH, MVAPICH: whether it was built to
"""

from __future__ import annotations

import ctypes

_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


def takes_device_memory(module: str) -> bool | None:
    """What the MPI library in use says; after MPI has started.

    Args:
        module: path of mpi4py's compiled module, which is linked with that library.

    Returns:
        None: it has neither function, or they fail.
    """
    try:
        library = ctypes.CDLL(module)
    except OSError:
        return None
    said: list[bool] = []
    if hasattr(library, "MPIX_GPU_query_support"):
        flag = ctypes.c_int(0)
        if library.MPIX_GPU_query_support(ctypes.c_int(_CUDA), ctypes.byref(flag)) == 0:
            said.append(bool(flag.value))
    if hasattr(library, "MPIX_Query_cuda_support"):
        said.append(library.MPIX_Query_cuda_support() == 1)
    return all(said) if said else None

"""The device of a rank: the CPU, or one GPU, and whose arrays it computes with.

    device = open_device("cuda", local_rank)      import CuPy, pick a GPU of this host, make it this thread's
    model = GPT(config, mesh, xp=device.xp)       every array of the rank is made by this module

After that nobody asks again: library code takes its array module from its arrays (`backend.array_module`), and no
algorithm branches on the device.

**The discipline of streams**, for all who touch a device:

    compute     what a rank computes goes on the current stream of its thread, the device's default one.  One stream
                runs its work in order, so no array needs a lock
    others      who uses another stream (offload's copies, NCCL) ties it by events on both sides: it waits for what the
                rank had started, and the rank's stream waits for what it has done before anybody reads the result
    messages    MPI knows no stream: before it sees memory of the device, the stream is synchronised
    pinned      a page-locked buffer that an asynchronous copy fills or empties is used again after that copy's event
    host        the host waits where it must know a number: the loss and the norm of a step.  Nowhere else in a step

CuPy's current device and current stream belong to a thread.  A thread that a rank starts calls `Device.use` first.
CuPy keeps freed memory in a pool of its own, from which a step takes the arrays of the last one; the pool follows the
stream, so an array that is freed while a kernel still reads it is not given to anybody ahead of that kernel.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.errors import DeviceError

DEVICES = ("cpu", "cuda")
"""Kinds of devices, the default first."""
OLDEST = 70  # compute capability for which the kernels are written, times ten

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Where the arrays of a rank live.

    Attributes:
        kind: one of `DEVICES`.
        xp: the array module: numpy, or cupy.
        number: which of the GPUs that this process sees.
        count: how many it sees.
        name: of the chip.
        memory: bytes that it has.
        identity: the same for two processes of one host if they share it, whatever each sees.
        ranks: how many ranks of the job share one device, where most do.
        others: chips of other ranks that are not of this name.
    """

    kind: str
    xp: Any
    number: int = 0
    count: int = 0
    name: str = ""
    memory: int = 0
    identity: str = ""
    ranks: int = 1
    others: tuple[str, ...] = ()

    def use(self) -> None:
        """Make it the current device of this thread, for what CuPy makes and starts here from now on."""
        if self.kind != "cpu":
            self.xp.cuda.Device(self.number).use()

    def synchronize(self) -> None:
        """Wait until everything that was started on it is done."""
        if self.kind != "cpu":
            self.xp.cuda.Device(self.number).synchronize()

    def held(self) -> int | None:
        """Bytes that CuPy's pool holds for this process, which never gives any back by itself; None on the CPU.

        Arrays in use, and freed memory that waits for the next ones: the most that this process has needed so far.
        """
        if self.kind == "cpu":
            return None
        with self.xp.cuda.Device(self.number):
            return int(self.xp.get_default_memory_pool().total_bytes())

    def __str__(self) -> str:
        if self.kind == "cpu":
            return "cpu"
        said = [f"cuda: {self.name}, {self.memory / GIB:.1f} GiB, device {self.number} of the {self.count} seen here"]
        said += [f"{self.ranks} ranks share one"] * (self.ranks > 1)
        said += [f"other ranks have {name}" for name in self.others]
        return "; ".join(said)


CPU = Device("cpu", np)


def open_device(kind: str, local_rank: int = 0) -> Device:
    """This rank's device, from now on the current one of this thread; its arrays take kernels written for it.

    Args:
        kind: one of `DEVICES`.
        local_rank: number of this rank among those of its host: they take its GPUs in turn.

    Raises:
        DeviceError: CuPy, the driver or a GPU is missing, or the GPU is too old or refuses to work.

    Cost: CuPy is imported, and a context is made on the GPU, which takes memory there; neither was measured.
    """
    assert kind in DEVICES, kind
    if kind == "cpu":
        return CPU
    cupy = _imported()
    count = _count(cupy)
    number = local_rank % count
    try:
        cupy.cuda.Device(number).use()
        found = cupy.cuda.runtime.getDeviceProperties(number)
        identity = f"{cupy.cuda.runtime.deviceGetPCIBusId(number)} {bytes(found.get('uuid', b''))[:16].hex()}"
        name = _text(found["name"])
        capability = 10 * int(found["major"]) + int(found["minor"])
        if capability < OLDEST:
            raise DeviceError(
                f"--device cuda: device {number} is a {name} of compute capability {capability / 10:.1f}; the kernels"
                f" need {OLDEST / 10:.1f} or more (Volta, 2017).  Take --device cpu."
            )
        cupy.zeros(1)  # a device that another process has for itself alone refuses here
        cupy.cuda.get_cublas_handle()  # CuPy looks for CUDA's libraries when one is first needed: now, not in a step
    except ImportError as error:
        raise DeviceError(
            f"--device cuda: CuPy does not find CUDA's libraries: {_first_line(error)}.\n"
            f"{sys.executable} -m pip install 'mpitrain[cuda13]' brings them (cuda12 where CuPy is for CUDA 12)."
        ) from error
    except (RuntimeError, MemoryError) as error:
        raise DeviceError(
            f"--device cuda: device {number} of {count} cannot be used: {_first_line(error)}.\n"
            "`nvidia-smi` shows who uses it and in which compute mode it is."
        ) from error
    kernels.serve(cupy)
    return Device(kind, cupy, number, count, name, int(found["totalGlobalMem"]), identity)


def cuda_version(number: int) -> str:
    """A version as CUDA counts it, in words: 13020 is 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _imported() -> Any:
    """CuPy.

    Raises:
        DeviceError: it is not installed, or does not load.
    """
    # Of streams that share a queue of the device one waits for the other, and channels of messages have each their own.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        import cupy

        if not hasattr(cupy, "cuda"):  # an empty folder that was left behind
            raise ImportError("its package is empty")
        return cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise DeviceError(_unloadable(error)) from error
        raise DeviceError(
            f"--device cuda needs CuPy, which is not installed: {_install()}.\nOr take --device cpu."
        ) from None
    except Exception as error:  # whatever half an installation raises; CuPy's own message is a page
        raise DeviceError(_unloadable(error)) from error


def _unloadable(error: Exception) -> str:
    cause = error.__cause__ or error
    return (
        f"--device cuda: CuPy is installed and does not load: {_first_line(cause)}.\n"
        f"Uninstall all of CuPy, then install one: {_install()}.  Or take --device cpu."
    )


def _install() -> str:
    """How CuPy is installed: one of its wheels."""
    return f"{sys.executable} -m pip install 'mpitrain[cuda13]' ('mpitrain[cuda12]' where the driver is for CUDA 12)"


def _count(cupy: Any) -> int:
    """GPUs that this process sees, at least one.

    Raises:
        DeviceError: there is none; says whether driver or device is missing.
    """
    runtime = cupy.cuda.runtime
    try:
        count, why = int(runtime.getDeviceCount()), "no GPU is seen"
    except RuntimeError as error:
        count, why = 0, _first_line(error)
    if count:
        return count
    try:
        driver, needed = int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
    except RuntimeError:
        driver, needed = 0, 0
    if not driver:
        raise DeviceError(
            "--device cuda: there is no NVIDIA driver here (`nvidia-smi` must list a GPU; in a container: docker run"
            " --gpus all ...).\nOr take --device cpu."
        )
    if driver // 1000 < needed // 1000:
        raise DeviceError(
            f"--device cuda: the NVIDIA driver is for CUDA {cuda_version(driver)}, this CuPy for CUDA"
            f" {cuda_version(needed)}.\n"
            f"Take a newer driver, or the CuPy for this one: pip install 'mpitrain[cuda{driver // 1000}]' in the place"
            " of the other."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hides = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible!r} hides the others"
    raise DeviceError(
        f"--device cuda: {why}{hides}.\nAsk the scheduler for one (Slurm: --gpus-per-task=1), or take --device cpu."
    )


def _text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__

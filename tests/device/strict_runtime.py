"""`cupy.cuda` of the stand-in: devices, CUDA's runtime, and what the other files bring, under CuPy's names.

There is one device unless `devices()` says otherwise; memory of the host plays the memory of all.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import strict_memory
import strict_stream
from strict_memory import account
from strict_stream import CUDARuntimeError, current, machine, timeline


@contextlib.contextmanager
def devices(count: int, capability: str = "90", memory: int = 80 << 30) -> Iterator[None]:
    """Play so many devices in this block; none: CuPy is installed, and there is no driver."""
    before = machine.devices, machine.capability, machine.memory
    machine.devices, machine.capability, machine.memory = count, capability, memory
    try:
        yield
    finally:
        machine.devices, machine.capability, machine.memory = before


class Device:
    """cupy.cuda.Device: one that a thread can make its own."""

    def __init__(self, device: int | None = None) -> None:
        self.id = current.device if device is None else int(device)
        self._before: list[int] = []

    def __int__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def use(self) -> None:
        setDevice(self.id)

    def __enter__(self) -> Device:
        self._before.append(current.device)
        setDevice(self.id)
        return self

    def __exit__(self, *args: Any) -> None:
        current.device = self._before.pop()

    def synchronize(self) -> None:
        machine.check(self.id)
        timeline.finish_device(self.id)

    @property
    def compute_capability(self) -> str:
        machine.check(self.id)
        return machine.capability

    @property
    def mem_info(self) -> tuple[int, int]:
        machine.check(self.id)
        return machine.memory - account(self.id).most, machine.memory

    @property
    def pci_bus_id(self) -> str:
        return deviceGetPCIBusId(self.id)

    @property
    def attributes(self) -> dict[str, int]:
        machine.check(self.id)
        return {"MultiProcessorCount": 132, "WarpSize": 32, "MaxThreadsPerBlock": 1024}


def getDeviceCount() -> int:
    machine.check()
    return machine.devices


def getDevice() -> int:
    machine.check()
    return current.device


def setDevice(device: int) -> None:
    machine.check(device)
    current.device = device


def getDeviceProperties(device: int) -> dict[str, Any]:
    machine.check(device)
    return {
        "name": b"Stand-in",
        "major": int(machine.capability[:-1]),
        "minor": int(machine.capability[-1]),
        "totalGlobalMem": machine.memory,
        "multiProcessorCount": 132,
        "warpSize": 32,
        "maxThreadsPerBlock": 1024,
        "sharedMemPerBlock": 48 << 10,
        "uuid": bytes([device]) * 16,
    }


def deviceGetPCIBusId(device: int) -> str:
    machine.check(device)
    return f"0000:{device:02X}:00.0"


def driverGetVersion() -> int:
    return 13_000 if machine.devices else 0


def runtimeGetVersion() -> int:
    return 13_000


def deviceSynchronize() -> None:
    machine.check()
    timeline.finish_device(current.device)


def memGetInfo() -> tuple[int, int]:
    return Device().mem_info


def is_available() -> bool:
    return machine.devices > 0


def get_cublas_handle() -> int:
    machine.check()
    return 0x6000 + current.device


def get_device_id() -> int:
    return getDevice()


__all__ = ["CUDARuntimeError", "Device", "StrictCuda", "devices"]
_RUNTIME = (
    "CUDARuntimeError getDeviceCount getDevice setDevice getDeviceProperties deviceGetPCIBusId driverGetVersion"
    " runtimeGetVersion deviceSynchronize memGetInfo"
).split()
_CUDA = "Device is_available get_cublas_handle get_device_id".split()
_STREAM = "Stream Event get_current_stream get_elapsed_time".split()
_MEMORY = "MemoryPool MemoryPointer PinnedMemory PinnedMemoryPointer PinnedMemoryPool alloc_pinned_memory".split()
_LIBRARIES = {"cublas": ("strict_cublas", "Cublas")}  # each in a file of its own


class StrictCuda(ModuleType):
    """`cupy.cuda`"""

    def __init__(self) -> None:
        super().__init__("cupy.cuda")
        here = sys.modules[__name__]
        self.runtime = _module("cupy.cuda.runtime", here, _RUNTIME)
        self.stream = _module("cupy.cuda.stream", strict_stream, _STREAM)
        self.memory = _module("cupy.cuda.memory", strict_memory, ["OutOfMemoryError", "MemoryPool", "MemoryPointer"])
        for origin, names in ((here, _CUDA), (strict_stream, _STREAM), (strict_memory, _MEMORY)):
            for name in names:
                setattr(self, name, getattr(origin, name))

    def __getattr__(self, name: str) -> Any:
        if name in _LIBRARIES:
            file, kind = _LIBRARIES[name]
            if Path(__file__).with_name(f"{file}.py").exists():
                made = getattr(import_module(file), kind)()
                setattr(self, name, made)
                return made
        raise AttributeError(f"cupy.cuda.{name}: there is none, or the stand-in does not play it: tests/device")


def _module(name: str, origin: ModuleType, names: list[str]) -> ModuleType:
    module = ModuleType(name)
    for item in names:
        setattr(module, item, getattr(origin, item))
    return module

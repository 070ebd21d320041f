"""Which device a rank takes, and what a start is told that has none: on a CuPy that is played."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain import kernels
from mpitrain.comm.devices import Memory, device_of_rank, memory_of
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.config import Config
from mpitrain.device import CPU, open_device
from mpitrain.errors import DeviceError, UserError
from mpitrain.train import main


class Played(ModuleType):
    """CuPy with so many devices, as far as opening one asks for it."""

    def __init__(self, count: int = 2, name: bytes = b"H200", capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__("cupy")
        self.ndarray = type("ndarray", (), {})
        self.count, self.chip, self.capability = count, name, capability
        self.used: list[int] = []
        self.versions = 13000, 13000  # of the driver, and of the CUDA that CuPy was built for
        self.refusal: Exception | None = None
        self.cuda = SimpleNamespace(runtime=self, Device=self.device, get_cublas_handle=self.get_cublas_handle)
        self.lacking: Exception | None = None  # a library

    def device(self, number: int) -> Any:
        return SimpleNamespace(use=lambda: self.used.append(number), __enter__=lambda _: 0, __exit__=lambda *_: 0)

    def getDeviceCount(self) -> int:
        if not self.count:
            raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return self.count

    def getDeviceProperties(self, number: int) -> dict[str, Any]:
        major, minor = self.capability
        return {
            "name": self.chip,
            "major": major,
            "minor": minor,
            "totalGlobalMem": 2**37,
            "uuid": bytes([number] * 16),
        }

    def deviceGetPCIBusId(self, number: int) -> str:
        return f"0000:{number:02}:00.0"

    def driverGetVersion(self) -> int:
        return self.versions[0]

    def runtimeGetVersion(self) -> int:
        return self.versions[1]

    def get_cublas_handle(self) -> int:
        if self.lacking is not None:
            raise self.lacking
        return 1

    def zeros(self, shape: int) -> Any:
        if self.refusal is not None:
            raise self.refusal
        return None


@pytest.fixture
def cupy(monkeypatch):
    """Put a CuPy where it is imported from; kernels serve nobody afterwards."""

    def put(module: Any) -> Any:
        monkeypatch.setitem(sys.modules, "cupy", module)
        return module

    yield put
    kernels.serve(None)


def test_the_cpu_takes_no_cupy_and_no_message(cupy):
    cupy(None)  # importing it raises
    assert open_device("cpu", 3) is CPU
    assert (CPU.xp, CPU.held(), str(CPU)) == (np, None, "cpu")
    CPU.use()
    CPU.synchronize()
    assert LocalWorld(2).run(lambda: device_of_rank(world(), "cpu")) == [CPU, CPU]


def test_ranks_of_a_host_take_its_devices_in_turn(cupy):
    module = cupy(Played(count=2))
    devices = LocalWorld(5).run(lambda: device_of_rank(world(), "cuda"))
    assert [device.number for device in devices] == [0, 1, 0, 1, 0]
    assert sorted(module.used) == [0, 0, 0, 1, 1]
    assert {device.ranks for device in devices} == {3}
    assert all(device.xp is module for device in devices)
    assert str(devices[1]) == "cuda: H200, 128.0 GiB, device 1 of the 2 seen here; 3 ranks share one"
    assert "share" not in str(LocalWorld(2).run(lambda: device_of_rank(world(), "cuda"))[0])


def test_a_rank_is_counted_on_its_own_host(cupy):
    cupy(Played(count=4))

    def start() -> tuple[int, int]:
        ranks = world()
        ranks.host = "ab"[ranks.rank % 2]  # as a launcher deals out one by one
        device = device_of_rank(ranks, "cuda")
        return device.number, device.ranks

    assert LocalWorld(6).run(start) == [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1)]


def test_a_scheduler_that_deals_out_devices_shows_each_rank_one(cupy):
    """All are number 0 then, and yet nobody shares: what they are tells them apart."""

    class DealtOut(Played):
        def deviceGetPCIBusId(self, number: int) -> str:
            return f"0000:{world().rank:02}:00.0"

    cupy(DealtOut(count=1))
    devices = LocalWorld(3).run(lambda: device_of_rank(world(), "cuda"))
    assert [(device.number, device.count, device.ranks) for device in devices] == [(0, 1, 1)] * 3


def test_chips_of_other_kinds_are_named(cupy):
    class Mixed(Played):
        def getDeviceProperties(self, number: int) -> dict[str, Any]:
            return {**super().getDeviceProperties(number), "name": (b"A100", b"H200")[number]}

    cupy(Mixed())
    first, second = LocalWorld(2).run(lambda: device_of_rank(world(), "cuda"))
    assert str(first).endswith("other ranks have H200")
    assert str(second).endswith("other ranks have A100")


def test_the_memory_that_ranks_share_is_the_devices_or_the_hosts(cupy):
    cupy(Played())
    run = LocalWorld(4).run
    assert run(lambda: memory_of(world(), device_of_rank(world(), "cuda")))[0] == Memory(2**37, 2, of_device=True)
    found = run(lambda: memory_of(world(), CPU))[0]
    assert (found.ranks, found.of_device) == (4, False)
    assert found.nbytes > 2**26


def played(**how: Any) -> Played:
    module = Played(how.pop("count", 2), how.pop("name", b"P100"), how.pop("capability", (9, 0)))
    for name, value in how.items():
        setattr(module, name, value)
    return module


REFUSED = {
    "no CuPy": (
        None,
        r"needs CuPy, which is not installed: .* 'mpitrain\[cuda13\]' \('mpitrain\[cuda12\]' .*\)\.\n.*--device cpu",
    ),
    "no driver": (played(count=0, versions=(0, 13000)), r"no NVIDIA driver here .*nvidia-smi.*\n.*--device cpu"),
    "an old driver": (
        played(count=0, versions=(12040, 13000)),
        r"driver is for CUDA 12.4, this CuPy for CUDA 13.0.\n.*mpitrain\[cuda12\]",
    ),
    "no device": (played(count=0), r"cudaErrorNoDevice.*\n.*--gpus-per-task"),
    "an old chip": (played(capability=(6, 1)), r"P100 of compute capability 6.1; .*7.0 or more.*--device cpu"),
    "a device that others have": (
        played(refusal=RuntimeError("cudaErrorDevicesUnavailable: all devices are busy\nmore")),
        r"device 0 of 2 cannot be used: cudaErrorDevicesUnavailable: all devices are busy.\n.*nvidia-smi",
    ),
    "a CuPy without CUDA's libraries": (
        played(lacking=ImportError('Failure finding "libcublas.so.13": No such file\nmore')),
        r"libcublas.so.13.*\n.*mpitrain\[cuda13\]",
    ),
    "a device that is full": (played(refusal=MemoryError("Out of memory allocating 512 bytes")), "Out of memory"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_start_without_a_device_is_told_why_and_what_to_do(cupy, why):
    module, words = REFUSED[why]
    cupy(module)
    with pytest.raises(DeviceError, match=f"--device cuda.*{words}") as caught:
        open_device("cuda")
    assert len(str(caught.value).splitlines()) <= 5


def test_a_list_of_visible_devices_that_hides_all_is_named(cupy, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cupy(played(count=0))
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES='' hides"):
        open_device("cuda")


@pytest.mark.parametrize(
    "error",
    [
        ImportError("CuPy failed\n  a page\n  of it"),
        ModuleNotFoundError(name="fastrlock"),
        OSError("libcudart.so.12: wrong ELF class"),
        SyntaxError("invalid syntax"),
    ],
)
def test_a_cupy_that_does_not_load_is_not_taken_for_a_missing_one(cupy, monkeypatch, error):
    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "cupy":
                raise error

    cupy(None)
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(DeviceError, match=r"installed and does not load.*\n.*cuda13\].*cuda12\]") as caught:
        open_device("cuda")
    assert len(str(caught.value).splitlines()) == 2


def test_an_empty_folder_is_no_cupy(cupy):
    cupy(ModuleType("cupy"))
    with pytest.raises(DeviceError, match="does not load: its package is empty"):
        open_device("cuda")


def test_what_one_rank_lacks_all_ranks_are_told(cupy):
    class Half(Played):
        def getDeviceCount(self) -> int:
            self.count = 0 if world().rank == 2 else 2
            return super().getDeviceCount()

    cupy(Half())
    told = []

    def start() -> None:
        try:
            device_of_rank(world(), "cuda")
        except UserError as error:
            told.append(str(error))

    LocalWorld(4).run(start)
    assert len(set(told)) == 1
    assert len(told) == 4
    assert "cudaErrorNoDevice" in told[0]


def test_training_that_lacks_its_device_leaves_no_folder(cupy, tmp_path):
    cupy(None)
    run = tmp_path / "run"
    with pytest.raises(DeviceError, match="CuPy"):
        LocalWorld(2).run(main, ["--device", "cuda", "--run", str(run), "--model", "gpt-tiny", "--steps", "1"])
    assert not run.exists()


def test_a_model_that_does_not_fit_on_the_device_is_refused(cupy, tmp_path):
    class Small(Played):
        def getDeviceProperties(self, number: int) -> dict[str, Any]:
            return {**super().getDeviceProperties(number), "totalGlobalMem": 2**20}

    cupy(Small(count=1))
    flags = ["--device", "cuda", "--run", str(tmp_path / "run"), "--model", "gpt-mini", "--steps", "1"]
    with pytest.raises(UserError, match=r"on 2 ranks,\nbut their device has 0.0 GiB"):
        LocalWorld(2).run(main, flags)


def test_the_device_is_a_setting_with_its_default():
    assert Config(steps=1).device == "cpu"
    with pytest.raises(UserError, match=r"--device gpu: must be one of cpu, cuda"):
        Config(steps=1, device="gpu")

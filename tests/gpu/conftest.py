"""Tests that need a GPU.  Where there is none this folder is one test, which says that the others are left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mpitrain import kernels
from mpitrain.device import Device, open_device
from mpitrain.errors import DeviceError


def _missing() -> str:
    """Why there is no GPU for these tests; "" where there is one."""
    try:
        open_device("cuda")
    except DeviceError as error:
        return str(error).splitlines()[0]
    finally:
        kernels.serve(None)
    return ""


MISSING = _missing()
collect_ignore_glob = ["test_gpu_*.py"] if MISSING else ["test_no_gpu.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def missing() -> str:
    return MISSING


@pytest.fixture
def device() -> Iterator[Device]:
    """The GPU, with kernels that serve it; what a test leaves in its pool is given back."""
    opened = open_device("cuda")
    try:
        yield opened
    finally:
        opened.synchronize()
        kernels.serve(None)
        opened.xp.get_default_memory_pool().free_all_blocks()


@pytest.fixture
def xp(device: Device) -> Any:
    return device.xp

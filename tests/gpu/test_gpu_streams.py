"""Nothing is read of a GPU before it is written there: 200 rounds of each way (CASES.md C82)."""

from __future__ import annotations

import checks_gpu_streams as checks
import pytest

from mpitrain.device import Device


def test_copies_to_the_host_and_back(device: Device) -> None:
    assert checks.copies(device.xp) == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_between_ranks_of_one_gpu(device: Device, ranks: int) -> None:
    assert checks.messages(device.xp, ranks, use=device.use) == 0


@pytest.mark.parametrize("way", ["staged", "mpi"])
def test_all_that_is_promised_of_messages(device: Device, way: str) -> None:
    checks.door(device.xp, way, device.use)


@pytest.mark.parametrize("where", ["host", "hdf5"])
def test_what_is_offloaded(device: Device, where: str, tmp_path) -> None:
    assert checks.offloaded(device.xp, where=where if where == "host" else f"hdf5:{tmp_path}") == 0

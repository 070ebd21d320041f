"""Training on a GPU: NumPy's in float64, close to it in lower precisions, and nothing waits for the device but a step's
end.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import checks_gpu_commands as commands
import checks_gpu_training as checks
import pytest

from mpitrain.device import Device


@pytest.mark.parametrize("name", checks.RUNS)
def test_in_float64_a_run_is_that_of_numpy(device: Device, name: str) -> None:
    found = checks.judged(checks.RUNS[name], device.xp, device.use)
    assert found.ok, found.worst


@pytest.mark.parametrize("dtype", checks.LOSS_BOUND)
@pytest.mark.parametrize("name", checks.LOWER)
def test_in_a_lower_precision_a_run_stays_close(device: Device, name: str, dtype: str) -> None:
    found = checks.gap(checks.LOWER[name], dtype, device.xp)
    assert found.ok, found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_run_again_gives_the_same_bits(device: Device, dtype: str) -> None:
    first, again = (checks.bits(checks.LOWER["GPT"], dtype, device.xp) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("layout", commands.LAYOUTS)
def test_the_command_line_trains_as_on_the_cpu(device: Device, layout: str, tmp_path: Path) -> None:
    if commands.LAYOUTS[layout][1] == "mpirun" and not commands.has_mpi():
        pytest.skip('no mpirun: pip install "mpitrain[mpi]"')
    assert commands.gap(layout, tmp_path) <= 1.0


def test_memory_returns_to_where_it_was(device: Device) -> None:
    """And a step takes no more than the one before it did."""
    pool: Any = device.xp.get_default_memory_pool()
    gc.collect()
    before = pool.used_bytes()
    held = checks.held_after_steps(device.xp, pool, (3, 5, 40))
    gc.collect()
    assert pool.used_bytes() == before
    assert held[1] == held[0], "the fifth step needed memory that the third one did not"
    assert held[2] == held[0], "memory grows from step to step"

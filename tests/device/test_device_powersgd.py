"""PowerSGD on device arrays: sums, errors and factors have NumPy's bits, over a checkpoint too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the runs are
import checks_powersgd as checks

from mpitrain import checkpoint
from mpitrain.backend import to_host
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world


def train(xp: Any, dtype: Any, folder: Path, axes: dict[str, int]) -> dict[str, np.ndarray]:
    """Two steps, then a checkpoint that is read again; the weights and what the reducer keeps."""
    world().set_deterministic(True)
    executor, losses = checks.train(world(), checks.EXPERTS, steps=2, dtype=dtype, xp=xp, **axes)
    reducer, parameters, mesh = executor.reducer, executor.model.parameters(), executor.mesh
    kept = {f"{kind} {name}": t.array for kind, of in reducer.state_tensors().items() for name, t in of.items()}
    assert all(isinstance(array, xp.ndarray) for array in kept.values())
    path = checkpoint.save(folder, 2, checkpoint.slabs_of(parameters, reducer.state_tensors(), mesh), {}, world())
    states = reducer.state_to_fill(checkpoint.shapes(path, world()))
    checkpoint.load(path, checkpoint.slabs_of(parameters, states, mesh), world())
    assert reducer.resumed(2) == ""
    arrays = {p.name: p.data for p in parameters} | kept
    return {"losses": np.array(losses), **{name: to_host(array) for name, array in arrays.items()}}


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_compressed_training_has_the_bits_of_numpy(cupy, numpy_kernels, tmp_path, dtype):
    axes = {"dp": 2, "ep": 2, "tp": 2}
    found = (LocalWorld(4).run(train, xp, dtype, tmp_path / xp.__name__, axes) for xp in (cupy, np))
    for mine, theirs in zip(*found, strict=True):
        for name, array in theirs.items():
            assert mine[name].tobytes() == array.tobytes(), name

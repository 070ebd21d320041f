"""A GPT cut over tp, plain and along the sequence, on device arrays: the bits of NumPy's."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the model's sizes and batches are
from gpt_on_tp import SIZES, batch

from mpitrain.backend import to_host
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.models.gpt import GPT
from mpitrain.optim import Adafactor, AdamW, Optimizer
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage


def train(xp: Any, sp: bool, kv_heads: int, adafactor: bool = False) -> dict[str, np.ndarray]:
    """Two steps of one micro-batch, dropout on: losses and this rank's weights."""
    world().set_deterministic(True)
    mesh = Mesh(world(), tp=world().size)
    sizes = replace(SIZES, kv_heads=kv_heads, dropout=0.2)
    model = GPT(sizes, mesh, sequence_parallel=sp, seed=3, dtype=np.float64, xp=xp)
    optimizer: Optimizer = AdamW(model.parameters(), lr=1e-2)
    if adafactor:
        optimizer = Adafactor(model.parameters(), mesh=mesh, beta1=0.5, weight_decay=0.1)
    executor = Executor(model, optimizer, mesh, with_update(one_stage(1)), clip=1.0)
    losses = np.array([executor.step(batch(mesh, step)) for step in range(2)])
    weights = {p.name: p.data for p in model.parameters()}
    assert all(isinstance(array, xp.ndarray) for array in weights.values())
    state = {f"{kind} {name}": a for kind, of in optimizer.state_dict().items() for name, a in of.items()}
    return {"loss": losses, **{name: to_host(array) for name, array in (weights | state).items()}}


@pytest.mark.parametrize(
    ("tp", "sp", "kv_heads", "adafactor"), [(2, True, 4, False), (4, False, 2, False), (4, True, 1, True)]
)
def test_training_has_the_bits_of_numpy(cupy, numpy_kernels, tp, sp, kv_heads, adafactor):
    found = (LocalWorld(tp).run(train, xp, sp, kv_heads, adafactor) for xp in (cupy, np))
    for mine, theirs in zip(*found, strict=True):
        for name, array in theirs.items():
            assert mine[name].tobytes() == array.tobytes(), name

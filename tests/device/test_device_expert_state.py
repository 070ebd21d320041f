"""Experts over ep and tp on device arrays: sums of gradients, Adafactor, evaluation and text have NumPy's bits."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the model's sizes and batches are
import checks_layouts as checks

from mpitrain.backend import to_host
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.models.generate import generate
from mpitrain.models.gpt import GPT
from mpitrain.parallel.data import BucketedReducer
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.routing import Routing

SIZES = replace(checks.SIZES, layers=1, routing=Routing(4, 2, "gshard", balance_loss=0.16, jitter=0.01))


def train(xp: Any, axes: dict[str, int]) -> dict[str, np.ndarray]:
    """Two steps, then what the model is good for."""
    world().set_deterministic(True)
    mesh = Mesh(world(), **axes)
    model = GPT(SIZES, mesh, seed=3, dtype=np.float64, xp=xp)
    optimizer = checks.method(model, adafactor=True, mesh=mesh)
    reducer = BucketedReducer(model.flats, mesh, 4096)
    rows = complete("1f1b", ranks=1, microbatches=1)
    executor = Executor(model, optimizer, mesh, rows, clip=0.5, reducer=reducer)
    tokens = checks.numbers(SIZES)
    losses = [executor.step(batch) for batch in tokens.batches(4, mesh.dp.rank, mesh.dp.size, stop_step=2)]
    validation = executor.evaluate(islice(tokens.validation(4, mesh.dp.rank, mesh.dp.size), 1))
    text = list(generate(model, [3, 1, 4], 2, seed=7))
    assert all(isinstance(p.data, xp.ndarray) for p in model.parameters())
    state = {f"{kind} {name}": a for kind, of in optimizer.state_dict().items() for name, a in of.items()}
    arrays = {p.name: p.data for p in model.parameters()} | state
    numbers = np.array([*losses, validation, *text])
    return {"numbers": numbers, **{name: to_host(array) for name, array in arrays.items()}}


def test_a_model_with_experts_has_the_bits_of_numpy(cupy, numpy_kernels):
    found = (LocalWorld(4).run(train, xp, {"dp": 2, "ep": 2, "tp": 2}) for xp in (cupy, np))
    for mine, theirs in zip(*found, strict=True):
        for name, array in theirs.items():
            assert mine[name].tobytes() == array.tobytes(), name

"""Late gradients and workers that learn apart on device arrays: the bits of NumPy."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
from checks_asynchronous import batches_of

from mpitrain.backend import to_host
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW
from mpitrain.parallel.local_sgd import LocalSgd
from mpitrain.parallel.stale import Stale, StaleWorkers
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

SIZES = GPTConfig(vocab=17, layers=1, width=12, heads=2, seq_len=6)
SCHEMES = {
    "stale": lambda model, _, mesh: Stale(model.flats, mesh, 1),
    "stale workers": lambda model, _, mesh: StaleWorkers(model.flats, mesh, 1),
    "local": lambda model, optimizer, mesh: LocalSgd(model.flats, mesh, optimizer, 2, average_moments=True),
}


def trained(xp, name):
    """Weights after three steps, and a loss in between of what the model is by then."""
    world().set_deterministic()
    mesh = Mesh(world())
    model = GPT(SIZES, mesh, seed=3, dtype=np.float64, xp=xp)
    optimizer = AdamW(model.parameters(), lr=2e-3)
    rows = complete("1f1b", ranks=1, microbatches=1)
    executor = Executor(model, optimizer, mesh, rows, reducer=SCHEMES[name](model, optimizer, mesh), clip=0.5)
    batches = batches_of(SIZES, 4, mesh.dp.rank, mesh.dp.size, 3)
    for batch in batches:
        executor.step(batch)
    return executor.evaluate(batches[:1]), {p.name: to_host(p.data).tobytes() for p in model.parameters()}


@pytest.mark.parametrize("name", SCHEMES)
def test_each_scheme_has_the_bits_of_numpy(cupy, numpy_kernels, name):
    host, device = (LocalWorld(2).run(lambda xp=xp: trained(xp, name)) for xp in (np, cupy))
    assert host == device

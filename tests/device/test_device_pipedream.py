"""Pipelines that never drain, on device arrays: weight buffers live where the weights do, and the bits are NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.backend import to_host
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.schedules import SCHEDULES

SIZES = GPTConfig(vocab=13, layers=3, width=8, heads=2, seq_len=8, dropout=0.2)


def train(name, ranks, xp):
    """Losses, weights and versions alive at the peak of this rank."""
    mesh = Mesh(world(), pp=ranks)
    model = GPT(SIZES, mesh, seed=3, dtype=np.float64, xp=xp)
    executor = Executor(
        model,
        AdamW(model.parameters(), lr=1e-2, eps=1e-6),
        mesh,
        lambda batches: complete(name, ranks=ranks, microbatches=3, batches=batches),
        versions=SCHEDULES[name].versions,
    )
    stream = (np.arange(2_000) * 7919 % 104729 % 13).astype(np.uint16)
    tokens = Tokens(Corpus(stream[:1_500], stream[1_500:], 13, "bytes", "numbers", (), (), ""), 8)
    reports = executor.run(list(tokens.batches(6, stop_step=4)))
    assert executor.versions is not None
    weights = [to_host(p.data).tobytes() for p in model.parameters()]
    return [report.loss for report in reports], weights, executor.versions.peak


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_versions_of_the_weights_on_a_device_have_the_bits_of_numpy(cupy, numpy_kernels, name, ranks):
    assert LocalWorld(ranks).run(train, name, ranks, cupy) == LocalWorld(ranks).run(train, name, ranks, np)

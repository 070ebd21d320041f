"""How long the parts of a model take on this machine: what a pipeline's stages are balanced by.

The parts are stages of a small pipeline on this rank alone: embedding | one block | last norm, head and loss; where
only some blocks have experts, one block of either kind.  Each goes forward and backward as in training, dropout
included, and sends nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import array_module, collection_paused, keep_freed_memory, to_host
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.tokens import Batch
from mpitrain.events import alone
from mpitrain.models.decoder import Decoder
from mpitrain.models.families import build
from mpitrain.models.sizes import DecoderConfig
from mpitrain.pipeline.partition import Partition

REPETITIONS = 5
LONGEST = 1.0  # seconds of repetitions of a part, after which no other one begins


class Measured(NamedTuple):
    """Seconds of one micro-batch, forward and backward."""

    embedding: float
    blocks: tuple[float, ...]
    head: float


def measured_costs(
    config: DecoderConfig, rows: int, dtype: Any = np.float32, seed: int = 0, xp: Any = np, ep: int = 1
) -> Measured:
    """Time the parts of a model: the shortest of a few repetitions each, after one that does not count.

    The layout does not matter: axes over which layers are cut divide all three alike, so the ratios stay.  Other ranks
    measure other times; who needs the same on all of them takes those of one.

    Args:
        config: the model; of its blocks one of each kind is timed, and the others take as long.
        rows: sequences of a micro-batch on one rank.
        dtype: of weights, activations and gradients.
        seed: of the initial values.
        xp: where to compute: numpy, or cupy for this rank's device.
        ep: ranks over which experts are spread: as many tokens as this rank has go through an ep-th of them.

    Cost: memory of a model of one block, or two; `LONGEST` seconds a part and two repetitions at most.
    """
    kinds = sorted({config.has_experts(block) for block in range(config.layers)})  # in this order, if there are both
    routing = config.routing if True in kinds else None
    if routing is not None:
        experts = max(routing.top_k, routing.experts // ep)
        routing = replace(routing, experts=experts, every=len(kinds))
    sizes = replace(config, layers=len(kinds), routing=routing)
    one_each = Partition((0, *(1 for _ in kinds), 0))
    mesh = Mesh(World(Alone(), "none"))
    keep_freed_memory()  # as in training: page faults would be most of what is measured
    # Nobody should take this for training.
    with alone(), collection_paused(), np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        model = build(sizes, mesh, partition=one_each, seed=seed, dtype=dtype, xp=xp)
        embedding, *taken, head = (_shortest(model, stage, _batch(config, rows)) for stage in model.stages)
    of_kind = dict(zip(kinds, taken, strict=True))
    return Measured(embedding, tuple(of_kind[config.has_experts(block)] for block in range(config.layers)), head)


def _batch(config: DecoderConfig, rows: int) -> Batch:
    """Tokens from all over the vocabulary."""
    places, positions = np.arange(rows, dtype=np.int64), np.arange(config.seq_len, dtype=np.int64)
    inputs = (places[:, None] * config.seq_len + positions) * 7919 % config.vocab
    return Batch(inputs, np.roll(inputs, -1, axis=1), places, positions, step=0)


def _shortest(model: Decoder, stage: int, batch: Batch) -> float:
    """Seconds of a stage, the least of some times."""
    batch = batch.to(model.like)
    inputs = [
        array_module(model.like).ones(boundary.shape, boundary.dtype) for boundary in model.boundary(stage, batch)
    ]
    _once(model, stage, batch, inputs)
    taken = []
    while len(taken) < REPETITIONS and sum(taken) < LONGEST:
        start = time.perf_counter()
        _once(model, stage, batch, inputs)
        taken.append(time.perf_counter() - start)
    return min(taken)


def _once(model: Decoder, stage: int, batch: Batch, inputs: list[Any]) -> None:
    """Forward and backward of a stage; over when the device is done."""
    model.start_step()
    leaves = [Tensor(array, requires_grad=True) for array in inputs]
    with Tape() as tape:
        outputs = model.forward_stage(stage, batch, *leaves)
    tape.run_backward([(y, array_module(y.data).ones(y.shape, y.dtype)) for y in outputs])
    to_host(outputs[0].data.reshape(-1)[:1])

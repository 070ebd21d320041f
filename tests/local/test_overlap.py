"""Buckets hide the time of messages behind backward."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the delaying transport is
from delay import delayed

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.data import BucketedReducer, FlatReducer
from mpitrain.pipeline.executor import CHECKED_STEPS, DATA_AXES, Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

DELAY = 0.02
PIECE = 100_000  # elements of a message: flat sends its sum in pieces of this length, buckets are as long


def waited(bucketed):
    """Seconds for which this rank waits for the sums of gradients in one step, and how many messages carried them."""
    mesh = Mesh(world())
    model = GPT(GPTConfig(vocab=256, layers=10, width=96, heads=2, seq_len=48), mesh)
    reducer = BucketedReducer(model.flats, mesh, 4 * PIECE) if bucketed else FlatReducer(model.flats, mesh)
    executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, with_update(one_stage(1)), reducer=reducer)
    numbers = np.arange(4000, dtype=np.uint8)
    tokens = Tokens(Corpus(numbers, numbers, 256, "bytes", "numbers", (), (), ""), 48)
    for step in range(CHECKED_STEPS):  # in which fingerprints travel too
        executor.step(tokens.batch_at(step, 64, mesh.dp.rank, mesh.dp.size))
    transport = mesh.merged(DATA_AXES).transport
    before = transport.waited, transport.messages
    executor.step(tokens.batch_at(CHECKED_STEPS, 64, mesh.dp.rank, mesh.dp.size))
    return transport.waited - before[0] - DELAY / 2, transport.messages - before[1] - 1  # less those of COUNT


def test_buckets_hide_at_least_70_percent_of_the_delay_that_one_sum_pays():
    """Every message is 20 ms late; only the last bucket, that of the first layers, has no backward to hide behind.

    Ranks take turns here, so while one waits the other one's message gets due too: their waits are added up.
    """
    flat, pieces = map(sum, zip(*LocalWorld(2, wrap=delayed(DELAY), limit=PIECE).run(waited, False), strict=True))
    assert pieces >= 2 * 10
    assert flat >= 0.45 * pieces * DELAY
    left, _ = map(sum, zip(*LocalWorld(2, wrap=delayed(DELAY), limit=10 * PIECE).run(waited, True), strict=True))
    print(f"flat waits {1000 * flat:.0f} ms, buckets {1000 * left:.0f} ms: {1 - left / flat:.0%} hidden")
    assert left <= 0.3 * flat

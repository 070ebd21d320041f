"""What a training step of S costs a device besides its work: launches, copies and waits, counted on the stand-in.

S (docs/performance.md) has four blocks.  Launches do not depend on sizes, so its counts are those of the same model
with a sixteenth of its width and an eighth of its sequence.  A host that launches takes some microseconds for each, and
a host that waits lets the device idle: what follows is a budget, and whoever needs more says here what for.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from strict_array import crossings
from strict_stream import launches

from mpitrain.assemble import build_executor, build_model, build_optimizer
from mpitrain.comm.device_messages import use_device_messages
from mpitrain.comm.devices import device_of_rank
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config import parse
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens

S = "--model gpt-tiny --layers 4 --width 16 --heads 4 --seq-len 16 --batch 4 --steps 5"
OF_A_BATCH = 4  # arrays: ids, targets, places in the global batch, positions
TEXT = (np.arange(3000) * 7919 % 104729 % 256).astype(np.uint8)


class Cost(NamedTuple):
    """Of one step on one rank: what was launched by name, and what went between host and device or was waited for."""

    launched: Counter[str]
    crossed: Counter[str]


def cost(flags: str) -> Cost:
    """The third step of a run."""
    config, ranks = parse(f"{S} {flags}".split()), world()
    device = device_of_rank(ranks, "cuda")
    use_device_messages(ranks, config.device_messages, device)
    mesh = Mesh(ranks, pp=config.pp, dp=config.dp, cp=config.cp, tp=config.tp, ep=config.ep)
    corpus = Corpus(TEXT[:2700], TEXT[2700:], 256, "bytes", "numbers", (), (), "")
    model = build_model(config, corpus, mesh, device)
    executor = build_executor(config, model, build_optimizer(config, model, mesh), mesh, 5)
    dp, tokens = mesh.dp, Tokens(corpus, config.seq_len, 0)
    batches = tokens.batches(config.batch, dp.rank, dp.size, 0, 3, model.positions_here)
    for _ in range(2):  # the first ones make what later ones use again
        executor.step(next(batches))
    with launches() as launched, crossings(waits=True) as crossed:
        executor.step(next(batches))
    return Cost(launched, crossed)


def of_ranks(flags: str, ranks: int = 1) -> list[Cost]:
    return LocalWorld(ranks).run(cost, flags)


PLAIN = 216
"""Launches of a step, of which 51 are matrix products: three of the head, twelve of each block."""
MORE = {
    "--dropout 0.1": 28,  # hashes of rows, and masks before the first block
    "--dtype bfloat16": 6,
    "--dtype float16": 12,  # a scale for the gradients
    "--dropout 0.1 --recompute full": 100,  # the blocks forward once more
    "--model llama-tiny --heads 4 --kv-heads 2": 60,
    "--optimizer sgd": 5,
    "--microbatches 2": 205,  # all but the update and the norm a second time
}
"""What features add at most."""


def test_a_step_of_s_keeps_its_budget(cupy):
    [(launched, crossed)] = of_ranks("")
    assert sum(launched.values()) <= PLAIN, launched.most_common()
    assert launched["gemmEx"] == 3 + 4 * 12
    # The batch goes in; the losses come out together with the squares of the gradients, in the one wait of a step.
    assert crossed == {"asarray": OF_A_BATCH, "get": 1}
    assert launched["adamw_parts"] == launched["squares_of_parts"] == 1, "the update is not launched tensor by tensor"


def test_micro_batches_bring_their_rows_and_wait_for_nothing(cupy):
    [(_, crossed)] = of_ranks("--layers 1 --microbatches 4")
    assert crossed == {"asarray": 4 * OF_A_BATCH, "get": 1}


@pytest.mark.slow
@pytest.mark.parametrize("flags", MORE)
def test_features_add_what_they_are_allowed_to(cupy, flags):
    [(launched, crossed)] = of_ranks(flags)
    assert sum(launched.values()) <= PLAIN + MORE[flags], launched.most_common()
    assert crossed == {"asarray": OF_A_BATCH * (2 if "micro" in flags else 1), "get": 1}


@pytest.mark.slow
def test_a_block_costs_a_fixed_number_of_launches(cupy):
    two, three = (of_ranks(f"--layers {layers}")[0].launched for layers in (2, 3))
    a_block = three - two
    assert a_block["gemmEx"] == 12  # four products forward, eight backward
    assert sum(a_block.values()) <= 48, a_block


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "ranks"), [("--dp 2", 2), ("--dp 2 --reducer bucketed --bucket-mib 0.01", 2)])
def test_messages_add_launches_for_themselves_only(cupy, flags, ranks):
    """Threads with one device send arrays of the device as they are: nothing crosses for a message."""
    for launched, crossed in of_ranks(flags, ranks):
        assert sum(launched.values()) <= PLAIN + 24, launched.most_common()
        assert crossed == {"asarray": OF_A_BATCH, "get": 1}


@pytest.mark.slow
def test_staged_messages_cross_once_each_way(cupy):
    for _, crossed in of_ranks("--dp 2 --device-messages staged", 2):
        assert crossed.pop("set", 0) + crossed["asarray"] - OF_A_BATCH == 1  # the sums of all gradients come back
        assert crossed["get"] == 2  # they leave, and the one wait

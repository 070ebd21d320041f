"""Recomputation, buckets, scales and autopsies at the same time, with numbers that stand nowhere else.

Bit for bit where nothing is added up in another order: blocks that are made again, and gradients that leave in buckets.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_autopsy as spoil
from checks_layouts import SIZES, numbers

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.debug.capture import MADE_AGAIN, Record
from mpitrain.debug.ledger import Ledger
from mpitrain.errors import NumericsError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT
from mpitrain.nn.module import mark_recompute
from mpitrain.optim.adam import AdamW
from mpitrain.optim.scaler import LossScaler
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.verify.here import record
from mpitrain.verify.layouts import Layout, parse
from mpitrain.verify.sweep import Case, train

OPTIONS: dict[str, Any] = {
    "layers": 4, "width": 12, "heads": 2, "seq_len": 12, "batch": 8, "dropout": 0.25, "lr": 1e-3, "bucket_mib": 0.001
}  # fmt: skip


def recorded(layout: Layout, ledger: Ledger | None = None, **options: Any) -> list[list[Record]]:
    """What every rank of a small GPT has made of its steps."""
    case = Case(5, layout, 17, {**OPTIONS, **options})
    if ledger is None:
        return record(layout.ranks, lambda: train(case, layout))

    def told() -> None:
        with listen(ledger):
            train(case, layout)

    return record(layout.ranks, told)


def assert_same_bits(mine: list[list[Record]], other: list[list[Record]]) -> None:
    """Every loss, gradient, weight and moment of every rank."""
    for here, there in zip(mine, other, strict=True):
        for step, (a, b) in enumerate(zip(here, there, strict=True)):
            assert a.facts.get("loss") == b.facts.get("loss")
            for kind in a.arrays:
                assert a.arrays[kind].tobytes() == b.arrays[kind].tobytes(), f"{kind} of step {step}"


SCHEDULES = [
    ("dp2", {"microbatches": 2}),
    ("pp2,dp2,gpipe", {"microbatches": 2}),
    ("pp2,dp2,1f1b", {"microbatches": 2}),
    ("pp2,dp2,interleaved", {"microbatches": 2, "chunks": 2}),
    ("pp2,dp2,zb-h1", {"microbatches": 3, "batch": 6}),
    ("pp2,dp2,terapipe", {"microbatches": 2}),
    ("pp2,dp2,pipedream", {"microbatches": 1, "clip": 0.0}),
    ("pp2,dp2,pipedream-2bw", {"microbatches": 2}),
]


@pytest.mark.parametrize(("layout", "options"), SCHEDULES, ids=[layout for layout, _ in SCHEDULES])
def test_buckets_that_leave_during_a_recomputing_backward_give_the_bits_of_one_message(layout, options):
    """T2.4, T19.1: with every schedule; and they do leave before REDUCE."""
    ran, ledger = parse(layout), Ledger()
    flat = recorded(ran, recompute="full", reducer="flat", **options)
    buckets = recorded(ran, ledger, recompute="full", reducer="bucketed", **options)
    assert_same_bits(buckets, flat)
    assert all(rank[-1].facts["memory"] == [MADE_AGAIN] for rank in buckets)
    calls = {action: amount.calls for action, amount in ledger.by(lambda place: place.action).items()}
    early = calls.get("B", 0) + calls.get("W", 0)
    assert early > 0
    assert early >= calls.get("REDUCE", 0)


@pytest.mark.parametrize("layout", ["tp2", "pp2,1f1b", pytest.param("pp2,tp2,zb-h1", marks=pytest.mark.slow)], ids=str)
def test_a_quarter_dropped_is_the_same_quarter_when_blocks_are_made_again(layout):
    """C59: p = 0.25, up to six micro-batches in flight."""
    options = {"microbatches": 6, "batch": 12, "kv_heads": 2}
    plain = recorded(parse(layout), recompute="none", **options)
    assert_same_bits(recorded(parse(layout), recompute="full", **options), plain)


# ------------------------------------------------------------------------------------------------------ what goes wrong


def trained(again: tuple[str, ...] = (), dtype: Any = np.float32, scaler: LossScaler | None = None, **axes: int) -> Any:
    """An executor of a GPT with three blocks, and its batches."""
    mesh = Mesh(world(), **axes)
    sizes = replace(SIZES, layers=3, width=8, heads=2, dropout=0.1)
    model = GPT(sizes, mesh, seed=9, dtype=dtype)
    mark_recompute(model, again, mesh.pp.exchange)
    rows = complete("1f1b", ranks=mesh.pp.size, microbatches=2)
    executor = Executor(model, AdamW(model.parameters()), mesh, rows, scaler=scaler)
    spoil.RANK.set(mesh.world.rank)
    return executor, numbers(sizes).batches(4 * mesh.dp.size, mesh.dp.rank, mesh.dp.size)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_nan_in_a_block_that_is_made_again_is_named_and_enters_no_weight(where):
    """C84: at step 4, in the last block, on rank 3, which makes it again."""
    action = "F1@1" if where == "forward" else "B1@1"
    place = spoil.Place(where, 3, action, "blocks.2.mlp" if where == "forward" else "", "gelu_tanh")

    def main() -> tuple[str, Any]:
        executor, batches = trained(("blocks.2",), pp=2, dp=2)
        for _ in range(3):
            executor.step(next(batches))
        before = [p.data.copy() for p in executor.model.parameters()]
        moments = [a.copy() for of in executor.optimizer.state_dict().values() for a in of.values()]
        spoil.SPOIL.set(spoil.Spoil(place, np.nan))
        with pytest.raises(NumericsError) as caught:
            executor.step(next(batches))
        now = [p.data for p in executor.model.parameters()]
        now += [a for of in executor.optimizer.state_dict().values() for a in of.values()]
        assert all(np.array_equal(a, b) for a, b in zip(now, [*before, *moments], strict=True))
        assert executor.optimizer.updates == 3
        return str(caught.value), caught.value.autopsy.finding

    with spoil.spoiling():
        (text, found), *others = LocalWorld(4).run(main)
    assert all(other[0] == text for other in others)
    assert (found.direction, found.rank, found.step, found.micro) == (where, 3, 4, 1)
    assert found.path == "blocks.2.mlp"
    assert found.op.startswith("gelu_tanh")


def test_a_scale_that_falls_to_its_floor_ends_the_run_and_names_the_gradient():
    """C14: infinity at every step from the third on, from a scale of 4096 down to 64."""
    place = spoil.Place("gradient", 2, "B0@0", "blocks.0.attention.proj.weight")

    def main() -> Any:
        executor, batches = trained((), np.float16, LossScaler(4096.0, hysteresis=1, floor=64.0), dp=3)
        scales: list[float] = []

        def run() -> None:
            for step in range(1, 30):
                spoil.SPOIL.set(spoil.Spoil(place, np.inf) if step >= 3 else None)
                executor.step(next(batches))
                scales.append(executor.scaler.scale)

        with pytest.raises(NumericsError) as caught:
            run()
        return str(caught.value), caught.value.autopsy.finding, scales, executor.optimizer.updates

    with spoil.spoiling():
        (text, found, scales, updates), *others = LocalWorld(3).run(main)
    assert all(other[0] == text for other in others)
    assert scales == [4096.0, 4096.0, 2048.0, 1024.0, 512.0, 256.0, 128.0, 64.0]
    assert updates == 2
    assert (found.kind, found.rank, found.path, found.step) == ("gradient", 2, "blocks.0.attention.proj.weight", 9)
    assert "gradients overflow even at the lowest loss scale, 2^6" in text
    assert "Way out: a lower --loss-scale, a lower --lr, a longer --warmup, or --clip 1." in text

"""Pipelines on device arrays: the bits of NumPy, and nothing crosses but tokens, boundaries, losses and norms."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from often import some
from strict_array import crossings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
from checks_layouts import numbers, train

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.models.generate import generate
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim.adam import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

SMALL = GPTConfig(vocab=11, layers=3, width=8, heads=2, seq_len=6, dropout=0.2)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpipe": (2, {"pp": 2, "schedule": "gpipe"}),
    "1f1b, tied": (3, {"pp": 3, "tied": True}),
    "interleaved, buckets, data parallel": (
        4,
        {"pp": 2, "dp": 2, "schedule": "interleaved", "chunks": 2, "bucket_bytes": 1024, "batch": 8},
    ),
    "zb-h1": (4, {"pp": 4, "schedule": "zb-h1"}),
    "zb-h1, tied, tensor parallel with sequences": (
        4,
        {"pp": 2, "tp": 2, "schedule": "zb-h1", "sp": True, "tied": True},
    ),
    "1f1b, context parallel": (4, {"pp": 2, "cp": 2, "sizes": replace(SMALL, seq_len=8)}),
    "terapipe": (2, {"pp": 2, "schedule": "terapipe", "slices": (3, 2, 1)}),
    "terapipe, tied, tensor parallel": (
        4,
        {"pp": 2, "tp": 2, "schedule": "terapipe", "slices": (4, 2), "tied": True, "documents": True},
    ),
    "a stage that holds nothing": (3, {"pp": 3, "blocks": (3, 0, 0), "schedule": "zb-h1"}),
}


@pytest.mark.parametrize("layout", some(LAYOUTS))
def test_steps_and_evaluation_have_the_bits_of_numpy(cupy, numpy_kernels, layout):
    ranks, how = LAYOUTS[layout]
    how = {"sizes": SMALL, "micros": 4, "batch": 4, "steps": 2, **how}
    if how.pop("tied", False):
        how["sizes"] = replace(how["sizes"], tied=True)
    on_device, on_host = (LocalWorld(ranks).run(lambda xp=xp: train(world(), xp=xp, **how)) for xp in (cupy, np))
    for mine, theirs in zip(on_device, on_host, strict=True):
        assert mine.keys() == theirs.keys()
        for kind, tensors in theirs.items():
            for name, array in tensors.items():
                assert mine[kind][name].tobytes() == array.tobytes(), (kind, name)


def executor_of(xp: Any, schedule: str, pp: int, micros: int, slices: tuple[int, ...] | None = None) -> Executor:
    mesh = Mesh(world(), pp=pp)
    model = GPT(SMALL, mesh, dtype=np.float64, xp=xp)
    rows = complete(schedule, ranks=pp, microbatches=micros, slices=len(slices or (0,)))
    return Executor(model, AdamW(model.parameters()), mesh, rows, clip=0.5, slices=slices)


@pytest.mark.parametrize(
    ("schedule", "slices"), [("1f1b", None), ("zb-h1", None), ("terapipe", (3, 3))], ids=lambda value: str(value)
)
def test_a_step_crosses_for_its_tokens_its_boundaries_its_loss_and_its_norm_only(cupy, schedule, slices):
    """No op waits for the device, and neither does a message that stays on it for its stage."""
    micros, stages, arrays_of_a_batch = 4, 3, 4
    units = micros * len(slices or (0,))

    def main() -> None:
        executor = executor_of(cupy, schedule, stages, micros, slices)
        batches = numbers(SMALL).batches(4, stop_step=3)
        rank, last = executor.mesh.pp.rank, stages - 1
        for _ in range(2):  # in which ranks compare what they call
            executor.step(next(batches))
        with crossings() as step:
            executor.step(next(batches))
        neighbours = (rank > 0) + (rank < last)
        sent = received = units * neighbours
        assert step == {
            "asarray": units * arrays_of_a_batch,
            "set": received,
            "get": sent + 1,  # one for the losses and the squares of all gradients
        }
        with crossings() as evaluation:
            executor.evaluate(list(numbers(SMALL).validation(4))[:2])
        assert (evaluation["asarray"], evaluation["set"]) == (2 * arrays_of_a_batch, 2 * (rank > 0))
        assert evaluation["get"] == 2

    LocalWorld(stages).run(main)


def test_the_same_text_is_generated(cupy):
    def main(xp: Any) -> list[int]:
        mesh = Mesh(world(), pp=2, tp=2)
        return list(generate(GPT(SMALL, mesh, dtype=np.float64, xp=xp), [1, 2, 3], 9))

    assert LocalWorld(4).run(main, cupy) == LocalWorld(4).run(main, np)

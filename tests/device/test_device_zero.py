"""ZeRO on device arrays: every stage has the bits of NumPy's run, and rows are packed and unpacked on the device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from often import some
from strict_array import crossings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
from checks_layouts import SIZES, numbers, reducer, train
from checks_zero import same_bits

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.events import Event, listen
from mpitrain.models.gpt import GPT
from mpitrain.nn.share import is_absent
from mpitrain.optim.adam import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

HOW: list[tuple[int, dict[str, Any]]] = [
    (3, {"dp": 3, "micros": 2, "bucket_bytes": 2048}),
    (4, {"dp": 2, "tp": 2, "sp": True, "adafactor": True}),
    (2, {"dp": 2, "dtype": "float16", "scaling": "loss"}),
    (4, {"pp": 2, "dp": 2, "micros": 2, "schedule": "zb-h1", "recompute": ("blocks.*",)}),
]


@pytest.mark.parametrize("zero", some([3, 1, 2]))
@pytest.mark.parametrize(("ranks", "how"), HOW)
def test_every_stage_has_the_bits_of_numpy(cupy, numpy_kernels, ranks, how, zero):
    def main(xp: Any) -> Any:
        world().set_deterministic(True)
        return train(world(), steps=2, zero=zero, xp=xp, **how)

    for mine, theirs in zip(*(LocalWorld(ranks).run(main, xp) for xp in (cupy, np)), strict=True):
        same_bits(mine, theirs, f"stage {zero}")


OF_ROWS = ("reduce_scatter", "all_gather", "iall_gather")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_nothing_crosses_but_batches_messages_and_one_norm(cupy, zero):
    """Each message is a copy to the host and one back; masters, shares and what is gathered stay on the device."""
    micros, arrays_of_a_batch = 2, 4

    def main() -> None:
        mesh = Mesh(world())
        model = GPT(SIZES, mesh, seed=3, dtype=np.float32, zero=zero, xp=cupy)
        rows = with_update(one_stage(micros))
        executor = Executor(model, AdamW(model.shares()), mesh, rows, reducer=reducer(model, mesh, 0))
        sent: list[str] = []

        def note(event: Event) -> None:
            if event.kind == "message" and event.phase == "begin" and event.name in OF_ROWS:
                sent.append(event.name)

        batches = numbers(SIZES).batches(4, mesh.dp.rank, mesh.dp.size)
        for _ in range(2):
            executor.step(next(batches))
        with crossings() as step, listen(note):
            executor.step(next(batches))
        assert step == {"asarray": arrays_of_a_batch * micros, "set": len(sent), "get": len(sent) + 1}
        for p in model.parameters():
            assert isinstance(p.data, cupy.ndarray)
            assert is_absent(p.data) == (zero == 3)

    LocalWorld(2).run(main)

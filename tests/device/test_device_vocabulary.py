"""A vocabulary cut over ranks, on device arrays: the bits of NumPy's, and nothing crosses but messages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strict_array import crossings, ndarray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the model is
from checks_vocabulary import IDS, LAYOUTS, TARGETS, Words

from mpitrain.autograd import Tape
from mpitrain.backend import to_host
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world


def train(xp: Any, dtype: Any, how: dict[str, bool]) -> tuple[list[np.ndarray], list[dict[str, int]]]:
    """(loss and gradients; what crossed forward and backward), after a step with two micro-batches."""
    world().set_deterministic(True)
    mesh = Mesh(world(), tp=world().size)
    model = Words(mesh, 13, **how)
    model.materialize(mesh, seed=5, dtype=dtype, xp=xp)
    model.start_step()
    ids, targets = xp.asarray(IDS), xp.asarray(TARGETS)
    for _ in range(2):
        with crossings() as forward, Tape() as tape:
            loss = model(ids, targets)
        seed = xp.asarray(0.125, dtype=loss.dtype)
        with crossings() as backward:
            tape.run_backward([(loss, seed)])
    found = [loss.data, *(p.grad for p in model.parameters())]
    assert all(isinstance(array, xp.ndarray) for array in found)
    return [to_host(array) for array in found], [dict(forward), dict(backward)]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("how", LAYOUTS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_training_has_the_bits_of_numpy_and_only_messages_cross(cupy, numpy_kernels, ranks, how, dtype):
    mine = LocalWorld(ranks).run(train, cupy, dtype, how)
    theirs = LocalWorld(ranks).run(train, np, dtype, how)
    for (arrays, crossed), (expected, _) in zip(mine, theirs, strict=True):
        for a, b in zip(arrays, expected, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert a.tobytes() == b.tobytes()
        ends = 0 if ranks == 1 else 2 if how["sequence_parallel"] else 1  # messages of table and head, either way
        assert [one.get("get", 0) for one in crossed] == [ends + (2 if ranks > 1 else 0), ends], crossed
        assert all(one.keys() <= {"get", "set"} and one.get("get", 0) == one.get("set", 0) for one in crossed)


def test_words_and_targets_that_do_not_exist_are_not_looked_for(cupy):
    """No op may wait for the device to look: an id wraps around as in the serial op, a target is held by nobody."""

    def main() -> None:
        mesh = Mesh(world(), tp=2)
        model = Words(mesh, 13)
        model.materialize(mesh, dtype=np.float64, xp=cupy)
        ids = cupy.asarray(IDS)
        rows = model.table(ids)
        assert isinstance(rows.data, ndarray)
        assert (model.table(ids + 13).data == rows.data).all()
        assert np.isfinite(model(ids, cupy.asarray(TARGETS) * 0 + 13).item())

    LocalWorld(2).run(main)

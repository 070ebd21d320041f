"""Frozen weights on device arrays: the bits of NumPy's run; halves are read and written where they live."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
from checks_layouts import train
from checks_zero import same_bits

from mpitrain.backend import to_host
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.nn.parameter import Widened

FREEZE = ("table", "blocks.0.mlp", "*.bias")


@pytest.mark.parametrize(("dtype", "zero"), [("float64", 3), ("float16", 0)])
def test_frozen_weights_have_the_bits_of_numpy(cupy: Any, numpy_kernels: None, dtype: str, zero: int) -> None:
    def main(xp: Any) -> Any:
        world().set_deterministic(True)
        scaling = "loss" if dtype == "float16" else "none"
        return train(world(), steps=2, dp=2, zero=zero, freeze=FREEZE, dtype=dtype, scaling=scaling, xp=xp)

    for mine, theirs in zip(*(LocalWorld(2).run(main, xp) for xp in (cupy, np)), strict=True):
        same_bits(mine, theirs, dtype)


def test_a_frozen_half_is_written_on_the_device(cupy: Any) -> None:
    config = GPTConfig(layers=1, width=8, heads=2, vocab=5, seq_len=4)
    model = GPT(config, Mesh(world()), dtype=np.float16, freeze=["table"], xp=cupy)
    master = model.table.weight.master
    assert isinstance(master, Widened)
    values = np.full((5, 8), 1 / 3, np.float32)
    for given in (values, cupy.asarray(values)):
        master[...] = 0 * given
        master[...] = given
        assert (to_host(model.table.weight.data) == np.float16(1 / 3)).all()
    assert isinstance(master[1:2], cupy.ndarray)
    assert to_host(master).dtype == np.float32

"""Rows of device arrays that travel to experts beside computation: NumPy's bits, all at once or by halves."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the training is
import checks_layouts as checks

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.routing import Routing

SIZES = replace(checks.SIZES, layers=1, routing=Routing(4, 2, "gshard", 1.0, balance_loss=0.16))


def test_a_training_by_halves_has_the_bits_of_numpy(cupy, numpy_kernels):
    def main():
        world().set_deterministic(True)
        how = {"sizes": SIZES, "dp": 2, "ep": 2, "batch": 4, "steps": 1}
        expected = checks.train(world(), **how)
        for kind, tensors in checks.train(world(), xp=cupy, overlap=True, **how).items():
            for name, array in tensors.items():
                np.testing.assert_array_equal(array, expected[kind][name], f"{kind} {name}")

    LocalWorld(2).run(main)

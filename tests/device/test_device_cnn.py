"""A convolutional network on device arrays: NumPy's run to the last bit, on one rank, on several, in stages."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
from checks_cnn import train

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.memory.gist import Gist

LAYOUTS = {
    "one rank": (1, {}),
    "micro-batches": (2, {"micros": 2}),
    "stages": (2, {"pp": 2, "micros": 3}),
    "halves": (1, {"dtype": np.float16}),
    "norms": (2, {"norms": {"batch_norm": True}}),
    "norms of halves": (1, {"norms": {"batch_norm": True}, "dtype": np.float16}),
    "encoded activations": (1, {"policy": Gist(bits=10)}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_learned_has_the_bits_of_numpy(cupy, numpy_kernels, layout):
    ranks, how = LAYOUTS[layout]
    on_device, on_host = (LocalWorld(ranks).run(lambda xp=xp: train(world(), xp=xp, **how)) for xp in (cupy, np))
    for mine, theirs in zip(on_device, on_host, strict=True):
        for kind, tensors in theirs.items():
            for name, array in tensors.items():
                assert mine[kind][name].tobytes() == array.tobytes(), (kind, name)

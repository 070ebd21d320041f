"""A convolutional network on device arrays: NumPy's run to the last bit, on one rank, on several, in stages."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
from checks_cnn import train

from mpitrain.comm.local import LocalWorld, run_script
from mpitrain.comm.world import world
from mpitrain.memory.gist import Gist

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "11_digits_cnn.py"
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


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn, whose digits are learned, is not installed")
def test_the_example_learns_on_a_device_what_it_learns_on_the_cpu(cupy, numpy_kernels, capsys):
    """Its whole command line: the losses that it prints, and its own comparison with a serial run."""
    printed = []
    for device in ("cuda", "cpu"):
        flags = f"--epochs 1 --pp 2 --batch-norm --device {device}".split()
        assert run_script(2, str(EXAMPLE), flags) == 0
        printed.append([line for line in capsys.readouterr().out.splitlines() if "KiB" not in line])
    assert printed[0] == printed[1]
    assert any(line.startswith("test: loss") for line in printed[0])

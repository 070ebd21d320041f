"""Which kernels stand behind the names: chosen, named by the environment, agreed on, and there without a compiler."""

import inspect
import os
import subprocess
import sys

import numpy as np
import pytest

import mpitrain
from mpitrain import kernels
from mpitrain.errors import ConfigError
from mpitrain.kernels import reference

REPORT = "from mpitrain import kernels; print(kernels.level(), kernels.levels())"

# Imports the package as it is after a build without a compiler.
WITHOUT = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "mpitrain.kernels._compiled":
            raise ImportError(name)

sys.meta_path.insert(0, Hidden())
"""

TRAINING = """
import numpy as np
from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.optim import AdamW
from mpitrain.nn.layers import Linear

class Alone:
    coords = dict.fromkeys(("pp", "edp", "ep", "cp", "tp"), 0)
    sizes = dict.fromkeys(coords, 1)

layer = Linear("l", 4, 3)
layer.materialize(Alone, seed=0, dtype=np.float32)
method, targets = AdamW(layer.parameters(), lr=0.1), np.arange(6) % 3
x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
losses = []
for _ in range(40):
    with Tape() as tape:
        loss = ops.softmax_cross_entropy(layer(ops.gelu_tanh(Tensor(x))), targets)
    for _ in tape.backward([(loss, np.ones((), np.float32))]):
        pass
    method.step()
    losses.append(float(loss.data))
assert losses[-1] < losses[0] / 2, losses
print(kernels.level(), kernels.levels())
"""


def python(code, **variables):
    """(what the code prints, what it says) in a fresh interpreter."""
    env = {k: v for k, v in os.environ.items() if k != kernels.VARIABLE} | variables
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_numpy_is_always_there_and_the_lowest():
    levels = kernels.levels()
    assert levels[0] == "numpy"
    assert levels == sorted(levels, key=kernels.ORDER.index)
    assert set(levels) <= set(kernels.ORDER)


def test_a_level_is_chosen_for_all_names_at_once(level):
    assert kernels.level() == level
    for name in reference.__all__:
        kernel = getattr(kernels, name)
        assert callable(kernel)
        assert (kernel is getattr(reference, name)) or level != "numpy"
    if level != "numpy":
        assert kernels.gelu_tanh is not reference.gelu_tanh
        assert kernels.erf is reference.erf  # which nothing that is trained needs


def test_a_kernel_that_is_compiled_has_a_reference_of_the_same_signature():
    compiled = pytest.importorskip("mpitrain.kernels.compiled")
    fast = [name for name in reference.__all__ if hasattr(compiled, name)]
    assert len(fast) >= 17
    for name in fast:
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (compiled, reference))
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ], name


def test_levels_compute_differently_and_nearly_the_same():
    """Else the tests of levels would test one and the same."""
    x = np.random.default_rng(0).standard_normal((64, 65)).astype(np.float32)
    seen = {}
    for name in kernels.levels():
        kernels.select(name)
        seen[name] = kernels.gelu_erf(x)[0]
        np.testing.assert_allclose(seen[name], seen["numpy"], rtol=1e-4, atol=1e-6)
    if "x86-64-v3" in seen:
        assert not np.array_equal(seen["x86-64-v3"], seen["baseline"])  # fused multiply-add
        assert not np.array_equal(seen["baseline"], seen["numpy"])


def test_a_level_that_is_not_there_is_refused_and_changes_nothing():
    before = kernels.level()
    with pytest.raises(ConfigError, match=r"'x86-64-v9'.*numpy"):
        kernels.select("x86-64-v9")
    assert kernels.level() == before


def test_the_common_level_is_the_lowest():
    assert kernels.common(["x86-64-v4", "baseline", "x86-64-v3"]) == "baseline"
    assert kernels.common(["x86-64-v3"]) == "x86-64-v3"
    assert kernels.common(iter(["x86-64-v4", "numpy"])) == "numpy"
    assert kernels.common(kernels.ORDER[::-1]) == "numpy"


def test_the_environment_names_the_level(monkeypatch):
    here = kernels.levels()
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    assert kernels.wanted() == here[-1]
    for name in here:
        monkeypatch.setenv(kernels.VARIABLE, name)
        assert kernels.wanted() == name
    monkeypatch.setenv(kernels.VARIABLE, "fastest")
    with pytest.raises(ConfigError, match=r"MPITRAIN_KERNELS=fastest: .*numpy"):
        kernels.wanted()


def test_a_process_starts_with_the_highest_level_or_the_one_that_is_named():
    here = kernels.levels()
    assert python(REPORT) == f"{here[-1]} {here}"
    assert python(REPORT, MPITRAIN_KERNELS="numpy") == f"numpy {here}"
    assert python(REPORT, MPITRAIN_KERNELS="") == f"{here[-1]} {here}"
    # An import has nobody to tell it to; whoever asks for `wanted` is told.
    assert python(REPORT, MPITRAIN_KERNELS="no such level") == f"{here[-1]} {here}"


def test_without_the_extension_the_numpy_path_trains():
    assert python(WITHOUT + TRAINING) == "numpy ['numpy']"
    assert mpitrain.kernels.level() == kernels.levels()[-1]


def test_with_the_extension_the_same_training_goes_as_well():
    assert python(TRAINING) == f"{kernels.levels()[-1]} {kernels.levels()}"


def test_a_level_that_was_selected_stays_when_ranks_agree():
    from mpitrain.comm.world import world
    from mpitrain.parallel.replicas import agree_on_arithmetic

    kernels.select("numpy")
    agree_on_arithmetic(world())
    assert kernels.level() == "numpy"
    kernels.select(None)
    assert kernels.level() == kernels.wanted()


CHANGES = """
import threading
import numpy as np
from mpitrain import kernels

done = threading.Event()

def change():
    while not done.is_set():
        for level in kernels.levels()[1:]:
            kernels.select(level)

other = threading.Thread(target=change)
other.start()
q = np.random.default_rng(0).standard_normal((2, 4, 96, 16)).astype(np.float32)
setting = dict(scale=0.25, causal=True, mask=None, rows=None, drop=0.0)
expected = None
for _ in range(400):
    out, grads = np.empty_like(q), [np.empty_like(q) for _ in range(3)]
    lse = kernels.attention(q, q, q, out, **setting)
    kernels.attention_backward(q, q, q, q, out, lse, *grads, **setting)
    expected = out if expected is None else expected
    assert np.abs(out - expected).max() < 1e-5
done.set()
other.join()
print("alive")
"""


def test_another_thread_may_change_the_level_while_a_kernel_runs():
    if len(kernels.levels()) < 3:
        pytest.skip("this CPU and build have one compiled level")
    assert "alive" in python(CHANGES)

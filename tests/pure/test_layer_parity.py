"""Every layer does what the same layer of PyTorch does: values, gradients of inputs, gradients of parameters."""

import numpy as np
import pytest
from layer_cases import LAYERS, short, tensors

from mpitrain.autograd import Tape

torch = pytest.importorskip("torch")

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_that_of_pytorch(name, dtype):
    case, layer = LAYERS[name], LAYERS[name].made(dtype)
    inputs = tensors(case.arrays, dtype)
    theirs = [torch.tensor(x if isinstance(x, np.ndarray) else x.data) for x in inputs]
    weights = {short(layer, p.name): torch.tensor(p.data) for p in layer.parameters()}
    leaves = [x.requires_grad_() for x in (*theirs, *weights.values()) if x.is_floating_point()]
    layer.start_step()
    with Tape() as tape:
        outputs = as_tuple(case.run(layer, *inputs))
    expected = as_tuple(case.torch(torch, weights, *theirs))
    seeds = [np.random.default_rng(9).standard_normal(y.shape).astype(dtype) for y in outputs]
    grads = tape.run_backward(list(zip(outputs, seeds, strict=True)))
    their_grads = torch.autograd.grad(expected, leaves, [torch.tensor(seed) for seed in seeds])

    ours = [y.data for y in outputs]
    ours += [grads[x] for x in inputs if not isinstance(x, np.ndarray)] + [p.grad for p in layer.parameters()]
    for found, other in zip(ours, [*expected, *their_grads], strict=True):
        other = other.detach().numpy()
        assert found.shape == other.shape
        assert found.dtype == np.dtype(dtype)
        assert np.abs(found - other).max() <= TOLERANCE[dtype] * max(np.abs(other).max(), 1.0)


def as_tuple(y):
    return y if isinstance(y, tuple) else (y,)

"""An operation run forward and backward, and two of them compared."""

import numpy as np

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor

BOTH_ENDS = tuple(dict.fromkeys((kernels.levels()[0], kernels.levels()[-1])))
"""The references, and the best compiled kernels of this machine."""


def run(function, *arrays, seed=None):
    """(y, gradients) of a function of tensors; the cotangent is fixed by the shape."""
    inputs = [Tensor(array, requires_grad=True) for array in arrays]
    with Tape() as tape:
        y = function(*inputs)
    v = np.random.default_rng(5).standard_normal(y.shape).astype(y.dtype) if seed is None else seed
    grads = tape.run_backward([(y, v)])
    return y.data, [grads[t] for t in inputs]


def assert_same(one, other, tolerance=1e-12):
    (y, grads), (z, others) = one, other
    np.testing.assert_allclose(y, z, rtol=tolerance, atol=tolerance)
    for grad, expected in zip(grads, others, strict=True):
        assert (grad.shape, grad.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(grad, expected, rtol=tolerance, atol=tolerance)

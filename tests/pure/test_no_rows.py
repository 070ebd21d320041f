"""No tokens: an expert that nobody chose hands arrays without rows through every op that a layer may have."""

import numpy as np
import pytest
from half_calls import BFLOAT16
from kernel_calls import hashes

from mpitrain.autograd import Tape, Tensor, ops

NO_ROWS = {
    "gelu_tanh": (ops.gelu_tanh, ()),
    "gelu_tanh with a bias": (ops.gelu_tanh, (8,)),
    "gelu_erf": (ops.gelu_erf, ()),
    "gelu_erf with a bias": (ops.gelu_erf, (8,)),
    "linear": (lambda x, w: ops.linear(x, w), ((8, 8),)),
    "linear with a bias": (ops.linear, ((8, 8), 8)),
    "layer_norm": (ops.layer_norm, (8, 8)),
    "softmax": (ops.softmax, ()),
    "logsumexp": (lambda x: ops.expand(ops.logsumexp(x, -1), -1), ()),
    "dropout": (lambda x: ops.dropout(x, hashes(*x.shape[:-1]), 0.5), ()),
    "residual": (lambda x, b: ops.residual(x, x, b, rows=hashes(*x.shape[:-1]), p=0.5), (8,)),
    "residual_norm": (lambda x, *w: ops.residual_norm(x, x, *w, rows=hashes(*x.shape[:-1]), p=0.5)[1], (8, 8, 8)),
    "rms_norm": (ops.rms_norm, (8,)),
    "residual_rms_norm": (
        lambda x, *w: ops.residual_rms_norm(x, x, *w, rows=hashes(*x.shape[:-1]), p=0.5)[1],
        (8, 8),
    ),
    "swiglu": (lambda x: ops.swiglu(x, x), ()),
    "cross-entropy": (lambda x: ops.softmax_cross_entropy(x, np.zeros(x.shape[:-1], int)), ()),
    "cast": (lambda x: x.astype(np.float32) * 2.0, ()),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_an_expert_without_tokens_runs_through_every_op(name, level):
    function, rest = NO_ROWS[name]
    for dtype in (np.float64, np.float32, np.float16, BFLOAT16):
        for shape in ((0, 8), (2, 0, 8), (0, 3, 8)):
            others = [np.ones(s, dtype) for s in rest]
            inputs = [Tensor(a, requires_grad=True) for a in (np.zeros(shape, dtype), *others)]
            with Tape() as tape:
                y = function(*inputs)
            grads = tape.run_backward([(y, np.ones(y.shape, y.dtype))])
            assert y.size == 0 or (y.shape == () and y.data == 0)
            for t in inputs:
                assert (grads[t].shape, grads[t].dtype) == (t.shape, t.dtype)
                assert not grads[t].any()

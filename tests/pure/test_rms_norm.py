"""RMS norm, alone and at the end of a residual branch, and the two layers that have one."""

import numpy as np
import pytest
from op_calls import run

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import ShapeError
from mpitrain.nn.layers import LayerNorm, Residual, SwiGLU
from mpitrain.nn.norm import RMSNorm
from mpitrain.rng import Draw

RNG = np.random.default_rng(7)
DRAW = Draw(3, 1, np.arange(2), np.arange(7))


def normal(*shape):
    return RNG.standard_normal(shape)


def formula(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def test_the_value_is_the_formula(level):
    x, weight = normal(2, 7, 50), normal(50)
    for eps in (1e-5, 0.3):
        np.testing.assert_allclose(
            ops.rms_norm(Tensor(x), Tensor(weight), eps).data, formula(x, weight, eps), rtol=1e-12
        )
    assert not ops.rms_norm(Tensor(np.zeros((3, 4))), Tensor(normal(4))).data.any()  # no root of 0 is divided by


def test_gradients(level):
    rows = DRAW.rows("branch")
    check(ops.rms_norm, normal(2, 7, 3), normal(3))
    check(lambda x, w: ops.rms_norm(x, w, 0.5), normal(4, 17), normal(17))
    branch = normal(2, 7, 3), normal(2, 7, 3), normal(3), normal(3)
    check(lambda *t: ops.residual_rms_norm(*t, rows=rows, p=0.4), *branch)
    check(lambda x, y, w: ops.residual_rms_norm(x, y, None, w), normal(4, 3), normal(4, 3), normal(3))
    check(ops.swiglu, normal(2, 19), normal(2, 19))


@pytest.mark.parametrize("shape", [(2, 7, 50), (2, 7, 1)])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("biased", [True, False])
def test_a_branch_that_ends_in_a_norm_is_a_residual_and_its_norm(shape, p, biased):
    rows = DRAW.rows("branch") if p else None
    d = shape[-1]
    arrays = normal(*shape), normal(*shape), normal(d), *([normal(d)] if biased else [])
    seeds = normal(*shape), normal(*shape)

    def walk(function, seeds):
        inputs = [Tensor(a, requires_grad=True) for a in arrays]
        x, y, weight, *rest = inputs
        with Tape() as tape:
            outputs = function(x, y, rest[0] if rest else None, weight)
        grads = tape.run_backward([(t, s) for t, s in zip(outputs, seeds, strict=True) if s is not None])
        return [*(t.data for t in outputs), *(grads.get(t) for t in inputs)]

    def fused(x, y, branch_bias, weight):
        return ops.residual_rms_norm(x, y, branch_bias, weight, rows=rows, p=p, eps=0.1)

    def apart(x, y, branch_bias, weight):
        total = ops.residual(x, y, branch_bias, rows=rows, p=p)
        return total, ops.rms_norm(total, weight, 0.1)

    for given in (seeds, (seeds[0], None), (None, seeds[1])):
        for a, b in zip(walk(fused, given), walk(apart, given), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("draw", [None, DRAW], ids=["evaluation", "dropout"])
@pytest.mark.parametrize("norm", [RMSNorm("norm", 50, eps=0.1), LayerNorm("norm", 50, eps=0.1)], ids=["rms", "layer"])
def test_a_residual_ends_in_either_norm(norm, draw):
    norm.materialize(Mesh(world()), dtype=np.float64)
    for p in norm.parameters():
        p.data[...] = normal(50)
    layer = Residual("branch", 0.3)
    x, y, bias = (Tensor(normal(*shape)) for shape in ((2, 7, 50), (2, 7, 50), (50,)))
    total, normed = layer.then(norm, x, y, bias, draw)
    assert np.array_equal(total.data, layer(x, y, bias, draw).data)
    np.testing.assert_allclose(normed.data, norm(total).data, rtol=1e-12, atol=1e-12)


def test_the_layers_are_their_ops():
    norm = RMSNorm("norm", 5)
    norm.materialize(Mesh(world()))
    assert [(p.name, p.data.tolist()) for p in norm.parameters()] == [("norm.weight", [1.0] * 5)]
    x, y = Tensor(normal(3, 5)), Tensor(normal(3, 5))
    assert np.array_equal(norm(x).data, ops.rms_norm(x, norm.weight, 1e-5).data)
    np.testing.assert_allclose(SwiGLU()(x, y).data, x.data / (1 + np.exp(-x.data)) * y.data, rtol=1e-12)


def test_gradients_of_halves_are_halves():
    for y, grads in (
        run(ops.rms_norm, normal(3, 9).astype(np.float16), normal(9).astype(np.float16)),
        run(ops.swiglu, normal(3, 9).astype(np.float16), normal(3, 9).astype(np.float16)),
    ):
        assert {y.dtype, *(grad.dtype for grad in grads)} == {np.dtype(np.float16)}


def test_what_does_not_fit_is_refused():
    x, v = Tensor(normal(2, 7, 3)), Tensor(normal(3))
    for weight in (normal(4), normal(1, 3), normal(1)):
        with pytest.raises(ShapeError, match=r"^rms_norm: x .* and weight .* do not go together"):
            ops.rms_norm(x, Tensor(weight))
        with pytest.raises(ShapeError, match=r"^residual_rms_norm: x .* and weight .* do not go together"):
            ops.residual_rms_norm(x, x, None, Tensor(weight))
    with pytest.raises(ShapeError, match=r"^residual_rms_norm: x .* and y .* differ"):
        ops.residual_rms_norm(x, Tensor(normal(2, 7, 4)), None, v)
    with pytest.raises(ShapeError, match=r"^residual_rms_norm: x .* and bias .* do not go together"):
        ops.residual_rms_norm(x, x, Tensor(normal(4)), v)
    with pytest.raises(ShapeError, match=r"^residual_rms_norm: x .* wants rows"):
        ops.residual_rms_norm(x, x, None, v, rows=DRAW.rows("a")[:1], p=0.1)
    for other in (normal(2, 7, 4), normal(7, 3), normal(2, 7, 3).astype(np.float32)):
        with pytest.raises(ShapeError, match=r"^swiglu: gate .* and up .* differ"):
            ops.swiglu(x, Tensor(other))

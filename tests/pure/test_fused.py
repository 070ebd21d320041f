"""Fused operations: equal to what they are made of, right where formulas divide by zero, and lean.

All of it holds for the NumPy path and for the best compiled kernels of this machine.
"""

import math

import numpy as np
import pytest
from op_calls import BOTH_ENDS, assert_same, run

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.errors import ShapeError

RNG = np.random.default_rng(11)


def normal(*shape):
    return RNG.standard_normal(shape)


@pytest.fixture(autouse=True, params=BOTH_ENDS)
def level(request):
    kernels.select(request.param)
    return request.param


IN_BLOCKS = pytest.mark.parametrize("level", ["numpy"], indirect=True)  # the compiled kernels have their own


# ------------------------------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (4,), (0, 4), (2, 0, 4)])
def test_linear_is_matmul_and_add(shape):
    x, w, b = normal(*shape), normal(4, 3), normal(3)
    assert_same(run(ops.linear, x, w, b), run(lambda x, w, b: x @ w + b, x, w, b))
    assert_same(run(ops.linear, x, w), run(ops.matmul, x, w))
    check(ops.linear, x, w, b)


def test_linear_may_have_no_outputs():
    y, (dx, dw, db) = run(ops.linear, normal(2, 3, 4), normal(4, 0), normal(0))
    assert (y.shape, dx.shape, dw.shape, db.shape) == ((2, 3, 0), (2, 3, 4), (4, 0), (0,))
    assert not dx.any()


def test_linear_takes_views_and_gradients_of_any_strides():
    x, w = normal(8, 6).T[::2], normal(6, 8).T
    check(lambda x, w: ops.linear(x, w).sum(), x, w)  # the gradient is a broadcast number
    check(lambda x, w: ops.linear(x, w).T, x, w)


def test_half_precision_products_are_as_good_as_single_precision_rounded_once():
    x, w, b = normal(64, 512), normal(512, 32), normal(32)
    y, grads = run(ops.linear, *(a.astype(np.float16) for a in (x, w, b)))
    z, others = run(ops.linear, *(a.astype(np.float16).astype(np.float32) for a in (x, w, b)))
    assert y.dtype == np.float16
    assert np.abs(y - z).max() <= np.abs(z).max() * 2**-10
    for grad, expected in zip(grads, others, strict=True):
        assert grad.dtype == np.float16
        assert np.abs(grad - expected).max() <= np.abs(expected).max() * 2**-9


# --------------------------------------------------------------------------------------------------------- layer norm


def plain_layer_norm(x, weight, bias, eps=1e-5):
    centered = x - x.mean(-1, keepdims=True)
    return centered / (x.var(-1, keepdims=True) + eps).__pow__(0.5) * weight + bias


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 5), (6,), (0, 4), (3, 1)])
def test_layer_norm_is_what_it_is_made_of(shape):
    arrays = normal(*shape), normal(shape[-1]), normal(shape[-1])
    assert_same(run(ops.layer_norm, *arrays), run(plain_layer_norm, *arrays), 1e-11)
    check(ops.layer_norm, *arrays)


@IN_BLOCKS
def test_layer_norm_in_blocks_is_layer_norm(small_blocks):
    arrays = normal(11, 3), normal(3), normal(3)
    assert_same(run(ops.layer_norm, *arrays), run(plain_layer_norm, *arrays), 1e-11)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("eps", [1e-12, 1e-5])
@pytest.mark.parametrize("width", [128, 100, 7])
def test_layer_norm_of_a_constant_row_is_the_bias_exactly(dtype, eps, width):
    """C12."""
    x = np.stack([np.full(width, c) for c in (0.0, 0.1, -3.7, 1000.3)]).astype(dtype)
    weight, bias = normal(width).astype(dtype), normal(width).astype(dtype)
    seed = (normal(4, width) / 1000).astype(dtype)  # half precision still holds it, times 1 / sqrt(1e-12)
    y, grads = run(lambda x, w, b: ops.layer_norm(x, w, b, eps), x, weight, bias, seed=seed)
    assert (y == bias).all()
    assert y.dtype == dtype
    assert all(np.isfinite(grad).all() for grad in grads)


def test_layer_norm_of_rows_far_from_zero_keeps_its_digits():
    """C12."""
    offsets = RNG.permutation(64).reshape(1, 64) * 0.5
    weight, bias = np.ones(64, np.float32), np.zeros(64, np.float32)
    near, near_grads = run(ops.layer_norm, offsets.astype(np.float32), weight, bias)
    far, far_grads = run(ops.layer_norm, (offsets + 1e6).astype(np.float32), weight, bias)
    np.testing.assert_allclose(far, near, rtol=1e-5, atol=1e-5)
    for grad, expected in zip(far_grads, near_grads, strict=True):
        np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)


def test_layer_norm_survives_an_outlier_in_front():
    x = np.ones((1, 64), np.float32)
    x[0, 0] = 1e8
    y, _ = run(ops.layer_norm, x, np.ones(64, np.float32), np.zeros(64, np.float32))
    exact, _ = run(ops.layer_norm, x.astype(np.float64), np.ones(64), np.zeros(64))
    np.testing.assert_allclose(y, exact, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------ cross-entropy


TARGETS = np.array([[2, -100, 0], [4, 4, -100]])


def test_cross_entropy_gradient():
    check(lambda x: ops.softmax_cross_entropy(x, TARGETS), normal(2, 3, 5))
    check(lambda x: ops.softmax_cross_entropy(x, np.array([4, 0]), ignore=4) * 2.0, normal(2, 5))


def test_cross_entropy_equals_pytorch():
    torch = pytest.importorskip("torch")
    logits = normal(2, 3, 5) * 4
    for ignore in (-100, 4):
        targets = np.where(TARGETS == -100, 1, TARGETS) if ignore == 4 else TARGETS
        y, (dx,) = run(lambda x, t=targets, i=ignore: ops.softmax_cross_entropy(x, t, i), logits, seed=np.array(0.7))
        t = torch.from_numpy(logits).requires_grad_()
        z = torch.nn.functional.cross_entropy(
            t.view(-1, 5), torch.from_numpy(targets).view(-1), reduction="sum", ignore_index=ignore
        )
        (z * 0.7).backward()
        assert y == pytest.approx(z.item(), rel=1e-13)
        np.testing.assert_allclose(dx, t.grad.numpy(), rtol=1e-12, atol=1e-14)
        assert not dx[targets == ignore].any()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_without_valid_targets_the_loss_and_its_gradient_are_zero(dtype):
    """C09."""
    y, (dx,) = run(lambda x: ops.softmax_cross_entropy(x, np.full(4, -100)), normal(4, 5).astype(dtype))
    assert y == 0
    assert dx.dtype == dtype
    assert not dx.any()
    y, (dx,) = run(lambda x: ops.softmax_cross_entropy(x, np.zeros(0, int)), normal(0, 5))
    assert (y, dx.shape) == (0, (0, 5))


def test_cross_entropy_of_large_logits_does_not_overflow_and_its_sum_is_wide():
    logits = np.zeros((70_000, 2), np.float16)
    logits[:, 0] = 60_000
    y, (dx,) = run(lambda x: ops.softmax_cross_entropy(x, np.ones(70_000, int)), logits)
    assert y.dtype == np.float32
    assert y == pytest.approx(70_000 * np.float64(np.float16(60_000)), rel=1e-6)
    assert np.isfinite(dx).all()


@IN_BLOCKS
def test_cross_entropy_in_blocks_is_cross_entropy(small_blocks):
    logits, targets = normal(9, 4), RNG.integers(0, 4, 9)
    y, (dx,) = run(lambda x: ops.softmax_cross_entropy(x, targets), logits, seed=np.array(2.0))
    z, (dz,) = run(lambda x: ops.gather_along(ops.log_softmax(x), targets[:, None]).sum(), logits, seed=np.array(-2.0))
    assert y == pytest.approx(-z, rel=1e-14)
    np.testing.assert_allclose(dx, dz, rtol=1e-12, atol=1e-15)


# --------------------------------------------------------------------------------------------------------------- gelu


@IN_BLOCKS
@pytest.mark.parametrize("op", [ops.gelu_tanh, ops.gelu_erf])
def test_gelu_in_blocks_is_gelu_also_far_out(op, small_blocks):
    x = np.concatenate([normal(20), [-50.0, -9.0, 9.0, 50.0]]).reshape(4, 6).T
    y, _ = run(op, x)
    assert (y[2:, 3] == [0, 0, 9, 50]).all() if op is ops.gelu_tanh else (y[4:, 3] == [9, 50]).all()
    check(op, x)


@pytest.mark.parametrize("op", [ops.gelu_tanh, ops.gelu_erf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_far_out_is_x_or_nothing(op, dtype):
    """Also where x^3 overflows; between, the gate may keep digits that 1 + tanh has lost."""
    y, (slope,) = run(op, np.array([-1e12, -50.0, -9.0, 9.0, 50.0, 1e12], dtype), seed=np.ones(6, dtype))
    assert (y[3:] == np.array([9, 50, 1e12], dtype)).all()
    assert (slope[4:] == 1).all()
    assert (np.abs(y[:3]) < 1e-15).all()
    assert (np.abs(slope[:3]) < 1e-14).all()


@pytest.mark.parametrize("op", [ops.gelu_tanh, ops.gelu_erf])
@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 5), (7,), (0, 4), (3, 0)])
def test_gelu_with_a_bias_is_gelu_of_the_sum(op, shape):
    x, bias = normal(*shape), normal(shape[-1])
    assert_same(run(op, x, bias), run(lambda x, b: op(x + b), x, bias))
    check(op, x, bias)


@IN_BLOCKS
@pytest.mark.parametrize("op", [ops.gelu_tanh, ops.gelu_erf])
def test_gelu_with_a_bias_in_blocks(op, small_blocks):
    x, bias = normal(11, 3), normal(3)
    assert_same(run(op, x, bias), run(lambda x, b: op(x + b), x, bias))


def test_gelu_takes_no_bias_and_half_precision():
    x, bias = normal(6, 5), normal(5)
    assert_same(run(lambda t: ops.gelu_tanh(t, None), x), run(ops.gelu_tanh, x))
    y, (dx, db) = run(ops.gelu_tanh, x.astype(np.float16), bias.astype(np.float16))
    z, (dz, dc) = run(ops.gelu_tanh, x, bias)
    assert y.dtype == dx.dtype == db.dtype == np.float16
    np.testing.assert_allclose(y, z, atol=4e-3)
    np.testing.assert_allclose(dx, dz, atol=1e-2)
    np.testing.assert_allclose(db, dc, atol=4e-2)


@pytest.mark.parametrize("op", [ops.gelu_tanh, ops.gelu_erf])
def test_gelu_refuses_a_bias_that_does_not_fit(op):
    for x, bias in (
        (normal(2, 3), normal(2)),
        (normal(2, 3), normal(1)),
        (normal(2, 3), normal(1, 3)),
        (normal(2, 3), np.float64(1)),
        (np.float64(1), normal(1)),
        (normal(2, 3), normal(3).astype(np.float32)),
    ):
        with pytest.raises(ShapeError, match=rf"{op.__name__}: x .* and bias .* do not go together"):
            op(Tensor(x), Tensor(bias))


@pytest.mark.parametrize(("op", "approximate"), [(ops.gelu_tanh, "tanh"), (ops.gelu_erf, "none")])
def test_gelu_with_a_bias_equals_pytorch(op, approximate):
    torch = pytest.importorskip("torch")
    x, bias = 3 * normal(9, 33), normal(33)
    seed = normal(9, 33)
    y, (dx, db) = run(op, x, bias, seed=seed)
    t, b = torch.tensor(x, requires_grad=True), torch.tensor(bias, requires_grad=True)
    z = torch.nn.functional.gelu(t + b, approximate=approximate)
    z.backward(torch.tensor(seed))
    for mine, theirs in ((y, z.detach()), (dx, t.grad), (db, b.grad)):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("op", "kind"), [(ops.gelu_tanh, "tanh"), (ops.gelu_erf, "erf")])
def test_gelu_is_right_in_every_precision(op, kind):
    x = np.linspace(-6, 6, 1001)
    exact = {
        "tanh": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
        "erf": lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))),
    }[kind]
    for dtype, tolerance in ((np.float64, 1e-14), (np.float32, 1e-6), (np.float16, 4e-3)):
        y = op(Tensor(x.astype(dtype))).data
        assert y.dtype == dtype
        assert np.abs(y - [exact(v) for v in x.astype(dtype).astype(float)]).max() < tolerance


def test_gelu_keeps_one_array():
    with Tape() as tape:
        ops.gelu_tanh(Tensor(np.zeros((10, 10)), requires_grad=True) * 1.0)
    assert tape.nbytes == 800


def test_kernels_write_products_into_wider_buffers():
    a, b = normal(3, 4).astype(np.float16), normal(4, 2).astype(np.float16)
    out = np.zeros((3, 2), np.float32)
    assert kernels.matmul(a, b, out=out) is out
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32))


def test_the_gradient_of_an_ignored_row_is_zero_also_where_its_logits_are_nan():
    logits = normal(3, 4)
    logits[1] = np.nan
    targets = np.array([2, ops.IGNORE, 0])
    _, (grad,) = run(lambda x: ops.softmax_cross_entropy(x, targets), logits)
    assert (grad[1] == 0).all()
    assert np.isfinite(grad[[0, 2]]).all()

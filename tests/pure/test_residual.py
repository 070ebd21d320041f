"""Dropout is its mask, and the end of a residual branch in one pass is what it is made of."""

import numpy as np
import pytest
from op_calls import BOTH_ENDS, assert_same, run

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.errors import ShapeError
from mpitrain.rng import Draw, keep_mask

RNG = np.random.default_rng(12)


def normal(*shape):
    return RNG.standard_normal(shape)


@pytest.fixture(autouse=True, params=BOTH_ENDS)
def level(request):
    kernels.select(request.param)
    return request.param


# ------------------------------------------------------------------------------------------------------------ dropout


DRAW = Draw(seed=3, step=5, places=np.arange(2), positions=np.arange(7))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dropout_is_the_product_with_its_mask(dtype):
    x = normal(2, 7, 50).astype(dtype)
    rows = DRAW.rows("layer.drop")
    y, (dx,) = run(lambda t: ops.dropout(t, rows, 0.25), x, seed=np.ones_like(x))
    keep = keep_mask(rows, 50, 0.25)
    assert 0.2 < 1 - keep.mean() < 0.3
    np.testing.assert_allclose(y, (x * keep / 0.75).astype(dtype), rtol=1e-3 if dtype == np.float16 else 1e-6)
    assert y.dtype == dx.dtype == dtype
    assert ((dx != 0) == keep).all()
    assert (y == ops.dropout(Tensor(x), rows, 0.25).data).all()


def test_dropout_keeps_all_at_0_and_nothing_at_1():
    x = Tensor(normal(2, 7, 5))
    assert ops.dropout(x, DRAW.rows("a"), 0.0) is x
    assert not ops.dropout(x, DRAW.rows("a"), 1.0).data.any()


def test_dropout_gradient():
    check(lambda x: ops.dropout(x, DRAW.rows("a"), 0.4), normal(2, 7, 3))


# ----------------------------------------------------------------------------------------------------------- residual


@pytest.mark.parametrize("shape", [(2, 7, 50), (2, 7, 3), (2, 7, 0)])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("biased", [True, False])
def test_residual_is_the_sum_that_it_is_made_of(shape, p, biased):
    rows = DRAW.rows("branch") if p else None
    arrays = [normal(*shape), normal(*shape), *([normal(shape[-1])] if biased else [])]

    def plain(x, y, bias=None):
        branch = y if bias is None else y + bias
        return x + (branch if rows is None else branch * (keep_mask(rows, shape[-1], p) / (1 - p)))

    assert_same(run(lambda *t: ops.residual(*t, rows=rows, p=p), *arrays), run(plain, *arrays))


def test_residual_gradient():
    rows = DRAW.rows("branch")
    check(lambda x, y, b: ops.residual(x, y, b, rows=rows, p=0.4), normal(2, 7, 3), normal(2, 7, 3), normal(3))
    check(lambda x, y: ops.residual(x, y, rows=rows, p=0.4), normal(2, 7, 3), normal(2, 7, 3))
    check(ops.residual, normal(4, 3), normal(4, 3), normal(3))
    check(ops.residual, normal(4, 3), normal(4, 3))
    check(ops.residual, normal(3), normal(3), normal(3))
    check(lambda x, b: ops.residual(x, x, b, rows=rows, p=0.4), normal(2, 7, 3), normal(3))


def test_residual_drops_nothing_at_0_and_the_whole_branch_at_1():
    x, y, rows = normal(2, 7, 3), normal(2, 7, 3), DRAW.rows("branch")
    assert (ops.residual(Tensor(x), Tensor(y), rows=rows, p=0.0).data == x + y).all()
    z, (dx, dy) = run(lambda x, y: ops.residual(x, y, rows=rows, p=1.0), x, y, seed=np.ones_like(x))
    assert (z == x).all()
    assert (dx == 1).all()
    assert not dy.any()


def test_residual_in_single_precision_equals_pytorch_with_the_same_mask():
    torch = pytest.importorskip("torch")
    rows = DRAW.rows("branch")
    x, y, bias = (normal(*shape).astype(np.float32) for shape in ((2, 7, 33), (2, 7, 33), (33,)))
    seed = np.ones_like(x)
    z, grads = run(lambda *t: ops.residual(*t, rows=rows, p=0.25), x, y, bias, seed=seed)
    twins = [torch.tensor(a, requires_grad=True) for a in (x, y, bias)]
    mask = torch.tensor(keep_mask(rows, 33, 0.25) / np.float32(0.75))
    w = twins[0] + (twins[1] + twins[2]) * mask
    w.backward(torch.tensor(seed))
    np.testing.assert_allclose(z, w.detach().numpy(), rtol=1e-6, atol=1e-6)
    for grad, twin in zip(grads, twins, strict=True):
        np.testing.assert_allclose(grad, twin.grad.numpy(), rtol=1e-6, atol=1e-6)


def test_residual_of_half_precision():
    rows = DRAW.rows("branch")
    arrays = normal(2, 7, 50), normal(2, 7, 50), normal(50)
    z, grads = run(lambda *t: ops.residual(*t, rows=rows, p=0.25), *(a.astype(np.float16) for a in arrays))
    w, others = run(lambda *t: ops.residual(*t, rows=rows, p=0.25), *arrays)
    assert z.dtype == np.float16
    np.testing.assert_allclose(z, w, atol=1e-2)
    for grad, other in zip(grads, others, strict=True):
        assert grad.dtype == np.float16
        np.testing.assert_allclose(grad, other, rtol=1e-2, atol=5e-2)


def test_residual_gives_gradients_where_they_are_asked_for():
    rows = DRAW.rows("branch")
    for wanted in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)):
        arrays = normal(2, 7, 3), normal(2, 7, 3), normal(3)
        inputs = [Tensor(a, requires_grad=w) for a, w in zip(arrays, wanted, strict=True)]
        with Tape() as tape:
            z = ops.residual(*inputs, rows=rows, p=0.4)
        grads = tape.run_backward([(z, np.ones((2, 7, 3)))])
        kept = keep_mask(rows, 3, 0.4) / 0.6
        for t, w, expected in zip(inputs, wanted, (np.ones((2, 7, 3)), kept, kept.sum((0, 1))), strict=True):
            assert (t in grads) == w
            if w:
                np.testing.assert_allclose(grads[t], expected, rtol=1e-12)


@pytest.mark.parametrize("shape", [(2, 7, 50), (2, 7, 3), (2, 7, 1)])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("biased", [True, False])
def test_residual_norm_is_a_residual_and_its_norm(shape, p, biased):
    rows = DRAW.rows("branch") if p else None
    d = shape[-1]
    arrays = normal(*shape), normal(*shape), normal(d), normal(d), *([normal(d)] if biased else [])
    seeds = normal(*shape), normal(*shape)

    def walk(function, seeds):
        inputs = [Tensor(a, requires_grad=True) for a in arrays]
        x, y, weight, bias, *rest = inputs
        with Tape() as tape:
            outputs = function(x, y, rest[0] if rest else None, weight, bias)
        grads = tape.run_backward([(t, s) for t, s in zip(outputs, seeds, strict=True) if s is not None])
        return [*(t.data for t in outputs), *(grads.get(t) for t in inputs)]

    def fused(x, y, branch_bias, weight, bias):
        return ops.residual_norm(x, y, branch_bias, weight, bias, rows=rows, p=p)

    def apart(x, y, branch_bias, weight, bias):
        total = ops.residual(x, y, branch_bias, rows=rows, p=p)
        return total, ops.layer_norm(total, weight, bias)

    for given in (seeds, (seeds[0], None), (None, seeds[1])):
        for a, b in zip(walk(fused, given), walk(apart, given), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_residual_norm_gradient():
    rows = DRAW.rows("branch")
    x, vectors = (2, 7, 3), (normal(3), normal(3), normal(3))
    check(lambda *t: ops.residual_norm(*t, rows=rows, p=0.4), normal(*x), normal(*x), *vectors)
    check(lambda x, y, w, b: ops.residual_norm(x, y, None, w, b), normal(4, 3), normal(4, 3), *vectors[1:])


def test_residual_norm_refuses_what_does_not_fit():
    x, v = Tensor(normal(2, 7, 3)), Tensor(normal(3))
    with pytest.raises(ShapeError, match=r"residual_norm: x .* and y .* differ"):
        ops.residual_norm(x, Tensor(normal(2, 7, 4)), None, v, v)
    with pytest.raises(ShapeError, match=r"residual_norm: x .* and bias .* do not go together"):
        ops.residual_norm(x, x, Tensor(normal(4)), v, v)
    for weight, bias in ((normal(4), normal(3)), (normal(3), normal(4)), (normal(1), normal(1))):
        with pytest.raises(ShapeError, match=r"residual_norm: x .*, weight .*, bias .* do not go together"):
            ops.residual_norm(x, x, None, Tensor(weight), Tensor(bias))
    with pytest.raises(ShapeError, match=r"residual_norm: x .* wants rows"):
        ops.residual_norm(x, x, None, v, v, rows=DRAW.rows("a")[:1], p=0.1)


def test_residual_refuses_what_does_not_fit():
    x, rows = Tensor(normal(2, 7, 3)), DRAW.rows("branch")
    for y in (normal(2, 7, 4), normal(7, 3), normal(2, 7, 3).astype(np.float32)):
        with pytest.raises(ShapeError, match=r"residual: x .* and y .* differ"):
            ops.residual(x, Tensor(y))
    for bias in (normal(4), normal(1, 3), normal(3).astype(np.float32)):
        with pytest.raises(ShapeError, match=r"residual: x .* and bias .* do not go together"):
            ops.residual(x, x, Tensor(bias))
    with pytest.raises(ShapeError, match=r"residual: x \(2, 7, 3\) wants rows \(2, 7\), got \(2, 6\)"):
        ops.residual(x, x, rows=rows[:, :6], p=0.1)

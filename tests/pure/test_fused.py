"""Fused operations: equal to what they are made of, right where formulas divide by zero, and lean.

All of it holds for the NumPy path and for the best compiled kernels of this machine.
"""

import math

import numpy as np
import pytest

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.errors import ShapeError
from mpitrain.kernels import blocks
from mpitrain.rng import Draw, keep_mask

RNG = np.random.default_rng(11)


def normal(*shape):
    return RNG.standard_normal(shape)


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


@pytest.fixture(autouse=True, params=dict.fromkeys((kernels.levels()[0], kernels.levels()[-1])))
def level(request):
    kernels.select(request.param)
    return request.param


IN_BLOCKS = pytest.mark.parametrize("level", ["numpy"], indirect=True)  # the compiled kernels have their own


@pytest.fixture
def small_blocks(monkeypatch, level):
    """Blocks of a few elements, so that small arrays have many, the last one shorter."""
    assert level == "numpy"
    monkeypatch.setattr(blocks, "BLOCK", 7)
    monkeypatch.setattr(blocks, "QUERIES", 3)
    monkeypatch.setattr(blocks, "SCORES", 30)


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


# ---------------------------------------------------------------------------------------------------------- attention


def plain_attention(qkv, heads, causal=True, mask=None, rows=None, drop=0.0):
    """Attention from its formula, with the matrix of probabilities."""
    b, s, width = qkv.shape
    parts = qkv.reshape(b, s, heads, 3, width // (3 * heads))
    q, k, v = (parts[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))
    allowed = np.tril(np.ones((s, s), bool)) if causal else np.ones((s, s), bool)
    allowed = np.broadcast_to(allowed, (b, heads, s, s))
    if mask is not None:
        allowed = allowed & (mask[:, None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask)
    p = ops.softmax(q @ k.swap(-1, -2) * (1 / math.sqrt(q.shape[-1])), mask=allowed)
    if rows is not None:
        p = p * (keep_mask(rows, s, drop) / (1 - drop))
    return (p @ v).transpose(0, 2, 1, 3).reshape(b, s, width // 3)


PADDING = np.array([[True] * 5, [True, True, True, False, False]])
DOCUMENTS = np.stack([np.equal.outer(d, d) for d in (np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1, 2, 2]))])
ROWS = Draw(1, 2, np.arange(2), np.arange(5)).attention_rows("w", 3)
ATTENTION = {
    "causal": {},
    "all to all": {"causal": False},
    "padding": {"mask": PADDING},
    "documents": {"mask": DOCUMENTS},
    "per head": {"mask": RNG.random((1, 3, 5, 5)) > 0.3, "causal": False},
    "dropout": {"rows": ROWS, "drop": 0.3},
    "everything": {"mask": DOCUMENTS, "rows": ROWS, "drop": 0.3, "causal": False},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attention_is_what_it_is_made_of(options):
    qkv = normal(2, 5, 3 * 3 * 4)
    assert_same(
        run(lambda x: ops.attention(x, 3, **options), qkv), run(lambda x: plain_attention(x, 3, **options), qkv)
    )


@IN_BLOCKS
@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attention_in_many_blocks_is_attention(options, small_blocks):
    qkv = normal(2, 5, 3 * 3 * 4)
    assert_same(
        run(lambda x: ops.attention(x, 3, **options), qkv), run(lambda x: plain_attention(x, 3, **options), qkv)
    )


def test_attention_of_a_long_sequence_has_several_blocks_of_queries():
    qkv = normal(1, 300, 2 * 3 * 8)
    assert_same(run(lambda x: ops.attention(x, 2), qkv), run(lambda x: plain_attention(x, 2), qkv))


@pytest.mark.parametrize("shape", [(2, 5, 18), (1, 1, 6), (0, 5, 6), (2, 0, 6)])
def test_attention_gradient(shape):
    check(lambda x: ops.attention(x, shape[2] // 6), normal(*shape))


def test_attention_gradient_with_dropout():
    check(lambda x: ops.attention(x, 3, rows=ROWS, drop=0.5), normal(2, 5, 18))


def test_attention_equals_pytorch():
    torch = pytest.importorskip("torch")
    qkv = normal(2, 130, 3 * 3 * 8)
    y, (dx,) = run(lambda x: ops.attention(x, 3), qkv)
    t = torch.from_numpy(qkv).requires_grad_()
    q, k, v = t.view(2, 130, 3, 3, 8).permute(3, 0, 2, 1, 4)
    z = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    z = z.transpose(1, 2).reshape(2, 130, 24)
    np.testing.assert_allclose(y, z.detach().numpy(), rtol=1e-12, atol=1e-12)
    z.backward(torch.from_numpy(np.random.default_rng(5).standard_normal(y.shape)))
    np.testing.assert_allclose(dx, t.grad.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("drop", [0.0, 0.9])
def test_a_query_without_any_key_gives_zero_and_takes_no_gradient(dtype, drop):
    """C08: the first position is padding, so its query sees no key."""
    qkv = normal(2, 5, 36).astype(dtype)
    mask = np.ones((2, 5), bool)
    mask[:, 0] = False
    y, (dx,) = run(lambda x: ops.attention(x, 3, mask=mask, rows=ROWS if drop else None, drop=drop), qkv)
    assert y.dtype == dx.dtype == dtype
    assert not y[:, 0].any()
    assert not dx[:, 0].any()
    assert np.isfinite(dx).all()
    assert y[:, 1:].any()


def test_heads_can_be_cut_by_columns():
    qkv = normal(2, 5, 3 * 3 * 4)
    whole = ops.attention(Tensor(qkv), 3).data
    parts = [ops.attention(Tensor(qkv[..., 12 * i : 12 * i + 12]), 1).data for i in range(3)]
    np.testing.assert_allclose(np.concatenate(parts, -1), whole, rtol=1e-14)


def test_attention_of_half_precision_computes_in_single():
    qkv = normal(1, 40, 3 * 2 * 8).astype(np.float16)
    y, (dx,) = run(lambda x: ops.attention(x, 2), qkv)
    z, (dz,) = run(lambda x: ops.attention(x, 2), qkv.astype(np.float32))
    np.testing.assert_allclose(y, z, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(dx, dz, rtol=5e-3, atol=5e-3)


def test_attention_keeps_no_matrix_of_probabilities():
    with Tape() as tape:
        ops.attention(Tensor(np.zeros((2, 64, 24), np.float32), requires_grad=True), 2)
    assert tape.nbytes == (2 * 64 * 24 + 2 * 64 * 8 + 2 * 2 * 64) * 4  # qkv, output, a number a query and head


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

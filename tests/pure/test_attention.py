"""Attention of packed heads against its formula, and groups of queries on the same keys."""

import math

import numpy as np
import pytest
from op_calls import BOTH_ENDS, assert_same, run

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.autograd.ops.attention import attend, attend_backward, by_head, split_heads
from mpitrain.backend import dtype_of
from mpitrain.errors import ShapeError
from mpitrain.rng import Draw, keep_mask

RNG = np.random.default_rng(13)


def normal(*shape):
    return RNG.standard_normal(shape)


@pytest.fixture(autouse=True, params=BOTH_ENDS)
def level(request):
    kernels.select(request.param)
    return request.param


IN_BLOCKS = pytest.mark.parametrize("level", ["numpy"], indirect=True)  # the compiled kernels have their own


def plain_attention(qkv, heads, kv_heads=None, causal=True, mask=None, rows=None, drop=0.0, window=None):
    """Attention from its formula, with the matrix of probabilities; keys and values are repeated for their group."""
    b, s, width = qkv.shape
    kv_heads = kv_heads or heads
    g, d = heads // kv_heads, width // (heads + 2 * kv_heads)
    parts = qkv.reshape(b, s, kv_heads, g + 2, d).transpose(0, 2, 3, 1, 4)
    q = parts[:, :, :g].reshape(b, heads, s, d)
    k, v = (ops.stack([parts[:, :, i]] * g, 2).reshape(b, heads, s, d) for i in (g, g + 1))
    allowed = np.tril(np.ones((s, s), bool)) if causal else np.ones((s, s), bool)
    if window is not None:
        allowed = allowed & ~np.tril(np.ones((s, s), bool), -window)
    allowed = np.broadcast_to(allowed, (b, heads, s, s))
    if mask is not None and mask.dtype != bool:
        allowed = allowed & (np.arange(s) >= mask[:, :, None])[:, None]
    elif mask is not None:
        allowed = allowed & (mask[:, None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask)
    p = ops.softmax(q @ k.swap(-1, -2) * (1 / math.sqrt(d)), mask=allowed)
    if rows is not None:
        p = p * (keep_mask(rows, s, drop) / (1 - drop))
    return (p @ v).transpose(0, 2, 1, 3).reshape(b, s, heads * d)


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
    "window": {"window": 2},
    "first keys": {"mask": np.array([[0, 0, 2, 2, 2], [0, 1, 1, 4, 4]])},
    "all of it in a window": {"window": 3, "mask": DOCUMENTS, "rows": ROWS, "drop": 0.3},
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


@pytest.mark.parametrize("dtype", [np.float16, dtype_of("bfloat16"), np.float32, np.float64], ids=str)
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
    assert np.isfinite(dx.astype(np.float64)).all()
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


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (6, 2)])
def test_gradients_of_a_group_are_added_up_in_single_precision_and_rounded_once(half, heads, kv_heads):
    half = dtype_of(half)
    b, s, d = 2, 40, 8
    qkv, grad, y = (normal(b, s, n * d).astype(half).astype(np.float32) for n in (heads + 2 * kv_heads, heads, heads))
    how = {"causal": True, "mask": None, "rows": None, "drop": 0.0}
    lse = attend(*split_heads(qkv, heads, kv_heads), by_head(np.empty_like(y), heads, kv_heads), **how)
    gradients = []
    for dtype in (np.float32, half):
        into = np.empty(qkv.shape, dtype)
        g, packed, out = (x.astype(dtype) for x in (grad, qkv, y))
        given = by_head(g, heads, kv_heads), *split_heads(packed, heads, kv_heads), by_head(out, heads, kv_heads)
        attend_backward(*given, lse, *split_heads(into, heads, kv_heads), **how)
        gradients.append(into)
    expected, mine = gradients
    assert mine.tobytes() == expected.astype(half).tobytes()


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_what_waits_of_halves_is_halves_and_a_single_a_query(half):
    with Tape() as tape:
        ops.attention(Tensor(np.zeros((2, 64, 24), dtype_of(half)), requires_grad=True), 2)
    assert tape.nbytes == (2 * 64 * 24 + 2 * 64 * 8) * 2 + 2 * 2 * 64 * 4


def test_attention_keeps_no_matrix_of_probabilities():
    with Tape() as tape:
        ops.attention(Tensor(np.zeros((2, 64, 24), np.float32), requires_grad=True), 2)
    assert tape.nbytes == (2 * 64 * 24 + 2 * 64 * 8 + 2 * 2 * 64) * 4  # qkv, output, a number a query and head


# --------------------------------------------------------------------------------- groups of queries on the same keys


def grouped(heads):
    """The options of ATTENTION for another number of heads."""
    per_head = np.random.default_rng(heads).random((2, heads, 5, 5)) > 0.3
    rows = Draw(1, 2, np.arange(2), np.arange(5)).attention_rows("w", heads)
    dropped = {"rows": rows, "drop": 0.3}
    return {
        **{name: ATTENTION[name] for name in ("causal", "all to all", "padding", "documents")},
        "per head": {"mask": per_head, "causal": False},
        "dropout": dropped,
        "everything": {"mask": per_head, **dropped, "causal": False},
    }


GROUPS = pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 3), (6, 1), (4, 2), (2, 1), (3, 3)])


@GROUPS
@pytest.mark.parametrize("name", grouped(1))
def test_grouped_attention_is_what_it_is_made_of(heads, kv_heads, name):
    options, qkv = grouped(heads)[name], normal(2, 5, (heads + 2 * kv_heads) * 4)
    assert_same(
        run(lambda x: ops.attention(x, heads, kv_heads, **options), qkv),
        run(lambda x: plain_attention(x, heads, kv_heads, **options), qkv),
    )


@IN_BLOCKS
@pytest.mark.parametrize("name", grouped(1))
def test_grouped_attention_in_many_blocks_is_attention(name, small_blocks):
    options, qkv = grouped(6)[name], normal(2, 5, 10 * 4)
    assert_same(
        run(lambda x: ops.attention(x, 6, 2, **options), qkv),
        run(lambda x: plain_attention(x, 6, 2, **options), qkv),
    )


def test_grouped_attention_of_a_long_sequence():
    qkv = normal(1, 300, 6 * 8)
    assert_same(run(lambda x: ops.attention(x, 4, 1), qkv), run(lambda x: plain_attention(x, 4, 1), qkv))


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_groups_of_one_are_plain_attention_to_the_last_bit(options):
    qkv = normal(2, 5, 3 * 3 * 4)
    (y, (dx,)), (z, (dz,)) = (run(lambda x, kv=kv: ops.attention(x, 3, kv, **options), qkv) for kv in (None, 3))
    assert (y == z).all()
    assert (dx == dz).all()


@pytest.mark.parametrize(
    "shape", [(2, 5, 12, 4, 1), (1, 1, 8, 4, 2), (0, 5, 8, 4, 2), (2, 0, 8, 4, 2), (2, 3, 0, 4, 2)]
)
def test_grouped_attention_gradient(shape):
    *shape, heads, kv_heads = shape
    check(lambda x: ops.attention(x, heads, kv_heads), normal(*shape))


def test_grouped_attention_gradient_with_dropout():
    rows = Draw(1, 2, np.arange(2), np.arange(5)).attention_rows("w", 4)
    check(lambda x: ops.attention(x, 4, 2, rows=rows, drop=0.5), normal(2, 5, 8 * 3))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 1)])
def test_grouped_attention_equals_pytorch(heads, kv_heads):
    torch = pytest.importorskip("torch")
    g = heads // kv_heads
    qkv = normal(2, 130, (heads + 2 * kv_heads) * 8)
    y, (dx,) = run(lambda x: ops.attention(x, heads, kv_heads), qkv)
    t = torch.from_numpy(qkv).requires_grad_()
    parts = t.view(2, 130, kv_heads, g + 2, 8).permute(0, 2, 3, 1, 4)
    q = parts[:, :, :g].reshape(2, heads, 130, 8)
    k, v = (parts[:, :, i].repeat_interleave(g, 1) for i in (g, g + 1))
    z = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    z = z.transpose(1, 2).reshape(2, 130, heads * 8)
    np.testing.assert_allclose(y, z.detach().numpy(), rtol=1e-12, atol=1e-12)
    z.backward(torch.from_numpy(np.random.default_rng(5).standard_normal(y.shape)))
    np.testing.assert_allclose(dx, t.grad.numpy(), rtol=1e-12, atol=1e-12)


def test_groups_can_be_cut_by_columns():
    """Also their dropout: the rows are those of the global heads, in order."""
    qkv, rows = normal(2, 5, 3 * 4 * 4), Draw(1, 2, np.arange(2), np.arange(5)).attention_rows("w", 6)
    whole = ops.attention(Tensor(qkv), 6, 3, rows=rows, drop=0.3).data
    parts = [
        ops.attention(Tensor(qkv[..., 16 * i : 16 * i + 16]), 2, 1, rows=rows[:, 2 * i : 2 * i + 2], drop=0.3).data
        for i in range(3)
    ]
    np.testing.assert_allclose(np.concatenate(parts, -1), whole, rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_grouped_attention_in_other_precisions(dtype):
    qkv = normal(1, 40, (4 + 2 * 2) * 8).astype(dtype)
    y, (dx,) = run(lambda x: ops.attention(x, 4, 2), qkv)
    z, (dz,) = run(lambda x: ops.attention(x, 4, 2), qkv.astype(np.float64))
    assert y.dtype == dx.dtype == dtype
    tolerance = 5e-3 if dtype is np.float16 else 1e-5
    np.testing.assert_allclose(y, z, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(dx, dz, rtol=tolerance, atol=tolerance)


def test_grouped_attention_keeps_keys_and_values_once():
    with Tape() as tape:
        ops.attention(Tensor(np.zeros((2, 64, (4 + 2) * 8), np.float32), requires_grad=True), 4, 1)
    assert tape.nbytes == (2 * 64 * 6 * 8 + 2 * 64 * 4 * 8 + 2 * 4 * 64) * 4


@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "message"),
    [
        (32, 4, 3, "4 heads of queries in 3 groups"),
        (32, 2, 4, "2 heads of queries in 4 groups"),
        (32, 4, 0, "4 heads of queries in 0 groups"),
        (32, 0, None, "0 heads of queries in 0 groups"),
        (32, 4, -2, "4 heads of queries in -2 groups"),
        (30, 4, 2, r"qkv \(2, 5, 30\) is not .*\(heads \+ 2 kv_heads\) \* width\) for 4 heads and 2 of keys"),
        (32, 4, None, r"qkv \(2, 5, 32\) is not .*heads \* 3 \* width\) for 4 heads$"),
    ],
)
def test_heads_that_make_no_groups_are_refused(width, heads, kv_heads, message):
    with pytest.raises(ShapeError, match=f"attention: {message}"):
        ops.attention(Tensor(np.zeros((2, 5, width))), heads, kv_heads)


def test_masks_and_rows_of_another_number_of_heads_are_refused():
    qkv = Tensor(np.zeros((2, 5, 32)))
    for mask in (
        np.ones((2, 2, 5, 5), bool),
        np.ones((2, 3, 1, 1), bool),
        np.ones((2, 4, 5, 5)),
        np.ones((3, 5), bool),
    ):
        with pytest.raises(ShapeError, match="attention: a mask of shape"):
            ops.attention(qkv, 4, 2, mask=mask)
    with pytest.raises(ShapeError, match=r"attention: rows \(2, 2, 5\); wanted is .* \(2, 4, 5\)"):
        ops.attention(qkv, 4, 2, rows=np.zeros((2, 2, 5), np.uint64), drop=0.1)
    with pytest.raises(ShapeError, match="dropout needs rows"):
        ops.attention(qkv, 4, 2, drop=0.1)


# ----------------------------------------------------------------------------------- the parts, for keys from elsewhere


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parts_of_a_packed_array_are_views_of_it_in_order(dtype):
    b, s, kv, g, d = 2, 3, 2, 3, 4
    qkv = np.arange(b * s * kv * (g + 2) * d, dtype=dtype).reshape(b, s, -1)
    q, k, v = split_heads(qkv, kv * g, kv)
    y = np.arange(b * s * kv * g * d, dtype=dtype).reshape(b, s, -1)
    out = by_head(y, kv * g, kv)
    assert (q.shape, k.shape, v.shape, out.shape) == ((b, kv, g, s, d), *[(b, kv, s, d)] * 2, (b, kv, g, s, d))
    assert all(np.shares_memory(x, qkv) for x in (q, k, v))
    assert np.shares_memory(out, y)
    for head in range(kv * g):
        column = (head // g * (g + 2) + head % g) * d
        assert (q[:, head // g, head % g] == qkv[:, :, column : column + d]).all()
        assert (out[:, head // g, head % g] == y[:, :, head * d : head * d + d]).all()
    for i in range(kv):
        first = i * (g + 2) * d
        assert (k[:, i] == qkv[:, :, first + g * d : first + (g + 1) * d]).all()
        assert (v[:, i] == qkv[:, :, first + (g + 1) * d : first + (g + 2) * d]).all()


@pytest.mark.parametrize("mask_heads", [None, 1, 6])
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_groups_on_some_of_the_keys_are_each_head_on_them(mask_heads, drop):
    """`attend` and its backward against the kernel, a head at a time."""
    b, kv, g, s, t, d = 2, 2, 3, 7, 4, 5
    q, grad = normal(b, kv, g, s, d), normal(b, kv, g, s, d)
    k, v, numbers = normal(b, kv, t, d), normal(b, kv, t, d), np.array([9, 2, 30, 17])
    rows = Draw(1, 2, np.arange(b), np.arange(s)).attention_rows("w", kv * g) if drop else None
    mask = None if mask_heads is None else RNG.random((b, mask_heads, s, t)) > 0.4
    how = {"causal": False, "drop": drop, "keys": numbers}
    out, dq = np.empty_like(q), np.empty_like(q)
    dk, dv = np.full(k.shape, np.nan), np.full(v.shape, np.nan)
    lse = attend(q, k, v, out, mask=mask, rows=rows, **how)
    attend_backward(grad, q, k, v, out, lse, dq, dk, dv, mask=mask, rows=rows, **how)

    total_k, total_v = np.zeros_like(k), np.zeros_like(v)
    for head in range(kv * g):
        i, one = head // g, (slice(None), slice(head // g, head // g + 1), head % g)
        given = k[:, i : i + 1], v[:, i : i + 1]
        how |= {"rows": None if rows is None else rows[:, head : head + 1], "scale": 1 / math.sqrt(d)}
        how["mask"] = mask if mask_heads != 6 else mask[:, head : head + 1]
        y, dq_one, *sums = (np.empty((b, 1, n, d)) for n in (s, s, t, t))
        logarithm = kernels.attention(q[one], *given, y, **how)
        kernels.attention_backward(grad[one], q[one], *given, y, logarithm, dq_one, *sums, **how)
        for mine, theirs in ((out, y), (lse, logarithm), (dq, dq_one)):
            np.testing.assert_allclose(mine[one], theirs, rtol=1e-13, atol=1e-13)
        total_k[:, i : i + 1] += sums[0]
        total_v[:, i : i + 1] += sums[1]
    np.testing.assert_allclose(dk, total_k, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(dv, total_v, rtol=1e-12, atol=1e-13)

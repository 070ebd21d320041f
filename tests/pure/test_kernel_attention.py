"""Attention of a sequence on itself against its formula, in every length, layout and place in memory.

The formula and how far a kernel may be from it stand in `exact_attention`.
"""

import math

import numpy as np
import pytest
from exact_attention import PRECISIONS, assert_accurate, make, masks
from kernel_calls import attend, hashes, offset, same_bits, untouched
from threadpoolctl import threadpool_limits

from mpitrain import kernels
from mpitrain.autograd import Tensor, ops
from mpitrain.rng import keep_mask

# --------------------------------------------------------------------------------------------------- lengths and widths


@PRECISIONS
@pytest.mark.parametrize("causal", [True, False])
def test_every_length_of_a_sequence(dtype, causal, level):
    for s in (*range(1, 71, 1 if dtype is np.float32 else 3), 129):
        assert_accurate(make(dtype, 1, 1, s, 3), causal=causal)


@PRECISIONS
@pytest.mark.parametrize("d", [1, 2, 3, 15, 16, 17, 20, 31, 33, 64, 65, 128])
def test_every_width_of_a_head(dtype, d, level):
    for b, h, s in ((1, 1, 5), (2, 3, 17), (1, 2, 65)):
        assert_accurate(make(dtype, b, h, s, d))
        assert_accurate(make(dtype, b, h, s, d), causal=False)


@PRECISIONS
def test_a_sequence_of_many_tiles(dtype, level):
    assert_accurate(make(dtype, 1, 1, 257, 20))
    if dtype is np.float32:  # in extended precision the formula takes long
        assert_accurate(make(dtype, 1, 2, 300, 65), causal=False)


# ------------------------------------------------------------------------------------------------------ masks, dropout


@PRECISIONS
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("s", [1, 7, 37, 140])
def test_every_form_of_a_mask(dtype, causal, s, level):
    """A query that sees no key gives exactly 0, and takes and gives no gradient: C08."""
    b, h = (2, 3) if s < 100 else (1, 1)
    for mask in masks(b, h, s):
        arrays = make(dtype, b, h, s, 5)
        out, _, dq, dk, dv = assert_accurate(arrays, mask=mask, causal=causal)
        seen = np.broadcast_to(mask, (b, h, s, s)) & (np.tril(np.ones((s, s), bool)) if causal else True)
        blind, unseen = ~seen.any(3), ~seen.any(2)
        assert not out[blind].any()
        assert not dq[blind].any()
        assert not dk[unseen].any()
        assert not dv[unseen].any()


@PRECISIONS
@pytest.mark.parametrize("drop", [0.1, 0.9])
@pytest.mark.parametrize("causal", [True, False])
def test_dropout_is_the_mask_of_the_queries_rows(dtype, drop, causal, level):
    for s in (1, 7, 37, 140):
        rows = hashes(2, 2, s)
        mask = np.ones((2, 1, 1, s), bool)
        mask[1, ..., : s // 3] = False
        assert_accurate(make(dtype, 2, 2, s, 5), causal=causal, mask=mask, rows=rows, drop=drop)


@PRECISIONS
def test_dropout_drops_exactly_what_keep_mask_drops(dtype, level):
    """With v the unit matrix and equal scores, `out` is the mask itself; with grad the unit matrix, so is dv."""
    s = 100
    q = k = np.zeros((1, 2, s, s), dtype)
    unit = np.broadcast_to(np.eye(s, dtype=dtype), q.shape).copy()
    for drop in (2.0**-32, 0.3, 1 - 2.0**-32):
        rows = hashes(1, 2, s)
        keep = keep_mask(rows, s, drop)
        out, _, _, _, dv = attend(q, k, unit, unit, causal=False, rows=rows, drop=drop)
        assert ((out != 0) == keep).all()
        assert ((dv != 0) == keep.swapaxes(2, 3)).all()
        np.testing.assert_allclose(out[keep], 1 / s / (1 - drop), rtol=1e-5)


@PRECISIONS
@pytest.mark.parametrize("drop", [1 - 2.0**-40, 1.0])
def test_where_all_is_dropped_nothing_is_left(dtype, drop, level):
    """Also where the probability is rounded to 1."""
    out, _, dq, dk, dv = attend(*make(dtype, 1, 2, 9, 4), rows=hashes(1, 2, 9), drop=drop)
    assert not any(x.any() for x in (out, dq, dk, dv))
    y = ops.attention(Tensor(np.ones((1, 9, 12), dtype)), 2, rows=hashes(1, 2, 9), drop=drop)
    assert not y.data.any()


@PRECISIONS
def test_large_scores_do_not_overflow(dtype, level):
    q, k, v, grad = make(dtype, 1, 1, 40, 8)
    top = 1e10 if dtype is np.float32 else 1e100
    for factor in (30, top):
        out, lse, dq, dk, dv = attend(q * dtype(factor), k * dtype(factor), v, grad)
        assert all(np.isfinite(x).all() for x in (out, lse))
        assert np.abs(out).max() <= np.abs(v).max() * (1 + np.finfo(dtype).eps)
        assert all(np.isfinite(x).all() for x in (dq, dk, dv))


# ------------------------------------------------------------------------------------------------------ how arrays lie


def fused(dtype, b, h, s, d, seed):
    """(q, k, v) as views of one array (b, s, h * 3 * d), and that array."""
    qkv = np.random.default_rng(seed).standard_normal((b, s, h * 3 * d)).astype(dtype)
    return qkv.reshape(b, s, h, 3, d).transpose(3, 0, 2, 1, 4), qkv


@PRECISIONS
@pytest.mark.parametrize("shape", [(2, 3, 9, 5), (1, 1, 33, 1), (1, 2, 70, 16)])
def test_the_layout_of_the_arguments_changes_no_bit(dtype, shape, compiled_level):
    (q, k, v), _ = fused(dtype, *shape, seed=1)
    grad = make(dtype, *shape)[3]
    expected = attend(*(np.ascontiguousarray(x) for x in (q, k, v)), grad)
    into, d_qkv = fused(dtype, *shape, seed=2)
    by_position = np.full((*shape[:1], shape[2], shape[1], shape[3]), np.nan, dtype).swapaxes(1, 2)
    assert same_bits(attend(q, k, v, grad, [by_position, *into]), expected)
    assert same_bits([d_qkv], [np.stack(expected[2:]).transpose(1, 3, 2, 0, 4).reshape(d_qkv.shape)])
    flipped = [x[:, ::-1, ::-1].copy()[:, ::-1, ::-1] for x in (q, k, v, grad)]
    assert same_bits(attend(*flipped), expected)
    gapped = [np.repeat(x, 2, axis=3)[..., ::2] for x in (q, k, v, grad)]  # copied, or left to the reference
    for a, b in zip(attend(*gapped), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert same_bits(attend(q, k, v, gapped[3]), expected)
    wide = np.broadcast_to(grad[:, :, :, :1], shape)
    assert same_bits(attend(q, k, v, wide), attend(q, k, v, wide.copy()))
    for x in (q, k, v, grad):
        x.flags.writeable = False
    assert same_bits(attend(q, k, v, grad), expected)


@PRECISIONS
@pytest.mark.parametrize("first", [0, 1, 3, 8])
@pytest.mark.parametrize("shape", [(1, 2, 37, 5), (2, 1, 130, 16), (1, 1, 1, 1)])
def test_nothing_outside_the_results_is_written_or_read(dtype, first, shape, compiled_level, monkeypatch):
    """All arrays, the scratch too, begin at an odd place and lie between canaries."""
    from mpitrain.kernels import compiled

    made = []

    class Guarded:
        def __getattr__(self, name):
            return getattr(np, name)

        def empty(self, shape, dtype=float):
            view, buffer = offset(math.prod(shape) if isinstance(shape, tuple) else shape, dtype, first)
            made.append((view, buffer))
            return view.reshape(shape)

    rows, mask = hashes(*shape[:3]), np.random.default_rng(1).random((1, 1, shape[2], shape[2])) > 0.3
    for options in ({}, {"causal": False}, {"rows": rows, "drop": 0.3, "mask": mask}):
        expected = attend(*make(dtype, *shape), **options)
        guard = Guarded()
        arrays = []
        for array in make(dtype, *shape):
            arrays.append(guard.empty(shape, dtype))
            arrays[-1][...] = array
        into = [guard.empty(shape, dtype) for _ in range(4)]
        monkeypatch.setattr(compiled, "np", guard)
        results = attend(*arrays, into, **options)
        monkeypatch.setattr(compiled, "np", np)
        assert len(made) >= 11  # 8 here, lse, and two scratches
        assert all(untouched(*pair) for pair in made)
        assert same_bits(results, expected)
        made.clear()


@PRECISIONS
def test_what_lies_between_the_rows_of_a_result_is_left_alone(dtype, compiled_level):
    shape = (2, 3, 37, 5)
    rooms = [np.full((2, 3, 38, 7), 7, dtype) for _ in range(4)]
    results = attend(*make(dtype, *shape), [room[:, :, :37, 1:6] for room in rooms])
    assert same_bits(results, attend(*make(dtype, *shape)))
    for room in rooms:
        room[:, :, :37, 1:6] = 7
        assert (room == 7).all()


@PRECISIONS
def test_the_same_bits_come_out_again_with_any_number_of_threads_and_in_any_batch(dtype, compiled_level):
    arrays, rows = make(dtype, 2, 3, 130, 17), hashes(2, 3, 130)
    expected = attend(*arrays, rows=rows, drop=0.2)
    for threads in (1, 2):
        with threadpool_limits(threads):
            assert same_bits(attend(*arrays, rows=rows, drop=0.2), expected)
    for b in range(2):
        one = attend(*(x[b : b + 1] for x in arrays), rows=rows[b : b + 1], drop=0.2)
        assert same_bits(one, [x[b : b + 1] for x in expected])
    for h in range(3):
        one = attend(*(x[:, h : h + 1] for x in arrays), rows=rows[:, h : h + 1], drop=0.2)
        assert same_bits(one, [x[:, h : h + 1] for x in expected])


@pytest.mark.parametrize("shape", [(0, 2, 5, 3), (2, 0, 5, 3), (2, 2, 0, 3), (2, 2, 5, 0)])
def test_arrays_without_elements_are_taken(shape, level):
    results = attend(*make(np.float64, *shape))
    assert [x.shape for x in results] == [shape, shape[:3], shape, shape, shape]


# --------------------------------------------------------------------------------------------- what is not a number


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@PRECISIONS
def test_what_is_not_finite_reaches_all_that_sees_it_and_no_sample_or_head_besides(dtype, value, level):
    """Which of the earlier queries of its block a bad value reaches, through a weight of zero, is left open."""
    for name, place in ((0, 0), (0, 36), (1, 0), (1, 20), (1, 36), (2, 0), (2, 36)):
        arrays = make(dtype, 2, 2, 70, 5)
        arrays[name][1, 1, place, 2] = value
        if name < 2 and value != value:
            reached = np.arange(70) == place if name == 0 else np.arange(70) >= place
        elif name == 2:
            reached = np.arange(70) >= place
        else:
            reached = np.zeros(70, bool)  # an infinite score may be the only one, or none
        with np.errstate(all="ignore"):
            out, lse, dq, dk, dv = attend(*arrays)
        bad = ~np.isfinite(out).all(-1)
        assert bad[1, 1][reached].all()
        assert not bad[1, 1, : max(0, place - 64)].any()
        assert not bad[0].any()
        assert not bad[1, 0].any()
        for gradient in (dq, dk, dv):
            assert np.isfinite(gradient[0]).all()
            assert np.isfinite(gradient[1, 0]).all()
        assert not np.isfinite(np.concatenate([out[1, 1], dq[1, 1], dk[1, 1], dv[1, 1]])).all()
        assert np.isfinite(lse[0]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@PRECISIONS
def test_a_gradient_that_is_not_finite_reaches_what_its_query_saw(dtype, value, level):
    arrays = make(dtype, 1, 1, 70, 5)
    arrays[3][0, 0, 3, 1] = value
    with np.errstate(all="ignore"):
        out, _, dq, _, dv = attend(*arrays)
    assert np.isfinite(out).all()
    assert not np.isfinite(dq[0, 0, 3]).any()
    assert not np.isfinite(dv[0, 0, :4, 1]).any()


@PRECISIONS
def test_hidden_keys_may_hold_anything_in_k(dtype, level):
    """Padding that was never written must not spoil a query that does not see it."""
    q, k, v, grad = make(dtype, 1, 1, 37, 5)
    mask = np.ones((1, 1, 1, 37), bool)
    mask[..., 30:] = False
    expected = attend(q, k, v, grad, mask=mask, causal=False)[0]
    k[:, :, 30:] = np.nan
    with np.errstate(all="ignore"):
        spoilt = kernels.attention(
            q, k, v, out := np.empty_like(q), scale=5**-0.5, causal=False, mask=mask, rows=None, drop=0.0
        )
    assert np.isfinite(spoilt).all()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [30.0, 1000.0])
def test_gradients_of_a_saturated_softmax_are_those_of_double_precision(level, size):
    """A score of thousands is rounded to a thousandth: backward must make the same one again that lse was made from."""
    rng = np.random.default_rng(4)
    q, k, v, grad = (rng.standard_normal((1, 1, 64, 8)) for _ in range(4))
    arrays = [x.astype(np.float32) for x in (q * size, k * size, v, grad)]
    setting = {"scale": 1 / math.sqrt(8), "causal": False, "mask": None, "rows": None, "drop": 0.0}

    def gradients(dtype):
        q, k, v, grad = (x.astype(dtype) for x in arrays)
        out, *grads = (np.empty_like(q) for _ in range(4))
        lse = kernels.attention(q, k, v, out, **setting)
        kernels.attention_backward(grad, q, k, v, out, lse, *grads, **setting)
        return grads

    mine, expected = gradients(np.float32), gradients(np.float64)
    assert np.abs(mine[2] - expected[2]).max() < (1e-5 if size > 100 else 1e-3)

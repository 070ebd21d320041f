"""Scores that wait for backward, and scores that are made again: the same gradients, at the price of s^2 numbers.

T20.1 to T20.3: for the fused op, and for attention put together from plain ops, whose core (scores, softmax, dropout,
the product with the values) is recomputed as a whole, as in Korthikanti et al. 2022.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from exact_attention import make
from kernel_calls import attend, hashes, offset, same_bits, untouched
from op_calls import BOTH_ENDS

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.function import Function
from mpitrain.autograd.recompute import recompute
from mpitrain.backend import dtype_of, wide
from mpitrain.kernels import blocks
from mpitrain.kernels.blocks import kept_scores
from mpitrain.plan.memory.paper import block_bytes
from mpitrain.rng import Draw, keep_mask

DTYPES = pytest.mark.parametrize("dtype", [dtype_of(n) for n in ("float64", "float32", "float16", "bfloat16")], ids=str)
EACH_END = pytest.mark.parametrize("level", BOTH_ENDS, indirect=True)


@pytest.fixture
def level(request):
    kernels.select(request.param)
    return request.param


def packed(dtype, b, s, heads, kv_heads, d, seed=0):
    shape = b, s, (heads + 2 * kv_heads) * d
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def both_ways(function, x, *args, **how):
    """(y, gradient of x, bytes that waited for backward) of a function of x and whatever else."""
    leaf = Tensor(x, requires_grad=True)
    with Tape() as tape:
        y = function(leaf, *args, **how)
    kept = tape.nbytes
    grad = np.random.default_rng(5).standard_normal(y.shape).astype(y.dtype)
    return y.data, tape.run_backward([(y, grad)])[leaf], kept


def options(b, s, heads):
    documents = np.arange(s) // max(1, s // 3)
    mask = np.broadcast_to(np.equal.outer(documents, documents), (b, s, s)).copy()
    mask[:, s // 2] = False  # a query that sees nothing
    by_head = np.random.default_rng(s).random((1, heads, s, s)) > 0.3
    rows = Draw(1, 2, np.arange(b), np.arange(s)).attention_rows("w", heads)
    return {
        "plain": {},
        "all to all": {"causal": False},
        "documents": {"mask": mask},
        "by head": {"mask": by_head, "causal": False},
        "dropout": {"rows": rows, "drop": 0.3},
        "everything": {"mask": mask, "rows": rows, "drop": 0.3},
        "nothing left": {"rows": rows, "drop": 1.0},
    }


SIZES = [(2, 5, 4, 4, 3), (1, 64, 2, 2, 16), (1, 65, 4, 2, 8), (2, 130, 3, 1, 20), (1, 200, 1, 1, 33)]


# ---------------------------------------------------------------------------------------------- T20.1, for the fused op


@DTYPES
@pytest.mark.parametrize("name", options(1, 1, 1))
@pytest.mark.parametrize("level", kernels.levels(), indirect=True)
def test_kept_scores_change_no_bit(dtype, name, level):
    for b, s, heads, kv_heads, d in SIZES:
        qkv, how = packed(dtype, b, s, heads, kv_heads, d), options(b, s, heads)[name]
        y, grad, without = both_ways(ops.attention, qkv, heads, kv_heads, **how)
        z, again, kept = both_ways(ops.attention, qkv, heads, kv_heads, keep_scores=True, **how)
        assert same_bits([z, again], [y, grad])
        numbers = b * heads * kept_scores(s, s, how.get("causal", True))
        assert kept - without == numbers * wide(dtype).itemsize


def test_kept_scores_change_no_bit_in_blocks_of_any_size(monkeypatch):
    kernels.select("numpy")
    for queries, scores in ((3, 30), (5, 7), (16, 10**6)):
        monkeypatch.setattr(blocks, "QUERIES", queries)
        monkeypatch.setattr(blocks, "SCORES", scores)
        for name, how in options(2, 17, 4).items():
            qkv = packed(np.float64, 2, 17, 4, 2, 3)
            made = both_ways(ops.attention, qkv, 4, 2, **how)
            kept = both_ways(ops.attention, qkv, 4, 2, keep_scores=True, **how)
            assert same_bits(made[:2], kept[:2]), name


# ------------------------------------------------------------------------------------------------------- what is kept


def kept_of(arrays, scores, **how):
    """Forward, which writes the scores where told: (its backward, [out, lse, dq, dk, dv], the last three of that)."""
    q, k, v, grad = arrays
    setting = {"scale": 1 / math.sqrt(q.shape[3]), "causal": True, "mask": None, "rows": None, "drop": 0.0} | how
    out, *into = (np.empty_like(x) for x in (q, q, k, v))
    lse = kernels.attention(q, k, v, out, scores=scores, **setting)

    def backward():
        kernels.attention_backward(grad, q, k, v, out, lse, *into, scores=scores, **setting)

    return backward, [out, lse, *into]


def triangle(stored, s):
    """(..., s, s) of what is kept of causal attention, NaN where nothing is."""
    whole, first = np.full((*stored.shape[:-1], s, s), np.nan, stored.dtype), 0
    for start in range(0, s, 64):
        stop = min(start + 64, s)
        count = (stop - start) * stop
        stripe = stored[..., first : first + count]
        whole[..., start:stop, :stop] = stripe.reshape(*stored.shape[:-1], stop - start, stop)
        first += count
    assert first == stored.shape[-1]
    return whole


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("s", [1, 5, 63, 64, 65, 150])
@pytest.mark.parametrize("level", kernels.levels(), indirect=True)
def test_what_is_kept_is_the_scaled_product_whatever_is_masked(dtype, s, level):
    arrays = make(dtype, 2, 3, s, 7)
    q, k = arrays[:2]
    product = q @ k.swapaxes(2, 3) / math.sqrt(7)
    mask = np.random.default_rng(1).random((1, 1, s, s)) > 0.5
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is np.float32 else {"rtol": 1e-12, "atol": 1e-13}
    for causal in (True, False):
        scores = np.full((2, 3, kept_scores(s, s, causal)), np.nan, dtype)
        kept_of(arrays, scores, causal=causal, mask=mask, rows=hashes(2, 3, s), drop=0.5)
        if not causal:
            np.testing.assert_allclose(scores.reshape(2, 3, s, s), product, **tolerance)
            continue
        whole, seen = triangle(scores, s), np.tri(s, dtype=bool)
        np.testing.assert_allclose(whole[:, :, seen], product[:, :, seen], **tolerance)
        above = whole[:, :, ~seen]
        assert not above[~np.isnan(above)].any()
        assert np.isnan(above).sum() == 6 * (s * s - kept_scores(s, s, True))


def test_the_scores_of_other_many_keys_are_a_rectangle():
    for name in kernels.levels():
        kernels.select(name)
        arrays = make(np.float64, 1, 2, 5, 4, t=70)
        scores = np.full((1, 2, kept_scores(5, 70, False)), np.nan)
        backward, results = kept_of(arrays, scores, causal=False)
        backward()
        np.testing.assert_allclose(scores.reshape(1, 2, 5, 70), arrays[0] @ arrays[1].swapaxes(2, 3) / 2, rtol=1e-12)
        assert same_bits(results, attend(*arrays, causal=False))


def test_nothing_above_the_diagonal_is_read_and_nothing_beside_the_scores_is_written(compiled_level):
    """The scores of two heads lie apart, at an odd place, between canaries."""
    for dtype in (np.float32, np.float64):
        arrays, s = make(dtype, 2, 2, 150, 5), 150
        count = kept_scores(s, s, True)
        view, buffer = offset(4 * (count + 3), dtype, 1)
        scores = view.reshape(2, 2, count + 3)[:, :, :count]
        view[...] = np.nan
        backward, results = kept_of(arrays, scores)
        assert untouched(view, buffer)
        assert np.isnan(view.reshape(2, 2, count + 3)[:, :, count:]).all()
        assert not np.isnan(scores).any()
        first = 0
        for start in range(0, s, 64):
            stop = min(start + 64, s)
            stripe = scores[:, :, first : first + (stop - start) * stop].reshape(2, 2, stop - start, stop)
            stripe[:, :, np.tri(s, dtype=bool)[start:stop, :stop] == 0] = np.nan
            first += (stop - start) * stop
        backward()
        assert same_bits(results, attend(*arrays))


def test_backward_reads_the_scores_and_does_not_make_them():
    """Other scores give other gradients."""
    for name in kernels.levels():
        kernels.select(name)
        arrays = make(np.float64, 1, 1, 9, 4)
        scores = np.empty((1, 1, kept_scores(9, 9, True)))
        backward, results = kept_of(arrays, scores)
        backward()
        first = [x.copy() for x in results]
        scores -= 1.0
        backward()
        assert same_bits(results[:2], first[:2])
        np.testing.assert_allclose(results[4], first[4] / math.e, rtol=1e-12)


@pytest.mark.parametrize("keep", [True, False])
def test_the_op_hands_backward_the_very_scores_that_forward_wrote(keep, monkeypatch):
    written, read = [], []

    def noting(kernel, into):
        def noted(*arrays, scores, **how):
            into.append(scores)
            return kernel(*arrays, scores=scores, **how)

        return noted

    monkeypatch.setattr(kernels, "attention", noting(kernels.attention, written))
    monkeypatch.setattr(kernels, "attention_backward", noting(kernels.attention_backward, read))
    both_ways(ops.attention, packed(np.float32, 2, 9, 4, 2, 3), 4, 2, keep_scores=keep)
    assert len(written) == len(read) == 2  # a call for each member of a group
    for one, other in zip(written, read, strict=True):
        assert np.shares_memory(one, other) if keep else one is other is None
    assert not (keep and np.shares_memory(*written))


def test_half_of_the_square_is_kept_of_long_sequences():
    for n in range(1, 20):
        assert kept_scores(64 * n, 64 * n, True) == 64 * n * (64 * n + 64) // 2
    for s in range(1, 300):
        triangular, kept = s * (s + 1) // 2, kept_scores(s, s, True)
        assert triangular <= kept <= min(s * s, triangular + 32 * s)
        assert kept_scores(s, 7, False) == 7 * s
    assert kept_scores(0, 0, True) == kept_scores(0, 5, False) == 0


# --------------------------------------------------------------------------- T20.2: the core of plain ops, made again


class StoredDropout(Function):
    """Dropout that keeps its mask, a byte an element, as the formulas of the paper count it."""

    @staticmethod
    def forward(x, keep, *, drop):
        return (x * keep * x.dtype.type(1 / (1 - drop))).astype(x.dtype), (keep,)

    @staticmethod
    def backward(grad, keep, *, wanted, drop):
        return (grad * keep * grad.dtype.type(1 / (1 - drop))).astype(grad.dtype), None


def core(q, k, v, rows, drop):
    """softmax(q k^T) with dropout, times v: all between the projections; q comes scaled."""
    s = q.shape[2]
    p = ops.softmax(q @ k.swap(-1, -2), mask=np.tri(s, dtype=bool))
    return StoredDropout.apply(p, keep_mask(rows, s, drop), drop=drop) @ v


def composed(qkv, heads, rows, drop, again):
    b, s, width = qkv.shape
    d = width // (3 * heads)
    parts = qkv.reshape(b, s, heads, 3, d).transpose(3, 0, 2, 1, 4)
    q, k, v = (parts[i] for i in range(3))
    q = q * np.asarray(1 / math.sqrt(d), qkv.dtype)
    y = recompute(core, q, k, v, rows, drop) if again else core(q, k, v, rows, drop)
    return y.transpose(0, 2, 1, 3).reshape(b, s, heads * d)


@DTYPES
@EACH_END
def test_attention_of_plain_ops_drops_its_core_and_keeps_every_bit(dtype, level):
    """T20.1 and T20.2: in halves, with masks of a byte, the tape holds exactly 5 a s^2 b bytes less."""
    b, s, heads, d, drop = 2, 48, 3, 8, 0.25
    qkv, rows = packed(dtype, b, s, heads, heads, d), hashes(b, heads, s)
    y, grad, kept = both_ways(composed, qkv, heads, rows, drop, again=False)
    z, other, less = both_ways(composed, qkv, heads, rows, drop, again=True)
    assert same_bits([z, other], [y, grad])
    assert kept - less == (2 * dtype.itemsize + 1) * heads * s**2 * b
    if dtype.itemsize == 2:
        assert kept - less == 5 * heads * s**2 * b


@EACH_END
def test_the_fused_op_is_what_is_put_together(level):
    b, s, heads, d, drop = 2, 48, 3, 8, 0.25
    rows = hashes(b, heads, s)
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 2e-5), (np.float16, 1e-2)):
        qkv = packed(dtype, b, s, heads, heads, d)
        y, grad, _ = both_ways(composed, qkv, heads, rows, drop, again=True)
        for keep in (False, True):
            z, other, _ = both_ways(ops.attention, qkv, heads, rows=rows, drop=drop, keep_scores=keep)
            np.testing.assert_allclose(z.astype(float), y.astype(float), rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(other.astype(float), grad.astype(float), rtol=tolerance, atol=2 * tolerance)


# -------------------------------------------------------------------------------------------------------------- T20.3


@pytest.mark.parametrize(
    ("a", "h", "ratio", "saved", "extra"), [(96, 12288, 80, 0.70, 0.027), (128, 20480, 64, 0.65, 0.016)]
)
def test_the_papers_models_save_most_of_their_activations_for_little_work(a, h, ratio, saved, extra):
    """T20.3: 5 a s / h against 34, and hardware over model operations, 1 + s / 6h, for s = 2048."""
    s = 2048
    none, selective = (block_bytes(s=s, b=1, h=h, a=a, recompute=kind) for kind in ("none", "selective"))
    assert (none - selective) / (s * h) == ratio
    assert float(1 - selective / none) == pytest.approx(saved, abs=0.005)
    assert float(Fraction(s, 6 * h)) == pytest.approx(extra, abs=0.001)

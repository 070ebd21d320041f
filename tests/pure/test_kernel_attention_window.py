"""Attention where a query does not see the first keys: against the same as a mask, and that it costs no more."""

import math
import time

import numpy as np
import pytest
from exact_attention import PRECISIONS, assert_accurate, band, make
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import attend, hashes, same_bits
from op_calls import BOTH_ENDS

from mpitrain import kernels
from mpitrain.kernels import blocks
from mpitrain.kernels.blocks import first_key, kept_scores

LEVELS = pytest.mark.parametrize("level", BOTH_ENDS, indirect=True)
LENGTHS = (1, 23, 65, 130)


@pytest.mark.slow
@LEVELS
@PRECISIONS
def test_every_window_of_a_sequence(dtype, level):
    for s in LENGTHS:
        arrays = make(dtype, 1, 2, s, 3)
        for window in {1, 17, 64, s - 1, s, s + 5} - {0}:
            assert_accurate(arrays, since=1 - window)


@pytest.mark.slow
@LEVELS
@PRECISIONS
def test_chunks_that_lie_apart(dtype, level):
    """Queries and keys of different number, the window anywhere: all keys hidden from some queries, or from all."""
    for s, t in ((5, 70), (70, 5), (129, 129)):
        arrays = make(dtype, 1, 2, s, 4, t=t)
        for since in (-s - 3, -7, 0, 33, t - 1, t, t + 9):
            out, _, dq, dk, dv = assert_accurate(arrays, causal=False, since=since)
            seen = band(s, t, since)[0, 0]
            assert not any(x[:, :, ~seen.any(1)].any() for x in (out, dq))
            assert not any(x[:, :, ~seen.any(0)].any() for x in (dk, dv))


@pytest.mark.slow
@LEVELS
@PRECISIONS
def test_with_masks_and_dropout(dtype, level):
    b, h, s = 2, 3, 97
    rng = np.random.default_rng(0)
    rows, mask = hashes(b, h, s), rng.random((b, 1, s, s)) > 0.3
    for window in (1, 20, 70):
        assert_accurate(make(dtype, b, h, s, 5), since=1 - window, mask=mask, rows=rows, drop=0.3)
        keys = np.arange(s)[::-1] * 3
        assert_accurate(make(dtype, b, h, s, 5), causal=False, since=60 - window, rows=rows, drop=0.3, keys=keys)


@LEVELS
@PRECISIONS
def test_a_window_that_hides_nothing_changes_no_bit(dtype, level):
    for s in (5, 64, 150):
        arrays = make(dtype, 2, 2, s, 6)
        expected = attend(*arrays)
        results = attend(*arrays, since=1 - s)
        assert same_bits(results[:2], expected[:2])
        np.testing.assert_allclose(results[3], expected[3], rtol=0, atol=1e-5)  # another order of the same sums
        assert same_bits(attend(*arrays, since=-3 * s)[:2], expected[:2])


def firsts_of(b, s, seed=0):
    """Documents side by side with padding behind, and of the last sample any keys at all, in no order."""
    rng = np.random.default_rng(seed)
    borders = np.where(rng.random((b, s)) < 0.1, np.arange(s), 0)
    firsts = np.maximum.accumulate(borders, axis=1)
    firsts[:, s - s // 7 :] = np.arange(s - s // 7, s) + 1
    firsts[-1] = rng.integers(-5, s + 5, s)
    return firsts


@pytest.mark.slow
@LEVELS
@PRECISIONS
def test_every_query_may_have_a_first_key_of_its_own(dtype, level):
    for s in (30, 130):
        firsts = firsts_of(3, s)
        for since in (None, -20):
            arrays = make(dtype, 3, 2, s, 4)
            out, _, dq, *_ = assert_accurate(arrays, since=since, firsts=firsts)
            blind = firsts > np.arange(s)
            assert not any(x[:, :, blind[sample]][sample].any() for x in (out, dq) for sample in range(3))
            assert_accurate(arrays, since=since, firsts=firsts, rows=hashes(3, 2, s), drop=0.3)
            assert_accurate(arrays, causal=False, firsts=firsts)
            for scores_of in (None, since):
                room = np.full((3, 2, kept_scores(s, s, True, scores_of)), np.nan, dtype)
                results = kept_of(arrays, scores_of, room, firsts=firsts)
                assert not np.isnan(room).any()
                assert same_bits(results, attend(*arrays, since=scores_of, firsts=firsts))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_window_first_keys_and_mask_are_the_matrix_that_they_mean(data):
    draw = data.draw
    causal = draw(st.booleans())
    s, d, seed = draw(st.integers(1, 140)), draw(st.integers(1, 9)), draw(st.integers(0, 99))
    t = s if causal else draw(st.integers(1, 140))
    since = draw(st.none() | st.integers(-s - 2, 0 if causal else t + 2))
    rng = np.random.default_rng(seed)
    firsts = rng.integers(-2, t + 3, (2, s)) if draw(st.booleans()) else None
    mask = rng.random((2, 1, s, t)) > 0.2 if draw(st.booleans()) else None
    dropped = {"rows": hashes(2, 2, s), "drop": 0.4} if draw(st.booleans()) else {}
    for level in BOTH_ENDS:
        kernels.select(level)
        arrays = make(np.float64, 2, 2, s, d, seed, t=t)
        assert_accurate(arrays, causal=causal, since=since, firsts=firsts, mask=mask, **dropped)


def kept_of(arrays, since, scores, **how):
    """[out, lse, dq, dk, dv] where scores wait for backward."""
    q, k, v, grad = arrays
    setting = {"scale": 1 / math.sqrt(q.shape[3]), "causal": True, "mask": None, "rows": None, "drop": 0.0} | how
    out, dq, dk, dv = (np.empty_like(x) for x in (q, q, k, v))
    lse = kernels.attention(q, k, v, out, scores=scores, since=since, **setting)
    kernels.attention_backward(grad, q, k, v, out, lse, dq, dk, dv, scores=scores, since=since, **setting)
    return [out, lse, dq, dk, dv]


@LEVELS
@PRECISIONS
def test_kept_scores_change_no_bit_and_are_as_many_as_said(dtype, level):
    for s in (1, 64, 130, 321):
        arrays = make(dtype, 2, 2, s, 5)
        for window in (1, 64, 65, 66, 300):
            since = 1 - window
            room = np.full((2, 2, kept_scores(s, s, True, since)), np.nan, dtype)
            results = kept_of(arrays, since, room, rows=hashes(2, 2, s), drop=0.2)
            assert not np.isnan(room).any()
            assert same_bits(results, attend(*arrays, since=since, rows=hashes(2, 2, s), drop=0.2))


def test_kept_scores_are_the_keys_of_each_stripe():
    for s in (1, 63, 64, 65, 200, 513):
        for window in (1, 2, 64, 65, 66, 100, 128, 129, 600):
            since = 1 - window
            stripes = [(start, min(start + blocks.QUERIES, s)) for start in range(0, s, blocks.QUERIES)]
            expected = sum((stop - start) * (stop - first_key(start, s, since)) for start, stop in stripes)
            assert kept_scores(s, s, True, since) == expected
    assert kept_scores(4096, 4096, True, 1 - 256) < 4096 * (256 + 64)


@LEVELS
def test_halves_are_rounded_once(level):
    arrays = [x.astype(np.float16) for x in make(np.float32, 1, 2, 90, 8)]
    single = attend(*(x.astype(np.float32) for x in arrays), since=-20)
    halves = attend(*arrays, since=-20)
    assert same_bits([halves[1]], [single[1]])
    np.testing.assert_array_equal(halves[0], single[0].astype(np.float16))


def test_what_cannot_be_is_refused(compiled_level):
    q = np.zeros((1, 1, 5, 4), np.float32)
    with pytest.raises(ValueError, match="hides a query's own key"):
        attend(q, q, q, q, since=1)
    with pytest.raises(ValueError, match="wants causal attention where keys are left out"):
        kept_of([q] * 4, -1, np.zeros((1, 1, 25), np.float32), causal=False)
    with pytest.raises(OverflowError):
        attend(q, q, q, q, since=2**70)


@pytest.mark.skipif(len(kernels.levels()) == 1, reason="mpitrain was built without a C compiler")
def test_the_cost_is_that_of_the_window():
    """Of 2,048 keys a query sees 64: a twentieth of the pairs, so well below half of the time."""
    arrays = make(np.float32, 1, 2, 2048, 32)
    taken = []
    for since in (None, 1 - 64):
        best = math.inf
        for _ in range(3):
            start = time.process_time()
            attend(*arrays, since=since)
            best = min(best, time.process_time() - start)
        taken.append(best)
    assert taken[1] < 0.5 * taken[0], taken


@pytest.mark.skipif(len(kernels.levels()) == 1, reason="mpitrain was built without a C compiler")
def test_the_cost_is_that_of_the_documents():
    """Of 2,048 keys in documents of 64."""
    arrays = make(np.float32, 1, 2, 2048, 32)
    taken = []
    for firsts in (None, np.arange(2048)[None] // 64 * 64):
        best = math.inf
        for _ in range(3):
            start = time.process_time()
            attend(*arrays, firsts=firsts)
            best = min(best, time.process_time() - start)
        taken.append(best)
    assert taken[1] < 0.5 * taken[0], taken

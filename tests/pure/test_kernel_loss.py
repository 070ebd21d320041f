"""The loss where each rank holds some of the columns: the parts, put together, are the loss of all of them.

A target whose logit is held elsewhere is any negative number but `ignore`; of a part without columns, and of a row with
nothing but -inf, the logarithm is the lowest finite number, which no sum of exponentials notices.
"""

import itertools

import numpy as np
import pytest
from kernel_calls import IGNORE, same_bits

from mpitrain import kernels
from mpitrain.kernels import blocks

PRECISIONS = pytest.mark.parametrize("dtype", [np.float32, np.float64])
CUTS = {
    "halves": (0, 16, 32),
    "awkward": (0, 1, 18, 32),
    "the last holds none": (0, 20, 32, 32),
    "the first holds none": (0, 0, 32),
    "single columns": tuple(range(33)),
}


def make(dtype, rows=9, width=32):
    """(logits, targets, of which every third is ignored)."""
    rng = np.random.default_rng(rows)
    targets = rng.integers(0, width, rows)
    targets[::3] = IGNORE
    return (6 * rng.standard_normal((rows, width))).astype(dtype), targets


def part(logits, targets, first, stop, elsewhere=-1):
    """What the rank with the columns first .. stop - 1 hands to the kernels."""
    mine = np.where((first <= targets) & (targets < stop), targets - first, elsewhere)
    return logits[:, first:stop], np.where(targets == IGNORE, IGNORE, mine)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@PRECISIONS
def test_parts_of_the_columns_together_are_the_whole(dtype, cuts, level):
    logits, targets = make(dtype)
    counts = targets != IGNORE
    total, lse = kernels.cross_entropy(logits, targets, IGNORE)
    grad = np.asarray(0.5, dtype)
    expected = kernels.cross_entropy_backward(grad, logits, targets, lse, IGNORE)

    parts = [part(logits, targets, *ends) for ends in itertools.pairwise(cuts)]
    given = [kernels.cross_entropy(*one, IGNORE) for one in parts]
    whole = np.logaddexp.reduce([one for _, one in given])
    held = [result for result, (columns, _) in zip(given, parts, strict=True) if columns.size]
    picked = sum(one[counts].sum(dtype=float) - float(t) for t, one in held)
    grads = [kernels.cross_entropy_backward(grad, *one, whole, IGNORE) for one in parts]

    close = {"rtol": 30 * np.finfo(dtype).eps, "atol": 30 * np.finfo(dtype).eps}
    assert all(one.dtype == dtype and t.dtype == dtype for t, one in given)
    np.testing.assert_allclose(whole, lse, **close)
    np.testing.assert_allclose(whole[counts].sum() - picked, total, rtol=100 * np.finfo(dtype).eps)
    np.testing.assert_allclose(np.concatenate(grads, 1), expected, **close)
    assert not np.concatenate(grads, 1)[~counts].any()


@PRECISIONS
def test_a_target_that_is_held_elsewhere_adds_the_logarithm_alone_and_takes_nothing_off_the_gradient(dtype, level):
    logits, targets = make(dtype)
    lse = kernels.cross_entropy(logits, targets, IGNORE)[1]
    grad = np.ones((), dtype)
    for elsewhere in (-1, -2, -99, -101, -(2**40), np.iinfo(np.int64).min):
        moved = np.where(np.arange(9) % 3 == 1, elsewhere, targets)
        total, again = kernels.cross_entropy(logits, moved, IGNORE)
        assert same_bits([again], [lse])
        kept = [i for i in range(9) if i % 3 == 2]
        expected = lse[1::3].sum() + sum(lse[i] - logits[i, targets[i]] for i in kept)
        np.testing.assert_allclose(total, expected, rtol=20 * np.finfo(dtype).eps)
        d = kernels.cross_entropy_backward(grad, logits, moved, lse, IGNORE)
        np.testing.assert_allclose(d[1::3].sum(1), 1, rtol=50 * np.finfo(dtype).eps)  # probabilities
        np.testing.assert_allclose(d[2::3].sum(1), 0, atol=50 * np.finfo(dtype).eps)  # less the one of the target
        assert not d[::3].any()


@pytest.mark.parametrize("ignore", [-1, 0, 3])
@PRECISIONS
def test_the_target_that_does_not_count_may_be_any_number(dtype, ignore, level):
    logits, _ = make(dtype, 4)
    targets = np.array([ignore, 2, -5, 1])
    total, lse = kernels.cross_entropy(logits, targets, ignore)
    expected = lse[1] - logits[1, 2] + lse[2] + lse[3] - logits[3, 1]
    np.testing.assert_allclose(total, expected, rtol=20 * np.finfo(dtype).eps)
    d = kernels.cross_entropy_backward(np.ones((), dtype), logits, targets, lse, ignore)
    np.testing.assert_allclose(d.sum(1), [0, 0, 1, 0], atol=50 * np.finfo(dtype).eps)
    assert not d[0].any()


@PRECISIONS
def test_without_columns_the_logarithm_is_one_that_no_sum_notices(dtype, level):
    targets = np.array([-1, IGNORE, -1])
    total, lse = kernels.cross_entropy(np.empty((3, 0), dtype), targets, IGNORE)
    assert total == 0
    assert total.dtype == lse.dtype == dtype
    assert (lse == np.finfo(dtype).min).all()
    others = np.array([-50, 0, 1e6], dtype)
    with np.errstate(all="raise", under="ignore"):
        assert same_bits([np.logaddexp(lse, others)], [others])
        assert (np.logaddexp(lse, lse) == lse).all()
    d = kernels.cross_entropy_backward(np.ones((), dtype), np.empty((3, 0), dtype), targets, others, IGNORE)
    assert (d.shape, d.dtype) == ((3, 0), dtype)


@PRECISIONS
def test_a_row_of_minus_infinity_is_as_one_without_columns(dtype, level):
    logits = np.full((2, 37), -np.inf, dtype)
    logits[1, 5] = 2
    _, lse = kernels.cross_entropy(logits, np.array([-1, 5]), IGNORE)
    assert lse.tolist() == [np.finfo(dtype).min, 2]
    d = kernels.cross_entropy_backward(np.ones((), dtype), logits, np.array([-1, 5]), np.array([3, 2], dtype), IGNORE)
    assert not d.any()


def test_half_precision_is_computed_in_single(level):
    logits, targets = make(np.float16)
    for columns in (slice(0, 20), slice(0, 0)):
        one = part(logits, targets, columns.start, columns.stop)
        total, lse = kernels.cross_entropy(*one, IGNORE)
        wide, wide_lse = kernels.cross_entropy(one[0].astype(np.float32), one[1], IGNORE)
        assert total.dtype == lse.dtype == np.float32
        np.testing.assert_allclose(total, wide, rtol=1e-6)
        np.testing.assert_allclose(lse, wide_lse, rtol=1e-6)
        assert kernels.cross_entropy_backward(np.ones((), np.float32), *one, lse, IGNORE).dtype == np.float16


def test_the_blocks_of_the_reference_change_nothing(monkeypatch):
    kernels.select("numpy")
    logits, targets = make(np.float64)
    one = part(logits, targets, 3, 20)
    total, lse = kernels.cross_entropy(*one, IGNORE)
    d = kernels.cross_entropy_backward(np.ones(()), *one, lse, IGNORE)
    monkeypatch.setattr(blocks, "BLOCK", 40)
    again, lse_again = kernels.cross_entropy(*one, IGNORE)
    assert same_bits([again, lse_again], [total, lse])
    assert same_bits([kernels.cross_entropy_backward(np.ones(()), *one, lse, IGNORE)], [d])

"""Kernels at the ends of what numbers hold: NaN and infinity are not hidden, zeros keep signs, nothing is flushed."""

import numpy as np
import pytest
from kernel_calls import CALLS, DROP, IGNORE, arguments, call, hashes, same_bits

from mpitrain import kernels
from mpitrain.rng import keep_mask

PRECISIONS = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def swallow(call, *args):
    with np.errstate(all="ignore"):
        return call(*args)


STRANGE = {"NaN": np.nan, "infinity": np.inf, "minus infinity": -np.inf}
PLACES = [0, 5, 15, 16, 31, 32, 36]  # of 37: in whole vectors of every length, and in every tail


MASKED = ("dropout", "residual", "residual_norm", "residual_rms_norm", "row_sum", "adamw")  # see below
AS_ROTARY = ("rotary_pack", "rotary_unpack")  # the same turns, written elsewhere


@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE)
@PRECISIONS
@pytest.mark.parametrize("kernel", [k for k in CALLS if k not in (*MASKED, *AS_ROTARY)])
def test_what_is_not_finite_shows_where_it_shows_in_the_reference(kernel, dtype, value, compiled_level):
    """In every argument of floats, in its first, middle and last row, in whole vectors and in tails."""
    shape = (3, 37)
    for i, array in enumerate(arguments(kernel, dtype, *shape)):
        for place in PLACES if array.dtype.kind == "f" else ():
            for row in range(3):
                arrays = arguments(kernel, dtype, *shape)
                arrays[i].reshape(3 if array.ndim == 2 else 1, -1)[row % len(array) if array.ndim == 2 else 0].flat[
                    min(place, array.shape[-1] - 1)
                ] = value
                got = swallow(call, kernel, arrays)
                kernels.select("numpy")
                expected = swallow(call, kernel, arrays)
                kernels.select(compiled_level)
                if "gelu" in kernel:  # the reference's slope is NaN at infinity; C's may be its limit, 0 or 1
                    assert not np.isnan(got[1][np.isfinite(expected[1])]).any()
                    got, expected = got[:1], expected[:1]
                for a, b in zip(got, expected, strict=True):
                    assert (np.isfinite(a) == np.isfinite(b)).all(), (i, row, place)


@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE)
@PRECISIONS
def test_dropout_lets_through_what_is_not_finite_where_it_keeps_and_nothing_where_it_drops(dtype, value, level):
    rows = hashes(3)
    keep = keep_mask(rows, 37, DROP)
    for place in PLACES:
        x, y, bias = np.ones((3, 37), dtype), np.ones((3, 37), dtype), np.ones(37, dtype)
        y[:, place] = value
        for spoilt in (
            swallow(kernels.dropout, y, rows, DROP),
            swallow(kernels.residual, x, y, None, rows, DROP),
            swallow(kernels.residual, x, x, y[0], rows, DROP),
        ):
            finite = np.isfinite(spoilt)
            assert not finite[keep[:, place], place].any()
            assert np.delete(finite, place, axis=1).all()
            if kernels.level() != "numpy":  # there 0 times NaN is NaN
                assert finite[~keep[:, place], place].all()
        assert not np.isfinite(swallow(kernels.residual, y, x, bias, rows, DROP))[:, place].any()
        assert not np.isfinite(swallow(kernels.residual, x, y, bias, None, 0.0))[:, place].any()


@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE)
@PRECISIONS
def test_a_gradient_that_is_not_finite_spoils_its_weight_and_no_other(dtype, value, level):
    for place in PLACES:
        p, m, v, g = arguments("adamw", dtype, 1, 37)
        g[place] = value
        results = swallow(call, "adamw", [p, m, v, g])
        expected = np.arange(37) == place
        assert (~np.isfinite(results[1]) == expected).all()
        assert (~np.isfinite(results[2]) == expected).all()
        assert (~np.isfinite(results[0]) == expected).all()
        out, ids, rows = arguments("row_sum", dtype, 9, 37)
        rows[4, place] = value
        (out,) = swallow(call, "row_sum", [out, ids, rows])
        assert (~np.isfinite(out) == expected & (np.arange(7) == ids[4])[:, None]).all()


@pytest.mark.parametrize("rows", [1, 9])
@PRECISIONS
def test_a_row_of_minus_infinity_has_no_probabilities_and_others_keep_theirs(rows, dtype, level):
    x = arguments("softmax", dtype, rows, 37)[0]
    x[0] = -np.inf
    x[1:, 1::2] = -np.inf
    y = swallow(kernels.softmax, x, -1, None)
    assert not y[0].any()
    assert not y[:, 1::2].any()
    np.testing.assert_allclose(y[1:].sum(1), 1, rtol=1e-6)


@PRECISIONS
def test_signs_of_zero_are_kept(dtype, level):
    zeros = np.array([0.0, -0.0] * 20, dtype)
    sign = np.signbit(zeros)
    for kernel in (kernels.gelu_tanh, kernels.gelu_erf):
        y, slope = kernel(zeros)
        assert not y.any()
        assert (np.signbit(y) == sign).all()
        assert (slope == 0.5).all()
    for y in (kernels.swiglu(zeros, np.ones(40, dtype)), kernels.rms_norm(zeros, np.ones(40, dtype), 1e-5)[0]):
        assert not y.any()
        assert (np.signbit(y) == sign).all()
    assert (np.signbit(kernels.residual(zeros, zeros, None, None, 0.0)) == sign).all()
    keep = keep_mask(hashes(1), 40, DROP)[0]
    assert (np.signbit(kernels.dropout(zeros[None], hashes(1), DROP))[0, keep] == sign[keep]).all()


@PRECISIONS
def test_the_smallest_numbers_are_not_taken_for_zero(dtype, level):
    """Subnormal numbers, and a quiet processor: no kernel may turn on flushing them to zero."""
    tiny = np.full(40, np.finfo(dtype).smallest_subnormal, dtype) * np.arange(1, 41).astype(dtype)
    assert same_bits([kernels.residual(tiny, tiny, None, None, 0.0)], [tiny + tiny])
    assert same_bits([kernels.dropout(tiny[None], hashes(1), 2.0**-32)], [tiny[None]])
    y, _ = kernels.gelu_tanh(2 * tiny)
    assert np.abs(y - tiny).max() <= np.finfo(dtype).smallest_subnormal
    out = np.zeros((1, 40), dtype)
    kernels.row_sum(np.zeros(2, int), np.stack([tiny, tiny]), out)
    assert same_bits(out, [tiny + tiny])
    assert np.finfo(dtype).smallest_subnormal / np.asarray(2, dtype) * np.asarray(4, dtype) == 0  # and it rounds on


@PRECISIONS
def test_the_largest_numbers_overflow_only_where_the_result_does(dtype, level):
    top = np.finfo(dtype).max
    x = np.array([top, -top, top / 2, 1.0] * 10, dtype)
    y = swallow(kernels.softmax, x[None], -1, None)
    np.testing.assert_allclose(y[0], np.where(x == top, 0.1, 0), rtol=1e-6)
    total, lse = swallow(kernels.cross_entropy, x[None], np.zeros(1, int), IGNORE)
    assert lse[0] == top
    assert total == 0
    if kernels.level() != "numpy":
        for gelu in (kernels.gelu_tanh, kernels.gelu_erf):
            y, slope = gelu(np.array([top, -top, 1e30, -1e30] * 10, dtype))
            assert (y.reshape(10, 4) == [top, 0, dtype(1e30), 0]).all()
            assert (slope.reshape(10, 4) == [1, 0, 1, 0]).all()
    gate = np.array([top, -top, 1e30, -1e30] * 10, dtype)
    if kernels.level() != "numpy":
        y = kernels.swiglu(gate, np.ones(40, dtype)).reshape(10, 4)
        assert (y == [top, 0, dtype(1e30), 0]).all()
        slope, _ = swallow(kernels.swiglu_backward, np.ones(40, dtype), gate, np.ones(40, dtype))
        assert (slope.reshape(10, 4) == [1, 0, 1, 0]).all()
    assert kernels.sum_of_squares(np.full(40, 1e30, np.float32)) == pytest.approx(40 * float(np.float32(1e30)) ** 2)

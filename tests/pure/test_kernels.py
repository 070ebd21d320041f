"""What the compiled kernels promise besides their numbers: nothing but the values of the arguments decides the result.

Neither how an array lies in memory, nor where, nor the number of threads; nothing is written but the results; and what
is not a number is not hidden.
"""

import pickle

import numpy as np
import pytest
from kernel_calls import (
    ADAMW,
    CALLS,
    DROP,
    IGNORE,
    LAYOUTS,
    WRITTEN,
    arguments,
    call,
    hashes,
    offset,
    same_bits,
    untouched,
)
from threadpoolctl import threadpool_limits

from mpitrain import kernels
from mpitrain.kernels import reference
from mpitrain.rng import keep_mask

PRECISIONS = pytest.mark.parametrize("dtype", [np.float32, np.float64])
KERNELS = pytest.mark.parametrize("kernel", CALLS)
SHAPES = [(5, 33), (1, 17), (4, 1), (67, 16)]


def swallow(call, *args):
    with np.errstate(all="ignore"):
        return call(*args)


# ------------------------------------------------------------------------------------------- layout and place in memory


@KERNELS
@PRECISIONS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_an_argument_changes_no_bit(kernel, dtype, layout, compiled_level):
    for shape in SHAPES:
        expected = call(kernel, arguments(kernel, dtype, *shape))
        whole = arguments(kernel, dtype, *shape)
        for i in range(len(whole)):
            if i < WRITTEN.get(kernel, 0):
                continue
            laid = [LAYOUTS[layout](array) if i == j else array.copy() for j, array in enumerate(whole)]
            kept = laid[i].copy()
            assert same_bits(call(kernel, laid), expected), (shape, i)
            assert same_bits([laid[i]], [kept])


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "read-only"])
@pytest.mark.parametrize("kernel", WRITTEN)
def test_what_is_written_in_place_may_be_a_view(kernel, layout, level):
    for i in range(WRITTEN[kernel]):
        arrays = list(arguments(kernel, np.float64, 5, 33))
        arrays[i] = LAYOUTS[layout](arrays[i])
        results = call(kernel, arrays)
        assert results[i] is arrays[i]
        for a, b in zip(results, call(kernel, arguments(kernel, np.float64, 5, 33)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-15)
    arrays = arguments(kernel, np.float64, 5, 33)
    arrays[0].flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        call(kernel, arrays)


@PRECISIONS
def test_a_broadcast_gradient_is_a_gradient(dtype, compiled_level):
    grad = np.broadcast_to(np.asarray(0.5, dtype), (5, 33))
    for kernel in ("layer_norm_backward", "softmax_backward", "gelu_backward"):
        _, *others = arguments(kernel, dtype, 5, 33)
        assert same_bits(call(kernel, (grad, *others)), call(kernel, (grad.copy(), *others)))
    rows = hashes(5)
    assert same_bits([kernels.dropout(grad, rows, DROP)], [kernels.dropout(grad.copy(), rows, DROP)])


class Guarded:
    """NumPy, but what `empty` gives begins at an odd place and lies between canaries."""

    def __init__(self, first):
        self.first, self.made = first, []

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape, dtype=float):
        shape = shape if isinstance(shape, tuple) else (shape,)
        view, buffer = offset(int(np.prod(shape)), dtype, self.first)
        self.made.append((view, buffer))
        return view.reshape(shape)


@KERNELS
@PRECISIONS
def test_nothing_outside_the_results_is_written_wherever_they_begin(kernel, dtype, compiled_level, monkeypatch):
    from mpitrain.kernels import compiled

    for shape in [*SHAPES, (3, 257)]:
        expected = call(kernel, arguments(kernel, dtype, *shape))
        for first in (0, 1, 2, 3, 5, 8):
            guarded = Guarded(first)
            monkeypatch.setattr(compiled, "np", guarded)
            arrays = list(arguments(kernel, dtype, *shape))
            for i, array in enumerate(arrays):
                arrays[i] = guarded.empty(array.shape, array.dtype)
                arrays[i][...] = array
            results = call(kernel, arrays)
            monkeypatch.setattr(compiled, "np", np)
            assert len(guarded.made) > len(arrays) or kernel in ("row_sum", "adamw", "sum_of_squares")
            assert all(untouched(*made) for made in guarded.made), (shape, first)
            assert same_bits(results, expected), (shape, first)


@KERNELS
@PRECISIONS
def test_the_same_bits_come_out_again_and_with_any_number_of_threads(kernel, dtype, compiled_level):
    expected = call(kernel, arguments(kernel, dtype, 300, 257))
    assert same_bits(call(kernel, arguments(kernel, dtype, 300, 257)), expected)
    for threads in (1, 2):
        with threadpool_limits(threads):
            assert same_bits(call(kernel, arguments(kernel, dtype, 300, 257)), expected)


@PRECISIONS
def test_an_update_may_be_cut_anywhere_and_lie_anywhere(dtype, compiled_level):
    """So a parameter is updated alike alone and in a run of neighbours, after a resume and on every rank."""
    p, m, v, g = arguments("adamw", dtype, 1, 301)
    expected = [p.copy(), m.copy(), v.copy()]
    kernels.adamw(expected[0], g, *expected[1:], **ADAMW)
    for cut in (*range(1, 70), 127, 128, 129, 300):
        mine = [offset(301, dtype, first)[0] for first in (cut % 5, cut % 3, cut % 7, cut % 2)]
        for array, values in zip(mine, (p, m, v, g), strict=True):
            array[...] = values
        for part in (slice(0, cut), slice(cut, None)):
            q, n, w, grad = (array[part] for array in mine)
            kernels.adamw(q, grad, n, w, **ADAMW)
        assert same_bits(mine[:3], expected), cut


BY_ROWS = ("gelu_tanh", "gelu_erf", "layer_norm", "residual_norm", "softmax", "softmax_backward", "dropout", "residual")


@PRECISIONS
def test_the_norm_after_a_residual_is_the_norm_of_the_residual(dtype, compiled_level):
    """To the last bit: a block may end its branch in one pass or in two."""
    for shape in SHAPES:
        x, y, branch_bias, rows, weight, bias = arguments("residual_norm", dtype, *shape)
        for given in ((branch_bias, rows), (None, rows), (branch_bias, None), (None, None)):
            total = kernels.residual(x, y, *given, DROP)
            expected = [total, *kernels.layer_norm(total, weight, bias, 1e-5)]
            assert same_bits(kernels.residual_norm(x, y, *given, DROP, weight, bias, 1e-5), expected)


@PRECISIONS
def test_one_row_gives_what_it_gives_among_many(dtype, compiled_level):
    """So that a micro-batch of another size changes no bit of what is computed row by row."""
    for kernel in BY_ROWS:
        for width in (17, 100):
            arrays = arguments(kernel, dtype, 9, width)
            whole = call(kernel, arrays)
            for i in range(9):
                part = call(kernel, [a[i : i + 1] if len(a) == 9 else a for a in arrays])
                assert same_bits(part, [result[i : i + 1] for result in whole]), (kernel, width, i)


# ------------------------------------------------------------------------------------------- which arrays C is given


@KERNELS
def test_an_array_that_was_pickled_is_computed_alike(kernel, compiled_level):
    """Its dtype is equal to float32, but no longer the same object."""
    arrays = arguments(kernel, np.float32, 5, 33)
    sent = pickle.loads(pickle.dumps(arguments(kernel, np.float32, 5, 33)))
    assert any(a.dtype is not b.dtype for a, b in zip(arrays, sent, strict=True))
    assert same_bits(call(kernel, sent), call(kernel, arrays))


@pytest.mark.parametrize("dtype", [np.float16, np.longdouble, np.dtype(np.float32).newbyteorder()], ids=str)
def test_other_precisions_are_left_to_the_references(dtype, compiled_level):
    for kernel in ("gelu_tanh", "dropout", "residual", "layer_norm", "softmax", "softmax_backward", "sum_of_squares"):
        arrays = [a.astype(dtype) if a.dtype.kind == "f" else a for a in arguments(kernel, np.float64, 5, 33)]
        kernels.select("numpy")
        expected = call(kernel, arrays)
        kernels.select(compiled_level)
        for a, b in zip(call(kernel, arrays), expected, strict=True):
            assert a.dtype == b.dtype
            assert (a == b).all(), kernel


def test_precisions_that_are_mixed_are_left_to_the_references(compiled_level):
    x, bias = arguments("gelu_tanh", np.float32, 5, 33)
    assert same_bits(kernels.gelu_tanh(x, bias.astype(np.float64)), reference.gelu_tanh(x, bias.astype(np.float64)))
    p, m, v, g = arguments("adamw", np.float32, 5, 33)
    kernels.adamw(p, g.astype(np.float64), m, v, **ADAMW)
    q, n, w, g = arguments("adamw", np.float32, 5, 33)
    reference.adamw(q, g.astype(np.float64), n, w, **ADAMW)
    assert same_bits([p, m, v], [q, n, w])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 3), (2, 3, 0)])
def test_arrays_without_elements_are_taken(shape, level):
    x, vector = np.empty(shape), np.empty(shape[-1:])
    for result in (*kernels.gelu_tanh(x, vector), *kernels.gelu_erf(x), kernels.softmax(x, -1, None)):
        assert result.shape == shape
    assert kernels.softmax_backward(x, x, -1).shape == shape
    dx, db = kernels.gelu_backward(x, x, True)
    assert (dx.shape, db.tolist()) == (shape, [0] * shape[-1])
    assert kernels.residual(x, x, vector, hashes(*shape[:-1]), DROP).shape == shape
    assert kernels.dropout(x, hashes(*shape[:-1]), DROP).shape == shape
    assert kernels.sum_of_squares(x) == 0
    if shape[-1]:
        total, y, *_ = kernels.residual_norm(x, x, vector, hashes(*shape[:-1]), DROP, vector, vector, 1e-5)
        assert total.shape == y.shape == shape
        y, center, rstd = kernels.layer_norm(x, vector, vector, 1e-5)
        dx, dw, db = kernels.layer_norm_backward(x, x, center, rstd, vector)
        assert (y.shape, dx.shape, dw.tolist(), db.tolist()) == (shape, shape, [0] * shape[-1], [0] * shape[-1])
        total, lse = kernels.cross_entropy(x.reshape(0, shape[-1]), np.empty(0, int), -100)
        assert (total, lse.shape) == (0, (0,))
    out = np.ones((3, 4))
    kernels.row_sum(np.empty(0, int), np.empty((0, 4)), out)
    assert (out == 1).all()
    kernels.adamw(*(np.empty(0) for _ in range(4)), **ADAMW)


# ----------------------------------------------------------------------------------------------- random masks and order


@PRECISIONS
@pytest.mark.parametrize("p", [2.0**-32, 0.1, 0.5, 0.9, 1 - 2.0**-32, 1 - 2.0**-40, 1.0])
def test_dropout_is_the_mask_bit_for_bit(dtype, p, level):
    """Also in the places: a kernel's own hash must not part from rng's in one word."""
    rows = hashes(3, 5)
    for width in (1, 15, 16, 33, 1000):
        x = np.full((3, 5, width), 3, dtype)
        keep = keep_mask(rows, width, p)
        kept = x * np.asarray(1 / (1 - p) if p < 1 else 0, dtype)
        assert same_bits([kernels.dropout(x, rows, p)], [np.where(keep, kept, dtype(0))])
        assert same_bits([kernels.residual(x, x, None, rows, p)], [x + np.where(keep, kept, dtype(0))])


@PRECISIONS
def test_a_word_that_is_equal_to_the_threshold_is_kept(dtype, level):
    from mpitrain.rng import words32

    rows = hashes(2)
    words = words32(rows, 40)
    for word in words[:, [0, 17, 39]].reshape(-1):
        p = int(word) / 2**32
        y = kernels.dropout(np.ones((2, 40), dtype), rows, p)
        assert (y != 0).sum() == (words >= word).sum()
        y = kernels.dropout(np.ones((2, 40), dtype), rows, p + 2.0**-32)
        assert (y != 0).sum() == (words > word).sum()


@PRECISIONS
@pytest.mark.parametrize("width", [1, 15, 16, 33, 100])
def test_a_residual_adds_what_it_is_given(dtype, width, level):
    x, y, bias, rows = arguments("residual", dtype, 5, width)
    assert same_bits([kernels.residual(x, y, bias, None, 0.0)], [x + (y + bias)])
    assert same_bits([kernels.residual(x, y, None, None, 0.0)], [x + y])
    keep = keep_mask(rows, width, DROP)
    for given, branch in ((bias, y + bias), (None, y)):
        z = kernels.residual(x, y, given, rows, DROP)
        expected = x + np.where(keep, branch * dtype(1 / (1 - DROP)), dtype(0))
        np.testing.assert_allclose(z, expected, rtol=0, atol=8 * np.finfo(dtype).eps)
        assert same_bits([z[~keep]], [x[~keep]])


@PRECISIONS
@pytest.mark.parametrize("width", [1, 15, 16, 33, 100])
def test_rows_of_one_id_are_added_in_the_order_in_which_they_stand(dtype, width, compiled_level):
    rng = np.random.default_rng(3)
    ids, rows = rng.integers(0, 5, 200), (rng.standard_normal((200, width)) * 10.0 ** rng.integers(-5, 5, (200, 1)))
    rows, out = rows.astype(dtype), rng.standard_normal((6, width)).astype(dtype)
    expected = out.copy()
    for i, row in zip(ids, rows, strict=True):
        expected[i] += row
    for wanted in (np.int64, np.int32, np.uint8):
        got = out.copy()
        kernels.row_sum(ids.astype(wanted), rows, got)
        assert same_bits([got], [expected])


# ------------------------------------------------------------------------------------------- what is not a number

STRANGE = {"NaN": np.nan, "infinity": np.inf, "minus infinity": -np.inf}
PLACES = [0, 5, 15, 16, 31, 32, 36]  # of 37: in whole vectors of every length, and in every tail


MASKED = ("dropout", "residual", "residual_norm", "row_sum", "adamw")  # see below


@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE)
@PRECISIONS
@pytest.mark.parametrize("kernel", [k for k in CALLS if k not in MASKED])
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
    assert kernels.sum_of_squares(np.full(40, 1e30, np.float32)) == pytest.approx(40 * float(np.float32(1e30)) ** 2)

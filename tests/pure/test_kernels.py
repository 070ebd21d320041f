"""What the compiled kernels promise besides their numbers: nothing but the values of the arguments decides the result.

Neither how an array lies in memory, nor where, nor the number of threads; and nothing is written but the results.
"""

import pickle

import numpy as np
import pytest
from kernel_calls import (
    ADAMW,
    CALLS,
    DROP,
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
    for kernel in ("layer_norm_backward", "softmax_backward", "gelu_backward", "rms_norm_backward", "swiglu_backward"):
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
BY_ROWS += ("rms_norm", "residual_rms_norm", "swiglu", "swiglu_backward", "rotary", "rotary_pack", "rotary_unpack")


@PRECISIONS
def test_the_norm_after_a_residual_is_the_norm_of_the_residual(dtype, compiled_level):
    """To the last bit: a block may end its branch in one pass or in two."""
    for shape in SHAPES:
        x, y, branch_bias, rows, weight, bias = arguments("residual_norm", dtype, *shape)
        for given in ((branch_bias, rows), (None, rows), (branch_bias, None), (None, None)):
            total = kernels.residual(x, y, *given, DROP)
            expected = [total, *kernels.layer_norm(total, weight, bias, 1e-5)]
            assert same_bits(kernels.residual_norm(x, y, *given, DROP, weight, bias, 1e-5), expected)
            expected = [total, *kernels.rms_norm(total, weight, 1e-5)]
            assert same_bits(kernels.residual_rms_norm(x, y, *given, DROP, weight, 1e-5), expected)


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


@PRECISIONS
def test_tables_of_angles_are_those_of_each_sample_or_of_all(dtype, level):
    """To the last bit: samples that have positions of their own may have the same."""
    x, cos, sin = arguments("rotary", dtype, 10, 12)
    x = x.reshape(2, 5, 24)
    apart = [kernels.rotary(x[i : i + 1], 2, 1, cos[5 * i : 5 * i + 5], sin[5 * i : 5 * i + 5]) for i in (0, 1)]
    assert same_bits([kernels.rotary(x, 2, 1, cos.reshape(2, 5, 3), sin.reshape(2, 5, 3))], [np.concatenate(apart)])
    both = [np.concatenate([table[:5], table[:5]]).reshape(2, 5, 3) for table in (cos, sin)]
    assert same_bits([kernels.rotary(x, 2, 1, cos[:5], sin[:5])], [kernels.rotary(x, 2, 1, *both)])


@PRECISIONS
def test_queries_and_keys_that_come_apart_are_turned_as_if_together(dtype, level):
    """To the last bit, and the way back undoes it; two groups of three queries."""
    rng = np.random.default_rng(1)
    q, kv = rng.standard_normal((2, 5, 6 * 14)).astype(dtype), rng.standard_normal((2, 5, 4 * 14)).astype(dtype)
    _, cos, sin = arguments("rotary", dtype, 5, 28)
    groups = [np.concatenate([q[..., 42 * i : 42 * i + 42], kv[..., 28 * i : 28 * i + 28]], 2) for i in (0, 1)]
    whole = kernels.rotary(np.concatenate(groups, 2), 6, 2, cos, sin)
    assert same_bits([kernels.rotary_pack(q, kv, 6, 2, cos, sin)], [whole])
    back = kernels.rotary(whole, 6, 2, cos, -sin).reshape(2, 5, 2, 5 * 14)
    parts = [back[..., :42].reshape(2, 5, -1), back[..., 42:].reshape(2, 5, -1)]
    assert same_bits(kernels.rotary_unpack(whole, 6, 2, cos, -sin), parts)
    for part, given in zip(parts, (q, kv), strict=True):
        np.testing.assert_allclose(part, given, rtol=0, atol=8 * np.finfo(dtype).eps * np.abs(given).max())


# ------------------------------------------------------------------------------------------- which arrays C is given


@KERNELS
def test_an_array_that_was_pickled_is_computed_alike(kernel, compiled_level):
    """Its dtype is equal to float32, but no longer the same object."""
    arrays = arguments(kernel, np.float32, 5, 33)
    sent = pickle.loads(pickle.dumps(arguments(kernel, np.float32, 5, 33)))
    assert any(a.dtype is not b.dtype for a, b in zip(arrays, sent, strict=True))
    assert same_bits(call(kernel, sent), call(kernel, arrays))


@pytest.mark.parametrize(
    "dtype", [np.dtype(np.float16).newbyteorder(), np.longdouble, np.dtype(np.float32).newbyteorder()], ids=str
)
def test_other_precisions_are_left_to_the_references(dtype, compiled_level):
    others = ("rms_norm", "swiglu", "rotary", "softmax", "softmax_backward", "sum_of_squares")
    for kernel in ("gelu_tanh", "dropout", "residual", "layer_norm", *others):
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
    grad, x, rstd, weight, extra = arguments("rms_norm_backward", np.float32, 5, 33)
    mixed = grad, x, rstd.astype(np.float64), weight, extra
    assert same_bits(kernels.rms_norm_backward(*mixed), reference.rms_norm_backward(*mixed))
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
    assert [y.shape for y in (kernels.swiglu(x, x), *kernels.swiglu_backward(x, x, x))] == [shape] * 3
    if shape[-1]:
        y, rstd = kernels.rms_norm(x, vector, 1e-5)
        dx, dw = kernels.rms_norm_backward(x, x, rstd, vector)
        assert (y.shape, dx.shape, dw.tolist()) == (shape, shape, [0] * shape[-1])
        for y in kernels.residual_rms_norm(x, x, vector, hashes(*shape[:-1]), DROP, vector, 1e-5)[:2]:
            assert y.shape == shape
        total, y, *_ = kernels.residual_norm(x, x, vector, hashes(*shape[:-1]), DROP, vector, vector, 1e-5)
        assert total.shape == y.shape == shape
        y, center, rstd = kernels.layer_norm(x, vector, vector, 1e-5)
        dx, dw, db = kernels.layer_norm_backward(x, x, center, rstd, vector)
        assert (y.shape, dx.shape, dw.tolist(), db.tolist()) == (shape, shape, [0] * shape[-1], [0] * shape[-1])
        total, lse = kernels.cross_entropy(x.reshape(0, shape[-1]), np.empty(0, int), -100)
        assert (total, lse.shape) == (0, (0,))
    out = np.ones((3, 4))
    kernels.row_sum(np.empty(0, int), np.empty((0, 4)), out)
    kernels.row_sum(np.full(5, -1), np.ones((5, 4)), out)
    assert (out == 1).all()
    kernels.adamw(*(np.empty(0) for _ in range(4)), **ADAMW)


@PRECISIONS
def test_a_row_whose_id_is_negative_is_nobodys(dtype, level):
    out, rows = np.zeros((3, 4), dtype), np.arange(24, dtype=dtype).reshape(6, 4)
    kernels.row_sum(np.array([2, -1, 0, -7, 2, np.iinfo(np.int64).min]), rows, out)
    assert np.array_equal(out, [rows[2], np.zeros(4), rows[0] + rows[4]])


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

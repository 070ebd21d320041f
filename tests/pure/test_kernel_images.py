"""Convolutions and maxima of windows in every level: the formula to the precision of the arrays, and nothing beside."""

import math

import numpy as np
import pytest
from kernel_calls import LAYOUTS, offset, same_bits, untouched

from mpitrain import kernels
from mpitrain.backend import dtype_of, is_half, wide
from mpitrain.kernels.windows import Windows

DTYPES = ["float64", "float32", "float16", "bfloat16"]
# images (b, h, w, c of a group), filters of a group, groups, window, stride, padding, dilation
SHAPES = {
    "one pixel": ((1, 1, 1, 1), 1, 1, (1, 1), (1, 1), (0, 0), (1, 1)),
    "as in a network": ((3, 8, 8, 5), 16, 1, (3, 3), (1, 1), (1, 1), (1, 1)),
    "filters beyond two vectors": ((2, 5, 4, 3), 67, 1, (2, 2), (1, 1), (1, 0), (1, 1)),
    "steps": ((2, 9, 7, 4), 6, 1, (3, 2), (2, 3), (1, 1), (1, 1)),
    "gaps": ((2, 9, 8, 3), 17, 1, (3, 3), (1, 2), (2, 3), (2, 3)),
    "gaps down alone": ((2, 9, 8, 3), 4, 1, (3, 3), (1, 1), (2, 1), (2, 1)),
    "groups": ((2, 6, 5, 3), 4, 3, (3, 2), (1, 1), (1, 1), (1, 1)),
    "a filter for each channel": ((2, 6, 7, 1), 1, 19, (3, 3), (1, 1), (1, 1), (1, 1)),
    "more padding than window": ((2, 3, 3, 2), 3, 1, (2, 1), (1, 1), (3, 2), (1, 1)),
    "many places": ((2, 19, 21, 2), 3, 1, (3, 3), (1, 1), (1, 1), (1, 1)),
    "images that come by rows": ((2, 33, 90, 3), 2, 1, (3, 5), (2, 1), (0, 2), (1, 1)),
    "no images": ((0, 4, 4, 2), 3, 1, (3, 3), (1, 1), (1, 1), (1, 1)),
}


def arrays(name, dtype, seed=0):
    """x, filters, bias, gradient, the windows, and how many groups."""
    (b, h, w, c), out, groups, *window = SHAPES[name]
    slide = Windows((h, w), *window)
    draws = np.random.default_rng(seed)
    shapes = (b, h, w, groups * c), (groups * out, *slide.window, c), (groups * out,), (b, *slide.places, groups * out)
    return *(draws.standard_normal(shape).astype(dtype_of(dtype)) for shape in shapes), slide, groups


def exact(x, w, bias, grad, slide, groups):
    """y, the gradients of images and filters, in float64, element of the window by element."""
    x, w, bias, grad = (a.astype(np.float64) for a in (x, w, bias, grad))
    y = np.zeros(grad.shape) + bias
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    each, channels = len(w) // groups, w.shape[3]
    for (i, j), (down, right), (rows, columns) in slide.elements():
        for g in range(groups):
            o, c = slice(g * each, (g + 1) * each), slice(g * channels, (g + 1) * channels)
            seen, wanted = x[:, rows, columns, c], grad[:, down, right, o]
            y[:, down, right, o] += np.einsum("nyxc,oc->nyxo", seen, w[o, i, j])
            dx[:, rows, columns, c] += np.einsum("nyxo,oc->nyxc", wanted, w[o, i, j])
            dw[o, i, j] += np.einsum("nyxo,nyxc->oc", wanted, seen)
    return y, dx, dw


def computed(x, w, bias, grad, slide, groups):
    out = np.full(w.shape, 7.0, wide(w.dtype))
    kernels.conv2d_filters(x, grad, slide, out, groups)
    return kernels.conv2d(x, w, bias, slide, groups), kernels.conv2d_images(grad, w, slide, groups), out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_convolution_and_its_gradients(name, dtype, level):
    given = arrays(name, dtype)
    for mine, true, one in zip(computed(*given), exact(*given), ("y", "dx", "dw"), strict=True):
        unit = (
            {"float64": 2**-52, "bfloat16": 2**-8, "float16": 2**-11}.get(dtype, 2**-23)
            if one == "y"
            else (np.finfo(mine.dtype).eps)
        )
        assert mine.dtype == (dtype_of(dtype) if one == "y" else wide(dtype_of(dtype)))
        if true.size:
            length = np.prod(given[1].shape[1:]) if one != "dw" else given[3][..., 0].size
            bound = max(unit, 8 * math.sqrt(length) * np.finfo(wide(dtype_of(dtype))).eps)
            assert np.abs(mine.astype(np.float64) - true).max() <= bound * max(1.0, np.abs(true).max()), one


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["as in a network", "groups", "a filter for each channel"])
def test_gradients_of_filters_are_added(name, dtype, level):
    x, w, _, grad, slide, groups = arrays(name, dtype)
    out, more = (np.full(w.shape, 2.0, np.float32) for _ in range(2))
    kernels.conv2d_filters(x, grad, slide, out, groups)
    kernels.conv2d_filters(x, grad, slide, more, groups, add=True)
    np.testing.assert_allclose(more, 2.0 + out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS])
@pytest.mark.parametrize("name", ["as in a network", "groups"])
def test_the_layout_of_the_arguments_changes_no_bit(name, layout, compiled_level):
    given = arrays(name, "float32")
    laid = [LAYOUTS[layout](a) for a in given[:4]]
    for mine, plain in zip(computed(*laid, *given[4:]), computed(*given), strict=True):
        assert same_bits(mine, plain)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "no images"])
def test_nothing_outside_the_arrays_is_written_or_read(name, compiled_level, monkeypatch):
    """Everything, scratch too, begins at an odd place in a buffer of canaries, which are NaN where floats are read."""
    buffers = []

    def fresh(shape, dtype=np.float64):
        count = math.prod(shape) if isinstance(shape, tuple) else int(shape)
        view, buffer = offset(count, dtype, 1)
        buffers.append((view, buffer))
        view[...] = 0x77 if view.dtype == np.uint8 else np.nan  # what scratch holds at first is nobody's business
        return view.reshape(shape)

    given = arrays(name, "float32")
    plain = computed(*given)
    from mpitrain.kernels import compiled_images

    monkeypatch.setattr(compiled_images.np, "empty", fresh)
    placed = [fresh(a.shape, a.dtype) for a in given[:4]]
    for mine, theirs in zip(placed, given, strict=False):
        mine[...] = theirs
    found = computed(*placed, *given[4:])
    monkeypatch.undo()
    assert all(same_bits(mine, theirs) for mine, theirs in zip(found, plain, strict=True))
    assert all(untouched(view, buffer) for view, buffer in buffers)


@pytest.mark.parametrize("name", ["as in a network", "steps", "groups", "a filter for each channel"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_reaches_what_sees_it_and_nothing_besides(name, value, level):
    x, w, bias, grad, slide, groups = arrays(name, "float32")
    x[0, 1, 2, 0] = value
    seen = ~np.isfinite(exact(x, w, bias, grad, slide, groups)[0])
    assert seen.any()
    np.testing.assert_array_equal(~np.isfinite(kernels.conv2d(x, w, bias, slide, groups)), seen)


def test_images_give_the_same_bits_in_any_batch(compiled_level):
    x, w, bias, grad, slide, groups = arrays("as in a network", "float32")
    y, dx, _ = computed(x, w, bias, grad, slide, groups)
    for n in range(len(x)):
        one = computed(x[n : n + 1], w, bias, grad[n : n + 1], slide, groups)
        assert same_bits(one[0], y[n : n + 1])
        assert same_bits(one[1], dx[n : n + 1])


# ------------------------------------------------------------------------------------------------------ largest numbers

POOLS = {
    "of four": Windows((6, 8), (2, 2), (2, 2), (0, 0)),
    "that overlap": Windows((7, 6), (3, 2), (2, 1), (1, 1)),
    "with gaps between": Windows((7, 9), (2, 2), (3, 4), (0, 0)),
    "beyond a byte": Windows((17, 17), (17, 16), (1, 1), (0, 0)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POOLS)
def test_largest_numbers_of_windows(name, dtype, level):
    """Also where several are equal, where they are -inf, and where one is not a number."""
    slide, draws = POOLS[name], np.random.default_rng(1)
    x = draws.integers(-3, 3, (2, *slide.image, 70)).astype(dtype_of(dtype))
    x[0, :3, :3, 0] = -np.inf
    x[1, 1, 1, 1] = np.nan
    y, where = kernels.max_pool2d(x, slide)
    padded = np.full((2, *(n + 2 * p for n, p in zip(slide.image, slide.padding, strict=True)), 70), -np.inf)
    inside = tuple(slice(p, p + n) for n, p in zip(slide.image, slide.padding, strict=True))
    padded[:, inside[0], inside[1]] = x
    is_real = np.zeros(padded.shape[1:3], bool)
    is_real[inside] = True
    expected = np.zeros(y.shape)
    for i, j in np.ndindex(*slide.places):
        down, right = (slice(n * s, n * s + k) for n, s, k in zip((i, j), slide.stride, slide.window, strict=True))
        seen = padded[:, down, right].reshape(2, -1, 70)
        real = is_real[down, right].reshape(-1)
        order = np.where(np.isnan(seen), 9.0, np.maximum(seen, -9.0))
        order[:, ~real] = -99.0
        expected[:, i, j] = order.argmax(axis=1)
        taken = np.take_along_axis(seen, where[:, i, j, None].astype(np.int64), 1)[:, 0]
        np.testing.assert_array_equal(y[:, i, j].astype(np.float64), taken)
    np.testing.assert_array_equal(where, expected)
    grad = draws.standard_normal(y.shape).astype(dtype_of(dtype))
    dx = kernels.max_pool2d_backward(grad, where, slide).astype(np.float64)
    back = np.zeros(x.shape)
    n, i, j, c = np.indices(y.shape)
    di, dj = np.divmod(where.astype(np.int64), slide.window[1])
    rows, columns = i * slide.stride[0] - slide.padding[0] + di, j * slide.stride[1] - slide.padding[1] + dj
    np.add.at(back, (n, rows, columns, c), grad.astype(np.float64))
    np.testing.assert_allclose(dx, back, rtol=0, atol=2e-2 if is_half(dtype_of(dtype)) and slide.overlap else 1e-5)


def test_what_no_window_reaches_has_no_gradient(level):
    slide = POOLS["with gaps between"]
    x = np.ones((1, *slide.image, 3), np.float32)
    y, where = kernels.max_pool2d(x, slide)
    dx = kernels.max_pool2d_backward(np.ones_like(y), where, slide)
    assert dx.sum() == y.size
    assert not dx[:, 2].any()

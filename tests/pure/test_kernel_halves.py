"""Half precision to single and back: every half there is, and every kind of single."""

import numpy as np
import pytest

from mpitrain import kernels

HALVES = np.arange(65536, dtype=np.uint32).astype(np.uint16)


def bits(x):
    return x.view(np.uint16 if x.itemsize == 2 else np.uint32)


def singles():
    """Every half, its neighbours, the middle to the next half, and that one's neighbours; then what has no half."""
    finite = HALVES.view(np.float16)[np.isfinite(HALVES.view(np.float16))].astype(np.float32)
    exponent = np.maximum(np.frexp(finite)[1] - 1, -14)  # of the last place of 11 binary digits
    tie = finite + np.copysign(np.ldexp(np.float32(0.5), exponent - 10), finite)
    near = [np.nextafter(x, np.float32(to)) for x in (finite, tie) for to in (-np.inf, np.inf)]
    far = np.array([65519.996, 65520, 65535, 65536, 1e5, 1e30, 3.4e38, np.inf, 2**-25, 2**-26, 1e-8, 1e-30, 1e-45])
    spread = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.concatenate([finite, tie, *near, far.astype(np.float32), -far.astype(np.float32), spread])


def brains(x):
    """bfloat16 by its definition: the upper 16 bits, to the nearest, ties to even; NaN stays NaN, its sign with it."""
    wide = x.view(np.uint32).astype(np.uint64)
    rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (wide >> 16) | 0x40, rounded).astype(np.uint16)


def test_every_half_is_widened_exactly(level):
    for first in (0, 1, 3):
        x = HALVES[first:].view(np.float16)
        y, expected = kernels.widen(x), x.astype(np.float32)
        assert y.dtype == np.float32
        numbers = ~np.isnan(x)
        assert np.array_equal(bits(y)[numbers], bits(expected)[numbers])
        assert np.isnan(y[~numbers]).all()
        assert np.array_equal(np.signbit(y), np.signbit(x))


def test_singles_become_the_nearest_half(level):
    x = singles()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16)
    for first in (0, 1, 3):
        y = kernels.narrow(x[first:], np.float16)
        assert y.dtype == np.float16
        numbers = ~np.isnan(x[first:])
        assert np.array_equal(bits(y)[numbers], bits(expected[first:])[numbers])
        assert np.isnan(y[~numbers]).all()
        assert np.array_equal(np.signbit(y), np.signbit(x[first:]))


def test_every_half_comes_back(level):
    x = HALVES.view(np.float16)
    y = kernels.narrow(kernels.widen(x), np.float16)
    numbers = ~np.isnan(x)
    assert np.array_equal(bits(y)[numbers], bits(x)[numbers])
    assert np.isnan(y[~numbers]).all()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 15, 16, 17, 31, 33])
def test_lengths_layouts_and_given_results(length, level):
    x = np.linspace(-3, 3, 2 * length * 2, dtype=np.float32).reshape(2, 2 * length)[:, ::2]
    half = x.astype(np.float16)
    assert np.array_equal(kernels.narrow(x, np.float16), half)
    assert np.array_equal(kernels.widen(half[:, ::-1]), half[:, ::-1].astype(np.float32))
    for dtype, source, kernel in (
        (np.float32, half, lambda out: kernels.widen(half, out)),
        (np.float64, half, lambda out: kernels.widen(half, out)),
        (np.float16, x, lambda out: kernels.narrow(x, np.float16, out)),
    ):
        for room in (np.full((2, length + 2), 9, dtype), np.full((length + 2, 2), 9, dtype).T):
            view = room[:, 1:-1]
            assert kernel(view) is view
            assert np.array_equal(view, source.astype(dtype))
            assert (room[:, [0, -1]] == 9).all()
        whole = np.empty(x.shape, dtype)
        assert kernel(whole) is whole
        assert np.array_equal(whole, source.astype(dtype))
    number = np.float32(1.5).reshape(())
    assert kernels.narrow(number, np.float16).shape == kernels.widen(number.astype(np.float16)).shape == ()


def test_bfloat16_is_the_upper_half_rounded_to_even(compiled_level):
    """By the module itself, so that it holds where no package knows the dtype bfloat16."""
    from mpitrain.kernels import _compiled

    for first in (0, 1, 3):
        x = singles()[first:]
        y = np.empty(x.size, np.uint16)
        _compiled.narrow(True, x, y)
        assert np.array_equal(y, brains(x))
        z = np.empty(HALVES.size, np.float32)
        _compiled.widen(True, HALVES, z)
        assert np.array_equal(bits(z), HALVES.astype(np.uint32) << 16)


def test_bfloat16_arrays_are_taken_where_a_package_has_them():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x = singles()
    for name in kernels.levels():
        kernels.select(name)
        y = kernels.narrow(x, bfloat16)
        assert y.dtype == bfloat16
        assert np.array_equal(y.view(np.uint16)[~np.isnan(x)], brains(x)[~np.isnan(x)])
        assert np.array_equal(kernels.widen(y), y.astype(np.float32), equal_nan=True)


def test_halves_of_the_other_byte_order_are_read_as_what_they_are(level):
    x = np.array([1.0, -2.5, 65504.0], ">f2")
    assert kernels.widen(x).tolist() == [1.0, -2.5, 65504.0]
    assert kernels.narrow(np.array([1.0, -2.5], np.float32), ">f2").tolist() == [1.0, -2.5]

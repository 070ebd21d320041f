"""Kernels on float16 and bfloat16: to the bit the kernel of the same numbers in float32, rounded once.

So each bound that a kernel keeps in float32 holds for halves with half of the last digit of the result on top, and sums
and statistics, which stay float32, have no other error at all.
"""

from __future__ import annotations

import numpy as np
import pytest
from half_calls import BFLOAT16, EPS, HALVES, assert_rounded, values
from kernel_calls import CALLS, DROP, LAYOUTS, WRITTEN, arguments, call, hashes, offset, same_bits, untouched

from mpitrain import kernels
from mpitrain.backend import is_half, wide
from mpitrain.errors import ShapeError
from mpitrain.kernels import reference

STORED = [name for name in CALLS if name != "adamw"]  # masters and moments are never halves
KERNELS = pytest.mark.parametrize("kernel", STORED)
AFTER_A_BRANCH = ("residual_norm", "residual_rms_norm")  # whose norm is that of the rounded sum
SHAPES = [(5, 33), (1, 17), (4, 1), (67, 16), (150, 257), (3, 4099)]  # one block and many, within a group and beyond
FEWER = [(5, 33), (70, 100)]


def singles(kernel, arrays):
    """What float32 makes of the same numbers, before it is rounded."""
    arrays = [values(array) for array in arrays]
    if kernel not in AFTER_A_BRANCH:
        return call(kernel, arrays)
    x, y, branch_bias, rows, *norm = arrays
    return [kernels.residual(x, y, branch_bias, rows, DROP), *norm]


def expected(kernel, arrays, half):
    """That, rounded where halves come out."""
    results = singles(kernel, arrays)
    if kernel == "residual_norm":  # the norm of the rounded sum, as that is what backward will find
        total = kernels.narrow(results[0], half)
        return [total, *kernels.layer_norm(total, *arrays[4:], 1e-5)]
    if kernel == "residual_rms_norm":
        total = kernels.narrow(results[0], half)
        return [total, *kernels.rms_norm(total, *arrays[4:], 1e-5)]
    single = {"layer_norm": (1, 2), "layer_norm_backward": (1, 2), "gelu_backward": (1,), "combine_backward": (1,)}
    single |= {"rms_norm": (1,), "rms_norm_backward": (1,)}
    kept = single.get(kernel, ())
    if kernel in ("cross_entropy", "row_sum", "sum_of_squares"):
        return results
    return [y if i in kept else kernels.narrow(y, half) for i, y in enumerate(results)]


@KERNELS
@HALVES
def test_a_kernel_of_halves_is_that_of_singles_rounded_once(kernel, half, level):
    for shape in SHAPES:
        arrays = arguments(kernel, half, *shape)
        right = expected(kernel, [a.copy() for a in arrays], half)
        kept = [a.copy() for a in arrays[WRITTEN.get(kernel, 0) :]]
        results = call(kernel, arrays)
        assert same_bits(arrays[WRITTEN.get(kernel, 0) :], kept)
        if kernel == "sum_of_squares":  # added up block by block, in float64
            assert results[0] == pytest.approx(right[0], rel=1e-14)
        elif kernel == "cross_entropy":
            assert same_bits(results[1:], right[1:]), shape
            assert results[0].dtype == np.float32
            assert results[0] == pytest.approx(right[0], rel=3e-7)
        else:
            assert same_bits(results, right), shape


@pytest.mark.parametrize("kernel", [k for k in STORED if k not in (*AFTER_A_BRANCH, "sum_of_squares")])
@HALVES
def test_a_kernel_of_halves_is_within_half_a_digit_of_the_formula(kernel, half, level):
    """In float64, of the same numbers; float32 on the way is worth 1e-5 of the largest."""
    for shape in FEWER:
        arrays = arguments(kernel, half, *shape)
        exact = call(kernel, [values(array, np.float64).copy() for array in arrays])
        for y, z in zip(call(kernel, arrays), exact, strict=True):
            error = 1e-5 * np.abs(z).max(initial=1.0)
            if is_half(y.dtype):
                assert_rounded(y, z, error)
            else:
                assert np.abs(y - z).max(initial=0.0) <= error * shape[0]


@HALVES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_halves_changes_no_bit(layout, half, compiled_level):
    for kernel in STORED:
        right = call(kernel, arguments(kernel, half, 5, 33))
        first = WRITTEN.get(kernel, 0)
        arrays = arguments(kernel, half, 5, 33)
        laid = [*arrays[:first], *map(LAYOUTS[layout], arrays[first:])]
        assert same_bits(call(kernel, laid), right), kernel


class Guarded:
    """NumPy, but what `empty` gives lies between canaries."""

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
@HALVES
def test_nothing_outside_results_and_scratch_is_written(kernel, half, compiled_level, monkeypatch):
    from mpitrain.kernels import compiled

    for shape in [*SHAPES[:4], (3, 257), (40, 640)]:
        right = call(kernel, arguments(kernel, half, *shape))
        for first in (0, 3):
            guarded = Guarded(first)
            monkeypatch.setattr(compiled, "np", guarded)
            results = call(kernel, arguments(kernel, half, *shape))
            monkeypatch.setattr(compiled, "np", np)
            assert guarded.made
            assert all(untouched(*made) for made in guarded.made), shape
            assert same_bits(results, right), shape


@KERNELS
@HALVES
def test_the_size_of_a_block_changes_no_bit(kernel, half, compiled_level, monkeypatch):
    from mpitrain.kernels import compiled

    arrays = arguments(kernel, half, 131, 33)
    right = call(kernel, [a.copy() for a in arrays])
    for spare in (1, 33 * 4 * 5, 33 * 4 * 64, 10**6):
        monkeypatch.setattr(compiled, "SPARE", spare)
        results = call(kernel, [a.copy() for a in arrays])
        if kernel in ("sum_of_squares", "cross_entropy"):
            assert results[0] == pytest.approx(right[0], rel=3e-7)
            results[0] = right[0]
        assert same_bits(results, right), spare


@KERNELS
@HALVES
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_where_it_shows_in_singles(kernel, half, value, level):
    for i, array in enumerate(arguments(kernel, half, 3, 37)):
        for place in (0, 36) if is_half(array.dtype) else ():
            arrays = arguments(kernel, half, 3, 37)
            arrays[i][..., place] = value
            with np.errstate(all="ignore"):
                right = expected(kernel, [a.copy() for a in arrays], half)
                results = call(kernel, arrays)
            for y, z in zip(results, right, strict=True):
                np.testing.assert_array_equal(y.astype(np.float64), z.astype(np.float64))


@HALVES
def test_arrays_without_elements_give_such(half, level):
    for kernel in STORED:
        for shape in ((0, 33), (0, 1)):
            if kernel in ("cross_entropy", "cross_entropy_backward") and shape[1] == 1:
                continue
            results = call(kernel, arguments(kernel, half, *shape))
            right = expected(kernel, arguments(kernel, half, *shape), half)
            assert same_bits(results, right), (kernel, shape)


@HALVES
def test_a_vector_of_weights_may_be_single(half, level):
    x, weight, bias = arguments("layer_norm", half, 9, 33)
    right = kernels.layer_norm(x, weight, bias, 1e-5)
    assert same_bits(kernels.layer_norm(x, values(weight), values(bias), 1e-5), right)
    y = arguments("layer_norm", half, 9, 33, seed=1)[0]
    right = kernels.residual_norm(x, y, bias, None, 0.0, weight, bias, 1e-5)
    assert same_bits(kernels.residual_norm(x, y, values(bias), None, 0.0, values(weight), values(bias), 1e-5), right)


def test_what_overflows_becomes_infinite_without_a_word(level):
    """For the loss scale to find.  (bfloat16 reaches as far as float32, where NumPy speaks of it.)"""
    large = np.full((3, 8), 6e4, np.float16)
    for y in (
        kernels.residual(large, large, None, None, 0.0),
        kernels.dropout(large, hashes(3), 0.5),
        kernels.gelu_backward(large, large, False)[0],
        kernels.matmul(large, large.T),
    ):
        assert y.dtype == np.float16
        assert np.isinf(y).any()
    assert (kernels.sum_rows(large) == np.float32(np.float16(6e4)) * 3).all()


@HALVES
def test_the_norm_of_a_constant_row_is_the_bias(half, level):
    """C12: padding of 128 equal halves, eps 1e-12 and 1e-5; statistics are float32."""
    _, weight, bias = arguments("layer_norm", half, 4, 128)
    for eps in (1e-12, 1e-5):
        for c in (0.0, 0.1, -3.7, 1000.3):
            x = np.full((4, 128), c).astype(half)
            y, center, rstd = kernels.layer_norm(x, weight, bias, eps)
            assert center.dtype == rstd.dtype == np.float32
            assert (y == bias).all()
            grad = (arguments("layer_norm", half, 4, 128, seed=2)[0].astype(np.float32) / 1e3).astype(half)
            for g in kernels.layer_norm_backward(grad, x, center, rstd, weight):
                assert np.isfinite(g.astype(np.float32)).all()


def test_sums_of_halves_are_formed_in_single(level):
    """T21.1: 4096 ones added one by one in float16 are 2048."""
    one_by_one = np.float16(0)
    for _ in range(4096):
        one_by_one += np.float16(1)
    assert one_by_one == 2048
    for half in EPS:
        ones = np.ones((4097, 3), half)
        assert (kernels.sum_rows(ones) == 4097).all()
        assert (kernels.gelu_backward(ones, ones, True)[1] == 4097).all()
        table = np.zeros((2, 3), np.float32)
        kernels.row_sum(np.ones(4097, np.int64), ones, table)
        assert table.tolist() == [[0.0] * 3, [4097.0] * 3]
        into = np.full((2, 3), 1, half)
        kernels.row_sum(np.ones(4097, np.int64), ones, into)
        assert into.astype(np.float32).tolist() == [[1.0] * 3, [np.float32(4098).astype(half)] * 3]
        assert (kernels.matmul(ones.T, ones, out=np.empty((3, 3), np.float32)) == 4097).all()
        assert kernels.sum_of_squares(ones) == 4097 * 3


# ----------------------------------------------------------------------------------------------------------- products


def normal(half, *shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32).astype(half)


PRODUCTS = [((5, 7), (7, 3)), ((1, 129), (129, 65)), ((7,), (7, 3)), ((5, 7), (7,)), ((7,), (7,)), ((0, 7), (7, 3))]
PRODUCTS += [((5, 0), (0, 3)), ((4, 1, 5, 7), (2, 7, 3)), ((64, 100), (100, 48))]


@HALVES
@pytest.mark.parametrize(("left", "right"), PRODUCTS, ids=str)
def test_a_product_of_halves_is_that_of_singles_rounded_once(left, right, half, level):
    a, b = normal(half, *left), normal(half, *right, seed=1)
    wide_product = np.asarray(np.matmul(values(a), values(b)))
    y = np.asarray(kernels.matmul(a, b))
    assert y.dtype == half
    assert same_bits([y], [wide_product.astype(half)])
    if y.ndim:
        into = np.empty(y.shape, half)
        assert kernels.matmul(a, b, out=into) is into
        assert same_bits([into], [y])
        into = np.empty(y.shape, np.float32)
        assert kernels.matmul(a, b, out=into) is into
        assert same_bits([into], [wide_product])
    unrounded = np.asarray(kernels.matmul(a, b, dtype=np.float32))
    assert unrounded.dtype == np.float32
    assert same_bits([unrounded], [wide_product])


@HALVES
def test_transposed_and_cut_factors_multiply_alike(half, level):
    a, b = normal(half, 9, 14), normal(half, 14, 6, seed=1)
    right = values(a) @ values(b)
    laid = [lambda x: x, lambda x: np.asfortranarray(x), lambda x: np.repeat(x, 2, 1)[:, ::2], lambda x: x[::-1][::-1]]
    for of_a in laid:
        for of_b in laid:
            np.testing.assert_allclose(kernels.matmul(of_a(a), of_b(b), dtype=np.float32), right, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(
        kernels.matmul(a.T.T[2:7, 3:9], b[3:9]), (values(a[2:7, 3:9]) @ values(b[3:9])).astype(half)
    )
    for shape in ((9, 5), (6, 9)):
        with pytest.raises(ValueError, match="broadcast"):
            kernels.matmul(a, b, out=np.empty(shape, half))


@HALVES
def test_a_half_and_a_single_multiply_in_single(half, level):
    a, b = normal(half, 5, 7), normal(np.float32, 7, 3, seed=1)
    for one, other in ((a, b), (b.T, a.T)):
        y = kernels.matmul(one, other)
        assert y.dtype == np.float32
        assert same_bits([y], [np.matmul(values(one), values(other))])
        rounded = kernels.matmul(one, other, dtype=half)
        assert same_bits([rounded], [y.astype(half)])
        twofold = kernels.matmul(one, other.astype(np.float64))
        assert twofold.dtype == np.float64
        np.testing.assert_allclose(twofold, y, rtol=1e-5, atol=1e-6)


def test_the_two_kinds_of_halves_do_not_multiply(level):
    with pytest.raises(ShapeError, match=r"float16 .* bfloat16 .* do not go together"):
        kernels.matmul(np.ones((2, 3), np.float16), np.ones((3, 2), BFLOAT16))
    with pytest.raises(ShapeError, match=r"bfloat16 .* float16 .* do not go together"):
        kernels.matmul(np.ones((2, 3), BFLOAT16), np.ones((3, 2), np.float16))


# ---------------------------------------------------------------------------------------------------- second opinions


@HALVES
def test_casts_are_those_of_pytorch(half, level):
    torch = pytest.importorskip("torch")
    theirs = torch.float16 if half == np.float16 else torch.bfloat16
    x = (np.random.default_rng(0).standard_normal(50_000) * 10.0 ** np.arange(-39, 11).repeat(1000)).astype(np.float32)
    x[::1001] = np.inf
    with np.errstate(over="ignore"):
        mine = kernels.narrow(x, half)
    cast = torch.from_numpy(x).to(theirs)
    np.testing.assert_array_equal(mine.view(np.int16), cast.view(torch.int16).numpy())
    np.testing.assert_array_equal(kernels.widen(mine), cast.float().numpy())


@HALVES
def test_norm_and_gelu_are_those_of_pytorch(half, level):
    """Which rounds once as well, so they may differ by a digit; its sums over rows are formed in halves: left out."""
    torch = pytest.importorskip("torch")
    theirs = torch.float16 if half == np.float16 else torch.bfloat16

    def tensor(x):
        return torch.from_numpy(values(x)).to(theirs).requires_grad_()

    x, weight, bias = arguments("layer_norm", half, 20, 129)
    grad = arguments("layer_norm", half, 20, 129, seed=3)[0]
    mine = kernels.layer_norm(x, weight, bias, 1e-5)
    dx, _, _ = kernels.layer_norm_backward(grad, x, *mine[1:], weight)
    a, w, b = tensor(x), tensor(weight), tensor(bias)
    y = torch.nn.functional.layer_norm(a, (129,), w, b, 1e-5)
    y.backward(tensor(grad).detach())
    gelu, _ = kernels.gelu_tanh(x)
    z = torch.nn.functional.gelu(tensor(x), approximate="tanh")
    for ours, other, digits in ((mine[0], y, 2), (gelu, z, 2), (dx, a.grad, 4)):
        exact = other.detach().float().numpy()
        scale = np.maximum(np.abs(exact), np.abs(exact).max() / 64)
        assert (np.abs(values(ours) - exact) <= digits * EPS[half] * scale).all()


def test_the_references_take_halves_as_the_kernels_do(compiled_level):
    for half in EPS:
        for kernel in STORED:
            arrays = arguments(kernel, half, 9, 33)
            mine = call(kernel, [a.copy() for a in arrays])
            kernels.select("numpy")
            theirs = call(kernel, [a.copy() for a in arrays])
            kernels.select(compiled_level)
            for y, z in zip(mine, theirs, strict=True):
                assert (y.dtype, y.shape) == (z.dtype, z.shape), kernel
                eps = EPS[half] if is_half(y.dtype) else 1e-5
                np.testing.assert_allclose(values(y, np.float64), values(z, np.float64), rtol=eps, atol=eps / 4)
    assert reference.erf(np.ones(2, np.float16)).dtype == np.float16
    assert wide(BFLOAT16) == np.float32

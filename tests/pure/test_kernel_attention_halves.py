"""Attention of halves: widened, computed in float32, rounded once, and nothing else.

So for the same numbers in float32 the results are the same before they are rounded, to the last bit.  How far these may
be from the formula is the subject of `test_kernel_attention`; how far halves are from it stands at the end.
"""

import math

import numpy as np
import pytest
from exact_attention import exact, make, masks
from kernel_calls import attend, hashes, same_bits

from mpitrain import kernels
from mpitrain.backend import dtype_of, is_half

HALVES = pytest.mark.parametrize("half", [np.dtype(np.float16), dtype_of("bfloat16")], ids=str)
SINGLE = np.float32


def single(x):
    return x.astype(SINGLE) if is_half(x.dtype) else x


def halved(arrays, half):
    return [x.astype(half) for x in arrays]


def in_single(arrays, **options):
    """[out, lse, dq, dk, dv] in float32 of the same numbers; backward is given the output as it is after rounding."""
    half = arrays[0].dtype
    q, k, v, grad = (single(x) for x in arrays)
    setting = {"scale": 1 / math.sqrt(max(1, q.shape[3])), "causal": True, "mask": None, "rows": None, "drop": 0.0}
    setting |= options
    out, dq, dk, dv = (np.empty(x.shape, SINGLE) for x in (q, q, k, v))
    lse = kernels.attention(q, k, v, out, **setting)
    kernels.attention_backward(grad, q, k, v, single(out.astype(half)), lse, dq, dk, dv, **setting)
    return [out, lse, dq, dk, dv]


def rounded(results, half):
    return [x if i == 1 else x.astype(half) for i, x in enumerate(results)]


def assert_rounded_once(arrays, into=(), **options):
    half = arrays[0].dtype
    results = attend(*arrays, into, **options)
    assert same_bits(results, rounded(in_single(arrays, **options), half))
    return results


@HALVES
@pytest.mark.parametrize("causal", [True, False])
def test_every_length_of_a_sequence(half, causal, level):
    for s in (*range(1, 71, 3), 128, 129, 200):
        assert_rounded_once(halved(make(SINGLE, 1, 2, s, 5), half), causal=causal)


@HALVES
@pytest.mark.parametrize("d", [1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 128])
def test_every_width_of_a_head(half, d, level):
    for b, h, s in ((1, 1, 5), (2, 3, 17), (1, 2, 65)):
        assert_rounded_once(halved(make(SINGLE, b, h, s, d), half))


@HALVES
@pytest.mark.parametrize(("s", "t"), [(1, 5), (5, 1), (17, 70), (70, 17), (1, 257), (130, 3)])
def test_queries_and_keys_of_any_two_lengths(half, s, t, level):
    arrays, rows = halved(make(SINGLE, 2, 1, s, 6, t=t), half), hashes(2, 1, s)
    assert_rounded_once(arrays, causal=False)
    assert_rounded_once(arrays, causal=False, rows=rows, drop=0.3, keys=np.arange(t)[::-1] * 3)


@HALVES
@pytest.mark.parametrize("causal", [True, False])
def test_masks_and_dropout(half, causal, level):
    """C08: a query that sees no key gives exactly 0, and takes and gives no gradient, in halves too."""
    rows = hashes(2, 3, 37)
    for mask in masks(2, 3, 37):
        arrays = halved(make(SINGLE, 2, 3, 37, 5), half)
        out, lse, dq, dk, dv = assert_rounded_once(arrays, causal=causal, mask=mask, rows=rows, drop=0.4)
        seen = np.broadcast_to(mask, (2, 3, 37, 37)) & (np.tril(np.ones((37, 37), bool)) if causal else True)
        blind, unseen = ~seen.any(3), ~seen.any(2)
        assert (lse[blind] == np.finfo(SINGLE).min).all()
        assert not any(single(x).any() for x in (out[blind], dq[blind], dk[unseen], dv[unseen]))


@HALVES
def test_gradients_may_be_single_where_the_rest_is_half(half, level):
    """And so may the output: whoever adds results up needs them before they are rounded."""
    arrays, options = halved(make(SINGLE, 2, 2, 70, 20), half), {"rows": hashes(2, 2, 70), "drop": 0.2}
    q, k, v, grad = arrays
    setting = {"scale": 1 / math.sqrt(20), "causal": True, "mask": None, **options}
    expected = in_single(arrays, **options)
    out = np.empty(q.shape, SINGLE)
    lse = kernels.attention(q, k, v, out, **setting)
    assert same_bits([out, lse], expected[:2])
    for which in range(8):  # any of the three, and none
        kinds = [SINGLE if which >> i & 1 else half for i in range(3)]
        into = [np.empty(x.shape, kind) for x, kind in zip((q, k, v), kinds, strict=True)]
        kernels.attention_backward(grad, q, k, v, out.astype(half), lse, *into, **setting)
        assert same_bits(into, [x.astype(kind) for x, kind in zip(expected[2:], kinds, strict=True)])
    for given in ((single(grad), q, k, v), (grad, single(q), k, single(v))):
        into = [np.empty(x.shape, SINGLE) for x in (q, k, v)]
        kernels.attention_backward(*given, out.astype(half), lse, *into, **setting)
        assert same_bits(into, expected[2:])


def test_a_half_gradient_of_single_precision_is_read_for_what_it_is(level):
    """Also where it is the only half of the call."""
    for half in (np.dtype(np.float16), dtype_of("bfloat16")):
        q, k, v, grad = make(SINGLE, 1, 2, 40, 8)
        out, lse, *expected = attend(q, k, v, single(grad.astype(half)))
        into = [np.empty_like(x) for x in (q, k, v)]
        setting = {"scale": 1 / math.sqrt(8), "causal": True, "mask": None, "rows": None, "drop": 0.0}
        kernels.attention_backward(grad.astype(half), q, k, v, out, lse, *into, **setting)
        assert same_bits(into, expected)


# ------------------------------------------------------------------------------------------------------ how arrays lie


@HALVES
@pytest.mark.parametrize("shape", [(2, 3, 9, 5), (1, 1, 33, 1), (1, 2, 70, 16)])
def test_the_layout_of_the_arguments_changes_no_bit(half, shape, compiled_level):
    b, h, s, d = shape
    packed = np.random.default_rng(1).standard_normal((b, s, h * 3 * d)).astype(half)
    q, k, v = packed.reshape(b, s, h, 3, d).transpose(3, 0, 2, 1, 4)
    grad = make(SINGLE, *shape)[3].astype(half)
    expected = attend(*(np.ascontiguousarray(x) for x in (q, k, v)), grad)
    gradients = np.full((b, s, h, 3, d), 7).astype(half).transpose(3, 0, 2, 1, 4)
    by_position = np.full((b, s, h, d), 7).astype(half).swapaxes(1, 2)
    assert same_bits(attend(q, k, v, grad, [by_position, *gradients]), expected)
    flipped = [x[:, ::-1, ::-1].copy()[:, ::-1, ::-1] for x in (q, k, v, grad)]
    assert same_bits(attend(*flipped), expected)
    gapped = [np.repeat(x, 2, axis=3)[..., ::2] for x in (q, k, v, grad)]  # copied, or left to the reference
    for a, b in zip(attend(*gapped), expected, strict=True):
        np.testing.assert_allclose(single(a), single(b), rtol=2e-2, atol=2e-2)
    wide = np.broadcast_to(grad[:, :, :, :1], shape)
    assert same_bits(attend(q, k, v, wide), attend(q, k, v, wide.copy()))


@HALVES
@pytest.mark.parametrize("first", [0, 1, 3])
def test_nothing_beside_the_results_is_written(half, first, compiled_level):
    """Results lie between others' numbers, at an odd place; so they come out one by one, not in whole vectors."""
    shape = (2, 3, 37, 5)
    arrays, canary = halved(make(SINGLE, *shape), half), np.asarray(7).astype(half)
    rooms = [np.full(first + math.prod((2, 3, 38, 7)), canary) for _ in range(4)]
    views = [room[first:].reshape(2, 3, 38, 7)[:, :, :37, 1:6] for room in rooms]
    assert same_bits(attend(*arrays, views), attend(*arrays))
    for room, view in zip(rooms, views, strict=True):
        view[...] = canary
        assert (room == canary).all()


@HALVES
def test_halves_of_the_other_byte_order_are_left_to_the_reference(half, compiled_level):
    arrays = halved(make(SINGLE, 1, 2, 9, 4), half)
    if half == np.float16:
        swapped = [x.astype(half.newbyteorder()) for x in arrays]
        out, _, dq, dk, dv = attend(*swapped)
        for a, b in zip((out, dq, dk, dv), [x for i, x in enumerate(attend(*arrays)) if i != 1], strict=True):
            np.testing.assert_allclose(a.astype(SINGLE), single(b), rtol=1e-2, atol=1e-3)
    other = dtype_of("bfloat16") if half == np.float16 else np.dtype(np.float16)
    q, k, v, _ = arrays
    out = np.empty(q.shape, other)  # two kinds of halves in one call: C has a name for one
    kernels.attention(q, k, v, out, scale=0.5, causal=True, mask=None, rows=None, drop=0.0)
    np.testing.assert_allclose(single(out), single(attend(*arrays)[0]), rtol=2e-2, atol=2e-2)


@HALVES
@pytest.mark.parametrize("shape", [(0, 2, 5, 3), (2, 0, 5, 3), (2, 2, 0, 3), (2, 2, 5, 0)])
def test_arrays_without_elements_are_taken(half, shape, level):
    results = attend(*halved(make(SINGLE, *shape), half))
    assert [x.shape for x in results] == [shape, shape[:3], shape, shape, shape]
    assert [x.dtype for x in results] == [half, SINGLE, half, half, half]


# ---------------------------------------------------------------------------------------------------------- the range


def test_what_is_too_large_for_a_half_becomes_infinity_without_a_word(level):
    """For the loss scale to find."""
    q, k, v, grad = halved(make(SINGLE, 1, 1, 40, 8), np.float16)
    large = (single(v) * 1e4).clip(-6e4, 6e4).astype(np.float16)
    with np.errstate(all="raise", under="ignore"):
        out, lse, dq, dk, _ = attend(q, k, large, (single(grad) * 1e4).astype(np.float16))
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    assert np.isinf(dq).any()
    assert np.isinf(dk).any()
    assert not any(np.isnan(x).any() for x in (dq, dk))


def test_scores_beyond_the_range_of_halves_are_computed_with(level):
    """Products of 300 by 300 over 64 numbers are far above 65504, and here they decide between keys by 2."""
    q = np.full((1, 1, 4, 64), 300, np.float16)
    k = np.full((1, 1, 4, 64), 300, np.float16)
    q[..., 0] = 16 / 300
    k[:, :, 1, 0] += 256
    out, lse, *_ = assert_rounded_once([q, k, k.copy(), q.copy()], causal=False)
    assert np.isfinite(out).all()
    assert (lse > 65504).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@HALVES
def test_what_is_not_finite_reaches_its_own_sample_and_head_alone(half, value, level):
    for name in range(4):
        arrays = halved(make(SINGLE, 2, 2, 70, 5), half)
        arrays[name][1, 1, 20, 2] = value
        with np.errstate(all="ignore"):
            out, _, *gradients = (single(x) for x in attend(*arrays))
        assert not all(np.isfinite(x[1, 1]).all() for x in (out, *gradients))
        for x in (out, *gradients):
            assert np.isfinite(x[0]).all()
            assert np.isfinite(x[1, 0]).all()


# ------------------------------------------------------------------------------------------------- how far off they are


@HALVES
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"drop": 0.3}], ids=str)
def test_results_are_those_of_float64_but_for_one_rounding(half, options, level):
    """From the same half numbers: the bound of float32, and half a unit in the last place of a half."""
    for b, h, s, d in ((2, 2, 5, 4), (1, 2, 65, 20), (1, 1, 200, 64)):
        arrays = halved(make(SINGLE, b, h, s, d), half)
        drop, causal = options.get("drop", 0.0), options.get("causal", True)
        rows = hashes(b, h, s) if drop else None
        results = attend(*arrays, causal=causal, rows=rows, drop=drop)
        given = [x.astype(np.float64) for x in (*arrays, *results[:2])]
        expected, bounds = exact(*given, causal, None, rows, drop, None)
        bits = 11 if half == np.float16 else 8
        for i, (result, y, bound) in enumerate(zip(results, expected, bounds, strict=True)):
            off = np.abs(result.astype(np.float64) - y)
            allowed = np.finfo(SINGLE).eps * bound * 1.01
            if i != 1:
                allowed = allowed + 2.0**-bits * np.abs(y) * 1.01 + 2.0**-25
            assert (off <= allowed).all(), (i, (off / allowed).max())


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_halves_is_at_least_as_good_as_pytorchs(half, causal, level):
    """Against float64 from the same halves: no error of ours is larger than the largest of theirs, or a last place."""
    torch = pytest.importorskip("torch")
    kind = dtype_of(half)
    arrays = halved(make(SINGLE, 1, 2, 130, 32), kind)
    results = [x.astype(np.float64) for i, x in enumerate(attend(*arrays, causal=causal)) if i != 1]

    def theirs(dtype):
        q, k, v, grad = (torch.from_numpy(single(x)).to(dtype) for x in arrays)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        y = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        y.backward(grad)
        return [x.detach().double().numpy() for x in (y, *(leaf.grad for leaf in leaves))]

    last_place = 2.0 ** (-10 if half == "float16" else -7)
    truth = theirs(torch.float64)
    for mine, other, expected in zip(results, theirs(getattr(torch, half)), truth, strict=True):
        size = np.abs(expected).max()
        error, its = np.abs(mine - expected).max(), np.abs(other - expected).max()
        assert error <= max(its, last_place * size)
        assert error <= 2 * last_place * size

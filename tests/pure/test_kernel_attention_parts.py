"""Attention on keys that are not the queries' own: of other number, with numbers of their own, and some of many.

Where ranks hold the keys of a sequence in parts, each part gives an output and the logarithm of the sum of its
exponentials.  By these the parts make up the whole: that is what context parallelism rests on.
"""

import math

import numpy as np
import pytest
from exact_attention import PRECISIONS, assert_accurate, make, masks
from kernel_calls import attend, hashes, offset, same_bits, untouched

from mpitrain import kernels
from mpitrain.kernels import blocks
from mpitrain.rng import keep_mask

LENGTHS = [(1, 1), (1, 5), (5, 1), (17, 5), (5, 17), (32, 33), (33, 32), (64, 128), (128, 64), (1, 257), (257, 1)]


# ---------------------------------------------------------------------------------------------------- other many keys


@PRECISIONS
@pytest.mark.parametrize(("s", "t"), LENGTHS)
def test_queries_and_keys_of_any_two_lengths(dtype, s, t, level):
    for d in (1, 3, 20):
        assert_accurate(make(dtype, 2, 1, s, d, t=t), causal=False)


@PRECISIONS
def test_many_lengths(dtype, level):
    step = 1 if dtype is np.float32 else 5
    for s in (1, 2, 31, 70):
        for t in range(1, 71, step):
            assert_accurate(make(dtype, 1, 1, s, 3, t=t), causal=False)
            assert_accurate(make(dtype, 1, 1, t, 3, t=s), causal=False)


@PRECISIONS
@pytest.mark.parametrize(("s", "t"), [(1, 1), (7, 3), (3, 7), (40, 130), (130, 40)])
def test_every_form_of_a_mask_over_other_keys(dtype, s, t, level):
    b, h = (2, 3) if s + t < 100 else (1, 1)
    for mask in masks(b, h, s, t):
        out, lse, dq, dk, dv = assert_accurate(make(dtype, b, h, s, 5, t=t), causal=False, mask=mask)
        seen = np.broadcast_to(mask, (b, h, s, t))
        blind, unseen = ~seen.any(3), ~seen.any(2)
        assert (lse[blind] == np.finfo(dtype).min).all()
        assert not any(x.any() for x in (out[blind], dq[blind], dk[unseen], dv[unseen]))


@PRECISIONS
def test_causal_attention_wants_as_many_keys_as_queries(dtype, level):
    for t in (4, 6):
        q, k, v, grad = make(dtype, 1, 2, 5, 3, t=t)
        setting = {"scale": 1.0, "causal": True, "mask": None, "rows": None, "drop": 0.0}
        with pytest.raises((AssertionError, ValueError)):
            kernels.attention(q, k, v, np.empty_like(q), **setting)
        gradients = np.empty_like(q), np.empty_like(k), np.empty_like(v)
        with pytest.raises((AssertionError, ValueError)):
            kernels.attention_backward(grad, q, k, v, q, q[..., 0], *gradients, **setting)


@pytest.mark.parametrize(("s", "t"), [(0, 5), (5, 0), (0, 0)])
def test_without_queries_or_keys_everything_is_zero(s, t, level):
    rows, keys = hashes(2, 2, s), np.arange(t)
    into = [np.full((2, 2, n, 3), np.nan) for n in (s, s, t, t)]
    for options in ({}, {"rows": rows, "drop": 0.3, "keys": keys}, {"mask": np.ones((1, 1, s, t), bool)}):
        out, lse, dq, dk, dv = attend(*make(np.float64, 2, 2, s, 3, t=t), into, causal=False, **options)
        assert (lse.shape, lse.tolist()) == ((2, 2, s), np.full((2, 2, s), np.finfo(float).min).tolist())
        assert not any(x.any() for x in (out, dq, dk, dv))


# ------------------------------------------------------------------------------------------------- numbers of the keys


ZIGZAG = np.array([3, 4, 5, 18, 19, 20])
NUMBERS = {
    "in order": np.arange(7),
    "from the middle": np.arange(50, 57),
    "zig-zag": ZIGZAG,
    "in disorder": np.array([9, 2, 2, 60, 0]),
    "far": np.array([2**31 - 1, 2**31, 2**32 - 2, 5]),
    "many": np.arange(300, 40, -1),
}


@PRECISIONS
@pytest.mark.parametrize("drop", [0.1, 0.9])
@pytest.mark.parametrize("keys", NUMBERS.values(), ids=NUMBERS)
def test_dropout_is_the_mask_of_the_keys_numbers(dtype, drop, keys, level):
    for s in (1, 5, 40):
        arrays, rows = make(dtype, 1, 2, s, 5, t=len(keys)), hashes(1, 2, s)
        assert_accurate(arrays, causal=False, rows=rows, drop=drop, keys=keys)
        mask = np.arange(len(keys)) % 3 > 0
        assert_accurate(arrays, causal=False, rows=rows, drop=drop, keys=keys, mask=mask[None, None, None])


@PRECISIONS
def test_dropout_on_some_keys_is_a_slice_of_the_whole_mask(dtype, level):
    """With v the unit matrix and equal scores, `out` is the mask itself; with grad the unit matrix, so is dv."""
    s, total, drop = 24, 120, 0.4
    rows = hashes(1, 2, s)
    whole = keep_mask(rows, total, drop)
    for keys in (np.arange(total), np.arange(40, 64), ZIGZAG, np.arange(total)[::-1]):
        t = len(keys)
        q, k = np.zeros((1, 2, s, t), dtype), np.zeros((1, 2, t, t), dtype)
        v, grad = (np.broadcast_to(np.eye(n, t, dtype=dtype), (1, 2, n, t)).copy() for n in (t, s))
        out, _, _, _, dv = attend(q, k, v, grad, causal=False, rows=rows, drop=drop, keys=keys)
        keep = whole[..., keys]
        assert ((out != 0) == keep).all()
        np.testing.assert_allclose(out[keep], 1 / t / (1 - drop), rtol=1e-5)
        queries = min(s, t)
        assert ((dv[..., :queries] != 0) == keep.swapaxes(2, 3)[..., :queries]).all()


@PRECISIONS
@pytest.mark.parametrize("causal", [True, False])
def test_keys_have_the_numbers_from_0_on_unless_they_are_given_others(dtype, causal, level):
    arrays, rows = make(dtype, 2, 2, 37, 5), hashes(2, 2, 37)
    expected = attend(*arrays, causal=causal, rows=rows, drop=0.3)
    for keys in (np.arange(37), np.arange(37, dtype=np.int32), np.arange(74)[::2] // 2, np.arange(37) + 2**32):
        assert same_bits(attend(*arrays, causal=causal, rows=rows, drop=0.3, keys=keys), expected)
    assert not same_bits(attend(*arrays, causal=causal, rows=rows, drop=0.3, keys=np.arange(37) + 1), expected)
    assert same_bits(attend(*arrays, causal=causal, keys=np.arange(37) + 1), attend(*arrays, causal=causal))


@PRECISIONS
def test_causal_attention_by_place_takes_numbers_too(dtype, level):
    """The diagonal block of a rank that holds two chunks: its places ascend as its positions do."""
    assert_accurate(make(dtype, 1, 2, 6, 5), rows=hashes(1, 2, 6), drop=0.3, keys=ZIGZAG)


# --------------------------------------------------------------------------------------------- parts make up the whole


def put_together(results):
    """(out, lse) of parts: each output weighed by exp(its lse - the whole lse)."""
    whole = np.logaddexp.reduce([lse for _, lse in results])
    return sum(out * np.exp(lse - whole)[..., None] for out, lse in results), whole


CUTS = [(slice(0, 1), slice(1, 40)), (slice(0, 13), slice(13, 20), slice(20, 40)), (slice(30, 40), slice(0, 30))]


@pytest.mark.parametrize("cuts", CUTS, ids=["one and the rest", "three", "in another order"])
@pytest.mark.parametrize("masked", ["all", "causal", "documents"])
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_parts_of_the_keys_together_are_the_whole(cuts, masked, drop, level):
    """T14.1, T14.2 and T14.5: in any order, also where queries see nothing of a part, or nothing at all."""
    q, k, v, grad = make(np.float64, 2, 2, 40, 8)
    seen = {
        "all": np.ones((1, 1, 40, 40), bool),
        "causal": np.tri(40, dtype=bool)[None, None],
        "documents": np.equal.outer(np.arange(40) // 15, np.arange(40) // 15)[None, None] & (np.arange(40) != 3),
    }[masked]
    if masked == "documents":
        seen[..., 7, :] = False
    setting = {"scale": 1 / math.sqrt(8), "causal": False, "drop": drop, "rows": hashes(2, 2, 40) if drop else None}
    expected, *grads = attend(q, k, v, grad, causal=False, mask=seen, rows=setting["rows"], drop=drop)
    lse, *grads = grads

    results = []
    for cut in cuts:
        part = setting | {"mask": seen[..., cut], "keys": np.arange(40)[cut]}
        out = np.empty_like(q)
        results.append((out, kernels.attention(q, k[:, :, cut], v[:, :, cut], out, **part)))
    y, whole = put_together(results)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(whole, lse, rtol=1e-12)

    dq, dk, dv = np.zeros_like(q), np.full_like(k, np.nan), np.full_like(v, np.nan)
    for cut in cuts:
        part = setting | {"mask": seen[..., cut], "keys": np.arange(40)[cut]}
        more = np.empty_like(q)
        into = more, dk[:, :, cut], dv[:, :, cut]
        kernels.attention_backward(grad, q, k[:, :, cut], v[:, :, cut], y, whole, *into, **part)
        dq += more
    for mine, theirs in zip((dq, dk, dv), grads, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-13)


@PRECISIONS
def test_a_part_that_a_query_does_not_see_changes_no_bit_of_the_others(dtype, level):
    q, k, v, _ = make(dtype, 1, 2, 9, 4, t=6)
    setting = {"scale": 1.0, "causal": False, "rows": None, "drop": 0.0}
    out, blind = np.empty_like(q), np.full_like(q, np.nan)
    lse = kernels.attention(q, k, v, out, mask=None, **setting)
    nothing = kernels.attention(q, k, v, blind, mask=np.zeros((1, 1, 9, 6), bool), **setting)
    with np.errstate(all="raise", under="ignore"):
        for order in (((out, lse), (blind, nothing)), ((blind, nothing), (out, lse))):
            y, whole = put_together(order)
            assert same_bits([y + 0, whole], [out + 0, lse])
        y, whole = put_together([(blind, nothing)] * 3)
        assert not y.any()
        assert (whole == np.finfo(dtype).min).all()


@PRECISIONS
def test_a_query_that_sees_no_key_of_any_part_takes_and_gives_no_gradient(dtype, level):
    """Its logarithm over all parts is the lowest finite number again."""
    q, k, v, grad = make(dtype, 1, 2, 9, 4, t=6)
    mask = np.ones((1, 1, 9, 6), bool)
    mask[..., 3, :] = False
    out, lse, *grads = attend(q, k, v, grad, causal=False, mask=mask)
    grad[:, :, 3] = 1e30
    for again in (lse, np.logaddexp(lse, np.full_like(lse, np.finfo(dtype).min))):
        given = [np.empty_like(x) for x in (q, k, v)]
        kernels.attention_backward(
            grad, q, k, v, out, again, *given, scale=0.5, causal=False, mask=mask, rows=None, drop=0.0
        )
        assert same_bits(given, grads)
        assert not given[0][:, :, 3].any()


# ---------------------------------------------------------------------------------------------------- how arrays lie


@PRECISIONS
@pytest.mark.parametrize(("s", "t"), [(17, 5), (5, 70), (1, 33), (33, 1)])
def test_the_layout_of_other_keys_changes_no_bit(dtype, s, t, compiled_level):
    q, k, v, grad = make(dtype, 2, 3, s, 5, t=t)
    options = {"causal": False, "rows": hashes(2, 3, s), "drop": 0.2, "keys": np.arange(t) + 7}
    expected = attend(q, k, v, grad, **options)
    packed = np.stack([k, v]).transpose(1, 3, 2, 0, 4).reshape(2, t, -1)  # as they come in a message
    k_view, v_view = packed.reshape(2, t, 3, 2, 5).transpose(3, 0, 2, 1, 4)
    by_position = np.full((2, s, 3, 5), np.nan, dtype).swapaxes(1, 2)
    gradients = np.full((2, t, 3, 2, 5), np.nan, dtype).transpose(3, 0, 2, 1, 4)
    q_view = q.transpose(2, 0, 3, 1).copy().transpose(1, 3, 0, 2)  # with gaps in its last dim: copied, or the reference
    into = [by_position, np.full_like(q, np.nan), *gradients]
    assert same_bits(attend(q, k_view, v_view, grad, into, **options), expected)
    for a, b in zip(attend(q_view, k, v, grad, **options), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    flipped = [x[:, ::-1, ::-1].copy()[:, ::-1, ::-1] for x in (q, k, v, grad)]
    assert same_bits(attend(*flipped, **options), expected)


@PRECISIONS
@pytest.mark.parametrize("first", [0, 1, 3, 8])
@pytest.mark.parametrize(("s", "t", "d"), [(17, 5, 5), (5, 40, 16), (130, 1, 3), (1, 130, 3)])
def test_nothing_outside_the_results_is_written_or_read_with_other_keys(
    dtype, first, s, t, d, compiled_level, monkeypatch
):
    """All arrays, the scratch too, begin at an odd place and lie between canaries."""
    from mpitrain.kernels import compiled

    made = []

    class Guarded:
        def __getattr__(self, name):
            return getattr(np, name)

        def empty(self, shape, dtype=float):
            view, buffer = offset(math.prod(shape) if isinstance(shape, tuple) else shape, dtype, first)
            made.append((view, buffer))
            return view.reshape(shape)

    rows, mask = hashes(1, 2, s), np.random.default_rng(1).random((1, 1, s, t)) > 0.3
    for options in ({}, {"rows": rows, "drop": 0.3, "mask": mask, "keys": np.arange(t)[::-1]}):
        expected = attend(*make(dtype, 1, 2, s, d, t=t), causal=False, **options)
        guard, arrays = Guarded(), []
        for array in make(dtype, 1, 2, s, d, t=t):
            arrays.append(guard.empty(array.shape, dtype))
            arrays[-1][...] = array
        into = [guard.empty((1, 2, n, d), dtype) for n in (s, s, t, t)]
        monkeypatch.setattr(compiled, "np", guard)
        results = attend(*arrays, into, causal=False, **options)
        monkeypatch.setattr(compiled, "np", np)
        assert len(made) >= 11  # 8 here, lse, and two scratches
        assert all(untouched(*pair) for pair in made)
        assert same_bits(results, expected)
        made.clear()


@PRECISIONS
def test_what_lies_between_the_rows_of_other_keys_is_left_alone(dtype, compiled_level):
    arrays = make(dtype, 2, 3, 17, 5, t=37)
    rooms = [np.full((2, 3, n + 1, 7), 7, dtype) for n in (17, 17, 37, 37)]
    results = attend(*arrays, [room[:, :, :-1, 1:6] for room in rooms], causal=False)
    assert same_bits(results, attend(*arrays, causal=False))
    for room in rooms:
        room[:, :, :-1, 1:6] = 7
        assert (room == 7).all()


@PRECISIONS
def test_a_head_gives_the_same_bits_in_any_batch_with_other_keys(dtype, compiled_level):
    arrays, rows = make(dtype, 2, 3, 40, 17, t=70), hashes(2, 3, 40)
    options = {"causal": False, "drop": 0.2, "keys": np.arange(70) * 3}
    expected = attend(*arrays, rows=rows, **options)
    for b in range(2):
        for h in range(3):
            at = slice(b, b + 1), slice(h, h + 1)
            assert same_bits(attend(*(x[at] for x in arrays), rows=rows[at], **options), [x[at] for x in expected])


def test_small_blocks_of_the_reference_give_the_same(monkeypatch):
    kernels.select("numpy")
    options = {"causal": False, "drop": 0.2, "keys": np.arange(7) * 3, "rows": hashes(2, 3, 10)}
    arrays = make(np.float64, 2, 3, 10, 4, t=7)
    expected = attend(*arrays, **options)
    monkeypatch.setattr(blocks, "QUERIES", 3)
    monkeypatch.setattr(blocks, "SCORES", 30)
    for a, b in zip(attend(*arrays, **options), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-14)

"""What attention's CUDA kernels promise beside the numbers, which tests/kernel_cases_attention.py compares."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from kernel_cases_attention import hashes
from strict_kernel import RawKernel
from strict_runtime import machine

from mpitrain import kernels
from mpitrain.backend import array_module, dtype_of, to_host, wide
from mpitrain.kernels import reference
from mpitrain.kernels.blocks import kept_scores
from mpitrain.kernels.cuda.attention import TILES
from mpitrain.kernels.cuda.launch import text

IN_BOTH = [
    pytest.param("float64", marks=pytest.mark.slow),
    "float32",
    "float16",
    pytest.param("bfloat16", marks=pytest.mark.slow),
]
DTYPES = pytest.mark.parametrize("dtype", IN_BOTH)
HALVES = pytest.mark.parametrize("dtype", IN_BOTH[2:])
PLAIN = {"causal": False, "mask": None, "rows": None, "drop": 0.0}


@pytest.fixture
def launched(cuda_kernels, monkeypatch):
    """The names of kernels that ran, in their order."""
    names = []
    own = RawKernel.__call__
    monkeypatch.setattr(
        RawKernel, "__call__", lambda kernel, *args, **how: names.append(kernel.name) or own(kernel, *args, **how)
    )
    return names


def make(xp, dtype, b, h, s, d, t=None):
    """q, k, v, grad."""
    rng = np.random.default_rng([b, h, s, d])
    shapes = [(b, h, n, d) for n in (s, t or s, t or s, s)]
    return [xp.asarray(rng.standard_normal(shape).astype(dtype_of(dtype))) for shape in shapes]


def attend(k, arrays, into=None, **how):
    """[out, lse, dq, dk, dv] of the kernels of `k`."""
    q, keys, v, grad = arrays
    xp = array_module(q)
    out, dq, dk, dv = into or [xp.empty(x.shape, x.dtype) for x in (q, q, keys, v)]
    setting = PLAIN | {"scale": 1 / math.sqrt(q.shape[3])} | how
    lse = k.attention(q, keys, v, out, **setting)
    k.attention_backward(grad, q, keys, v, out, lse, dq, dk, dv, **setting)
    return [out, lse, dq, dk, dv]


def on_host(arrays, dtype=None):
    return [to_host(x) if dtype is None else to_host(x).astype(dtype) for x in arrays]


def same_bits(one, other):
    return all(x.tobytes() == y.tobytes() for x, y in zip(on_host(one), on_host(other), strict=True))


@DTYPES
def test_kept_scores_change_no_bit_and_are_all_written(cuda_kernels, dtype):
    """Whoever makes a score makes the same one: forward, and both kernels of backward."""
    xp, s = cuda_kernels, 150
    arrays = make(xp, dtype, 1, 1, s, 24)
    for since in (None, -69):
        how = {"causal": True, "since": since, "rows": xp.asarray(hashes(1, 1, s)), "drop": 0.2}
        scores = xp.full((1, 1, kept_scores(s, s, True, since)), np.nan, wide(dtype_of(dtype)))
        assert same_bits(attend(kernels, arrays, scores=scores, **how), attend(kernels, arrays, **how))
        assert not np.isnan(to_host(scores)).any()


@DTYPES
def test_keys_outside_of_what_is_seen_are_not_touched(cuda_kernels, dtype):
    """Values there are NaN: a weight of 0 would let them through."""
    xp, s = cuda_kernels, 300
    q, k, v, _ = make(xp, dtype, 1, 1, s, 8)
    v[:, :, :64] = np.nan
    v[:, :, 256:] = np.nan
    firsts = np.full((1, s), 128)
    for how in ({"since": -40}, {"firsts": xp.asarray(firsts)}):
        out = xp.empty(q.shape, q.dtype)
        kernels.attention(q, k, v, out, scale=1.0, **PLAIN | {"causal": True}, **how)
        assert np.isfinite(on_host([out], np.float64)[0][:, :, 128:256]).all()


@HALVES
def test_of_halves_the_logarithm_is_that_of_single_precision(cuda_kernels, dtype):
    arrays = make(cuda_kernels, dtype, 1, 2, 40, 64, t=90)
    out, lse, *_ = attend(kernels, arrays)
    y = np.empty(out.shape)
    expected = reference.attention(*on_host(arrays[:3], np.float64), y, scale=1 / 8, **PLAIN)
    np.testing.assert_allclose(to_host(lse), expected, rtol=3e-7, atol=3e-7)


def test_which_kernels_run(launched, cuda_kernels):
    """Halves stay halves where tensor cores take them; else all is widened, and what is mixed too."""
    xp = cuda_kernels
    in_parts = ["attention_forward", "delta_of", "attention_queries", "attention_keys"]
    for dtype in ("float32", "float16"):
        attend(kernels, make(xp, dtype, 1, 1, 20, 8))
        assert launched == in_parts
        launched.clear()


@HALVES
def test_without_tensor_cores_halves_are_computed_with_in_single_precision(cuda_kernels, monkeypatch, dtype):
    monkeypatch.setattr(machine, "capability", "75")
    arrays = make(cuda_kernels, dtype, 1, 1, 33, 8)
    results = attend(kernels, arrays, causal=True)
    single = attend(kernels, [x.astype(np.float32) for x in arrays], causal=True)
    assert same_bits([results[1]], [single[1]])
    assert same_bits([results[0]], [single[0].astype(results[0].dtype)])
    expected = attend(reference, on_host(arrays), causal=True)
    for y, z in zip(on_host(results, np.float64), on_host(expected, np.float64), strict=True):
        np.testing.assert_allclose(y, z, rtol=0, atol=np.abs(z).max() * (2**-9 if dtype == "float16" else 2**-7))


def test_any_of_the_arrays_may_be_float32_beside_halves(cuda_kernels):
    arrays = make(cuda_kernels, "float16", 1, 1, 20, 8)
    expected = attend(reference, on_host(arrays, np.float32))
    for which in range(4):
        mixed = [x.astype(np.float32) if i == which else x for i, x in enumerate(arrays)]
        for y, z in zip(on_host(attend(kernels, mixed), np.float64), expected, strict=True):
            np.testing.assert_allclose(y, z, rtol=0, atol=np.abs(z).max() * 2**-10)


@DTYPES
def test_any_strides_even_with_gaps_in_the_last_dim(cuda_kernels, dtype):
    """Inputs with gaps are copied; a result with gaps is the reference's work."""
    arrays = make(cuda_kernels, dtype, 2, 2, 33, 16)
    expected = attend(kernels, arrays, causal=True)
    spread = [x.transpose(3, 1, 0, 2).copy().transpose(2, 1, 3, 0) for x in arrays]
    assert same_bits(attend(kernels, spread, causal=True), expected)
    rooms = [cuda_kernels.full((2, 2, 34, 17), 7, x.dtype) for x in expected[:1] + expected[2:]]
    attend(kernels, arrays, [room[:, :, :0:-1, 1:] for room in rooms], causal=True)
    for room, result in zip(rooms, expected[:1] + expected[2:], strict=True):
        assert same_bits([room[:, :, :0:-1, 1:]], [result])
        assert (to_host(room[:, :, 0]) == 7).all()
        assert (to_host(room[..., 0]) == 7).all()
    gaps = [cuda_kernels.empty((*x.shape[:3], 32), x.dtype)[..., ::2] for x in expected[:1] + expected[2:]]
    allowed = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    attend(kernels, arrays, gaps, causal=True)
    for y, z in zip(on_host(gaps, np.float64), on_host(expected[:1] + expected[2:], np.float64), strict=True):
        np.testing.assert_allclose(y, z, rtol=0, atol=np.abs(z).max() * allowed)


@DTYPES
def test_a_query_that_sees_no_key_gives_zeros_and_the_lowest_number(cuda_kernels, dtype):
    mask = np.random.default_rng(0).random((1, 2, 40, 40)) > 0.5  # of each head another one
    mask[:, 0, ::3], mask[:, 1, ::4], mask[..., ::5] = False, False, False
    arrays = make(cuda_kernels, dtype, 1, 2, 40, 8)
    out, lse, dq, dk, dv = attend(kernels, arrays, mask=cuda_kernels.asarray(mask))
    blind, unseen = ~mask.any(3), ~mask.any(2)
    assert (to_host(lse)[blind] == np.finfo(lse.dtype).min).all()
    out, dq, dk, dv = on_host((out, dq, dk, dv), np.float64)
    assert not any(x.any() for x in (out[blind], dq[blind], dk[unseen], dv[unseen]))
    assert all(x[~where].all() for x, where in ((out, blind), (dv, unseen)))
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))


def test_what_cannot_be_is_refused(cuda_kernels):
    q, k, v, _ = make(cuda_kernels, "float32", 1, 1, 5, 4, t=6)
    out = cuda_kernels.empty(q.shape, q.dtype)
    for how in ({"causal": True}, {"since": 1, "causal": True}):
        with pytest.raises(AssertionError):
            kernels.attention(q, k[:, :, :5] if "since" in how else k, v, out, scale=1.0, **PLAIN | how)


def test_tiles_are_those_of_the_sources():
    """The launcher says how many threads a block has and which rows are its own; the sources say so, too."""
    for tiles in TILES:
        found = re.findall(r"#define ((?:FORWARD|BACKWARD)_\w+) (\d+)\n", text(f"attention_halves_{tiles.width}"))
        said = {name: int(number) for name, number in found}
        assert tiles.forward == 32 * said["FORWARD_WARPS"]
        assert tiles.queries == 16 * said["FORWARD_TILES"] * said["FORWARD_WARPS"]
        assert tiles.backward == 32 * said["BACKWARD_WARPS"]
        assert tiles.rows == 16 * said["BACKWARD_WARPS"]
        assert tiles.columns == said["BACKWARD_COLUMNS"]

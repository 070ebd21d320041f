"""Attention, block by block: `csrc/attention_floats.cuh`, and for halves on tensor cores `csrc/attention_halves.cuh`.

Halves that are all of one kind stay halves up to the sums, which are float32; weights, and backward the slopes of the
scores, are rounded to halves before they are multiplied again, as FlashAttention does: a slope beyond the range of
float16 becomes infinite there.  Arrays of mixed precision, halves on devices without tensor cores for them, and those
in heads of more than 256 numbers are widened first.  The reference serves where every weight is dropped, where heads
have no numbers, and where results have gaps in their last dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, array_module, is_half, wide
from mpitrain.kernels import reference
from mpitrain.kernels.cuda.arrays import solid
from mpitrain.kernels.cuda.launch import THREADS, blocks_for, launch
from mpitrain.kernels.reference.halves import narrow
from mpitrain.kernels.reference.residual import keep_scale

_PRECISIONS = (np.dtype(np.float32), np.dtype(np.float64))
TENSOR_CORES = 80
"""The compute capability, times ten, from which halves take the kernels of their own."""
OWN = 64
"""Rows that a block of floats or doubles owns."""
_BYTES = 16  # that are copied at once


class Tiles(NamedTuple):
    """How csrc/attention_halves_WIDTH.cu cuts its work: threads of a block, and the rows that it owns."""

    width: int  # of the widest heads
    forward: int  # threads
    queries: int
    backward: int  # threads
    rows: int
    columns: int  # of the gradients of keys and values that a block makes


TILES = (Tiles(64, 128, 128, 128, 64, 64), Tiles(128, 128, 64, 128, 64, 128), Tiles(256, 64, 32, 64, 32, 128))


def attention(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    *,
    scale: float,
    causal: bool,
    mask: Array | None,
    rows: Array | None,
    drop: float,
    keys: Array | None = None,
    scores: Array | None = None,
    since: int | None = None,
    firsts: Array | None = None,
) -> Array:
    how: dict[str, Any] = {"scale": scale, "causal": causal, "mask": mask, "rows": rows, "drop": drop, "keys": keys}
    how |= {"scores": scores, "since": since, "firsts": firsts}
    given, compute = (q, k, v), wide(q.dtype)
    if not _takes(given, (out,), how):
        return reference.attention(q, k, v, out, **how)
    tiles = _tiles(given)
    if tiles is None and not _are(compute, *given, out):
        q, k, v = _in(compute, given)
        y = array_module(q).empty(out.shape, compute)
        lse: Array = attention(q, k, v, y, **how)
        _deliver(y, out)
        return lse
    q, k, v = _readable(given)
    (b, h, s, d), lse = q.shape, array_module(q).empty(q.shape[:3], compute)
    setting = _setting(q, k, **how)
    if tiles is None:
        columns, arrays = _columns(q), (*_placed(q, k, v, out), lse, _by(_BYTES, q, k, v))
        blocks = _blocks(b * h, s, OWN), -(-d // columns)
        launch(f"attention_floats_{columns}", "attention_forward", q.dtype, blocks, THREADS, *arrays, *setting)
    else:
        arrays = *_placed(q, k, v), *_result(out), lse, _by(_BYTES, q, k, v) and _by(4, out)
        blocks = _blocks(b * h, s, tiles.queries), 1
        launch(
            f"attention_halves_{tiles.width}", "attention_forward", q.dtype, blocks, tiles.forward, *arrays, *setting
        )
    return lse


def attention_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    *,
    scale: float,
    causal: bool,
    mask: Array | None,
    rows: Array | None,
    drop: float,
    keys: Array | None = None,
    scores: Array | None = None,
    since: int | None = None,
    firsts: Array | None = None,
) -> None:
    how: dict[str, Any] = {"scale": scale, "causal": causal, "mask": mask, "rows": rows, "drop": drop, "keys": keys}
    how |= {"scores": scores, "since": since, "firsts": firsts}
    given, into, compute = (grad, q, k, v, y), (dq, dk, dv), wide(q.dtype)
    if not _takes(given, into, how) or not (q.size and k.size) or type(lse) is not type(q) or lse.dtype != compute:
        reference.attention_backward(*given, lse, *into, **how)
        return
    tiles = _tiles(given)
    if tiles is None and not _are(compute, *given, *into):
        d_q, d_k, d_v = made = [array_module(q).empty(x.shape, compute) for x in into]
        grad, q, k, v, y = _in(compute, given)
        attention_backward(grad, q, k, v, y, lse, d_q, d_k, d_v, **how)
        for gradient, out in zip(made, into, strict=True):
            _deliver(gradient, out)
        return
    grad, q, k, v, y = _readable(given)
    (b, h, s, d), t = q.shape, k.shape[2]
    delta, warps = array_module(q).empty(q.shape[:3], compute), THREADS // 32
    source = f"attention_floats_{_columns(q)}" if tiles is None else f"attention_halves_{tiles.width}"
    blocks = blocks_for(b * h * s, warps)
    launch(source, "delta_of", q.dtype, blocks, THREADS, *_placed(grad, y), delta, b, h, s, d)
    arrays, setting, by_bytes = (*_placed(grad, q, k, v), solid(lse), delta), _setting(q, k, **how), _by(_BYTES, *given)
    if tiles is None:
        parts = -(-d // _columns(q))
        for name, length, results in (("queries", s, _placed(dq)), ("keys", t, _placed(dk, dv))):
            grid = _blocks(b * h, length, OWN), parts
            launch(source, f"attention_{name}", q.dtype, grid, THREADS, *arrays, *results, by_bytes, *setting)
    else:
        by_bytes = by_bytes and _by(4, *into)
        parts, of_keys = tiles.width // tiles.columns, (*_result(dk), *_result(dv))
        for name, length, count, results in (("queries", s, 1, _result(dq)), ("keys", t, parts, of_keys)):
            grid = _blocks(b * h, length, tiles.rows), count
            launch(source, f"attention_{name}", q.dtype, grid, tiles.backward, *arrays, *results, by_bytes, *setting)


# -------------------------------------------------------------------------------------------- which kernel, and whether


def _takes(given: tuple[Array, ...], into: tuple[Array, ...], how: dict[str, Any]) -> bool:
    """Whether kernels compute this: arrays of one device, in one precision to compute in, and some weights are kept."""
    q = given[-3] if len(given) == 3 else given[1]
    kind, compute = type(q), wide(q.dtype)
    more = [how[name] for name in ("mask", "rows", "keys", "scores", "firsts") if how[name] is not None]
    scores = how["scores"]
    return (
        compute in _PRECISIONS
        and all(type(x) is kind for x in (*given, *into, *more))
        and all(wide(x.dtype) == compute for x in (*given, *into))
        and all(_is_readable(x) for x in into)
        and (scores is None or (scores.dtype == compute and scores.strides[2] == scores.itemsize))
        and _threshold(how["drop"]) < 2**32
        and q.shape[3] > 0
    )


def _tiles(given: tuple[Array, ...]) -> Tiles | None:
    """How halves are cut, if tensor cores take these: all of one kind, and not too wide."""
    dtype, xp = given[0].dtype, array_module(given[0])
    if not is_half(dtype) or not _are(dtype, *given) or int(xp.cuda.Device().compute_capability) < TENSOR_CORES:
        return None
    return next((tiles for tiles in TILES if given[0].shape[3] <= tiles.width), None)


def _columns(x: Array) -> int:
    """How many of d a block of floats or doubles makes."""
    return 128 if x.dtype == np.float32 and x.shape[3] > 64 else 64


def _blocks(pairs: int, length: int, rows: int) -> int:
    return -(-length // rows) * pairs


# --------------------------------------------------------------------------------------------------- what they are told


def _setting(
    q: Array,
    k: Array,
    *,
    scale: float,
    causal: bool,
    mask: Array | None,
    rows: Array | None,
    drop: float,
    keys: Array | None,
    scores: Array | None,
    since: int | None,
    firsts: Array | None,
) -> tuple[Any, ...]:
    """MT_SIGHT_PARAMETERS of csrc/attention.cuh."""
    (b, h, s, d), t = q.shape, k.shape[2]
    assert s == t or not causal, (s, t)
    assert not causal or since is None or since <= 0, since
    assert scores is None or causal or since is None
    begins = -s if since is None else max(-s, min(since, t))
    seen = (None, 0, 0, 0, 0)
    if mask is not None:
        seen = mask, *(0 if n == 1 else step for n, step in zip(mask.shape, mask.strides, strict=True))
    kept = (None, 0, 0) if scores is None else (scores, *(step // scores.itemsize for step in scores.strides[:2]))
    rows = None if rows is None else solid(rows)
    by = keep_scale(drop) if rows is not None else 1.0
    whole = b, h, s, t, d, float(scale), causal, begins, _integers(firsts)
    return (*whole, *seen, rows, _threshold(drop), float(by), _integers(keys), *kept)


def _threshold(drop: float) -> int:
    """The lowest word that is kept; 2^32, which kernels do not take, keeps none."""
    return round(drop * 2**32)


def _integers(x: Array | None) -> Array | None:
    return None if x is None else solid(x.astype(np.int64, copy=False))


def _placed(*arrays: Array) -> tuple[Any, ...]:
    """Each array, and how many elements it is to the next sample, head and row."""
    return tuple(y for x in arrays for y in (x, *(step // x.itemsize for step in x.strides[:3])))


def _result(x: Array) -> tuple[Any, ...]:
    """As `_placed`, and whether a result beside halves is float32."""
    return (*_placed(x), not is_half(x.dtype))


def _by(size: int, *arrays: Array) -> bool:
    """Whether rows of all arrays begin at multiples of so many bytes, and are as many long."""
    for x in arrays:
        steps = [step for step, n in zip(x.strides[:3], x.shape[:3], strict=True) if n > 1]
        if any(at % size for at in (x.data.ptr, x.shape[3] * x.itemsize, *steps)):
            return False
    return True


def _is_readable(x: Array) -> bool:
    """Whether the last dim has no gaps."""
    return bool(x.strides[3] == x.itemsize or x.shape[3] == 1)


def _readable(arrays: tuple[Array, ...]) -> list[Array]:
    """Arrays without gaps in the last dim: themselves, or copies."""
    return [x if _is_readable(x) else array_module(x).ascontiguousarray(x) for x in arrays]


def _are(dtype: Any, *arrays: Array) -> bool:
    return all(x.dtype == dtype for x in arrays)


def _in(dtype: Any, arrays: tuple[Array, ...]) -> list[Array]:
    return [x.astype(dtype, copy=False) for x in arrays]


def _deliver(made: Array, out: Array) -> None:
    """Write what was computed where it belongs, rounded once if that is in a half precision."""
    if is_half(out.dtype):
        narrow(made, out.dtype, out)
    else:
        out[...] = made

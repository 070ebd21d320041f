"""One call of every kernel, on arrays of any number of rows, width, precision, and as callers really have them.

    arrays = arguments("gelu_tanh", np.float32, rows=3, width=17)
    y, slope = call("gelu_tanh", arrays)

Attention, whose shapes are its own, is called through `attend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.backend import wide
from mpitrain.rng import absorb, stream_key

WIDTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 100, 257)
DROP = 0.3
AMOUNT = 0.25  # of jitter
CHOICES = 2  # experts of a token
IGNORE = -100
ELSEWHERE = -7  # a target that counts, whose logit another rank holds
ADAMW = {"update": 3, "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


# -------------------------------------------------------------------------------------- arrays as callers have them


def _stepped(x: np.ndarray) -> np.ndarray:
    """Every second element of every dim of a buffer whose others are NaN."""
    room = np.full([2 * n for n in x.shape], _canary(x.dtype))
    view = room[(slice(None, None, 2),) * x.ndim]
    view[...] = x
    return view


def _backwards(x: np.ndarray) -> np.ndarray:
    flip = (slice(None, None, -1),) * x.ndim
    return x[flip].copy()[flip]


def _odd_place(x: np.ndarray) -> np.ndarray:
    """One element past where a vector register would like to begin, with NaN on both sides."""
    view = offset(x.size, x.dtype, 1)[0]
    view[...] = x.reshape(-1)
    return view.reshape(x.shape)


def _between_elements(x: np.ndarray) -> np.ndarray:
    """At an address that is no multiple of the element's size, as in a file's bytes."""
    view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype)
    view[...] = x.reshape(-1)
    return view.reshape(x.shape)


def _read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda x: np.asfortranarray(x.copy()),
    "stepped": _stepped,
    "backwards": _backwards,
    "at an odd place": _odd_place,
    "between elements": _between_elements,
    "read-only": _read_only,
}


def offset(count: int, dtype: Any, first: int) -> tuple[np.ndarray, np.ndarray]:
    """(view, buffer): `count` elements that begin `first` after a multiple of 64 bytes, in a buffer full of canaries.

    The canaries are NaN, where the dtype has it, so that reading one shows as well.
    """
    dtype = np.dtype(dtype)
    buffer = np.full(count + 256 // dtype.itemsize, _canary(dtype))
    start = (-buffer.ctypes.data % 64) // dtype.itemsize + 64 // dtype.itemsize + first
    return buffer[start : start + count], buffer


def _canary(dtype: np.dtype) -> np.generic:
    return dtype.type(np.nan if dtype.kind == "f" else 0x5A)


def untouched(view: np.ndarray, buffer: np.ndarray) -> bool:
    """Whether all canaries around a view that `offset` made still sing."""
    start = (view.ctypes.data - buffer.ctypes.data) // buffer.itemsize
    around = np.concatenate([buffer[:start], buffer[start + view.size :]])
    return bool(np.isnan(around).all() if buffer.dtype.kind == "f" else (around == 0x5A).all())


# ----------------------------------------------------------------------------------------- one call of each kernel


def hashes(*shape: int, stream: str = "rows") -> np.ndarray:
    return absorb(stream_key(5, stream), np.arange(math.prod(shape)).reshape(shape))


def _normal(rng: np.random.Generator, dtype: Any, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def arguments(kernel: str, dtype: Any, rows: int, width: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Fresh arrays for `call`; what is written stands first.  Of a half precision, statistics and sums are float32."""
    rng = np.random.default_rng([seed, rows, width])

    def normal(*shape: int) -> np.ndarray:
        return _normal(rng, dtype, *shape)

    matrix, vector = (rows, width), (width,)
    if kernel in ("gelu_tanh", "gelu_erf"):
        return 3 * normal(*matrix), normal(*vector)
    if kernel == "gelu_backward":
        return normal(*matrix), normal(*matrix)
    if kernel == "dropout":
        return normal(*matrix), hashes(rows)
    if kernel == "residual":
        return normal(*matrix), normal(*matrix), normal(*vector), hashes(rows)
    if kernel == "residual_norm":
        return normal(*matrix), normal(*matrix) + 3, normal(*vector), hashes(rows), normal(*vector), normal(*vector)
    if kernel == "layer_norm":
        return 2 * normal(*matrix) + 3, normal(*vector), normal(*vector)
    if kernel == "layer_norm_backward":
        x, weight = 2 * normal(*matrix) + 3, normal(*vector)
        exact = x.astype(np.float64)
        center = exact.mean(1, keepdims=True) - exact[:, :1]
        rstd = 1 / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
        return normal(*matrix), x, center.astype(wide(dtype)), rstd.astype(wide(dtype)), weight, normal(*matrix)
    if kernel == "rms_norm":
        return 2 * normal(*matrix) + 1, normal(*vector)
    if kernel == "residual_rms_norm":
        return normal(*matrix), normal(*matrix) + 3, normal(*vector), hashes(rows), normal(*vector)
    if kernel == "rms_norm_backward":
        x = 2 * normal(*matrix) + 1
        rstd = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
        return normal(*matrix), x, rstd.astype(wide(dtype)), normal(*vector), normal(*matrix)
    if kernel == "swiglu":
        return 3 * normal(*matrix), normal(*matrix)
    if kernel == "swiglu_backward":
        return normal(*matrix), 3 * normal(*matrix), normal(*matrix)
    if kernel == "rotary":  # one group of two heads of queries, one of keys and one of values, of width // 4 pairs
        pairs = (width + 3) // 4
        angles = 9 * rng.standard_normal((rows, pairs))
        return normal(rows, 8 * pairs), np.cos(angles).astype(wide(dtype)), np.sin(angles).astype(wide(dtype))
    if kernel in ("rotary_pack", "rotary_unpack"):
        qkv, cos, sin = arguments("rotary", dtype, rows, width, seed)
        middle = qkv.shape[1] // 2
        parts = (qkv[:, :middle], qkv[:, middle:]) if kernel == "rotary_pack" else (qkv,)
        return *(part.copy() for part in parts), cos, sin
    if kernel == "softmax":
        return (4 * normal(*matrix),)
    if kernel == "softmax_backward":
        y = np.exp(normal(*matrix))
        return normal(*matrix), y / y.sum(1, keepdims=True)
    if kernel in ("cross_entropy", "cross_entropy_backward"):
        logits, targets = 4 * normal(*matrix), rng.integers(0, width, rows)
        targets[: rows // 8] = IGNORE
        targets[rows // 8 : rows // 3] = ELSEWHERE
        targets[-1:], targets[rows // 2 : rows // 2 + 1] = width - 1, 0
        if kernel == "cross_entropy":
            return logits, targets
        exact = logits.astype(np.float64)
        peak = exact.max(1, keepdims=True)
        lse = np.log(np.exp(exact - peak).sum(1)) + peak[:, 0]
        return logits, targets, lse.astype(wide(dtype))
    if kernel == "row_sum":
        return normal(7, width).astype(wide(dtype)), rng.integers(0, 7, rows), normal(*matrix)
    if kernel == "jitter":
        return normal(*matrix), hashes(rows)
    if kernel in ("combine", "combine_backward"):
        places = np.full(CHOICES * rows, -1)  # a third of the choices come to nothing, two rows are nobody's
        there = rng.permutation(places.size)[: (2 * places.size + 2) // 3]
        places[there] = rng.permutation(there.size + 2)[: there.size]
        out, gates = normal(there.size + 2, width), normal(rows, CHOICES).astype(wide(dtype))
        grad = (normal(*matrix),) if kernel == "combine_backward" else ()
        return *grad, out, gates, places.reshape(rows, CHOICES)
    if kernel == "adamw":
        p, m, g = (normal(rows * width) for _ in range(3))
        return p, m, normal(rows * width) ** 2, g
    assert kernel == "sum_of_squares", kernel
    return (normal(*matrix),)


CALLS: dict[str, Callable[..., Sequence[Any]]] = {
    "gelu_tanh": lambda x, bias: kernels.gelu_tanh(x, bias),
    "gelu_erf": lambda x, bias: kernels.gelu_erf(x, bias),
    "gelu_backward": lambda grad, slope: kernels.gelu_backward(grad, slope, True),
    "dropout": lambda x, rows: [kernels.dropout(x, rows, DROP)],
    "residual": lambda x, y, bias, rows: [kernels.residual(x, y, bias, rows, DROP)],
    "residual_norm": lambda x, y, branch_bias, rows, weight, bias: kernels.residual_norm(
        x, y, branch_bias, rows, DROP, weight, bias, 1e-5
    ),
    "layer_norm": lambda x, weight, bias: kernels.layer_norm(x, weight, bias, 1e-5),
    "layer_norm_backward": lambda *arrays: kernels.layer_norm_backward(*arrays),
    "rms_norm": lambda x, weight: kernels.rms_norm(x, weight, 1e-5),
    "residual_rms_norm": lambda x, y, branch_bias, rows, weight: kernels.residual_rms_norm(
        x, y, branch_bias, rows, DROP, weight, 1e-5
    ),
    "rms_norm_backward": lambda *arrays: kernels.rms_norm_backward(*arrays),
    "swiglu": lambda gate, up: [kernels.swiglu(gate, up)],
    "swiglu_backward": lambda *arrays: kernels.swiglu_backward(*arrays),
    "rotary": lambda x, cos, sin: [kernels.rotary(x[None], 2, 1, cos, sin)[0]],
    "rotary_pack": lambda q, kv, cos, sin: [kernels.rotary_pack(q[None], kv[None], 2, 1, cos, sin)[0]],
    "rotary_unpack": lambda x, cos, sin: [part[0] for part in kernels.rotary_unpack(x[None], 2, 1, cos, sin)],
    "softmax": lambda x: [kernels.softmax(x, -1, None)],
    "softmax_backward": lambda grad, y: [kernels.softmax_backward(grad, y, -1)],
    "cross_entropy": lambda logits, targets: kernels.cross_entropy(logits, targets, IGNORE),
    "cross_entropy_backward": lambda logits, targets, lse: [
        kernels.cross_entropy_backward(np.asarray(0.7, lse.dtype), logits, targets, lse, IGNORE)
    ],
    "row_sum": lambda out, ids, rows: [kernels.row_sum(ids, rows, out), out][1:],
    "jitter": lambda x, rows: [kernels.jitter(x, rows, AMOUNT)],
    "combine": lambda out, gates, places: [kernels.combine(out, gates, places)],
    "combine_backward": lambda *arrays: kernels.combine_backward(*arrays),
    "adamw": lambda p, m, v, g: [kernels.adamw(p, g, m, v, **ADAMW), p, m, v][1:],
    "sum_of_squares": lambda x: [kernels.sum_of_squares(x)],
}
WRITTEN = {"row_sum": 1, "adamw": 3}  # how many of the first arguments are written


def call(kernel: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a kernel, those that it wrote into its arguments among them."""
    return [np.asarray(result) for result in CALLS[kernel](*arrays)]


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    grad: np.ndarray,
    into: Sequence[np.ndarray] = (),
    *,
    causal: bool = True,
    mask: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    drop: float = 0.0,
    keys: np.ndarray | None = None,
    since: int | None = None,
    firsts: np.ndarray | None = None,
) -> list[np.ndarray]:
    """[out, lse, dq, dk, dv] of attention and its backward, written `into` the first, third, fourth and fifth."""
    out, dq, dk, dv = into or [np.empty(x.shape, q.dtype) for x in (q, q, k, v)]
    setting = {"scale": 1 / math.sqrt(max(1, q.shape[3])), "causal": causal, "mask": mask, "rows": rows, "drop": drop}
    setting |= {"keys": keys, "since": since, "firsts": firsts}
    lse = kernels.attention(q, k, v, out, **setting)
    kernels.attention_backward(grad, q, k, v, out, lse, dq, dk, dv, **setting)
    return [out, lse, dq, dk, dv]


def same_bits(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists of results are equal to the last bit, NaN and the sign of zero included."""
    pairs = [(np.ascontiguousarray(a), np.ascontiguousarray(b)) for a, b in zip(one, other, strict=True)]
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)

"""Every operation with inputs of all kinds: what each test that is about all of them goes through.

`CASES` has an entry for each name of `autograd.ops.__all__`; tests count, so an op that comes later comes here, too.
An entry is a list of (function, arrays): the function takes the module of the arrays, numpy or cupy, and a Tensor for
each.  Arrays that are no tensors (ids, masks, rows) lie where the tensors lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor, ops
from mpitrain.nn.rotary import frequencies, tables
from mpitrain.rng import Draw

RNG = np.random.default_rng(23)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def positive(*shape: int) -> np.ndarray:
    return RNG.uniform(0.5, 2.0, shape)


def strided(*shape: int) -> np.ndarray:
    """Every second element, in Fortran's order."""
    return normal(*[2 * n for n in shape]).T[tuple(slice(None, None, 2) for _ in shape)].T


IDS = np.array([[3, 0, 3], [-2, 3, 1]])
CHOSEN = np.array([[[1, 3], [0, 2]], [[3, 0], [2, 1]]])
PLACES = np.array([[[3, -1], [0, 1]], [[-1, -1], [4, -1]]])
MASK, BY_HEAD = RNG.random((2, 5)) > 0.3, RNG.random((1, 2, 5, 5)) > 0.3
FIRST_KEYS = np.array([[0, 0, 2, 2, 5], [0, 1, 2, 2, 2]])
LATE_QUERIES = BY_HEAD[:, :, 2:]
TARGETS = np.array([[1, ops.IGNORE, 0], [6, 6, ops.IGNORE]])
SINGLES = {"matrix": (3, 4), "0-d": (), "empty": (2, 0)}
PAIRS = {"same": ((3, 4), (3, 4)), "broadcast": ((3, 1), (2, 1, 4)), "0-d": ((), ()), "empty": ((0, 3), (3,))}


def rows(xp: Any, *lengths: int) -> Any:
    draw = Draw(7, 3, xp.arange(lengths[0]), xp.arange(lengths[-1]))
    return draw.rows("drop") if len(lengths) == 2 else draw.attention_rows("weights", lengths[1])


def total(outputs: tuple[Tensor, ...]) -> Tensor:
    """One tensor of several outputs."""
    return functools.reduce(lambda whole, y: whole * 0.5 + y, outputs)


def unary(op: Any, make: Any = normal) -> list[Any]:
    return [(lambda xp, x: op(x), (make(*shape),)) for shape in SINGLES.values()] + [
        (lambda xp, x: op(x), (np.abs(strided(3, 2)) + 0.25,))
    ]


def binary(op: Any, first: Any = normal, second: Any = positive) -> list[Any]:
    return [(lambda xp, a, b: op(a, b), (first(*a), second(*b))) for a, b in PAIRS.values()] + [
        (lambda xp, a: op(a, 2.5), (positive(3),)),
        (lambda xp, a: op(2, a), (positive(3),)),
    ]


def along(op: Any) -> list[Any]:
    return [
        (lambda xp, x, d=dim, k=keep: op(x, d, k), (normal(2, 3, 4),))
        for dim, keep in ((None, False), (0, False), (-1, True), ((0, 2), False), ((1, 0), True))
    ] + [(lambda xp, x: op(x, 1), (strided(3, 4),))]


Case = tuple[Callable[..., Any], tuple[np.ndarray, ...]]
CASES: dict[str, list[Case]] = {
    "add": [*binary(ops.add), (lambda xp, x: x + x * 2.0 + ops.sin(x) - x / 3.0, (normal(3, 4),))],
    "sub": binary(ops.sub),
    "mul": binary(ops.mul),
    "div": binary(ops.div),
    "pow": [
        *binary(ops.pow, positive),
        *((lambda xp, x, e=e: x**e, (positive(3),)) for e in (0, 2, 3, -0.5)),
    ],
    "maximum": binary(ops.maximum),
    "minimum": binary(ops.minimum),
    "where": [
        (lambda xp, a, b: ops.where(a.data > b.data, a, b), (normal(3, 4), normal(4))),
        (lambda xp, a: ops.where(a.data > 0, a * 2, 1.0), (normal(3, 4),)),
    ],
    "neg": unary(ops.neg),
    "abs": unary(ops.abs),
    "exp": unary(ops.exp),
    "log": unary(ops.log, positive),
    "sqrt": unary(ops.sqrt, positive),
    "tanh": unary(ops.tanh),
    "sigmoid": unary(ops.sigmoid),
    "silu": unary(ops.silu),
    "softplus": unary(ops.softplus),
    "relu": unary(ops.relu),
    "sin": unary(ops.sin),
    "cos": unary(ops.cos),
    "erf": unary(ops.erf),
    "clip": [*unary(lambda x: ops.clip(x, -0.25, 0.55)), *unary(lambda x: ops.clip(x, low=0.05))],
    "matmul": [
        (lambda xp, a, b: a @ b, (normal(*a), normal(*b)))
        for a, b in (
            ((3, 4), (4, 2)),
            ((5, 1, 3, 4), (2, 4, 2)),
            ((4,), (4,)),
            ((4,), (2, 4, 3)),
            ((2, 3, 4), (4,)),
            ((0, 4), (4, 2)),
            ((3, 0), (0, 2)),
        )
    ]
    + [(lambda xp, a, b: a @ b.T, (strided(3, 4), strided(2, 4)))],
    "einsum": [
        (lambda xp, *x, letters=letters: ops.einsum(letters, *x), tuple(normal(*shape) for shape in shapes))
        for letters, *shapes in (
            ("bshd,bthd->bhst", (2, 3, 2, 4), (2, 5, 2, 4)),
            ("ij,jk->ki", (3, 4), (4, 2)),
            ("bij,bj,jk->ik", (2, 3, 4), (2, 4), (4, 2)),
            ("...i,...i->...", (2, 1, 4), (3, 4)),
            ("i,j->ji", (3,), (4,)),
            ("iij->j", (3, 3, 2)),
            ("ij->", (2, 0)),
            ("ij,jk->ik", (3, 0), (0, 2)),
        )
    ],
    "prod": [*along(ops.prod), (lambda xp, x: ops.prod(x - x[1:2], 0), (normal(3, 2),))],
    "cumsum": [(lambda xp, x, d=d: ops.cumsum(x, d), (strided(3, 4),)) for d in (0, -1)],
    "sum": along(ops.sum),
    "mean": along(ops.mean),
    "max": along(ops.max),
    "min": along(ops.min),
    "logsumexp": along(ops.logsumexp),
    "var": along(ops.var),
    "std": along(ops.std),
    **{
        name: [
            (lambda xp, a, b, ask=ask: ops.where(ask(a, b), a, b * 2), (normal(3, 4), normal(4))),
            (lambda xp, a, ask=ask: ops.where(ask(0.5, a), a, a * 2), (normal(3, 4),)),
        ]
        for name, ask in {
            n: getattr(ops, n) for n in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
        }.items()
    },
    **{
        name: [
            (lambda xp, x, ask=ask: ops.gather_along(x, ask(x, 1, True), 1), (normal(3, 4),)),
            (lambda xp, x, ask=ask: ops.take(x.reshape(-1), ask(x)[None]), (normal(3, 4),)),
        ]
        for name, ask in {"argmax": ops.argmax, "argmin": ops.argmin}.items()
    },
    "flip": [(lambda xp, x, d=d: ops.flip(x, d), (normal(3, 4),)) for d in (None, 0, (0, 1))],
    "roll": [(lambda xp, x: ops.roll(x, -2, 0), (normal(3, 4),))],
    "tile": [(lambda xp, x: ops.tile(x, (2, 1, 3)), (normal(3, 4),))],
    "repeat": [(lambda xp, x: ops.repeat(x, 3, 0), (normal(3, 4),))],
    "softmax": [
        *((lambda xp, x, d=d: ops.softmax(x, d), (normal(3, 4),)) for d in (0, -1)),
        (lambda xp, x: ops.softmax(x, mask=xp.asarray(MASK)), (normal(2, 5),)),
    ],
    "log_softmax": [(lambda xp, x, d=d: ops.log_softmax(x, d), (normal(3, 4),)) for d in (0, -1)],
    "reshape": [(lambda xp, x: x.reshape(2, -1), (normal(4, 3),)), (lambda xp, x: x.T.reshape(12), (normal(4, 3),))],
    "transpose": [(lambda xp, x: x.transpose(2, 0, 1) * 1.0, (normal(2, 3, 4),))],
    "swap": [(lambda xp, x: x.swap(0, -1) * 1.0, (normal(2, 3, 4),))],
    "broadcast_to": [(lambda xp, x: ops.broadcast_to(x, (5, 3, 4)), (normal(3, 1),))],
    "concat": [(lambda xp, *parts: ops.concat(parts, 1), (normal(3, 2), normal(3, 1), normal(3, 4)))],
    "split": [
        (lambda xp, x: ops.split(x, (1, 2, 1), 1)[1] * 2.0, (normal(3, 4),)),
        (lambda xp, x: functools.reduce(ops.mul, ops.split(x, 2, 1)), (normal(3, 4),)),
    ],
    "stack": [(lambda xp, a, b: ops.stack([a, b], 1), (normal(3, 4), normal(3, 4)))],
    "pad": [(lambda xp, x: ops.pad(x, [(1, 0), (2, 3)], 0.5), (normal(3, 4),))],
    "squeeze": [(lambda xp, x: x.squeeze(1), (normal(3, 1, 4),))],
    "expand": [(lambda xp, x: ops.expand(x, -1), (normal(3, 4),))],
    "cast": [(lambda xp, x: x.astype(np.float32 if x.dtype == np.float64 else np.float64), (normal(3, 4),))],
    "getitem": [
        (lambda xp, x: x[1:, ::2, None], (normal(3, 4),)),
        (lambda xp, x: x[..., -1], (normal(3, 4),)),
        (lambda xp, x: x[xp.asarray(IDS)], (normal(4, 2),)),
        (lambda xp, x: x[:, [1, 1, 0]], (normal(4, 2),)),
        (lambda xp, x: x[xp.asarray(IDS), xp.asarray(IDS[0] % 2)], (normal(4, 2),)),
        (lambda xp, x: x[xp.asarray(IDS), None, :, 1], (normal(4, 3, 2),)),
        (lambda xp, x: x[xp.asarray([[True, False], [True, True]]), ::-1], (normal(2, 2, 3),)),
        (lambda xp, x: x[..., x.data.sum((0, 1)) > 0], (positive(2, 3, 4),)),
    ],
    "take": [
        (lambda xp, x: ops.take(x, xp.asarray(IDS)), (normal(4, 2),)),
        (lambda xp, x: ops.take(x, xp.asarray(IDS), 1), (normal(2, 4, 3),)),
        (lambda xp, x: ops.take(x, xp.asarray(IDS[:0])), (normal(4, 2),)),
    ],
    "gather_along": [
        (lambda xp, x: ops.gather_along(x, xp.asarray(IDS), 1), (normal(2, 4),)),
        (lambda xp, x: ops.gather_along(x, xp.asarray(IDS.T), 0), (normal(4, 2),)),
    ],
    "linear": [
        (lambda xp, x, w, b: ops.linear(x, w, b), (normal(2, 3, 4), normal(4, 5), normal(5))),
        (lambda xp, x, w: ops.linear(x, w.T, None), (strided(3, 4), normal(5, 4))),
    ],
    "gelu_tanh": [*unary(ops.gelu_tanh), (lambda xp, x, b: ops.gelu_tanh(x, b), (normal(3, 4), normal(4)))],
    "gelu_erf": [*unary(ops.gelu_erf), (lambda xp, x, b: ops.gelu_erf(x, b), (normal(3, 4), normal(4)))],
    "layer_norm": [(lambda xp, x, w, b: ops.layer_norm(x, w, b), (normal(2, 3, 4), normal(4), normal(4)))],
    "attention": [
        (lambda xp, x: ops.attention(x, 2), (normal(2, 5, 18),)),
        (lambda xp, x: ops.attention(x, 2, causal=False, mask=xp.asarray(MASK)), (normal(2, 5, 18),)),
        (lambda xp, x: ops.attention(x, 2, rows=rows(xp, 2, 2, 5), drop=0.3), (normal(2, 5, 18),)),
        (lambda xp, x: ops.attention(x, 1), (normal(2, 100, 6),)),
        (lambda xp, x: ops.attention(x, 4, 2), (normal(2, 5, 24),)),
        (lambda xp, x: ops.attention(x, 4, 2, keep_scores=True), (normal(2, 70, 24),)),
        (lambda xp, x: ops.attention(x, 2, causal=False, keep_scores=True), (normal(2, 70, 18),)),
        (lambda xp, x: ops.attention(x, 2, window=3, rows=rows(xp, 2, 2, 5), drop=0.3), (normal(2, 5, 18),)),
        (lambda xp, x: ops.attention(x, 2, window=66, keep_scores=True), (normal(2, 140, 6),)),
        (lambda xp, x: ops.attention(x, 2, mask=xp.asarray(FIRST_KEYS), keep_scores=True), (normal(2, 5, 18),)),
        (
            lambda xp, x: ops.attention(x, 2, 1, mask=xp.asarray(BY_HEAD), rows=rows(xp, 2, 2, 5), drop=0.3),
            (normal(2, 5, 12),),
        ),
    ],
    "slice_attention": [
        (lambda xp, x, *past: ops.slice_attention(x, past, 2), (normal(2, 3, 18), normal(2, 4, 18), normal(2, 1, 18))),
        (lambda xp, x, past: ops.slice_attention(x, [past], 4, 2), (normal(2, 90, 24), normal(2, 100, 24))),
        (
            lambda xp, x, *past: ops.slice_attention(x, past, 2, window=5),
            (normal(2, 3, 18), normal(2, 4, 18), normal(2, 3, 18)),
        ),
        (
            lambda xp, x, past: ops.slice_attention(
                x, [past], 2, 1, mask=xp.asarray(LATE_QUERIES), rows=rows(xp, 2, 2, 3), drop=0.3
            ),
            (normal(2, 3, 12), normal(2, 2, 12)),
        ),
    ],
    "conv2d": [
        (lambda xp, x, w, b: ops.conv2d(x, w, b, padding=1), (normal(2, 5, 4, 3), normal(4, 3, 3, 3), normal(4))),
        (lambda xp, x, w: ops.conv2d(x, w, None, (2, 1), (0, 2)), (strided(2, 5, 4, 3), normal(4, 2, 3, 3))),
        (lambda xp, x, w: ops.conv2d(x, w), (normal(0, 3, 3, 1), normal(2, 3, 3, 1))),
        (
            lambda xp, x, w, b: ops.conv2d(x, w, b, 1, 2, (2, 1), groups=2),
            (normal(2, 5, 4, 4), normal(6, 3, 2, 2), normal(6)),
        ),
    ],
    "max_pool2d": [
        (lambda xp, x: ops.max_pool2d(x), (normal(2, 4, 5, 3),)),
        (lambda xp, x: ops.max_pool2d(x, 3, 1), (strided(2, 5, 4, 2),)),
        (lambda xp, x: ops.max_pool2d(x), (normal(0, 2, 2, 1),)),
    ],
    "avg_pool2d": [
        (lambda xp, x: ops.avg_pool2d(x), (normal(2, 4, 5, 3),)),
        (lambda xp, x: ops.avg_pool2d(x, 3, 1, 1, False), (strided(2, 5, 4, 2),)),
        (lambda xp, x: ops.avg_pool2d(x, (3, 2), 2, 1), (normal(1, 5, 4, 2),)),
        (lambda xp, x: ops.avg_pool2d(x), (normal(0, 2, 2, 1),)),
    ],
    "normalize": [
        (
            lambda xp, x, mean, v, w, b: ops.normalize(x, ops.stack([mean, v]), w, b),
            (normal(2, 3, 2, 4), normal(4), positive(4), normal(4), normal(4)),
        ),
        (
            lambda xp, x, w, b: ops.normalize(x, xp.ones((2, 4), x.dtype), w, b),
            (strided(3, 4), normal(4), normal(4)),
        ),
    ],
    "softmax_cross_entropy": [
        (lambda xp, x: ops.softmax_cross_entropy(x, xp.asarray(TARGETS)), (normal(2, 3, 7),)),
        (lambda xp, x: ops.softmax_cross_entropy(x, xp.asarray(TARGETS[:, :0])), (normal(2, 0, 7),)),
    ],
    "dropout": [(lambda xp, x: ops.dropout(x, rows(xp, 2, 3), 0.4), (normal(2, 3, 8),))],
    "residual": [
        (
            lambda xp, x, y, b: ops.residual(x, y, b, rows=rows(xp, 2, 3), p=0.4),
            (normal(2, 3, 8), normal(2, 3, 8), normal(8)),
        ),
        (lambda xp, x, y, b: ops.residual(x, y, b), (normal(2, 3, 8), normal(2, 3, 8), normal(8))),
        (lambda xp, x, y: ops.residual(x, y), (normal(2, 8), normal(2, 8))),
    ],
    "residual_norm": [
        (
            lambda xp, x, y, *rest: total(ops.residual_norm(x, y, *rest, rows=rows(xp, 2, 3), p=0.4)),
            (normal(2, 3, 8), normal(2, 3, 8), normal(8), normal(8), normal(8)),
        ),
        (
            lambda xp, x, y, *rest: total(ops.residual_norm(x, y, None, *rest)),
            (normal(2, 8), normal(2, 8), normal(8), normal(8)),
        ),
    ],
    "rms_norm": [(lambda xp, x, w: ops.rms_norm(x, w), (normal(2, 3, 4), normal(4)))],
    "residual_rms_norm": [
        (
            lambda xp, x, y, *rest: total(ops.residual_rms_norm(x, y, *rest, rows=rows(xp, 2, 3), p=0.4)),
            (normal(2, 3, 8), normal(2, 3, 8), normal(8), normal(8)),
        ),
    ],
    "swiglu": [(lambda xp, x, y: ops.swiglu(x, y), (strided(3, 4), normal(3, 4)))],
    "pack_rotary": [
        (
            lambda xp, q, kv: ops.pack_rotary(q, kv, 4, 2, *tables(xp.arange(5), frequencies(6), np.float64)),
            (normal(2, 5, 24), strided(2, 5, 24)),
        ),
    ],
    "rotary": [
        (
            lambda xp, x: ops.rotary(x, 4, 2, *tables(xp.arange(5), frequencies(6), np.float64)),
            (normal(2, 5, 48),),
        ),
        (
            lambda xp, x: ops.rotary(x, 1, 1, *tables(xp.asarray([[4, 0], [1, 7]]), frequencies(2), np.float32)),
            (normal(2, 2, 6),),
        ),
    ],
    "gates": [
        (lambda xp, p: ops.gates(p, xp.asarray(CHOSEN)), (positive(2, 2, 4),)),
        (lambda xp, p: ops.gates(p, xp.asarray(CHOSEN), True), (positive(2, 2, 4),)),
    ],
    "take_rows": [
        (lambda xp, x: ops.take_rows(x, xp.asarray([5, 0, 5, 3])), (normal(2, 3, 4),)),
        (lambda xp, x: ops.take_rows(x, xp.asarray(IDS[0, :0])), (normal(6, 4),)),
    ],
    "permute_rows": [(lambda xp, x: ops.permute_rows(x, xp.asarray([2, 0, 3, 1])), (normal(4, 3),))],
    "grouped_matmul": [
        (lambda xp, x, w: ops.grouped_matmul(x, w, (2, 0, 3)), (normal(5, 4), normal(3, 4, 2))),
        (lambda xp, x, w: ops.grouped_matmul(x, w, (0, 0)), (normal(0, 4), normal(2, 4, 2))),
    ],
    "combine": [
        (lambda xp, out, g: ops.combine(out, g, xp.asarray(PLACES)), (normal(5, 4), positive(2, 2, 2))),
        (lambda xp, out, g: ops.combine(out, g, xp.asarray(PLACES[:0])), (normal(5, 4), positive(0, 2, 2))),
    ],
    "jitter": [(lambda xp, x: ops.jitter(x, rows(xp, 2, 3), 0.4), (normal(2, 3, 8),))],
}

"""Every operation on device arrays: value, gradients, shapes and dtypes of NumPy's, and no copy to the host inside.

`CASES` has an entry for each name of `autograd.ops.__all__`; a test counts, so an op that comes later comes here, too.
Arrays that are no tensors (ids, masks, rows) lie where the tensors lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from strict_array import crossings, ndarray

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.autograd.ops.attention import attend, attend_backward
from mpitrain.backend import to_host
from mpitrain.rng import Draw, keep_mask, uniform, words32

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
    "sum": along(ops.sum),
    "mean": along(ops.mean),
    "max": along(ops.max),
    "min": along(ops.min),
    "logsumexp": along(ops.logsumexp),
    "var": along(ops.var),
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
        (
            lambda xp, x: ops.attention(x, 2, 1, mask=xp.asarray(BY_HEAD), rows=rows(xp, 2, 2, 5), drop=0.3),
            (normal(2, 5, 12),),
        ),
    ],
    "slice_attention": [
        (lambda xp, x, *past: ops.slice_attention(x, past, 2), (normal(2, 3, 18), normal(2, 4, 18), normal(2, 1, 18))),
        (lambda xp, x, past: ops.slice_attention(x, [past], 4, 2), (normal(2, 90, 24), normal(2, 100, 24))),
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
    ],
    "max_pool2d": [
        (lambda xp, x: ops.max_pool2d(x), (normal(2, 4, 5, 3),)),
        (lambda xp, x: ops.max_pool2d(x, 3, 1), (strided(2, 5, 4, 2),)),
        (lambda xp, x: ops.max_pool2d(x), (normal(0, 2, 2, 1),)),
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


def run(xp: Any, function: Callable[..., Any], arrays: tuple[np.ndarray, ...]) -> tuple[Any, list[Any]]:
    """The value and the gradients; both for a fixed gradient of the value."""
    inputs = [Tensor(xp.asarray(array), requires_grad=True) for array in arrays]
    with crossings() as counted, Tape() as tape:
        y = function(xp, *inputs)
    assert counted.keys() <= {"asarray", "array"}, counted  # of masks and ids by the case itself; nothing waits
    v = xp.asarray(np.random.default_rng(5).standard_normal(y.shape).astype(y.dtype))
    with crossings() as counted:
        grads = tape.run_backward([(y, v)])
    assert not counted, counted
    return y.data, [grads[t] for t in inputs]


def test_every_operation_is_tried_here():
    missing = set(ops.__all__) - {"IGNORE"} - set(CASES)
    assert not missing, f"add a line to CASES in this file for: {', '.join(sorted(missing))}"
    assert set(CASES) <= set(ops.__all__)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_those_of_numpy(cupy, name, dtype):
    tolerance = {np.float64: 1e-12, np.float32: 1e-5, np.float16: 1e-2}[dtype]
    for function, arrays in CASES[name]:
        arrays = tuple(array.astype(dtype) for array in arrays)
        y, grads = run(cupy, function, arrays)
        z, others = run(np, function, arrays)
        for mine, theirs in zip([y, *grads], [z, *others], strict=True):
            assert isinstance(mine, ndarray)
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
            np.testing.assert_allclose(mine.get(), theirs, rtol=tolerance, atol=tolerance)


def test_forward_does_not_wait_for_the_device_either(cupy):
    x, ids, drop = cupy.asarray(normal(2, 5, 18)), cupy.asarray(IDS), rows(cupy, 2, 2, 5)
    with crossings() as counted:
        hidden = ops.attention(Tensor(x), 2, rows=drop, drop=0.3)
        logits = ops.softmax(ops.linear(hidden, Tensor(cupy.ones((6, 4)))))
        loss = ops.softmax_cross_entropy(logits[:, :3], ops.take(Tensor(ids), ids % 2).data[:, 0] % 4)
    assert not counted
    assert np.isfinite(loss.item())


@pytest.mark.parametrize("keys", [7, 0])
def test_attention_on_keys_from_elsewhere_and_back(cupy, keys):
    """Other many keys than queries, with numbers of their own; also none."""
    queries = [normal(2, 1, 2, 5, 3) for _ in range(3)]
    theirs, numbers = [normal(2, 1, keys, 3) for _ in range(2)], 3 * np.arange(keys)
    seen = RNG.random((1, 2, 5, keys)) > 0.3

    def both_ways(xp):
        grad, q, y = (xp.asarray(x) for x in queries)
        k, v = (xp.asarray(x) for x in theirs)
        into = [xp.empty_like(x) for x in (q, k, v)]
        how = {"mask": xp.asarray(seen), "rows": rows(xp, 2, 2, 5), "drop": 0.3, "keys": xp.asarray(numbers)}
        with crossings() as counted:
            lse = attend(q, k, v, y, causal=False, **how)
            attend_backward(grad, q, k, v, y, lse, *into, causal=False, **how)
        assert not counted, counted
        return [y, lse, *into]

    for mine, expected in zip(both_ways(cupy), both_ways(np), strict=True):
        np.testing.assert_allclose(mine.get(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("columns", [4, 0])
def test_a_loss_of_which_other_ranks_hold_columns(cupy, columns):
    logits, targets, whole = normal(5, columns), np.array([-1, ops.IGNORE, 3 if columns else -2, -1, -7]), normal(5)

    def both_ways(xp):
        x, t, lse, grad = (xp.asarray(a) for a in (logits, targets, whole, np.array(0.5)))
        with crossings() as counted:
            results = (
                *kernels.cross_entropy(x, t, ops.IGNORE),
                kernels.cross_entropy_backward(grad, x, t, lse, ops.IGNORE),
            )
        assert not counted, counted
        return results

    for mine, expected in zip(both_ways(cupy), both_ways(np), strict=True):
        np.testing.assert_allclose(mine.get(), expected, rtol=1e-12)


@pytest.mark.parametrize("out", [False, True])
def test_halves_are_widened_and_narrowed(cupy, out):
    x = (normal(3, 4) * 1e5).astype(np.float32)
    half = kernels.narrow(x, np.float16)
    mine = kernels.narrow(cupy.asarray(x), np.float16, cupy.empty((3, 4), np.float16) if out else None)
    back = kernels.widen(mine, cupy.empty((3, 4), np.float32) if out else None)
    np.testing.assert_array_equal(mine.get(), half)
    np.testing.assert_array_equal(back.get(), half.astype(np.float32))


def test_gradcheck_takes_device_arrays(cupy):
    check(lambda x, w: ops.gelu_erf(ops.linear(x, w)), cupy.asarray(normal(2, 3)), cupy.asarray(normal(3, 2)))


def test_random_words_and_masks_are_those_of_the_host(cupy):
    mine, theirs = rows(cupy, 4, 6), rows(np, 4, 6)
    np.testing.assert_array_equal(mine.get(), theirs)
    np.testing.assert_array_equal(rows(cupy, 3, 2, 6).get(), rows(np, 3, 2, 6))
    for function in (words32, uniform, lambda r, c: keep_mask(r, c, 0.3), lambda r, c: keep_mask(r, c, 1.0)):
        np.testing.assert_array_equal(to_host(function(mine, 9)), function(theirs, 9))
        np.testing.assert_array_equal(to_host(function(mine, cupy.arange(2, 5))), function(theirs, np.arange(2, 5)))


def test_python_and_numpy_numbers_mix_and_do_not_promote(cupy):
    x = Tensor(cupy.ones((2, 2), np.float32), requires_grad=True)
    scale = np.float64(0.5)
    for y in (x * scale, scale * x, x + scale, scale - x, x / scale, scale / x, x**scale, ops.maximum(x, scale)):
        assert isinstance(y.data, ndarray)
        assert y.dtype == np.float32


def test_arrays_on_the_left_ask_the_tensor(cupy):
    x = Tensor(cupy.ones(3), requires_grad=True)
    for y in (cupy.ones(3) + x, cupy.ones(3) - x, cupy.ones(3) * x, cupy.ones(3) / x, cupy.ones((2, 3)) @ x):
        assert isinstance(y, Tensor)


def test_host_ids_for_a_table_on_the_device_are_refused(cupy):
    with pytest.raises(TypeError, match="host array"):
        ops.take(Tensor(cupy.zeros((4, 2))), IDS)


def test_an_id_beyond_the_table_wraps_around_instead_of_raising(cupy):
    """No op may wait for the device to look, so ids are checked where they are made: on the host."""
    table = Tensor(cupy.asarray(np.arange(4.0).reshape(4, 1)))
    assert ops.take(table, cupy.asarray([5])).data.tolist() == [[1.0]]

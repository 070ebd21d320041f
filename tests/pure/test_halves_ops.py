"""Operations on float16 and bfloat16: worked out in float32 and rounded once, gradients of their tensor's dtype."""

from __future__ import annotations

import numpy as np
import pytest
from half_calls import BFLOAT16, EPS, HALVES, values
from op_calls import run

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.lazy import Lazy, Product, RowSum
from mpitrain.backend import is_half
from mpitrain.errors import ShapeError
from mpitrain.nn import init
from mpitrain.nn.materialize import materialize
from mpitrain.nn.parameter import Parameter
from mpitrain.nn.rotary import frequencies, tables
from mpitrain.rng import absorb, stream_key

RNG = np.random.default_rng(11)
IDS = np.array([[3, 0, 3], [-2, 3, 1]])
MASK = np.array([[True, False, True, True], [False, False, False, False], [True, True, True, True]])
ROWS = absorb(stream_key(5, "rows"), np.arange(3))
ANGLES = tables(np.arange(3), frequencies(4), np.float16)


def normal(*shape):
    return RNG.standard_normal(shape)


def positive(*shape):
    return RNG.uniform(0.5, 2.0, shape)


def total(outputs):
    return outputs[0] * 0.5 + outputs[1]


X, Y, V = normal(3, 4), positive(3, 4), normal(4)
CASES = {
    "add": [(ops.add, X, V), (lambda x: 1 + x + 0.5, X), (ops.add, normal(3, 1), normal(2, 1, 4)), (ops.add, X[:0], V)],
    "sub": [(ops.sub, X, V), (lambda x: 0.5 - x, X), (ops.sub, V, X)],
    "mul": [(ops.mul, X, V), (lambda x: x * 0.3, X), (ops.mul, normal(3, 1), normal(2, 1, 4))],
    "div": [(ops.div, X, Y), (lambda x: x / 3, X), (lambda x: 2.5 / x, Y), (ops.div, X, positive(4))],
    "pow": [(ops.pow, Y, V), (lambda x: x**3, X), (lambda x: x**-0.5, Y), (lambda x: x**2, X), (lambda x: 2.0**x, X)],
    "maximum": [(ops.maximum, X, V), (lambda x: ops.maximum(x, 0.3), X)],
    "minimum": [(ops.minimum, X, V), (lambda x: ops.minimum(0.3, x), X)],
    "where": [(lambda a, b: ops.where(X > 0, a, b), X, V), (lambda a: ops.where(X > 0, a, -0.3), X)],
    **{
        name: [(getattr(ops, name), X)]
        for name in ("neg", "abs", "exp", "tanh", "sigmoid", "silu", "softplus", "relu", "sin", "cos", "erf")
    },
    **{name: [(getattr(ops, name), Y)] for name in ("log", "sqrt")},
    "clip": [(lambda x: ops.clip(x, -0.3, 0.6), X)],
    "matmul": [
        (ops.matmul, X, normal(4, 2)),
        (ops.matmul, normal(5, 1, 3, 4), normal(2, 4, 2)),
        (ops.matmul, V, normal(4)),
        (ops.matmul, normal(2, 3, 4), V),
        (lambda a, b: a @ b.T, X, normal(2, 4)),
        (ops.matmul, X[:0], normal(4, 2)),
    ],
    **{
        name: [
            (lambda x, f=f: f(x), X),
            (lambda x, f=f: f(x, 0), X),
            (lambda x, f=f: f(x, (0, 2), True), normal(2, 3, 4)),
        ]
        for name, f in {
            n: getattr(ops, n) for n in ("sum", "mean", "max", "min", "logsumexp", "var", "std", "prod")
        }.items()
    },
    "einsum": [
        (lambda a, b: ops.einsum("ij,jk->ki", a, b), X, normal(4, 2)),
        (lambda a, b: ops.einsum("bij,bj->b", a, b), normal(2, 3, 4), normal(2, 4)),
        (lambda a, b: ops.einsum("ij,j->ji", a, b), X, V),
    ],
    "cumsum": [(ops.cumsum, X), (lambda x: ops.cumsum(x, 0), X)],
    **{
        name: [(lambda a, b, f=f: ops.where(f(a, b), a, b), X, V), (lambda a, f=f: ops.where(f(a, 0.3), a, 0.3), X)]
        for name, f in {
            n: getattr(ops, n) for n in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
        }.items()
    },
    "argmax": [(lambda x: ops.gather_along(x, x.argmax(0, True), 0), X)],
    "argmin": [(lambda x: ops.gather_along(x, x.argmin(0, True), 0), X)],
    "flip": [(ops.flip, X)],
    "roll": [(lambda x: ops.roll(x, 1), X)],
    "tile": [(lambda x: ops.tile(x, (2, 3)), X)],
    "repeat": [(lambda x: ops.repeat(x, 3, 0), X)],
    "softmax": [(ops.softmax, X), (lambda x: ops.softmax(x, 0), X), (lambda x: ops.softmax(x, mask=MASK), X)],
    "log_softmax": [(ops.log_softmax, X), (lambda x: ops.log_softmax(x, 0), X)],
    "reshape": [(lambda x: x.reshape(2, -1), X)],
    "transpose": [(lambda x: x.T, X)],
    "swap": [(lambda x: x.swap(0, 1), X)],
    "broadcast_to": [(lambda x: ops.broadcast_to(x, (5, 3, 4)), normal(3, 1))],
    "concat": [(lambda a, b: ops.concat([a, b], 1), X, normal(3, 2))],
    "split": [(lambda x: ops.split(x, (1, 3), 1)[1], X)],
    "stack": [(lambda a, b: ops.stack([a, b]), X, Y)],
    "pad": [(lambda x: ops.pad(x, [(1, 0), (2, 1)], 0.5), X)],
    "squeeze": [(lambda x: x.squeeze(1), normal(3, 1, 4))],
    "expand": [(lambda x: ops.expand(x, 1), X)],
    "cast": [(lambda x: (x if x.dtype == np.float64 else x.astype(np.float32)) * 1.0, X)],
    "getitem": [
        (lambda x: x[1:, ::2], X),
        (lambda x: x[IDS], normal(4, 2)),
        (lambda x: x[IDS, IDS[0] % 2], normal(4, 2)),
    ],
    "take": [(lambda x: ops.take(x, IDS), normal(4, 2)), (lambda x: ops.take(x, IDS, 1), normal(2, 4, 3))],
    "gather_along": [(lambda x: ops.gather_along(x, IDS, 1), normal(2, 4))],
    "linear": [(ops.linear, normal(2, 3, 4), normal(4, 5), normal(5)), (ops.linear, X, normal(4, 2))],
    "conv2d": [
        (lambda x, w, b: ops.conv2d(x, w, b, padding=1), normal(2, 4, 4, 3), normal(5, 3, 3, 3), normal(5)),
        (lambda x, w: ops.conv2d(x, w, stride=2), normal(2, 4, 4, 3), normal(5, 2, 2, 3)),
    ],
    "avg_pool2d": [(ops.avg_pool2d, normal(2, 4, 4, 3)), (lambda x: ops.avg_pool2d(x, 3, 1, 1), normal(2, 4, 4, 3))],
    "normalize": [
        (lambda x, w, b: ops.normalize(x, np.array([[0.3] * 4, [1.7] * 4], np.float32), w, b), X, V, normal(4)),
    ],
    "max_pool2d": [(ops.max_pool2d, normal(2, 4, 4, 3)), (lambda x: ops.max_pool2d(x, 3, 1), normal(2, 4, 4, 3))],
    "gelu_tanh": [(ops.gelu_tanh, X), (ops.gelu_tanh, X, V)],
    "gelu_erf": [(ops.gelu_erf, X), (ops.gelu_erf, X, V)],
    "layer_norm": [(ops.layer_norm, normal(3, 9), normal(9), normal(9))],
    "softmax_cross_entropy": [(lambda x: ops.softmax_cross_entropy(x, np.array([1, -100, 3])), X)],
    "dropout": [(lambda x: ops.dropout(x, ROWS, 0.25), X)],
    "residual": [(lambda x, y, b: ops.residual(x, y, b, rows=ROWS, p=0.25), X, Y, V), (ops.residual, X, Y)],
    "residual_norm": [
        (lambda x, y, b, *norm: total(ops.residual_norm(x, y, b, *norm, rows=ROWS, p=0.25)), X, Y, V, normal(4), V)
    ],
    "rms_norm": [(ops.rms_norm, normal(3, 9), normal(9))],
    "residual_rms_norm": [
        (lambda x, y, b, w: total(ops.residual_rms_norm(x, y, b, w, rows=ROWS, p=0.25)), X, Y, V, normal(4))
    ],
    "swiglu": [(ops.swiglu, X, Y)],
    "pack_rotary": [(lambda q, kv: ops.pack_rotary(q, kv, 2, 1, *ANGLES), normal(2, 3, 8), normal(2, 3, 8))],
    "rotary": [(lambda x: ops.rotary(x, 2, 1, *ANGLES), normal(2, 3, 16))],
    "gates": [
        (lambda p: ops.gates(p, IDS % 4), positive(2, 4)),
        (lambda p: ops.gates(p, IDS % 4, True), positive(2, 4)),
    ],
    "take_rows": [(lambda x: ops.take_rows(x, np.array([5, 0, 5])), normal(2, 3, 4))],
    "permute_rows": [(lambda x: ops.permute_rows(x, np.array([2, 0, 1])), X)],
    "grouped_matmul": [(lambda x, w: ops.grouped_matmul(x, w, (2, 0, 1)), X, normal(3, 4, 5))],
    "combine": [(lambda x, g: ops.combine(x, g, np.array([[2, -1], [0, 1]])), X, positive(2, 2))],
    "jitter": [(lambda x: ops.jitter(x, ROWS, 0.3), X)],
}
ELSEWHERE = {"IGNORE", "attention", "slice_attention"}  # which have files of their own
SINGLE = {"cast", "softmax_cross_entropy"}  # whose value is float32


def test_every_operation_is_tried_here():
    assert set(ops.__all__) - ELSEWHERE == set(CASES)


@HALVES
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_same_numbers_in_double(name, half, level):
    """Within half a digit of the value; a gradient may have lost another in what was saved, rounded, for backward."""
    for function, *arrays in CASES[name]:
        halves = [array.astype(half) for array in arrays]
        y, grads = run(function, *halves)
        v = np.random.default_rng(5).standard_normal(y.shape).astype(y.dtype)
        exact, others = run(function, *(values(x, np.float64) for x in halves), seed=v.astype(np.float64))
        assert (y.dtype == np.float32) if name in SINGLE else (y.dtype == half), y.dtype
        digits = 2 if name.startswith("residual_") else 0.51  # of a sum that was rounded, and added once more
        bound = digits * EPS[half] * np.abs(exact) + (2 if digits == 2 else 0.01) * EPS[half]
        assert (np.abs(values(y, np.float64) - exact) <= bound).all()
        for x, grad, expected in zip(halves, grads, others, strict=True):
            assert (grad.shape, grad.dtype) == (x.shape, half)
            off = np.abs(values(grad, np.float64) - expected)
            assert (off <= EPS[half] * (1.5 * np.abs(expected) + 2 * np.abs(expected).max(initial=1.0))).all()


@HALVES
def test_numbers_promote_no_half(half):
    x = Tensor(np.ones((2, 2), half), requires_grad=True)
    for number in (0.5, 2, np.float64(0.5), np.float32(0.5), np.int64(2)):
        for y in (
            *(x + number, number + x, x - number, number - x, x * number, number * x, x / number, number / x),
            *(x**number, number**x, ops.maximum(x, number), ops.minimum(number, x), ops.clip(x, number, 3.0)),
            *(ops.where(np.ones((2, 2), bool), x, number), ops.where(np.ones((2, 2), bool), number, x)),
        ):
            assert y.dtype == half
    assert (ops.where(np.zeros(2, bool), x, -1e9).data.astype(np.float32) < -9e8).all()


@HALVES
def test_a_half_among_singles_is_single_and_its_gradient_half(half):
    x = normal(3, 4).astype(half)
    other = positive(3, 4).astype(np.float32)
    for op in (ops.add, ops.sub, ops.mul, ops.div, ops.maximum, lambda a, b: ops.matmul(a, b.T), ops.minimum):
        for function in (op, lambda a, b, op=op: op(b, a)):
            y, (dx, d_other) = run(function, x, other)
            assert (y.dtype, dx.dtype, d_other.dtype) == (np.float32, half, np.float32)


def test_the_two_kinds_of_halves_do_not_mix():
    a, b = Tensor(np.ones((2, 2), np.float16)), Tensor(np.ones((2, 2), BFLOAT16))
    mixes = [
        ops.add,
        ops.sub,
        ops.mul,
        ops.div,
        ops.pow,
        ops.maximum,
        ops.minimum,
        ops.matmul,
        ops.linear,
        ops.gelu_tanh,
    ]
    mixes += [lambda a, b: ops.where(np.ones((2, 2), bool), a, b), lambda a, b: ops.concat([a, b]), ops.residual]
    for mix in mixes:
        for one, other in ((a, b), (b, a)):
            with pytest.raises(ShapeError, match=r"go together|differ"):
                mix(one, other)


@HALVES
@pytest.mark.parametrize("shape", [(), (3, 4), (0, 2)])
def test_gradients_of_a_value_that_is_used_several_times_are_added(shape, half, level):
    def thrice(x):
        hidden = x * 1.0
        return (ops.relu(hidden), hidden * 2.0, hidden * 4.0)

    x = np.ones(shape, half)
    leaf = Tensor(x, requires_grad=True)
    with Tape() as tape:
        outputs = thrice(leaf)
    grads = tape.run_backward([(y, np.full(shape, k, half)) for k, y in enumerate(outputs, 1)])
    assert grads[leaf].dtype == half
    assert (grads[leaf] == np.full(shape, 1 + 4 + 12, half)).all()


# ----------------------------------------------------------------------------------------------------- known failures


@HALVES
def test_gradients_of_broadcast_operands_have_their_shape_and_dtype(half):
    """C01."""
    b = np.arange(20.0).reshape(5, 4).astype(half)
    _, (da, db) = run(lambda a, b: (a * b).sum(), np.ones(1, half), b, seed=np.ones((), half))
    assert (da.shape, da.dtype, db.dtype) == ((1,), half, half)
    assert da.tolist() == [np.float32(190).astype(half)]
    _, grads = run(ops.mul, normal(4, 1).astype(half), normal(1, 4).astype(half))
    assert [(g.shape, g.dtype) for g in grads] == [((4, 1), half), ((1, 4), half)]
    x = normal(3).astype(half)
    _, (grad,) = run(lambda x: ops.broadcast_to(x, (4, 3)), x, seed=np.ones((4, 3), half))
    assert grad.tolist() == [4, 4, 4]
    assert grad.dtype == half


@HALVES
def test_a_row_without_a_key_has_probability_and_gradient_zero(half, level):
    """C08."""
    scores = np.array([[0, 0], [-np.inf, -np.inf]], half)
    y, (grad,) = run(ops.softmax, scores)
    assert y.tolist() == [[0.5, 0.5], [0, 0]]
    assert y.dtype == grad.dtype == half
    assert grad[1].tolist() == [0, 0]
    y, (grad,) = run(lambda x: ops.softmax(x, mask=np.array([[True, True], [False, False]])), np.zeros((2, 2), half))
    assert y.tolist() == [[0.5, 0.5], [0, 0]]
    assert np.isfinite(grad.astype(np.float32)).all()
    assert grad[1].tolist() == [0, 0]


@HALVES
@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_the_norm_of_a_constant_row_is_the_bias_and_its_gradients_are_finite(half, eps, level):
    """C12."""
    x = np.stack([np.full(128, c) for c in (0.0, 0.1, -3.7, 1000.3)]).astype(half)
    weight, bias = normal(128).astype(half), normal(128).astype(half)
    seed = (normal(4, 128) / 1000).astype(half)
    y, grads = run(lambda x, w, b: ops.layer_norm(x, w, b, eps), x, weight, bias, seed=seed)
    assert (y == bias).all()
    assert y.dtype == half
    assert all(np.isfinite(grad.astype(np.float32)).all() for grad in grads)


@HALVES
def test_sums_means_and_variances_are_formed_in_single(half):
    """T21.1: in float16 2048 + 1 is 2048."""
    ones = np.ones((4099, 2), half)
    assert ops.sum(Tensor(ones), 0).data.tolist() == [np.float32(4099).astype(half)] * 2
    assert ops.mean(Tensor(ones)).item() == 1
    ramp = (np.arange(4096) % 2).astype(half)
    assert ops.var(Tensor(ramp)).item() == 0.25
    many = 70_001  # equal maxima, which float16 cannot count
    _, (grad,) = run(ops.max, np.ones(many, half), seed=np.full((), 100, half))
    assert (grad == np.float32(100 / many).astype(half)).all()
    large = np.full((300, 300), 6e4, np.float32).astype(half)  # whose sum of squares no half holds
    assert np.isfinite(ops.mean(Tensor(large)).item())
    _, (grad,) = run(lambda x: ops.mean(x), large, seed=np.ones((), half))
    assert (grad > 0).all()


# ------------------------------------------------------------------------- gradients of weights reach float32 unrounded


def parameters(half, **shapes):
    made = [Parameter(name, shape, init=init.normal(0.5)) for name, shape in shapes.items()]
    materialize(made, {}, {}, 0, half)
    assert all(p.data.dtype == half and p.grad.dtype == np.float32 for p in made)
    return made


def gradients(half, function, repeats=1, **shapes):
    """The float32 gradients that reach parameters, and those of float32 parameters with the same numbers."""
    both = []
    for dtype in (half, np.dtype(np.float32)):
        made = parameters(half, **shapes)
        if dtype == np.float32:
            wide = parameters(half, **shapes)
            for p, q in zip(wide, made, strict=True):
                p.bind(q.data.astype(np.float32), None, np.zeros(p.shape, np.float32))
            made = wide
        for k in range(repeats):
            with Tape() as tape:
                y = function(*made, dtype=dtype)
            v = np.random.default_rng(k).standard_normal(y.shape).astype(half).astype(y.dtype)
            tape.run_backward([(y, v)])
        both.append([p.grad.copy() for p in made])
    return both


INPUT = np.round(RNG.standard_normal((50, 8)) * 16) / 16  # the same numbers in either half
WEIGHTS = {
    "matmul": (lambda w, dtype: ops.matmul(Tensor(INPUT.astype(dtype)), w), {"w": (8, 5)}),
    "matmul of a transposed weight": (lambda w, dtype: ops.matmul(Tensor(INPUT.astype(dtype)), w.T), {"w": (5, 8)}),
    "linear": (lambda w, b, dtype: ops.linear(Tensor(INPUT.astype(dtype)), w, b), {"w": (8, 5), "b": (5,)}),
    "batched": (lambda w, dtype: ops.matmul(Tensor(INPUT.astype(dtype).reshape(5, 10, 8)), w), {"w": (8, 5)}),
    "norm": (
        lambda w, b, dtype: ops.layer_norm(Tensor(INPUT.astype(dtype)), w, b),
        {"w": (8,), "b": (8,)},
    ),
    "branch": (
        lambda w, b, dtype: ops.residual_norm(Tensor(INPUT.astype(dtype)), Tensor(INPUT.astype(dtype)), None, w, b)[1],
        {"w": (8,), "b": (8,)},
    ),
    "bias of a branch": (
        lambda a, dtype: ops.residual(Tensor(INPUT.astype(dtype)), Tensor(INPUT.astype(dtype)), a),
        {"a": (8,)},
    ),
    "broadcast": (lambda b, dtype: Tensor(INPUT.astype(dtype)) + b, {"b": (8,)}),
    "subtracted": (lambda b, dtype: Tensor(INPUT.astype(dtype)) - b, {"b": (8,)}),
    "repeated": (lambda b, dtype: ops.broadcast_to(b, (50, 8)), {"b": (8,)}),
    "a slice of a table": (lambda t, dtype: Tensor(np.zeros((9, 3, 8), dtype)) + t[:3], {"t": (7, 8)}),
    "reshaped": (lambda b, dtype: Tensor(INPUT.astype(dtype)) + b.reshape(8), {"b": (2, 4)}),
    "rows of a table": (lambda t, dtype: ops.take(t, np.arange(60) % 4), {"t": (7, 8)}),
    "positions": (lambda t, dtype: Tensor(np.zeros((9, 4, 8), dtype)) + ops.take(t, np.arange(4)), {"t": (7, 8)}),
    "cast": (
        lambda w, dtype: ops.matmul(Tensor(INPUT.astype(dtype).astype(np.float32)), w.astype(np.float32)),
        {"w": (8, 5)},
    ),
}


@HALVES
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("repeats", [1, 3])
def test_gradients_of_weights_are_not_rounded_on_their_way_to_the_buffer(name, repeats, half, level):
    function, shapes = WEIGHTS[name]
    mine, others = gradients(half, function, repeats, **shapes)
    for grad, expected in zip(mine, others, strict=True):
        assert grad.dtype == np.float32
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(grad, expected, rtol=3e-6, atol=3e-6 * np.abs(expected).max())


@HALVES
def test_recipes_write_and_add_unrounded_and_round_only_as_arrays(half, level):
    a, b = normal(5, 40).astype(half), normal(40, 3).astype(half)
    product = values(a) @ values(b)
    ids, rows = np.arange(40) % 3, normal(40, 2).astype(half)
    table = np.zeros((4, 2), np.float32)
    np.add.at(table, ids, values(rows))
    for recipe, exact in ((Product(a, b, half), product), (RowSum(ids, rows, (4, 2)), table)):
        assert isinstance(recipe, Lazy)
        assert recipe.dtype == half
        assert recipe.array().dtype == half
        np.testing.assert_array_equal(recipe.array(), recipe.unrounded().astype(half))
        into = np.full(exact.shape, 7, np.float32)
        recipe.write(into, add=False)
        np.testing.assert_allclose(into, exact, rtol=1e-6, atol=1e-6)
        recipe.write(into, add=True)
        np.testing.assert_allclose(into, 2 * exact, rtol=1e-6, atol=1e-6)
        assert recipe.unrounded().dtype == np.float32


# -------------------------------------------------------------------------------------------------- logits in float32


@HALVES
@pytest.mark.parametrize("op", [ops.linear, ops.matmul])
def test_a_product_may_come_out_unrounded_and_take_a_single_gradient(op, half, level):
    x, w = normal(6, 8).astype(half), normal(8, 5).astype(half)
    y, (dx, dw) = run(lambda x, w: op(x, w, dtype=np.float32), x, w)
    assert (y.dtype, dx.dtype, dw.dtype) == (np.float32, half, half)
    np.testing.assert_allclose(y, values(x) @ values(w), rtol=1e-6, atol=1e-6)
    v = np.random.default_rng(5).standard_normal(y.shape).astype(np.float32)
    np.testing.assert_array_equal(dx, (v @ values(w).T).astype(half))
    p, q = parameters(half, w=(8, 5), b=(5,))
    p.data[...] = w
    with Tape() as tape:
        y = op(Tensor(x), p, dtype=np.float32)
    tape.run_backward([(y, v)])
    np.testing.assert_allclose(p.grad, values(x).T @ v, rtol=1e-5, atol=1e-5)
    with_bias = ops.linear(Tensor(x), p, q, dtype=np.float32)
    assert with_bias.dtype == np.float32
    np.testing.assert_allclose(with_bias.data, values(x) @ values(w) + values(q.data), rtol=1e-6, atol=1e-6)


@HALVES
def test_a_linear_layer_rounds_once(half, level):
    x, w, b = (normal(*shape).astype(half) for shape in ((30, 8), (8, 5), (5,)))
    y = ops.linear(Tensor(x), Tensor(w), Tensor(b)).data
    np.testing.assert_array_equal(y, (values(x) @ values(w) + values(b)).astype(half))


def test_a_cast_weight_is_a_weight():
    for source, target in ((np.float16, np.float32), (np.float32, np.float16), (BFLOAT16, np.float32)):
        p = Tensor(np.ones((2, 2), source), requires_grad=True)
        p.weight_side = True
        with Tape() as tape:
            y = p.astype(target)
            z = y * y
        assert y.weight_side
        grads = tape.run_backward([(z, np.ones((2, 2), target))])
        assert grads[p].dtype == source
        assert grads[p].tolist() == [[2, 2], [2, 2]]


def test_a_cast_that_overflows_says_nothing():
    y = Tensor(np.array([1e6, -1e6], np.float32)).astype(np.float16)
    assert y.data.tolist() == [np.inf, -np.inf]
    assert is_half(y.dtype)
    assert kernels.narrow(np.float32(1e6), np.float16) == np.inf

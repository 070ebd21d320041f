"""Every operation: its gradient against finite differences, its value and gradient against PyTorch."""

import functools
import math

import numpy as np
import pytest

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.errors import DataError, ShapeError

RNG = np.random.default_rng(7)


def normal(*shape):
    return RNG.standard_normal(shape)


def positive(*shape):
    return RNG.uniform(0.5, 2.0, shape)


def strided(*shape):
    """Not contiguous: every second element of reversed dims."""
    return RNG.standard_normal((*[2 * n for n in shape[::-1]],)).transpose()[tuple(slice(None, None, 2) for _ in shape)]


def apart(*shape):
    """Values at least 0.1 from each other and from 0, where kinks are."""
    n = math.prod(shape)
    values = RNG.permutation(np.concatenate([np.arange(1, n + 1), -np.arange(1, n + 1)]))[:n]
    return (values * 0.1).reshape(shape)


def index(high, *shape):
    return RNG.integers(0, high, shape)


# name, op, the same in torch (None: it has none), inputs
PAIRS = [
    ("same shape", (normal(3, 4), positive(3, 4))),
    ("row", (normal(3, 4), positive(4))),
    ("column", (normal(3, 1), positive(1, 4))),
    ("one element", (normal(1), positive(5, 4))),
    ("0-d", (normal(), positive(2, 3))),
    ("0-d both", (normal(), positive())),
    ("3-d", (normal(2, 1, 3), positive(4, 1))),
    ("empty", (normal(0, 3), positive(3))),
    ("not contiguous", (strided(3, 4), np.abs(strided(3, 4)) + 0.5)),
]
BINARY = {
    "add": lambda t: lambda a, b: a + b,
    "sub": lambda t: lambda a, b: a - b,
    "mul": lambda t: lambda a, b: a * b,
    "div": lambda t: lambda a, b: a / b,
}
SINGLES = [
    ("vector", normal(5)),
    ("matrix", normal(3, 4)),
    ("0-d", normal()),
    ("empty", normal(2, 0)),
    ("not contiguous", strided(3, 2)),
]
UNARY = {
    "neg": (lambda x: -x, "neg", normal),
    "exp": (ops.exp, "exp", normal),
    "log": (ops.log, "log", positive),
    "sqrt": (ops.sqrt, "sqrt", positive),
    "tanh": (ops.tanh, "tanh", normal),
    "sigmoid": (ops.sigmoid, "sigmoid", normal),
    "silu": (ops.silu, lambda x: x * x.sigmoid(), normal),
    "softplus": (ops.softplus, lambda x: x.exp().log1p(), normal),
    "relu": (ops.relu, "relu", apart),
    "abs": (ops.abs, "abs", apart),
    "sin": (ops.sin, "sin", normal),
    "cos": (ops.cos, "cos", normal),
    "erf": (ops.erf, "erf", normal),
    "pow 3": (lambda x: x**3, lambda x: x**3, normal),
    "pow 2": (lambda x: x**2, lambda x: x**2, normal),
    "pow 0": (lambda x: x**0, lambda x: x**0, normal),
    "pow -0.5": (lambda x: x**-0.5, lambda x: x**-0.5, positive),
    "base 2": (lambda x: 2.0**x, lambda x: 2.0**x, normal),
    "scale": (lambda x: 3 * x * 0.5, lambda x: 3 * x * 0.5, normal),
    "shift": (lambda x: 1 - (x + 2.0), lambda x: 1 - (x + 2.0), normal),
    "number / x": (lambda x: 1.5 / x / 3, lambda x: 1.5 / x / 3, positive),
    "clip": (lambda x: ops.clip(x, -0.25, 0.55), lambda x: x.clamp(-0.25, 0.55), apart),
    "clip low": (lambda x: ops.clip(x, low=0.05), lambda x: x.clamp(min=0.05), apart),
    "square of itself": (lambda x: x * x, lambda x: x * x, normal),
    "itself thrice": (lambda x: x + x - x / x, lambda x: x + x - x / x, positive),
    "gelu tanh": (ops.gelu_tanh, "gelu tanh", normal),
    "gelu erf": (ops.gelu_erf, "gelu none", normal),
    "sum": (lambda x: x.sum(), lambda x: x.sum(), normal),
    "T": (lambda x: x.T, lambda x: x.permute(*range(x.ndim)[::-1]), normal),
    "expand": (lambda x: ops.expand(x, -1), lambda x: x.unsqueeze(-1), normal),
    "cast": (lambda x: x.astype(np.float64) * 1.0, lambda x: x * 1.0, normal),
    "reshape": (lambda x: x.reshape(x.size), lambda x: x.reshape(-1), normal),
}
ALONG = {
    "sum": (ops.sum, lambda t: lambda x, d, k: x.sum(d, keepdim=k)),
    "mean": (ops.mean, lambda t: lambda x, d, k: x.mean(d, keepdim=k)),
    "max": (ops.max, lambda t: lambda x, d, k: x.amax(d, keepdim=k)),
    "min": (ops.min, lambda t: lambda x, d, k: x.amin(d, keepdim=k)),
    "logsumexp": (ops.logsumexp, lambda t: lambda x, d, k: t.logsumexp(x, d, keepdim=k)),
    "var": (ops.var, lambda t: lambda x, d, k: t.var(x, d, correction=0, keepdim=k)),
    "std": (ops.std, lambda t: lambda x, d, k: t.std(x, d, correction=0, keepdim=k)),
}
MANY_ZEROS = np.array([[1.0, 2, 3, 4], [1, 0, 2, 3], [0, 1, 0, 2]])
IDS2, IDS3 = index(5, 2, 3), index(4, 3, 6)
SHAPES = {
    "reshape -1": (lambda x: x.reshape(2, -1), lambda t, x: x.reshape(2, -1), normal(4, 3)),
    "reshape of a view": (lambda x: x.T.reshape((2, 6)), lambda t, x: x.T.reshape(2, 6), normal(4, 3)),
    "transpose": (lambda x: x.transpose(2, 0, 1), lambda t, x: x.permute(2, 0, 1), normal(2, 3, 4)),
    "swap": (lambda x: x.swap(0, -1), lambda t, x: x.transpose(0, -1), normal(2, 3, 4)),
    "broadcast_to": (lambda x: ops.broadcast_to(x, (4, 2, 3)), lambda t, x: x.expand(4, 2, 3), normal(2, 1)),
    "concat": (
        lambda x: ops.concat([x, x * 2, x[:, :1]], 1), lambda t, x: t.cat([x, x * 2, x[:, :1]], 1), normal(2, 3),
    ),
    "stack": (lambda x: ops.stack([x, -x], -1), lambda t, x: t.stack([x, -x], -1), normal(2, 3)),
    "split used": (
        lambda x: ops.split(x, (1, 3, 0), 1)[1] * ops.split(x, 4, 1)[2],
        lambda t, x: t.split(x, (1, 3, 0), 1)[1] * t.chunk(x, 4, 1)[2],
        normal(2, 4),
    ),
    "squeeze": (lambda x: x.squeeze(1), lambda t, x: x.squeeze(1), normal(2, 1, 3)),
    "squeeze all": (lambda x: x.squeeze(), lambda t, x: x.squeeze(), normal(1, 2, 1)),
    "pad": (
        lambda x: ops.pad(x, [(1, 0), (2, 3)], 7.0),
        lambda t, x: t.nn.functional.pad(x, (2, 3, 1, 0), value=7.0),
        normal(2, 3),
    ),
    "getitem int": (lambda x: x[1] * x[-2, 0], lambda t, x: x[1] * x[-2, 0], normal(3, 4)),
    "getitem slices": (lambda x: x[..., ::2, None, 1:], lambda t, x: x[..., ::2, None, 1:], normal(2, 3, 4)),
    "getitem empty": (lambda x: x[2:2], lambda t, x: x[2:2], normal(3, 4)),
    "getitem array": (lambda x: x[IDS2], lambda t, x: x[t.tensor(IDS2)], normal(5, 2)),
    "getitem list": (lambda x: x[[0, 0, -1]], lambda t, x: x[[0, 0, -1]], normal(3)),
    "getitem array second": (lambda x: x[1:, IDS2], lambda t, x: x[1:, t.tensor(IDS2)], normal(3, 5, 2)),
    "getitem array last": (lambda x: x[..., IDS2], lambda t, x: x[..., t.tensor(IDS2)], normal(2, 3, 5)),
    "take": (lambda x: ops.take(x, IDS2), lambda t, x: x[t.tensor(IDS2)], normal(5, 4)),
    "take of 3-d": (lambda x: ops.take(x, IDS2, 1), lambda t, x: x[:, t.tensor(IDS2)], normal(2, 5, 3)),
    "take nothing": (lambda x: ops.take(x, index(4, 0)), lambda t, x: x[:0], normal(4, 3)),
    "gather_along": (
        lambda x: ops.gather_along(x, IDS3, 0), lambda t, x: x.gather(0, t.tensor(IDS3)), normal(4, 6),
    ),
    "gather_along last": (
        lambda x: ops.gather_along(x, IDS3[:, :4]), lambda t, x: x.gather(-1, t.tensor(IDS3[:, :4])), normal(3, 6),
    ),
    "iterate": (lambda x: sum(row * row for row in x), lambda t, x: sum(row * row for row in x), normal(3, 2)),
    "softmax": (lambda x: ops.softmax(x, 0), lambda t, x: t.softmax(x, 0), normal(3, 4)),
    "softmax strided": (lambda x: ops.softmax(x), lambda t, x: t.softmax(x, -1), strided(3, 4)),
    "log_softmax": (lambda x: ops.log_softmax(x, 1), lambda t, x: t.log_softmax(x, 1), normal(2, 3, 2)),
    "where": (
        lambda x: ops.where(x.data > 0, x * 2, 1.0), lambda t, x: t.where(x > 0, x * 2, 1.0), apart(3, 4),
    ),
    "prod": (lambda x: ops.prod(x, (0, 2)), lambda t, x: x.prod(2).prod(0), normal(2, 3, 4)),
    "prod with zeros": (
        lambda x: ops.prod(x * MANY_ZEROS, 1), lambda t, x: (x * t.tensor(MANY_ZEROS)).prod(1), normal(3, 4),
    ),
    "cumsum": (lambda x: x.cumsum(0), lambda t, x: x.cumsum(0), normal(3, 4)),
    "flip": (lambda x: ops.flip(x, (0, -1)), lambda t, x: x.flip(0, -1), normal(2, 3, 4)),
    "roll": (lambda x: ops.roll(x, -4, 1), lambda t, x: x.roll(-4, 1), normal(2, 3)),
    "tile": (lambda x: ops.tile(x, (2, 1, 3)), lambda t, x: x.tile(2, 1, 3), normal(2, 3)),
    "repeat": (lambda x: ops.repeat(x, 3, 1), lambda t, x: x.repeat_interleave(3, 1), normal(2, 3)),
    "sample variance": (lambda x: x.var(0, correction=1), lambda t, x: x.var(0), normal(4, 3)),
}  # fmt: skip
MATRICES = {
    "2-d": ((3, 4), (4, 2)),
    "batched": ((2, 3, 4), (2, 4, 5)),
    "broadcast left": ((3, 4), (5, 4, 2)),
    "broadcast right": ((5, 3, 4), (4, 2)),
    "broadcast both": ((5, 1, 3, 4), (2, 4, 2)),
    "vector matrix": ((4,), (4, 2)),
    "matrix vector": ((3, 4), (4,)),
    "vector vector": ((4,), (4,)),
    "vector batch": ((4,), (2, 4, 3)),
    "batch vector": ((2, 3, 4), (4,)),
    "no rows": ((0, 4), (4, 2)),
    "nothing to sum": ((3, 0), (0, 2)),
}


def cases():
    for name, build in BINARY.items():
        for kind, arrays in PAIRS:
            yield pytest.param(build(None), lambda t, build=build: build(t), arrays, id=f"{name}, {kind}")
    for name in ("maximum", "minimum"):
        arrays = [apart(3, 4), apart(4) + 0.05]
        yield pytest.param(getattr(ops, name), lambda t, n=name: getattr(t, n), arrays, id=name)
    power = (positive(3, 4), normal(4))
    yield pytest.param(lambda a, b: a**b, lambda t: lambda a, b: a**b, power, id="pow of two tensors")
    for name, (op, other, make) in UNARY.items():
        for kind, array in SINGLES:
            x = make(*array.shape) if make is not normal else array
            if name == "T" and kind == "0-d":
                continue
            yield pytest.param(op, lambda t, other=other: torch_unary(t, other), [x], id=f"{name}, {kind}")
    for name, (op, other) in ALONG.items():
        make = apart if name in ("max", "min") else normal
        for dim, keep in ((0, False), (-1, True), ((0, 2), False), ((1, 0), True)):
            yield pytest.param(
                lambda x, op=op, d=dim, k=keep: op(x, d, k),
                lambda t, other=other, d=dim, k=keep: lambda x: other(t)(x, d, k),
                [make(2, 3, 4)],
                id=f"{name} over {dim}, keepdims {keep}",
            )
    for name, (op, other, x) in SHAPES.items():
        yield pytest.param(op, lambda t, other=other: functools.partial(other, t), [x], id=name)
    for name, (a, b) in MATRICES.items():
        yield pytest.param(ops.matmul, lambda t: t.matmul, [normal(*a), normal(*b)], id=f"matmul {name}")
    views = [strided(3, 4), normal(5, 4).T]
    yield pytest.param(ops.matmul, lambda t: t.matmul, views, id="matmul of views")


def torch_unary(torch, other):
    if callable(other):
        return other
    if other.startswith("gelu"):
        return lambda x: torch.nn.functional.gelu(x, approximate=other.split()[1])
    return getattr(torch, other)


CASES = list(cases())


@pytest.mark.parametrize(("op", "other", "arrays"), CASES)
def test_gradients_equal_finite_differences(op, other, arrays):
    check(op, *arrays)


@pytest.mark.parametrize(("op", "other", "arrays"), CASES)
def test_values_and_gradients_equal_pytorch(op, other, arrays):
    torch = pytest.importorskip("torch")
    inputs = [Tensor(array, requires_grad=True) for array in arrays]
    theirs = [torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)).requires_grad_() for array in arrays]
    with Tape() as tape:
        y = op(*inputs)
    z = other(torch)(*theirs)
    assert y.shape == tuple(z.shape)
    np.testing.assert_allclose(y.data, z.detach().numpy(), rtol=1e-12, atol=1e-12)
    v = np.random.default_rng(1).standard_normal(y.shape)
    grads = tape.run_backward([(y, v)])
    z.backward(torch.from_numpy(np.asarray(v)))
    for t, other_t in zip(inputs, theirs, strict=True):
        np.testing.assert_allclose(grads[t], other_t.grad.numpy(), rtol=1e-12, atol=1e-12)


def gradients(loss, *leaves):
    with Tape() as tape:
        y = loss()
    grads = tape.run_backward([(y, np.ones(y.shape, y.dtype))])
    return [grads[leaf] for leaf in leaves]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_broadcast_operands_get_gradients_of_their_own_shape(dtype):
    """C01."""
    a = Tensor(np.ones(1, dtype), requires_grad=True)
    b = Tensor(np.arange(20, dtype=dtype).reshape(5, 4), requires_grad=True)
    da, db = gradients(lambda: (a * b).sum(), a, b)
    assert (da.shape, da.dtype, da.tolist()) == ((1,), dtype, [190])
    assert (db.shape, db.dtype) == ((5, 4), dtype)
    column, row = Tensor(np.ones((4, 1), dtype), True), Tensor(np.ones((1, 4), dtype), True)
    dc, dr = gradients(lambda: (column * row).sum(), column, row)
    assert (dc.shape, dc.dtype, dr.shape, dr.dtype) == ((4, 1), dtype, (1, 4), dtype)
    three = Tensor(np.ones(3, dtype), True)
    (d3,) = gradients(lambda: ops.broadcast_to(three, (4, 3)).sum(), three)
    assert (d3.tolist(), d3.dtype) == ([4, 4, 4], dtype)


def test_repeated_indices_add_up():
    """C04."""
    table = Tensor(np.zeros((5, 2)), requires_grad=True)
    (d,) = gradients(lambda: ops.take(table, np.array([3, 3, 3, 0, -2])).sum(), table)
    assert d[:, 0].tolist() == [1, 0, 0, 4, 0]  # -2 is row 3 as well
    x = Tensor(np.ones(1), requires_grad=True)
    (dx,) = gradients(lambda: x[np.array([0, 0])].sum(), x)
    assert dx.tolist() == [2]
    (dx,) = gradients(lambda: ops.gather_along(x, np.array([0, 0, -1])).sum(), x)
    assert dx.tolist() == [3]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_softmax_row_without_any_key_is_zero_and_so_is_its_gradient(dtype):
    """C08."""
    mask = np.array([[True, True], [False, False]])
    x = Tensor(np.array([[0, 0], [5, -5]], dtype), requires_grad=True)
    with Tape() as tape:
        y = ops.softmax(x, mask=mask)
    assert y.data.tolist() == [[0.5, 0.5], [0, 0]]
    dx = tape.run_backward([(y, np.array([[1, 3], [1, 3]], dtype))])[x]
    assert dx.tolist() == [[-0.5, 0.5], [0, 0]]
    masked = Tensor(np.array([[0, 0], [-np.inf, -np.inf]], dtype))
    assert ops.softmax(masked).data.tolist() == [[0.5, 0.5], [0, 0]]
    assert ops.logsumexp(masked, 1).data.tolist()[1] == -np.inf


def test_equal_elements_deviate_by_nothing_and_have_no_slope():
    x = Tensor(np.array([[0.1, 0.1, 0.1], [1.0, 2.0, 3.0]]), requires_grad=True)
    (dx,) = gradients(lambda: x[:, [0, 0, 0]].std(1), x)
    assert dx.tolist() == [[0.0] * 3] * 2


def test_equal_maxima_share_the_gradient():
    x = Tensor(np.array([1.0, 3.0, 3.0]), requires_grad=True)
    assert gradients(lambda: ops.max(x), x)[0].tolist() == [0, 0.5, 0.5]
    a, b = Tensor(np.array([1.0, 2.0]), True), Tensor(np.array([1.0, 5.0]), True)
    da, db = gradients(lambda: ops.maximum(a, b).sum(), a, b)
    assert (da.tolist(), db.tolist()) == ([0.5, 0], [0.5, 1])


def test_the_side_of_where_that_was_not_chosen_takes_nothing_not_even_nan():
    a, b = Tensor(np.ones(2), True), Tensor(np.ones(2), True)
    with Tape() as tape:
        y = ops.where(np.array([True, False]), a, b)
    grads = tape.run_backward([(y, np.array([np.inf, np.inf]))])
    assert (grads[a].tolist(), grads[b].tolist()) == ([np.inf, 0], [0, np.inf])


def test_clip_passes_the_gradient_on_its_borders():
    x = Tensor(np.array([-2.0, -1.0, 0.0, 1.0, 2.0]), requires_grad=True)
    assert gradients(lambda: ops.clip(x, -1.0, 1.0).sum(), x)[0].tolist() == [0, 1, 1, 1, 0]


def test_mixed_dtypes_give_each_input_its_own_dtype_back():
    for op in (ops.add, ops.sub, ops.mul, ops.div, ops.maximum, ops.pow, ops.matmul, lambda a, b: ops.linear(a, b)):
        a = Tensor(np.full((2, 2), 0.5, np.float32), requires_grad=True)
        b = Tensor(np.full((2, 2), 2.0), requires_grad=True)
        for left, right in ((a, b), (b, a)):
            dl, dr = gradients(lambda op=op, left=left, right=right: op(left, right).sum(), left, right)
            assert (dl.dtype, dr.dtype) == (left.dtype, right.dtype)
    dl, dr = gradients(lambda: ops.concat([a, b]).sum(), a, b)
    assert (dl.dtype, dr.dtype) == (np.float32, np.float64)


def test_numbers_do_not_promote():
    x = Tensor(np.ones((2, 2), np.float32), requires_grad=True)
    scale = np.float64(0.5)
    for y in (x * scale, scale * x, x + scale, scale - x, x / scale, scale / x, x**scale, ops.maximum(x, scale),
              ops.where(x.data > 0, x, 0.0), ops.clip(x, 0.0, 1.0)):  # fmt: skip
        assert y.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_low_precision_sums_and_products_are_formed_in_float32(dtype):
    x = Tensor(np.full((4096,), 1.0, dtype))  # in float16 the running sum would stop at 2048
    assert x.sum().item() == 4096
    assert Tensor(np.ones((4096, 2), dtype)).sum(0).data.tolist() == [4096, 4096]
    assert x.mean().item() == 1.0
    assert ops.matmul(x, x).item() == 4096
    assert ops.softmax(x).dtype == dtype
    far = Tensor(np.array([1000.0, 1001.0, 1002.0, 1003.0], dtype))
    assert ops.var(far).item() == 1.25


def test_sigmoid_keeps_the_digits_of_small_values_and_never_overflows():
    y = ops.sigmoid(Tensor(np.array([-800.0, -40.0, 0.0, 800.0]))).data
    np.testing.assert_allclose(y, [0, math.exp(-40), 0.5, 1], rtol=1e-15)


def test_erf_is_right_to_the_last_digit():
    x = np.concatenate([np.linspace(-7, 7, 20_001), [0.0, 1e-300, 0.46875, np.nextafter(0.46875, 0), 1e30, -1e30]])
    expected = np.array([math.erf(v) for v in x])
    assert np.abs(ops.erf(Tensor(x)).data - expected).max() <= 3e-16
    single = ops.erf(Tensor(x.astype(np.float32))).data
    assert single.dtype == np.float32
    assert np.abs(single - expected).max() < 4e-7
    assert np.isnan(ops.erf(Tensor(np.array([np.nan]))).data).all()


def test_views_are_not_copies():
    x = Tensor(normal(4, 6))
    for y in (x.reshape(24), x.T, x[1:3], *ops.split(x, 2, 1), ops.broadcast_to(x, (2, 4, 6)), ops.expand(x, 0)):
        assert np.shares_memory(y.data, x.data)
    assert x.astype(np.float64) is x


def test_arrays_on_the_left_ask_the_tensor():
    x = Tensor(np.ones(3), requires_grad=True)
    for y in (np.ones(3) + x, np.ones(3) - x, np.ones(3) * x, np.ones(3) / x, np.ones((2, 3)) @ x):
        assert isinstance(y, Tensor)


X23 = Tensor(np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: X23 + np.zeros((2, 4)), r"add: shapes \(2, 3\) and \(2, 4\) do not broadcast"),
        (lambda: X23 @ X23, r"matmul: shapes \(2, 3\) and \(2, 3\)"),
        (lambda: X23 @ Tensor(np.zeros(())), r"matmul: shapes \(2, 3\) and \(\)"),
        (lambda: X23.sum(2), r"sum: dim 2 of a tensor of shape \(2, 3\)"),
        (lambda: X23.sum((0, 0)), r"sum: dim \(0, 0\)"),
        (lambda: X23[:0].max(0), r"max over dims \(0,\) of a tensor of shape \(0, 3\)"),
        (lambda: X23.var(0, correction=2), "var: 2 elements less a correction of 2"),
        (lambda: X23.reshape(4), r"reshape: \(2, 3\) has 6 elements, \(4,\)"),
        (lambda: X23.reshape(-1, -1), "reshape"),
        (lambda: X23.transpose(0, 0), "transpose: dim"),
        (lambda: X23.transpose(1), "transpose: dims"),
        (lambda: ops.broadcast_to(X23, (3, 3)), "broadcast_to"),
        (lambda: ops.concat([X23, Tensor(np.zeros((2, 2)))]), "concat: shapes"),
        (lambda: ops.concat([]), "concat: no tensors"),
        (lambda: ops.split(X23, 2, 1), "not divisible by 2"),
        (lambda: ops.split(X23, (1, 1), 1), "do not add up"),
        (lambda: ops.squeeze(X23, 0), "squeeze"),
        (lambda: ops.pad(X23, [(1, 1)]), "pad: widths"),
        (lambda: X23[2], r"x\[...\] of a tensor of shape \(2, 3\)"),
        (lambda: X23[np.ones((2, 2), bool)], r"a mask of shape \(2, 2\) stands for dims of lengths \(2, 3\)"),
        (lambda: X23[np.ones((2, 3, 1), bool)], "there are 3 items for 2 dims"),
        (lambda: X23[..., [0], ...], "... stands there twice"),
        (lambda: X23[[0, 1], [0, 3]], "places from 0 to 3 along a dim of length 3"),
        (lambda: X23[[0], 1.0], "1.0 is no place"),
        (lambda: X23[True, [0]], "True is no place"),
        (lambda: ops.prod(X23, 2), r"prod: dim 2 of a tensor of shape \(2, 3\)"),
        (lambda: X23.std(0, correction=2), "std: 2 elements less a correction of 2"),
        (lambda: ops.cumsum(X23, 2), "cumsum: dim 2"),
        (lambda: ops.argmax(X23[:0], 0), r"argmax over dims \(0,\) of a tensor of shape \(0, 3\)"),
        (lambda: ops.less(X23, np.zeros((2, 4))), r"less: shapes \(2, 3\) and \(2, 4\) do not broadcast"),
        (lambda: ops.tile(X23, (2, -1)), r"tile: counts \(2, -1\)"),
        (lambda: ops.repeat(X23, -1, 0), "repeat: count -1"),
        (lambda: ops.roll(X23, 1, 2), "roll: dim 2"),
        (lambda: bool(X23), r"a tensor of shape \(2, 3\) is neither true nor false"),
        (lambda: ops.take(X23, np.array([0, 2])), "take: ids reach from 0 to 2"),
        (lambda: ops.take(X23, np.array([0.5])), "ids are integers"),
        (lambda: ops.gather_along(X23, np.zeros((3, 1), int)), "gather_along"),
        (lambda: ops.gather_along(X23, np.full((2, 1), 3)), "gather_along: ids reach from 3 to 3"),
        (lambda: ops.linear(X23, X23), "linear: x"),
        (lambda: ops.layer_norm(X23, Tensor(np.ones(2)), Tensor(np.ones(2))), "layer_norm: x"),
        (lambda: ops.softmax_cross_entropy(X23, np.zeros(3, int)), "softmax_cross_entropy: logits"),
        (lambda: ops.attention(Tensor(np.zeros((1, 2, 10))), 2), "attention: qkv"),
        (lambda: ops.dropout(X23, np.zeros(3, np.uint64), 0.5), "dropout: x"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_their_numbers(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


def test_a_target_outside_of_the_classes_is_told():
    for target in (3, -1):
        with pytest.raises(DataError, match=f"target {target}, but the logits have 3 classes"):
            ops.softmax_cross_entropy(X23, np.array([0, target]))

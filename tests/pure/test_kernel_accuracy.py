"""How far a kernel's results are from the formulas, computed in the next higher precision from the same arguments.

Every bound is written in units of eps, the distance of 1 from the next larger number, and follows from what a kernel
rounds: a few eps for what happens to one element, and for a sum of n terms some multiple of the root of its longest
chain of additions, since rounding errors have no common sign (Higham 2002, Accuracy and Stability of Numerical
Algorithms, section 2.8).  Compiled sums run in 16 lanes.  The references keep the same bounds, so a kernel and its
reference are never farther apart than their sum.
"""

import math

import numpy as np
import pytest
from kernel_calls import ADAMW, AMOUNT, IGNORE, WIDTHS, arguments, call

from mpitrain import kernels
from mpitrain.rng import uniform

HIGHER = {np.float32: np.float64, np.float64: np.longdouble}
PRECISIONS = pytest.mark.parametrize("dtype", HIGHER)


def chain(n):
    """Rounding errors of a sum of n terms, in eps of the sum of their sizes."""
    return 1 + math.sqrt(n / 16)


def higher(arrays):
    return [a.astype(HIGHER[a.dtype.type]) if a.dtype.kind == "f" else a for a in arrays]


def assert_within(results, exact, bounds, dtype):
    for i, (result, y, bound) in enumerate(zip(results, exact, bounds, strict=True)):
        assert result.dtype == dtype or result.ndim == 0
        error = np.abs(result.astype(HIGHER[dtype]) - y) / np.finfo(dtype).eps
        off = error > bound + np.finfo(dtype).smallest_normal
        assert not off.any(), f"result {i}: {(error / np.maximum(bound, 1e-300)).max():.3g} times the bound"


def assert_accurate(kernel, dtype, shapes):
    for rows, width in shapes:
        arrays = arguments(kernel, dtype, rows, width)
        formula = globals()[f"exact_{kernel}"]
        exact, bounds = formula(np.finfo(dtype).eps, *higher(arrays))
        assert_within(call(kernel, arrays), exact, bounds, dtype)


SHAPES = [*((3, width) for width in WIDTHS), (257, 5), (100, 64), (1, 100_003)]


# -------------------------------------------------------------------------------------------------------------- gelu


def exact_gelu_tanh(eps, x, bias):
    """The argument 2u of the exponential is rounded 4 times, which its exponential multiplies by its size.

    The gate has no subnormal numbers: below the smallest normal one it is 0.
    """
    z = (x + bias).astype(np.float32 if x.dtype == np.float64 else np.float64).astype(x.dtype)
    c = np.sqrt(2 / np.arctan(np.ones((), x.dtype)) / 4)
    u = 2 * c * (z + x.dtype.type("0.044715") * z**3)
    gate = 1 / (1 + np.exp(-u))
    y = z * gate
    du = 2 * c * (1 + 3 * x.dtype.type("0.044715") * z**2)
    slope = gate + y * (1 - gate) * du
    if kernels.level() == "numpy":  # 1 + tanh has lost what gate has below eps
        return [y, slope], [4 * np.abs(z), 4 + 8 * np.abs(z * du)]
    loss = 3 + 4 * np.abs(u) * (1 - gate)
    end = 4 * np.finfo(np.float32 if x.dtype == np.float64 else np.float64).smallest_normal / eps
    off = (loss + 3) * (gate + np.abs(y * (1 - gate) * du)) + 2 * np.abs(y * gate * du)
    return [y, slope], [loss * np.abs(y) + end * np.abs(z), off + end * np.abs(z * du)]


def exact_gelu_erf(eps, x, bias):
    """Phi is approximated: to 1e-7 in single precision, and there the bell's argument is rounded like any other."""
    z = (x + bias).astype(np.float32 if x.dtype == np.float64 else np.float64).astype(x.dtype)
    erf = np.vectorize(math.erf, otypes=[float])
    erfc = np.vectorize(math.erfc, otypes=[float])
    root = np.sqrt(x.dtype.type(0.5))
    gate = np.where(z < 0, 0.5 * erfc((-z * root).astype(float)), 0.5 + 0.5 * erf((z * root).astype(float)))
    bell = np.exp(-z * z / 2) * root / np.sqrt(4 * np.arctan(np.ones((), x.dtype)))
    error = 2 + 1e-7 / eps if x.dtype == np.float64 else 4
    return [z * gate, gate + z * bell], [error * np.abs(z), error + (4 + z * z) * np.abs(z * bell)]


@PRECISIONS
@pytest.mark.parametrize("kernel", ["gelu_tanh", "gelu_erf"])
def test_gelu(kernel, dtype, level):
    assert_accurate(kernel, dtype, SHAPES)


@PRECISIONS
@pytest.mark.parametrize("kernel", ["gelu_tanh", "gelu_erf"])
def test_gelu_from_end_to_end(kernel, dtype, level):
    x = np.concatenate([np.linspace(-40, 40, 20_001), np.linspace(-1e-3, 1e-3, 1001), np.geomspace(1e-30, 1e10, 999)])
    x = x[None].astype(dtype)
    bias = np.zeros(x.shape[1:], dtype)
    with np.errstate(over="ignore"):
        exact, bounds = globals()[f"exact_{kernel}"](np.finfo(dtype).eps, *higher([x, bias]))
        exact, bounds = [np.nan_to_num(a) for a in exact], [np.nan_to_num(a) for a in bounds]
    assert_within(getattr(kernels, kernel)(x, bias), exact, bounds, dtype)
    assert_within(getattr(kernels, kernel)(x, None), exact, bounds, dtype)


def grouped(rows):
    """Rounding errors of a sum over rows, which are summed in groups of 64, in eps of the sum of their sizes."""
    return 2 + math.sqrt(min(rows, 64)) + math.sqrt(rows / 64)


def exact_gelu_backward(eps, grad, slope):
    dx = grad * slope
    return [dx, dx.sum(0)], [np.abs(dx), grouped(len(dx)) * np.abs(dx).sum(0)]


@PRECISIONS
def test_gelu_backward(dtype, level):
    assert_accurate("gelu_backward", dtype, [*SHAPES, (64, 33), (65, 33), (129, 3)])
    grad, slope = arguments("gelu_backward", dtype, 9, 33)
    dx, db = kernels.gelu_backward(grad, slope, False)
    assert db is None
    assert np.array_equal(dx, grad * slope)


# -------------------------------------------------------------------------------------------------------- layer norm


def exact_layer_norm(eps, x, weight, bias):
    """All differences from the first element are rounded by eps of the largest, and so is the mean."""
    z = x - x[:, :1]
    size = np.abs(z).max(1, keepdims=True)
    mean = z.mean(1, keepdims=True)
    z = z - mean
    r = 1 / np.sqrt((z * z).mean(1, keepdims=True) + 1e-5)
    error = chain(x.shape[1]) * size  # of a difference from the mean
    loss = 2 + chain(x.shape[1]) + np.sqrt((z * z).mean(1, keepdims=True)) * r * r * error
    y = z * r * weight
    return [y + bias, mean, r], [
        (error * r + loss * np.abs(z * r)) * np.abs(weight) + np.abs(y) + np.abs(bias),
        error,
        loss * r,
    ]


def exact_layer_norm_backward(eps, grad, x, center, rstd, weight, extra):
    rows, width = x.shape
    z = (x - x[:, :1]) - center
    n, h = z * rstd, grad * weight
    shift = (np.abs(x - x[:, :1]) + np.abs(center) + np.abs(z)) * rstd  # n is off by eps times this at most
    mean_h, mean_hn = h.mean(1, keepdims=True), (h * n).mean(1, keepdims=True)
    size_h, size_hn = np.abs(h).mean(1, keepdims=True), (np.abs(h) * shift).mean(1, keepdims=True)
    off = np.abs(h) + (2 + chain(width)) * (size_h + np.abs(n) * size_hn) + shift * np.abs(mean_hn)
    dx = rstd * (h - mean_h - n * mean_hn)
    sums = grouped(rows)
    return [dx + extra, (grad * n).sum(0), grad.sum(0)], [
        2 * (rstd * off + np.abs(extra)) + np.abs(dx),
        sums * (np.abs(grad) * shift).sum(0),
        sums * np.abs(grad).sum(0),
    ]


@PRECISIONS
@pytest.mark.parametrize("kernel", ["layer_norm", "layer_norm_backward"])
def test_layer_norm(kernel, dtype, level):
    assert_accurate(kernel, dtype, [*SHAPES, (64, 33), (65, 33), (129, 3)])


@PRECISIONS
def test_layer_norm_backward_without_a_gradient_from_elsewhere(dtype, level):
    *arrays, extra = arguments("layer_norm_backward", dtype, 5, 33)
    plain = kernels.layer_norm_backward(*arrays)
    summed = kernels.layer_norm_backward(*arrays, extra)
    assert np.array_equal(plain[0] + extra, summed[0])
    assert all(map(np.array_equal, plain[1:], summed[1:]))


# ----------------------------------------------------------------------------------------- RMS norm, SwiGLU, rotary


def exact_rms_norm(eps, x, weight):
    """The root halves the error of the mean square."""
    r = 1 / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)
    loss = 2 + chain(x.shape[1]) / 2
    y = x * r * weight
    return [y, r], [(loss + 1) * np.abs(y), loss * r]


def exact_rms_norm_backward(eps, grad, x, rstd, weight, extra):
    rows, width = x.shape
    n, h = x * rstd, grad * weight
    mean, size = (h * n).mean(1, keepdims=True), np.abs(h * n).mean(1, keepdims=True)
    dx = rstd * (h - n * mean)
    off = np.abs(h) + (3 + chain(width)) * np.abs(n) * size
    return [dx + extra, (grad * n).sum(0)], [
        2 * rstd * off + np.abs(extra),
        (grouped(rows) + 1) * np.abs(grad * n).sum(0),
    ]


def exact_swiglu(eps, gate, up):
    """The exponential is good to 2 eps, of which 1 - s shows in s; where s would be subnormal it is 0."""
    s = 1 / (1 + np.exp(-gate))
    y = gate * s * up
    end = 4 * np.finfo(np.float32 if gate.dtype == np.float64 else np.float64).smallest_normal / eps
    return [y], [(2.5 + 2 * (1 - s)) * np.abs(y) + end * np.abs(gate * up)]


def exact_swiglu_backward(eps, grad, gate, up):
    """1 - s is off by an eps of s and of itself, which the gate multiplies."""
    s = 1 / (1 + np.exp(-gate))
    slope, size = s * (1 + gate * (1 - s)), np.abs(s * gate) * (1 + 2 * s * (1 - s))
    end = 4 * np.finfo(np.float32 if gate.dtype == np.float64 else np.float64).smallest_normal / eps
    return [grad * up * slope, grad * gate * s], [
        np.abs(grad * up) * (5 * np.abs(slope) + size + s + end * (1 + np.abs(gate))),
        (2.5 + 2 * (1 - s)) * np.abs(grad * gate * s) + end * np.abs(grad * gate),
    ]


def exact_rotary(eps, x, cos, sin):
    """Of two terms one product is rounded, or both, and their sum."""
    heads = x.reshape(len(x), 4, 2, -1)
    (first, second), (c, s) = (heads[:, :3, i] for i in (0, 1)), (cos[:, None], sin[:, None])
    y, bound = heads.copy(), np.zeros_like(heads)
    y[:, :3, 0], y[:, :3, 1] = first * c - second * s, second * c + first * s
    bound[:, :3, 0] = np.abs(first * c) + np.abs(second * s)
    bound[:, :3, 1] = np.abs(second * c) + np.abs(first * s)
    return [y.reshape(x.shape)], [bound.reshape(x.shape)]


LLAMA = ["rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward", "rotary"]  # packing is rotary's, to the bit


@PRECISIONS
@pytest.mark.parametrize("kernel", LLAMA)
def test_what_llama_has(kernel, dtype, level):
    shapes = [*SHAPES, (64, 33), (65, 33), (129, 3)]
    assert_accurate(kernel, dtype, [(r, w) for r, w in shapes if kernel != "rotary" or w < 1000])


@PRECISIONS
def test_rms_norm_backward_without_a_gradient_from_elsewhere(dtype, level):
    *arrays, extra = arguments("rms_norm_backward", dtype, 5, 33)
    plain, summed = kernels.rms_norm_backward(*arrays), kernels.rms_norm_backward(*arrays, extra)
    np.testing.assert_allclose(plain[0] + extra, summed[0], rtol=0, atol=4 * np.finfo(dtype).eps * np.abs(extra).max())
    assert np.array_equal(plain[1], summed[1])


@PRECISIONS
def test_swiglu_from_end_to_end(dtype, level):
    x = np.concatenate([np.linspace(-90, 90, 20_001), np.linspace(-1e-3, 1e-3, 1001), np.geomspace(1e-30, 1e10, 999)])
    gate, up = x[None].astype(dtype), np.full((1, x.size), 0.75, dtype)
    for kernel, arrays in ((kernels.swiglu, (gate, up)), (kernels.swiglu_backward, (up, gate, up))):
        exact, bounds = globals()[f"exact_{kernel.__name__}"](np.finfo(dtype).eps, *higher(arrays))
        results = kernel(*arrays)
        assert_within(results if isinstance(results, tuple) else [results], exact, bounds, dtype)


# ------------------------------------------------------------------------------------------- softmax and cross-entropy


def exact_softmax(eps, x):
    """The argument of an exponential is rounded by eps/2 of its size; the exponential is good to 2 eps.

    In a sum of exponentials the smallest, which do not reach the last place of the running sum, are all lost.
    """
    d = x.max(1, keepdims=True) - x
    p = np.exp(-d)
    p /= p.sum(1, keepdims=True)
    return [p], [p * (5 + d + (p * d).sum(1, keepdims=True) + 1.5 * chain(x.shape[1]))]


def exact_softmax_backward(eps, grad, y):
    gp = grad * y
    total, size = gp.sum(1, keepdims=True), np.abs(gp).sum(1, keepdims=True)
    return [y * (grad - total)], [2 * np.abs(gp) + y * (2 * np.abs(total) + (1 + chain(y.shape[1])) * size)]


def exact_cross_entropy(eps, logits, targets):
    peak = logits.max(1, keepdims=True)
    e = np.exp(logits - peak)
    total = e.sum(1)
    lse = np.log(total) + peak[:, 0]
    spread = (e / total[:, None] * (peak - logits)).sum(1)
    off = 4 + 1.5 * chain(logits.shape[1]) + spread + np.abs(lse) + np.log(total)
    counts = targets != IGNORE
    picked = np.where(targets >= 0, logits[np.arange(len(targets)), np.maximum(targets, 0)], 0)
    loss = np.where(counts, lse - picked, 0)
    return [loss.sum(), lse], [np.where(counts, off + np.abs(loss), 0).sum() + np.abs(loss.sum()), off]


def exact_cross_entropy_backward(eps, logits, targets, lse):
    d = logits - lse[:, None]
    p = np.exp(d)
    hot = np.arange(logits.shape[1]) == targets[:, None]
    scale = np.where(targets == IGNORE, 0, logits.dtype.type(np.float32(0.7) if eps > 1e-10 else np.float64(0.7)))
    scale = scale[:, None]
    return [scale * (p - hot)], [scale * (p * (4 + np.abs(d)) + hot)]


@PRECISIONS
@pytest.mark.parametrize("kernel", ["softmax", "softmax_backward", "cross_entropy", "cross_entropy_backward"])
def test_softmax_and_cross_entropy(kernel, dtype, level):
    assert_accurate(kernel, dtype, SHAPES)


@PRECISIONS
def test_the_exponential_is_right_to_two_units_in_the_last_place_down_to_its_end(dtype, level):
    """Seen through a softmax whose sum is 1: the other logits are too far down to count."""
    highest, lowest = (32, 86.9) if dtype is np.float32 else (60, 707.5)
    x = -np.linspace(highest, lowest, 100_003).astype(dtype)
    y = kernels.softmax(np.concatenate([[0], x]).astype(dtype)[None], -1, None)[0]
    assert y[0] == 1
    exact = np.exp(x.astype(HIGHER[dtype]))
    assert (np.abs(y[1:] - exact) / (exact * np.finfo(dtype).eps)).max() <= 2
    beyond = kernels.softmax(np.array([[0, -1e4, -np.inf]], dtype), -1, None)
    assert beyond.tolist() == [[1, 0, 0]]


@PRECISIONS
def test_cross_entropy_sums_many_rows_without_drift(dtype, level):
    """The total is a float64 that is rounded once: a running sum of that precision is off by n/2 eps at most."""
    logits = np.tile(np.array([[0.1, 0.2, 0.7]], dtype), (300_000, 1))
    total, lse = kernels.cross_entropy(logits, np.zeros(300_000, int), IGNORE)
    each = float(lse[0]) - float(logits[0, 0])
    assert float(total) == pytest.approx(300_000 * each, rel=max(float(np.finfo(dtype).eps), 300_000 * 2.0**-53))


# -------------------------------------------------------------------------------------------------------- experts


def exact_combine(eps, out, gates, places):
    """Of two terms each product is rounded, and their sum."""
    y, size = (np.zeros((len(places), out.shape[1]), out.dtype) for _ in range(2))
    for i, j in np.argwhere(places >= 0):
        y[i] += gates[i, j] * out[places[i, j]]
        size[i] += np.abs(gates[i, j] * out[places[i, j]])
    return [y], [size]


def exact_combine_backward(eps, grad, out, gates, places):
    d_out, d_gates, size = np.zeros_like(out), np.zeros_like(gates), np.zeros_like(gates)
    for i, j in np.argwhere(places >= 0):
        d_out[places[i, j]] = gates[i, j] * grad[i]
        d_gates[i, j] = grad[i] @ out[places[i, j]]
        size[i, j] = np.abs(grad[i]) @ np.abs(out[places[i, j]])
    return [d_out, d_gates], [np.abs(d_out) / 2, chain(out.shape[1]) * size]


def exact_jitter(eps, x, rows):
    """The factor is rounded to x's precision on the way and at the end, and so is the product."""
    y = x * (1 + AMOUNT * (2 * uniform(rows, x.shape[-1]).astype(x.dtype) - 1))
    return [y], [2 * np.abs(y)]


@PRECISIONS
@pytest.mark.parametrize("kernel", ["combine", "combine_backward", "jitter"])
def test_experts(kernel, dtype, level):
    assert_accurate(kernel, dtype, [(rows, width) for rows, width in SHAPES if width < 1000])


# ----------------------------------------------------------------------------------------------- sums and updates


def exact_row_sum(eps, out, ids, rows):
    total, size, counts = out.copy(), np.abs(out), np.zeros(len(out), int)
    np.add.at(total, ids, rows)
    np.add.at(size, ids, np.abs(rows))
    np.add.at(counts, ids, 1)
    return [total], [size * (1 + np.sqrt(counts)[:, None]) / 2]


def exact_sum_of_squares(eps, x):
    """Always summed in float64."""
    total = (x * x).sum()
    return [total], [total * 2 * chain(x.size) * (2.0**-52 / eps)]


def exact_adamw(eps, p, m, v, g):
    """Each moment is the rounded sum of two rounded products with rounded factors."""
    t, lr, beta1, beta2 = ADAMW["update"], ADAMW["lr"], ADAMW["beta1"], ADAMW["beta2"]
    new_m, new_v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    off_m = 2 * (beta1 * np.abs(m) + (1 - beta1) * np.abs(g))
    down = np.sqrt(new_v / (1 - beta2**t)) + ADAMW["eps"]
    rate = lr / (1 - beta1**t)
    new_p = p * (1 - lr * ADAMW["weight_decay"]) - rate * new_m / down
    off_p = 1.5 * np.abs(p) + rate * (off_m + 7 * np.abs(new_m)) / down
    return [new_p, new_m, new_v], [off_p, off_m, 3 * new_v]


@PRECISIONS
@pytest.mark.parametrize("kernel", ["row_sum", "sum_of_squares", "adamw"])
def test_sums_and_updates(kernel, dtype, level):
    assert_accurate(kernel, dtype, SHAPES)


def updates(p, m, v, count):
    rng = np.random.default_rng(8)
    for t in range(1, count + 1):
        g = rng.standard_normal(p.size)
        kernels.adamw(p, g.astype(p.dtype), m, v, update=t, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
    return p


def test_a_thousand_updates_in_single_precision_follow_double(level):
    """Each update rounds the weight once, and its step by a few eps: 1000 such errors without a common sign."""
    start = np.random.default_rng(7).standard_normal(67)
    fine = updates(start.copy(), np.zeros(67), np.zeros(67), 1000)
    coarse = updates(start.astype(np.float32), np.zeros(67, np.float32), np.zeros(67, np.float32), 1000)
    assert np.abs(coarse - fine).max() <= 4 * math.sqrt(1000) * 2.0**-24 * np.abs(start).max()


def test_two_hundred_updates_are_those_of_pytorch(level):
    torch = pytest.importorskip("torch")
    start = np.random.default_rng(7).standard_normal(67)
    p = updates(start.copy(), np.zeros(67), np.zeros(67), 200)
    twin = torch.nn.Parameter(torch.tensor(start))
    method = torch.optim.AdamW([twin], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    rng = np.random.default_rng(8)
    for _ in range(200):
        twin.grad = torch.tensor(rng.standard_normal(67))
        method.step()
    assert np.abs(twin.detach().numpy() - p).max() < 1e-13

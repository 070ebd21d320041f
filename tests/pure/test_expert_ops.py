"""Tokens on their way to experts and back: values and gradients, and groups without rows."""

import math

import numpy as np
import pytest
from expert_calls import layer, normal, numbers, routed
from half_calls import BFLOAT16, HALVES, assert_rounded, values
from kernel_calls import hashes
from op_calls import BOTH_ENDS, assert_same, run

from mpitrain import kernels
from mpitrain.autograd import Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.autograd.ops import experts
from mpitrain.errors import ShapeError
from mpitrain.rng import uniform

RNG = np.random.default_rng(7)
COUNTS = [(3, 0, 4, 1), (0, 0, 8, 0), (2, 2, 2, 2), (0, 0, 0, 0), (5,), ()]
PLACES = np.array([[[2, 0], [-1, 4]], [[-1, -1], [3, -1]], [[6, 1], [-1, -1]]])  # nobody has row 5


@pytest.fixture(autouse=True, params=BOTH_ENDS)
def level(request):
    kernels.select(request.param)
    return request.param


# ------------------------------------------------------------------------------------------ each op and its formula


def picked(x, rows):
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return np.stack([flat[i] for i in rows]) if len(rows) else flat[:0]


def multiplied(x, w, counts):
    """Row by row."""
    group = [j for j, count in enumerate(counts) for _ in range(count)]
    return np.stack([x[i] @ w[j] for i, j in enumerate(group)]) if group else np.zeros((0, w.shape[2]))


def combined(out, gates, places):
    y = np.zeros((*places.shape[:-1], out.shape[1]))
    for at in np.ndindex(places.shape):
        if places[at] >= 0:
            y[at[:-1]] += gates[at] * out[places[at]]
    return y


@pytest.mark.parametrize("rows", [[4, 0, 4, 5, 4], [2], [], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("shape", [(2, 3, 5), (6, 1), (6, 0)])
def test_rows_are_taken_by_number_and_repeated_ones_add_their_gradients(shape, rows):
    x, rows = normal(*shape), np.array(rows, np.int64)
    seed = normal(len(rows), shape[-1])
    y, (dx,) = run(lambda t: ops.take_rows(t, rows), x, seed=seed)
    assert (y == picked(x, rows)).all()
    expected = np.zeros((6, shape[-1]))
    np.add.at(expected, rows, seed)
    np.testing.assert_allclose(dx, expected.reshape(shape), rtol=1e-14)


@pytest.mark.parametrize("n", [0, 1, 7])
def test_rows_go_to_their_places_and_gradients_come_back_from_them(n):
    x, order, seed = normal(n, 3), np.random.default_rng(n).permutation(n), normal(n, 3)
    y, (dx,) = run(lambda t: ops.permute_rows(t, order), x, seed=seed)
    assert (y == x[order]).all()
    assert (dx[order] == seed).all()
    back = np.argsort(order)
    assert (ops.permute_rows(ops.permute_rows(Tensor(x), order), back).data == x).all()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("a", "b"), [(5, 3), (1, 1), (0, 2), (2, 0)])
def test_each_group_meets_its_own_matrix(counts, a, b):
    x, w = normal(sum(counts), a), normal(len(counts), a, b)
    y, (dx, dw) = run(lambda x, w: ops.grouped_matmul(x, w, counts), x, w, seed=np.ones((sum(counts), b)))
    np.testing.assert_allclose(y, multiplied(x, w, counts), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(
        dx, multiplied(np.ones((sum(counts), b)), w.swapaxes(1, 2), counts), rtol=1e-12, atol=1e-14
    )
    ends = np.cumsum(counts)
    for j, count in enumerate(counts):
        rows = x[ends[j] - count : ends[j]]
        np.testing.assert_allclose(dw[j], rows.sum(0)[:, None] * np.ones(b), rtol=1e-12, atol=1e-14)
        assert count or not dw[j].any()


def test_what_experts_gave_is_weighted_and_what_nobody_has_gets_no_gradient():
    out, gates, seed = normal(7, 4), normal(3, 2, 2), normal(3, 2, 4)
    y, (d_out, d_gates) = run(lambda o, g: ops.combine(o, g, PLACES), out, gates, seed=seed)
    np.testing.assert_allclose(y, combined(out, gates, PLACES), rtol=1e-14)
    assert not y[1, 0].any()
    assert not y[2, 1].any()
    for at in np.ndindex(PLACES.shape):
        if PLACES[at] < 0:
            assert d_gates[at] == 0
        else:
            np.testing.assert_allclose(d_gates[at], seed[at[:-1]] @ out[PLACES[at]], rtol=1e-13)
            np.testing.assert_allclose(d_out[PLACES[at]], gates[at] * seed[at[:-1]], rtol=1e-14)
    assert not d_out[5].any()


@pytest.mark.parametrize(("tokens", "choices", "n", "width"), [(3, 2, 0, 4), (0, 2, 3, 4), (3, 0, 2, 4), (3, 1, 2, 0)])
def test_nothing_is_combined_to_zero(tokens, choices, n, width):
    places = np.full((tokens, choices), -1)
    arrays = normal(n, width), normal(tokens, choices)
    y, (d_out, d_gates) = run(lambda o, g: ops.combine(o, g, places), *arrays, seed=np.ones((tokens, width)))
    assert y.shape == (tokens, width)
    assert not y.any()
    assert not d_out.any()
    assert not d_gates.any()


@pytest.mark.parametrize("renormalize", [False, True])
def test_gates_are_the_chosen_probabilities_or_their_shares(renormalize):
    p, ids = RNG.uniform(0.1, 1, (2, 3, 5)), np.argsort(normal(2, 3, 5), -1)[..., :2]
    g = ops.gates(Tensor(p), ids, renormalize).data
    for at in np.ndindex(2, 3):
        chosen = p[at][ids[at]]
        np.testing.assert_allclose(g[at], chosen / chosen.sum() if renormalize else chosen, rtol=1e-14)
    assert ops.gates(Tensor(p[:0]), ids[:0], renormalize).shape == (0, 3, 2)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_jitter_is_uniform_around_one_and_the_same_again(dtype):
    rows = hashes(40, 25)
    y, (dx,) = run(lambda x: ops.jitter(x, rows, 0.25), np.ones((40, 25, 8), dtype), seed=np.ones((40, 25, 8), dtype))
    assert (y == dx).all()
    np.testing.assert_allclose(y, 0.75 + 0.5 * uniform(rows, 8), rtol=2 * np.finfo(dtype).eps)
    assert y.min() >= 0.75
    assert y.max() <= 1.25
    assert abs(float(y.astype(float).mean()) - 1) < 4 * 0.25 / math.sqrt(3 * y.size)
    part = ops.jitter(Tensor(np.ones((7, 25, 8), dtype)), rows[3:10], 0.25).data
    assert (part == y[3:10]).all()
    x = Tensor(normal(2, 3))
    assert ops.jitter(x, hashes(2), 0.0) is x


# --------------------------------------------------------------------------------------------------------- gradients


def test_gradients_equal_finite_differences():
    rows, order, ids = np.array([4, 0, 4, 5, 1]), np.array([3, 0, 2, 1]), np.array([[1, 4], [0, 2], [3, 0]])
    check(lambda x: ops.take_rows(x, rows), normal(2, 3, 4))
    check(lambda x: ops.permute_rows(x, order), normal(4, 3))
    for counts in COUNTS:
        check(
            lambda x, w, counts=counts: ops.grouped_matmul(x, w, counts),
            normal(sum(counts), 3),
            normal(len(counts), 3, 2),
        )
    check(lambda out, gates: ops.combine(out, gates, PLACES), normal(7, 3), normal(3, 2, 2))
    check(lambda p: ops.gates(p, ids), RNG.uniform(0.2, 1, (3, 5)))
    check(lambda p: ops.gates(p, ids, True), RNG.uniform(0.2, 1, (3, 5)))
    check(lambda p: ops.gates(p, np.array([[1, 1, 0]] * 3), True), RNG.uniform(0.2, 1, (3, 5)))
    check(lambda x: ops.jitter(x, hashes(2, 3), 0.5), normal(2, 3, 4))


@pytest.mark.parametrize("dropped", [0.3, 0.0, 1.0])
@pytest.mark.parametrize(("choices", "renormalize"), [(1, False), (2, True), (3, False)])
def test_a_layer_of_experts_equals_that_of_pytorch(choices, renormalize, dropped):
    torch = pytest.importorskip("torch")
    arrays = numbers((2, 7), 4, 6)
    ids, rows, counts, places = routed((2, 7), 4, choices, dropped)
    seed = normal(2, 7, 6)
    mine = run(lambda *t: layer(*t, ids, rows, counts, places, renormalize), *arrays, seed=seed)
    x, p, up, down = twins = [torch.tensor(a, requires_grad=True) for a in arrays]
    chosen = torch.gather(p, -1, torch.tensor(ids))
    gates = chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen
    y = torch.zeros(2, 7, 6, dtype=torch.float64)
    for i, j in np.ndindex(2, 7):  # token by token: what each of its experts makes of it
        for k in range(choices):
            if places[i, j, k] >= 0:
                e = ids[i, j, k]
                y[i, j] = y[i, j] + gates[i, j, k] * (
                    torch.nn.functional.gelu(x[i, j] @ up[e], approximate="tanh") @ down[e]
                )
    grads = torch.autograd.grad(y, twins, torch.tensor(seed), allow_unused=True) if dropped < 1 else [None] * 4
    zero = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(twins, grads, strict=True)]
    assert_same(mine, (y.detach().numpy(), [grad.numpy() for grad in zero]), 1e-11)


@HALVES
def test_halves_are_worked_out_in_single_and_rounded_once(half):
    x, w, out, gates = (normal(*shape).astype(half) for shape in ((8, 40), (4, 40, 30), (7, 40), (3, 2, 2)))
    gates = gates.astype(np.float32)
    rows, counts = np.array([3] * 40 + [7]), (3, 0, 4, 1)
    for function, arrays in (
        (lambda x: ops.take_rows(x, rows), (x,)),
        (lambda x: ops.permute_rows(x, np.arange(8)[::-1]), (x,)),
        (lambda x, w: ops.grouped_matmul(x, w, counts), (x, w)),
        (lambda o, g: ops.combine(o, g, PLACES), (out, gates)),
        (lambda p: ops.gates(p, np.array([[3, 1]] * 8)), (abs(x),)),
        (lambda x: ops.jitter(x, hashes(8), 0.3), (x,)),
    ):
        exact = [values(a, np.float64) for a in arrays]
        seed = normal(*function(*map(Tensor, exact)).shape).astype(half)
        y, grads = run(function, *arrays, seed=seed)
        z, others = run(function, *exact, seed=values(seed, np.float64))
        for mine, right, array in zip((y, *grads), (z, *others), (x, *arrays), strict=True):
            assert mine.dtype == array.dtype
            error = 3e-6 * np.abs(right).max()
            if mine.dtype == half:
                assert_rounded(mine, right, error)
            else:
                assert np.abs(mine - right).max() <= error


@HALVES
def test_shares_of_halves_are_rounded_once(half):
    p, ids = RNG.uniform(0.1, 1, (8, 5)).astype(half), np.array([[3, 1, 0]] * 8)
    y, (dp,) = run(lambda p: ops.gates(p, ids, True), p, seed=np.ones((8, 3), half))
    chosen = values(p, np.float64)[:, [3, 1, 0]]
    assert_rounded(y, chosen / chosen.sum(1, keepdims=True), 1e-6)
    assert dp.dtype == half


def test_what_they_say_of_linearity_is_so():
    rows, ids, counts = np.array([2, 2, 0]), np.array([[1, 0], [2, 1], [0, 2]]), (1, 2)
    places = np.array([[0, 2], [1, -1]])
    calls = {
        experts.Gates: (lambda p: ops.gates(p, ids), [(3, 4)]),
        experts.NormalizedGates: (lambda p: ops.gates(p, ids, True), [(3, 4)]),
        experts.TakeRows: (lambda x: ops.take_rows(x, rows), [(3, 4)]),
        experts.PermuteRows: (lambda x: ops.permute_rows(x, np.array([1, 2, 0])), [(3, 4)]),
        experts.GroupedMatmul: (lambda x, w: ops.grouped_matmul(x, w, counts), [(3, 4), (2, 4, 2)]),
        experts.Combine: (lambda out, gates: ops.combine(out, gates, places), [(3, 4), (2, 2)]),
        experts.Jitter: (lambda x: ops.jitter(x, hashes(3), 0.4), [(3, 4)]),
    }
    for function, (call, shapes) in calls.items():
        arrays = [RNG.uniform(0.5, 1, shape) for shape in shapes]
        for i, x in enumerate(arrays):
            first = RNG.uniform(0.1, 0.4, x.shape)
            parts = [
                call(*(Tensor(part if i == j else a) for j, a in enumerate(arrays))).data for part in (first, x - first)
            ]
            is_linear = np.allclose(sum(parts), call(*map(Tensor, arrays)).data, rtol=1e-12)
            assert is_linear == (i in function.linear or (function.bilinear and i < 2)), (function, i)


@HALVES
def test_a_half_among_singles_is_single_and_its_gradient_half(half):
    x, w = normal(3, 4), normal(2, 4, 5).astype(np.float32)
    y, (dx, dw) = run(lambda x, w: ops.grouped_matmul(x, w, (1, 2)), x.astype(half), w)
    assert (y.dtype, dx.dtype, dw.dtype) == (np.float32, half, np.float32)
    np.testing.assert_allclose(y, multiplied(values(x.astype(half), np.float64), w, (1, 2)), rtol=1e-5, atol=1e-6)
    y, grads = run(lambda out, g: ops.combine(out, g, PLACES), normal(7, 4).astype(np.float32), normal(3, 2, 2))
    assert (y.dtype, *(grad.dtype for grad in grads)) == (np.float32, np.float32, np.float64)


# ------------------------------------------------------------------------------------------------------------ mistakes


def test_what_does_not_go_together_is_refused():
    x, w, p = Tensor(normal(6, 3)), Tensor(normal(2, 3, 4)), Tensor(normal(2, 5))
    out, gates, places = Tensor(normal(4, 3)), Tensor(normal(2, 2)), np.array([[0, 1], [2, -1]])
    for call, match in (
        (lambda: ops.take_rows(x, np.array([0, 6])), "take_rows: rows reach from 0 to 6, but there are 6"),
        (lambda: ops.take_rows(x, np.array([-1])), "from -1"),
        (lambda: ops.take_rows(x, np.array([[0]])), r"rows are \(n,\)"),
        (lambda: ops.take_rows(x, np.array([0.0])), "integers, these are float64"),
        (lambda: ops.permute_rows(x, np.array([0, 1, 2, 3, 4, 4])), "4 comes 2 times"),
        (lambda: ops.permute_rows(x, np.array([0, 1])), "order"),
        (lambda: ops.grouped_matmul(x, w, (3, 4)), r"counts of rows \(3, 4\)"),
        (lambda: ops.grouped_matmul(x, w, (7, -1)), "counts of rows"),
        (lambda: ops.grouped_matmul(x, w, (6,)), "counts of rows"),
        (lambda: ops.grouped_matmul(Tensor(normal(6, 4)), w, (3, 3)), "do not go together"),
        (lambda: ops.combine(out, gates, np.array([[0, 1], [2, 4]])), "places reach from 0 to 4"),
        (lambda: ops.combine(out, gates, np.array([[0, 1], [2, -2]])), "from -2"),
        (lambda: ops.combine(out, gates, np.array([[0, 1], [1, -1]])), "1 comes 2 times"),
        (lambda: ops.combine(out, gates, places[:1]), "combine: out"),
        (lambda: ops.gates(p, np.array([[0], [5]])), "gates: ids reach from 0 to 5"),
        (lambda: ops.gates(p, np.array([[0]])), "do not go together"),
        (lambda: ops.jitter(x, hashes(5), 0.1), r"wants rows \(6,\)"),
    ):
        with pytest.raises(ShapeError, match=match):
            call()


def test_the_two_kinds_of_halves_do_not_go_together():
    with pytest.raises(ShapeError, match=r"float16 .* bfloat16"):
        ops.grouped_matmul(Tensor(np.ones((2, 3), np.float16)), Tensor(np.ones((1, 3, 2), BFLOAT16)), (2,))

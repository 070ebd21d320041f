"""Adafactor on one rank: golden vectors, PyTorch's numbers, the formulas as they are written, and tiny gradients."""

import math

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.kernels import blocks
from mpitrain.nn.init import normal
from mpitrain.nn.materialize import materialize
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import Adafactor, Group
from mpitrain.optim.adafactor import Hyper, alone, update
from mpitrain.optim.clip import clip
from mpitrain.spec import Shard

AXES = ("pp", "edp", "ep", "cp", "tp")
SHAPES = {
    "w": (5, 7), "b": (7,), "one": (1,), "w11": (1, 1), "row": (1, 4), "scalar": (), "w3": (3, 4, 2), "w4": (2, 1, 3, 5)
}  # fmt: skip


def parameters(dtype=np.float64, shapes=SHAPES, scale=0.3):
    """Parameters in flat buffers; the weights named w decay, the others do not."""
    made = [Parameter(name, shape, init=normal(scale), decay=name.startswith("w")) for name, shape in shapes.items()]
    materialize(made, dict.fromkeys(AXES, 0), dict.fromkeys(AXES, 1), 0, np.dtype(dtype))
    return made


def give_gradients(made, step, scale=1.0):
    generator = np.random.default_rng(step)
    for p in made:
        p.grad[...] = scale * generator.normal(size=p.grad.shape)
        p.touched = True


def one_step(x, g, state, t, **hyper):
    alone(update(x, np.asarray(g, x.dtype), state, Hyper(t, **hyper), x.shape))
    return x


def factors(x):
    return {"row_sums": np.zeros_like(x[..., 0]), "column_sums": np.zeros_like(x[..., 0, :])}


# ------------------------------------------------------------------------------------------------- the right numbers


def test_the_golden_matrix():
    """T25.1 to T25.3."""
    x = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    state = factors(x)
    wanted = [
        [[0.09759188, 0.20368751, 0.29555965], [0.40410730, 0.49606911, 0.60378674]],
        [[0.09215831, 0.20368751, 0.29747658], [0.40273275, 0.49485324, 0.60281688]],
        [[0.09457967, 0.20130669, 0.29519328], [0.39763742, 0.49986326, 0.59801208]],
    ]
    gradients = [[[1, -2, 3], [-4, 5, -6]], [[2, 0, -1], [1, 1, 1]], [[-1, 1, 1], [10, -10, 10]]]
    for t, (g, expected) in enumerate(zip(gradients, wanted, strict=True), 1):
        one_step(x, np.array(g) * 1e-3, state, t)
        assert np.abs(x - expected).max() < 5.1e-9, t
        if t == 1:
            assert state["row_sums"] == pytest.approx([1.4e-5, 7.7e-5], rel=1e-12)
            assert state["column_sums"] == pytest.approx([1.7e-5, 2.9e-5, 4.5e-5], rel=1e-12)


def test_the_sums_that_a_golden_update_asks_for():
    """T25.1, T25.3: alpha, and the root mean square of U before and above clipping."""
    x = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    state = factors(x)
    norms = []
    for t, g in enumerate([[[1, -2, 3], [-4, 5, -6]], [[2, 0, -1], [1, 1, 1]], [[-1, 1, 1], [10, -10, 10]]], 1):
        course = update(x, np.array(g) * 1e-3, state, Hyper(t), x.shape)
        first = next(course)
        if t == 1:
            assert 1e-2 * math.sqrt(first["tensor"] / 6) == pytest.approx(0.00389444048, abs=5e-12)
        norms.append(math.sqrt(course.send(first)["tensor"] / 6))
        with pytest.raises(StopIteration):
            course.send({"tensor": np.asarray(6 * norms[-1] ** 2)})
    assert norms == pytest.approx([0.970864516, 0.641183494, 1.12845805], abs=5e-9)


def test_the_golden_vector():
    """T25.4."""
    x, state = np.array([0.1, -0.2]), {"second_moment": np.zeros(2)}
    one_step(x, [1e-3, 2e-3], state, 1)
    assert x == pytest.approx([0.09841886, -0.20158114], abs=5.1e-9)
    one_step(x, [3e-3, -1e-3], state, 2)
    assert x == pytest.approx([0.09643067, -0.20054229], abs=5.1e-9)


def test_a_square_of_rank_one_is_met_exactly():
    """T25.5: then the factors are the second moment, and every direction is a sign."""
    a, b = np.array([0.5, 2.0, 3.0]), np.array([1.0, 4.0])
    x = np.ones((3, 2))
    signs = np.array([[1, -1], [-1, 1], [1, 1]])
    one_step(x, signs * np.outer(a, b), factors(x), 1)
    assert np.abs(x - (1 - 1e-2 * signs)).max() < 1e-15


def literal(x, g, state, t, lr=1e-2, beta1=0.0, eps1=1e-30, eps2=1e-3, d=1.0, power=0.8, weight_decay=0.0):
    """The formulas of the paper as they are written, with every tensor whole."""
    beta2 = 1 - t**-power
    rho, alpha = min(lr, 1 / math.sqrt(t)), max(eps2, math.sqrt(np.mean(x**2)))
    squares = g**2 + eps1
    if x.ndim > 1:
        r = state["r"] = beta2 * state.get("r", 0) + (1 - beta2) * squares.sum(-1)
        c = state["c"] = beta2 * state.get("c", 0) + (1 - beta2) * squares.sum(-2)
        v = (r / r.sum(-1, keepdims=True))[..., None] * c[..., None, :]
    else:
        v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * squares
    u = g / np.sqrt(v)
    u = u / max(1.0, math.sqrt(np.mean(u**2)) / d)
    if beta1:
        u = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * u
    return x - lr * weight_decay * x - alpha * rho * u


@pytest.mark.parametrize("hyper", [{}, {"beta1": 0.9}, {"clip": 0.5, "power": 0.5, "eps": (1e-4, 2.0)}, {"lr": 0.5}])
def test_any_shape_follows_the_formulas(hyper):
    made = parameters()
    method = Adafactor(made, weight_decay=0.1, **hyper)
    eps = hyper.get("eps", (1e-30, 1e-3))
    names = {"d": hyper.get("clip", 1.0), "power": hyper.get("power", 0.8), "eps1": eps[0], "eps2": eps[1]}
    wanted = {p.name: (p.data.copy(), {}) for p in made}
    for step in range(12):
        give_gradients(made, step)
        for p in made:
            x, state = wanted[p.name]
            decay = 0.1 if p.decay else 0.0
            how = {"lr": hyper.get("lr", 1e-2), "beta1": hyper.get("beta1", 0.0), "weight_decay": decay, **names}
            wanted[p.name] = literal(x, p.grad, state, step + 1, **how), state
        method.step()
        for p in made:
            assert np.abs(p.data - wanted[p.name][0]).max() < 1e-12, (p.name, step)


GROUPS = (Group("w3", lr=0.5), Group("b", lr=3.0, weight_decay=0.2), Group("w?", weight_decay=0.0))


@pytest.mark.parametrize("groups", [(), GROUPS], ids=["one group", "groups"])
def test_twenty_steps_equal_pytorch(groups):
    """With decay, groups, a schedule and clipping.

    PyTorch keeps means where we keep sums: R / m of rows, C / n of columns.  Its eps is a bound from below where ours
    is added; both are far below these gradients.
    """
    torch = pytest.importorskip("torch")
    made = parameters()
    method = Adafactor(made, weight_decay=0.1, groups=groups)
    twins = [torch.nn.Parameter(torch.tensor(p.data)) for p in made]
    of_torch = [
        {"params": [twin], "weight_decay": treatment.decay, "factor": treatment.rate}
        for twin, treatment in zip(twins, method.treatments, strict=True)
    ]
    reference = torch.optim.Adafactor(of_torch, eps=(1e-30, 1e-3), d=1.0, beta2_decay=-0.8)
    for step in range(20):
        give_gradients(made, step)
        clip([p.grad for p in made], [p.grad for p in made], 1.0, float)
        rate = 0.3 * (step + 1) / 20
        for group in reference.param_groups:
            group["lr"] = rate * group["factor"]
        for twin, p in zip(twins, made, strict=True):
            twin.grad = torch.tensor(p.grad)
        method.step(rate)
        reference.step()
        for twin, p in zip(twins, made, strict=True):
            assert np.abs(twin.detach().numpy() - p.data).max() < 1e-9, (p.name, step)
    state = method.state_dict()
    for twin, p in zip(twins, made, strict=True):
        theirs = reference.state[twin]
        if p.data.ndim > 1:
            n, m = p.data.shape[-2:]
            assert np.allclose(theirs["row_var"].numpy()[..., 0] * m, state["row_sums"][p.name], rtol=1e-9, atol=0)
            assert np.allclose(
                theirs["col_var"].numpy()[..., 0, :] * n, state["column_sums"][p.name], rtol=1e-9, atol=0
            )
        else:
            assert np.allclose(theirs["variance"].numpy(), state["second_moment"][p.name], rtol=1e-9, atol=0)


# ------------------------------------------------------------------------------------------------- where numbers end


@pytest.mark.parametrize("size", [1e-10, 1e-15, 1e-18, 1e-20, 1e-30])
def test_tiny_gradients_in_float32_make_the_update_of_float64(size):
    """R C is 1e-60 for gradients of 1e-15, which float32 takes for 0; below that eps1 decides."""
    fine, coarse = parameters(), parameters(np.float32)
    a, b = Adafactor(fine), Adafactor(coarse)
    for step in range(3):
        give_gradients(fine, step, size)
        give_gradients(coarse, step, size)
        before = [p.data.copy() for p in fine], [p.data.astype(np.float64) for p in coarse]
        a.step(0.5)
        b.step(0.5)
    for p, q, old, other in zip(fine, coarse, *before, strict=True):
        moved, also = p.data - old, q.data - other
        assert np.isfinite(q.data).all()
        assert np.abs(moved - also).max() <= 1e-4 * np.abs(moved).max() + 1e-6 * np.abs(old).max(), p.name
    if size > 1e-16:
        assert max(np.abs(p.data - old).max() for p, old in zip(coarse, before[1], strict=True)) > 0.05


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_without_a_gradient_nothing_moves_but_what_decays(dtype):
    made = parameters(dtype)
    before = [p.data.copy() for p in made]
    method = Adafactor(made, weight_decay=0.5, beta1=0.5)
    for _ in range(2):
        give_gradients(made, 0, 0.0)
        method.step(0.1)
    for p, old in zip(made, before, strict=True):
        assert np.allclose(p.data, old * (0.95**2 if p.decay else 1.0), rtol=1e-6, atol=0), p.name


def test_float32_follows_float64():
    fine, coarse = parameters(), parameters(np.float32)
    a, b = Adafactor(fine, beta1=0.9, weight_decay=0.1), Adafactor(coarse, beta1=0.9, weight_decay=0.1)
    for step in range(20):
        give_gradients(fine, step)
        give_gradients(coarse, step)
        a.step()
        b.step()
    assert all(q.data.dtype == np.float32 for q in coarse)
    assert max(np.abs(p.data - q.data).max() for p, q in zip(fine, coarse, strict=True)) < 2e-5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_the_rounding_of_float32_masters(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    made, full = parameters(getattr(ml_dtypes, dtype, np.float16)), parameters(np.float32)
    a, b = Adafactor(made), Adafactor(full)
    for step in range(5):
        give_gradients(made, step)
        give_gradients(full, step)
        a.step()
        b.step()
    for p, q in zip(made, full, strict=True):
        assert p.data.dtype.itemsize == 2
        assert p.master.tobytes() == q.data.tobytes(), p.name
        assert p.data.tobytes() == p.master.astype(p.data.dtype).tobytes()
    assert {array.dtype for of in a.state_dict().values() for array in of.values()} == {np.dtype(np.float32)}


def test_a_matrix_in_blocks_is_the_same_matrix(monkeypatch):
    made, short = parameters(), parameters()
    a, b = Adafactor(made, beta1=0.5), Adafactor(short, beta1=0.5)
    for step in range(3):
        give_gradients(made, step)
        give_gradients(short, step)
        a.step()
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "BLOCK", 8)
            patch.setattr(blocks, "VECTOR", 2)
            b.step()
    for p, q in zip(made, short, strict=True):
        assert np.abs(p.data - q.data).max() < 1e-14, p.name


# ---------------------------------------------------------------------------------------------------- state and memory


def test_the_state_has_n_plus_m_numbers_a_matrix():
    """T25.6: 4 (n + m) bytes in float32; a tensor of more dims has them for each of its matrices."""
    made = parameters(np.float32)
    sizes: dict[str, int] = {}
    for of in Adafactor(made).state_dict().values():
        for name, array in of.items():
            sizes[name] = sizes.get(name, 0) + array.nbytes
    assert sizes == {
        "w": 4 * (5 + 7), "b": 4 * 7, "one": 4, "w11": 4 * 2, "row": 4 * 5, "scalar": 4,
        "w3": 4 * 3 * (4 + 2), "w4": 4 * 2 * 1 * (3 + 5),
    }  # fmt: skip
    means = Adafactor(made, beta1=0.9).state_dict()["first_moment"]
    assert {name: a.shape for name, a in means.items()} == SHAPES


def test_a_saved_state_goes_on_bit_for_bit():
    made, resumed = parameters(), parameters()
    method, other = Adafactor(made, beta1=0.5), Adafactor(resumed, beta1=0.5)
    for step in range(3):
        give_gradients(made, step)
        method.step()
    other.load_state({kind: {k: a.copy() for k, a in of.items()} for kind, of in method.state_dict().items()}, 3)
    for p, q in zip(made, resumed, strict=True):
        q.data[...] = p.data
    for step in range(3, 6):
        for model, rule in ((made, method), (resumed, other)):
            give_gradients(model, step)
            rule.step()
    assert all(p.data.tobytes() == q.data.tobytes() for p, q in zip(made, resumed, strict=True))
    assert other.updates == 6


def test_a_step_writes_weights_and_leaves_gradients():
    made = parameters()
    method = Adafactor(made)
    give_gradients(made, 0)
    before = [(p.grad.copy(), p.version) for p in made]
    made[0].touched = False  # what lies there is of an earlier step
    before[0][0][...] = 0
    kept = made[0].data.copy()
    method.step()
    for p, (grad, version) in zip(made, before, strict=True):
        assert np.array_equal(p.grad, grad)
        assert p.version == version + 1
    assert np.array_equal(made[0].data, kept)


def test_a_step_makes_no_copy_of_a_matrix(monkeypatch):
    """Scratch is of blocks: otherwise the memory that is saved would be used after all."""
    import tracemalloc

    (p,) = parameters(np.float32, {"w": (1024, 1024)})
    method = Adafactor([p])
    give_gradients([p], 0)
    method.step()
    tracemalloc.start()
    try:
        method.step()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < p.data.nbytes / 4


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": -1.0}, "lr -1.0"),
        ({"beta1": 1.0}, "beta1 1.0"),
        ({"eps": (0.0, 1e-3)}, "eps1 0.0"),
        ({"eps": (1e-50, 1e-3)}, "eps1 1e-50"),
        ({"eps": (1e-30, -1.0)}, "eps2 -1.0"),
        ({"clip": 0.0}, "clip 0.0"),
        ({"power": 0.0}, "power 0.0"),
        ({"power": math.nan}, "power nan"),
        ({"weight_decay": -0.1}, "weight_decay -0.1"),
    ],
)
def test_values_out_of_range_are_refused(hyper, message):
    with pytest.raises(ConfigError, match=message):
        Adafactor(parameters(), **hyper)


def test_a_part_of_a_tensor_needs_the_layout():
    p = Parameter("w", (4, 6), {"tp": Shard(1)}, init=normal(1.0))
    materialize([p], dict.fromkeys(AXES, 0), {**dict.fromkeys(AXES, 1), "tp": 2}, 0, np.dtype(np.float64))
    with pytest.raises(ConfigError, match=r"w: this rank holds \(4, 3\) of \(4, 6\)"):
        Adafactor([p])

"""Optimizers: the numbers of PyTorch, whatever way the parameters lie in memory, and a state that can be saved."""

import math

import numpy as np
import pytest

from mpitrain import kernels
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.kernels import blocks
from mpitrain.nn.init import normal
from mpitrain.nn.materialize import materialize
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import AdamW, Group, Sgd
from mpitrain.optim.clip import clip
from mpitrain.optim.groups import treatments
from mpitrain.optim.runs import join

AXES = ("pp", "edp", "ep", "cp", "tp")
SHAPES = {"w1": (5, 7), "b1": (7,), "n1": (7,), "w2": (7, 3), "w3": (3, 3), "b3": (3,)}

METHODS = {
    "adamw": (AdamW, {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}),
    "adamw as it comes": (AdamW, {}),
    "adamw without decay": (AdamW, {"weight_decay": 0.0}),
    "adamw without memory": (AdamW, {"betas": (0.0, 0.0), "weight_decay": 0.1}),
    "sgd": (Sgd, {}),
    "sgd decay": (Sgd, {"weight_decay": 0.1}),
    "momentum": (Sgd, {"momentum": 0.9}),
    "momentum decay": (Sgd, {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (Sgd, {"momentum": 0.9, "nesterov": True}),
    "nesterov decay": (Sgd, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


def make(name, made):
    kind, hyper = METHODS[name]
    return kind(made, lr=3e-2, **hyper)


def parameters(dtype=np.float64, shapes=SHAPES):
    """Parameters in flat buffers; the weights named w decay, the others do not."""
    made = [Parameter(name, shape, init=normal(1.0), decay=name.startswith("w")) for name, shape in shapes.items()]
    materialize(made, dict.fromkeys(AXES, 0), dict.fromkeys(AXES, 1), 0, np.dtype(dtype))
    return made


def apart(made):
    """The same parameters, each in memory of its own."""
    for p in made:
        p.data, p.grad = p.data.copy(), p.grad.copy()
    return made


def give_gradients(made, step):
    generator = np.random.default_rng(step)
    for p in made:
        p.grad[...] = generator.normal(size=p.grad.shape)
        p.touched = True


def train(made, method, steps, first=0):
    for step in range(first, first + steps):
        give_gradients(made, step)
        method.step()
    return [p.data.copy() for p in made]


# ------------------------------------------------------------------------------------------------- the right numbers


def in_torch(torch, name, made):
    twins = [torch.nn.Parameter(torch.tensor(p.data)) for p in made]
    decaying = [t for t, p in zip(twins, made, strict=True) if p.decay]
    others = [t for t, p in zip(twins, made, strict=True) if not p.decay]
    kind = {AdamW: torch.optim.AdamW, Sgd: torch.optim.SGD}[METHODS[name][0]]
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    return twins, kind(groups, lr=3e-2, **METHODS[name][1])


@pytest.mark.parametrize("name", METHODS)
def test_ten_steps_equal_pytorch(name):
    torch = pytest.importorskip("torch")
    made = parameters()
    twins, reference = in_torch(torch, name, made)
    method = make(name, made)
    for step in range(10):
        give_gradients(made, step)
        rate = 3e-2 * (step + 1) / 10
        for group in reference.param_groups:
            group["lr"] = rate
        for twin, p in zip(twins, made, strict=True):
            twin.grad = torch.tensor(p.grad)
        method.step(rate)
        reference.step()
        for twin, p in zip(twins, made, strict=True):
            assert np.abs(twin.detach().numpy() - p.data).max() < 1e-12, (p.name, step)
    kinds = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq", "velocity": "momentum_buffer"}
    for kind, arrays in method.state_dict().items():
        for twin, p in zip(twins, made, strict=True):
            assert np.abs(reference.state[twin][kinds[kind]].numpy() - arrays[p.name]).max() < 1e-12


GROUPS = (Group("w2", lr=0.5), Group("b?", lr=3.0, weight_decay=0.2), Group("w*", weight_decay=0.05))


@pytest.mark.parametrize("name", ["adamw", "momentum decay", "nesterov decay", "sgd decay"])
def test_twenty_steps_with_decay_groups_and_clipping_equal_pytorch(name):
    torch = pytest.importorskip("torch")
    made = parameters()
    kind, hyper = METHODS[name]
    method = kind(made, groups=GROUPS, **hyper)
    twins = [torch.nn.Parameter(torch.tensor(p.data)) for p in made]
    wanted = {
        "w1": (1.0, 0.05), "b1": (3.0, 0.2), "n1": (1.0, 0.0), "w2": (0.5, 0.1), "w3": (1.0, 0.05), "b3": (3.0, 0.2),
    }  # fmt: skip
    of_torch = [
        {"params": [twin], "factor": wanted[p.name][0], "weight_decay": wanted[p.name][1]}
        for twin, p in zip(twins, made, strict=True)
    ]
    reference = {AdamW: torch.optim.AdamW, Sgd: torch.optim.SGD}[kind](of_torch, **hyper)
    for step in range(20):
        give_gradients(made, step)
        for twin, p in zip(twins, made, strict=True):
            twin.grad = torch.tensor(p.grad)
        rate = 3e-2 * (step + 1) / 20
        for group in reference.param_groups:
            group["lr"] = rate * group["factor"]
        norm = torch.nn.utils.clip_grad_norm_(twins, 1.0)
        clipped = clip([p.grad for p in made], [p.grad for p in made], 1.0, float)
        assert clipped.norm == pytest.approx(float(norm), rel=1e-12)
        assert clipped.coefficient < 0.5
        method.step(rate)
        reference.step()
        for twin, p in zip(twins, made, strict=True):
            assert np.abs(twin.detach().numpy() - p.data).max() < 1e-9, (p.name, step)


def test_one_adamw_step_by_hand():
    """g = 2 from zero moments: the corrected step is lr * g/|g| after the decay of 1 - lr * 0.1."""
    p, m, v = np.array([3.0]), np.zeros(1), np.zeros(1)
    hyper = {"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "eps": 0.0, "weight_decay": 0.1}
    kernels.adamw(p, np.array([2.0]), m, v, update=1, **hyper)
    assert p[0] == pytest.approx(3.0 * 0.95 - 0.5, rel=1e-14)
    assert m[0] == pytest.approx(0.2)
    assert v[0] == pytest.approx(0.04)
    kernels.adamw(p, np.array([-1.0]), m, v, update=2, **hyper)
    m2, v2 = 0.9 * 0.2 - 0.1, 0.99 * 0.04 + 0.01
    step = 0.5 * (m2 / (1 - 0.81)) / math.sqrt(v2 / (1 - 0.99**2))
    assert p[0] == pytest.approx(2.35 * 0.95 - step, rel=1e-13)


def test_one_momentum_step_by_hand():
    (p,) = parameters(shapes={"w": (1,)})
    method = Sgd([p], momentum=0.5, weight_decay=0.1)
    p.data[...] = 2.0
    for expected in (2.0 - 0.1 * 1.2, 1.88 - 0.1 * (0.6 + 1.188)):
        p.grad[...], p.touched = 1.0, True
        method.step(lr=0.1)
        assert p.data[0] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("name", METHODS)
def test_float32_follows_float64(name):
    fine, coarse = parameters(), parameters(np.float32)
    a, b = train(fine, make(name, fine), 10), train(coarse, make(name, coarse), 10)
    for x, y in zip(a, b, strict=True):
        assert y.dtype == np.float32
        assert np.abs(x - y).max() < 2e-5


# --------------------------------------------------------------------------------------------------- runs and blocks


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", METHODS)
def test_runs_change_no_bit(name, dtype, level):
    """One buffer, and each parameter on its own, wherever that one begins in memory."""
    together, separate = parameters(dtype), apart(parameters(dtype))
    expected = train(together, make(name, together), 5)
    assert all(map(np.array_equal, train(separate, make(name, separate), 5), expected))


@pytest.mark.parametrize("name", METHODS)
def test_blocks_change_no_bit(name, monkeypatch):
    """One buffer in long blocks, and in blocks of four elements."""
    kernels.select("numpy")  # the compiled kernels take a run as a whole
    together, short = parameters(), parameters()
    expected = train(together, make(name, together), 5)
    monkeypatch.setattr(blocks, "VECTOR", 4)
    assert all(map(np.array_equal, train(short, make(name, short), 5), expected))


def runs_of(made, groups=()):
    return join(made, treatments(made, groups, 0.1))


def test_neighbours_of_one_kind_form_a_run():
    made = parameters()
    runs = runs_of(made)
    found = [(r.start, r.weights.size, r.treatment.decay > 0) for r in runs]
    assert found == [(0, 35, True), (35, 14, False), (49, 30, True), (79, 3, False)]
    assert all(np.shares_memory(runs[1].weights, p.data) for p in made[1:3])
    assert all(np.shares_memory(runs[1].grads, p.grad) for p in made[1:3])
    assert np.array_equal(runs[2].weights, np.concatenate([made[3].data.reshape(-1), made[4].data.reshape(-1)]))
    assert [r.weights.size for r in runs_of(apart(made))] == [35, 7, 7, 21, 9, 3]


def test_a_gap_or_another_order_in_memory_parts_a_run():
    made = parameters(shapes={"a": (4,), "b": (4,), "c": (4,)})
    assert len(runs_of(made)) == 1
    assert len(runs_of([made[0], made[2]])) == 2
    assert len(runs_of([made[1], made[0]])) == 2
    made[1].grad = made[1].grad.copy()  # the weights still adjoin, the gradients do not
    assert len(runs_of(made)) == 3


def test_a_buffer_of_bytes_can_hold_a_run():
    """A pool hands out typed views of untyped memory."""
    made = parameters(shapes={"a": (4,), "b": (2, 3)})
    for attribute in ("data", "grad"):
        raw = np.zeros(200, np.uint8)
        flat = raw[40:120].view(np.float64)
        flat[...] = np.arange(10)
        setattr(made[0], attribute, flat[:4])
        setattr(made[1], attribute, flat[4:].reshape(2, 3))
    (run,) = runs_of(made)
    assert run.weights.tolist() == run.grads.tolist() == list(range(10))


def test_parameters_without_elements_take_part():
    made = parameters()
    made[2].data, made[2].grad = np.empty((0, 7)), np.empty((0, 7))
    method = AdamW(made)
    train(made, method, 2)
    assert method.state_dict()["first_moment"]["n1"].shape == (0, 7)
    AdamW([]).step()


def test_exchanged_weights_are_noticed():
    """A schedule that keeps old versions puts each new one into another buffer."""
    made, reference = parameters(), parameters()
    method, expected = AdamW(made), AdamW(reference)
    train(made, method, 2)
    for p in made:
        p.data = p.data.copy()
    old = [p.data for p in made]
    train(made, method, 2, first=2)
    train(reference, expected, 4)
    assert all(np.array_equal(p.data, q.data) for p, q in zip(made, reference, strict=True))
    assert all(p.data is array for p, array in zip(made, old, strict=True))


# -------------------------------------------------------------------------------------------------- what a step touches


def test_decay_acts_only_where_the_parameter_says_so():
    for kind in (AdamW, Sgd):
        made = parameters()
        before = [p.data.copy() for p in made]
        for p in made:
            p.grad[...], p.touched = 0.0, True
        kind(made, lr=0.1, weight_decay=0.5).step()
        for p, old in zip(made, before, strict=True):
            assert np.allclose(p.data, old * (0.95 if p.decay else 1.0), rtol=1e-14, atol=0), p.name


def test_a_step_writes_weights_and_leaves_gradients():
    for name in METHODS:
        made = parameters()
        method = make(name, made)
        give_gradients(made, 0)
        before = [p.grad.copy() for p in made]
        versions = [p.version for p in made]
        method.step()
        assert all(np.array_equal(p.grad, old) for p, old in zip(made, before, strict=True)), name
        assert [p.version for p in made] == [v + 1 for v in versions]
        assert method.updates == 1


def test_a_parameter_that_the_step_did_not_use_has_gradient_zero():
    """C21: what lies in its buffer is from an earlier step."""
    made = parameters()
    method = Sgd(made, lr=1.0)
    give_gradients(made, 0)
    made[0].touched = False
    before = made[0].data.copy()
    method.step()
    assert np.array_equal(made[0].data, before)


# --------------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_state_goes_on_bit_for_bit(name):
    made, resumed = parameters(), parameters()
    method = make(name, made)
    train(made, method, 5)
    saved = {kind: {k: a.copy() for k, a in arrays.items()} for kind, arrays in method.state_dict().items()}
    weights = [p.data.copy() for p in made]
    expected = train(made, method, 5, first=5)
    other = make(name, resumed)
    other.load_state(saved, updates=5)
    for p, array in zip(resumed, weights, strict=True):
        p.data[...] = array
    assert all(map(np.array_equal, train(resumed, other, 5, first=5), expected))
    assert other.updates == 10


def test_the_state_has_the_shape_of_the_weights_and_is_a_view():
    made = parameters()
    method = AdamW(made)
    state = method.state_dict()
    assert set(state) == {"first_moment", "second_moment"}
    assert {name: a.shape for name, a in state["first_moment"].items()} == SHAPES
    train(made, method, 1)
    assert np.allclose(state["first_moment"]["w2"], 0.1 * made[3].grad)
    assert Sgd(made).state_dict() == {}


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    made = parameters()
    method = AdamW(made)
    train(made, method, 1)
    before = method.state_dict()["first_moment"]["w1"].copy()

    def damaged(change):
        state = {kind: {k: a * 0 for k, a in arrays.items()} for kind, arrays in method.state_dict().items()}
        change(state)
        return state

    cases = {
        "Optimizer state second_moment: the saved state has no b1": lambda s: s["second_moment"].pop("b1"),
        "Optimizer state second_moment: the model has no z": lambda s: s["second_moment"].update(z=np.zeros(3)),
        r"w1 is \(7, 5\), the model wants \(5, 7\)": lambda s: s["second_moment"].update(w1=np.zeros((7, 5))),
        "saved optimizer keeps first_moment; AdamW keeps first_moment, second_moment": lambda s: s.pop("second_moment"),
    }
    for message, change in cases.items():
        with pytest.raises(CheckpointError, match=message):
            method.load_state(damaged(change), updates=3)
    with pytest.raises(CheckpointError, match="-1 updates"):
        method.load_state(damaged(lambda s: None), updates=-1)
    assert np.array_equal(method.state_dict()["first_moment"]["w1"], before)
    assert method.updates == 1


@pytest.mark.parametrize(
    ("kind", "hyper", "message"),
    [
        (AdamW, {"lr": -1.0}, "lr -1.0"),
        (AdamW, {"lr": math.nan}, "lr nan"),
        (AdamW, {"betas": (1.0, 0.9)}, "beta1 1.0"),
        (AdamW, {"betas": (0.9, -0.1)}, "beta2 -0.1"),
        (AdamW, {"eps": -1e-8}, "eps -1e-08"),
        (AdamW, {"weight_decay": -0.1}, "weight_decay -0.1"),
        (Sgd, {"momentum": 1.0}, "momentum 1.0"),
        (Sgd, {"lr": math.inf}, "lr inf"),
        (Sgd, {"nesterov": True}, "nesterov needs a momentum"),
    ],
)
def test_values_out_of_range_are_refused(kind, hyper, message):
    with pytest.raises(ConfigError, match=message):
        kind(parameters(), **hyper)

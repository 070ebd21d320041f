"""Random programs of ops are right, and what they found stays mended; tests/fuzz_graphs.py runs thousands of them."""

import sys

import fuzz_graphs
import numpy as np
import pytest
from fuzz.differences import slope
from fuzz.grow import grow
from fuzz.judge import Judge, Wrong
from fuzz.program import OPS, Leaf, Program, Seed, Step, source
from fuzz.run import run
from fuzz.shrink import reproduction, shrink, values_of

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.ops import arithmetic, shape

GRAPHS = 150


@pytest.mark.parametrize("level", dict.fromkeys(["numpy", kernels.levels()[-1]]))
def test_random_programs_are_right(level):
    before = kernels.level()
    judge, occurred = Judge(fuzz_graphs.find_torch(False)), set()
    try:
        kernels.select(level)
        for seed in range(GRAPHS):
            program = grow(seed)
            judge.check(program)
            occurred.update(step.op for step in program.steps)
    finally:
        kernels.select(before)
    assert occurred == fuzz_graphs.PUBLIC
    assert judge.undecided.total() < 0.05 * judge.checks.total()


def test_random_programs_agree_with_pytorch():
    torch = pytest.importorskip("torch")
    judge = Judge(torch, differences=False)
    for seed in range(1000, 1000 + GRAPHS // 2):
        judge.check(grow(seed))
    assert judge.checks["gradients, torch"] > GRAPHS / 2


def test_every_public_op_has_a_word():
    assert set(OPS) == fuzz_graphs.PUBLIC, "a new op needs a word in tests/fuzz/words_*.py: docs/how-to/fuzz.md"


def test_a_printed_program_is_the_program_that_ran():
    for seed in range(40):
        program = grow(seed)
        scope = {}
        exec(source(program), scope)
        grads = run(program).grads
        for leaf in program.leaves:
            if leaf.name in grads:
                t, twice = scope[leaf.name], program.walk == "twice"
                grad = t.grad / (1.5 if twice else 1) if leaf.role == "parameter" else scope["tape"].grads[t]
                expected = grads[leaf.name] / (2 if twice and leaf.role == "tensor" else 1)
                np.testing.assert_allclose(grad, expected, rtol=1e-2 if program.coarsest == "float16" else 1e-5)


def test_a_seed_is_a_program():
    assert source(grow(7)) == source(grow(7))
    assert source(grow(7)) != source(grow(8))


# ------------------------------------------------------------------------------------------------ it sees what is wrong


def break_tanh(monkeypatch):
    """The factor 2 of a product rule forgotten, as it were."""
    tanh = ops.elementwise.Tanh
    monkeypatch.setattr(tanh, "backward", staticmethod(lambda grad, y, *, wanted: (grad * (1 - y),)))


def first_wrong(judge, seeds=range(400)):
    for seed in seeds:
        program = grow(seed)
        try:
            judge.check(program)
        except Wrong as wrong:
            return program, wrong
    raise AssertionError("nothing was found")


def still_wrong(judge):
    def judgement(program):
        try:
            judge.check(program)
        except Wrong as wrong:
            return wrong
        return None

    return judgement


def test_a_wrong_gradient_is_found_made_small_and_printed_as_a_program_that_fails(monkeypatch):
    break_tanh(monkeypatch)
    judge = Judge()
    program, wrong = first_wrong(judge)
    assert wrong.kind == "gradient, differences"
    small, wrong = shrink(program, wrong, still_wrong(judge))
    assert [step.op for step in small.steps] == ["tanh"]
    text = reproduction(small, wrong)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        exec(text, {})
    monkeypatch.undo()
    exec(text, {})


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "kind"),
    [
        (arithmetic, "_fit", lambda grad, kind: grad if kind is None else grad.sum().reshape(()), None),
        (shape.Concat, "backward", None, None),
        (Tape, "_accumulate", None, None),
    ],
    ids=["broadcast operands", "the parts of concat", "values that are used twice"],
)
def test_broken_gradients_are_found(monkeypatch, owner, name, wrong, kind):
    if owner is shape.Concat:
        old = shape.Concat.backward
        wrong = staticmethod(lambda grad, *saved, wanted, dim: old(grad, *saved, wanted=wanted, dim=dim)[::-1])
    if owner is Tape:

        def wrong(self, slot, grad):  # the last one wins
            self._pending[slot] = grad

    monkeypatch.setattr(owner, name, wrong)
    _, found = first_wrong(Judge())
    assert found.kind in ("exception", "contract", "gradient, differences", "gradient, split")


def test_writing_into_a_value_is_found(monkeypatch):
    def forward(x):
        np.negative(x, out=x)
        return x, ()

    monkeypatch.setattr(ops.elementwise.Neg, "forward", staticmethod(forward))
    program = Program(
        (Leaf("x", np.array([1.0, 2.0])),),
        (Step("exp", ("x",), ("a",)), Step("neg", ("a",), ("b",))),
        (Seed("b", np.ones(2)),),
    )
    with pytest.raises(Wrong, match="value, naive"):
        Judge().check(program)


def test_float16_sums_that_are_formed_in_float16_are_found(monkeypatch):
    monkeypatch.setattr(ops.reduce, "wide", lambda dtype: dtype)
    x = np.random.default_rng(0).integers(-512, 512, (999, 2)) / 256
    program = Program(
        (Leaf("x", x, dtype="float16"),),
        (Step("sum", ("x",), ("y",), {"dim": 0, "keepdims": False}),),
        (Seed("y", np.ones(2)),),
    )
    with pytest.raises(Wrong, match="float16"):
        Judge().check(program)
    monkeypatch.undo()
    Judge().check(program)


# ------------------------------------------------------------------------------------------------ differences and kinks


def program_of(op, x, static=None):
    return Program((Leaf("x", np.array(x)),), (Step(op, ("x",), ("y",), static or {}),), (Seed("y", np.ones(len(x))),))


@pytest.mark.parametrize("op", ["exp", "sin", "gelu_erf", "tanh"])
def test_slopes_have_ten_digits(op):
    program = program_of(op, [0.3, -1.2])
    found = slope(program, values_of(program), "x", np.array([1.0, -0.5]), 1.0)
    expected = float((run(program).grads["x"] * [1.0, -0.5]).sum())
    assert abs(found.value - expected) <= 1e-10
    assert found.error <= 1e-7


def test_near_a_kink_a_shorter_step_is_taken_and_on_it_none():
    near = program_of("relu", [1e-3, -1e-3])
    found = slope(near, values_of(near), "x", np.ones(2), 1.0)
    assert abs(found.value - 1.0) <= 1e-9
    on = program_of("relu", [0.0, 1.0])
    assert slope(on, values_of(on), "x", np.ones(2), 1.0) is None


# ----------------------------------------------------------------------------------------------------- the command line


def test_the_command_reports_what_it_did(capsys):
    assert fuzz_graphs.main(["--graphs", "12", "--no-torch"]) == 0
    out = capsys.readouterr().out
    assert "12 graphs, " in out
    assert "0 wrong" in out
    assert "gradients, differences" in out


def test_the_command_prints_one_program(capsys):
    assert fuzz_graphs.main(["--one", "5", "--no-torch"]) == 0
    out = capsys.readouterr().out
    assert "with Tape() as tape:" in out
    assert "# right: " in out


def test_the_command_fails_and_shows_the_program_if_something_is_wrong(monkeypatch, capsys):
    break_tanh(monkeypatch)
    seed = next(seed for seed in range(400) if any(step.op == "tanh" for step in grow(seed).steps))
    assert fuzz_graphs.main(["--graphs", "60", "--seed", str(seed), "--no-torch"]) == 1
    out = capsys.readouterr().out
    assert "# WRONG, seed " in out
    assert ".tanh(" in out
    assert "np.testing.assert_allclose" in out


def test_the_command_says_that_pytorch_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert fuzz_graphs.find_torch(None) is None
    with pytest.raises(SystemExit, match="PyTorch is not installed"):
        fuzz_graphs.find_torch(True)


# ------------------------------------------------------------------------------------------------------------- findings
# The smallest program of each thing that was wrong.


def gradient(y, *leaves, tape):
    grads = tape.run_backward([(y, np.ones(y.shape, y.dtype))])
    return [grads[leaf] for leaf in leaves]


@pytest.mark.parametrize("number", [np.float64(0.5), np.float32(0.5), np.float16(0.5), np.int64(2), np.bool_(True)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_numbers_of_numpy_do_not_promote(dtype, number):
    x = Tensor(np.ones(2, dtype), requires_grad=True)
    with Tape() as tape:
        values = [x + number, number - x, x * number, number * x, x / number, number / x]
        values += [ops.maximum(number, x), ops.minimum(x, number), ops.where(x.data > 0, x, number)]
        values += [ops.clip(x, number, number), *((x**number, number**x) if number.dtype.kind != "b" else ())]
        total = ops.stack(values).sum()
    assert {y.dtype for y in values} == {np.dtype(dtype)}
    (dx,) = gradient(total, x, tape=tape)
    assert dx.dtype == dtype


def test_logsumexp_of_a_number_has_a_gradient():
    x = Tensor(np.array(0.3), requires_grad=True)
    with Tape() as tape:
        y = ops.logsumexp(x)
    assert gradient(y, x, tape=tape)[0] == 1.0


def test_a_number_can_be_padded():
    x = Tensor(np.array(0.3), requires_grad=True)
    with Tape() as tape:
        y = ops.pad(x, ()) * 2
    assert (y.item(), gradient(y, x, tape=tape)[0]) == (0.6, 2.0)


@pytest.mark.parametrize(("shape", "dim"), [((3, 0), 1), ((0, 3), 1), ((0,), 0), ((2, 0, 3), -1)])
def test_log_softmax_of_nothing_is_nothing(shape, dim):
    x = Tensor(np.zeros(shape), requires_grad=True)
    with Tape() as tape:
        y = ops.log_softmax(x, dim)
    assert (y.shape, gradient(y, x, tape=tape)[0].shape) == (shape, shape)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.uint64])
def test_numbers_of_rows_may_be_of_any_integer_type(dtype):
    """The tokens of a byte-level model, kept as bytes: Python's 256 fits none of them."""
    ids = np.array([1, 127, 1], dtype)
    x = Tensor(np.arange(256.0)[:, None], requires_grad=True)
    with Tape() as tape:
        y = (ops.take(x, ids) + x[ids] + ops.gather_along(x, ids[:, None], 0)).sum()
    (dx,) = gradient(y, x, tape=tape)
    assert y.item() == 3 * (1 + 127 + 1)
    assert (dx[1, 0], dx[127, 0], dx.sum()) == (6, 3, 9)


class Doubled:
    """A policy that can only keep arrays."""

    def pack(self, node, place, array):
        assert isinstance(array, np.ndarray)
        assert array.ndim
        return array + array

    def share(self, node, place, array, handle):
        return handle

    def unpack(self, node, place, handle):
        return handle / 2


def test_a_policy_is_not_asked_about_numbers():
    x = Tensor(np.array(0.5), requires_grad=True)
    with Tape(Doubled()) as tape:
        y = ops.relu(ops.maximum(x.exp(), np.int64(1)))
    assert gradient(y, x, tape=tape)[0] == np.exp(0.5)


@pytest.mark.parametrize("dtypes", [("f2", "f2", "f4"), ("f4", "f2", "f2"), ("f4", "f4", "f8"), ("f8", "f8", "f4")])
def test_a_bias_of_another_dtype_gets_a_gradient_of_its_own(dtypes):
    shapes = [(2, 3), (3, 3), (3,)]
    x, w, b = (Tensor(np.ones(shape, t), requires_grad=True) for shape, t in zip(shapes, dtypes, strict=True))
    with Tape() as tape:
        y = ops.linear(x, w, b).sum()
    assert [d.dtype for d in gradient(y, x, w, b, tape=tape)] == list(dtypes)
    weight = Tensor(np.ones(3, dtypes[1]), requires_grad=True)
    with Tape() as tape:
        y = ops.layer_norm(x, weight, b).sum()
    assert [d.dtype for d in gradient(y, x, weight, b, tape=tape)] == list(dtypes)
    with Tape() as tape:
        y = ops.residual_norm(x, x, None, weight, b)[1].sum()
    assert [d.dtype for d in gradient(y, x, weight, b, tape=tape)] == list(dtypes)


def test_a_residual_of_no_columns_takes_dropout():
    x = Tensor(np.zeros((2, 0)), requires_grad=True)
    with Tape() as tape:
        y = ops.residual(x, x, Tensor(np.zeros(0)), rows=np.arange(2, dtype=np.uint64), p=0.5)
    assert gradient(y, x, tape=tape)[0].shape == (2, 0)


def test_backward_inputs_keeps_nothing_of_what_has_no_gradient():
    x = Tensor(np.ones(3), requires_grad=True)
    with Tape() as tape:
        y = x.exp()
        x.tanh()
    tape.backward_inputs([(y, np.ones(3))])
    assert [node.saved for node in tape.nodes] == [None, None]

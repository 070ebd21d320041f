"""The state checker: ops of a user's own, what it says, batches and losses, digests."""

import contextlib
import gc
import inspect
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
from one_axis import Axis, Grid, states_of

from mpitrain import collectives
from mpitrain.autograd import Function, Tape, Tensor, ops
from mpitrain.autograd.lazy import Product, RowSum
from mpitrain.autograd.ops.reduce import Softmax
from mpitrain.debug.states import StateChecker
from mpitrain.debug.states.digests import digest
from mpitrain.errors import ShapeError, StateError
from mpitrain.events import listen
from mpitrain.nn import init
from mpitrain.nn.materialize import materialize
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.spec import INVARIANT, PARTIAL, REPLICATE, Shard

I, R, P = INVARIANT, REPLICATE, PARTIAL  # noqa: E741
S = Shard
X = (2, 4, 6)  # (samples, tokens, columns) of this rank
TP = Axis()

# ---------------------------------------------------------------------------------------------------- ops of one's own


class Softplus(Function):
    """An op as the how-to page makes it, without a word about states."""

    @staticmethod
    def forward(x):
        return np.logaddexp(x, 0), (x,)


class Cumulative(Function):
    """Works along the last dim and adds one place to it; says nothing of its rules."""

    @staticmethod
    def forward(x):
        return np.concatenate([x.cumsum(-1), x[..., -1:]], -1), ()


class Rows(Cumulative):
    """The same, and says that it treats rows as a softmax does."""

    like = Softmax

    @staticmethod
    def forward(x, *, dim):
        return Cumulative.forward(x)


def test_an_op_of_ones_own_works_element_by_element():
    assert states_of(Softplus.apply, (X, S(1))) == S(1)
    with pytest.raises(StateError, match="softplus of a Partial value"):
        states_of(Softplus.apply, (X, P))


def test_an_op_that_does_not_and_has_no_rule_is_refused_for_slices_only():
    assert states_of(Cumulative.apply, (X, I)) == I
    with pytest.raises(StateError, match=r"cumulative, whose rules are not known, of a Shard\(1\) value .*`like`"):
        states_of(Cumulative.apply, (X, S(1)))


def test_an_op_may_name_another_whose_rules_it_has():
    rows = lambda x: Rows.apply(x, dim=2)  # noqa: E731
    assert states_of(rows, (X, S(1))) == S(1)
    with pytest.raises(StateError, match=r"rows along dim 2 of a Shard\(2\) value"):
        states_of(rows, (X, S(2)))


class CutRows(collectives.Arrow):
    """Sends inside: sums over the last dim, which is cut over `axis`; as `Rows` on the others."""

    arrow = (Shard(-1), INVARIANT)
    like = Softmax
    linear = ()

    @staticmethod
    def forward(x, other, *, axis, dim):
        return axis.all_reduce(x.sum(-1, keepdims=True)) + other, ()


def test_an_op_that_sends_follows_its_arrow_on_its_axis_and_its_like_on_others():
    cut_rows = lambda x, other=None: CutRows.apply(x, other if other is not None else 0.0, axis=TP, dim=2)  # noqa: E731
    assert states_of(cut_rows, (X, S(2))) == I
    assert states_of(cut_rows, (X, S(2)), (X, I)) == I
    assert states_of(cut_rows, (X, S(1)), axis="cp") == S(1)
    with pytest.raises(StateError, match=r"cut_rows of a Shard\(1\) value over tp; it takes a Shard\(2\) one"):
        states_of(cut_rows, (X, S(1)))
    with pytest.raises(
        StateError, match=r"cut_rows with a Shard\(1\) value as input 1 over tp; every rank needs the whole"
    ):
        states_of(cut_rows, (X, S(2)), (X, S(1)))
    with pytest.raises(StateError, match=r"cut_rows along dim 2 of a Shard\(2\) value over cp"):
        states_of(cut_rows, (X, S(2)), axis="cp")


def test_an_axis_over_which_is_not_sent_keeps_its_state():
    assert states_of(lambda x: collectives.all_gather(x, TP, 1), (X, P), axis="cp") == P
    assert states_of(lambda x: collectives.all_reduce(x, TP), (X, S(0)), axis="edp") == S(0)


def test_a_merged_axis_is_each_of_its_parts():
    merged = Axis()
    merged.name = "edp+cp"
    for axis in ("edp", "cp"):
        assert states_of(lambda x: collectives.all_reduce(x, merged), (X, P), axis=axis) == I
    assert states_of(lambda x: collectives.all_reduce(x, merged), (X, P), axis="tp") == P
    merged.name = "dp"
    for axis in ("edp", "ep"):
        assert states_of(lambda x: collectives.copy(x, merged), (X, I), axis=axis) == R
    merged.name = "world"
    assert states_of(lambda x: collectives.copy(x, merged), (X, I), axis="tp") == R


# ------------------------------------------------------------------------------------------------------- what it says


class Layer(Module):
    """A product that is not summed, and an activation of it."""

    def __init__(self):
        super().__init__("layer")
        self.weight = Parameter("layer.weight", (12, 8), {"tp": S(0)}, init=init.ones)

    def forward(self, x):
        y = ops.linear(x, self.weight)
        return ops.gelu_tanh(y + np.zeros(8))


def line_of(function, text):
    """The line of a function's source that holds a text."""
    lines, first = inspect.getsourcelines(function)
    return next(first + i for i, line in enumerate(lines) if text in line)


def test_an_error_names_op_line_state_axis_message_origin_and_module():
    """DESIGN 7's form."""
    layer = Layer()
    materialize([layer.weight], Grid().coords, Grid("tp").sizes, 0, np.float64)
    checker = StateChecker([layer.weight], Grid("tp"))
    checker.start()
    x = Tensor(np.ones((2, 6)))
    checker.declare(x, {"tp": S(1)})
    with pytest.raises(StateError) as caught, listen(checker):
        layer(x)
    here = "test_states_checker.py"
    assert str(caught.value) == (
        f"at {here}:{line_of(Layer.forward, 'gelu')}: gelu_tanh of a Partial value over tp; an all_reduce or"
        f" reduce_scatter is missing before it (from linear at {here}:{line_of(Layer.forward, 'linear')})\n"
        "  in layer: gelu_tanh(Partial (2, 8))"
    )


def test_an_error_names_the_parameter_whose_spec_is_wrong():
    weight = Parameter("norm.weight", (6,), init=init.ones)
    bias = Parameter("norm.bias", (6,), {"tp": R}, init=init.zeros)
    materialize([weight, bias], Grid().coords, Grid("tp").sizes, 0, np.float64)
    checker = StateChecker([weight, bias], Grid("tp"))
    checker.start()
    x = Tensor(np.ones(X))
    checker.declare(x, {"tp": S(1)}, "the stream")
    with pytest.raises(StateError) as caught, listen(checker):
        ops.layer_norm(x, weight, bias)
    first, second = str(caught.value).splitlines()
    assert (
        "layer_norm of an Invariant and a Shard(1) value over tp; the spec of norm.weight must say Replicate on tp"
        in first
    )
    assert first.endswith("(Invariant from the spec of norm.weight, Shard(1) from the stream)")
    assert second == "  layer_norm(Shard(1) (2, _, 6), Invariant (6,), Replicate (6,))"


BIAS = ("layer.c", (6,), None)
WEIGHT = ("layer.w", (6, 8), None)
ROWS = ("layer.w", (12, 8), {"tp": S(0)})
ADVICE = {
    "sum_everywhere before a bias": (
        (lambda x, c: collectives.sum_everywhere(x, TP) + c, P, BIAS),
        "add of an Invariant and a Replicate value over tp; all_reduce in place of sum_everywhere gives Invariant"
        " (Invariant from the spec of layer.c, Replicate from sum_everywhere at LINE)",
        "  or the spec of layer.c must say Replicate on tp, or a copy of it is missing",
        "  add(Replicate (2, 4, 6), Invariant (6,))",
    ),
    "sum_everywhere, and a bias behind other ops": (
        (lambda x, c: collectives.sum_everywhere(x, TP) * 2.0 + c, P, BIAS),
        "add of an Invariant and a Replicate value over tp; all_reduce in place of sum_everywhere gives Invariant"
        " (Invariant from the spec of layer.c, Replicate from sum_everywhere at LINE)",
        "  or the spec of layer.c must say Replicate on tp, or a copy of it is missing",
        "  add(Replicate (2, 4, 6), Invariant (6,))",
    ),
    "all_gather before a bias": (
        (lambda x, c: collectives.all_gather(x, TP, 1) + c, S(1), BIAS),
        "add of an Invariant and a Replicate value over tp; gather in place of all_gather gives Invariant"
        " (Invariant from the spec of layer.c, Replicate from all_gather at LINE)",
        "  or the spec of layer.c must say Replicate on tp, or a copy of it is missing",
        "  add(Replicate (2, 8, 6), Invariant (6,))",
    ),
    "a weight without a spec behind a copy": (
        (lambda x, w: ops.linear(collectives.copy(x, TP), w), I, WEIGHT),
        "linear of an Invariant and a Replicate value over tp; the spec of layer.w on tp is Invariant (the default):"
        " Shard(1) if each rank shall hold its columns, Replicate if each uses the whole for its own tokens"
        " (Invariant from the spec of layer.w, Replicate from copy at LINE)",
        "  or the value before that copy is Invariant",
        "  linear(Replicate (2, 4, 6), Invariant (6, 8))",
    ),
    "a weight without a spec among slices": (
        (lambda x, w: x @ w, S(1), WEIGHT),
        "matmul of an Invariant and a Shard(1) value over tp; the spec of layer.w on tp is Invariant (the default):"
        " Shard(1) behind an all_gather if each rank shall hold its columns, Replicate if each uses the whole for its"
        " own tokens (Invariant from the spec of layer.w, Shard(1) from the stream)",
        "  matmul(Shard(1) (2, _, 6), Invariant (6, 8))",
    ),
    "a weight whose rows are cut": (
        (lambda x, w: ops.linear(collectives.copy(x, TP), w), I, ROWS),
        "linear sums over dim 0 of a Shard(0) value, which is cut, with a Replicate one over tp; the spec of layer.w on"
        " tp is Shard(0), which cuts the rows that are summed over: Shard(1) cuts its columns"
        " (Shard(0) from the spec of layer.w, Replicate from copy at LINE)",
        "  or the other must be Shard(2), or an all_gather of it is missing",
        "  linear(Replicate (2, 4, 6), Shard(0) (_, 8))",
    ),
    "a weight whose columns are cut behind columns": (
        (lambda x, w: ops.linear(x, w), S(2), ("layer.w", (12, 8), {"tp": S(1)})),
        "linear sums over dim 2 of a Shard(2) value, which is cut, with a Shard(1) one over tp; the spec of layer.w on"
        " tp is Shard(1): Shard(0) cuts the rows that are summed over"
        " (Shard(2) from the stream, Shard(1) from the spec of layer.w)",
        "  or an all_gather of the Shard(2) one is missing",
        "  linear(Shard(2) (2, 4, _), Shard(1) (12, _))",
    ),
    "a bias of cut columns": (
        (lambda x, w, b: ops.linear(x, w, b), R, ("layer.w", (6, 8), {"tp": S(1)}), ("layer.b", (8,), None)),
        "linear of an Invariant and a Shard(2) value over tp; the spec of layer.b on tp is Invariant (the default):"
        " Shard(0) if it is cut as the other is, Replicate if each rank uses the whole"
        " (Invariant from the spec of layer.b, Shard(1) from the spec of layer.w)",
        "  linear(Replicate (2, 4, 6), Shard(1) (6, _), Invariant (8,))",
    ),
}


@pytest.mark.parametrize(("case", "lines"), [(c[0], c[1:]) for c in ADVICE.values()], ids=ADVICE)
def test_an_error_says_first_what_to_change_where_a_state_came_from(case, lines):
    program, state, *parameters = case
    made = [Parameter(*parameter, init=init.ones) for parameter in parameters]
    materialize(made, Grid().coords, Grid("tp").sizes, 0, np.float64)
    checker = StateChecker(made, Grid("tp"))
    checker.start()
    x = Tensor(np.ones(X))
    checker.declare(x, {"tp": state}, "the stream")
    with listen(checker), pytest.raises(StateError) as caught:
        program(x, *made)
    said = str(caught.value).splitlines()
    site, _, said[0] = said[0].removeprefix("at ").partition(": ")
    assert said == [line.replace("LINE", site) for line in lines]


def test_an_error_of_a_table_does_not_ask_for_it_to_be_cut_as_its_numbers_are():
    table = Parameter("table", (16, 6), {"dp": I}, init=init.ones)
    materialize([table], Grid().coords, Grid("edp").sizes, 0, np.float64)
    checker = StateChecker([table], Grid("edp"))
    checker.start(BATCH)
    with listen(checker), pytest.raises(StateError, match="; the spec of table must say Replicate on dp, or a copy"):
        ops.take(table, BATCH.inputs)


def test_an_error_of_a_parameter_on_a_data_axis_does_not_call_its_spec_the_default():
    weight = Parameter("layer.w", (6, 8), {"dp": I}, init=init.ones)
    materialize([weight], Grid().coords, Grid("edp").sizes, 0, np.float64)
    checker = StateChecker([weight], Grid("edp"))
    checker.start()
    x = Tensor(np.ones(X))
    checker.declare(x, {"dp": S(0)})
    with listen(checker), pytest.raises(StateError, match=r"the spec of layer.w on dp is Invariant: Shard\(1\) behind"):
        x @ weight


def test_the_line_is_that_of_the_op_also_where_a_listener_hands_events_on():
    checker = StateChecker([], Grid("tp"))
    checker.start()
    x = Tensor(np.ones(X))
    checker.declare(x, {"tp": P})

    def hand_on(event):
        checker(event)

    with listen(hand_on), pytest.raises(StateError) as caught:
        ops.tanh(x)
    line = line_of(test_the_line_is_that_of_the_op_also_where_a_listener_hands_events_on, "ops.tanh(x)")
    assert str(caught.value).startswith(f"at test_states_checker.py:{line}: tanh")


def test_a_data_axis_is_called_dp_unless_experts_part_it():
    with pytest.raises(StateError, match="of a Partial value over dp;"):
        states_of(ops.exp, (X, P), axis="edp")
    with pytest.raises(StateError, match="of a Partial value over ep;"):
        states_of(ops.exp, (X, P), axis="ep")


# ------------------------------------------------------------------------------------------------- batches and the loss


@dataclass
class Rows2D:
    inputs: np.ndarray
    targets: np.ndarray
    places: np.ndarray
    positions: np.ndarray
    documents: np.ndarray | None = None
    step: int = 0


BATCH = Rows2D(
    np.arange(8).reshape(2, 4),
    np.arange(1, 9).reshape(2, 4),
    np.arange(2),
    4 + np.arange(4),
    np.zeros((2, 8), np.int64),
)
TABLE = ((16, 6), R)
ON_DATA = [
    ("inputs", lambda x, b: ops.take(x, b.inputs), S(0)),
    ("a Tensor of them", lambda x, b: ops.take(x, Tensor(b.inputs)), S(0)),
    ("a view", lambda x, b: ops.take(x, b.inputs[:]), S(0)),
    ("another dtype", lambda x, b: ops.take(x, b.inputs.astype(np.int32)), S(0)),
    ("a copy", lambda x, b: ops.take(x, b.inputs.copy()), S(0)),
    ("targets", lambda x, b: ops.take(x, b.targets), S(0)),
    ("places", lambda x, b: ops.take(x, b.places), S(0)),
    ("positions", lambda x, b: ops.take(x, b.positions), R),
    ("documents", lambda x, b: ops.take(x, b.documents), S(0)),
    ("other numbers", lambda x, b: ops.take(x, b.inputs + 1 - 1 + np.eye(2, 4, dtype=int)), R),
    ("another shape", lambda x, b: ops.take(x, b.inputs[:, :2]), R),
]
ON_CP = {"inputs": S(1), "targets": S(1), "a copy": S(1), "positions": S(0), "places": R, "documents": R}
ON_TP = {"inputs": R, "positions": R}


def with_batch(program, axis, batch=BATCH, table=TABLE):
    checker = StateChecker([], Grid(axis))
    checker.start(batch)
    x = Tensor(np.ones(table[0]), requires_grad=True)
    checker.declare(x, {axis: table[1]})
    with listen(checker), Tape():
        y = program(x, batch)
    return checker, y


CASES = [(name, program, axis, state) for axis in ("edp", "ep") for name, program, state in ON_DATA]
CASES += [
    (name, program, axis, of[name])
    for axis, of in (("cp", ON_CP), ("tp", ON_TP))
    for name, program, _ in ON_DATA
    if name in of
]


@pytest.mark.parametrize(("name", "program", "axis", "state"), CASES, ids=[f"{case[2]} {case[0]}" for case in CASES])
def test_the_arrays_of_a_batch_are_known_wherever_a_model_uses_them(name, program, axis, state):
    checker, y = with_batch(program, axis)
    assert checker.states(y) == {axis: state}


def test_a_batch_of_any_kind_is_samples_first():
    images, labels = np.ones((4, 3, 3)), np.zeros(4, np.int64)

    class Plain:
        def __init__(self):
            self.images, self.labels, self.count = images, labels, 4

    for batch in ({"images": images, "labels": labels}, Plain()):
        program = lambda x, b: Tensor(images.astype(np.float32)) * 1.0  # noqa: E731
        checker, y = with_batch(program, "edp", batch)
        assert checker.states(y) == {"edp": S(0)}
        checker, y = with_batch(lambda x, b: ops.take(x, labels), "cp", batch)
        assert checker.states(y) == {"cp": R}


def test_numbers_that_two_arrays_of_a_batch_hold_are_those_of_none():
    """As many samples as tokens: 0 1 are places and positions."""
    batch = Rows2D(np.zeros((2, 2), int), np.ones((2, 2), int), np.arange(2), np.arange(2))
    for axis in ("edp", "cp"):
        checker, y = with_batch(lambda x, b: ops.take(x, np.arange(2)), axis, batch)
        assert checker.states(y) == {axis: R}
        checker, y = with_batch(lambda x, b: ops.take(x, b.positions), axis, batch)
        assert checker.states(y) == {axis: S(0) if axis == "cp" else R}


def test_whole_numbers_are_not_taken_for_the_numbers_that_they_round():
    batch = {"x": np.array([[1.5, 2.5]])}
    checker, y = with_batch(lambda x, b: ops.take(x, np.array([[1, 2]])), "edp", batch)
    assert checker.states(y) == {"edp": R}


def test_numbers_that_are_not_finite_are_compared_without_a_warning():
    batch = {"x": np.array([[np.nan, 1e300], [np.inf, 2.0]])}
    other = Tensor(np.ones((2, 2), np.float16))
    checker, y = with_batch(lambda x, b: other * 1.0, "edp", batch)
    assert checker.states(y) == {}


LOSSES = [
    ("tp", I, None),
    ("tp", P, "the loss is Partial over tp where it leaves, but must be Invariant; an all_reduce is missing before it"),
    ("tp", R, "every rank would count it: all_reduce in place of sum_everywhere, gather in place of all_gather"),
    ("tp", S(0), "a sum and an all_reduce of it are missing"),
    ("edp", P, None),
    ("cp", P, None),
    ("edp", I, "this all_reduce is doubled: the executor sums over the ranks"),
    ("cp", R, "the loss is Replicate over cp .* or was not recognised: see StateChecker.declare"),
    ("cp", S(0), "the sum over its elements is missing"),
    ("ep", S(0), "the loss is Shard\\(0\\) over ep where it leaves, but must be Partial"),
]


@pytest.mark.parametrize(("axis", "state", "words"), LOSSES)
def test_the_loss_leaves_invariant_on_tp_and_partial_on_axes_that_divide_tokens(axis, state, words):
    checker, y = with_batch(lambda x, b: x * 2.0, axis, table=((3,), state))
    if words is None:
        checker.finish(y)
        return
    with pytest.raises(StateError, match=words) as caught:
        checker.finish(y)
    assert str(caught.value).startswith("at test_states_checker.py:")


def test_a_loss_of_which_nothing_is_known_leaves():
    checker, y = with_batch(lambda x, b: Tensor(np.ones(3)) * 2.0, "tp")
    checker.finish(y)
    checker.add_loss("router", y)


AUXILIARY = [
    ("tp", I, None),
    ("tp", P, None),
    ("tp", R, "or Invariant where all hold them; every rank would add all of it: .* before that copy or all_gather"),
    ("tp", S(0), "the sum over its elements is missing"),
    ("edp", P, None),
    ("ep", P, None),
    ("cp", P, None),
    (
        "edp",
        I,
        "Partial, the sum over this rank's tokens; this all_reduce is doubled: each rank adds what its own tokens",
    ),
    ("ep", R, "every rank would add all of it: it is meant of the value before that sum"),
    ("cp", I, "this all_reduce is doubled"),
    ("cp", S(0), "the sum over its elements is missing"),
]


@pytest.mark.parametrize(("axis", "state", "words"), AUXILIARY)
def test_a_loss_besides_is_the_sum_of_this_ranks_tokens_or_all_ranks_of_tp_hold_them(axis, state, words):
    checker, y = with_batch(lambda x, b: x * 2.0, axis, table=((3,), state))
    if words is None:
        checker.add_loss("router", y)
        return
    said = "dp" if axis == "edp" else axis
    with pytest.raises(StateError, match=words) as caught:
        checker.add_loss("router", y)
    assert f": an auxiliary loss of router is {state} over {said} where it leaves, but must be Partial" in str(
        caught.value
    )
    assert str(caught.value).startswith("at test_states_checker.py:")


def test_a_loss_besides_that_was_summed_over_tp_leaves_only_where_it_was_not_summed_itself():
    checker, y = with_batch(lambda x, b: collectives.all_reduce(x, TP), "tp", table=((3,), P))
    with pytest.raises(StateError, match="this all_reduce is doubled"):
        checker.add_loss("router", y)
    checker, y = with_batch(lambda x, b: ops.exp(collectives.all_reduce(x, TP)), "tp", table=((3,), P))
    checker.add_loss("router", y)


# ------------------------------------------------------------------------------------------------------- the unusual


def test_nothing_is_looked_at_before_a_pass_and_after_it():
    checker = StateChecker([], Grid("tp"))
    x = Tensor(np.ones(X), requires_grad=True)
    checker.declare(x, {"tp": P})
    with listen(checker):
        ops.exp(x)
        checker.start()
        with pytest.raises(StateError):
            ops.exp(x)
    checker.start()
    with listen(checker), pytest.raises(StateError, match="must be Invariant"):
        checker.finish(x * 2.0)
    with listen(checker):
        ops.exp(x)


def test_axes_of_one_rank_are_not_followed():
    checker = StateChecker([], Grid())
    checker.start()
    x = Tensor(np.ones(X))
    checker.declare(x, {"tp": P, "dp": P})
    with listen(checker):
        y = ops.exp(x)
    assert checker.states(y) == {}
    checker.finish(y)
    checker.confirm()


def test_dp_is_short_for_both_data_axes():
    checker = StateChecker([], Grid("edp", "ep"))
    x = Tensor(np.ones(X))
    checker.declare(x, {"dp": S(0)})
    assert checker.states(x) == {"edp": S(0), "ep": S(0)}


def test_values_without_a_tape_and_without_dims_are_followed():
    checker = StateChecker([], Grid("tp"))
    checker.start()
    x = Tensor(np.array(3.0))
    checker.declare(x, {"tp": P})
    with listen(checker):
        assert checker.states(-x * 2.0) == {"tp": P}
        with pytest.raises(StateError, match=r"exp\(Partial \(\)\)"):
            ops.exp(x)


def test_a_pass_may_begin_in_the_middle_of_a_tape():
    checker = StateChecker([], Grid("tp"))
    x = Tensor(np.ones(X), requires_grad=True)
    with listen(checker), Tape() as tape:
        y = ops.exp(x)
        checker.start()
        z = y * 2.0
        tape.run_backward([(z, np.ones(X))])
    assert checker.states(z) == {}


def test_an_op_that_failed_leaves_nothing_behind():
    checker = StateChecker([], Grid("tp"))
    checker.start()
    x = Tensor(np.ones(X))
    checker.declare(x, {"tp": S(1)})
    with listen(checker):
        with pytest.raises(ShapeError):
            x + np.ones(5)
        assert checker.states(x + np.ones(6)) == {"tp": S(1)}


class Tries(Function):
    """Calls another op that fails, and goes on without it."""

    @staticmethod
    def forward(x):
        with contextlib.suppress(ShapeError):
            Tensor(x) + np.ones(5)
        return x * 1.0, ()


def test_an_op_that_failed_inside_another_is_not_taken_for_it():
    assert states_of(Tries.apply, (X, S(1))) == S(1)


def test_a_state_error_in_an_op_of_two_operands_stays_one():
    """It is a ValueError, as NumPy's about shapes is."""
    with pytest.raises(StateError):
        states_of(ops.add, (X, P), (X, I))


def test_neither_tensors_nor_tapes_are_kept_alive():
    checker = StateChecker([], Grid("tp"))
    checker.start()
    x = Tensor(np.ones(X), requires_grad=True)
    checker.declare(x, {"tp": S(1)})
    with listen(checker), Tape() as tape:
        y = ops.exp(x) * 2.0
    kept = [weakref.ref(each) for each in (x, y, tape)]
    del x, y, tape
    gc.collect()
    assert [ref() for ref in kept] == [None, None, None]


# ------------------------------------------------------------------------------------------------------------- digests


def test_a_digest_is_of_the_numbers_whatever_their_strides():
    x = np.arange(24.0).reshape(4, 6)
    assert digest(x) == digest(np.asfortranarray(x)) == digest(x[::-1][::-1])
    assert digest(np.float64(3.0)) == digest(np.array(3.0))
    assert digest(np.zeros((0, 3))) == digest(np.zeros(0)) == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "bool"])
def test_a_digest_sees_every_element(dtype):
    x = np.zeros((3, 5), dtype)
    found = {digest(x)}
    for i in range(x.size):
        x.flat[i] = 1
        found.add(digest(x))
        x.flat[i] = 0
    assert len(found) == x.size + 1


def test_a_digest_of_a_recipe_is_that_of_what_it_is_made_from():
    a, b, ids = np.ones((2, 3)), np.ones((3, 2)), np.array([0, 1])
    kinds = [Product(a, b, a.dtype), Product(2 * a, b, a.dtype), Product(a, 2 * b, a.dtype)]
    kinds += [RowSum(ids, a, (4, 3)), RowSum(ids[::-1], a, (4, 3)), RowSum(ids, 2 * a, (4, 3))]
    assert len({digest(kind) for kind in kinds}) == 6
    assert digest(Product(a.copy(), b.copy(), a.dtype)) == digest(kinds[0])

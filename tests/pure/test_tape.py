"""The tape: order, what it keeps, what it yields, how it is walked, how it prints."""

import gc
import weakref

import numpy as np
import pytest

from mpitrain.autograd import Function, Tape, Tensor, ops
from mpitrain.autograd.lazy import Lazy, Product, RowSum
from mpitrain.errors import ConfigError, GraphError
from mpitrain.events import listen
from mpitrain.nn.layers import LayerNorm, Linear
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter


class Alone:
    coords = dict.fromkeys(("pp", "edp", "ep", "cp", "tp"), 0)
    sizes = dict.fromkeys(coords, 1)


class TwoLayers(Module):
    def __init__(self):
        super().__init__("net")
        self.norm = LayerNorm("norm", 4)
        self.up = Linear("up", 4, 6)
        self.down = Linear("down", 6, 3, bias=False)
        self.materialize(Alone, dtype=np.float64)

    def forward(self, x):
        return self.down(ops.gelu_tanh(self.up(self.norm(x))))


X = np.random.default_rng(3).standard_normal((2, 4))
V = np.random.default_rng(4).standard_normal((2, 3))


def names(finals):
    return [[p.name for p in final] for final in finals]


def grads_of(model):
    return {p.name: p.grad.copy() for p in model.parameters()}


def test_backward_yields_each_parameter_after_the_node_of_its_first_use():
    model = TwoLayers()
    with Tape() as tape:
        y = model(Tensor(X))
        z = ops.linear(y, model.down.weight.T)  # a later use of an earlier weight
    finals = names(tape.backward([(z, np.ones((2, 6)))]))
    assert finals == [[], [], ["down.weight"], [], ["up.weight", "up.bias"], ["norm.weight", "norm.bias"]]


def test_a_parameter_is_final_when_it_is_yielded():
    model = TwoLayers()
    with Tape() as tape:
        y = model(Tensor(X))
    seen = {}
    for final in tape.backward([(y, V)]):
        seen.update((p.name, p.grad.copy()) for p in final)
    assert seen.keys() == grads_of(model).keys()
    for name, grad in grads_of(model).items():
        assert np.array_equal(seen[name], grad)


def test_the_first_gradient_of_a_step_overwrites_and_the_next_adds():
    model = TwoLayers()
    for p in model.parameters():
        p.grad[...] = np.nan  # what lay in the buffer must not matter
    model.start_step()
    once = None
    for _ in range(3):
        with Tape() as tape:
            y = model(Tensor(X))
        tape.run_backward([(y, V)])
        once = once or grads_of(model)
    for name, grad in grads_of(model).items():
        np.testing.assert_allclose(grad, 3 * once[name], rtol=1e-14)


def test_several_seeds_add_up_and_may_sit_in_the_middle():
    x = Tensor(X, requires_grad=True)
    with Tape() as tape:
        y = x * 2.0
        z = y * 3.0
    dx = tape.run_backward([(z, X), (y, X), (z, X), (x, X)])[x]
    np.testing.assert_allclose(dx, X * (6 + 2 + 6 + 1))


def test_a_value_used_three_times_gets_three_gradients_in_every_shape():
    for shape in ((), (1,), (2, 3)):
        x = Tensor(np.ones(shape), requires_grad=True)
        with Tape() as tape:
            y = x * 1.0
            z = y + y + y * 4.0 + y
        dx = tape.run_backward([(z, np.ones(shape))])[x]
        assert np.array_equal(dx, np.full(shape, 7.0))


def test_gradients_that_two_slots_share_are_not_written():
    a, b = Tensor(X, requires_grad=True), Tensor(X, requires_grad=True)
    with Tape() as tape:
        y = a + b  # hands the same array to both
        z = y + a * 1.0
    seed = V[:, :1] * np.ones((2, 4))
    kept = seed.copy()
    grads = tape.run_backward([(z, seed)])
    np.testing.assert_array_equal(seed, kept)
    np.testing.assert_array_equal(grads[a], 2 * seed)
    np.testing.assert_array_equal(grads[b], seed)


def test_only_gradients_that_are_asked_for_are_computed():
    asked = []

    class Spy(Function):
        @staticmethod
        def forward(a, b, c):
            return a + b + c, ()

        @staticmethod
        def backward(grad, *, wanted):
            asked.append(wanted)
            return tuple(grad if want else None for want in wanted)

    a, c = Tensor(X), Tensor(X, requires_grad=True)
    with Tape() as tape:
        y = Spy.apply(a, X, c)
    assert list(tape.run_backward([(y, X)])) == [c]
    assert asked == [(False, False, True)]


def test_a_branch_without_gradient_is_skipped_and_its_parameters_still_come():
    model = TwoLayers()
    with Tape() as tape:
        model(Tensor(X))
        y = Tensor(X, requires_grad=True) * 2.0
    finals = names(tape.backward([(y, X)]))
    assert [name for final in finals for name in final] == [
        "down.weight", "up.weight", "up.bias", "norm.weight", "norm.bias",
    ]  # fmt: skip
    assert not any(p.touched for p in model.parameters())
    assert tape.nbytes == 0


def test_without_a_tape_or_without_a_wish_nothing_is_recorded():
    x = Tensor(X, requires_grad=True)
    assert (x * 2.0).tape is None
    with Tape() as tape:
        y = Tensor(X) * 2.0
    assert (len(tape), y.requires_grad) == (0, False)


def test_tapes_nest_and_the_inner_one_records():
    x = Tensor(X, requires_grad=True)
    with Tape() as outer:
        y = x * 2.0
        with Tape() as inner:
            z = y * 3.0
        w = y * 5.0
    assert (len(outer), len(inner)) == (2, 1)
    np.testing.assert_allclose(inner.run_backward([(z, X)])[y], 3 * X)
    np.testing.assert_allclose(outer.run_backward([(w, X)])[x], 10 * X)


def test_input_and_weight_halves_together_equal_one_walk():
    whole, halves = TwoLayers(), TwoLayers()
    results = []
    for model in (whole, halves):
        x = Tensor(X, requires_grad=True)
        with Tape() as tape:
            y = model(x)
            z = ops.linear(y, model.down.weight.T.astype(np.float32).astype(np.float64))
        seeds = [(z, np.ones((2, 6))), (y, V)]
        if model is whole:
            finals = names(tape.backward(seeds))
        else:
            tape.backward_inputs(seeds)
            assert not any(p.touched for p in model.parameters())
            kept = tape.nbytes
            assert x in tape.grads
            finals = names(tape.backward_weights())
            assert kept > tape.nbytes == 0
        results.append((tape.grads[x], grads_of(model), finals))
    (dx, grads, finals), (dx2, grads2, finals2) = results
    assert np.array_equal(dx, dx2)
    assert finals == finals2
    for name in grads:
        assert np.array_equal(grads[name], grads2[name]), name


def test_the_input_half_frees_what_no_weight_needs():
    x = Tensor(X, requires_grad=True)
    model = TwoLayers()
    with Tape() as tape:
        y = model(x).tanh().exp()
    before = tape.nbytes
    tape.backward_inputs([(y, V)])
    assert tape.nbytes < before


def test_what_makes_all_its_gradients_in_one_pass_makes_them_in_the_input_half():
    """Its weights are written in the weight half all the same, so that they are final there, and counted till then."""
    made = []

    def note(event):
        if event.kind == "op" and event.phase == "begin":
            made.append((event.name, event.info["wanted"]))

    x = Tensor(X, requires_grad=True)
    norm = LayerNorm("norm", 4)
    norm.materialize(Alone, dtype=np.float64)
    with Tape() as tape:
        y = norm(x)
    with listen(note):
        tape.backward_inputs([(y, X)])
        assert made == [("layer_norm.backward", (True, True, True))]
        assert not norm.weight.touched
        assert tape.nbytes == 2 * norm.weight.grad.nbytes
        assert names(tape.backward_weights()) == [["norm.weight", "norm.bias"]]
    assert len(made) == 1
    assert tape.nbytes == 0
    np.testing.assert_array_equal(norm.bias.grad, X.sum(axis=0))


def test_where_only_weights_want_a_gradient_the_input_half_leaves_all_to_the_other():
    norm = LayerNorm("norm", 4)
    norm.materialize(Alone, dtype=np.float64)
    with Tape() as tape:
        y = norm(Tensor(X))
    tape.backward_inputs([(y, X)])
    assert tape.nbytes > 2 * norm.weight.grad.nbytes
    list(tape.backward_weights())
    np.testing.assert_array_equal(norm.bias.grad, X.sum(axis=0))


def test_gradients_that_wait_for_the_weight_half_count_and_inputs_are_let_go():
    class Layer(Module):
        def __init__(self):
            super().__init__("layer")
            self.weight = Parameter("weight", (4, 3), init=lambda *_: np.ones((4, 3)))
            self.materialize(Alone, dtype=np.float64)

    layer = Layer()
    data = X.copy()
    alive = weakref.ref(data)
    x = Tensor(data, requires_grad=True)
    with Tape() as tape:
        y = ops.linear(x * 2.0, layer.weight)
    grad = np.ones((2, 3))
    tape.backward_inputs([(y, grad)])
    np.testing.assert_array_equal(tape.grads.pop(x), np.full((2, 4), 6.0))
    assert tape.nbytes == data.nbytes + grad.nbytes  # the product's input and the gradient of its result
    del x, data
    assert alive() is None
    list(tape.backward_weights())
    np.testing.assert_allclose(layer.weight.grad, (2 * X).T @ grad)


@pytest.mark.parametrize("again", ["backward", "backward_inputs", "backward_weights", "record"])
def test_a_tape_is_walked_once(again):
    x = Tensor(X, requires_grad=True)
    with Tape() as tape:
        y = x * 2.0
        tape.run_backward([(y, X)])
        walk_again = {
            "backward": lambda: next(tape.backward([(y, X)])),
            "backward_inputs": lambda: tape.backward_inputs([(y, X)]),
            "backward_weights": lambda: next(tape.backward_weights()),
            "record": lambda: y * 2.0,
        }[again]
        with pytest.raises(GraphError):
            walk_again()


def test_seeds_must_be_on_the_tape_and_of_the_right_shape():
    x = Tensor(X, requires_grad=True)
    for make in (lambda: Tensor(X), lambda: x * 2.0):
        with Tape() as tape:
            x * 3.0
        with pytest.raises(GraphError, match="is not on this tape"):
            tape.run_backward([(make(), X)])
    with Tape() as tape:
        y = x * 2.0
    with pytest.raises(GraphError, match=r"shape \(2, 4\) has shape \(4,\)"):
        tape.run_backward([(y, np.ones(4))])


def test_seeds_are_pairs_and_what_is_none_leaves_the_tape_as_it_was():
    x = Tensor(X, requires_grad=True)
    with Tape() as tape:
        y = x * 2.0
        loss = y.sum()
    wrong = [y, [y], (y, X), [(y, y)], [(y, None)], [(y, 1.0)], [(X, y)], tape.slot(y), [tape.slot(y)]]
    for seeds in wrong:
        with pytest.raises(GraphError, match=r"run_backward\(\[\(y, gradient\)\]\)"):
            tape.run_backward(seeds)
    assert (tape.run_backward([(loss, 3.0)])[x] == 6.0).all()  # of one number a number is enough
    with pytest.raises(GraphError, match=r"Record with Tape\(\) as tape, then tape.run_backward"):
        loss.backward()


def test_a_number_as_seed_has_the_precision_of_its_tensor():
    x = Tensor(X.astype(np.float32), requires_grad=True)
    with Tape() as tape:
        loss = x.sum()
    assert tape.run_backward([(loss, 1.0)])[x].dtype == np.float32


class Twice(Function):
    @staticmethod
    def forward(x, *, returned):
        return {"y": 2 * x, "y, x": (2 * x, x), "y, ()": (2 * x, ()), "nothing": None, "three": (x, x, ())}[returned]

    @staticmethod
    def backward(grad, *, wanted, returned):
        return 2 * grad


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("y", r"one ndarray of shape \(2, 4\)"),
        ("y, x", r"a tuple of 2: \(ndarray \(2, 4\), ndarray \(2, 4\)\)"),
        ("nothing", "None"),
        ("three", "a tuple of 3"),
    ],
)
def test_a_forward_that_does_not_return_what_it_makes_and_what_it_saves_is_named(returned, told):
    with pytest.raises(ConfigError, match=rf"Twice.forward returned {told}") as caught:
        Twice.apply(Tensor(X), returned=returned)
    assert "return y, (x,) or return y, ()" in str(caught.value)


def test_a_backward_that_is_not_one_gradient_an_input_is_named():
    for inputs, count in ((X, "2 inputs"), (X[:1], "1 input")):  # of one row a row would do
        two = type("Two", (Twice,), {"forward": lambda *xs: (2 * xs[0], ()), "backward": lambda grad, wanted: 2 * grad})
        x = Tensor(inputs, requires_grad=True)
        with Tape() as tape:
            y = two.apply(*(x, x)[: int(count[0])])
        with pytest.raises(ConfigError, match=f"Two.backward returned one ndarray .*, but the operation has {count}"):
            tape.run_backward([(y, inputs)])


def test_a_backward_that_is_not_told_what_is_wanted_is_refused_with_its_class():
    with pytest.raises(ConfigError, match=r"Deaf.backward\(grad, x\) takes no wanted"):
        type("Deaf", (Function,), {"backward": staticmethod(lambda grad, x: (grad,))})
    type("Some", (Function,), {"backward": staticmethod(lambda grad, **how: (grad,))})


def test_a_weight_that_was_written_between_forward_and_backward_is_refused():
    for walk in (lambda tape, y: tape.run_backward([(y, V)]), lambda tape, y: tape.backward_inputs([(y, V)])):
        model = TwoLayers()
        with Tape() as tape:
            y = model(Tensor(X, requires_grad=True))
        model.up.weight.version += 1
        with pytest.raises(GraphError, match=r"up\.weight was written between forward and backward"):
            walk(tape, y)
    model = TwoLayers()
    with Tape() as tape:
        y = model(Tensor(X, requires_grad=True))
    tape.backward_inputs([(y, V)])
    model.down.weight.version += 1
    with pytest.raises(GraphError, match=r"down\.weight was written"):
        list(tape.backward_weights())


def test_a_long_chain_needs_no_recursion_and_goes_without_a_crash():
    """C03."""
    x = Tensor(np.ones(()), requires_grad=True)
    y = x
    with Tape() as tape:
        for _ in range(50_000):
            y = y * 1.0 + 0.0
    assert tape.run_backward([(y, np.ones(()))])[x] == 1.0
    y = x
    with Tape() as tape:  # and once without a backward
        for _ in range(50_000):
            y = y * Tensor(np.ones(())) + 0.0
    ghost = weakref.ref(tape)
    del tape, y
    assert ghost() is None


def test_a_dropped_tape_frees_its_arrays_at_once():
    x = Tensor(np.ones((100, 100)), requires_grad=True)
    gc.disable()
    try:
        with Tape() as tape:
            y = x.exp()
        ghost = weakref.ref(y.data)
        del y
        assert ghost() is not None  # exp saved it
        del tape
        assert ghost() is None
    finally:
        gc.enable()


def test_backward_frees_what_a_node_saved_as_it_goes():
    x = Tensor(X, requires_grad=True)
    with Tape() as tape:
        y = x.tanh().tanh().tanh()
    held = [tape.nbytes]
    for _ in tape.backward([(y, X)]):
        held.append(tape.nbytes)
    assert held == [3 * X.nbytes, 2 * X.nbytes, X.nbytes, 0]


def test_nbytes_counts_distinct_memory_and_no_parameters():
    model = TwoLayers()
    x = Tensor(np.ones((50, 4)), requires_grad=True)
    with Tape() as tape:
        h = model.up(x)
        ops.tanh(h)  # saves its value, 50 x 6
        h.exp()  # and this
        (x * x).sum()  # x again
        ops.matmul(x[:10], model.up.weight)  # and a view of it
    assert tape.nbytes == (50 * 4 + 2 * 50 * 6) * 8


def test_a_tape_prints_like_a_listing():
    model = TwoLayers()
    with Tape() as tape:
        x = Tensor(X.astype(np.float64), requires_grad=True)
        y = model(x) * 2
        a, _ = ops.split(y, (1, 2), 1)
        (a + X[:, :1]).sum()
    assert str(tape) == "\n".join(
        [
            "%0 = input  (2, 4) float64",
            "%1 = norm.weight  (4,) float64",
            "%2 = norm.bias  (4,) float64",
            "%4 = up.weight  (4, 6) float64",
            "%5 = up.bias  (6,) float64",
            "%8 = down.weight  (6, 3) float64",
            "%3 = layer_norm(%0, %1, %2; eps=1e-05)  (2, 4) float64  norm",
            "%6 = linear(%3, %4, %5)  (2, 6) float64  up",
            "%7 = gelu_tanh(%6)  (2, 6) float64  net",
            "%9 = linear(%7, %8)  (2, 3) float64  down",
            "%10 = scale(%9; factor=2.0)  (2, 3) float64",
            "%11, %12 = split(%10; lengths=(1, 2), dim=1)  (2, 1) float64  (2, 2) float64",
            "%13 = add(%11, const)  (2, 1) float64",
            "%14 = sum(%13; dims=(0, 1), keepdims=False)  () float64",
        ]
    )


class Log:
    """A policy that remembers what went through it, and keeps single precision."""

    def __init__(self):
        self.packed, self.unpacked = [], 0

    def pack(self, node, place, array):
        self.packed.append((node.function.title(), array.shape))
        return array.astype(np.float32)

    def share(self, node, place, array, handle):
        return handle

    def unpack(self, node, place, handle):
        self.unpacked += 1
        return handle.astype(np.float64)


def test_a_save_policy_sees_each_array_once_and_no_weights():
    model, policy = TwoLayers(), Log()
    x = Tensor(X, requires_grad=True)
    with Tape(policy) as tape:
        h = ops.tanh(model.up(x))
        y = ops.linear(h, model.down.weight.astype(np.float64)) + x.sum()
    assert policy.packed == [("linear", (2, 4)), ("tanh", (2, 6))]  # the second linear saves tanh's value again
    assert tape.nbytes == (8 + 12) * 4
    dx = tape.run_backward([(y, V)])[x]
    assert policy.unpacked == 3
    with Tape() as plain:
        y = ops.linear(ops.tanh(model.up(x)), model.down.weight) + x.sum()
    np.testing.assert_allclose(dx, plain.run_backward([(y, V)])[x], rtol=1e-5)


def test_events_surround_every_op_on_the_way_there_and_back():
    model = TwoLayers()
    events = []
    with listen(events.append), Tape() as tape:
        y = model.up(Tensor(X)).tanh()
        tape.run_backward([(y, np.ones((2, 6)))])
    assert [(e.name, e.phase, e.info["path"]) for e in events] == [
        ("linear", "begin", "up"),
        ("linear", "end", "up"),
        ("tanh", "begin", ""),
        ("tanh", "end", ""),
        ("tanh.backward", "begin", ""),
        ("tanh.backward", "end", ""),
        ("linear.backward", "begin", "up"),
        ("linear.backward", "end", "up"),
    ]
    assert events[3].info["output"] is y.data
    assert events[3].info["outputs"] == (y,)
    assert events[0].info["tensors"][1] is events[1].info["tensors"][1] is model.up.weight
    assert [(e.info["tape"], e.info["node"]) for e in events[4:]] == [(tape, tape.nodes[i]) for i in (1, 1, 0, 0)]


def test_a_listener_is_told_of_the_end_of_an_op_when_it_is_on_the_tape():
    lengths = []
    with Tape() as tape, listen(lambda event: lengths.append((event.phase, len(tape)))):
        ops.split(Tensor(X, requires_grad=True), 2)
    assert lengths == [("begin", 0), ("end", 1)]


def test_transposing_a_weight_keeps_its_gradient_a_recipe():
    seen = []

    class Buffer(Parameter):
        __slots__ = ()

        def accumulate(self, grad):
            seen.append(grad)

    w = Buffer("w", (3, 4), init=None)
    w.data = np.ones((3, 4))
    with Tape() as tape:
        y = ops.linear(Tensor(X), w.T)
    tape.run_backward([(y, V)])
    (grad,) = seen
    assert isinstance(grad, Product)
    np.testing.assert_allclose(grad.array(), V.T @ X)


LAZY = [
    Product(X.T, V, X.dtype),
    RowSum(np.array([1, 0, 1]), np.arange(6.0).reshape(3, 2), (4, 2)),
    RowSum(np.zeros(0, np.int64), np.zeros((0, 2)), (4, 2)),
]


@pytest.mark.parametrize("lazy", LAZY, ids=["product", "row sum", "no rows"])
def test_a_recipe_writes_and_adds_what_its_array_is(lazy):
    assert isinstance(lazy, Lazy)
    expected = lazy.array()
    for layout in ("C", "F"):
        out = np.full(expected.shape, np.nan, order=layout)
        lazy.write(out, add=False)
        np.testing.assert_allclose(out, expected, rtol=1e-15)
        lazy.write(out, add=True)
        np.testing.assert_allclose(out, 2 * expected, rtol=1e-15)

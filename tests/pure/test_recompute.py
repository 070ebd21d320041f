"""Recomputation: the same bits with less that waits, whatever goes in, comes out, or goes wrong."""

import gc
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.carry import Carry
from mpitrain.autograd.inner import hand_out
from mpitrain.autograd.recompute import CHECKS_PURITY, RECOMPUTING, Recompute, recompute, recomputing
from mpitrain.autograd.tape import PATH, TAPE
from mpitrain.errors import ConfigError, GraphError
from mpitrain.events import listen
from mpitrain.nn.layers import Dropout, LayerNorm, Linear
from mpitrain.nn.module import Module, mark_recompute
from mpitrain.nn.parameter import Writes
from mpitrain.rng import Draw


class Alone:
    coords = dict.fromkeys(("pp", "edp", "ep", "cp", "tp"), 0)
    sizes = dict.fromkeys(coords, 1)


WIDTH = 6
X = np.random.default_rng(3).standard_normal((4, WIDTH))
V = np.random.default_rng(4).standard_normal((4, WIDTH))
WALKS = ["whole", "halves"]


@pytest.fixture(autouse=True)
def checks_purity():
    """All second forwards are held against the first, as in the first steps of a training run."""
    token = CHECKS_PURITY.set(True)
    yield
    CHECKS_PURITY.reset(token)


class Layer(Module):
    """A residual branch with dropout; it counts its calls, and, apart from them, its passes."""

    def __init__(self, name):
        super().__init__(name)
        self.norm = LayerNorm(f"{name}.norm", WIDTH)
        self.up = Linear(f"{name}.up", WIDTH, 2 * WIDTH)
        self.down = Linear(f"{name}.down", 2 * WIDTH, WIDTH)
        self.drop = Dropout(f"{name}.drop", 0.5)
        self.calls = self.passes = 0

    def forward(self, x, draw=None):
        self.calls += 1
        self.passes += not recomputing()
        return x + self.drop(self.down(ops.gelu_tanh(self.up(self.norm(x)))), draw)


class Net(Module):
    def __init__(self, layers=3, dtype=np.float64):
        super().__init__("net")
        self.blocks = [Layer(f"blocks.{number}") for number in range(layers)]
        self.head = Linear("head", WIDTH, WIDTH, bias=False)
        self.materialize(Alone, seed=1, dtype=dtype)

    def forward(self, x, draw=None):
        for block in self.blocks:
            x = block(x, draw=draw)
        return self.head(x)


class Rows(Draw):
    """Of samples of one position."""

    def rows(self, stream):
        return super().rows(stream)[:, 0]


def draw():
    return Rows(7, 0, np.arange(len(X)), np.zeros(1, np.int64))


def walk(tape, seeds, how="whole"):
    """Walk a tape; the names of the parameters, in the order in which they were final."""
    if how == "halves":
        tape.backward_inputs(seeds)
        assert not any(p.touched for p, *_ in tape._weights)
        finals = list(tape.backward_weights())
    else:
        finals = list(tape.backward(seeds))
    assert tape.nbytes == 0
    return [p.name for final in finals for p in final]


def bits(arrays):
    return {name: (array.dtype, array.tobytes()) for name, array in arrays.items()}


def trained(program, how="whole", policy=None, layers=2, dtype=np.float64):
    """What one pass of `program(model, call, *inputs)` gives, with plain calls and with recomputed ones.

    Returns:
        For each the bits of outputs and gradients, and which parameters were final when.
    """
    found = []
    for call in (lambda fn, *args, **kwargs: fn(*args, **kwargs), recompute):
        model = Net(layers, dtype)
        inputs = [Tensor(array.astype(dtype), requires_grad=True) for array in (X, V)]
        with Tape(policy) as tape:
            outputs = program(model, call, *inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        seeds = [(y, np.cos(np.arange(y.size, dtype=dtype)).reshape(y.shape)) for y in outputs if tape.slot(y)]
        order = walk(tape, seeds, how)
        grads = {str(i): tape.grads[x] for i, x in enumerate(inputs) if x in tape.grads}
        grads |= {p.name: p.grad for p in model.parameters() if p.touched}
        found.append((bits({str(i): y.data for i, y in enumerate(outputs)}), bits(grads), order))
    return found


# -- the same training


def every_layer(model, call, x, y):
    random = draw()
    for block in model.blocks:
        x = call(block, x, random)
    return model.head(x)


def two_layers_at_once(model, call, x, y):
    first, second = model.blocks[:2]
    return call(lambda x: second(first(x, draw()), draw()), x)


def one_in_another(model, call, x, y):
    def outer(x):
        return call(model.blocks[1], call(model.blocks[0], x * 2.0, draw()), draw())

    return call(outer, x)


def four_deep(model, call, x, y):
    def at(depth, x):
        return call(at, depth - 1, x.tanh() + x) * 1.5 if depth else model.blocks[0](x, draw())

    return call(at, 3, x)


def used_inside_twice_and_outside_after(model, call, x, y):
    h = x * 1.0
    z = call(lambda a: a * 0.1 + a.exp() + a.tanh(), h)
    return z + h.exp() * 0.3 + h * 0.7


def found_in_a_closure(model, call, x, y):
    h, w = y.exp(), model.head.weight.T
    return call(lambda a: ops.linear(a * h, w) + h, x) * h


def given_and_found(model, call, x, y):
    h = x.exp()
    return call(lambda a: a * h, h)


def given_twice(model, call, x, y):
    return call(lambda a, b, *, c: a * b + c.exp(), x, x, c=x)


class Pair(NamedTuple):
    left: object
    right: object


def in_containers(model, call, x, y):
    def f(things, *, named, also):
        (a, none, number), (b, ids) = things
        assert (none, number, type(named), type(also)) == (None, 3, Pair, dict)
        return [a * b, {"sum": ops.take(named.left, ids) + also["c"]}, Pair(named.right * 2.0, None)]

    h = x.exp()
    product, rest, pair = call(f, [(x, None, 3), (y, np.array([1, 0, 1, 3]))], named=Pair(h, y), also={"c": h})
    return product, rest["sum"], pair.left


def a_weight_is_given(model, call, x, y):
    return call(ops.linear, x, model.head.weight) + call(ops.linear, y, model.head.weight)


def a_transposed_weight_is_given(model, call, x, y):
    return call(lambda a, w: ops.linear(a, w), x, model.head.weight.T)


def a_weight_is_made(model, call, x, y):
    return ops.linear(x, call(lambda w: w.T, model.head.weight))


def outputs_that_it_did_not_make(model, call, x, y):
    h = x.exp()
    a, b, c, d, e = call(lambda p: (p, p.reshape(-1), model.head.weight, Tensor(X), h * 1.0), h)
    assert (a, c, d.requires_grad) == (h, model.head.weight, False)
    return a * 1.0, b, ops.linear(e, c) + d


def some_outputs_are_used(model, call, x, y):
    _, b, _ = call(lambda a: (a.exp(), a.tanh(), model.blocks[0](a)), x)
    return b + call(lambda a: ops.split(a, 2, 1)[1], y).sum()


def nobody_uses_it(model, call, x, y):
    call(model.blocks[0], x)
    return model.blocks[1](x)


def without_parameters(model, call, x, y):
    return call(lambda a, b: (a * b).tanh().sum(), x, y)


def without_given_inputs(model, call, x, y):
    return call(lambda: model.blocks[0](Tensor(X.astype(x.dtype))))


def of_frozen_inputs(model, call, x, y):
    return call(lambda a, b: model.head(a * b), x.detach(), y)


def of_numbers(model, call, x, y):
    return call(lambda a, n: (a * 2.0).sum() ** n, call(lambda a: a.sum(), x), 3)


def a_parameter_that_was_used_before(model, call, x, y):
    return call(model.head, model.head(call(model.head, x)))


PROGRAMS = [
    every_layer, two_layers_at_once, one_in_another, four_deep, used_inside_twice_and_outside_after,
    found_in_a_closure, given_and_found, given_twice, in_containers, a_weight_is_given, a_transposed_weight_is_given,
    a_weight_is_made, outputs_that_it_did_not_make, some_outputs_are_used, nobody_uses_it, without_parameters,
    without_given_inputs, of_frozen_inputs, of_numbers, a_parameter_that_was_used_before,
]  # fmt: skip


@pytest.mark.parametrize("how", WALKS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.replace("_", " "))
def test_losses_and_gradients_have_the_same_bits_and_come_in_the_same_order(program, dtype, how):
    """T19.1, C59, with dropout."""
    (*plain, order), (*recomputed, order_again) = trained(program, how, dtype=dtype)
    assert plain == recomputed
    assert plain[1]
    if program is nobody_uses_it:  # its node alone knows its parameters, not in which ops they are used
        order, order_again = set(order), set(order_again)
    assert order == order_again


def test_the_two_halves_give_what_the_whole_gives():
    for program in PROGRAMS:
        assert trained(program, "halves")[1] == trained(program, "whole")[1], program.__name__


def test_layers_run_twice_and_a_pass_counts_once():
    """T19.2: forward calls."""
    model = Net()
    with Tape() as tape:
        x = Tensor(X, requires_grad=True)
        for block in model.blocks:
            x = recompute(block, x, draw())
    assert [(block.calls, block.passes) for block in model.blocks] == [(1, 1)] * 3
    tape.run_backward([(x, V)])
    assert [(block.calls, block.passes) for block in model.blocks] == [(2, 1)] * 3
    assert not recomputing()


def test_what_nobody_uses_is_not_computed_again():
    model = Net()
    with Tape() as tape:
        x = Tensor(X, requires_grad=True)
        recompute(model.blocks[0], x)
        y = recompute(model.blocks[1], x)
    tape.run_backward([(y, V)])
    assert [block.calls for block in model.blocks] == [1, 2, 0]


def test_without_a_tape_it_is_a_plain_call_and_within_another_one_too():
    x = Tensor(X, requires_grad=True)
    assert recompute(lambda a: a * 2.0, x).tape is None
    calls = []

    def inner(a):
        calls.append(type(TAPE.get()).__name__)
        return a.exp()

    with Tape() as tape:
        y = recompute(lambda a: recompute(inner, a), x)
    assert (len(tape), calls) == (1, ["Sketch"])
    tape.run_backward([(y, V)])
    assert calls == ["Sketch", "Sketch", "Inner"]


def test_where_nobody_wants_a_gradient_nothing_is_recorded():
    with Tape() as tape:
        y = recompute(lambda a: a.exp(), Tensor(X))
    assert (len(tape), y.requires_grad, y.tape) == (0, False, None)


# -- memory


def test_what_waits_are_the_inputs_and_in_the_walk_one_layer_more():
    """T19.2: stored bytes fall from L A_int to L A_in + A_int."""
    layers, held = 8, {}
    for call in (lambda fn, x, random: fn(x, random), recompute):
        model, random = Net(layers), draw()
        with Tape() as tape:
            x = Tensor(X, requires_grad=True)
            for block in model.blocks:
                x = call(block, x, random)
        before = tape.nbytes
        held[call] = before, max([before, *[tape.nbytes for _ in tape.backward([(x, V)])]])
    (whole, whole_peak), (kept, peak) = held.values()
    inner = whole // layers
    assert whole_peak == whole == layers * inner
    assert kept == layers * X.nbytes
    last = model.blocks[0].down.weight  # the first yield comes when the layer's last ops have freed what they saved
    assert last.grad.nbytes > 0
    assert kept < peak <= kept + inner


def test_inputs_that_several_nodes_save_count_once_and_parameters_do_not():
    model = Net()
    x = Tensor(X, requires_grad=True)
    with Tape() as tape:
        y = recompute(model.blocks[0], x)
        z = recompute(model.blocks[1], x, Pair(x, None)[1])
        recompute(lambda a, b: a * b, x[:2], x[2:])  # views
        recompute(ops.linear, x, model.head.weight)
        x.exp()  # saves its value
    assert tape.nbytes == 2 * X.nbytes
    with tape:
        recompute(lambda: y * z)  # what it finds by itself stays alive, too
    assert tape.nbytes == 4 * X.nbytes


def test_between_the_halves_waits_what_weights_need():
    model = Net()
    data = X.copy()
    alive = weakref.ref(data)
    x = Tensor(data, requires_grad=True)
    with Tape() as tape:
        y = recompute(lambda a: model.head(a * 2.0).tanh().exp(), x)
    assert tape.nbytes == X.nbytes
    tape.backward_inputs([(y, V)])
    assert tape.nbytes == 2 * X.nbytes  # the product's input, and the gradient of its result
    np.testing.assert_array_equal(tape.grads.pop(x).shape, X.shape)
    del x, data
    assert alive() is None
    list(tape.backward_weights())
    assert tape.nbytes == 0
    with Tape() as tape:
        x = Tensor(X, requires_grad=True)
        y = recompute(lambda a: a.exp().tanh(), x)
    tape.backward_inputs([(y, V)])
    assert tape.nbytes == 0  # there are no weights


def test_the_gradient_of_a_weight_that_is_given_is_left_to_the_weights_half():
    """Also where it is no parameter itself, but made of one."""
    model, products = Net(), []
    x = Tensor(X, requires_grad=True)
    with Tape() as tape:
        y = recompute(ops.linear, x, model.head.weight.T)
    with listen(lambda event: products.append(event.info["wanted"][:2]) if event.name == "linear.backward" else None):
        tape.backward_inputs([(y, V)])
        assert products == [(True, False)] * 2
        list(tape.backward_weights())
    assert products[2:] == [(False, True)] * 2


def test_a_dropped_tape_frees_its_arrays_at_once():
    model = Net()
    gc.disable()
    try:
        with Tape() as tape:
            h = Tensor(X, requires_grad=True).exp()
            y = recompute(model.blocks[0], h)
        ghosts = [weakref.ref(h.data), weakref.ref(tape)]
        del h, y
        assert all(ghost() is not None for ghost in ghosts)
        del tape
        assert not any(ghost() is not None for ghost in ghosts)
    finally:
        gc.enable()


def test_the_walk_lets_go_of_a_segment_when_it_is_through():
    model = Net()
    gc.disable()
    try:
        h = Tensor(X, requires_grad=True).exp()
        found = Tensor(V.copy(), requires_grad=True)
        ghost = weakref.ref(found)

        def f(a, found=found):
            return model.blocks[0](a) * found

        with Tape() as tape:
            y = recompute(f, h)
        tape.run_backward([(y, V)])
        del f
        tape.grads.clear()
        tape._leaves.clear()
        tape._leaf_at.clear()
        del found
        assert ghost() is None
    finally:
        gc.enable()


def test_a_long_chain_of_segments_needs_no_recursion():
    """C03."""
    x = Tensor(np.ones(()), requires_grad=True)
    with Tape() as tape:
        y = x
        for _ in range(2_000):
            y = recompute(lambda a: a * 1.0 + 0.0, y)
    assert tape.run_backward([(y, np.ones(()))])[x] == 1.0
    ghost = weakref.ref(tape)
    del tape, y
    assert ghost() is None


class Log:
    """A policy that remembers what went through it."""

    def __init__(self):
        self.packed, self.unpacked = [], 0

    def pack(self, node, place, array):
        self.packed.append((node.function.title(), array.shape))
        return array.copy()

    def share(self, node, place, array, handle):
        return handle

    def unpack(self, node, place, handle):
        self.unpacked += 1
        return handle


def test_a_save_policy_sees_inputs_once_and_in_the_second_forward_what_ops_save():
    model, policy = Net(), Log()
    x = Tensor(X, requires_grad=True)
    with Tape(policy) as tape:
        y = recompute(lambda a, w, n: ops.linear(a, w).tanh(), x, model.head.weight, Tensor(np.ones(())))
        z = recompute(lambda a: a.exp() + y, x)
    assert policy.packed == [("recompute", X.shape)]
    assert tape.nbytes == 2 * X.nbytes + 8  # x as it was packed, and y, which a function holds itself
    tape.run_backward([(z, V)])
    assert policy.packed == [("recompute", X.shape), ("exp", X.shape), ("linear", X.shape), ("tanh", X.shape)]
    for program in PROGRAMS:
        plain, recomputed = trained(program, policy=Log())
        assert plain[:2] == recomputed[:2]


# -- parameters


def test_parameters_have_the_arrays_of_the_first_forward_and_then_their_own_again():
    """As in pipelines that exchange weights between forward and backward."""
    for how in WALKS:
        plain, model = Net(), Net()
        for net, call in ((plain, lambda fn, x: fn(x)), (model, recompute)):
            with Tape() as tape:
                y = call(net.blocks[0], Tensor(X, requires_grad=True))
            old = [(p.data, p.writes) for p in net.parameters()]
            new = [(p.data + 1.0, Writes()) for p in net.parameters()]
            for p, (data, writes) in zip(net.parameters(), new, strict=True):
                p.data, p.writes = data, writes
                p.version += 5
            walk(tape, [(y, V)], how)
            for p, (data, writes), (mine, counts) in zip(net.parameters(), new, old, strict=True):
                assert (id(p.data), id(p.writes), writes.count) == (id(data), id(writes), 5)
                assert (mine is data, counts.count) == (False, 0)
        assert bits({p.name: p.grad for p in plain.parameters()}) == bits({p.name: p.grad for p in model.parameters()})


def test_a_weight_that_was_written_in_between_is_refused():
    model = Net()
    with Tape() as tape:
        y = recompute(model.blocks[0], Tensor(X, requires_grad=True))
    model.blocks[0].up.weight.version += 1
    with pytest.raises(GraphError, match=r"blocks\.0\.up\.weight was written between forward and backward"):
        tape.run_backward([(y, V)])
    model = Net()
    with Tape() as tape:
        y = recompute(model.blocks[0], Tensor(X, requires_grad=True))
    tape.backward_inputs([(y, V)])
    model.blocks[0].down.weight.version += 1
    with pytest.raises(GraphError, match=r"down\.weight was written"):
        list(tape.backward_weights())


def test_a_parameter_is_final_when_it_is_yielded_and_as_early_as_without():
    model = Net()
    with Tape() as tape:
        y = recompute(model, Tensor(X, requires_grad=True), draw())
    seen, left = {}, []
    for final in tape.backward([(y, V)]):
        seen.update((p.name, p.grad.copy()) for p in final)
        left.append(sum(p.touched for p in model.parameters()) - len(seen))
    assert bits(seen) == bits({p.name: p.grad for p in model.parameters()})
    assert left == [0] * len(left)  # none that is written waits for another node


# -- what goes wrong


def test_an_error_in_the_function_leaves_everything_as_it_was():
    model = Net()
    fails = []

    def f(a):
        y = model.blocks[0](a)
        if fails:
            raise KeyError("no")
        return y

    x = Tensor(X, requires_grad=True)
    with Tape() as tape:
        fails.append(1)
        with pytest.raises(KeyError):
            recompute(f, x)
        assert (len(tape), TAPE.get(), x.tape) == (0, tape, None)
        fails.clear()
        y = recompute(f, x)
    fails.append(1)
    newest = [(p.data + 1.0, Writes()) for p in model.parameters()]
    for p, (data, writes) in zip(model.parameters(), newest, strict=True):
        p.data, p.writes = data, writes
    with pytest.raises(KeyError):
        tape.run_backward([(y, V)])
    assert (TAPE.get(), RECOMPUTING.get(), PATH.get()) == (None, False, "")
    assert all(p.data is data and p.writes is w for p, (data, w) in zip(model.parameters(), newest, strict=True))


def counted(made):
    """A function that gives something else at each call."""
    calls = iter(made)
    return lambda a: next(calls)(a)


IMPURE = [
    ("gave other numbers", [lambda a: a * 2.0, lambda a: a * 3.0]),
    (r"made \(4, 6\) float64, at first \(4,\) float64", [lambda a: a.sum(1), lambda a: a * 1.0]),
    (r"made nothing, at first \(4, 6\) float64", [lambda a: a * 1.0, lambda a: Tensor(X)]),
    (r"made \(4, 6\) float64, at first \(4, 6\) float64, \(4, 6\) float64", [
        lambda a: (a * 1.0, a * 2.0), lambda a: (a * 1.0, a)]),
]  # fmt: skip


@pytest.mark.parametrize(("message", "made"), IMPURE, ids=["numbers", "shape", "nothing", "fewer"])
def test_a_function_that_is_not_pure_is_named(message, made):
    with Tape() as tape:
        token = PATH.set("blocks.3")
        y = recompute(counted(made), Tensor(X, requires_grad=True))
        PATH.reset(token)
    seeds = [(t, np.ones(t.shape)) for t in (y if isinstance(y, tuple) else (y,))]
    with pytest.raises(GraphError, match=rf"blocks\.3 \(<lambda>\), called again in backward, {message}"):
        tape.run_backward(seeds)


def test_dropout_from_numpy_is_found_where_it_is_looked_for():
    generator = np.random.default_rng(0)

    def noisy(a):
        return a * (generator.random(a.shape) > 0.5)

    for looks in (True, False):
        token = CHECKS_PURITY.set(looks)
        with Tape() as tape:
            y = recompute(noisy, Tensor(X, requires_grad=True))
        CHECKS_PURITY.reset(token)
        if looks:
            with pytest.raises(GraphError, match=r"noisy, called again.*\n.*np\.random"):
                tape.run_backward([(y, V)])
        else:
            tape.run_backward([(y, V)])


def test_other_parameters_or_values_than_at_first_are_refused():
    model, late = Net(), Tensor(V, requires_grad=True)
    for message, second in (
        ("other parameters", lambda a: a * 1.0 + model.blocks[1].norm(a) * 0.0),
        (r"a value of shape \(4, 6\)", lambda a: a * 1.0 + late * 0.0),
    ):
        with Tape() as tape:
            y = recompute(counted([lambda a: a * 1.0, second]), Tensor(X, requires_grad=True))
        with pytest.raises(GraphError, match=message):
            tape.run_backward([(y, V)])


def test_a_value_that_escapes_is_refused_where_it_is_used():
    kept = []

    def f(a):
        kept.append(a.exp())
        return kept[-1].tanh()

    for use in (lambda: kept[0] * 2.0, lambda: recompute(lambda: kept[0] * 2.0)):
        kept.clear()
        with Tape():
            recompute(f, Tensor(X, requires_grad=True))
            with pytest.raises(GraphError, match="the function must return it"):
                use()


def test_what_is_handed_out_is_an_output_also_from_an_inner_function():
    for call in (lambda fn, a: fn(a), recompute):
        for inner in (lambda fn, a: fn(a), recompute):
            kept = []

            def f(a, kept=kept):
                h = a.exp()
                hand_out(h)
                if not recomputing():
                    kept.append(h)
                return h.tanh()

            x = Tensor(X, requires_grad=True)
            with Tape() as tape:
                y = call(lambda a, inner=inner, f=f: inner(f, a * 1.0) + a, x)
                z = y + kept[0] * 3.0
            grad = tape.run_backward([(z, V), (kept[0], V)])[x]
            e = np.exp(X)
            np.testing.assert_allclose(grad, V * (e * (1 - np.tanh(e) ** 2) + 1 + 4 * e))


def test_what_was_handed_out_the_second_time_goes_with_its_tape():
    ghosts = []

    def f(a):
        h = a.exp()
        hand_out(h)
        ghosts.append(weakref.ref(TAPE.get()))
        return h.tanh()

    gc.disable()
    try:
        with Tape() as tape:
            y = recompute(f, Tensor(X, requires_grad=True))
        tape.run_backward([(y, V)])
        assert ghosts[1]() is None
    finally:
        gc.enable()


# -- slices of a sequence


@pytest.mark.parametrize("how", WALKS)
def test_slices_that_are_recomputed_hand_on_to_each_other(how):
    """TeraPipe: a later slice looks at what earlier ones kept in their own recomputed parts.

    Also in a pass that is a second one as a whole.
    """
    found = []
    token = RECOMPUTING.set(False)
    for call, again in ((lambda fn, *args: fn(*args), False), (recompute, False), (recompute, True)):
        RECOMPUTING.set(again)
        model, carry = Net(), Carry()
        xs = [Tensor(X * part, requires_grad=True) for part in (1, 2, 3)]
        tapes, outputs = [], []

        def layer(x, carry, number, model=model):
            past = carry.earlier(f"layer {number}")
            y = model.blocks[number](x)
            carry.keep(f"layer {number}", y)
            for earlier in past:
                y = y + earlier.tanh() * x
            return y

        for part, x in enumerate(xs):
            carry.begin(part)
            with Tape() as tape:
                y = x
                for number in range(2):
                    y = call(layer, y, carry, number)
            tapes.append(tape)
            outputs.append(y)
        for part in (2, 1, 0):
            seeds = [(outputs[part], V), *carry.seeds(part)]
            if how == "halves":
                tapes[part].backward_inputs(seeds)
                carry.pass_back(part, tapes[part])
            else:
                tapes[part].run_backward(seeds)
                carry.pass_back(part, tapes[part])
        for part in (2, 1, 0) if how == "halves" else ():
            list(tapes[part].backward_weights())
        grads = {str(part): tape.grads[x] for part, (tape, x) in enumerate(zip(tapes, xs, strict=True))}
        grads |= {p.name: p.grad for p in model.parameters() if p.touched}
        found.append(bits(grads))
    RECOMPUTING.reset(token)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 3 + 12


# -- looking at it


def test_it_prints_as_one_line_with_its_name():
    model = Net()
    with Tape() as tape:
        x = Tensor(X, requires_grad=True)
        y = recompute(model.head.forward, x * 2.0)
        recompute(lambda a: (a, a * y, a * 2.0), y)
        recompute(model.blocks[0].norm, y)
        recompute(ops.tanh, y)
    assert [str(node) for node in tape.nodes] == [
        "%1 = scale(%0; factor=2.0)  (4, 6) float64",
        "%3 = recompute(%1, %2; linear)  (4, 6) float64",
        "%4, %5 = recompute(%3; <lambda>)  (4, 6) float64  (4, 6) float64",
        "%8 = recompute(%3, %6, %7; layernorm)  (4, 6) float64",
        "%9 = recompute(%3; tanh)  (4, 6) float64",
    ]


def test_events_see_through_it():
    model = Net()
    events = []
    with listen(events.append), Tape() as tape:
        y = recompute(model.head, Tensor(X, requires_grad=True))
        tape.run_backward([(y, V)])
    assert [(e.name, e.phase, e.info["path"]) for e in events] == [
        ("recompute", "begin", ""),
        ("linear", "begin", "head"),
        ("linear", "end", "head"),
        ("recompute", "end", ""),
        ("recompute.backward", "begin", ""),
        ("linear", "begin", "head"),
        ("linear", "end", "head"),
        ("recompute.backward", "end", ""),
        ("linear.backward", "begin", "head"),
        ("linear.backward", "end", "head"),
    ]
    assert {e.info["function"] for e in events if e.name.startswith("recompute")} == {Recompute}
    assert events[3].info["outputs"] == (y,)
    assert events[7].info["grads"] == (None, None)
    assert events[8].info["tape"] is not tape


# -- modules


@pytest.mark.parametrize("how", WALKS)
def test_modules_that_are_marked_are_recomputed_with_keyword_arguments_too(how):
    found = []
    for marked in (False, True):
        model = Net()
        for block in model.blocks:
            block.recompute = marked
        x = Tensor(X, requires_grad=True)
        with Tape() as tape:
            y = model(x, draw=draw())
        assert ["recompute" in str(node) for node in tape.nodes] == ([True] * 3 + [False] if marked else [False] * 19)
        order = walk(tape, [(y, V)], how)
        found.append((order, bits({"x": tape.grads[x], **{p.name: p.grad for p in model.parameters()}})))
        assert [(block.calls, block.passes) for block in model.blocks] == [(1 + marked, 1)] * 3
    assert found[0] == found[1]


def test_in_evaluation_a_marked_module_runs_once():
    model = Net()
    mark_recompute(model, ["*.*"])
    model(Tensor(X))
    assert [block.calls for block in model.blocks] == [1, 1, 1]


@pytest.mark.parametrize(
    ("patterns", "marked"),
    [
        ([], []),
        (["blocks.*"], ["blocks.0", "blocks.1", "blocks.2"]),
        (["blocks.1.up", "head"], ["blocks.1.up", "head"]),
        (["blocks.*.norm"], ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm"]),
        (["blocks.[02]", "blocks.2"], ["blocks.0", "blocks.2"]),
        (["*"], ["head"]),
    ],
)
def test_parts_are_marked_by_name(patterns, marked):
    model = Net()
    assert mark_recompute(model, patterns) == marked
    assert [module.name for module in model.modules() if module.recompute] == marked


def test_a_pattern_that_means_nothing_is_refused_and_nothing_is_marked():
    model = Net()
    with pytest.raises(ConfigError, match=r"'block\.\*' is no part of the model.*head.*\n.*blocks") as caught:
        mark_recompute(model, ["head", "block.*"])
    assert "blocks.*, blocks.*.norm" in str(caught.value)
    assert not any(module.recompute for module in model.modules())


def test_where_ranks_hold_different_parts_all_of_them_are_asked():
    model, asked = Net(), []

    def exchange(mine):
        asked.append(mine)
        return [mine, [False, True]]

    assert mark_recompute(model, ["blocks.0", "blocks.7"], exchange) == ["blocks.0"]
    assert asked == [[True, False]]
    with pytest.raises(ConfigError, match=r"'blocks\.7'"):
        mark_recompute(model, ["blocks.0", "blocks.7"], lambda mine: [mine, mine])


@dataclass
class Tokens:
    inputs: np.ndarray


def test_what_is_no_tensor_is_handed_on_as_it_is():
    seen = []

    def f(a, rows, tokens):
        seen.append((rows, tokens))
        return a * rows

    rows, tokens = np.ones((4, 1)), Tokens(np.arange(4))
    x = Tensor(X, requires_grad=True)
    with Tape() as tape:
        y = recompute(f, x, rows, tokens)
    tape.run_backward([(y, V)])
    assert all(r is rows and t is tokens for r, t in seen)
    assert len(seen) == 2


def test_a_list_that_the_function_changes_is_given_again_as_it_was():
    def f(things):
        return things.pop() * 2.0 + things[0]

    x, y = Tensor(X, requires_grad=True), Tensor(V, requires_grad=True)
    with Tape() as tape:
        z = recompute(f, [x, y])
    grads = tape.run_backward([(z, V)])
    np.testing.assert_array_equal(grads[y], 2 * V)
    np.testing.assert_array_equal(grads[x], V)

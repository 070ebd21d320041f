"""Units: weights of a part of a model are here while it works, forwards and backwards, and nowhere in between."""

import gc
import weakref

import numpy as np
import pytest
from often import some

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.recompute import recompute
from mpitrain.errors import GraphError
from mpitrain.events import listen
from mpitrain.nn.layers import Embedding, LayerNorm, Linear
from mpitrain.nn.module import Module
from mpitrain.nn.share import absent, is_absent
from mpitrain.nn.unit import Resident, Unit

WIDTH, ROWS, WORDS = 6, 4, 5
IDS = np.random.default_rng(2).integers(WORDS, size=ROWS)
SEED = np.random.default_rng(4).standard_normal((ROWS, WORDS))
WALKS = ["whole", "halves"]


class OneRank:
    coords = dict.fromkeys(("pp", "edp", "ep", "cp", "tp"), 0)
    sizes = dict.fromkeys(coords, 1)


class Kept(Unit):
    """A unit whose weights are copied from a shelf; it tells a log what it does.

    Attributes:
        alive: references to the arrays that it gave.
    """

    def __init__(self, name, parameters, resident, log):
        super().__init__(name, parameters, resident)
        self.log = log
        self.shelf = {p: p.data.copy() for p in parameters}
        self.alive = []

    def ask(self):
        self.log.append(f"ask {self.name}")

    def arrived(self):
        self.log.append(f"take {self.name}")
        arrays = [self.shelf[p].copy() for p in self.parameters]
        self.alive += map(weakref.ref, arrays)
        return arrays

    def release(self):
        super().release()
        self.log.append(f"drop {self.name}")


class Block(Module):
    def __init__(self, name):
        super().__init__(name)
        self.norm = LayerNorm(f"{name}.norm", WIDTH)
        self.up = Linear(f"{name}.up", WIDTH, 2 * WIDTH)
        self.down = Linear(f"{name}.down", 2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(ops.gelu_tanh(self.up(self.norm(x))))


class Head(Module):
    """A head that is the table again, if it is given one."""

    def __init__(self, name, table=None):
        super().__init__(name)
        self.linear = Linear(f"{name}.linear", WIDTH, WORDS) if table is None else None
        self.weight = None if table is None else table.weight

    def forward(self, x):
        return x @ ops.transpose(self.weight) if self.linear is None else self.linear(x)


class Net(Module):
    """A table, blocks and a head; `wrap` is a place at which parts are made again."""

    def __init__(self, blocks=3, tied=False, wrap=""):
        super().__init__("net")
        self.wrap = wrap
        self.table = Embedding("table", WORDS, WIDTH)
        self.blocks = [Block(f"blocks.{number}") for number in range(blocks)]
        self.head = Head("head", self.table if tied else None)
        self.materialize(OneRank, seed=1, dtype=np.float64)
        for block in self.blocks:
            block.recompute = wrap == "inside"

    def stack(self, x):
        for block in self.blocks:
            x = recompute(block, x) if self.wrap == "around" else block(x)
        return x

    def forward(self, ids):
        x = self.table(ids)
        x = recompute(self.stack, x) if self.wrap == "all" else self.stack(x)
        return self.head(x)


def coming_and_going(net, prefetch=1, parts=None):
    """Make units of the parts of a net; their log, and what counts them."""
    log, resident = [], Resident()
    units = []
    for part in net.parts(0) if parts is None else parts:
        part.unit = Kept(part.name, part.parameters(), resident, log)
        units.append(part.unit)
    for number, unit in enumerate(units):
        unit.after = tuple(units[number + 1 : number + 1 + prefetch])
        unit.before = tuple(reversed(units[max(0, number - prefetch) : number]))
    for part in net.modules():
        for p in part.unit.parameters if part.unit is not None else ():
            p.data, p.visits = absent(p.shape, p.dtype, np), True
    return log, resident, units


def walked(net, how="whole", after_forward=lambda tape: None):
    """Forward and backward; what came out, and each gradient."""
    net.start_step()
    with Tape() as tape:
        y = net(IDS)
    after_forward(tape)
    seeds = [(y, SEED)]
    if how == "halves":
        tape.backward_inputs(seeds)
        finals = list(tape.backward_weights())
    else:
        finals = list(tape.backward(seeds))
    assert {p for final in finals for p in final} == set(net.parameters())
    return y.data.copy(), {p.name: p.grad.copy() for p in net.parameters()}


# ------------------------------------------------------------------------------------------------------------ the order


@pytest.mark.parametrize(
    ("prefetch", "forward", "backward"),
    [
        (0, "ask a take a drop a ask b take b drop b ask c take c drop c",
            "ask c take c drop c ask b take b drop b ask a take a drop a"),
        (1, "ask a take a ask b drop a take b ask c drop b take c drop c",
            "ask c take c ask b drop c take b ask a drop b take a drop a"),
        (2, "ask a take a ask b ask c drop a take b drop b take c drop c",
            "ask c take c ask b ask a drop c take b drop b take a drop a"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", WALKS)
def test_each_comes_before_its_part_works_and_goes_after_it_and_the_next_are_asked_for_meanwhile(
    prefetch, forward, backward, how
):
    net = Net(blocks=1)
    log, _, _ = coming_and_going(net, prefetch)
    parts = []
    walked(net, how, after_forward=lambda tape: parts.append(len(log)))
    names = {"table": "a", "blocks.0": "b", "head": "c"}
    told = [f"{verb} {names[name]}" for verb, name in map(str.split, log)]
    assert " ".join(told[: parts[0]]) == forward
    assert " ".join(told[parts[0] :]) == backward


@pytest.mark.parametrize(("wrap", "times"), [("", 2), ("inside", 2), ("around", 3), ("all", 3)])
def test_a_part_that_is_made_again_needs_no_third_coming_where_it_is_made_again_inside_of_its_unit(wrap, times):
    """ALGORITHMS 23: with full recomputation there are two gathers a step if the second forward shares backward's."""
    net = Net(wrap=wrap)
    log, _, _ = coming_and_going(net)
    walked(net)
    assert [log.count(f"take blocks.{number}") for number in range(3)] == [times] * 3
    assert log.count("take table") == log.count("take head") == 2


# -------------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("wrap", ["", "inside", "around", "all"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", WALKS)
def test_outputs_and_gradients_have_the_bits_of_weights_that_stay(how, tied, wrap):
    """A tied weight is in two units, and comes for each."""
    y, wanted = walked(Net(tied=tied), how)
    for prefetch in (0, 1, 5):
        net = Net(tied=tied, wrap=wrap)
        _, resident, _ = coming_and_going(net, prefetch)
        made, found = walked(net, how)
        assert made.tobytes() == y.tobytes()
        assert {name for name in wanted if wanted[name].tobytes() != found[name].tobytes()} == set()
        assert resident.now == 0


class Gain(Net):
    """A net with a weight of its own beside its parts, whose first block has a part twice."""

    def __init__(self):
        self.gain = Linear("gain", WIDTH, WIDTH, bias=False)
        super().__init__(blocks=2)

    def stack(self, x):
        return super().stack(self.blocks[0].down(self.blocks[0].up(x)))

    def forward(self, ids):
        return super().forward(ids) * ops.sum(self.gain.weight)


@pytest.mark.parametrize("how", WALKS)
def test_a_unit_may_be_within_another_and_work_twice(how):
    """What the whole net holds besides its parts comes around them; layers within a block may be units, too."""
    y, wanted = walked(Gain(), how)
    net = Gain()
    first = net.blocks[0]
    log, resident, _ = coming_and_going(net, 0, parts=[net.table, first.up, first, first.down, net.blocks[1], net.head])
    net.unit = Kept("net", net.gain.parameters(), resident, log)
    for p in net.gain.parameters():
        p.data, p.visits = absent(p.shape, p.dtype, np), True
    made, found = walked(net, how)
    assert made.tobytes() == y.tobytes()
    assert {name for name in wanted if wanted[name].tobytes() != found[name].tobytes()} == set()
    assert resident.now == 0
    assert log.count("take net") == 2
    assert log.count("take blocks.0.up") == log.count("take blocks.0") + 2


# ---------------------------------------------------------------------------------------------------- what is in memory


@pytest.mark.parametrize("wrap", some(["around", "", "inside"]))
@pytest.mark.parametrize("how", WALKS)
def test_between_forward_and_backward_nothing_holds_a_weight(how, wrap):
    """And after backward nothing does, either; what stands for them has their shape, NaN, and no memory."""
    net = Net(tied=True, wrap=wrap)
    _, resident, units = coming_and_going(net)
    total = sum(p.data.nbytes for p in net.parameters())

    def look(tape):
        gc.collect()
        assert not any(each() is not None for unit in units for each in unit.alive)
        assert resident.now == 0
        for p in net.parameters():
            assert is_absent(p.data)
            assert np.isnan(p.data).all()
            assert p.data.base.nbytes == 8
        assert tape.nbytes < total

    walked(net, how, after_forward=look)
    gc.collect()
    assert not any(each() is not None for unit in units for each in unit.alive)


@pytest.mark.parametrize(("prefetch", "units"), [(0, 1), (1, 2), (2, 3)])
def test_no_more_than_the_part_at_work_and_those_asked_for_are_here(prefetch, units):
    """T23.4: blocks of one size, so with one ahead the peak is two of them."""
    net = Net(blocks=5)
    _, resident, of_parts = coming_and_going(net, prefetch)
    walked(net)
    block = of_parts[1].nbytes
    assert resident.peak == units * block


def test_backward_sees_the_newest_weights_and_a_tape_refuses_those_that_were_written():
    net = Net()
    coming_and_going(net)

    def write(_):
        net.head.linear.weight.version += 1

    with pytest.raises(GraphError, match=r"head\.linear\.weight was written between forward and backward"):
        walked(net, after_forward=write)


def test_what_is_on_its_way_can_be_forgotten():
    net = Net(blocks=1)
    log, resident, units = coming_and_going(net)
    units[0].start()
    assert resident.now == units[0].nbytes
    for unit in units:
        unit.forget()
    assert resident.now == 0
    assert log == ["ask table", "take table"]
    units[0].forget()
    walked(net)
    assert resident.now == 0


# --------------------------------------------------------------------------------------- the halves of a split backward


class Wave(Module):
    """Weights that are multiplied with each other, and that go through functions: their gradients need weights."""

    def __init__(self, name):
        super().__init__(name)
        self.one, self.two = Linear(f"{name}.one", WIDTH, WORDS), Linear(f"{name}.two", WIDTH, WORDS)

    def forward(self, x):
        return x @ (ops.sin(self.one.weight) * self.two.weight) + ops.exp(self.two.bias) * self.one.bias


class WaveNet(Net):
    def __init__(self, wrap=""):
        super().__init__(blocks=1, wrap=wrap)
        self.head = Wave("wave")
        self.head.recompute = wrap == "inside"
        self.materialize(OneRank, seed=1, dtype=np.float64)


@pytest.mark.parametrize("wrap", ["", "inside"])
def test_weights_come_a_third_time_where_their_gradients_need_them_in_the_second_half(wrap):
    _, wanted = walked(WaveNet(), "halves")
    net = WaveNet(wrap)
    log, resident, _ = coming_and_going(net)
    _, found = walked(net, "halves")
    assert {name for name in wanted if wanted[name].tobytes() != found[name].tobytes()} == set()
    assert log.count("take wave") == 3
    assert log.count("take blocks.0") == log.count("take table") == 2
    assert resident.now == 0


# ----------------------------------------------------------------------------------------------- printing, and mistakes


def test_a_tape_says_where_weights_come_and_go():
    net = Net(blocks=1)
    coming_and_going(net)
    with Tape() as tape:
        net(IDS)
    lines = [line for line in str(tape).splitlines() if "(" in line and "=" not in line]
    assert lines == [
        "fetch(table)", "release(table)", "fetch(blocks.0)", "release(blocks.0)", "fetch(head)", "release(head)"
    ]  # fmt: skip


def test_listeners_hear_of_both():
    net = Net(blocks=1)
    coming_and_going(net, parts=[net.blocks[0], net.table, net.head])
    told = []

    def note(event):
        if event.kind == "unit" and event.info["path"] == "blocks.0":
            told.append((event.phase, event.name, len(event.info.get("arrays", ()))))

    with listen(note):
        walked(net)
    assert told == [("begin", "fetch", 0), ("end", "fetch", 6), ("end", "release", 0)] * 2


class Leaking(Module):
    """Gives its weight away."""

    def __init__(self):
        super().__init__("leak")
        self.inner = Linear("inner", WIDTH, WIDTH)
        self.outer = Linear("outer", WIDTH, WIDTH)
        self.materialize(OneRank, dtype=np.float64)

    def forward(self, x):
        return self.inner(x) @ self.outer.weight


def test_a_part_that_returns_its_weight_is_refused():
    net = Net()
    net.table.forward = lambda ids: (net.table.weight, ids)
    coming_and_going(net)
    with Tape(), pytest.raises(GraphError, match=r"table returns its weight table\.weight itself"):
        net(IDS)


def test_a_weight_that_is_used_outside_of_its_part_is_refused_by_name():
    net = Leaking()
    coming_and_going(net)
    with Tape(), pytest.raises(GraphError, match=r"outer\.weight is used outside of its part of the model"):
        net(Tensor(np.ones((2, WIDTH))))


def test_weights_go_also_where_a_part_fails():
    net = Net()
    _, resident, _ = coming_and_going(net, prefetch=0)

    def broken(x):
        raise ZeroDivisionError

    net.blocks[1].forward = broken
    with Tape(), pytest.raises(ZeroDivisionError):
        net(IDS)
    assert resident.now == 0
    assert all(is_absent(p.data) for p in net.parameters())


def test_without_a_tape_they_come_and_go_once():
    net = Net(blocks=1)
    log, resident, _ = coming_and_going(net)
    y = net(IDS)
    assert np.isfinite(y.data).all()
    assert [line for line in log if line.startswith("take")] == ["take table", "take blocks.0", "take head"]
    assert resident.now == 0

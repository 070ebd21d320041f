"""Megatron's layers under the state checker: built right they pass; a message left out or sent twice is found."""

import numpy as np
import pytest

from mpitrain import collectives
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.debug.states import StateChecker
from mpitrain.errors import StateError
from mpitrain.events import listen
from mpitrain.nn import init
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel.sequence import between
from mpitrain.spec import INVARIANT, Shard

B, LENGTH, WIDTH, HEADS = 2, 4, 8, 4

copy, all_reduce = collectives.copy, collectives.all_reduce


def all_gather(x, axis):
    return collectives.all_gather(x, axis, 1)


def reduce_scatter(x, axis):
    return collectives.reduce_scatter(x, axis, 1)


def nothing(x, axis):
    return x


def twice(message):
    return lambda x, axis: message(message(x, axis), axis)


class Block(Module):
    """x + drop(second(f(first(norm(x)))) + bias), each message as it is told; ends in a sum of squares."""

    def __init__(self, kind, tp, enter, leave, spec=None, early_bias=False, end=nothing):
        super().__init__("block")
        self.kind, self.tp, self.enter, self.leave, self.end = kind, tp, enter, leave, end
        self.early_bias = early_bias
        hidden = 3 * WIDTH if kind == "attention" else 4 * WIDTH
        back = WIDTH if kind == "attention" else 4 * WIDTH
        self.gain = Parameter("block.gain", (WIDTH,), spec, init=init.ones)
        self.shift = Parameter("block.shift", (WIDTH,), spec, init=init.zeros)
        self.first = Parameter("block.first", (WIDTH, hidden), {"tp": Shard(1)}, init=init.normal(1.0))
        self.first_bias = Parameter("block.first_bias", (hidden,), {"tp": Shard(0)}, init=init.normal(1.0))
        self.second = Parameter("block.second", (back, WIDTH), {"tp": Shard(0)}, init=init.normal(1.0))
        self.bias = Parameter("block.bias", (WIDTH,), spec, init=init.normal(1.0))

    def forward(self, x):
        h = self.enter(ops.layer_norm(x, self.gain, self.shift), self.tp)
        h = ops.linear(h, self.first, self.first_bias)
        h = ops.attention(h, HEADS // self.tp.size) if self.kind == "attention" else ops.gelu_tanh(h)
        y = ops.linear(h, self.second, self.bias if self.early_bias else None)
        y = self.leave(y, self.tp)
        return self.end((ops.residual(x, y, self.bias) ** 2).sum(), self.tp)


def check(kind, enter, leave, stream=INVARIANT, **how):
    """What every rank of two is told about a block: one text, the same on all; '' if nothing is wrong."""

    def main():
        mesh = Mesh(world(), tp=2)
        block = Block(kind, mesh.tp, enter, leave, **how)
        block.materialize(mesh, seed=3, dtype=np.float64)
        whole = np.random.default_rng(9).standard_normal((B, LENGTH, WIDTH))
        x = Tensor(whole if stream == INVARIANT else np.split(whole, 2, 1)[mesh.tp.rank], requires_grad=True)
        checker = StateChecker(block.parameters(), mesh)
        checker.start()
        checker.declare(x, {"tp": stream}, "the stream")
        try:
            with listen(checker):
                with Tape() as tape:
                    loss = block(x)
                checker.confirm()
                tape.run_backward([(loss, np.ones(()))])
                checker.confirm()
                checker.finish(loss)
        except StateError as error:
            return str(error)
        return ""

    first, second = LocalWorld(2).run(main)
    assert first == second
    return first


KINDS = pytest.mark.parametrize("kind", ["mlp", "attention"])
SP = {"stream": Shard(1), "spec": between(True), "end": all_reduce}


@KINDS
def test_a_block_that_is_right_passes(kind):
    assert check(kind, copy, all_reduce) == ""
    assert check(kind, all_gather, reduce_scatter, **SP) == ""


PLAIN_WRONG = [
    (
        "no copy",
        nothing,
        all_reduce,
        "linear of an Invariant and a Shard(2) value over tp; a copy of the Invariant one is",
    ),
    ("two copies", twice(copy), all_reduce, "this copy is doubled: each rank has a copy of its own already"),
    ("no all_reduce", copy, nothing, "residual of a Partial value and an Invariant one over tp; every rank would add"),
    (
        "two all_reduces",
        copy,
        twice(all_reduce),
        "this all_reduce is doubled: the value is summed already (from all_reduce",
    ),
    (
        "a scatter",
        copy,
        reduce_scatter,
        "residual of an Invariant and a Shard(1) value over tp; all_reduce in place of reduce_scatter gives Invariant",
    ),
    ("a gather", all_gather, all_reduce, "this all_gather is doubled: every rank holds the whole value already (from"),
    ("a sum", copy, collectives.sum_everywhere, "; all_reduce in place of sum_everywhere gives Invariant"),
]


@KINDS
@pytest.mark.parametrize(("enter", "leave", "words"), [c[1:] for c in PLAIN_WRONG], ids=[c[0] for c in PLAIN_WRONG])
def test_every_message_of_tensor_parallelism_that_is_missing_or_doubled_is_found(kind, enter, leave, words):
    text = check(kind, enter, leave)
    assert words in text
    assert text.startswith("at test_states_layers.py:")
    assert "\n  in block: " in text


SP_WRONG = [
    (
        "no gather",
        nothing,
        reduce_scatter,
        "linear of a Shard(1) and a Shard(2) value over tp; an all_gather of the Shard(1) one is missing before it",
    ),
    ("two gathers", twice(all_gather), reduce_scatter, "this all_gather is doubled: every rank holds the whole value"),
    ("no scatter", all_gather, nothing, "residual of a Partial value and a Shard(1) one over tp; every rank would add"),
    ("two scatters", all_gather, twice(reduce_scatter), "the ranks hold slices, not summands: an all_gather or gather"),
    (
        "a copy",
        copy,
        reduce_scatter,
        "copy of a Shard(1) value over tp; the ranks hold slices of it already: a gather is",
    ),
    ("a sum", all_gather, all_reduce, "; reduce_scatter in place of all_reduce gives Shard(1) ("),
    (
        "a gather for all",
        lambda x, a: collectives.gather(x, a, 1),
        reduce_scatter,
        "linear of an Invariant and a Shard(2) value over tp; all_gather in place of gather gives Replicate (",
    ),
    (
        "a gather of samples",
        lambda x, a: collectives.all_gather(x, a, 0),
        reduce_scatter,
        "cut along dim 1, not along dim 0",
    ),
]


@KINDS
@pytest.mark.parametrize(("enter", "leave", "words"), [c[1:] for c in SP_WRONG], ids=[c[0] for c in SP_WRONG])
def test_every_message_of_sequence_parallelism_that_is_missing_or_doubled_is_found(kind, enter, leave, words):
    assert words in check(kind, enter, leave, **SP)


def test_a_bias_before_the_sum_is_found():
    """C32, T11.6."""
    for how, messages in (({}, (copy, all_reduce)), (SP, (all_gather, reduce_scatter))):
        text = check("mlp", *messages, early_bias=True, **how)
        assert "linear adds a bias to a Partial product over tp; every rank would add it" in text


def test_a_norm_of_slices_whose_spec_says_invariant_is_found():
    """C39, T13.3: the gradients of its weights would not be summed over tp."""
    text = check("mlp", all_gather, reduce_scatter, **{**SP, "spec": None})
    assert (
        "layer_norm of an Invariant and a Shard(1) value over tp; the spec of block.gain must say Replicate on tp"
        in text
    )


def test_a_norm_of_the_whole_stream_whose_spec_says_replicate_is_found():
    """Its gradients would be summed over tp although every rank has the whole one."""
    text = check("mlp", copy, all_reduce, spec=between(True))
    assert (
        "layer_norm of an Invariant and a Replicate value over tp; the spec of block.gain should say Invariant too, or"
        " a copy of the Invariant one is missing (Invariant from the stream, Replicate from the spec of block.gain)"
    ) in text


def test_a_loss_of_slices_that_is_not_summed_is_found_where_it_leaves():
    text = check("mlp", all_gather, reduce_scatter, **{**SP, "end": nothing})
    assert (
        "the loss is Partial over tp where it leaves, but must be Invariant; an all_reduce is missing before it" in text
    )


# ------------------------------------------------------------------------------------------- values that are not alike


def both(program, tp=2):
    """What each rank is told of a program(checker, axis, x), x being Invariant."""

    def main():
        mesh = Mesh(world(), tp=tp)
        x = Tensor(np.random.default_rng(3).standard_normal((2, 4, 6)), requires_grad=True)
        checker = StateChecker([], mesh)
        checker.start()
        checker.declare(x, {"tp": INVARIANT}, "the stream")
        with listen(checker):
            try:
                program(checker, mesh.tp, x)
                checker.confirm()
            except StateError as error:
                return str(error)
        return ""

    found = LocalWorld(tp).run(main)
    assert len(set(found)) == 1
    return found[0]


def test_a_dropout_mask_that_is_another_on_one_rank_is_found():
    """C36."""

    def program(same):
        def run(checker, axis, x):
            y = x * 2.0
            rows = np.full((2, 4), 5 if same or axis.rank < 2 else 6, np.uint64)
            ops.exp(ops.dropout(y, rows, 0.5))

        return run

    assert both(program(True), 4) == ""
    first, second = both(program(False), 4).splitlines()
    assert first.startswith("at test_states_layers.py:")
    assert first.endswith("the value of dropout is Invariant over tp, but ranks 2, 3 hold another one than ranks 0, 1.")
    assert second == "  Of all such values it is the first that differs."


def test_the_odd_one_of_several_ranks_is_named():
    def program(checker, axis, x):
        x + (1e-15 if axis.rank == 1 else 0.0)

    assert "but rank 1 holds another one than ranks 0, 2, 3" in both(program, 4)


def test_slices_and_summands_may_differ():
    def program(checker, axis, x):
        y = collectives.split(x, axis, 1) * (1.0 + axis.rank)
        collectives.gather(y, axis, 1)
        collectives.all_reduce(ops.exp(y).sum(), axis)

    assert both(program) == ""


def test_a_part_of_a_copy_that_each_rank_picks_may_differ_and_what_is_made_of_it():
    """Positions, or heads that ranks share."""

    def program(invariant):
        def run(checker, axis, x):
            y = x if invariant else collectives.copy(x, axis)
            part = y[:, axis.rank : axis.rank + 2]
            more = ops.take(y, np.arange(2) + axis.rank, dim=1)
            ops.exp(part + more)

        return run

    assert both(program(False)) == ""
    assert "the value of getitem is Invariant over tp, but rank 1 holds another one than rank 0" in both(program(True))


def test_an_f_without_its_backward_is_found(monkeypatch):
    """The gradient of an Invariant value is Invariant; without the sum each rank has its own summand."""

    def program(checker, axis, x):
        with Tape() as tape:
            mine = collectives.pick(collectives.copy(x * 2.0, axis), axis, 2, 3 * axis.rank, 3 * axis.rank + 3)
            loss = collectives.all_reduce(ops.exp(mine).sum(), axis)
        tape.run_backward([(loss, np.ones(()))])

    assert both(program) == ""
    monkeypatch.setattr(collectives.Copy, "backward", staticmethod(lambda grad, *, wanted, axis: (grad,)))
    text = both(program)
    assert text.startswith("at test_states_layers.py:")
    assert "copy.backward, the gradient of the value of scale at test_states_layers.py:" in text
    assert "is Invariant over tp, but rank 1 holds another one than rank 0" in text


def test_gradients_of_summands_are_copies_and_must_be_the_same(monkeypatch):
    def program(checker, axis, x):
        with Tape() as tape:
            mine = collectives.split(x, axis, 1)
            loss = collectives.all_reduce(ops.exp(mine).sum(), axis)
        tape.run_backward([(loss, np.ones(()))])

    assert both(program) == ""
    wrong = staticmethod(lambda grad, *, wanted, axis: (grad * (1.0 + axis.rank),))
    monkeypatch.setattr(collectives.AllReduce, "backward", wrong)
    assert "all_reduce.backward, the gradient of the value of sum at test_states_layers.py:" in both(program)


def test_a_value_that_only_one_rank_makes_is_found():
    def program(checker, axis, x):
        y = x * 2.0
        if axis.rank:
            ops.exp(y)

    assert "the value of exp is Invariant over tp, but rank 1 holds another one than rank 0" in both(program)


def test_a_program_that_differs_is_found_and_does_not_hang():
    def program(checker, axis, x):
        y = x * 2.0
        if axis.rank:
            y = ops.exp(y)
        ops.tanh(y)

    assert "is Invariant over tp, but" in both(program)

"""Operations that were written down once and are gone through again: they make what the model would have made."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.program import Programs
from mpitrain.events import listen
from mpitrain.nn.layers import LayerNorm, Linear
from mpitrain.nn.module import Module


class Sizes:
    coords = MappingProxyType({})
    sizes = MappingProxyType({})


class Model(Module):
    def __init__(self):
        super().__init__("model")
        self.norm = LayerNorm("norm", 6)
        self.up, self.down = Linear("up", 6, 8), Linear("down", 8, 6)
        self.calls = 0
        self.materialize(Sizes(), seed=1, dtype=np.float64)

    def forward(self, x, positions):
        self.calls += 1
        rows = ops.take(self.up.weight, positions)  # a weight that is used twice
        total, normed = ops.residual_norm(x, x * 2.0, None, self.norm.weight, self.norm.bias, eps=1e-5)
        y = self.down(ops.gelu_tanh(self.up(self.norm(normed)))) + total
        return ops.concat([y, rows], 1).reshape(-1)


def given(number):
    draws = np.random.default_rng(number)
    return draws.normal(size=(3, 6)), draws.integers(6, size=(3,))


@pytest.fixture
def model():
    return Model()


def made(model, programs, number, what="step"):
    x, positions = given(number)
    return programs.made(what, lambda: model(Tensor(x), positions), (x, positions)).data


def test_from_the_second_time_on_the_model_is_not_asked(model):
    programs = Programs()
    results = [made(model, programs, number) for number in (0, 1, 2, 0)]
    assert model.calls == 1
    expected = [model(Tensor(x), positions).data for x, positions in map(given, (0, 1, 2, 0))]
    for found, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(found, right)


def test_weights_are_those_of_now(model):
    programs = Programs()
    made(model, programs, 0)
    model.down.weight.data = model.down.weight.data * 3.0  # another array, as weights that come and go have
    model.norm.bias.data[...] = 0.5
    found = made(model, programs, 1)
    x, positions = given(1)
    np.testing.assert_array_equal(found, model(Tensor(x), positions).data)


def test_other_shapes_and_other_things_have_programs_of_their_own(model):
    programs = Programs()
    made(model, programs, 0)
    x, positions = np.ones((5, 6)), np.arange(5)
    longer = programs.made("step", lambda: model(Tensor(x), positions), (x, positions))
    assert model.calls == 2
    np.testing.assert_array_equal(longer.data, model(Tensor(x), positions).data)
    made(model, programs, 0, "another")
    assert model.calls == 4


def test_what_was_made_outside_of_operations_is_made_each_time():
    programs, calls = Programs(), []

    def step(x):
        calls.append(x)
        return ops.add(Tensor(x), np.cos(x))  # no operation has made the cosine

    for x in (np.zeros(3), np.ones(3), np.full(3, 2.0)):
        found = programs.made("step", lambda x=x: step(x), (x,))
        np.testing.assert_array_equal(found.data, x + np.cos(x))
    assert len(calls) == 3


def test_a_result_that_no_operation_made_is_made_each_time():
    programs = Programs()
    for value in (1.0, 2.0):
        x = np.full(3, value)
        assert programs.made("step", lambda x=x: Tensor(np.exp(x)), (x,)).data[0] == np.exp(value)


def test_a_tape_and_a_listener_see_every_operation(model):
    programs = Programs()
    made(model, programs, 0)
    with Tape() as tape:
        made(model, programs, 1)
    assert len(tape.nodes) > 5
    heard = []
    with listen(heard.append):
        made(model, programs, 1)
    assert {event.name for event in heard} >= {"layer_norm", "linear", "concat"}
    assert model.calls == 3


def test_an_operation_that_gives_its_input_back_is_left_out():
    programs = Programs()
    x = np.arange(6.0)
    for scale in (1.0, 2.0):
        y = x * scale
        found = programs.made("step", lambda y=y: ops.reshape(Tensor(y), (6,)) * 2.0, (y,))
        np.testing.assert_array_equal(found.data, 2 * y)
    program = programs._known["step"]
    assert program is not None
    assert len(program._lines) == 1

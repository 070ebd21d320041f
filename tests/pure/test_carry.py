"""Values of earlier tapes on later ones: gradients come back, in order, and memory goes."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.carry import Carry
from mpitrain.backend import dtype_of
from mpitrain.errors import GraphError

PARTS = 4


def forward(carry, part, x):
    """One part: its result depends on its own x and on what all earlier parts kept of theirs, twice."""
    carry.begin(part)
    value = ops.tanh(x)
    earlier = carry.earlier("value") + carry.earlier("value")[:1]
    carry.keep("value", value)
    total = value * 1.0
    for i, one in enumerate(earlier):
        total = total + one * (i + 2.0) * value
    return total.sum()


def run(arrays):
    """Values of all parts, and the gradients of their sum, part by part through a Carry."""
    inputs = [Tensor(array, requires_grad=True) for array in arrays]
    carry, flying = Carry(), []
    for part, x in enumerate(inputs):
        with Tape() as tape:
            flying.append((forward(carry, part, x), tape))
    grads = []
    for part in reversed(range(len(inputs))):
        y, tape = flying.pop()
        tape.run_backward([(y, np.ones(())), *carry.seeds(part)])
        carry.pass_back(part, tape)
        assert set(tape.grads) == {inputs[part]}  # leaves of the carry are gone from it
        grads.append(tape.grads[inputs[part]])
    return grads[::-1]


def run_on_one_tape(arrays):
    """The same, where nothing has to be carried."""
    inputs = [Tensor(array, requires_grad=True) for array in arrays]
    with Tape() as tape:
        values, total = [], 0.0
        for x in inputs:
            value = ops.tanh(x)
            earlier = values + values[:1]
            values.append(value)
            total = total + sum((one * (i + 2.0) * value for i, one in enumerate(earlier)), value * 1.0).sum()
    grads = tape.run_backward([(total, np.ones(()))])
    return [grads[x] for x in inputs]


@pytest.mark.parametrize("parts", [1, 2, PARTS])
def test_several_tapes_give_the_gradients_of_one(parts):
    arrays = list(np.random.default_rng(0).standard_normal((parts, 3)))
    for mine, theirs in zip(run(arrays), run_on_one_tape(arrays), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-13, atol=1e-13)


def test_sums_write_into_no_array_that_somebody_else_holds():
    """`a + b` gives both of its inputs the same array as gradient, which here stands for two kept values."""
    carry = Carry()
    tapes = []
    x = Tensor(np.array([1.0, 2.0]), requires_grad=True)
    with Tape() as tape:
        carry.begin(0)
        carry.keep("a", x * 2.0)
        carry.keep("b", x * 3.0)
    tapes.append(tape)
    for part in (1, 2, 3):
        with Tape() as tape:
            carry.begin(part)
            y = carry.earlier("a")[0] + carry.earlier("b")[0]
        tapes.append(tape)
        tapes[-1].y = y
    for part in (3, 2, 1):
        tape = tapes.pop()
        tape.run_backward([(tape.y, np.array([10.0**part, 1.0])), *carry.seeds(part)])
        carry.pass_back(part, tape)
    seeds = carry.seeds(0)
    for _, grad in seeds:
        np.testing.assert_array_equal(grad, [1110.0, 3.0])
    np.testing.assert_array_equal(tapes[0].run_backward(seeds)[x], [1110.0 * 5, 15.0])


def test_without_a_tape_earlier_values_are_plain_tensors():
    carry = Carry()
    for part in range(3):
        carry.begin(part)
        earlier = carry.earlier("value")
        assert [float(t.data) for t in earlier] == list(range(part))
        assert not any(t.requires_grad for t in earlier)
        carry.keep("value", Tensor(np.array(float(part))))
    assert carry.earlier("something else") == []


def test_what_wants_no_gradient_gets_none():
    carry = Carry()
    with Tape():
        carry.begin(0)
        carry.keep("constant", Tensor(np.ones(2)))
    x = Tensor(np.ones(2), requires_grad=True)
    with Tape() as tape:
        carry.begin(1)
        y = x * carry.earlier("constant")[0]
    tape.run_backward([(y, np.ones(2)), *carry.seeds(1)])
    carry.pass_back(1, tape)
    assert carry.seeds(0) == []


def test_a_part_that_went_backward_holds_nothing():
    carry, alive = Carry(), []
    x = Tensor(np.ones(3), requires_grad=True)
    flying = []
    for part in range(3):
        with Tape() as tape:
            carry.begin(part)
            value = x * (part + 2.0)
            alive.append(weakref.ref(value))
            y = sum(carry.earlier("v"), value * 1.0)
            carry.keep("v", value)
        flying.append((y, tape))
    del value, y, tape
    for part in (2, 1, 0):
        assert [ref() is not None for ref in alive] == [i <= part for i in range(3)]
        y, tape = flying.pop()
        tape.run_backward([(y, np.ones(3)), *carry.seeds(part)])
        carry.pass_back(part, tape)
        del y, tape
    gc.collect()
    assert not any(ref() for ref in alive)


def with_parts(parts):
    carry, tapes = Carry(), []
    for part in range(parts):
        with Tape() as tape:
            carry.begin(part)
        tapes.append(tape)
    return carry, tapes


def test_parts_go_forward_in_order_and_before_any_goes_backward():
    carry, tapes = with_parts(2)
    for part in (0, 1, 3):
        with pytest.raises(GraphError, match=f"forward of part {part} .* 2 are in flight: .* in the order 0, 1, 2"):
            carry.begin(part)
    carry.seeds(1)
    for part in (1, 2):
        with pytest.raises(GraphError, match="backward has begun"):
            carry.begin(part)
    carry.pass_back(1, tapes[1])
    with pytest.raises(GraphError, match="1 are in flight and backward has begun"):
        carry.begin(1)


def test_parts_go_backward_in_reversed_order():
    carry, tapes = with_parts(3)
    with pytest.raises(GraphError, match=r"seeds\(0\) when seeds\(2\) must come.* from the last to the first"):
        carry.seeds(0)
    with pytest.raises(GraphError, match=r"pass_back\(2\) when seeds\(2\) must come"):
        carry.pass_back(2, tapes[2])
    carry.seeds(2)
    with pytest.raises(GraphError, match=r"seeds\(1\) when pass_back\(2\) must come"):
        carry.seeds(1)
    for part in (2, 1, 0):
        if part < 2:
            carry.seeds(part)
        carry.pass_back(part, tapes[part])
    with pytest.raises(GraphError, match=r"seeds\(0\): all parts have been backward"):
        carry.seeds(0)


def test_a_name_is_kept_once_and_only_in_a_part():
    carry = Carry()
    for call in (lambda: carry.keep("v", Tensor(np.ones(1))), lambda: carry.earlier("v")):
        with pytest.raises(GraphError, match="begin"):
            call()
    carry.begin(0)
    carry.keep("v", Tensor(np.ones(1)))
    with pytest.raises(GraphError, match="two values as 'v'"):
        carry.keep("v", Tensor(np.ones(1)))


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_gradients_of_halves_are_added_up_in_single_precision_and_rounded_once(half):
    """T21.1: in float16 2048 and 1 is 2048, however often; in bfloat16 256 and 1 is 256."""
    half = dtype_of(half)
    large = 2048 if half == np.float16 else 256
    carry, flying = Carry(), []
    for part in range(6):
        with Tape() as tape:
            carry.begin(part)
            if part == 0:
                value = Tensor(np.ones(2, half), requires_grad=True) * np.ones(2, half)
                carry.keep("v", value)
                flying.append((tape, []))
                continue
            (leaf,) = carry.earlier("v")
            y = leaf * np.full(2, large if part == 5 else 1, half)
        flying.append((tape, [(y, np.ones(2, half))]))
    for part in (5, 4, 3, 2, 1, 0):
        tape, seeds = flying[part]
        seeds += carry.seeds(part)
        tape.run_backward(seeds)
        carry.pass_back(part, tape)
    ((kept, grad),) = flying[0][1]
    assert kept is value
    assert grad.dtype == half
    assert grad.astype(float).tolist() == [large + 4] * 2

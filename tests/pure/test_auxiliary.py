"""Losses that a part of the model adds to the objective, and what it counts."""

import numpy as np
import pytest

from mpitrain.autograd import ops
from mpitrain.autograd.auxiliary import Said, add_counts, add_loss, collect, counting, seeds_of
from mpitrain.autograd.recompute import recompute
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor


def squares(x):
    y = x * x
    add_loss("part", ops.sum(y), 0.5)
    add_counts("part", [1.0, float(y.data.sum())])
    return y * 2.0


@pytest.mark.parametrize("again", [False, True])
def test_an_added_loss_reaches_what_it_is_made_of_once_also_through_a_recomputed_part(again):
    x = Tensor(np.array([1.0, -2.0, 3.0]), requires_grad=True)
    with collect() as said, Tape() as tape:
        y = recompute(squares, x) if again else squares(x)
    assert [(loss.name, loss.coefficient) for loss in said.losses] == [("part", 0.5)]
    grads = tape.run_backward([(y, np.ones(3)), *seeds_of(said.losses, 3.0)])
    np.testing.assert_array_equal(grads[x], 2 * 2 * x.data + 3.0 * 0.5 * 2 * x.data)
    np.testing.assert_array_equal(said.counts["part"], [1.0, 14.0])  # counted in the first forward alone


def test_a_part_in_a_part_that_is_recomputed_hands_its_loss_out_of_both():
    x = Tensor(np.array([1.0, -2.0]), requires_grad=True)
    with collect() as said, Tape() as tape:
        y = recompute(lambda x: recompute(squares, x) * 1.0, x)
    grads = tape.run_backward([(y, np.zeros(2)), *seeds_of(said.losses, 1.0)])
    np.testing.assert_array_equal(grads[x], x.data)


def test_the_loss_of_a_part_that_nothing_else_uses_is_seeded_alone():
    x = Tensor(np.array([1.0, -2.0]), requires_grad=True)
    with collect() as said, Tape() as tape:
        squares(x)
    grads = tape.run_backward(seeds_of(said.losses, 1.0))
    np.testing.assert_array_equal(grads[x], x.data)


def test_the_weights_half_of_a_split_backward_has_the_loss_too():
    from mpitrain.nn import init as initial
    from mpitrain.nn.parameter import Parameter

    w = Parameter("w", (2, 2), init=initial.ones)
    w.bind(np.array([[1.0, 2.0], [3.0, 4.0]]), None, np.zeros((2, 2)))
    x = Tensor(np.array([[1.0, -1.0]]), requires_grad=True)
    with collect() as said, Tape() as tape:
        y = squares(ops.matmul(x, w))
    tape.backward_inputs([(y, np.zeros_like(y.data)), *seeds_of(said.losses, 1.0)])
    for _ in tape.backward_weights():
        pass
    np.testing.assert_array_equal(w.grad, x.data.T @ (x.data @ w.data))  # d/dw of sum (x w)^2 / 2


def test_where_nobody_collects_nothing_is_kept_or_counted():
    assert not counting()
    x = Tensor(np.ones(2), requires_grad=True)
    with Tape() as tape:
        y = squares(x)
    grads = tape.run_backward([(y, np.ones(2))])
    np.testing.assert_array_equal(grads[x], [4.0, 4.0])
    with collect() as said:
        assert counting()
        squares(Tensor(np.ones(2)))  # no gradient is wanted of it
        assert not said.losses


def test_counts_of_several_passes_add_up():
    totals = {}
    for _ in range(3):
        with collect() as said:
            add_counts("a", [1.0, 2.0])
            add_counts("a", [0.0, 1.0])
        said.add_to(totals)
    Said().add_to(totals)
    np.testing.assert_array_equal(totals["a"], [3.0, 9.0])

"""Indexing is NumPy's, with arrays and masks in any place, and the gradients of what is taken twice add up."""

import numpy as np
import pytest

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.errors import ShapeError

X = np.random.default_rng(2).standard_normal((3, 4, 2, 5))
IDS, PAIR, COLUMN = np.array([2, 0, 2]), np.array([[1, -1, 0], [3, 1, 1]]), np.array([[0], [1]])
INDICES = {
    "two arrays": (IDS, PAIR),
    "two arrays behind": (slice(None), slice(1, None), COLUMN, IDS),
    "three arrays that broadcast": (IDS, 0, COLUMN),
    "arrays apart go to the front": (IDS, slice(None), COLUMN),
    "a number apart from an array": (0, slice(None), COLUMN),
    "an array, None, an array": (IDS, None, PAIR),
    "an array behind the dots": (..., COLUMN, IDS),
    "a number beside an array": (slice(None), -1, COLUMN),
    "reversed and an array": (slice(None, None, -1), IDS),
    "None and an array": (None, IDS),
    "lists": ([0, 2], [1, 1]),
    "a list of nothing": ([],),
    "a mask of all": (X > 0,),
    "a mask of the first dims": (X[:, :, 0, 0] > 0,),
    "a mask of a dim": (slice(None), np.array([True, False, True, True])),
    "a mask and an array": (np.array([True, False, True]), np.array([3, 1])),
    "a mask behind": (..., np.array([True, False]), slice(None, None, 2)),
    "a mask of nothing": (np.zeros(3, bool),),
    "a list as a mask": ([True, False, True],),
    "numbers of NumPy": (np.int64(1), np.uint8(2), IDS % 2),
    "bytes": (IDS.astype(np.int8), PAIR.astype(np.int8)),
}


@pytest.mark.parametrize("name", INDICES)
def test_what_is_taken_is_what_numpy_takes(name):
    index = INDICES[name]
    y = Tensor(X)[index]
    np.testing.assert_array_equal(y.data, X[index])
    expected = np.zeros(X.shape)
    v = np.random.default_rng(1).standard_normal(y.shape)
    np.add.at(expected, index, v)
    leaf = Tensor(X, requires_grad=True)
    with Tape() as tape:
        y = leaf[index]
    np.testing.assert_allclose(tape.run_backward([(y, v)])[leaf], expected, atol=1e-14)


def test_tensors_may_be_indices_and_masks():
    x = Tensor(X[0])
    np.testing.assert_array_equal(x[Tensor(IDS), Tensor(np.array(1))].data, X[0][IDS, 1])
    np.testing.assert_array_equal(x[x > 0].data, X[0][X[0] > 0])
    check(lambda x: x[x > 0] ** 2, X[0])


def test_a_table_is_read_without_a_copy_of_it():
    """The gradient of x[ids] stays a recipe of rows."""
    table = Tensor(X[0, :, 0], requires_grad=True)
    with Tape() as tape:
        table[IDS]
    assert [node.function.title() for node in tape.nodes] == ["take"]


def test_a_tensor_is_walked_by_its_first_dim():
    x = Tensor(X)
    assert len(x) == 3
    assert [row.shape for row in x] == [(4, 2, 5)] * 3
    for scalar in (lambda: len(x.sum()), lambda: list(x.sum())):
        with pytest.raises(TypeError, match="without dims"):
            scalar()


def test_a_step_of_0_leads_nowhere():
    for index in (slice(None, None, 0), (IDS, slice(None, None, 0))):
        with pytest.raises(
            ShapeError, match=r"x\[...\] of a tensor of shape \(3, 4, 2, 5\): slice step cannot be zero"
        ):
            Tensor(X)[index]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_again_and_again_have_the_sum_of_their_gradients(count):
    x = Tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    with Tape() as tape:
        ys = [ops.repeat(x, count, 1), ops.tile(x, (count, 1, 1)), ops.tile(x, count)]
    grads = tape.run_backward([(y, np.ones(y.shape)) for y in ys])
    assert grads[x].tolist() == [[3.0 * count] * 3] * 2

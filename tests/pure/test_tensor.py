"""What a tensor says of itself, what it is asked, and what it is not mistaken for."""

import operator

import numpy as np
import pytest
from half_calls import BFLOAT16, HALVES

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.errors import ShapeError

X = np.array([[1.0, -2.5, 0.25], [3.0, 0.25, -2.5]])


def test_it_prints_values_shape_dtype_and_whether_a_gradient_is_wanted():
    assert repr(Tensor(np.float32(1.5))) == "Tensor(1.5, shape=(), float32)"
    assert repr(Tensor(np.array([1.0, 2.0]), requires_grad=True)) == (
        "Tensor([1., 2.], shape=(2,), float64, requires_grad)"
    )
    assert repr(Tensor(np.array([1, 2]))) == "Tensor([1, 2], shape=(2,), int64)"
    assert repr(Tensor(np.array([True]))) == "Tensor([ True], shape=(1,), bool)"
    assert repr(Tensor(np.array([0.5, 3], BFLOAT16))) == "Tensor([0.5, 3. ], shape=(2,), bfloat16)"
    with Tape():
        y = Tensor(np.ones(2), requires_grad=True) * 2.0
    assert repr(y) == "Tensor([2., 2.], shape=(2,), float64, %1 of a tape)"


@pytest.mark.parametrize("shape", [(10_000,), (300, 400), (20, 30, 40), (5, 6, 7, 8), (0, 3)])
def test_what_is_large_is_printed_short(shape):
    text = repr(Tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32)))
    assert f"shape={shape}, float32" in text
    assert text.count("\n") < 20
    assert max(map(len, text.splitlines())) <= 100


def test_comparisons_give_plain_arrays_of_bools():
    x = Tensor(X, requires_grad=True)
    for found, expected in (
        (x < 0.25, X < 0.25),
        (x <= 0.25, X <= 0.25),
        (x > 0.25, X > 0.25),
        (x >= 0.25, X >= 0.25),
        (0.25 < x, X > 0.25),  # noqa: SIM300
        (np.float64(0.25) >= x, X <= 0.25),
        (x > Tensor(X[0]), X[0] < X),
        (X[::-1] > x, X[::-1] > X),
        (ops.equal(x, X[:1]), X[:1] == X),
        (ops.not_equal(x, 0.25), X != 0.25),
    ):
        assert type(found) is np.ndarray
        assert found.dtype == bool
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(ops.where(x > 0, x, 0.0).data, np.maximum(X, 0))


def test_whether_two_are_equal_asks_for_the_same_tensor():
    """Tensors are keys of dicts."""
    x, other = Tensor(X), Tensor(X)
    assert x == x
    assert x != other
    assert {x: 1, other: 2}[x] == 1
    assert ops.equal(x, other).all()


@HALVES
def test_a_number_is_rounded_before_a_half_is_compared_with_it(half):
    x = Tensor(np.array([0.3, 0.1, 7.0]).astype(half))
    assert ops.equal(x, 0.3).tolist() == [True, False, False]
    assert (x <= 0.3).tolist() == [True, True, False]
    assert (x < 1e30).tolist() == [True, True, True]
    assert (x.astype(np.float32) < 0.3).tolist() == [float(x.data[0]) < 0.3, True, False]


def test_places_of_the_largest_and_the_smallest():
    x = Tensor(X)
    assert int(x.argmax()) == 3
    assert int(x.argmin()) == 1
    assert x.argmax(0).tolist() == [1, 1, 0]
    assert x.argmax(-1, keepdims=True).tolist() == [[0], [0]]
    assert x.argmin(keepdims=True).tolist() == [[1]]
    assert ops.argmax(X.astype(BFLOAT16), 1).tolist() == [0, 0]
    assert ops.argmax(Tensor(np.array([1.0, 3.0, 3.0]))).tolist() == 1


def test_one_element_is_a_number_and_several_are_neither_true_nor_false():
    one = Tensor(np.array([[2.5]]))
    assert (one.item(), float(one), int(one), bool(one), bool(Tensor(0.0))) == (2.5, 2.5, 2, True, False)
    assert Tensor(X).tolist() == X.tolist()
    with pytest.raises(ShapeError, match="neither true nor false"):
        bool(Tensor(X))
    with pytest.raises(ShapeError, match="neither true nor false"):
        bool(Tensor(X[:0]))


@pytest.mark.parametrize("number", [float, int, Tensor.item])
def test_several_elements_are_not_one_number(number):
    with pytest.raises(ShapeError, match=r"of shape \(2, 3\) is not one number"):
        number(Tensor(X.reshape(-1)[:6].reshape(2, 3)))


@pytest.mark.parametrize(
    "ask", [operator.add, operator.mul, operator.truediv, operator.pow, operator.lt, operator.matmul]
)
@pytest.mark.parametrize("other", ["a", None, 1j, np.complex64(1), np.array(["a"])], ids=lambda other: repr(other))
def test_what_is_no_number_is_no_operand(ask, other):
    for pair in ((Tensor(X), other), (other, Tensor(X))):
        with pytest.raises(ShapeError, match=r"no operand; it is a tensor, an array or a number"):
            ask(*pair)


def test_no_array_is_made_of_it_without_a_word():
    x = Tensor(X, requires_grad=True)
    assert x.numpy() is x.data
    for call in (lambda: np.asarray(x), lambda: np.array([x, x]), lambda: np.testing.assert_array_equal(x, X)):
        with pytest.raises(TypeError, match=r"take x.numpy\(\)"):
            call()
    with pytest.raises(TypeError, match="ufunc"):
        np.exp(x)

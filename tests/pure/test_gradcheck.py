"""The checker of gradients finds what it is for."""

import numpy as np
import pytest

from mpitrain.autograd import Function, Tensor, ops
from mpitrain.autograd.gradcheck import check

X = np.linspace(-1.0, 2.0, 6).reshape(2, 3)


class Cube(Function):
    """x^3, with whatever backward a test gives it."""

    @staticmethod
    def forward(x):
        return x**3, (x,)

    @staticmethod
    def backward(grad, x, *, wanted):
        return (3 * x**2 * grad,)


def with_backward(backward):
    return type("Broken", (Cube,), {"backward": staticmethod(backward)}).apply


def test_a_right_gradient_passes_for_all_inputs_and_several_outputs():
    check(Cube.apply, X)
    check(lambda a, b: (a * b, a + b), X, X + 1)
    check(lambda a: a * 2.0, np.zeros((0, 3)))
    check(lambda a: a * a, np.array(3.0))


def test_a_wrong_element_is_named_with_both_numbers():
    def backward(grad, x, *, wanted):
        dx = 3 * x**2 * grad
        dx[1, 2] += 1e-3
        return (dx,)

    with pytest.raises(AssertionError, match=r"input 0, shape \(2, 3\): 1 of 6 elements are wrong;\s*at \(1, 2\)"):
        check(with_backward(backward), X)


def test_a_gradient_of_another_shape_or_dtype_is_refused():
    with pytest.raises(AssertionError, match=r"has shape \(2, 3\), its gradient \(1, 3\)"):
        check(with_backward(lambda grad, x, *, wanted: ((3 * x**2 * grad)[:1],)), X)
    with pytest.raises(AssertionError, match="is float64, its gradient float32"):
        check(with_backward(lambda grad, x, *, wanted: ((3 * x**2 * grad).astype(np.float32),)), X)


def test_a_missing_gradient_is_refused():
    with pytest.raises(AssertionError, match="input 1 got no gradient"):
        check(lambda a, b: a * 1.0, X, X)


def test_a_nan_is_wrong():
    with pytest.raises(AssertionError, match="6 of 6"):
        check(with_backward(lambda grad, x, *, wanted: (x * np.nan,)), X)


def test_an_op_that_writes_into_its_input_is_refused():
    class Greedy(Cube):
        @staticmethod
        def forward(x):
            y = x**3
            x *= 1.0000001
            return y, (x,)

    with pytest.raises(AssertionError, match=r"second call gives other values|was written"):
        check(Greedy.apply, X.copy())


def test_a_backward_that_writes_into_what_it_was_given_is_refused():
    def backward(grad, y, *, wanted):
        y *= 2
        return (grad,)

    class Same(Cube):
        @staticmethod
        def forward(x):
            y = x * 1.0
            return y, (y,)

    Same.backward = staticmethod(backward)
    with pytest.raises(AssertionError, match="wrote into the output"):
        check(Same.apply, X)


def test_integer_arrays_are_handed_on_and_not_differentiated():
    check(lambda x, ids: ops.take(x, ids), X, np.array([1, 1, 0]))


def test_the_inputs_arrive_as_tensors_with_their_values():
    seen = []
    check(lambda x: seen.append(x) or x * 1.0, X)
    assert isinstance(seen[0], Tensor)
    assert np.array_equal(seen[0].data, X)

"""The one rule by which two runs count as equal."""

import numpy as np
import pytest

from mpitrain.debug.compare import compare


def test_equal_tensors_have_no_difference():
    a = {"w": np.arange(6.0).reshape(2, 3), "b": np.zeros(0)}
    assert all(d.ok and d.error == 0 for d in compare(a, a))


def test_the_worst_tensor_comes_first_and_says_by_which_factor():
    reference = {"a": np.ones(3), "b": np.full(3, 5.0)}
    (first, second) = compare({"a": np.ones(3), "b": np.array([5.0, 10.0, 5.0])}, reference)
    assert (first.name, first.at, first.ratio, first.ok) == ("b", (1,), 2.0, False)
    assert second.ok


def test_a_gradient_whose_true_value_is_zero_is_measured_by_the_others():
    reference = {"big": np.full(2, 1e3), "zero": np.zeros(2)}
    assert all(d.ok for d in compare({**reference, "zero": np.full(2, 5e-14)}, reference))
    assert not all(d.ok for d in compare({**reference, "zero": np.full(2, 5e-12)}, reference))


def test_the_tolerance_is_relative_to_the_largest_element():
    reference = {"w": np.array([1.0, 1e6])}
    assert all(d.ok for d in compare({"w": np.array([1.0 + 5e-5, 1e6])}, reference))
    assert not all(d.ok for d in compare({"w": np.array([1.0 + 5e-4, 1e6])}, reference))


def test_nan_is_never_equal():
    (difference,) = compare({"w": np.array([1.0, np.nan])}, {"w": np.array([1.0, np.nan])})
    assert not difference.ok


def test_other_names_or_shapes_are_refused():
    with pytest.raises(ValueError, match="only one side has"):
        compare({"a": np.ones(1)}, {"b": np.ones(1)})
    with pytest.raises(ValueError, match="on one side"):
        compare({"a": np.ones(1)}, {"a": np.ones(2)})

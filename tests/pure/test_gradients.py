"""Gradients of every operation and of every layer, against central differences."""

import numpy as np
import pytest
from layer_cases import LAYERS, WHOLE, classes, tried
from op_cases import CASES

from mpitrain.autograd import Tensor, ops
from mpitrain.autograd.gradcheck import check, check_layer
from mpitrain.nn.module import Module

INPUTS = 80  # elements; of larger inputs along a few directions instead of each
LINEAR = {"cast": {"step": 1.0, "tolerance": 1e-5}}  # its value is float32


def test_every_operation_has_a_case():
    missing = set(ops.__all__) - {"IGNORE"} - set(CASES)
    assert not missing, f"add a line to CASES in tests/op_cases.py for: {', '.join(sorted(missing))}"


def test_every_layer_has_a_case():
    missing = {cls.__name__ for cls in classes()} - {cls.__name__ for cls in (*tried(), *WHOLE, Module)}
    assert not missing, f"add a line to LAYERS in tests/layer_cases.py for: {', '.join(sorted(missing))}"


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_an_operation_are_its_slopes(name):
    for function, arrays in CASES[name]:
        small = sum(array.size for array in arrays) <= INPUTS
        check(
            lambda *x, function=function: function(np, *x),
            *arrays,
            directions=None if small else 3,
            **LINEAR.get(name, {}),
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_an_operation_are_its_slopes_element_by_element(name):
    for function, arrays in CASES[name]:
        check(lambda *x, function=function: function(np, *x), *arrays, **LINEAR.get(name, {}))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_a_layer_are_its_slopes(name):
    case = LAYERS[name]
    layer = case.made()
    check_layer(layer, *case.arrays, call=lambda *inputs: case.run(layer, *inputs), directions=2)


def test_a_wrong_gradient_of_a_parameter_is_found(monkeypatch):
    layer = LAYERS["Linear"].made()
    x = LAYERS["Linear"].arrays[0]
    check_layer(layer, x)
    scale = Tensor(np.array(1.001))
    with pytest.raises(AssertionError, match=r"gradient of parameter l.bias, shape \(7,\): along a random direction"):
        check_layer(layer, x, call=lambda x: layer(x) + layer.bias.detach() * scale)
    with pytest.raises(AssertionError, match=r"parameter l.bias got no gradient"):
        check_layer(layer, x, call=lambda x: x @ layer.weight)

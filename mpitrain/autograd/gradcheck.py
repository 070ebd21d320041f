"""Is a backward right?  Ask finite differences, which know nothing of it.

    check(ops.matmul, a, b)                          # raises AssertionError with the first element that is wrong
    check(lambda x: ops.softmax(x, dim=0), x)

The output y is multiplied with a fixed random v, so that one number f = <v, y> depends on all inputs; backward from v
must then give what the central difference (f(x + h) - f(x - h)) / 2h gives for each element.  Its own error is about
h^2 from the curvature and 1e-16 / h from rounding, so in float64 six digits can be asked for with h = 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import to_device, to_host


def check(
    function: Callable[..., Any],
    *arrays: Any,
    step: float = 1e-6,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> None:
    """Compare the gradients of a function of tensors with central differences, element by element.

    Args:
        function: takes one Tensor for each float64 array (others are handed on as they are) and returns a Tensor or a
            tuple of them.  It must be smooth within `step` of the given values.
        arrays: the values; all shapes, also empty ones, and all strides.
        step: h of the difference.
        tolerance: largest error, relative to the largest gradient of that input or 1.
        seed: of the random v.

    Raises:
        AssertionError: a gradient is wrong, missing, or not of its input's shape and dtype; or the function or its
            backward wrote into an input, or gives other values when it is called again.

    Cost: two calls of the function for each element of the inputs.
    """
    before = [to_host(array).copy() if hasattr(array, "shape") else array for array in arrays]
    inputs = [Tensor(array, requires_grad=True) if _varies(array) else array for array in arrays]
    with Tape() as tape:
        outputs = _tuple(function(*inputs))
    rng = np.random.default_rng(seed)
    v = [to_device(rng.standard_normal(y.shape).astype(y.dtype), y.data) for y in outputs]
    kept = [to_host(y.data).copy() for y in outputs]
    grads = tape.run_backward(list(zip(outputs, v, strict=True)))

    for y, again, saved in zip(outputs, _tuple(function(*inputs)), kept, strict=True):
        assert np.array_equal(to_host(y.data), saved, equal_nan=True), "backward wrote into the output"
        assert np.array_equal(to_host(again.data), saved, equal_nan=True), "a second call gives other values"
    for i, (array, saved) in enumerate(zip(arrays, before, strict=True)):
        assert not hasattr(array, "shape") or np.array_equal(to_host(array), saved), f"input {i} was written"

    for i, t in enumerate(inputs):
        if not isinstance(t, Tensor):
            continue
        assert t in grads, f"input {i} got no gradient"
        assert grads[t].shape == t.shape, f"input {i} has shape {t.shape}, its gradient {grads[t].shape}"
        assert grads[t].dtype == t.dtype, f"input {i} is {t.dtype}, its gradient {grads[t].dtype}"
        grad = to_host(grads[t])
        expected = _differences(function, before, i, v, t.data, step)
        scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
        wrong = ~(np.abs(grad - expected) <= tolerance * scale)
        if wrong.any():
            at = tuple(int(k[0]) for k in np.nonzero(wrong)) if wrong.ndim else ()
            raise AssertionError(
                f"gradient of input {i}, shape {t.shape}: {int(wrong.sum())} of {wrong.size} elements are wrong;"
                f" at {at} backward gives {grad[at]:.9g}, differences give {expected[at]:.9g}"
            )


def _differences(
    function: Callable[..., Any], values: list[Any], which: int, v: list[Any], like: Any, step: float
) -> np.ndarray:
    """Central differences of <v, function> in each element of one input."""

    def f(x: np.ndarray) -> float:
        inputs = [
            Tensor(to_device(x if i == which else value, like)) if _varies(value) else value
            for i, value in enumerate(values)
        ]
        outputs = _tuple(function(*inputs))
        return sum(float((to_host(y.data) * to_host(w)).sum()) for y, w in zip(outputs, v, strict=True))

    result = np.zeros(values[which].shape)
    x = values[which].copy()
    for at in np.ndindex(x.shape):
        center = x[at]
        x[at] = center + step
        above = f(x)
        x[at] = center - step
        below = f(x)
        x[at] = center
        result[at] = (above - below) / (2 * step)
    return result


def _varies(array: Any) -> bool:
    return getattr(array, "dtype", None) == np.float64


def _tuple(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)

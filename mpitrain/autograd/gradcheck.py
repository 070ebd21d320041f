"""Is a backward right?  Ask finite differences, which know nothing of it.

    check(ops.matmul, a, b)                          # raises AssertionError with the first element that is wrong
    check(lambda x: ops.softmax(x, dim=0), x)
    check_layer(layer, x)                            # of a module: also the gradients of its parameters

The output y is multiplied with a fixed random v, so that one number f = <v, y> depends on all inputs; backward from v
must then give what the central difference (f(x + h) - f(x - h)) / 2h gives for each element.  Its own error is about
h^2 from the curvature and 1e-16 / h from rounding, so in float64 six digits can be asked for with h = 1e-6.

Of large inputs a few random directions d are enough: (f(x + h d) - f(x - h d)) / 2h must be <gradient, d>.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    directions: int | None = None,
    seed: int = 0,
) -> None:
    """Compare the gradients of a function of tensors with central differences.

    Args:
        function: takes one Tensor for each float64 array (others are handed on as they are) and returns a Tensor or a
            tuple of them.  It must be smooth within `step` of the given values.
        arrays: the values; all shapes, also empty ones, and all strides.
        step: h of the difference.
        tolerance: largest error, relative to the largest gradient of that input or 1; along a direction relative to the
            sum of its terms' sizes or 1.
        directions: along so many random directions of each input; None: element by element.
        seed: of the random v and directions.

    Raises:
        AssertionError: a gradient is wrong, missing, or not of its input's shape and dtype; or the function or its
            backward wrote into an input, or gives other values when it is called again.

    Cost: two calls of the function for each element of the inputs, or for each direction of each input.
    """
    before = [to_host(array).copy() if hasattr(array, "shape") else array for array in arrays]
    inputs = [Tensor(array, requires_grad=True) if _varies(array) else array for array in arrays]
    with Tape() as tape:
        outputs = _tuple(function(*inputs))
    rng = np.random.default_rng(seed)
    v = [to_device(rng.standard_normal(y.shape).astype(y.dtype), y.data) for y in outputs]
    kept = [to_host(y.data).copy() for y in outputs]
    grads = tape.run_backward(list(zip(outputs, v, strict=True)))
    _assert_unmoved(outputs, function(*inputs), kept)
    for i, (array, saved) in enumerate(zip(arrays, before, strict=True)):
        assert not hasattr(array, "shape") or np.array_equal(to_host(array), saved), f"input {i} was written"

    for i, t in enumerate(inputs):
        if not isinstance(t, Tensor):
            continue
        assert t in grads, f"input {i} got no gradient"

        def f(x: np.ndarray, i: int = i, like: Any = t.data) -> float:
            values = [x if k == i else value for k, value in enumerate(before)]
            given = [Tensor(to_device(value, like)) if _varies(value) else value for value in values]
            return _dot(function(*given), v)

        _compare(f"input {i}", f, before[i], grads[t], _Steps(step, tolerance, directions, rng))


def check_layer(
    layer: Any,
    *arrays: Any,
    call: Callable[..., Any] | None = None,
    step: float = 1e-6,
    tolerance: float = 1e-6,
    directions: int | None = 3,
    seed: int = 0,
) -> None:
    """Compare the gradients of a module's parameters, and of its inputs, with central differences.

    Args:
        layer: a module of float64 parameters that has its values (`materialize`).
        arrays: its inputs, float64 arrays as Tensors and others as they are.
        call: takes the Tensors and calls the layer; None: the layer itself does.
        step, tolerance, directions, seed: as of `check`.

    Raises:
        AssertionError: as of `check`, with the name of the parameter; or a parameter takes no part in the result.

    Cost: two calls of the layer for each direction of each parameter and input.
    """
    function = layer if call is None else call
    check(function, *arrays, step=step, tolerance=tolerance, directions=directions, seed=seed)
    parameters = list(layer.parameters())
    if not parameters:
        return
    given = [Tensor(array) if _varies(array) else array for array in arrays]
    layer.start_step()
    with Tape() as tape:
        outputs = _tuple(function(*given))
    rng = np.random.default_rng(seed)
    v = [to_device(rng.standard_normal(y.shape).astype(y.dtype), y.data) for y in outputs]
    tape.run_backward(list(zip(outputs, v, strict=True)))
    for p in parameters:
        assert p.touched, f"parameter {p.name} got no gradient"
        values = to_host(p.data).copy()

        def f(x: np.ndarray, p: Any = p) -> float:
            p.data[...] = to_device(x, p.data)
            return _dot(function(*given), v)

        try:
            _compare(f"parameter {p.name}", f, values, p.grad, _Steps(step, tolerance, directions, rng))
        finally:
            p.data[...] = to_device(values, p.data)


class _Steps:
    """How far to go in which directions, and how exact the slope must be."""

    def __init__(self, step: float, tolerance: float, directions: int | None, rng: np.random.Generator) -> None:
        self.step, self.tolerance, self.directions, self.rng = step, tolerance, directions, rng

    def slope(self, f: Callable[[np.ndarray], float], x: np.ndarray, way: np.ndarray) -> float:
        """The central difference of f along a way."""
        return (f(x + self.step * way) - f(x - self.step * way)) / (2 * self.step)

    def ways(self, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        """The directions: random ones, or that of each element."""
        if self.directions is not None:
            for _ in range(self.directions):
                yield self.rng.standard_normal(shape)
            return
        for at in np.ndindex(shape):
            way = np.zeros(shape)
            way[at] = 1
            yield way


def _compare(what: str, f: Callable[[np.ndarray], float], x: np.ndarray, grad: Any, steps: _Steps) -> None:
    """Refuse a gradient that is not the slope of f at x."""
    assert grad.shape == x.shape, f"{what} has shape {x.shape}, its gradient {grad.shape}"
    assert grad.dtype == x.dtype, f"{what} is {x.dtype}, its gradient {grad.dtype}"
    grad = to_host(grad)
    start = f"gradient of {what}, shape {x.shape}:"
    if steps.directions is None:
        slopes = np.array([steps.slope(f, x, way) for way in steps.ways(x.shape)]).reshape(x.shape)
        scale = max(1.0, float(np.abs(slopes).max(initial=0.0)))
        wrong = ~(np.abs(grad - slopes) <= steps.tolerance * scale)
        if wrong.any():
            at = tuple(int(k[0]) for k in np.nonzero(wrong)) if wrong.ndim else ()
            raise AssertionError(
                f"{start} {int(wrong.sum())} of {wrong.size} elements are wrong;"
                f" at {at} backward gives {grad[at]:.9g}, differences give {slopes[at]:.9g}"
            )
        return
    for way in steps.ways(x.shape) if x.size else ():
        slope, terms = steps.slope(f, x, way), grad * way
        if not abs(float(terms.sum()) - slope) <= steps.tolerance * max(1.0, float(np.abs(terms).sum())):
            raise AssertionError(
                f"{start} along a random direction backward gives {float(terms.sum()):.9g},"
                f" differences give {slope:.9g}"
            )


def _assert_unmoved(outputs: Sequence[Tensor], again: Any, kept: Sequence[np.ndarray]) -> None:
    """That backward left the values as they were, and that they come out again."""
    for y, other, saved in zip(outputs, _tuple(again), kept, strict=True):
        assert np.array_equal(to_host(y.data), saved, equal_nan=True), "backward wrote into the output"
        assert np.array_equal(to_host(other.data), saved, equal_nan=True), "a second call gives other values"


def _dot(outputs: Any, v: Sequence[Any]) -> float:
    """<v, outputs>."""
    pairs = zip(_tuple(outputs), v, strict=True)
    return sum(float((to_host(y.data) * to_host(w)).sum()) for y, w in pairs)


def _varies(array: Any) -> bool:
    return getattr(array, "dtype", None) == np.float64


def _tuple(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)

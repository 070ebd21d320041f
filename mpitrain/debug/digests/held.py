"""What a rank holds of a model when a step ends: final gradients, weights, the optimizer's state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.backend import to_host
from mpitrain.debug.digests import sums
from mpitrain.debug.digests.entries import Record, as_json, told
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.scaler import Scaler

_ROUNDINGS = 45.0  # that a gradient may differ by, each of the size of the largest gradient's
_MOST = 1e-6  # of what an update moves a weight: in float64 rounding is far below the optimizer's own eps


def gradients(shares: list[Parameter], scaler: Scaler | None) -> Record:
    """Sums of final gradients that are not clipped yet, the largest element, and what rounding may make of updates."""
    largest, found, arrays = 0.0, [], []
    for p in shares:
        grad = _gradient(p, scaler)
        arrays.append(grad)
        found.append([*told(sums.of_slab(grad, p.rectangle)), sums.crc(grad)])
        largest = max(largest, float(np.abs(grad).max(initial=0.0)))
    noise = [as_json(_noise(grad, largest)) for grad in arrays]
    return {"gradients": found, "largest": as_json(largest), "noise": noise}


def weights(shares: list[Parameter]) -> list[list[Any]]:
    """Sums of weights, each with its exact hash."""
    return [
        [*told(sums.of_slab(p.master, p.rectangle)), sums.exact(p.master, p.full_shape, p.rectangle)] for p in shares
    ]


def state(optimizer: Optimizer) -> dict[str, list[list[Any]]]:
    """Sums of what an optimizer keeps, by kind."""
    return {
        kind: [[*told(sums.of_slab(t.array, t.rectangle)), sums.crc(t.array)] for t in of.values()]
        for kind, of in optimizer.state_tensors().items()
    }


def places(shares: list[Parameter], optimizer: Optimizer) -> Record:
    """Name, full shape and rectangle of each parameter; of kinds of state whose tensors have other shapes, theirs."""
    slabs = [[p.name, *_place(p)] for p in shares]
    states = {}
    for kind, of in optimizer.state_tensors().items():
        mine = [[name, *_place(tensor)] for name, tensor in of.items()]
        if mine != slabs:
            states[kind] = mine
    return {"parameters": slabs, "states": states}


def _gradient(p: Parameter, scaler: Scaler | None) -> np.ndarray:
    """A final gradient on the host, without the scale that it carries."""
    if not p.touched:
        return np.zeros(p.grad.shape, p.grad.dtype)
    grad: np.ndarray = to_host(p.grad)
    return grad if scaler is None else grad * grad.dtype.type(scaler.inverse(scaler.group(p)))


def _noise(grad: np.ndarray, largest: float) -> float:
    """How far rounding alone may move these weights, in units of what an update moves a weight at most.

    An optimizer that divides a gradient by its own size makes of an element g the sign of its rounding, where that is
    as large as g: of g and the largest gradient G that is min(1, 45 eps G / |g|).  See `mpitrain.verify.noise`.
    """
    size = np.abs(np.asarray(grad, np.float64)).reshape(-1)
    size = size[size > 0]
    if not size.size or not math.isfinite(largest):
        return 0.0
    eps = float(np.finfo(grad.dtype).eps)
    with np.errstate(over="ignore"):
        most = _MOST if grad.dtype == np.float64 else 1.0
        return float(np.minimum(most, _ROUNDINGS * eps * largest / size).sum())


def _place(tensor: Any) -> list[Any]:
    """The full shape of a tensor, and this rank's rectangle of it."""
    return [list(tensor.full_shape), [[part.start, part.stop] for part in tensor.rectangle]]

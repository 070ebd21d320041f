"""Runs: neighbouring parameters of a flat buffer, seen as one long vector.

An elementwise update does not care where one parameter ends and the next begins.  Weights and gradients that lie next
to each other and are treated alike are therefore passed over as one 1-d view, which saves a dozen calls a parameter.
Arrays may live elsewhere (mpitrain.memory.stored_array): neighbours there are one vector as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, address
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.groups import Treatment


class Run(NamedTuple):
    """Consecutive parameters as vectors.

    Attributes:
        weights, grads: 1-d views; weights are the masters.
        halves: the rounding of the weights, with which the model computes; None where that is the weights themselves.
        start: number of elements of the parameters before it, in the order given.
        treatment: of all of them: weight decay, and factor on the learning rate.
    """

    weights: Array
    grads: Array
    halves: Array | None
    start: int
    treatment: Treatment


def join(parameters: Sequence[Parameter], treatments: Sequence[Treatment]) -> list[Run]:
    """The fewest runs that cover the parameters in order; parameters without elements are left out.

    Args:
        parameters: in the order of the state.
        treatments: of each of them; a run has one.
    """
    runs: list[Run] = []
    group: list[Parameter] = []
    of_group = Treatment(0.0, 1.0)
    end = 0
    for p, treatment in zip(parameters, treatments, strict=True):
        if p.data.size == 0:
            continue
        assert all(is_elsewhere(array) or array.flags.c_contiguous for array in (p.data, p.master, p.grad)), p
        assert (p.grad.shape, p.grad.dtype) == (p.master.shape, p.master.dtype), p
        if group and not (treatment == of_group and _continues(group[-1], p)):
            runs.append(_run(group, end, of_group))
            group = []
        group.append(p)
        of_group = treatment
        end += p.data.size
    return [*runs, _run(group, end, of_group)] if group else runs


def _continues(before: Parameter, p: Parameter) -> bool:
    return all(
        _adjoins(of_before, of_p)
        for of_before, of_p in ((before.data, p.data), (before.master, p.master), (before.grad, p.grad))
    )


def is_elsewhere(array: Any) -> bool:
    """Whether an array lives in a store, from which elements are taken and to which they are put."""
    return hasattr(array, "take") and hasattr(array, "prefetch")


def _adjoins(before: Array, array: Array) -> bool:
    """Whether the two are views of one buffer, and the second begins where the first ends."""
    if is_elsewhere(array) or is_elsewhere(before):
        return is_elsewhere(array) and bool(array.adjoins(before))
    base: Any = array.base
    return (
        isinstance(base, type(array))
        and base is before.base
        and base.flags.c_contiguous
        and array.dtype == before.dtype
        and address(array) == address(before) + before.nbytes
    )


def _run(group: list[Parameter], end: int, treatment: Treatment) -> Run:
    size, first = sum(p.data.size for p in group), group[0]
    halves = None if first.master is first.data else _vector(first.data, size)
    return Run(_vector(first.master, size), _vector(first.grad, size), halves, end - size, treatment)


def _vector(first: Array, size: int) -> Array:
    """`size` elements from the first element of `first` on, in the buffer that `first` views."""
    if is_elsewhere(first):
        return first.part(0, (size,))
    if size == first.size:
        return first.reshape(-1)
    start = address(first) - address(first.base)
    raw = first.base.reshape(-1).view(np.uint8)
    return raw[start : start + size * first.itemsize].view(first.dtype)

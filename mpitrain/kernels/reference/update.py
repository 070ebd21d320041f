"""What happens to weights and gradients once backward is done: long vectors, passed over in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.blocks import vector_blocks
from mpitrain.kernels.reference.halves import narrow
from mpitrain.kernels.several import AdamwRun, Several, SgdRun


def adamw(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    *,
    update: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One update in place of the weights p and the moments m and v by the gradient g.

        m = beta1 m + (1 - beta1) g                  v = beta2 v + (1 - beta2) g^2
        p = p - lr weight_decay p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    The corrections of the bias are folded into lr and eps, which saves a pass.

    Args:
        p: weights, a vector.
        g: their gradient, of the same length and dtype; kept.
        m: first moment.
        v: second moment.
        update: t, counted from 1.
        lr: learning rate, alpha in the paper.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled; lambda in the paper.

    Source: Kingma and Ba 2014, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2,
    with the decay times the learning rate, as PyTorch does it.
    """
    xp = array_module(p)
    numbers = adamw_numbers(update, lr, beta1, beta2, eps, weight_decay)
    for block, scratch in vector_blocks(p):
        _adamw_block(xp, p[block], g[block], m[block], v[block], scratch, *numbers)


def adamw_numbers(
    update: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> tuple[float, ...]:
    """beta1, 1 - beta1, beta2, 1 - beta2, eps', lr', 1 - lr weight_decay: all that one update of an element needs."""
    correction = math.sqrt(1.0 - beta2**update)
    rate = lr * correction / (1.0 - beta1**update)
    return beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps * correction, rate, 1.0 - lr * weight_decay


def _adamw_block(
    xp: Any,
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    scratch: Array,
    beta1: float,
    rest1: float,
    beta2: float,
    rest2: float,
    eps: float,
    rate: float,
    keep: float,
) -> None:
    xp.multiply(m, beta1, out=m)
    xp.multiply(g, rest1, out=scratch)
    xp.add(m, scratch, out=m)
    xp.multiply(v, beta2, out=v)
    xp.multiply(g, g, out=scratch)
    xp.multiply(scratch, rest2, out=scratch)
    xp.add(v, scratch, out=v)
    if keep != 1.0:
        xp.multiply(p, keep, out=p)
    xp.sqrt(v, out=scratch)
    xp.add(scratch, eps, out=scratch)
    xp.divide(m, scratch, out=scratch)
    xp.multiply(scratch, rate, out=scratch)
    xp.subtract(p, scratch, out=p)


def sum_of_squares(x: Array) -> Any:
    """Sum of the squares of all elements, in float64; infinity or NaN where an element is.

    Returns:
        A number; on a device it stays there, as an array ().
    """
    total: Any = 0.0
    vector = x.reshape(-1)
    for block, _ in vector_blocks(vector, scratch=False):
        part = vector[block].astype(np.float64, copy=False)
        total = total + array_module(x).dot(part, part)
    return total


def adamw_runs(runs: Several[AdamwRun], *, update: int, lr: float, beta1: float, beta2: float, eps: float) -> None:
    """`adamw` of all runs, and halves that are the rounding of their new weights.

    Args:
        runs: each with a factor on `lr` and a weight decay of its own.
        update, lr, beta1, beta2, eps: as for `adamw`.
    """
    each_run(adamw, narrow, runs, update=update, lr=lr, beta1=beta1, beta2=beta2, eps=eps)


def each_run(
    adamw: Callable[..., None], narrow: Callable[..., Any], runs: Several[AdamwRun], *, lr: float, **numbers: Any
) -> None:
    """`adamw_runs` by the kernels that take one run."""
    for p, g, m, v, halves, rate, decay in runs:
        adamw(p, g, m, v, lr=lr * rate, weight_decay=decay, **numbers)
        if halves is not None:
            narrow(p, halves.dtype, out=halves)


def sgd(
    p: Array, g: Array, u: Array | None, *, lr: float, momentum: float, nesterov: bool, weight_decay: float
) -> None:
    """One update of gradient descent in place of the weights p and their velocity u by the gradient g.

        d = g + weight_decay p          u = momentum u + d
        p = p - lr u                    or, with Nesterov,   p = p - lr (d + momentum u)

    Args:
        p: weights, a vector.
        g: their gradient, of the same length and dtype; kept.
        u: velocity; None: it is d, and nothing is kept.
        lr: learning rate.
        momentum: mu; 0 where there is no velocity.
        nesterov: step by the velocity as it will be after the next decay.
        weight_decay: L2 penalty, part of the gradient.
    """
    xp = array_module(p)
    for block, scratch in vector_blocks(p):
        weights, d = p[block], g[block]
        if u is None:
            if weight_decay:
                xp.multiply(weights, 1.0 - lr * weight_decay, out=weights)
            xp.multiply(d, lr, out=scratch)
            xp.subtract(weights, scratch, out=weights)
            continue
        velocity = u[block]
        if weight_decay:
            xp.multiply(weights, weight_decay, out=scratch)
            xp.add(scratch, d, out=scratch)
            d = scratch
        xp.multiply(velocity, momentum, out=velocity)
        xp.add(velocity, d, out=velocity)
        if nesterov:
            # p - lr d first, while scratch still holds d, then p - lr mu u.
            xp.multiply(d, lr, out=scratch)
            xp.subtract(weights, scratch, out=weights)
            xp.multiply(velocity, lr * momentum, out=scratch)
        else:
            xp.multiply(velocity, lr, out=scratch)
        xp.subtract(weights, scratch, out=weights)


def sgd_runs(runs: Several[SgdRun], *, lr: float, momentum: float, nesterov: bool) -> None:
    """`sgd` of all runs, and halves that are the rounding of their new weights.

    Args:
        runs: each with a factor on `lr` and a weight decay of its own.
        lr, momentum, nesterov: as for `sgd`.
    """
    each_sgd(narrow, runs, lr=lr, momentum=momentum, nesterov=nesterov)


def each_sgd(narrow: Callable[..., Any], runs: Several[SgdRun], *, lr: float, **numbers: Any) -> None:
    """`sgd_runs` by the kernels that take one run."""
    for p, g, u, halves, rate, decay in runs:
        sgd(p, g, u, lr=lr * rate, weight_decay=decay, **numbers)
        if halves is not None:
            narrow(p, halves.dtype, out=halves)


def sums_of_squares(arrays: Several[Array]) -> Any:
    """`sum_of_squares` of each of the arrays.

    Returns:
        Numbers, a list; on a device they stay there, as an array (n,) of float64.
    """
    return [sum_of_squares(x) for x in arrays]

"""What happens to weights and gradients once backward is done: long vectors, passed over in blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.blocks import vector_blocks


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

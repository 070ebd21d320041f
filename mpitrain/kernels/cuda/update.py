"""What happens to weights and gradients once backward is done: `csrc/update.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, is_half
from mpitrain.kernels import reference
from mpitrain.kernels.cuda.arrays import precision, solid
from mpitrain.kernels.cuda.launch import THREADS, launch
from mpitrain.kernels.cuda.rows import quads
from mpitrain.kernels.reference.update import adamw_numbers

SHARES = 1_024
"""Blocks of a sum of squares at most; they do not depend on the device, and so the sum does not."""


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
    written = all(x.flags.c_contiguous and x.size == p.size for x in (p, m, v)) and g.size == p.size
    if not written or is_half(p.dtype) or precision(p, g, m, v) is None:
        reference.adamw(p, g, m, v, update=update, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
        return
    numbers = adamw_numbers(update, lr, beta1, beta2, eps, weight_decay)
    launch("update", "adamw", p.dtype, quads(p.size), THREADS, p, solid(g), m, v, p.size, *numbers)


def sum_of_squares(x: Array) -> Any:
    if precision(x) is None:
        return reference.sum_of_squares(x)
    xp, x = array_module(x), solid(x)
    blocks = max(1, min(quads(x.size), SHARES))
    sums, total = xp.empty(blocks, np.float64), xp.empty((), np.float64)
    launch("update", "squares", x.dtype, blocks, THREADS, x, sums, x.size)
    launch("update", "sum_of", np.dtype(np.float64), 1, THREADS, sums, total, blocks)
    return total

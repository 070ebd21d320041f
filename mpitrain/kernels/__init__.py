"""Fused numerics: arrays in, fresh arrays out, no tensor and no tape.

Each kernel passes over memory as few times as its mathematics allows.  The names below are what everybody calls; which
version stands behind them is decided here and nowhere else.  The reference is NumPy that reads like the formula, works
on blocks that stay in the core's cache, and runs unchanged on CuPy arrays (as one block).

All kernels take float16, float32 and float64.  Half precision is storage only: sums, statistics and products are formed
in float32.
"""

from mpitrain.kernels.attention import attention, attention_backward
from mpitrain.kernels.gelu import erf, gelu_erf, gelu_tanh
from mpitrain.kernels.reference import (
    cross_entropy,
    cross_entropy_backward,
    layer_norm,
    layer_norm_backward,
    matmul,
    softmax,
    softmax_backward,
    sum_rows,
)

__all__ = [
    "attention",
    "attention_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "erf",
    "gelu_erf",
    "gelu_tanh",
    "layer_norm",
    "layer_norm_backward",
    "matmul",
    "softmax",
    "softmax_backward",
    "sum_rows",
]

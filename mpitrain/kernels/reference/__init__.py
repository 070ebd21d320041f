"""The kernels as they read in a paper: NumPy over cache-sized blocks; on CuPy arrays the same lines, as one block."""

from mpitrain.kernels.reference.attention import attention, attention_backward
from mpitrain.kernels.reference.experts import combine, combine_backward, jitter
from mpitrain.kernels.reference.gelu import erf, gelu_backward, gelu_erf, gelu_tanh
from mpitrain.kernels.reference.halves import narrow, widen
from mpitrain.kernels.reference.norm import layer_norm, layer_norm_backward
from mpitrain.kernels.reference.products import matmul, row_sum, sum_rows
from mpitrain.kernels.reference.residual import dropout, residual, residual_norm
from mpitrain.kernels.reference.softmax import cross_entropy, cross_entropy_backward, softmax, softmax_backward
from mpitrain.kernels.reference.update import adamw, sum_of_squares

__all__ = [
    "adamw",
    "attention",
    "attention_backward",
    "combine",
    "combine_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "dropout",
    "erf",
    "gelu_backward",
    "gelu_erf",
    "gelu_tanh",
    "jitter",
    "layer_norm",
    "layer_norm_backward",
    "matmul",
    "narrow",
    "residual",
    "residual_norm",
    "row_sum",
    "softmax",
    "softmax_backward",
    "sum_of_squares",
    "sum_rows",
    "widen",
]

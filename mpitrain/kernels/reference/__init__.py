"""The kernels as they read in a paper: NumPy over cache-sized blocks; on CuPy arrays the same lines, as one block."""

from mpitrain.kernels.reference.attention import attention, attention_backward
from mpitrain.kernels.reference.convolution import conv2d, conv2d_filters, conv2d_images
from mpitrain.kernels.reference.experts import combine, combine_backward, jitter
from mpitrain.kernels.reference.gelu import erf, gelu_backward, gelu_erf, gelu_tanh
from mpitrain.kernels.reference.halves import narrow, widen
from mpitrain.kernels.reference.hashes import hash_rows
from mpitrain.kernels.reference.norm import layer_norm, layer_norm_backward
from mpitrain.kernels.reference.pooling import max_pool2d, max_pool2d_backward
from mpitrain.kernels.reference.products import factor, linear, matmul, row_sum, sum_rows
from mpitrain.kernels.reference.residual import dropout, residual, residual_norm
from mpitrain.kernels.reference.rms_norm import residual_rms_norm, rms_norm, rms_norm_backward
from mpitrain.kernels.reference.rotary import rotary, rotary_pack, rotary_unpack
from mpitrain.kernels.reference.softmax import cross_entropy, cross_entropy_backward, softmax, softmax_backward
from mpitrain.kernels.reference.swiglu import swiglu, swiglu_backward
from mpitrain.kernels.reference.update import adamw, adamw_runs, sgd, sgd_runs, sum_of_squares, sums_of_squares

__all__ = [
    "adamw",
    "adamw_runs",
    "attention",
    "attention_backward",
    "combine",
    "combine_backward",
    "conv2d",
    "conv2d_filters",
    "conv2d_images",
    "cross_entropy",
    "cross_entropy_backward",
    "dropout",
    "erf",
    "factor",
    "gelu_backward",
    "gelu_erf",
    "gelu_tanh",
    "hash_rows",
    "jitter",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "matmul",
    "max_pool2d",
    "max_pool2d_backward",
    "narrow",
    "residual",
    "residual_norm",
    "residual_rms_norm",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_pack",
    "rotary_unpack",
    "row_sum",
    "sgd",
    "sgd_runs",
    "softmax",
    "softmax_backward",
    "sum_of_squares",
    "sum_rows",
    "sums_of_squares",
    "swiglu",
    "swiglu_backward",
    "widen",
]

"""Kernels for arrays on a GPU: the names, arguments and results of the references, computed by `csrc`.

Each launcher looks at its arrays once, allocates what comes out, and puts a kernel or two on the current stream; none
waits for the device.  What a kernel does not take goes to the reference, whose formulas CuPy computes.  A name that is
missing here has no version of its own.
"""

from mpitrain.kernels.cuda.attention import attention, attention_backward
from mpitrain.kernels.cuda.experts import combine, combine_backward, jitter
from mpitrain.kernels.cuda.gelu import erf, gelu_backward, gelu_erf, gelu_tanh
from mpitrain.kernels.cuda.halves import narrow, widen
from mpitrain.kernels.cuda.hashes import hash_rows
from mpitrain.kernels.cuda.images import conv2d, conv2d_filters, conv2d_images, max_pool2d, max_pool2d_backward
from mpitrain.kernels.cuda.loss import cross_entropy, cross_entropy_backward
from mpitrain.kernels.cuda.norm import layer_norm, layer_norm_backward, residual_norm
from mpitrain.kernels.cuda.products import factor, linear, matmul
from mpitrain.kernels.cuda.residual import dropout, residual
from mpitrain.kernels.cuda.rms_norm import residual_rms_norm, rms_norm, rms_norm_backward
from mpitrain.kernels.cuda.rotary import rotary, rotary_pack, rotary_unpack
from mpitrain.kernels.cuda.several import adamw_runs, sgd_runs, sums_of_squares
from mpitrain.kernels.cuda.softmax import softmax, softmax_backward
from mpitrain.kernels.cuda.sums import row_sum, sum_rows
from mpitrain.kernels.cuda.swiglu import swiglu, swiglu_backward
from mpitrain.kernels.cuda.update import adamw, sum_of_squares

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

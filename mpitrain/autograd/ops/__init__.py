"""Operations on tensors, as functions; importing this package also gives `Tensor` its operators and methods.

    arithmetic   add sub mul div pow maximum minimum where
    elementwise  neg abs exp log sqrt tanh sigmoid relu clip sin cos erf
    linalg       matmul
    reduce       sum mean max min var logsumexp softmax log_softmax
    shape        reshape transpose swap broadcast_to concat split stack pad squeeze expand cast
    index        getitem take gather_along
    fused        linear gelu_tanh gelu_erf layer_norm softmax_cross_entropy
    residual     dropout residual residual_norm
    attention    attention
    slices       slice_attention
    convolution  conv2d
    pooling      max_pool2d
    experts      gates take_rows permute_rows grouped_matmul combine jitter

Every one broadcasts as NumPy does, works in float64, float32, float16 and bfloat16, and gives each input a gradient of
exactly its shape and dtype.  Of halves the formulas, sums and products are worked out in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

from mpitrain.autograd.ops.arithmetic import add, div, maximum, minimum, mul, pow, sub, where
from mpitrain.autograd.ops.attention import attention
from mpitrain.autograd.ops.convolution import conv2d
from mpitrain.autograd.ops.elementwise import abs, clip, cos, erf, exp, log, neg, relu, sigmoid, sin, sqrt, tanh
from mpitrain.autograd.ops.experts import combine, gates, grouped_matmul, jitter, permute_rows, take_rows
from mpitrain.autograd.ops.fused import IGNORE, gelu_erf, gelu_tanh, layer_norm, linear, softmax_cross_entropy
from mpitrain.autograd.ops.index import gather_along, getitem, take
from mpitrain.autograd.ops.linalg import matmul
from mpitrain.autograd.ops.pooling import max_pool2d
from mpitrain.autograd.ops.reduce import log_softmax, logsumexp, max, mean, min, softmax, sum, var
from mpitrain.autograd.ops.residual import dropout, residual, residual_norm
from mpitrain.autograd.ops.shape import (
    broadcast_to,
    cast,
    concat,
    expand,
    pad,
    reshape,
    split,
    squeeze,
    stack,
    swap,
    transpose,
)
from mpitrain.autograd.ops.slices import slice_attention
from mpitrain.autograd.tensor import Tensor

__all__ = [
    "IGNORE",
    "abs",
    "add",
    "attention",
    "broadcast_to",
    "cast",
    "clip",
    "combine",
    "concat",
    "conv2d",
    "cos",
    "div",
    "dropout",
    "erf",
    "exp",
    "expand",
    "gates",
    "gather_along",
    "gelu_erf",
    "gelu_tanh",
    "getitem",
    "grouped_matmul",
    "jitter",
    "layer_norm",
    "linear",
    "log",
    "log_softmax",
    "logsumexp",
    "matmul",
    "max",
    "max_pool2d",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mul",
    "neg",
    "pad",
    "permute_rows",
    "pow",
    "relu",
    "reshape",
    "residual",
    "residual_norm",
    "sigmoid",
    "sin",
    "slice_attention",
    "softmax",
    "softmax_cross_entropy",
    "split",
    "sqrt",
    "squeeze",
    "stack",
    "sub",
    "sum",
    "swap",
    "take",
    "take_rows",
    "tanh",
    "transpose",
    "var",
    "where",
]


def _install(**methods: Any) -> None:
    for name, method in methods.items():
        setattr(Tensor, name, method)


_install(
    __add__=add,
    __radd__=lambda x, other: add(other, x),
    __sub__=sub,
    __rsub__=lambda x, other: sub(other, x),
    __mul__=mul,
    __rmul__=lambda x, other: mul(other, x),
    __truediv__=div,
    __rtruediv__=lambda x, other: div(other, x),
    __pow__=pow,
    __rpow__=lambda x, other: pow(other, x),
    __neg__=neg,
    __abs__=abs,
    __matmul__=matmul,
    __rmatmul__=lambda x, other: matmul(other, x),
    __getitem__=getitem,
    __iter__=lambda x: (getitem(x, i) for i in range(len(x))),
    abs=abs,
    astype=cast,
    clip=clip,
    exp=exp,
    log=log,
    max=max,
    mean=mean,
    min=min,
    reshape=reshape,
    sqrt=sqrt,
    squeeze=squeeze,
    sum=sum,
    swap=swap,
    tanh=tanh,
    transpose=transpose,
    var=var,
    T=property(transpose),
)

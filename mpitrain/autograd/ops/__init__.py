"""Operations on tensors, as functions; importing this package also gives `Tensor` its operators and methods.

    arithmetic   add sub mul div pow maximum minimum where
    elementwise  neg abs exp log sqrt tanh sigmoid silu softplus relu clip sin cos erf
    linalg       matmul
    contraction  einsum
    reduce       sum mean max min var std logsumexp softmax log_softmax
    cumulative   prod cumsum
    shape        reshape transpose swap broadcast_to concat split stack pad squeeze expand cast
    index        getitem take gather_along
    arrange      flip roll tile repeat
    questions    equal not_equal less less_equal greater greater_equal argmax argmin
    fused        linear gelu_tanh gelu_erf layer_norm softmax_cross_entropy
    residual     dropout residual residual_norm
    rms_norm     rms_norm residual_rms_norm
    swiglu       swiglu
    rotary       rotary pack_rotary
    attention    attention
    slices       slice_attention
    convolution  conv2d
    pooling      max_pool2d avg_pool2d
    normalize    normalize
    experts      gates take_rows permute_rows grouped_matmul combine jitter

Every one broadcasts as NumPy does, works in float64, float32, float16 and bfloat16, and gives each input a gradient of
exactly its shape and dtype.  Of halves the formulas, sums and products are worked out in float32 and rounded once.
The answers to questions are plain arrays, of bools or of integers.
"""

from __future__ import annotations

from typing import Any

from mpitrain.autograd.ops.arithmetic import add, div, maximum, minimum, mul, pow, sub, where
from mpitrain.autograd.ops.arrange import flip, repeat, roll, tile
from mpitrain.autograd.ops.attention import attention
from mpitrain.autograd.ops.contraction import einsum
from mpitrain.autograd.ops.convolution import conv2d
from mpitrain.autograd.ops.cumulative import cumsum, prod
from mpitrain.autograd.ops.elementwise import (
    abs,
    clip,
    cos,
    erf,
    exp,
    log,
    neg,
    relu,
    sigmoid,
    silu,
    sin,
    softplus,
    sqrt,
    tanh,
)
from mpitrain.autograd.ops.experts import combine, gates, grouped_matmul, jitter, permute_rows, take_rows
from mpitrain.autograd.ops.fused import IGNORE, gelu_erf, gelu_tanh, layer_norm, linear, softmax_cross_entropy
from mpitrain.autograd.ops.index import gather_along, getitem, take
from mpitrain.autograd.ops.linalg import matmul
from mpitrain.autograd.ops.normalize import normalize
from mpitrain.autograd.ops.pooling import avg_pool2d, max_pool2d
from mpitrain.autograd.ops.questions import (
    argmax,
    argmin,
    equal,
    greater,
    greater_equal,
    less,
    less_equal,
    not_equal,
)
from mpitrain.autograd.ops.reduce import log_softmax, logsumexp, max, mean, min, softmax, std, sum, var
from mpitrain.autograd.ops.residual import dropout, residual, residual_norm
from mpitrain.autograd.ops.rms_norm import residual_rms_norm, rms_norm
from mpitrain.autograd.ops.rotary import pack_rotary, rotary
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
from mpitrain.autograd.ops.swiglu import swiglu
from mpitrain.autograd.tensor import Tensor

__all__ = [
    "IGNORE",
    "abs",
    "add",
    "argmax",
    "argmin",
    "attention",
    "avg_pool2d",
    "broadcast_to",
    "cast",
    "clip",
    "combine",
    "concat",
    "conv2d",
    "cos",
    "cumsum",
    "div",
    "dropout",
    "einsum",
    "equal",
    "erf",
    "exp",
    "expand",
    "flip",
    "gates",
    "gather_along",
    "gelu_erf",
    "gelu_tanh",
    "getitem",
    "greater",
    "greater_equal",
    "grouped_matmul",
    "jitter",
    "layer_norm",
    "less",
    "less_equal",
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
    "normalize",
    "not_equal",
    "pack_rotary",
    "pad",
    "permute_rows",
    "pow",
    "prod",
    "relu",
    "repeat",
    "reshape",
    "residual",
    "residual_norm",
    "residual_rms_norm",
    "rms_norm",
    "roll",
    "rotary",
    "sigmoid",
    "silu",
    "sin",
    "slice_attention",
    "softmax",
    "softmax_cross_entropy",
    "softplus",
    "split",
    "sqrt",
    "squeeze",
    "stack",
    "std",
    "sub",
    "sum",
    "swap",
    "swiglu",
    "take",
    "take_rows",
    "tanh",
    "tile",
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
    __lt__=less,
    __le__=less_equal,
    __gt__=greater,
    __ge__=greater_equal,
    __matmul__=matmul,
    __rmatmul__=lambda x, other: matmul(other, x),
    __getitem__=getitem,
    __iter__=lambda x: (getitem(x, i) for i in range(len(x))),
    abs=abs,
    argmax=argmax,
    argmin=argmin,
    astype=cast,
    clip=clip,
    cumsum=cumsum,
    exp=exp,
    log=log,
    max=max,
    mean=mean,
    min=min,
    prod=prod,
    reshape=reshape,
    sqrt=sqrt,
    squeeze=squeeze,
    std=std,
    sum=sum,
    swap=swap,
    tanh=tanh,
    transpose=transpose,
    var=var,
    T=property(transpose),
)

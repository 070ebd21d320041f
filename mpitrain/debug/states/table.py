"""Which rule is whose: a table from Function to rule.

An op that is not in it works element by element, with NumPy's broadcasting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from mpitrain import collectives
from mpitrain.autograd.function import Function
from mpitrain.autograd.ops import cumulative, experts, fused, index, linalg, reduce, shape
from mpitrain.autograd.ops.attention import Attention
from mpitrain.autograd.ops.contraction import Contract
from mpitrain.autograd.ops.convolution import Conv2d
from mpitrain.autograd.ops.normalize import Normalize
from mpitrain.autograd.ops.pooling import AvgPool2d, MaxPool2d
from mpitrain.autograd.ops.residual import Dropout, Residual, ResidualNorm
from mpitrain.autograd.ops.rms_norm import ResidualRmsNorm, RmsNorm
from mpitrain.autograd.ops.rotary import PackRotary, Rotary
from mpitrain.autograd.ops.slices import SliceAttention
from mpitrain.debug.states import images, routed, rules
from mpitrain.debug.states.mixing import Call, Mismatch, States, a_state
from mpitrain.debug.states.rules import Rule
from mpitrain.parallel.batch_norm import BatchStatistics
from mpitrain.parallel.expert import overlap

RULES: Mapping[type[Function], Rule] = MappingProxyType(
    {
        linalg.Matmul: rules.matmul,
        Contract: rules.by_letters,
        fused.Linear: rules.linear,
        fused.LayerNorm: rules.along(rules.last),
        Attention: rules.attention,
        SliceAttention: rules.slice_attention,
        Conv2d: images.conv2d,
        AvgPool2d: images.pool2d,
        MaxPool2d: images.pool2d,
        BatchStatistics: images.batch_statistics,
        Normalize: images.normalize,
        fused.SoftmaxCrossEntropy: rules.cross_entropy,
        Dropout: rules.first,
        Residual: rules.residual,
        ResidualNorm: rules.residual_norm,
        RmsNorm: rules.along(rules.last),
        ResidualRmsNorm: rules.residual_norm,
        Rotary: rules.first,
        PackRotary: rules.both,
        reduce.Sum: rules.reduction,
        reduce.Mean: rules.reduction,
        reduce.Max: rules.reduction,
        reduce.Logsumexp: rules.reduction,
        reduce.Var: rules.reduction,
        reduce.Std: rules.reduction,
        cumulative.Prod: rules.reduction,
        cumulative.Cumsum: rules.along(lambda call: call.static["dim"]),
        reduce.Softmax: rules.along(lambda call: call.static["dim"]),
        reduce.LogSoftmax: rules.along(lambda call: call.static["dim"]),
        shape.Reshape: rules.reshape,
        shape.Transpose: rules.transpose,
        shape.BroadcastTo: rules.broadcast_to,
        shape.Concat: rules.concat,
        shape.Split: rules.first,
        shape.Pad: rules.pad,
        index.Getitem: rules.getitem,
        index.Take: rules.take,
        index.GatherAlong: rules.gather_along,
        collectives.MaxOver: rules.statistic,
        experts.Gates: rules.along(rules.last),
        experts.NormalizedGates: rules.along(rules.last),
        experts.TakeRows: routed.take_rows,
        experts.PermuteRows: rules.first,
        experts.GroupedMatmul: routed.grouped_matmul,
        experts.Combine: routed.combine,
        experts.Jitter: rules.first,
        overlap.SendOff: rules.first,
        overlap.Arrive: routed.arrive,
    }
)
"""Rules by Function; a subclass has that of its base."""

PICKS = (index.Getitem, index.Take, index.GatherAlong)
"""Ops whose index may be another on every rank: of a Replicate value each may pick a part of its own."""

VIEWS = (shape.Reshape, shape.Transpose, collectives.Copy)
"""Ops whose value is that of their input, which has a digest already."""


def rule_of(function: type[Function]) -> Rule:
    """The rule of a Function, or of the first of its bases that has one."""
    return next((RULES[base] for base in function.__mro__ if base in RULES), rules.elementwise)


def check_shape(call: Call, states: States, shapes: Iterable[tuple[int, ...]]) -> None:
    """Refuse a cut value in an op that has no rule and does not work element by element.

    Args:
        call: an op.
        states: of its inputs.
        shapes: of its outputs.

    Raises:
        Mismatch: nobody knows what becomes of the slices.
    """
    cut = [(i, state) for i, state in enumerate(states) if state is not None and state.dim is not None]
    if not cut or rule_of(call.function) is not rules.elementwise:
        return
    try:
        expected = np.broadcast_shapes(*(call.shape(i) for i in range(len(call.inputs))))
    except ValueError:
        expected = None
    if any(shape != expected for shape in shapes):
        way = "name an op with the same rules in its `like`, or gather the value before it"
        i, state = cut[0]
        raise Mismatch(f"{call.title}, whose rules are not known, of {a_state(state)} value", way, i)

"""The router: a probability for each expert, and the losses that keep the router useful.

    z = x W in at least float32,  p = softmax(z)
    switch      E sum_j f_j P_j           f_j: share of the row's tokens whose first choice is j, before any is dropped
    gshard      1/E sum_j f_j P_j         P_j: mean over the row's tokens of p_j
    topk        E sum_j f_j P_j           f_j: share of all choices
    z-loss      1/T sum_i (log sum_j exp z_ij)^2

The gradient of a balance loss goes through P, f is a count.  Both losses are of one row of the batch, and summed over
the rows here; the step takes their mean (`mpitrain.autograd.auxiliary`).

Sources: Fedus et al. 2021, arXiv:2101.03961, section 2.2, equations 4-6, section 2.4 (precision, initial values) and
appendix F (jitter); Lepikhin et al. 2020, arXiv:2006.16668, section 2.2, algorithm 1; Zoph et al. 2022,
arXiv:2202.08906, equation 5.
"""

from __future__ import annotations

import math

import numpy as np

from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, wide
from mpitrain.nn import init as initial
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel.sequence import between
from mpitrain.rng import Draw
from mpitrain.routing import Routing

INITIAL = math.sqrt(0.1)
"""Standard deviation of the router's initial weights, times the root of its inputs: a tenth of the usual variance."""


class Router(Module):
    """What each token thinks of each expert.

    x (b, s, h) Invariant on tp, or (b, s/t, h) Shard(1) with sequence parallelism -> logits z of the same tokens,
    (b, s, E), in at least float32.  The weight is float32 in half precision too.

    Args:
        name: path in the model; the jitter's random stream is `name.jitter`.
        width: h.
        routing: the numbers.
        sequence_parallel: whether the stream is cut over tp here.
    """

    def __init__(self, name: str, width: int, routing: Routing, *, sequence_parallel: bool = False) -> None:
        super().__init__(name)
        self.routing = routing
        self.weight = Parameter(
            f"{name}.weight",
            (width, routing.experts),
            between(sequence_parallel),
            init=initial.truncated(INITIAL / math.sqrt(width)),
            decay=True,
        )
        self.weight.in_full = True

    def forward(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """Without a draw (evaluation) there is no jitter."""
        if draw is not None and self.routing.jitter:
            x = ops.cast(x, wide(x.dtype))  # half precision would round the noise
            x = ops.jitter(x, draw.rows(f"{self.name}.jitter"), self.routing.jitter)
        return ops.linear(x, self.weight, dtype=wide(x.dtype))


def balance_loss(p: Tensor, load: Array, lengths: Array, real: Array | None, routing: Routing) -> Tensor:
    """The loss that is least where the tokens of a row are spread evenly: 1 for switch and topk, 1/E^2 for gshard.

    Args:
        p: (b, s, E) probabilities of the tokens here.
        load: int64 (b, E) choices of each expert over the whole row, of the kind that counts.
        lengths: int64 (b,) tokens of the whole rows that are no padding.
        real: bool (b, s) which tokens here are no padding; None: all.
        routing: the numbers.

    Returns:
        () the sum over the rows, of this rank's part of each.
    """
    xp, experts = array_module(p.data), routing.experts
    tokens = xp.maximum(lengths, 1).astype(np.float64)[:, None]
    share = load / (routing.counted_choices * tokens)
    factor = 1.0 / experts if routing.router == "gshard" else float(experts)
    weight = (factor * share / tokens)[:, None, :]
    if real is not None:
        weight = weight * real[:, :, None]
    return ops.sum(p * weight.astype(p.dtype))


def z_loss(z: Tensor, lengths: Array, real: Array | None) -> Tensor:
    """The loss that keeps logits small, whose common size says nothing of the choice and costs digits.

    Args:
        z: (b, s, E) logits of the tokens here.
        lengths, real: as for `balance_loss`.

    Returns:
        () the sum over the rows, of this rank's part of each.
    """
    xp = array_module(z.data)
    weight = (1.0 / xp.maximum(lengths, 1).astype(np.float64))[:, None]
    if real is not None:
        weight = weight * real
    size = ops.logsumexp(z, -1)
    return ops.sum(size * size * weight.astype(z.dtype))

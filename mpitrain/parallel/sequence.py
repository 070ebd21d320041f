"""Where the residual stream enters and leaves a tensor-parallel region, and what lies between two regions.

    plain                  x  --copy-->        [column ... row]  --all_reduce-->      y        x, y Invariant on tp
    sequence parallel      x  --all_gather-->  [column ... row]  --reduce_scatter-->  y        x, y Shard(1) on tp

In plain tensor parallelism every rank holds the whole stream, and norms, dropouts and residual sums are computed by all
of them alike.  With sequence parallelism each rank keeps its slice of the sequence there: 1/t of the memory and of the
work.  An all-reduce is a reduce-scatter and an all-gather, so the bytes sent are the same.

The parameters of that stretch (norms, the biases after a row-parallel product, learned positions) are then used by each
rank for its own tokens: `between(sequence_parallel)` is the spec that says so, and by the one rule their gradients are
summed over tp.

Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from mpitrain import collectives
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.communicator import Communicator
from mpitrain.spec import REPLICATE, Spec

SEQUENCE = 1
"""The dim of (b, s, d) that is cut."""


def enter(x: Tensor, axis: Communicator, sequence_parallel: bool) -> Tensor:
    """Into a tensor-parallel region: every rank gets the whole sequence, for its own part of the work.

    Args:
        x: (b, s, d) Invariant, or (b, s/t, d) Shard(1) with sequence parallelism.

    Returns:
        (b, s, d) Replicate.

    Cost: nothing, backward an all-reduce of x; or an all-gather, backward a reduce-scatter.
    """
    return collectives.all_gather(x, axis, SEQUENCE) if sequence_parallel else collectives.copy(x, axis)


def leave(y: Tensor, axis: Communicator, sequence_parallel: bool) -> Tensor:
    """Out of a tensor-parallel region: the ranks' summands become the value.

    Args:
        y: (b, s, d) Partial.

    Returns:
        (b, s, d) Invariant, or (b, s/t, d) Shard(1) with sequence parallelism.

    Cost: an all-reduce of y, backward nothing; or a reduce-scatter, backward an all-gather.
    """
    return collectives.reduce_scatter(y, axis, SEQUENCE) if sequence_parallel else collectives.all_reduce(y, axis)


def between(sequence_parallel: bool) -> Spec:
    """The spec of parameters that lie between two tensor-parallel regions."""
    return Spec({"tp": REPLICATE} if sequence_parallel else None)

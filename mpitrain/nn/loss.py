"""The loss that every layout reproduces: a sum over the targets that count.

The mean is taken once, by the number of targets that count in the whole step, over all ranks and micro-batches: a mean
of means would weigh tokens unequally.
"""

from __future__ import annotations

from mpitrain.autograd import ops
from mpitrain.autograd.ops import IGNORE
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array


def cross_entropy(logits: Tensor, targets: Array, ignore: int = IGNORE) -> Tensor:
    """The sum over targets that count of -log softmax(logits)[target].

    Args:
        logits: (b, s, v), or any (..., v).
        targets: integers (b, s); `ignore` does not count.

    Returns:
        () the sum; divide by `count(targets)` for the mean.
    """
    return ops.softmax_cross_entropy(logits, targets, ignore)


def count(targets: Array, ignore: int = IGNORE) -> int:
    """How many targets count."""
    return int((targets != ignore).sum())

"""What a rank holds of the model between two steps: weights, masters, gradients, optimizer state, constants.

    weights    beta Psi        masters     4 Psi for halves, else the weights are their own
    gradients  beta' Psi       optimizer   adamw 2 beta' Psi, sgd with momentum beta' Psi, adafactor beta' (n + m) for a
                               matrix of n x m here, and beta' n for a vector

Psi = (12 L h^2 / t + 7 L h / t + 6 L h) / p + V h / t on the first and on the last stage + s h on the first, where each
query has keys of its own (Narayanan et al. 2021, arXiv:2104.04473, section 2; Rajbhandari et al. 2020,
arXiv:1910.02054, section 3.1).  In a layer of experts 8 h^2 E / (e t) stand for the 8 h^2 / t of its MLP (Lepikhin et
al. 2020, arXiv:2006.16668, section 2.2); its router, h E, is in full precision.  Other families have other blocks
(slabs.py).  Adafactor: Shazeer and Stern 2018, arXiv:1804.04235, algorithm 4; the experts of a layer are as many
matrices.

Constants are the turns of rotary positions, a cosine and a sine for each place and pair of a head's d elements:
beta' s d; as many again for the s / c of a rank of a ring, whose tokens do not follow each other.

Frozen weights have no masters, gradients and optimizer state; of the weights in stage 3 a rank keeps its rows of them.

With ZeRO a rank keeps of some of these only its own rows of each tensor (`nn.rows`), psi of Psi weights: Psi / n of n
ranks that would all keep the same, within a row of each tensor.  n is d c, for experts d c / e; of what is Replicate on
tp d c t.

    stage 1    masters, optimizer      weights and gradients are whole
    stage 2    gradients too
    stage 3    weights too

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5; zero.py has its formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.backend import is_half, wide
from mpitrain.plan.traffic.slabs import Slab, kept, shares, slabs
from mpitrain.plan.traffic.step import Step


class State(NamedTuple):
    """Bytes of a rank.

    `weights` are those of one version, `frozen` those of them that are not trained; `masters` is 0 where the weights
    are their own.
    """

    weights: int
    masters: int
    gradients: int
    optimizer: int
    constants: int = 0
    frozen: int = 0


def model_state(step: Step, optimizer: str | None = None, momentum: float = 0.9) -> State:
    """What this rank holds between two steps.

    Args:
        step: the sizes and the layout.
        optimizer: adamw, sgd or adafactor; None: that of the step.
        momentum: of sgd and adafactor; 0 keeps no velocity, no first moment.
    """
    here, own, fixed = [*slabs(step)], shares(step), [slab for slab in kept(step) if slab.frozen]
    narrow, broad = (int(np.dtype(dtype).itemsize) for dtype in (step.dtype, wide(step.dtype)))

    def halves(of: Iterable[Slab]) -> int:
        return sum(slab.size for slab in of if not slab.is_wide) if is_half(step.dtype) else 0

    def count(of: Iterable[Slab]) -> int:
        return sum(slab.size for slab in of)

    match step.optimizer if optimizer is None else optimizer:
        case "adamw":
            numbers = 2 * count(own)
        case "sgd":
            numbers = count(own) if momentum else 0
        case "adafactor":
            numbers = sum(_sums_of(slab.shape) for slab in own)
        case _:
            raise AssertionError(optimizer or step.optimizer)

    def nbytes(of: Sequence[Slab]) -> int:
        return narrow * halves(of) + broad * (count(of) - halves(of))

    return State(
        nbytes(own if step.zero >= 3 else here) + nbytes(fixed),
        broad * halves(own),
        broad * count(own if step.zero >= 2 else here),
        broad * numbers,
        broad * _turns(step),
        nbytes(fixed),
    )


def _turns(step: Step) -> int:
    """Cosines and sines of rotary positions: of all places, and of a rank's own where they do not lie together."""
    sizes = step.sizes
    if not sizes.is_rotary:
        return 0
    apart = step.s if step.cp > 1 and step.cp_attention == "ring" and not _follow(step) else 0
    return (sizes.seq_len + apart) * sizes.head_width


def _follow(step: Step) -> bool:
    """Whether the two chunks of a rank of a ring are neighbours, as those of the last rank are."""
    return step.cp_rank == step.cp - 1


def _sums_of(shape: tuple[int, ...]) -> int:
    """Numbers that Adafactor keeps: of each matrix the sums of its rows and of its columns."""
    *matrices, n, m = (1, 0, *shape) if len(shape) == 1 else shape
    return math.prod(matrices) * (n + m)

"""Memory with ZeRO: the paper's bytes of model state, and whole weights of parts of the model that work.

As the paper has it, of Psi weights over d ranks, in 16 bits and with K bytes of the rest each:

    stage 0    (2 + 2 + K) Psi            a 16-bit weight, a 16-bit gradient; K: float32 weight and two moments, 12
    stage 1    4 Psi + K Psi / d          the rest is cut
    stage 2    2 Psi + (2 + K) Psi / d    gradients too
    stage 3    (4 + K) Psi / d            weights too

Our own figures stand in state.py: gradients add up in float32, 18 bytes a weight in all, and a rank keeps whole rows,
so that ranks differ by a row a tensor at most.  In stage 3 a rank holds besides, while it works, the whole weights of
one part of the model, and those of the parts that are on their way to it.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5, table 1 and figure 1.
"""

from __future__ import annotations

from fractions import Fraction

from mpitrain.plan.traffic.slabs import beta_of
from mpitrain.plan.traffic.step import Step
from mpitrain.plan.traffic.zero import units

K = 12
"""Bytes a weight that AdamW needs besides a 16-bit weight and its gradient."""


def published(psi: int, ranks: int, stage: int, k: int = K) -> Fraction:
    """Bytes of a rank.

    Args:
        psi: weights of the model.
        ranks: over which its state is cut.
        stage: 0 to 3.
        k: bytes a weight of what stage 1 cuts.
    """
    cut = (0, k, 2 + k, 4 + k)[stage]  # bytes of a weight that are cut
    return psi * (4 + k - cut + Fraction(cut, ranks))


def gathered(step: Step) -> int:
    """The most bytes of whole weights that a rank holds at once, beside its own rows, in stage 3.

    They are those of a part of the model and of the `step.prefetch` parts after it, forwards as backwards.
    """
    most = 0
    for parts in units(step).values() if step.zero == 3 else ():
        held = [sum(beta_of(step, slab) * slab.size for message in part for slab in message) for part in parts]
        for number in range(len(held)):
            most = max(most, sum(held[number : number + 1 + step.prefetch]))
    return most

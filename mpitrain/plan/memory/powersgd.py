"""What PowerSGD holds on a rank besides the gradients: what it left out, and the factors on their way.

error and what is to be the next one     2 beta' n m of each compressed matrix, without feedback one of them
P                                        beta' r n
Q: kept, of this rank, of all            3 beta' r m
what is not compressed                   beta' of a number; of halves (beta + beta')
"""

from __future__ import annotations

from mpitrain.plan.traffic.powersgd import compressed
from mpitrain.plan.traffic.slabs import beta_of
from mpitrain.plan.traffic.step import Step


def left_out(step: Step, feedback: bool = True) -> int:
    """Bytes that this rank holds for a reducer that compresses; 0 where none does."""
    wide, total = step.beta_wide, 0
    for slab, matrices in () if step.compression is None else compressed(step, step.compression):
        if matrices is None:
            beta = beta_of(step, slab)
            total += slab.size * (wide if beta == wide else beta + wide)
        else:
            total += wide * ((1 + feedback) * slab.size + matrices.left + 3 * matrices.right)
    return total

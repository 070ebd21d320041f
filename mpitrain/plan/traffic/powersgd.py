"""The sums of gradients where PowerSGD compresses them, in the place of those of whole gradients.

Of a matrix n x m of this rank two factors of r columns travel; E/e experts of a layer are as many matrices.  For each
set of axes of N ranks, with what is not compressed (vectors, small matrices, tables)

    first      2 (N-1)/N  beta_wide  (sum of r n + what is not compressed)      of halves what is not compressed goes
                                                                                as halves, in a message of its own
    second     2 (N-1)/N  beta_wide  (sum of r m)

A tied table that is compressed sends its two factors over the two ends of the pipeline as well.

Source: Vogels et al. 2019, arXiv:1905.13727, section 3.  These are the bytes of a step that is compressed; the first
ones (`--powersgd-start`) send whole gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mpitrain.parallel.powersgd import Choice, Matrices
from mpitrain.plan.traffic.lines import Line
from mpitrain.plan.traffic.slabs import ATOMS, EXPERTS, Slab, beta_of, merged, slabs
from mpitrain.plan.traffic.step import Step


def compressed(step: Step, choice: Choice) -> Iterator[tuple[Slab, Matrices | None]]:
    """The parameters of this rank, and as which matrices they are compressed; None: they are not."""
    largest = {slab.name: slab.shape for slab in slabs(replace(step, tp_rank=0))}
    for slab in slabs(step):
        yield slab, choice.of(slab.name, slab.shape, largest[slab.name], stacked=slab.axes == EXPERTS)


def factors(step: Step, choice: Choice) -> Iterator[Line]:
    """The messages that a rank sends of its gradients."""
    here = [*compressed(step, choice)]
    for axes in dict.fromkeys(slab.axes for slab, _ in here):
        exact: dict[int, int] = {}  # bytes of an element -> bytes
        left, right = [], []
        for slab, matrices in here:
            if slab.axes != axes:
                continue
            if matrices is None:
                beta = beta_of(step, slab)
                exact[beta] = exact.get(beta, 0) + beta * slab.size
            else:
                left.append(matrices.left)
                right.append(matrices.right)
        n, _ = merged(step, ATOMS[axes])
        beta = step.beta_wide
        for size, nbytes in exact.items():
            if size != beta:
                yield Line(axes, "gradients", "all_reduce", n, 1, nbytes)
        if left or beta in exact:
            yield Line(axes, "gradients", "all_reduce", n, 1, exact.get(beta, 0) + beta * sum(left))
        if right:
            yield Line(axes, "gradients", "all_reduce", n, 1, beta * sum(right))


def over_ends(step: Step, table: Slab) -> list[int]:
    """Bytes of each message in which the ends of a pipeline sum the gradient of the table that they share."""
    found = () if step.compression is None else compressed(step, step.compression)
    matrices = next((matrices for slab, matrices in found if slab.name == table.name), None)
    if matrices is None:
        return [beta_of(step, table) * table.size]
    return [step.beta_wide * matrices.left, step.beta_wide * matrices.right]

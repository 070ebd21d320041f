"""What workers send that learn apart from each other (`mpitrain.parallel.workers`), in the place of sums of gradients.

n = d/e workers; of d, c, t, e ranks on dp, cp, tp, ep those of one worker are e c t, and with p stages p e c t.

    inside of a worker    2 (e c - 1)/(e c)  beta x parameters            every step; e c t for those that are Replicate
                                                                          on tp, c for experts
    norm                  2 (N-1)/N  8                                    every step that clips, over the N ranks of a
                                                                          worker

    stale gradients       2 (n-1)/n  beta_wide x parameters               every step
    local SGD: weights    2 (n-1)/n  beta_wide x parameters               once in H steps
               moments    2 (n-1)/n  beta_wide x parameters x how many    with them, where they are averaged, too

Sources: Dean et al. 2012 (Downpour); Stich 2018, arXiv:1805.09767.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.plan.traffic.lines import Line
from mpitrain.plan.traffic.slabs import ATOMS, beta_of, buffers, merged
from mpitrain.plan.traffic.step import Step


def inside(step: Step) -> Iterator[Line]:
    """The sums over the ranks of a worker, of each step."""
    assert step.workers is not None
    for buffer in buffers(step):
        axes = tuple(axis for axis in ATOMS[buffer[0].axes] if axis != "edp")
        nbytes = beta_of(step, buffer[0]) * sum(slab.size for slab in buffer)
        yield Line("+".join(axes), "gradients", "all_reduce", merged(step, axes)[0], 1, nbytes)
    axes = ("pp", "ep", "cp", "tp")
    yield Line("+".join(axes), "loss and norm", "all_reduce", merged(step, axes)[0], int(step.workers.clips), 8)


def between(step: Step) -> Iterator[Line]:
    """The sums over workers: of each step, or of the one of H that ends in an average."""
    assert step.workers is not None
    n, sizes = merged(step, ("edp",))[0], [sum(slab.size for slab in buffer) for buffer in buffers(step)]
    for size in sizes:
        yield Line("edp", "weights" if step.workers.steps else "gradients", "all_reduce", n, 1, step.beta_wide * size)
    moments = step.workers.moments
    yield Line("edp", "moments", "all_reduce", n, int(moments > 0), step.beta_wide * sum(sizes) * moments)

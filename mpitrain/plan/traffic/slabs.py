"""The parameters of a rank: the shape of each slab, how wide it is kept, and the axes that sum its gradient.

    all that is in no group below   dp+cp
    Replicate on tp as well         dp+cp+tp     with sequence parallelism what lies between two regions; projections of
                                                 keys and values where there are fewer such heads than ranks of tp
    experts                         edp+cp       ep has others of them

Whole, they are 12 h^2 / t + 7 h / t + 6 h a block, or with experts (4 h^2 + 3 h) / t + 5 h + h E + 8 h^2 E / (e t);
V h / t for the table and for the head; 2 h of the last norm; s h of positions.

Table and positions are on the first stage, the last norm and the head on the last; a tied table is on both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from mpitrain.plan.traffic.step import Step
from mpitrain.spec import cut

DATA, DATA_AND_TP, EXPERTS = "dp+cp", "dp+cp+tp", "edp+cp"
"""The axes over whose merge gradients are summed: of most parameters, of those that are Replicate on tp as well, and of
experts."""


class Slab(NamedTuple):
    """This rank's part of a parameter.

    name, shape: as on the rank; is_wide: whether it is in at least float32 where the model is of half precision; axes:
    over whose merge its gradient is summed.
    """

    name: str
    shape: tuple[int, ...]
    is_wide: bool = False
    axes: str = DATA

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def slabs(step: Step) -> Iterator[Slab]:
    """The parameters of this rank, from the first stage's to the last's."""
    sizes, h, stream = step.sizes, step.sizes.width, step.scaled
    between = _between(step)
    if step.is_first or (step.is_last and sizes.tied):
        yield Slab("table.weight", (words(step), h), stream)
    if step.is_first:
        yield Slab("positions.weight", (sizes.seq_len, h), stream, between)
    for stage in step.stages:
        for number in step.blocks_of(stage):
            yield from _block(step, number)
    if step.is_last:
        yield Slab("norm.weight", (h,), stream, between)
        yield Slab("norm.bias", (h,), stream, between)
        if not sizes.tied:
            yield Slab("head.weight", (h, words(step)), stream)


def _block(step: Step, number: int) -> Iterator[Slab]:
    """Where branches have scales only what lies inside of one is of half precision."""
    name, h, stream, between = f"blocks.{number}", step.sizes.width, step.scaled, _between(step)
    for norm in ("norm1", "norm2"):
        yield Slab(f"{name}.{norm}.weight", (h,), stream, between)
        yield Slab(f"{name}.{norm}.bias", (h,), stream, between)
        if norm == "norm1":
            yield from _attention(step, f"{name}.attention")
    yield from (_experts if step.sizes.has_experts(number) else _mlp)(step, f"{name}.mlp")


def _attention(step: Step, name: str) -> Iterator[Slab]:
    sizes, h, t = step.sizes, step.sizes.width, step.tp
    if sizes.groups == sizes.heads:
        yield Slab(f"{name}.qkv.weight", (h, 3 * h // t))
        yield Slab(f"{name}.qkv.bias", (3 * h // t,))
    else:
        kv = 2 * sizes.groups * (h // sizes.heads)
        kv, axes = (kv // t, DATA) if t <= sizes.groups else (kv, DATA_AND_TP)  # too few heads: each holds all of them
        yield Slab(f"{name}.q.weight", (h, h // t))
        yield Slab(f"{name}.q.bias", (h // t,))
        yield Slab(f"{name}.kv.weight", (h, kv), axes=axes)
        yield Slab(f"{name}.kv.bias", (kv,), axes=axes)
    yield Slab(f"{name}.proj.weight", (h // t, h))
    yield Slab(f"{name}.proj.bias", (h,), step.scaled, _between(step))


def _mlp(step: Step, name: str) -> Iterator[Slab]:
    h, hidden = step.sizes.width, 4 * step.sizes.width // step.tp
    yield Slab(f"{name}.up.weight", (h, hidden))
    yield Slab(f"{name}.up.bias", (hidden,))
    yield Slab(f"{name}.down.weight", (hidden, h))
    yield Slab(f"{name}.down.bias", (h,), step.scaled, _between(step))


def _experts(step: Step, name: str) -> Iterator[Slab]:
    """The router on every rank, in full precision; of the experts E / e, without biases."""
    h, hidden = step.sizes.width, 4 * step.sizes.width // step.tp
    yield Slab(f"{name}.router.weight", (h, step.experts), True, _between(step))
    yield Slab(f"{name}.experts.up", (step.experts // step.ep, h, hidden), axes=EXPERTS)
    yield Slab(f"{name}.experts.down", (step.experts // step.ep, hidden, h), axes=EXPERTS)


def _between(step: Step) -> str:
    """Of what lies between two regions: with sequence parallelism each rank of tp uses it for tokens of its own."""
    return DATA_AND_TP if step.is_cut else DATA


def words(step: Step) -> int:
    """Rows of the vocabulary on this rank of tp."""
    first, stop = cut(step.sizes.vocab, step.tp, step.tp_rank)
    return stop - first


def parameters(step: Step) -> dict[str, int]:
    """Elements of this rank's parameters, by the axes over whose merge their gradients are summed."""
    found: dict[str, int] = {}
    for slab in slabs(step):
        found[slab.axes] = found.get(slab.axes, 0) + slab.size
    return found

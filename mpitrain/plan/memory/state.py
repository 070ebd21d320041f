"""What a rank holds of the model between two steps: weights, masters, gradients, optimizer state.

    weights    beta Psi        masters     4 Psi for halves, else the weights are their own
    gradients  beta' Psi       optimizer   adamw 2 beta' Psi, sgd with momentum beta' Psi, adafactor beta' (n + m) for a
                               matrix of n x m here, and beta' n for a vector

Psi = (12 L h^2 / t + 7 L h / t + 6 L h) / p + V h / t on the first and on the last stage + s h on the first, where each
query has keys of its own (Narayanan et al. 2021, arXiv:2104.04473, section 2; Rajbhandari et al. 2020,
arXiv:1910.02054, section 3.1).  Adafactor: Shazeer and Stern 2018, arXiv:1804.04235, algorithm 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpitrain.backend import is_half, wide
from mpitrain.plan.traffic.step import Step
from mpitrain.spec import cut


class Slab(NamedTuple):
    """This rank's part of a parameter.

    name, shape: as on the rank; in_branch: whether it belongs to attention or mlp, which alone are of half precision
    where branches have scales.
    """

    name: str
    shape: tuple[int, ...]
    in_branch: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class State(NamedTuple):
    """Bytes of a rank.

    `weights` are those of one version; `masters` is 0 where the weights are their own.
    """

    weights: int
    masters: int
    gradients: int
    optimizer: int


def slabs(step: Step) -> Iterator[Slab]:
    """The parameters of this rank, in the model's order."""
    sizes, t = step.sizes, step.tp
    h, words = sizes.width, _words(step)
    if step.is_first or (step.is_last and sizes.tied):
        yield Slab("table.weight", (words, h))
    if step.is_first:
        yield Slab("positions.weight", (sizes.seq_len, h))
    for stage in step.stages:
        for number in step.blocks_of(stage):
            yield from _block(step, f"blocks.{number}", h, t)
    if step.is_last:
        yield Slab("norm.weight", (h,))
        yield Slab("norm.bias", (h,))
        if not sizes.tied:
            yield Slab("head.weight", (h, words))


def _block(step: Step, name: str, h: int, t: int) -> Iterator[Slab]:
    sizes = step.sizes
    attention, mlp = f"{name}.attention", f"{name}.mlp"
    yield Slab(f"{name}.norm1.weight", (h,))
    yield Slab(f"{name}.norm1.bias", (h,))
    if sizes.groups == sizes.heads:
        yield Slab(f"{attention}.qkv.weight", (h, 3 * h // t), True)
        yield Slab(f"{attention}.qkv.bias", (3 * h // t,), True)
    else:
        kv = 2 * sizes.groups * (h // sizes.heads)
        kv = kv // t if t <= sizes.groups else kv  # fewer heads of keys than ranks: each holds all of them
        yield Slab(f"{attention}.q.weight", (h, h // t), True)
        yield Slab(f"{attention}.q.bias", (h // t,), True)
        yield Slab(f"{attention}.kv.weight", (h, kv), True)
        yield Slab(f"{attention}.kv.bias", (kv,), True)
    yield Slab(f"{attention}.proj.weight", (h // t, h), True)
    yield Slab(f"{attention}.proj.bias", (h,))
    yield Slab(f"{name}.norm2.weight", (h,))
    yield Slab(f"{name}.norm2.bias", (h,))
    yield Slab(f"{mlp}.up.weight", (h, 4 * h // t), True)
    yield Slab(f"{mlp}.up.bias", (4 * h // t,), True)
    yield Slab(f"{mlp}.down.weight", (4 * h // t, h), True)
    yield Slab(f"{mlp}.down.bias", (h,))


def _words(step: Step) -> int:
    """Rows of the vocabulary on this rank of tp."""
    first, stop = cut(step.sizes.vocab, step.tp, step.tp_rank)
    return stop - first


def model_state(step: Step, optimizer: str | None = None, momentum: float = 0.9) -> State:
    """What this rank holds between two steps.

    Args:
        step: the sizes and the layout.
        optimizer: adamw, sgd or adafactor; None: that of the step.
        momentum: of sgd and adafactor; 0 keeps no velocity, no first moment.
    """
    here = [*slabs(step)]
    count = sum(slab.size for slab in here)
    halves = sum(slab.size for slab in here if slab.in_branch or not step.scaled) if is_half(step.dtype) else 0
    narrow, broad = (int(np.dtype(dtype).itemsize) for dtype in (step.dtype, wide(step.dtype)))
    match step.optimizer if optimizer is None else optimizer:
        case "adamw":
            numbers = 2 * count
        case "sgd":
            numbers = count if momentum else 0
        case "adafactor":
            numbers = sum(sum(slab.shape) if len(slab.shape) == 2 else slab.size for slab in here)
        case _:
            raise AssertionError(optimizer or step.optimizer)
    return State(narrow * halves + broad * (count - halves), broad * halves, broad * count, broad * numbers)

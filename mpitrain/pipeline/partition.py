"""Which blocks of a model stand on which stage: contiguous runs, chosen so that the slowest stage is as fast as can be.

    balance([1] * 7, stages=3)                      2 3 2       extras to the middle: the ends do more than blocks
    balance([1] * 7, stages=3, last=2)              3 3 1       a head that costs as much as two blocks
    balance([1], stages=3)                          0 1 0       more stages than blocks: some hold none

A pipeline goes at the pace of its slowest stage, so that is what is minimised.  Sums are exact: costs are compared as
the binary fractions that floats are, so equal costs tie, on every machine alike.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, groupby

from mpitrain.errors import ConfigError, ShapeError

MOST_IN_WORDS = 16
"""Up to so many stages are described one by one, more by runs of equal ones."""


@dataclass(frozen=True)
class Partition:
    """The number of blocks on each global stage; embedding on the first stage, head on the last.

    Args:
        layers: one number a stage, in order; 0 for a stage that holds none.

    Raises:
        ConfigError: no stage, or a number of blocks below 0.
    """

    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or min(self.layers) < 0:
            given = ",".join(map(str, self.layers)) or "nothing"
            raise ConfigError(
                f"blocks by stage: {given}; wanted is a number of blocks, 0 or more, for each of one or more stages,"
                " as in 3,2,3."
            )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.layers)

    @property
    def blocks(self) -> int:
        """Number of blocks of the whole model."""
        return sum(self.layers)

    def range(self, stage: int) -> range:
        """The global numbers of the blocks on a stage."""
        start = sum(self.layers[:stage])
        return range(start, start + self.layers[stage])

    def is_first(self, stage: int) -> bool:
        """Whether the embedding stands here."""
        return stage == 0

    def is_last(self, stage: int) -> bool:
        """Whether the head and the loss stand here."""
        return stage == self.stages - 1

    def check_fits(self, blocks: int, stages: int) -> None:
        """Refuse a partition of another model or another pipeline.

        Raises:
            ShapeError: it has another number of stages, or of blocks.
        """
        if (self.stages, self.blocks) != (stages, blocks):
            raise ShapeError(
                f"blocks by stage {','.join(map(str, self.layers))}: that is {self.blocks} blocks on {self.stages}"
                f" stages, but the model has {blocks} blocks and the pipeline {stages} stages.\n"
                f"Give {stages} numbers, 0 or more, whose sum is {blocks}."
            )


def balance(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> Partition:
    """The contiguous partition whose most expensive stage is cheapest.

    Of several such partitions it is the most even one: least sum of squares of the stages' costs, then of their numbers
    of blocks.  What still ties (turned round, say) is decided for the ends, which hold the embedding and the head
    besides: fewest blocks on the last stage, then on the first, then the larger ones early.  So equal costs give sizes
    that differ by at most 1, extras stand in the middle, and where there are more stages than blocks the last stage is
    the first to be empty, then the first one, then late ones.

    Args:
        costs: of each block, in order, in any unit, 0 or more.
        stages: how many, at least 1.
        first: cost of what stands on stage 0 besides (the embedding), in the same unit.
        last: cost of what stands on the last stage besides (the head).

    Raises:
        ConfigError: fewer than 1 stage, or a cost that is negative or not finite.

    Cost: some hundredths of a second for a hundred blocks on 64 stages, less for fewer.
    """
    if stages < 1:
        raise ConfigError(f"{stages} pipeline stages: a model stands on at least 1.")
    for name, cost in [*((f"block {i}", c) for i, c in enumerate(costs)), ("the embedding", first), ("the head", last)]:
        if not (cost >= 0 and math.isfinite(cost)):
            raise ConfigError(f"the cost of {name} is {cost}: costs are finite and not below 0.")
    sums, extra = _exact_sums(costs, stages, first, last)
    return Partition(_most_even(sums, extra, _least_maximum(sums, extra)))


def describe(partition: Partition) -> str:
    """One line: `embedding + 2 | 3 | 2 + head`, the numbers of blocks on each stage."""
    words = [str(blocks) for blocks in partition.layers]
    words[0] = f"embedding + {words[0]}" if partition.layers[0] else "embedding"
    words[-1] = "head" if len(words) > 1 and not partition.layers[-1] else f"{words[-1]} + head"
    if len(words) > MOST_IN_WORDS:
        runs = [(word, len(list(same))) for word, same in groupby(words)]
        words = [word if times == 1 else f"{word} (x{times})" for word, times in runs]
    return " | ".join(words)


def _exact_sums(costs: Sequence[float], stages: int, first: float, last: float) -> tuple[list[int], list[int]]:
    """Sums of the first 0, 1, ... blocks, and each stage's cost besides blocks, all times one common denominator."""
    exact = [Fraction(float(cost)) for cost in (*costs, first, last)]
    scale = math.lcm(*(cost.denominator for cost in exact))
    *whole, embedding, head = (int(cost * scale) for cost in exact)
    extra = [0] * stages
    extra[0] += embedding
    extra[-1] += head
    return list(accumulate(whole, initial=0)), extra


def _least_maximum(sums: list[int], extra: list[int]) -> int:
    """The cost of the most expensive stage of the best partition: the least that will do, of all that can occur."""
    n = len(sums)
    runs = {sums[stop] - sums[start] for start in range(n) for stop in range(start, n)}
    candidates = sorted({run + more for run in runs for more in {*extra}})
    return candidates[bisect_left(candidates, True, key=lambda limit: _will_do(sums, extra, limit))]


def _will_do(sums: list[int], extra: list[int], limit: int) -> bool:
    """Whether stages of at most this cost hold all blocks: each takes as many as it can, which leaves fewest over."""
    held = 0
    for more in extra:
        if more > limit:
            return False
        held = bisect_right(sums, sums[held] + limit - more) - 1
    return held == len(sums) - 1


def _most_even(sums: list[int], extra: list[int], limit: int) -> tuple[int, ...]:
    """The partition of stages of at most this cost that `balance` describes; dynamic programming over the stages.

    A way to fill the stages so far with so many blocks is kept as a tuple that compares as the ways do: squares of
    costs, squares of sizes, size of the last stage, of the first, of the others (negated).  One more stage keeps the
    order of two ways with equally many blocks, so the least way for each number of blocks is enough.
    """
    ways: dict[int, tuple[int, ...]] = {0: (0, 0, 0)}
    for stage, more in enumerate(extra):
        is_last = stage == len(extra) - 1
        longer: dict[int, tuple[int, ...]] = {}
        for held, (squares, sizes, _, *layers) in ways.items():
            for stop in range(len(sums) - 1 if is_last else held, len(sums)):
                cost, size = sums[stop] - sums[held] + more, stop - held
                if cost > limit:
                    break
                keys = squares + cost**2, sizes + size**2, size if is_last else 0
                way = (*keys, *layers, -size if stage else size)
                longer[stop] = min(longer.get(stop, way), way)
        ways = longer
    return tuple(map(abs, ways[len(sums) - 1][3:]))

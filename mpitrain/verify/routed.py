"""Has every token gone to the same experts?  What ranks counted of each layer of experts, held against one rank.

    choices         of each expert; those without a place, those held back, tokens: whole numbers, exactly equal
    counts          of other names, as rows that were told right: whole numbers, exactly equal
    entropy         of the router's probabilities
    balance loss    and z-loss, before their coefficients: sums over the rows of the step

A choice falls where a probability is largest, so two that differ by less than rounding could fall otherwise in another
layout, and then everything after it would.  In float64 probabilities come as close as that once in some 10^13 tokens:
no proof has met it.  If one does, the choices are the first thing that differs, by one token, and all losses before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mpitrain.debug.compare import FLOAT64_TOLERANCE, Difference, compare
from mpitrain.parallel.expert.counted import OTHERS
from mpitrain.verify.whole import same_bits

SUMS = {"entropy": "router entropy", "balance": "balance loss", "z": "z-loss"}
"""What is no whole number -> what it is called."""
CHOICES = "choices"
COUNTS = "counts"
NEAR_TIE = (
    "so few that a token may have chosen between two experts whose probabilities are equal up to rounding (in float64 "
    "once in some 10^13 tokens): prove another seed, too"
)
"""What is said of a difference of a choice or two."""

Counted = Mapping[str, Sequence[float]]


def compare_routing(
    alone: Counted, ranks: Sequence[tuple[int, Counted]]
) -> Iterator[tuple[str, str, Difference | None, str]]:
    """What differs, and what does not, in the order of the layers.

    Args:
        alone: layer -> what one rank counted.
        ranks: (rank, the same) of a layout, which all ranks have agreed on.

    Yields:
        Kind, layer, how far it is from one rank's, and what is wrong besides.
    """
    if not ranks:
        return
    first, here = ranks[0]
    sums: dict[str, dict[str, tuple[float, float]]] = {kind: {} for kind in SUMS.values()}
    for layer in dict.fromkeys([*alone, *here]):
        if len(alone.get(layer, ())) != len(here.get(layer, ())):
            who = "one rank alone has" if layer not in alone else "the layout has"
            yield CHOICES, layer, None, f"{who} counted none of it, or other numbers"
            continue
        mine, theirs = np.asarray(here[layer], np.float64), np.asarray(alone[layer], np.float64)
        odd = [rank for rank, counted in ranks if not same_bits(np.asarray(counted.get(layer, ()), np.float64), mine)]
        problem = f"ranks {first} and {odd[0]} report other numbers" if odd else ""
        if mine.size <= len(OTHERS):  # no layer of experts says so little
            (difference,) = compare({"": mine}, {"": theirs}, 0.0, COUNTS)
            yield COUNTS, layer, difference._replace(why="must be exactly equal"), problem
            continue
        for name, number, other in zip(OTHERS, mine[-len(OTHERS) :], theirs[-len(OTHERS) :], strict=True):
            if name in SUMS:
                sums[SUMS[name]][layer] = number, other
        whole = mine.size - len(SUMS)
        (difference,) = compare({"": mine[:whole]}, {"": theirs[:whole]}, 0.0, CHOICES)
        yield CHOICES, layer, difference._replace(why="must be exactly equal"), problem
    for kind, of in sums.items():
        mine_of, theirs_of = ({layer: np.float64(pair[i]) for layer, pair in of.items()} for i in (0, 1))
        for difference in compare(mine_of, theirs_of, FLOAT64_TOLERANCE, kind):
            yield kind, difference.name, difference, ""

"""What the letters of an einsum ask for: which operand is changed how, and which two are multiplied when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from mpitrain.errors import ShapeError

DOTS = "0123456789"
"""Letters of the dims that `...` stands for, from the left of those that the result has."""


class Operand(NamedTuple):
    """What happens to an operand alone.

    letters: of its dims at first; diagonals: letters that it has twice; squeezed: dims of length 1 that others have
    longer; totals: letters that nobody else has.
    """

    letters: str
    diagonals: str
    squeezed: tuple[int, ...]
    totals: str


Tree = Any
"""Which two meet when: the number of an operand, or a pair of trees."""


class Plan(NamedTuple):
    """What an einsum does.

    operands: what happens to each alone; output: the letters of the result; tree: who meets whom.
    """

    operands: tuple[Operand, ...]
    output: str
    tree: Tree


@lru_cache(maxsize=512)
def plan(subscripts: str, shapes: tuple[tuple[int, ...], ...]) -> Plan:
    """How to do it for operands of these shapes.

    Raises:
        ShapeError: the letters do not go together with them.
    """
    inputs, output = _parse(subscripts, shapes)
    sizes: dict[str, int] = {}
    for letters, shape in zip(inputs, shapes, strict=True):
        for c, n in zip(letters, shape, strict=True):
            known = sizes.get(c, 1)
            if n != known and 1 not in (n, known):
                dim = "..." if c in DOTS else f"letter {c}"
                raise ShapeError(
                    f"einsum {subscripts!r}: {dim} is {known} in one operand and {n} in another{_of(shapes)}"
                )
            sizes[c] = n if known == 1 else known
    operands, left = [], []
    for letters, shape in zip(inputs, shapes, strict=True):
        squeezed = tuple([d for d, c in enumerate(letters) if shape[d] == 1 != sizes[c]])
        kept = "".join([c for d, c in enumerate(letters) if d not in squeezed])
        diagonals = "".join(dict.fromkeys(c for c in kept if kept.count(c) > 1))
        kept = "".join(dict.fromkeys(kept))
        left.append(kept)
        operands.append((letters, diagonals, squeezed))
    totals = [
        "".join([c for c in mine if c not in output and not any(c in other for j, other in enumerate(left) if j != i)])
        for i, mine in enumerate(left)
    ]
    mine = tuple(["".join([c for c in each if c not in total]) for each, total in zip(left, totals, strict=True)])
    found = tuple([Operand(*operand, total) for operand, total in zip(operands, totals, strict=True)])
    return Plan(found, output, _order(mine, output, sizes))


def _of(shapes: Sequence[tuple[int, ...]]) -> str:
    return f"; shapes {', '.join(map(str, shapes))}"


def _parse(subscripts: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, with digits in the place of dots.

    Raises:
        ShapeError: they are not what einsum understands, or not those of these shapes.
    """
    start = f"einsum {subscripts!r}:"
    left, arrow, right = subscripts.replace(" ", "").partition("->")
    texts = left.split(",")
    for text in [*texts, right]:
        rest = text.replace("...", "", 1)
        if rest and not (rest.isascii() and rest.isalpha()):
            raise ShapeError(f"{start} {text!r} is not made of letters, and ... once")
    if len(texts) != len(shapes):
        raise ShapeError(f"{start} letters of {len(texts)} operands, but {len(shapes)} were given{_of(shapes)}")
    dotted = [len(shape) - len(text) + 3 if "..." in text else 0 for text, shape in zip(texts, shapes, strict=True)]
    for text, shape, dots in zip(texts, shapes, dotted, strict=True):
        if dots < 0 or ("..." not in text and len(text) != len(shape)):
            raise ShapeError(f"{start} {text!r} for a tensor of shape {shape}, which has {len(shape)} dims")
    most = max(dotted, default=0)
    if most > len(DOTS):
        raise ShapeError(f"{start} ... stands for {most} dims, which is more than {len(DOTS)}")
    inputs = [text.replace("...", DOTS[most - dots : most]) for text, dots in zip(texts, dotted, strict=True)]
    together = "".join(inputs)
    if not arrow:
        right = "..." * (most > 0) + "".join(sorted({c for c in together if c.isalpha() and together.count(c) == 1}))
    if most and "..." not in right:
        raise ShapeError(f"{start} the result needs ... where operands have it, {most} dims here; sum over them after")
    output = right.replace("...", DOTS[:most])
    for c in output:
        if output.count(c) > 1 or c not in together:
            why = "stands twice in the result" if c in together else "of the result is in no operand"
            raise ShapeError(f"{start} letter {c} {why}")
    return inputs, output


def _order(operands: tuple[str, ...], output: str, sizes: dict[str, int]) -> Tree:
    """The tree of products with the fewest multiplications altogether; of equal ones always the same.

    Cost: grows threefold with each operand; found once for the same letters and shapes.
    """
    n = len(operands)
    whole = (1 << n) - 1

    @cache
    def letters(group: int) -> frozenset[str]:
        """What is left of some operands when they are multiplied."""
        of = [operands[i] if group >> i & 1 else "" for i in range(n)]
        outside = set(output).union(*[operands[i] for i in range(n) if not group >> i & 1])
        return frozenset(c for each in of for c in each if c in outside)

    best: dict[int, tuple[int, Tree]] = {1 << i: (0, i) for i in range(n)}
    for group in range(1, whole + 1):
        if group in best:
            continue
        part = (group - 1) & group
        while part:
            other = group ^ part
            if part & group & -group:  # the first operand of the group is in the first factor
                both = letters(part) | letters(other)
                cost = best[part][0] + best[other][0] + math.prod([sizes[c] for c in both])
                if group not in best or cost < best[group][0]:
                    best[group] = cost, (best[part][1], best[other][1])
            part = (part - 1) & group
    return best[whole][1]

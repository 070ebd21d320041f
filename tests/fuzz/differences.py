"""Central differences of a program's naive implementation: what the gradient of a leaf is along one direction.

f = sum of <seed, value> over the seeded values, along x + t d for a random direction d of one leaf.  Three central
differences with steps h, h/2, h/4 are extrapolated (Romberg): the error that is left falls with h^6, and the distance
between the last two stages says how large it is.  A step is taken back as long as a branch (the side of a relu, the
winner of a max) changes within it or the error is too large; at a point on which a kink itself lies no step is small
enough, and the leaf is left undecided.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from fuzz.program import OPS, Program, choices, evaluate

STEPS = (2.0**-6, 2.0**-9, 2.0**-12, 2.0**-15, 2.0**-18)
GOAL = 1e-7  # error relative to the slope at which no smaller step is tried
LEAST = 1e-12  # a slope that is not told apart from 0
WORST = 1e-4  # error relative to the slope that still decides


class Slope(NamedTuple):
    """The derivative along a direction, and how far it may be off."""

    value: float
    error: float


def slope(
    program: Program,
    env: dict[str, np.ndarray],
    leaf: str,
    direction: np.ndarray,
    scale: float,
    noise: float | None = None,
) -> Slope | None:
    """The derivative of f along `direction` of a leaf; None if there is none or it cannot be told.

    Args:
        program: in float64.
        env: its naive values.
        leaf: name.
        direction: of the leaf's shape.
        scale: size of the terms that make up the slope; errors are relative to it.
        noise: what rounding errors do to f.  If it is given, the slope must also be found again with a shorter step:
            how fast the stages approach each other misleads where f turns within the step, or stands still in its last
            digit.
    """
    moved = {leaf}
    steps = []
    for step in program.steps:
        if moved.intersection(step.inputs) and program.used.intersection(step.outputs):
            moved.update(step.outputs)
            steps.append(step)
    seeds = [seed for seed in program.seeds if seed.name in moved]
    kinked = [step for step in steps if OPS[step.op].choices is not None]
    here = choices(kinked, env)
    size = 0.0

    def f(t: float) -> float:
        nonlocal size
        moved_env = evaluate(steps, {**env, leaf: env[leaf] + t * direction})
        if kinked and choices(kinked, moved_env) != here:
            raise _Kink
        terms = [seed.values * moved_env[seed.name] for seed in seeds]
        size = max(size, sum(float(np.abs(term).sum()) for term in terms))
        return sum(float(term.sum()) for term in terms)

    def central(h: float) -> float:
        return (f(h) - f(-h)) / (2 * h)

    best: Slope | None = None
    last: Slope | None = None
    for h in STEPS:
        size = 0.0
        try:
            a, b, c = central(h), central(h / 2), central(h / 4)
        except _Kink:
            continue
        ab, bc = (4 * b - a) / 3, (4 * c - b) / 3
        value = (16 * bc - ab) / 15
        rounding = max(256 * 2.0**-53 * size, 16 * (noise or 0.0)) / h
        error = 4 * abs(value - bc) + rounding
        if not np.isfinite(value):
            continue
        found = Slope(value, error)
        if noise is not None and (last is None or abs(last.value - value) > 2 * (last.error + error)):
            last = found
            continue
        last = found
        if best is None or error < best.error:
            best = found
        if best.error <= GOAL * max(scale, abs(value)) + 2 * rounding:
            break
    if best is None or best.error > WORST * max(scale, abs(best.value)) + 1e3 * LEAST:
        return None
    return Slope(best.value, best.error + LEAST)


class _Kink(Exception):
    """Another branch is taken at this point."""

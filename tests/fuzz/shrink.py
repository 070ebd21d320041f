"""Makes a failing program small, as long as it fails in the same way.

The best move is the cut: a step becomes a leaf that holds its value, and all that led to it is gone.  The others drop
seeds, take a step's input in its place, make leaves plain, shorten dims.  Each candidate must still make sense to the
naive implementation.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from fuzz.differences import slope
from fuzz.judge import Wrong
from fuzz.program import Leaf, Program, Seed, Step, evaluate, naive_value, source

Judgement = Callable[[Program], "Wrong | None"]


def shrink(program: Program, wrong: Wrong, judge: Judgement, seconds: float = 30.0) -> tuple[Program, Wrong]:
    """The smallest program that was found to fail as this one does, and how it fails."""
    end = time.monotonic() + seconds
    if wrong.name and wrong.name not in program.by_name:
        program = replace(program, kept=(wrong.name,))
    program = program.pruned()
    found = True
    while found:
        found = False
        for candidate in moves(program):
            if time.monotonic() > end:
                return program, wrong
            pruned = candidate.pruned()
            if makes_sense(pruned) and (now := judge(pruned)) is not None and now.sort == wrong.sort:
                if now.name and pruned.kept:
                    pruned = replace(pruned, kept=(now.name,))
                program, wrong, found = pruned, now, True
                break
    return program, wrong


def values_of(program: Program) -> dict[str, Any]:
    """All naive values."""
    double = program.doubled()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return evaluate(double.steps, {leaf.name: naive_value(leaf) for leaf in double.leaves})


def makes_sense(program: Program) -> bool:
    try:
        env = values_of(program)
    except Exception:  # whatever the naive implementation makes of a program that may mean nothing
        return False
    fit = all(np.shape(env[s.name]) == s.values.shape for s in program.seeds)
    return fit and bool(program.seeds) and all(v is None or np.isfinite(v).all() for v in env.values())


def moves(program: Program) -> Iterator[Program]:
    """Programs that are simpler by one thing, the largest steps first."""
    for seed in program.seeds if len(program.seeds) > 1 else ():
        yield replace(program, seeds=(seed,))
    for i in range(len(program.seeds)):
        yield replace(program, seeds=program.seeds[:i] + program.seeds[i + 1 :])
    yield from cuts(program)
    yield from earlier(program)
    if program.walk != "backward":
        yield replace(program, walk="backward")
    if program.coarsest != "float64":
        yield program.doubled()
    yield from detours(program)
    yield from plainer_leaves(program)
    yield from plainer_steps(program)
    yield from shorter(program)


def cuts(program: Program) -> Iterator[Program]:
    env, dtypes = values_of(program), program.dtypes()
    for i in reversed(range(len(program.steps))):
        step = program.steps[i]
        leaves = tuple(
            Leaf(name, env[name], "tensor" if name in program.reached else "constant", dtypes[name])
            for name in step.outputs
        )
        yield replace(program, leaves=program.leaves + leaves, steps=program.steps[:i] + program.steps[i + 1 :])


def earlier(program: Program) -> Iterator[Program]:
    """A seed at what its value was made from."""
    made = {name: step for step in program.steps for name in step.outputs}
    env = values_of(program)
    for i, seed in enumerate(program.seeds):
        for name in made[seed.name].inputs if seed.name in made else ():
            if name in program.reached:
                before = Seed(name, np.ones(np.shape(env[name])))
                yield replace(program, seeds=(*program.seeds[:i], before, *program.seeds[i + 1 :]))


def detours(program: Program) -> Iterator[Program]:
    """A step left out: its input, if of the same shape, stands for its output."""
    env = values_of(program)
    for i, step in enumerate(program.steps):
        if len(step.outputs) > 1:
            continue
        for name in dict.fromkeys(step.inputs):
            if np.shape(env[name]) == env[step.outputs[0]].shape and isinstance(env[name], np.ndarray):
                yield renamed(program, i, name)


def renamed(program: Program, i: int, name: str) -> Program:
    out = program.steps[i].outputs[0]
    steps = [
        replace(step, inputs=tuple(name if n == out else n for n in step.inputs))
        for step in (*program.steps[:i], *program.steps[i + 1 :])
    ]
    seeds = [replace(seed, name=name) if seed.name == out else seed for seed in program.seeds]
    kept = tuple(name if n == out else n for n in program.kept)
    return replace(program, steps=tuple(steps), seeds=tuple(seeds), kept=kept)


def plainer_leaves(program: Program) -> Iterator[Program]:
    def with_leaf(i: int, **change: Any) -> Program:
        leaf = replace(program.leaves[i], **change)
        return replace(program, leaves=(*program.leaves[:i], leaf, *program.leaves[i + 1 :]))

    for i, leaf in enumerate(program.leaves):
        if leaf.role == "number":
            continue
        if leaf.layout != "plain":
            yield with_leaf(i, layout="plain")
        if leaf.role in ("parameter", "array"):
            yield with_leaf(i, role="tensor" if leaf.role == "parameter" else "constant")
        if leaf.role == "tensor":
            yield with_leaf(i, role="constant")
        yield from (with_leaf(i, values=values) for values in plainer(leaf.values))
    for i, seed in enumerate(program.seeds):
        for change in [{"layout": "plain"}] * (seed.layout != "plain") + [{"values": v} for v in plainer(seed.values)]:
            yield replace(program, seeds=(*program.seeds[:i], replace(seed, **change), *program.seeds[i + 1 :]))


def plainer(values: np.ndarray) -> list[np.ndarray]:
    """Ones, then whole numbers, then tenths, as far as that changes something."""
    tries = [np.ones(values.shape), np.round(values), np.round(values, 1)]
    if (values == tries[0]).all() or (values == tries[1]).all():
        return []
    return [v for v in tries if not np.array_equal(v, values)]


def plainer_steps(program: Program) -> Iterator[Program]:
    for i, step in enumerate(program.steps):
        changes: list[Step] = [replace(step, style=0)] if step.style else []
        for key, plain in (("mask", None), ("drop", 0.0), ("rows", None), ("causal", False), ("keepdims", False)):
            now = step.static.get(key, plain)
            if isinstance(now, np.ndarray) or now != plain:
                changes.append(replace(step, static={**step.static, key: plain}))
        for changed in changes:
            yield replace(program, steps=(*program.steps[:i], changed, *program.steps[i + 1 :]))


def shorter(program: Program) -> Iterator[Program]:
    """All dims of one length made shorter, wherever that length stands."""
    lengths = {n for leaf in program.leaves if leaf.role != "number" for n in leaf.values.shape}
    for n in sorted(lengths, reverse=True):
        for m in sorted({1, 2, n - 1}):
            if not 0 < m < n:
                continue

            def cut(value: Any, n: int = n, m: int = m) -> Any:
                if isinstance(value, np.ndarray):
                    array = value[tuple(slice(m if k == n else k) for k in value.shape)]
                    return np.where(array >= n, 0, array) if array.dtype.kind == "i" else array
                return tuple(m if k == n else k for k in value) if isinstance(value, tuple) else value

            leaves = [
                leaf if leaf.role == "number" else replace(leaf, values=cut(leaf.values)) for leaf in program.leaves
            ]
            steps = [replace(step, static={k: cut(v) for k, v in step.static.items()}) for step in program.steps]
            smaller = replace(program, leaves=tuple(leaves), steps=tuple(steps))
            try:
                env = values_of(smaller)
                seeds = [Seed(s.name, np.resize(cut(s.values), env[s.name].shape)) for s in program.seeds]
            except Exception:  # as in `makes_sense`
                continue
            yield replace(smaller, seeds=tuple(seeds))


# ------------------------------------------------------------------------------------------------------------- report


def reproduction(program: Program, wrong: Wrong) -> str:
    """The program as Python that ends in what fails."""
    lines = [source(program)]
    leaf = program.by_name.get(wrong.name)
    if leaf is not None and leaf.has_gradient:
        place = f"{leaf.name}.grad" if leaf.role == "parameter" else f"tape.grads[{leaf.name}]"
        factor = " / 1.5" if leaf.role == "parameter" and program.walk == "twice" else ""
        expected = wrong.expected if wrong.expected is not None else differences(program, leaf)
        lines.append(f"np.testing.assert_allclose({place}{factor}, {expected.tolist()}, rtol={tolerance(program)})")
    elif wrong.expected is not None:
        lines.append(
            f"np.testing.assert_allclose({wrong.name}.data, {wrong.expected.tolist()}, rtol={tolerance(program)})"
        )
    return "\n".join(lines) + "\n"


def tolerance(program: Program) -> float:
    return {"float64": 1e-6, "float32": 1e-4, "float16": 1e-1}[program.coarsest]


def differences(program: Program, leaf: Leaf) -> np.ndarray:
    """The gradient of a leaf by differences, element by element; NaN where they do not tell."""
    double, env = program.doubled(), values_of(program)
    grad = np.zeros(leaf.values.shape)
    for at in np.ndindex(grad.shape):
        direction = np.zeros(grad.shape)
        direction[at] = 1.0
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = slope(double, env, leaf.name, direction, 1.0)
        grad[at] = np.nan if found is None else float(f"{found.value:.8g}")
    return grad

"""Runs a program: with mpitrain, with PyTorch, and with mpitrain while every value is shaken by rounding errors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from fuzz.program import EPS, OPS, Leaf, Program, lay, naive_value, same_choices

from mpitrain.autograd import Function, Tape, Tensor, ops
from mpitrain.memory.gist import Gist
from mpitrain.nn.parameter import Parameter


class Broken(Exception):
    """Something that is wrong whatever the numbers are."""


@dataclass
class Run:
    """values: of every name, as arrays; grads: of the leaves that got one."""

    values: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]


def run(program: Program, walk: str | None = None) -> Run:
    """The program with mpitrain.

    Raises:
        Broken: backward wrote into a value, an input or a seed; a gradient has another shape or dtype than its leaf, or
            is missing; a parameter's gradient changed after it was said to be final.
    """
    walk = walk or program.walk
    arrays: dict[str, np.ndarray] = {}
    code = compile("\n".join(program.lines(arrays)), "<program>", "exec")
    objects = {leaf.name: make(leaf) for leaf in program.leaves if leaf.role != "number"}
    tape, env = record(code, objects, arrays, Gist() if walk == "policy" else None)
    values = {name: data(value) for name, value in env.items()}
    before = {name: array.copy() for name, array in {**values, **arrays}.items()}
    seeds = [(env[s.name], lay(s.values, env[s.name].dtype, s.layout)) for s in program.seeds]
    parameters = [t for t in objects.values() if isinstance(t, Parameter)]
    finish(tape, seeds, parameters, walk)
    if walk == "twice":  # from half of the seeds, so that parameters hold one and a half gradients
        again, env = record(code, objects, arrays)
        for name, value in env.items():
            if not np.array_equal(data(value), before[name]):
                raise Broken(f"{name} has other values when it is computed again")
        halves = [(env[s.name], seed / 2) for s, (_, seed) in zip(program.seeds, seeds, strict=True)]
        finish(again, halves, parameters, "backward")
    for name, array in {**values, **arrays}.items():
        if not np.array_equal(array, before[name]):
            raise Broken(f"{name} was written into")
    for s, (_, seed) in zip(program.seeds, seeds, strict=True):
        if not np.array_equal(seed, s.values.astype(seed.dtype)):
            raise Broken(f"the seed of {s.name} was written into")
    return Run(values, gradients(program, objects, tape, walk))


def make(leaf: Leaf) -> Any:
    array = lay(leaf.values, leaf.dtype, leaf.layout)
    if leaf.role == "parameter":
        p = Parameter(leaf.name, array.shape, init=None)  # type: ignore[arg-type]
        p.data, p.grad = array, np.full_like(array, np.nan)  # a gradient that is added to what is there shows
        return p
    return array if leaf.role == "array" else Tensor(array, requires_grad=leaf.role == "tensor")


def data(value: Any) -> np.ndarray:
    return value.data if isinstance(value, Tensor) else value


def record(code: Any, objects: dict[str, Any], arrays: dict[str, np.ndarray], policy: Any = None) -> tuple[Tape, Any]:
    """A new tape, and all values by name."""
    scope = {"ops": ops, "np": np, "Tensor": Tensor, **arrays, **objects}
    known = set(scope)
    with Tape(policy) as tape:
        exec(code, scope)
    env = {**objects, **{name: value for name, value in scope.items() if name not in known and name[0] != "_"}}
    for name, value in env.items():
        if name not in objects and not isinstance(value, Tensor):
            raise Broken(f"{name} is a {type(value).__name__}, not a Tensor")
    return tape, env


def finish(tape: Tape, seeds: list[tuple[Tensor, np.ndarray]], parameters: list[Parameter], walk: str) -> None:
    """Walk back, and see that each parameter is said to be final once, with the gradient that it then keeps."""
    final: dict[Any, np.ndarray] = {}
    started = [p for p in parameters if p.touched]

    def watch(steps: Iterable[tuple[Any, ...]]) -> None:
        for done in steps:
            for p in done:
                if p in final:
                    raise Broken(f"{p.name} was said to be final twice")
                final[p] = p.grad.copy()

    if walk == "split":
        tape.backward_inputs(seeds)
        if any(node.saved is not None and not any(node.weight_side) for node in tape.nodes):
            raise Broken("backward_inputs left what it will not need again")
        watch(tape.backward_weights())
    else:
        watch(tape.backward(seeds))
    for p in parameters:
        if p.touched and p not in final and p not in started:
            raise Broken(f"{p.name} got a gradient and was never said to be final")
    for p, grad in final.items():
        if not np.array_equal(p.grad, grad, equal_nan=True):
            raise Broken(f"the gradient of {p.name} changed after it was said to be final")
    for node in tape.nodes:
        if node.saved is not None:
            raise Broken(f"after backward the tape still holds what {node.function.title()} saved")


def gradients(program: Program, objects: dict[str, Any], tape: Tape, walk: str) -> dict[str, np.ndarray]:
    grads = {}
    for leaf in program.leaves:
        if not leaf.has_gradient:
            continue
        t = objects[leaf.name]
        if leaf.role == "parameter":
            if not t.touched:
                continue
            grad = t.grad / 1.5 if walk == "twice" else t.grad
        elif t in tape.grads:
            grad = tape.grads[t]
        else:
            continue
        if grad.shape != t.shape or grad.dtype != t.dtype:
            raise Broken(f"{leaf.name} is {t.shape} {t.dtype}, its gradient {grad.shape} {grad.dtype}")
        grads[leaf.name] = grad
    return grads


# --------------------------------------------------------------------------------------------------------- PyTorch


def run_torch(program: Program, torch: Any) -> Run:
    """The program, in float64, with PyTorch."""
    env: dict[str, Any] = {}
    for leaf in program.leaves:
        if leaf.role == "number":
            env[leaf.name] = naive_value(leaf)
        else:
            env[leaf.name] = torch.tensor(leaf.values, dtype=torch.float64, requires_grad=leaf.has_gradient)
    for step in program.steps:
        y = OPS[step.op].torch(torch, *[env[name] for name in step.inputs], **step.static)
        env.update(zip(step.outputs, y if isinstance(y, (tuple, list)) else (y,), strict=True))
    wanted = [leaf.name for leaf in program.leaves if leaf.has_gradient and leaf.name in program.used]
    seeds = [s for s in program.seeds if env[s.name].requires_grad]
    grads = torch.autograd.grad(
        [env[s.name] for s in seeds], [env[name] for name in wanted], [torch.tensor(s.values) for s in seeds],
        allow_unused=True,
    )  # fmt: skip
    return Run(
        {name: value.detach().numpy() for name, value in env.items() if isinstance(value, torch.Tensor)},
        {name: grad.numpy() for name, grad in zip(wanted, grads, strict=True) if grad is not None},
    )


# ------------------------------------------------------------------------------------------------------ rounding errors


class Shaken(Function):
    """x, every element changed by about one rounding, and so is the gradient on its way back."""

    @staticmethod
    def forward(x: np.ndarray, *, shaker: Shaker) -> tuple[np.ndarray, tuple[Any, ...]]:
        return shaker.shake(x), ()

    @staticmethod
    def backward(grad: np.ndarray, *, wanted: tuple[bool, ...], shaker: Shaker) -> tuple[Any, ...]:
        shaker.largest = max(shaker.largest, float(np.abs(grad).max(initial=0)))
        return (shaker.shake(grad, backward=True),)


class Steady(Shaken):
    """x as it is, and only its gradient changed."""

    @staticmethod
    def forward(x: np.ndarray, *, shaker: Shaker) -> tuple[np.ndarray, tuple[Any, ...]]:
        return x * 1.0, ()


class Shaker:
    """Where the rounding errors of one run come from.

    Args:
        dtype: whose roundings they are; None: there are none.
        phase: tells runs apart.
        care: how careful it is with kinks, on the way forward: 0 not at all; 1 equal numbers are changed equally, so
            that they stay equal; 2 also what goes straight into an op with a kink is left as it is; 3 so is everything.
    """

    def __init__(self, dtype: str | None, phase: float, care: int) -> None:
        self.care = care
        self.size = 8 * EPS[dtype] if dtype else 0.0  # an op rounds more than once
        self.least = float(np.finfo(dtype).smallest_subnormal) if dtype else 0.0
        self.first = self.phase = phase
        self.largest = 0.0  # gradient

    def shake(self, x: np.ndarray, backward: bool = False) -> np.ndarray:
        if self.care == 3 and not backward:
            return x * 1.0
        if self.care and not backward:
            error = np.cos(1e4 * x + self.first)
        else:
            self.phase += 1.0
            error = np.cos(1e4 * np.arange(x.size).reshape(x.shape) + self.phase)
        return x + error * (self.size * np.abs(x) + self.least * (x != 0))

    def input(self, x: Tensor) -> Tensor:
        """What programs call on each value wherever it is used: every use sees another error."""
        return Shaken.apply(x, shaker=self)

    def exponent(self, x: Tensor) -> Tensor:
        """The same for an exponent: a constant one stays, since negative numbers have whole powers only."""
        return self.input(x) if x.requires_grad else x

    def kinked(self, x: Tensor) -> Tensor:
        """The same for what goes into an op with a kink; a leaf is the number that it is, on whatever side of it."""
        if self.care >= 2:
            return x
        return self.input(x) if x.tape is not None else Steady.apply(x, shaker=self)

    def sum(self, y: Any, blur: Any, other: Any) -> Any:
        """What programs call to blur a result, or those of several that are not None: by one term each value and slope.

        The two errors know nothing of each other: backward may compute again, and otherwise, what forward did.  With
        care the value stays.
        """
        if isinstance(y, tuple):
            return tuple(one if a is None else self.sum(one, a, b) for one, a, b in zip(y, blur, other, strict=True))
        slope = other - other.detach()
        return y + slope if self.care >= 2 else y + blur.detach() + slope

    def __call__(self, x: Any) -> np.ndarray:
        """Numbers of the shape of x, the size of one rounding; in part alike, as the errors of equal elements are."""
        self.phase += 1.0
        return self.size * (np.cos(self.phase) + np.cos(np.arange(x.size) + self.phase)).reshape(x.shape)


def run_shaken(program: Program, dtype: str | None, phase: float, care: int) -> tuple[Run, float]:
    """The program in float64 with errors as in `dtype`; and the largest gradient on the way."""
    arrays: dict[str, np.ndarray] = {}
    code = compile("\n".join(program.lines(arrays, shake=True)), "<shaken program>", "exec")
    shaker = Shaker(dtype, phase, care)
    leaves: dict[str, Tensor] = {}
    scope: dict[str, Any] = {"ops": ops, "np": np, "Tensor": Tensor, "shake": shaker, **arrays}
    with Tape() as tape:
        for leaf in program.leaves:
            if leaf.role != "number":
                scope[leaf.name] = leaves[leaf.name] = Tensor(leaf.values, requires_grad=leaf.has_gradient)
        exec(code, scope)
        seeds = [(shaker.input(scope[s.name]), s.values) for s in program.seeds]
    grads = tape.run_backward(seeds)
    names = [name for step in program.steps for name in step.outputs]
    return Run(
        {name: scope[name].data for name in names},
        {name: grads[t] for name, t in leaves.items() if t in grads},
    ), shaker.largest


class Allowance:
    """How far rounding errors of a dtype may move each value and each gradient of a program.

    A few runs in float64, each with other errors of that dtype's size at every value on the way forward and back, show
    how far they are carried; the largest distance from such a run with errors of size 0, times a margin, is allowed.
    Nothing is guessed: where a program amplifies errors, so does its estimate.

    Args:
        program: in float64.
        exact: its run.
        dtype: whose rounding errors are meant.
    """

    RUNS, MARGIN = 4, 16.0

    def __init__(self, program: Program, exact: Run, dtype: str) -> None:
        still, _ = run_shaken(program, None, 0.0, 0)
        self.values: dict[str, float] = {}
        self.grads: dict[str, float] = {}
        self.largest = 0.0
        for phase in range(self.RUNS):
            for care in range(4):  # the first that leaves every kink on its side
                shaken, largest = run_shaken(program, dtype, 1e3 * phase, care)
                if care == 0:
                    self._add(self.values, shaken.values, still.values)  # values do not jump at a kink
                if same_choices(program, exact.values, shaken.values):
                    break
            self._add(self.grads, shaken.grads, still.grads)
            self.largest = max(self.largest, largest)

    def _add(self, allowed: dict[str, float], moved: dict[str, np.ndarray], still: dict[str, np.ndarray]) -> None:
        for name, array in moved.items():
            if name in still:
                distance = self.MARGIN * float(np.abs(array - still[name]).max(initial=0))
                # Errors that lead out of a domain, below 0 under a root, explain anything.
                allowed[name] = max(allowed.get(name, 0.0), math.inf if math.isnan(distance) else distance)

"""Makes random programs: a few leaves, then step by step what the values so far allow.

A program is a function of its seed alone.  Numbers are multiples of 1/256 below 8, which every dtype holds exactly, so
the same program can be run in another precision from the same numbers.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fuzz.program import OPS, Leaf, Program, Seed, Step, naive_value

LARGEST = 300.0  # of all values; else float16 would overflow, and differences lose their digits
ELEMENTS = 300
GRID = 256
NUMBERS: tuple[Any, ...] = (
    0, 1, 2, -3, 0.5, -1.5, 2.0, True, np.float64(0.25), np.float64(-2), np.float32(1.5), np.int64(3), np.float16(0.5),
)  # fmt: skip
NAMES = list(OPS)
WEIGHTS = [OPS[name].weight for name in NAMES]


class Grower:
    """A program in the making, and what the words ask of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.env: dict[str, Any] = {}
        self.tensors: list[str] = []  # names of Tensors, in order
        self.wants: set[str] = set()  # those of them whose gradient is asked for
        self.roles: dict[str, str] = {}
        self.kinds: dict[str, str] = {}  # dtypes
        self.fresh: set[str] = set()  # values nobody used yet
        kind = self.rng.random()
        self.dtypes: tuple[str, ...] = ("float64",)
        if kind < 0.45:
            mixed = ("float16", "float32", "float64")
            self.dtypes = ("float32",) if kind < 0.15 else ("float16",) if kind < 0.27 else mixed

    # -- chance -------------------------------------------------------------------------------------------------------

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def choose(self, options: Sequence[Any]) -> Any:
        return self.rng.choice(options)

    def sample(self, options: Sequence[int], n: int) -> list[int]:
        return self.rng.sample(options, n)

    def integer(self, low: int, high: int) -> int:
        """From low to high - 1."""
        return self.rng.randrange(low, high)

    def length(self, wide: bool = False) -> int:
        """Of a dim: mostly small, sometimes 0, sometimes beyond a vector register."""
        if self.chance(0.3 if wide else 0.04):
            return self.choose((8, 9, 15, 16, 17, 33))
        return self.rng.choices((0, 1, 2, 3, 4, 5, 7), (3, 20, 25, 25, 12, 10, 5))[0]

    def shape(self) -> tuple[int, ...]:
        ndim = self.rng.choices((0, 1, 2, 3, 4, 5), (6, 20, 32, 27, 10, 5))[0]
        while True:
            shape = tuple(self.length() for _ in range(ndim))
            if math.prod(shape) <= ELEMENTS:
                return shape

    def array(self, shape: Sequence[int]) -> np.ndarray:
        """Values on the grid."""
        kind = self.rng.random()
        if kind < 0.15:  # many ties and zeros
            return self.numbers.integers(-2, 3, shape) / 2.0
        values = self.numbers.standard_normal(shape) * (2.0 if kind < 0.25 else 1.0)
        return np.clip(np.round(values * GRID) / GRID, -7.5, 7.5)

    def integers(self, low: int, high: int, shape: Sequence[int]) -> np.ndarray:
        return self.numbers.integers(low, high, tuple(shape))

    def mask(self, shape: Sequence[int]) -> np.ndarray:
        return np.asarray(self.numbers.random(tuple(shape)) < self.choose((0.3, 0.7, 0.7, 0.9)))

    def words(self, shape: Sequence[int]) -> np.ndarray:
        """Random rows, as masks are made from."""
        return self.numbers.integers(0, 2**64, tuple(shape), np.uint64)

    # -- values -------------------------------------------------------------------------------------------------------

    def leaf(
        self,
        shape: Sequence[int],
        roles: Sequence[str] = ("tensor",) * 4 + ("parameter", "constant"),
        values: np.ndarray | None = None,
        dtype: str | None = None,
    ) -> str:
        """A new one."""
        shape = tuple(shape)
        role = self.choose(roles)
        if role == "parameter" and 0 in shape:
            role = "tensor"
        layout = "plain"
        values = self.array(shape) if values is None else values
        if role != "parameter" and shape and self.chance(0.45):
            layout = self.choose(("columns", "reversed", "spaced", "repeated"))
            if layout == "repeated" and shape[0]:
                values = np.broadcast_to(values[:1], shape).copy()
            elif layout == "repeated":
                layout = "plain"
        return self._add_leaf(Leaf(f"x{len(self.leaves)}", values, role, dtype or self.choose(self.dtypes), layout))

    def weight(self, shape: Sequence[int]) -> str:
        """A weight of a layer: a new parameter, a transposed or cast one, or any leaf."""
        kind = self.rng.random()
        if kind < 0.25 and len(shape) == 2:
            turned = self.leaf(tuple(shape)[::-1], ("parameter",))
            if self.chance(0.5):
                return self.add("swap", [turned], {"one": 0, "other": -1})[0]
            return self.add("transpose", [turned], {"dims": self.choose(((), (1, 0)))})[0]
        if kind < 0.35:
            return self.add("cast", [self.leaf(shape, ("parameter",))], {"dtype": self.choose(self.dtypes)})[0]
        return self.leaf(shape, ("parameter", "parameter", "parameter", "tensor", "constant"))

    def number(self, value: Any) -> str:
        return self._add_leaf(Leaf(f"x{len(self.leaves)}", value, "number"))

    def _add_leaf(self, leaf: Leaf) -> str:
        self.leaves.append(leaf)
        self.env[leaf.name] = naive_value(leaf)
        self.roles[leaf.name] = leaf.role
        if leaf.role != "number":
            self.kinds[leaf.name] = leaf.dtype
        if leaf.role not in ("array", "number"):
            self.tensors.append(leaf.name)
        if leaf.has_gradient:
            self.wants.add(leaf.name)
        return leaf.name

    def value(
        self, suits: Callable[[np.ndarray], bool] | None = None, weights: bool = False, dtype: str | None = None
    ) -> Any:
        """The name of a Tensor: rather one that was not used yet, else a late one, else any; None if none suits.

        weights: rather a parameter, or what is nearly one; dtype: only of this one.
        """
        names = [
            name
            for name in self.tensors
            if (suits is None or suits(self.env[name])) and (dtype is None or self.kinds[name] == dtype)
        ]
        if not names:
            return None
        if weights and self.chance(0.4):
            names = [name for name in names if self.roles.get(name) == "parameter"] or names
        unused = [name for name in names if name in self.fresh]
        if unused and self.chance(0.55):
            return self.choose(unused)
        return self.choose(names[-3:] if self.chance(0.4) else names)

    def operand(self, other: str, numbers: bool = True) -> str:
        """Something that broadcasts with a value: another, the same again, a new leaf, a constant, a number."""
        shape = self.env[other].shape
        kind = self.rng.random()
        if kind < 0.45:
            name: Any = self.value(lambda a: _fit(a.shape, shape))
            if name is not None:
                return str(name)
        elif kind < 0.6 and numbers:
            return self.number(self.choose(NUMBERS))
        elif kind < 0.65:
            return other
        return self.leaf(self.operand_shape(shape), ("tensor", "tensor", "tensor", "parameter", "constant", "array"))

    def operand_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that broadcasts with another, in either direction."""
        lengths = [n if self.chance(0.65) else self.length() if n == 1 and self.chance(0.6) else 1 for n in shape]
        if self.chance(0.35):
            lengths = lengths[self.integer(0, len(lengths) + 1) :]
        elif len(lengths) < 4 and self.chance(0.15):
            lengths.insert(0, self.length())
        return tuple(lengths)

    def fitting_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that broadcasts to another."""
        lengths = [1 if self.chance(0.25) else n for n in shape]
        return tuple(lengths[self.integer(0, len(lengths) + 1) :] if self.chance(0.3) else lengths)

    def dim(self, name: str) -> int:
        ndim = self.env[name].ndim
        return self.integer(-ndim, ndim)

    def is_plain(self, name: str) -> bool:
        """A number or an array, not a Tensor."""
        return self.roles.get(name) in ("number", "array")

    def has_no_gradient(self, name: str) -> bool:
        return name not in self.wants

    def positive(self, name: str) -> str:
        """The value itself where it is well above 0, else something made of it that is."""
        if np.min(self.env[name], initial=1) >= 0.1:
            return name
        way = self.choose(("square", "abs", "exp"))
        if way == "exp" and np.max(self.env[name], initial=0) < 4:
            (inner,) = self.add("exp", [name])
        elif way == "square" and np.abs(self.env[name]).max(initial=0) < 12:
            (inner,) = self.add("mul", [name, name])
        else:
            (inner,) = self.add("abs", [name])
        return self.add("add", [inner, self.number(0.25)])[0]

    # -- growing ------------------------------------------------------------------------------------------------------

    def add(self, op: str, inputs: Sequence[str], static: dict[str, Any] | None = None) -> tuple[str, ...]:
        """Append a step.

        Raises:
            Unfit: its values are too many, too large, or not finite.
        """
        style = self.integer(0, len(OPS[op].ours))
        step = Step(op, tuple(inputs), ("y",), static or {}, style)
        y = OPS[op].naive(*[self.env[name] for name in inputs], **step.static)
        values = [np.asarray(v, float) for v in (y if isinstance(y, tuple) else (y,))]
        for v in values:
            if v.size > ELEMENTS or v.ndim > 6 or not (np.abs(v) <= LARGEST).all():
                raise Unfit
        outputs = tuple(f"v{len(self.env) + i}" for i in range(len(values)))
        self.steps.append(Step(op, step.inputs, outputs, step.static, style))
        self.env.update(zip(outputs, values, strict=True))
        dtypes = [self.kinds[name] for name in inputs if name in self.kinds]
        self.kinds.update(dict.fromkeys(outputs, str(OPS[op].dtype(dtypes, step.static))))
        self.tensors += outputs
        self.fresh.difference_update(inputs)
        self.fresh.update(outputs)
        if self.wants.intersection(inputs):
            self.wants.update(outputs)
        if op in ("transpose", "swap", "cast") and self.roles.get(inputs[0]) == "parameter":
            self.roles[outputs[0]] = "parameter"
        return outputs

    def grow(self) -> None:
        """One step more, after as many tries as it takes."""
        while True:
            op = self.rng.choices(NAMES, WEIGHTS)[0]
            mark = len(self.leaves), len(self.steps), len(self.tensors), set(self.env), set(self.wants), set(self.fresh)
            try:
                drawn = OPS[op].draw(self)
                if drawn is not None:
                    self.add(op, *drawn)
                    return
            except Unfit:
                pass
            leaves, steps, tensors, names, self.wants, self.fresh = mark
            del self.leaves[leaves:], self.steps[steps:], self.tensors[tensors:]
            for name in set(self.env) - names:
                del self.env[name]
                self.roles.pop(name, None)
                self.kinds.pop(name, None)


class Unfit(Exception):
    """A step whose values would be of no use."""


def _fit(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(one[::-1], other[::-1], strict=False))


def grow(seed: int, steps: int | None = None) -> Program:
    """The program of a seed."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        g = Grower(seed)
        for _ in range(g.integer(1, 4)):
            g.leaf(g.shape())
        for _ in range(steps or g.rng.choices((1, 2, 3, 5, 8, 12, 16), (6, 8, 12, 24, 26, 16, 8))[0]):
            g.grow()
        while not (recorded := _recorded(g)):
            g.leaf(g.shape(), ("tensor", "parameter"))
            g.grow()
    inner = [name for name in g.tensors if name in recorded]
    ends = [name for name in inner if name in g.fresh]
    seeded = [name for name in ends if g.chance(0.85)] + ([g.choose(inner)] if g.chance(0.3) else [])
    seeds = []
    for name in seeded or [g.choose(ends or inner)]:
        shape = g.env[name].shape
        layout = g.choose(("plain", "plain", "columns", "reversed", "spaced", "repeated"))
        values = g.array(shape) if g.chance(0.8) else np.ones(shape)
        if layout == "repeated" and shape and shape[0]:
            values = np.broadcast_to(values[:1], shape).copy()
        elif layout == "repeated":
            layout = "plain"
        seeds.append(Seed(name, values, layout))
    walk = g.rng.choices(("backward", "split", "policy", "twice"), (4, 3, 1, 2))[0]
    return Program(tuple(g.leaves), tuple(g.steps), tuple(seeds), walk)


def _recorded(g: Grower) -> set[str]:
    """What is on the tape, also in float64, where no cast does anything: ops that return their input record nothing."""
    same: dict[str, str] = {}  # a value that is another one
    recorded: set[str] = set()
    for step in g.steps:
        if is_nothing(step):
            same[step.outputs[0]] = same.get(step.inputs[0], step.inputs[0])
        elif g.wants.intersection(step.inputs):
            recorded.update(same.get(name, name) for name in step.inputs)
            recorded.update(step.outputs)
    return {name for name in g.wants if same.get(name, name) in recorded}


def is_nothing(step: Step) -> bool:
    """Whether a step gives back its input itself."""
    return (
        step.op == "cast"
        or (step.op == "split" and len(step.outputs) == 1)
        or (step.op == "dropout" and step.static["p"] == 0)
        or (step.op == "pad" and not step.static["widths"])
    )

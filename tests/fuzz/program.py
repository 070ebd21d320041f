"""A random program as data: leaves, steps, seeds.

    x0 = Tensor(np.array([...]), requires_grad=True)         a leaf
    v1 = ops.exp(x0)                                         a step
    tape.backward([(v1, np.array([...]))])                   a seed

It can be run, printed and rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from fuzz.vocabulary import Op, vocabulary

OPS: Mapping[str, Op] = vocabulary()
EPS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11}
ROLES_WITH_GRADIENT = ("tensor", "parameter")


@dataclass(frozen=True)
class Leaf:
    """A value that the program starts from.

    role: tensor (its gradient is asked for) | parameter (its gradient lies in a buffer of its own) | constant (a Tensor
    without gradient) | array (plain NumPy) | number;  layout: how its memory lies, see `lay`.
    """

    name: str
    values: Any  # float64 array, or a number (or None) as it is written in the program
    role: str = "tensor"
    dtype: str = "float64"
    layout: str = "plain"

    @property
    def has_gradient(self) -> bool:
        return self.role in ROLES_WITH_GRADIENT


@dataclass(frozen=True)
class Step:
    """A call of one op; `style` is which of the op's ways to write it."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    static: Mapping[str, Any] = field(default_factory=dict)
    style: int = 0

    def text(self, names: Mapping[str, str], arrays: dict[str, np.ndarray], shake: bool = False) -> str:
        """The right side of the line; arrays among the arguments are put into `arrays` under a name of their own."""
        static = {k: spell(v, f"{self.outputs[0]}_{k}", arrays) for k, v in self.static.items()}
        op = OPS[self.op]
        inputs = [names.get(name, name) for name in self.inputs]
        if shake:
            calls = op.shaken or ("input" if op.choices is None else "kinked",) * len(inputs)
            pairs = zip(self.inputs, inputs, calls, strict=True)
            inputs = [text if name in names else f"shake.{call}({text})" for name, text, call in pairs]
        text = op.ours[self.style]
        if shake and op.blur:
            text = f"shake.sum({text}, {op.blur}, {op.blur})"
        return text.format(*inputs, all=", ".join(inputs), **static)


@dataclass(frozen=True)
class Seed:
    """The gradient from which backward starts, at any value of the program."""

    name: str
    values: np.ndarray
    layout: str = "plain"


@dataclass(frozen=True)
class Program:
    """Leaves, steps and seeds, and how the tape is walked: backward | split | policy | twice."""

    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    seeds: tuple[Seed, ...] = ()
    walk: str = "backward"
    kept: tuple[str, ...] = ()  # values that are looked at though no seeded one depends on them

    @cached_property
    def by_name(self) -> dict[str, Leaf]:
        return {leaf.name: leaf for leaf in self.leaves}

    @cached_property
    def reached(self) -> set[str]:
        """Values that depend on a leaf whose gradient is asked for."""
        names = {leaf.name for leaf in self.leaves if leaf.has_gradient}
        for step in self.steps:
            if names.intersection(step.inputs):
                names.update(step.outputs)
        return names

    @cached_property
    def used(self) -> set[str]:
        """Values on which a seeded value depends."""
        return self._needed({seed.name for seed in self.seeds})

    def _needed(self, names: set[str]) -> set[str]:
        for step in reversed(self.steps):
            if names.intersection(step.outputs):
                names.update(step.inputs)
        return names

    @property
    def coarsest(self) -> str:
        """The dtype with the fewest digits that appears."""
        dtypes = {leaf.dtype for leaf in self.leaves if leaf.role != "number"}
        dtypes.update(step.static["dtype"] for step in self.steps if step.op == "cast")
        return max(dtypes, key=EPS.__getitem__, default="float64")

    def doubled(self) -> Program:
        """The same program in float64 throughout, from the same numbers."""
        if self.coarsest == "float64":
            return self
        leaves = [
            leaf
            if leaf.role == "number"
            else replace(leaf, values=leaf.values.astype(leaf.dtype).astype(float), dtype="float64")
            for leaf in self.leaves
        ]
        steps = [replace(s, static={"dtype": "float64"}) if s.op == "cast" else s for s in self.steps]
        return replace(self, leaves=tuple(leaves), steps=tuple(steps))

    def pruned(self) -> Program:
        """Without what no seeded and no kept value depends on."""
        needed = self._needed({*self.kept, *[seed.name for seed in self.seeds]})
        return replace(
            self,
            leaves=tuple([leaf for leaf in self.leaves if leaf.name in needed]),
            steps=tuple([step for step in self.steps if needed.intersection(step.outputs)]),
        )

    def dtypes(self) -> dict[str, str]:
        """The dtype that each value should have."""
        dtypes = {leaf.name: leaf.dtype for leaf in self.leaves if leaf.role != "number"}
        for step in self.steps:
            given = [dtypes[name] for name in step.inputs if name in dtypes]
            dtypes.update(dict.fromkeys(step.outputs, str(OPS[step.op].dtype(given, step.static))))
        return dtypes

    def lines(self, arrays: dict[str, np.ndarray], shake: bool = False) -> list[str]:
        """The steps as lines of Python."""
        names = {leaf.name: spell(leaf.values, "", arrays) for leaf in self.leaves if leaf.role == "number"}
        lines = []
        for step in self.steps:
            left = ", ".join(step.outputs)
            if len(step.outputs) == 1 and step.op == "split":
                left += ","
            lines.append(f"{left} = {step.text(names, arrays, shake)}")
        return lines


def evaluate(steps: Iterable[Step], env: dict[str, Any]) -> dict[str, Any]:
    """The values of some steps by the naive implementation, added to `env`, which holds what they start from."""
    for step in steps:
        y = OPS[step.op].naive(*[env[name] for name in step.inputs], **step.static)
        if isinstance(y, tuple):
            env.update(zip(step.outputs, y, strict=True))
        else:
            env[step.outputs[0]] = np.asarray(y)
    return env


def choices(steps: Iterable[Step], env: Mapping[str, Any]) -> bytes:
    """Which branches all elements take."""
    taken = [
        np.asarray(op.choices(*[env[name] for name in step.inputs], **step.static)).tobytes()
        for step in steps
        if (op := OPS[step.op]).choices is not None
    ]
    return b"".join(taken)


def naive_value(leaf: Leaf) -> Any:
    """A leaf as the naive implementation takes it."""
    return float(leaf.values) if leaf.role == "number" and leaf.values is not None else leaf.values


def same_choices(program: Program, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs took the same branches; they may differ where two numbers are equal but for rounding."""
    numbers = {leaf.name: naive_value(leaf) for leaf in program.leaves}
    kinked = [step for step in program.steps if OPS[step.op].choices is not None]
    return not kinked or choices(kinked, {**numbers, **one}) == choices(kinked, {**numbers, **other})


# ------------------------------------------------------------------------------------------------------------- layouts


def lay(values: np.ndarray, dtype: Any, layout: str) -> np.ndarray:
    """An array of these values whose memory lies in a certain way."""
    array = np.array(values, dtype)
    if not array.ndim or layout == "plain":
        return array
    if layout == "columns":
        return np.asfortranarray(array)
    if layout == "reversed":
        back = (slice(None, None, -1),) * array.ndim
        return np.ascontiguousarray(array[back])[back]
    if layout == "spaced":
        return np.repeat(array, 2, -1)[..., ::2]
    assert layout == "repeated", layout
    return np.broadcast_to(array[:1], array.shape)


def spell_laid(values: np.ndarray, dtype: str, layout: str) -> str:
    """The same as text."""
    back = ", ".join(["::-1"] * values.ndim)
    if not values.ndim or layout == "plain":
        return spell_array(values, dtype)
    if layout == "columns":
        return f"np.asfortranarray({spell_array(values, dtype)})"
    if layout == "reversed":
        return f"{spell_array(values[(slice(None, None, -1),) * values.ndim], dtype)}[{back}]"
    if layout == "spaced":
        return f"np.repeat({spell_array(values, dtype)}, 2, -1)[..., ::2]"
    return f"np.broadcast_to({spell_array(values[:1], dtype)}, {values.shape})"


def spell_array(values: np.ndarray, dtype: str) -> str:
    name = f"np.{dtype}" if dtype != "bool" else "bool"
    return f"np.array({values.tolist()}, {name})" if values.size else f"np.zeros({values.shape}, {name})"


def spell(value: Any, name: str, arrays: dict[str, np.ndarray]) -> str:
    """A static argument as text; arrays, also inside of a tuple, go by name."""
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return name
    if isinstance(value, tuple):
        inside = [spell(item, f"{name}{i}", arrays) for i, item in enumerate(value)]
        return f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"
    if isinstance(value, np.generic):
        return f"np.{value.dtype}({value.item()})"
    return repr(value)


# ------------------------------------------------------------------------------------------------------------- printing

HEADER = """\
import numpy as np

from mpitrain.autograd import Tape, Tensor, ops
"""
PARAMETER = """
from mpitrain.nn.parameter import Parameter


def parameter(name, data):
    p = Parameter(name, data.shape, init=None)
    p.data, p.grad = data, np.full_like(data, np.nan)
    return p

"""
WALKS = {
    "backward": "for _ in tape.backward(seeds):\n    pass",
    "policy": "for _ in tape.backward(seeds):\n    pass",
    "split": "tape.backward_inputs(seeds)\nfor _ in tape.backward_weights():\n    pass",
}


def source(program: Program) -> str:
    """The program as Python that runs alone; its gradients are in `tape.grads` and in `.grad` of parameters."""
    arrays: dict[str, np.ndarray] = {}
    dtypes = program.dtypes()
    recorded = program.lines(arrays)
    leaves = []
    for leaf in program.leaves:
        text = "" if leaf.role == "number" else spell_laid(leaf.values, leaf.dtype, leaf.layout)
        if leaf.role == "tensor":
            leaves.append(f"{leaf.name} = Tensor({text}, requires_grad=True)")
        elif leaf.role == "parameter":
            leaves.append(f'{leaf.name} = parameter("{leaf.name}", {text})')
        elif leaf.role != "number":
            leaves.append(f"{leaf.name} = {f'Tensor({text})' if leaf.role == 'constant' else text}")
    leaves += [f"{name} = {spell_array(array, str(array.dtype))}" for name, array in arrays.items()]
    seeds = [f"({s.name}, {spell_laid(s.values, dtypes[s.name], s.layout)})" for s in program.seeds]
    tape = "Tape(Gist())" if program.walk == "policy" else "Tape()"
    body = [f"with {tape} as tape:", *[f"    {line}" for line in recorded or ["pass"]]]
    body += [f"seeds = [{', '.join(seeds)}]"]
    if program.walk == "twice":
        body += [
            *WALKS["backward"].split("\n"),
            "# again, from half of the seeds: gradients of parameters add up",
            body[0],
        ]
        body += [f"    {line}" for line in recorded or ["pass"]]
        body += [f"seeds = [{', '.join(f'({s.name}, seeds[{i}][1] / 2)' for i, s in enumerate(program.seeds))}]"]
        body += WALKS["backward"].split("\n")
    else:
        body += WALKS[program.walk].split("\n")
    head = HEADER
    if any(leaf.role == "parameter" for leaf in program.leaves):
        head += PARAMETER.lstrip("\n")
    if program.walk == "policy":
        head += "from mpitrain.memory.gist import Gist\n"
    return "\n".join([head, *leaves, *body, ""])

"""Make useless whatever a run has in memory, so that only what a checkpoint brings back is of use.

    poison = Poison()
    with Watch(before=poison.look) as watch: the first start
    poison.learn(watch.executors)
    with Watch(before=poison.spoil): the second start, which reads the checkpoint

The first start is looked at when its parts were built and when it ended: whatever differs is what training changes.  In
the second start each such number gets a wrong value and each such array NaN, before the checkpoint is read.  A run that
is still the same has had all of it back, or never looks at it again.

Nothing here knows what a checkpoint holds.  So a number that is added to an optimizer, a reducer or a scale and is not
saved is found when it matters.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpitrain.pipeline.executor import Executor

STRANGERS = ("mpitrain.comm", "mpitrain.memory", "mpitrain.offloading", "mpitrain.pipeline.running")
"""Modules whose objects hold no state of training: messages and their counts, where stores and their threads are, and
what a schedule's check has found."""

HARMLESS = {
    "Versions": "how many versions of the weights this start has made, and which buffers hold them; a row that is over"
    " leaves the newest alone",
    "Writes": "how often an array was written, which tapes of this start compare with what they saw",
    "Links": "messages of this start",
    "PowerSgd._waits": "whether the step that is made now leaves something out; none is while a checkpoint is read",
}
"""Classes, and attributes, whose numbers are of a start or of a step, not of a run; with why."""


class Poison:
    """What training changes in each rank, and the same made useless."""

    def __init__(self) -> None:
        self._built: dict[int, dict[str, Any]] = {}
        self.changes: dict[int, set[str]] = {}

    def look(self, executor: Executor) -> None:
        """Note what a rank has when everything was built."""
        self._built[executor.mesh.world.rank] = dict(values(executor))

    def learn(self, executors: Mapping[int, Executor]) -> None:
        """Note what of it is other after some steps."""
        for rank, executor in executors.items():
            before, after = self._built[rank], dict(values(executor))
            self.changes[rank] = {path for path in before.keys() & after.keys() if before[path] != after[path]}

    def spoil(self, executor: Executor) -> None:
        """Make that useless; masters and moments in any case, wherever they are."""
        for p in executor.model.shares():
            p.master[...] = np.nan
        for of in executor.optimizer.state_tensors().values():
            for tensor in of.values():
                tensor.array[...] = np.nan
        changed = self.changes[executor.mesh.world.rank]
        for path, holder, name, value in [*reached(executor)]:
            if path not in changed:
                continue
            if is_array(value):
                value[...] = np.nan
                continue
            wrong: Any = not value if isinstance(value, bool) else type(value)(value + 7)
            if isinstance(holder, (dict, list)):
                holder[name] = wrong
            else:
                setattr(holder, name, wrong)


def values(executor: Executor) -> Iterator[tuple[str, Any]]:
    """Path of every number and array that can be reached from an executor, with its value or a checksum of it."""
    for path, _, _, value in reached(executor):
        if is_array(value):
            yield path, zlib.crc32(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, (bool, int, float)):
            yield path, repr(value)


def is_array(value: Any) -> bool:
    """Whether it is an array of floating-point numbers, or of bfloat16, that can be written."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "fV" and value.flags.writeable


def reached(executor: Executor) -> Iterator[tuple[str, Any, Any, Any]]:
    """All attributes and members of the model, the optimizer, the reducer, the scale, the update and the executor."""
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("executor", executor)]
    while stack:
        path, holder = stack.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for name, value in members(holder):
            if f"{type(holder).__name__}.{name}" in HARMLESS:
                continue
            yield f"{path}.{name}", holder, name, value
            if is_ours(value) or isinstance(value, (dict, list, tuple)):
                stack.append((f"{path}.{name}", value))


def members(holder: Any) -> list[tuple[Any, Any]]:
    """Name and value of each attribute, or key and value of each member."""
    if isinstance(holder, dict):
        return [*holder.items()]
    if isinstance(holder, (list, tuple)):
        return [*enumerate(holder)]
    slots = [name for kind in type(holder).__mro__ for name in getattr(kind, "__slots__", ())]
    own = [(name, getattr(holder, name)) for name in slots if hasattr(holder, name)]
    return [*own, *getattr(holder, "__dict__", {}).items()]


def is_ours(value: Any) -> bool:
    """Whether it is an object of the library that may hold state of training."""
    kind = type(value)
    ours = kind.__module__.startswith("mpitrain.") and not isinstance(value, type)
    return ours and not kind.__module__.startswith(STRANGERS) and kind.__name__ not in HARMLESS

"""What lives on from step to step and should not: values and activations of steps that are over, and who keeps them.

When a step begins nothing of the one before is in flight.  Where there is more of it from step to step, somebody keeps
it: a list in the script, an attribute of the model.  Arrays of the batch do not count, which a script may hold as long
as it likes, nor does what is there in every step alike.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.debug import owners
from mpitrain.debug.memory import MemoryLedger, owner_of

OF_A_STEP = (owners.ACTIVATIONS, owners.SCRATCH, owners.PASSING, owners.BACKWARD, owners.ARRIVED)
STEPS = 6
"""Marks that are kept."""
DEPTH = 8
"""Objects between an array and the name under which it is found."""
LOOKED_AT = 40
"""Objects whose referrers are asked for: each time Python looks through all that it has."""


class Mark(NamedTuple):
    """The beginning of a step.

    total: bytes that were alive; by_owner: of OF_A_STEP those that were; arrays: these.
    """

    step: int
    total: int
    by_owner: dict[str, int]
    arrays: dict[int, tuple[str, str, weakref.ref[Any]]]


class Survivor(NamedTuple):
    """An array of a step that is over.

    since: the step in which it was made, or an earlier one; owner: under whom it is counted; path: of the module, of an
    activation.
    """

    since: int
    owner: str
    path: str
    array: Array


class Kept:
    """The newest marks of a rank."""

    def __init__(self) -> None:
        self.marks: deque[Mark] = deque(maxlen=STEPS)
        self._given: dict[int, weakref.ref[Any]] = {}  # what batches are made of

    def give(self, batch: Any) -> None:
        """A micro-batch is worked on."""
        for array in vars(batch).values() if hasattr(batch, "__dict__") else ():
            if isinstance(array, np.ndarray):
                base = owner_of(array)
                self._given[id(base)] = weakref.ref(base)

    def mark(self, step: int, ledger: MemoryLedger) -> None:
        """A step begins."""
        self._given = {key: ref for key, ref in self._given.items() if ref() is not None}
        arrays = {}
        by_owner = dict.fromkeys(OF_A_STEP, 0)
        for owner, path, array in ledger.alive(OF_A_STEP):
            if id(array) not in self._given:
                arrays[id(array)] = owner, path, weakref.ref(array)
                by_owner[owner] += array.nbytes
        self.marks.append(Mark(step, ledger.total, by_owner, arrays))

    def survivors(self) -> list[Survivor]:
        """Of owners that have more from step to step the arrays of steps that are over, the oldest first.

        But for the last step that is: its arrays may be in somebody's hands still.
        """
        found: dict[int, Survivor] = {}
        grown = {owner for owner, _ in self.growth()}
        for mark in list(self.marks)[:-1]:
            for key, (owner, path, ref) in mark.arrays.items():
                array = ref()
                if array is not None and owner in grown:
                    found.setdefault(key, Survivor(mark.step - 1, owner, path, array))
        return list(found.values())

    def growth(self) -> list[tuple[str, list[int]]]:
        """Owners whose bytes have grown from each step's beginning to the next, at least twice, with those bytes."""
        found = []
        for owner in OF_A_STEP:
            sizes = [mark.by_owner[owner] for mark in self.marks]
            last = sizes[-1:]
            for before in reversed(sizes[:-1]):
                if before >= last[0]:
                    break
                last.insert(0, before)
            if len(last) > 2:
                found.append((owner, last))
        return found


def keeper(array: Any, ignored: Sequence[Any] = ()) -> str:
    """Under which name an array is kept: `Net.activity`, `losses of __main__`; "" if that is not found.

    Args:
        array: or a tensor, or any other object.
        ignored: objects whose references do not count.

    Cost: some milliseconds for each object on the way.
    """
    skip = {id(each) for each in ignored}
    front: list[Any] = [array]
    seen = {id(array)}
    looked = 0
    for _ in range(DEPTH):
        following: list[Any] = []
        for each in front:
            if looked == LOOKED_AT:
                return ""
            looked += 1
            referrers = gc.get_referrers(each)
            for one in referrers:
                if id(one) in skip or id(one) in seen or one is front or one is following or _is_ours(one):
                    continue
                seen.add(id(one))
                name = _name_in(one, each)
                if name:
                    return name
                following.append(one)
            del referrers
        front = following
    return ""


def _is_ours(one: Any) -> bool:
    """Whether it only looks: the console, a ledger, a frame of either."""
    if isinstance(one, FrameType):
        return str(one.f_globals.get("__name__", "")).startswith("mpitrain.")
    return type(one).__module__.startswith(("mpitrain.debug", "mpitrain.events", "_frozen", "weakref"))


def _name_in(owner: Any, value: Any) -> str:
    """The name of a value in an object that has names, of the script or of one of its objects; "" for none."""
    if isinstance(owner, FrameType):
        return next((f"{n} of {owner.f_code.co_name}()" for n, v in owner.f_locals.items() if v is value), "")
    if isinstance(owner, dict):
        name = next((key for key, held in owner.items() if held is value and isinstance(key, str)), "")
        if name and "__name__" in owner and "__builtins__" in owner:
            return f"{name} of {owner['__name__']}"
        whose = [one for one in gc.get_referrers(owner) if getattr(one, "__dict__", None) is owner] if name else []
        return f"{type(whose[0]).__name__}.{name}" if whose and _is_told(whose[0]) else ""
    if isinstance(owner, (list, tuple, set, Tensor, ModuleType)):
        return ""
    names = getattr(owner, "__dict__", {})
    name = next((str(key) for key, held in list(names.items()) if held is value), "") if isinstance(names, dict) else ""
    return f"{type(owner).__name__}.{name}" if name and _is_told(owner) else ""


def _is_told(owner: Any) -> bool:
    """Whether an object's name says something to whoever wrote the script: no part of the machinery of tapes."""
    module: str = type(owner).__module__
    return not module.startswith(("mpitrain.autograd", "mpitrain.pipeline", "builtins"))

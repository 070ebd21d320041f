"""The memory ledger: the bytes that are alive on a rank, by owner, now and when they were most.

    ledger = MemoryLedger()
    with listen(ledger):
        for batch in batches:
            executor.step(batch)
    print(ledger.table())

                             now    at peak    largest
    weights            1,882,112  1,882,112  1,882,112
    gradients          1,882,112  1,882,112  1,882,112
    optimizer state    3,764,224  3,764,224  3,764,224
    activations                0  4,407,296  4,407,296
    ...

A listener: no module, no op and no schedule knows of it.  Every array that an event shows is noted once, by the buffer
whose memory it keeps alive (a view counts as what it is a view of), and stays in the sums until Python lets that buffer
go, of which a weak reference tells.  Who owns it is decided by the strongest claim: what the model and the optimizer
hold lies under no other name; what a node saved for backward is an activation of the node's module, whoever else looks
at it.

The sums are looked at when an action or an op ends.  What lives and dies inside of one op (scratch of a kernel, a
message on its way through a collective) is never seen there; while `tracemalloc` runs, `inside` says how much it was.

Cost: a step of gpt-mini takes about 1.04 times as long.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
import weakref
from collections import deque
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from mpitrain.autograd.lazy import Lazy
from mpitrain.autograd.recompute import recomputing
from mpitrain.backend import Array
from mpitrain.debug.columns import aligned
from mpitrain.debug.owners import (
    ACTIVATIONS,
    ARRIVED,
    BACKWARD,
    BATCH,
    CONSTANTS,
    GATHERED,
    GRADIENTS,
    MASTERS,
    MESSAGES,
    OWNERS,
    PASSING,
    PENDING,
    SCRATCH,
    STATE,
    VERSIONS,
    WEIGHTS,
    WHOLE,
    WIRE,
    strength,
)
from mpitrain.events import Event
from mpitrain.nn.share import CutFlat

SETTLED = 3
"""Updates after which an optimizer has made all the state that it keeps."""


class _Buffer(weakref.ref):  # type: ignore[type-arg]
    """A buffer that is alive, and whose it is."""

    __slots__ = ("key", "nbytes", "owner", "path")

    key: int
    nbytes: int
    owner: str
    path: str


class Inside(NamedTuple):
    """The op in which most was alive, as tracemalloc saw it.

    nbytes: above what was there when the op had ended; op, path: where; total: both together.
    """

    nbytes: int = 0
    op: str = ""
    path: str = ""
    total: int = 0


class MemoryLedger:
    """A listener that knows the bytes of this rank.

    Args:
        also: owner -> arrays that no event shows, as `{"corpus": [tokens]}`.

    Attributes:
        now: owner -> bytes.
        at_peak: the same at the moment when the sum was largest.
        largest: owner -> the most that it ever had, each at its own moment.
        total, peak: the sums, now and at that moment.
        paths, paths_at_peak: module path -> bytes of activations.
        inside: what tracemalloc saw inside of ops; all 0 where it does not run.
    """

    def __init__(self, also: Mapping[str, Iterable[Array]] | None = None) -> None:
        self.now: dict[str, int] = {}
        self.at_peak: dict[str, int] = {}
        self.largest: dict[str, int] = {}
        self.paths: dict[str, int] = {}
        self.paths_at_peak: dict[str, int] = {}
        self.total = self.peak = 0
        self.inside = Inside()
        self._buffers: dict[int, _Buffer] = {}
        self._dead: deque[Any] = deque()  # a message's own thread may be the one that lets go
        self._bound: dict[int, tuple[Any, Any]] = {}  # weights of a flat buffer: the one in use
        self._watched: Any = None
        self._wire = 0
        self._coming = 0
        self._dealt_out: list[Any] = []  # parameters whose whole gradients come and go
        self._grown: set[str] = set()  # owners that have more than when it was last looked
        for owner, arrays in (also or {}).items():
            for array in arrays:
                self._see(array, owner)

    # -- what it hears ------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        kind, phase, name, info = event
        if kind == "unit":
            self._unit(info)
            return
        if phase == "begin":
            if kind == "message":
                if name in ("isend", "irecv"):
                    self._bury()
                    self._see(info["array"], MESSAGES)
            elif kind == "action":
                self._bury()
                self._begin(info)
            elif "grad" in info:
                self._bury()
                self._gradients(info["grad"])
                if "saved" in info and info["tape"].policy is not None:  # decoded, or brought back
                    for array in info["saved"]:
                        self._see(array, PASSING)
            if tracemalloc.is_tracing():
                tracemalloc.reset_peak()
            return
        if kind in ("message", "arrival", "copy", "disk"):
            return
        self._bury()
        if kind == "action":
            self._end(info)
        elif "outputs" in info:
            self._forward(info)
        else:
            self._backward(info)
        self._look(name, info.get("path", ""))

    def _unit(self, info: Mapping[str, Any]) -> None:
        """Weights of a part of the model have come, or have gone; those of others may be on their way."""
        self._bury()
        for array in info.get("arrays", ()):
            self._see(array, GATHERED)
        coming = info["unit"].resident.coming
        self._add(GATHERED, coming - self._coming)
        self._coming = coming
        self._look(str(info["path"]), str(info["path"]))

    def _begin(self, info: Mapping[str, Any]) -> None:
        executor = info["executor"]
        if executor is not self._watched:
            self._watched = executor
            self.watch(executor.model, executor.optimizer)
            self._watch_pending(executor.reducer)
        for t in info.get("inputs", ()):
            self._see(t.data, ARRIVED)
        if info["action"].kind == "F":
            self._see_batch(info["batch"])

    def _end(self, info: Mapping[str, Any]) -> None:
        executor, action = info["executor"], info["action"]
        for array in executor.arrived:
            self._see(array, ARRIVED)
        if action.kind == "STEP":  # new versions of weights; state that a first step makes
            self.watch(executor.model, executor.optimizer if executor.optimizer.updates < SETTLED else None)
            self._watch_pending(executor.reducer)
        wire = executor.mesh.scratch
        if wire != self._wire:
            self._add(WIRE, wire - self._wire)
            self._wire = wire

    def _watch_pending(self, reducer: Any) -> None:
        for array in reducer.pending_gradients:
            self._see(array, PENDING)

    def _forward(self, info: Mapping[str, Any]) -> None:
        outputs = info["outputs"]
        tape = outputs[0].tape if outputs else None
        node = tape.nodes[-1] if tape is not None and tape.nodes else None
        if tape is not None and node is not None and node.outputs[0] == outputs[0].slot:
            owner, path = (SCRATCH, "") if recomputing() else (ACTIVATIONS, node.path)
            for array in node.held(tape.policy is not None):
                self._see(array, owner, path)
        else:  # no tape, or the sketch of a first forward: what was saved is here until the op returns
            for array in info["saved"] or ():
                self._see(array, PASSING)
        for t in outputs:
            self._see(t.data, PASSING)

    def _backward(self, info: Mapping[str, Any]) -> None:
        self._gradients(info["grads"])

        for p in self._dealt_out:
            self._see(p.grad, WHOLE)

    def _gradients(self, given: Any) -> None:
        for grad in given if type(given) is tuple else (given,):
            if isinstance(grad, Lazy):
                for field in dataclasses.fields(grad):  # type: ignore[arg-type]
                    self._see(getattr(grad, field.name), BACKWARD)
            elif grad is not None:
                self._see(grad, BACKWARD)

    def _see_batch(self, batch: Any) -> None:
        if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
            for field in dataclasses.fields(batch):
                self._see(getattr(batch, field.name), BATCH)

    def watch(self, model: Any, optimizer: Any = None) -> None:
        """Note what a model and its optimizer hold; a run of an Executor does so by itself.

        Args:
            model: materialised.
            optimizer: over its parameters.
        """
        self._bury()
        self._dealt_out = [
            p for flat in model.flats if isinstance(flat, CutFlat) and flat.stage > 1 for p in flat.parameters
        ]
        for flat in (*model.flats, *model.frozen_flats):
            _, before = self._bound.get(id(flat), (None, None))
            if before is not None and before is not flat.weights:
                self._rename(before, VERSIONS)
            self._bound[id(flat)] = flat, flat.weights
            self._rename(flat.weights, WEIGHTS)
            if flat.masters is not flat.weights:
                self._see(flat.masters, MASTERS)
            self._see(flat.grads, GRADIENTS)
        for array in model.constants:
            self._see(array, CONSTANTS)
        if optimizer is not None:
            for arrays in optimizer.state_dict().values():
                for array in arrays.values():
                    self._see(array, STATE)

    # -- the sums -----------------------------------------------------------------------------------------------------

    def _see(self, array: Any, owner: str, path: str = "") -> None:
        """Note the buffer of an array; one that is known changes its name for a stronger one."""
        nbytes = getattr(array, "nbytes", 0)
        if not nbytes:
            return
        base = owner_of(array)
        known = self._buffers.get(id(base))
        if known is not None and known() is not base:  # it has died just now
            self._bury()
            known = None
        if known is not None:
            if strength(owner) > strength(known.owner):
                self._move(known, owner, path)
            return
        nbytes = base.nbytes
        try:
            buffer: Any = _Buffer(base, self._dead.append)
        except TypeError:  # a number of NumPy's
            return
        buffer.key, buffer.nbytes, buffer.owner, buffer.path = id(base), nbytes, owner, path
        self._buffers[buffer.key] = buffer
        self._add(owner, nbytes, path)

    def _rename(self, array: Array, owner: str) -> None:
        """Give a buffer this name, also in the place of a stronger one."""
        known = self._buffers.get(id(owner_of(array)))
        if known is None:
            self._see(array, owner)
        elif known.owner != owner:
            self._move(known, owner, "")

    def _move(self, buffer: _Buffer, owner: str, path: str) -> None:
        self._add(buffer.owner, -buffer.nbytes, buffer.path)
        buffer.owner, buffer.path = owner, path
        self._add(owner, buffer.nbytes, path)

    def _bury(self) -> None:
        """Take away what has died since; before anything new, which may lie where it lay."""
        while self._dead:
            ref = self._dead.popleft()
            buffer = self._buffers.get(ref.key)
            if buffer is not None and buffer is ref:
                del self._buffers[buffer.key]
                self._add(buffer.owner, -buffer.nbytes, buffer.path)

    def _add(self, owner: str, nbytes: int, path: str = "") -> None:
        self.total += nbytes
        self.now[owner] = self.now.get(owner, 0) + nbytes
        if nbytes > 0:
            self._grown.add(owner)
        if owner is ACTIVATIONS:
            left = self.paths.get(path, 0) + nbytes
            if left:
                self.paths[path] = left
            else:
                del self.paths[path]

    def _look(self, name: str, path: str) -> None:
        for owner in self._grown:
            self.largest[owner] = max(self.largest.get(owner, 0), self.now[owner])
        self._grown.clear()
        if self.total > self.peak:
            self.peak = self.total
            self.at_peak, self.paths_at_peak = dict(self.now), dict(self.paths)
        if tracemalloc.is_tracing():
            present, most = tracemalloc.get_traced_memory()
            total = self.total + most - present
            if total > self.inside.total:
                self.inside = Inside(most - present, name, path, total)
            tracemalloc.reset_peak()

    # -- what it found ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take away what has died since the last event."""
        self._bury()

    def alive(self, owners: Container[str]) -> list[tuple[str, str, Array]]:
        """The arrays of these owners that are alive: (owner, module path of an activation, array)."""
        self._bury()
        found = [(each.owner, each.path, each()) for each in self._buffers.values() if each.owner in owners]
        return [each for each in found if each[2] is not None]

    def table(self) -> str:
        """Owners, and their bytes now, at the peak, and at most."""
        self._bury()
        names = [owner for owner in OWNERS if self.largest.get(owner)]
        names += [owner for owner in self.largest if owner not in OWNERS]
        columns = (self.now, self.at_peak, self.largest)
        lines = [["", "now", "at peak", "largest"]]
        lines += [[name, *(f"{column.get(name, 0):,}" for column in columns)] for name in names]
        return aligned([*lines, ["all", f"{self.total:,}", f"{self.peak:,}"]])


def owner_of(array: Any) -> Any:
    """The array that owns the memory of a view (a mapped file counts as the first array on it)."""
    while hasattr(getattr(array, "base", None), "nbytes"):
        array = array.base
    return array

"""A rank's training run as a sequence of records: what `mpitrain verify` compares.

    begin    weight                       before an executor's first step: the mesh, and this rank's slabs
    step 1   gradient weight moments ...  numbers of the step, and each kind of tensor as one flat vector of all slabs
    step 2   ...

A listener on the executor's actions: when STEP begins the gradients are final, and must be copied at once, since
clipping scales them in place (the scale that keeps them from underflow is taken off the copy); when it ends there are
the weights, the optimizer's state and the step's report (where steps overlap, perhaps only with that of the last of
them).  No line of a model, an optimizer or a reducer knows of it, nor does the script that trains.

A record is plain JSON and arrays, in memory or one after the other in a file.  A file that ends in the middle of a
record, because its rank died, is read up to there.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from mpitrain.autograd.recompute import Recompute
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, to_host
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.world import World
from mpitrain.events import Event, listen
from mpitrain.nn.buffer import Buffer
from mpitrain.nn.module import PRECISION
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.optimizer import StateTensor
from mpitrain.optim.scaler import Scaler
from mpitrain.pipeline.action import COMPUTE, Action, Row, row_text
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.update import StepReport

MADE_AGAIN = "made again"
SCORES_KEPT = "scores kept"
CUT = ("", "optimizer state cut", "gradients cut", "weights cut")
"""What a step can be seen to do for memory: backward runs a part of the model again; attention keeps its scores; ranks
keep rows of what they would all hold, by ZeRO's stage.
"""

Fact = Any  # what JSON holds


BUFFER = "buffer"
"""The kind of what modules keep besides parameters."""


class Record(NamedTuple):
    """One thing that was seen on a rank.

    facts of a `begin`: rank; executor, counted from 0; the mesh's sizes and coords; parameters: name, full shape,
    rectangle and whether it decays, of each, in the model's order; states: kind -> the same of the tensors that the
    optimizer keeps, for the kinds whose tensors have other shapes than the parameters, and of what modules keep.
    facts of a `step`: executor; step, counted from 1; order: names as backward makes them final; own loss: the sum of
    the losses that this rank's forwards gave, 0 on ranks without the last stage; compute: the row of its F, B and W
    since the step before; batch: the step's place in its row, where several overlap; sent: (op, axis) of each kind of
    op that sent in a forward so far, over an axis of more than one rank; memory: MADE_AGAIN, SCORES_KEPT and one of
    CUT, where they were seen so far; targets, loss, norm, learning rate, scale of the gradients, skipped (0 or 1),
    updates; of models that count also rows, and counted: name -> numbers.  A step that was cut short has what there
    was.
    arrays: kind -> vector of all slabs, in the order of the begin's parameters or states.
    """

    facts: dict[str, Fact]
    arrays: dict[str, np.ndarray]


Keep = Callable[[Record], None]


class Enough(SystemExit):
    """Ends a script after the steps that were asked for, as if it had come to its end."""


@contextmanager
def recording(world: World, keep: Keep, steps: int | None = None) -> Iterator[None]:
    """Record what this rank trains while the block runs, in float64 and deterministic mode.

    Only executors on `world` count: a script that trains once more in a world of its own, to compare, does that alone.
    Steps that overlap end together, so there the block ends with the row of its last step.

    Args:
        world: of this rank.
        keep: takes each record.
        steps: the block ends after so many; None: where it ends by itself.
    """
    world.set_deterministic()
    recorder = Recorder(world, keep, steps)
    token = PRECISION.set(np.float64)
    try:
        with listen(recorder):
            yield
    except Enough:
        pass
    finally:
        recorder.interrupt()
        PRECISION.reset(token)


class Recorder:
    """The listener.

    Args:
        world: of this rank.
        keep: takes each record.
        steps: raises `Enough` at the end of so many steps; None: never.
    """

    def __init__(self, world: World, keep: Keep, steps: int | None = None) -> None:
        self._world = world
        self._keep = keep
        self._steps = steps
        self._courses: WeakKeyDictionary[Executor, _Course] = WeakKeyDictionary()
        self._executors = 0  # that were seen, also those that are gone
        self._done = 0  # steps of all executors
        self._watched: _Course | None = None  # in whose forward this rank is
        self._walked: _Course | None = None  # in whose backward
        self._open: tuple[Executor, _Course] | None = None  # in whose STEP

    def __call__(self, event: Event) -> None:
        if event.kind == "op":
            if event.phase == "begin":
                if self._watched is not None:
                    self._watched.note(event.name, event.info["tensors"], event.info["static"])
                elif self._walked is not None and event.info["function"] is Recompute:
                    self._walked.memory.add(MADE_AGAIN)
        elif event.kind == "action" and event.info["executor"].mesh.world is self._world:
            self._action(event.phase, event.info)

    def _action(self, phase: str, info: Mapping[str, Any]) -> None:
        action: Action = info["action"]
        executor: Executor = info["executor"]
        course = self._courses.get(executor)
        if course is None:
            course = self._courses[executor] = _Course(executor, self._executors)
            self._executors += 1
            self._keep(course.begin(self._world.rank, executor))
        if action.kind in COMPUTE and phase == "begin":
            course.compute.append(action)
        if action.kind == "B":
            self._walked = course if phase == "begin" else None
        if action.kind == "F":
            self._watched = course if phase == "begin" else None
            loss: Tensor | None = info.get("output")
            if loss is not None:  # of the last stage; others pass activations on
                course.own_loss += float(to_host(loss.data))
        elif action.kind == "STEP" and phase == "begin":
            course.gradients = _vector(_gradient(p, executor.scaler) for p in course.parameters)
            course.memory |= _cut(executor)
            self._open = executor, course
        elif action.kind == "STEP":
            self._open = None
            course.step(executor, action.micro or 0)
            for record in course.told(info["reports"]):
                self._keep(record)
            self._done += 1
            if self._steps is not None and self._done >= self._steps and action is executor.row[-1]:
                raise Enough(0)

    def interrupt(self) -> None:
        """Keep what is known of steps that did not come to their end: a gradient of NaN, and the loss."""
        for course in self._courses.values():
            for record in course.untold():
                self._keep(record)
        if self._open is not None:
            executor, course = self._open
            self._open = None
            self._keep(course.cut_short(executor))


class _Course:
    """What is known of one executor's run."""

    def __init__(self, executor: Executor, number: int) -> None:
        self.number = number
        self.parameters: list[Parameter] = executor.model.shares()
        self.buffers = executor.model.buffers()
        self.gradients: np.ndarray = np.empty(0)
        self.own_loss = 0.0
        self.compute: Row = []
        self._done = 0
        self._untold: deque[Record] = deque()
        self._report: StepReport | None = executor.report
        self._unused: set[Tensor] = {p for p in executor.model.parameters() if not p.frozen}
        self._used: list[list[str]] = []  # names by the op that uses them first, in the order of forward
        self._sent: set[tuple[str, str]] = set()  # (op, axis)
        self.memory: set[str] = set()

    def note(self, op: str, inputs: Iterable[Any], static: Mapping[str, Any]) -> None:
        """Forward uses these tensors: backward will make a parameter final where it was used first."""
        axis = static.get("axis")
        if static.get("keep_scores"):
            self.memory.add(SCORES_KEPT)
        if isinstance(axis, Communicator) and axis.size > 1:
            self._sent.add((op, axis.name))
        if self._unused:
            used = [t for t in dict.fromkeys(t for t in inputs if isinstance(t, Parameter)) if t in self._unused]
            self._unused.difference_update(used)
            self._used += [[p.name for p in used]] if used else []

    def begin(self, rank: int, executor: Executor) -> Record:
        mesh = executor.mesh
        slabs = [[p.name, *_place(p), p.decay] for p in self.parameters]
        places = [slab[:3] for slab in slabs]
        states = {}
        for kind, of in executor.optimizer.state_tensors().items():
            if [[name, *_place(tensor)] for name, tensor in of.items()] != places:
                states[kind] = [[name, *_place(tensor), False] for name, tensor in of.items()]
        if self.buffers:
            states[BUFFER] = [[buffer.name, *_place(buffer), False] for buffer in self.buffers]
        facts = {"rank": rank, "executor": self.number, "sizes": dict(mesh.sizes), "coords": dict(mesh.coords)}
        facts["asked dtype"] = np.dtype(executor.model.asked_dtype).name
        weights = _vector(p.master for p in self.parameters)
        return Record({"is": "begin", **facts, "parameters": slabs, "states": states}, {"weight": weights})

    def step(self, executor: Executor, batch: int) -> None:
        """A step has ended; its numbers may not be known yet."""
        record = self._record()
        record.arrays["weight"] = _vector(p.master for p in self.parameters)
        for kind, of in executor.optimizer.state_dict().items():
            record.arrays[kind] = _vector(of.values())
        if self.buffers:
            record.arrays[BUFFER] = _vector(buffer.array for buffer in self.buffers)
        record.facts["batch"] = batch
        record.facts["updates"] = executor.optimizer.updates
        self._done += 1
        self._untold.append(record)

    def told(self, reports: Sequence[StepReport]) -> Iterator[Record]:
        """The steps of which everything is known by now, given all reports of their row so far."""
        while self._untold and self._untold[0].facts["batch"] < len(reports):
            record = self._untold.popleft()
            self._report = reports[record.facts["batch"]]
            yield _with_numbers(record, self._report)

    def untold(self) -> Iterator[Record]:
        """The steps whose numbers nobody will know any more."""
        while self._untold:
            yield self._untold.popleft()

    def cut_short(self, executor: Executor) -> Record:
        """What is known of a step in the middle of its STEP."""
        record = self._record()
        if executor.report is None or executor.report is self._report:
            return record
        self._report = executor.report
        return _with_numbers(record, self._report)

    def _record(self) -> Record:
        order = [name for names in reversed(self._used) for name in names]
        facts = {"is": "step", "executor": self.number, "step": self._done + 1, "order": order}
        facts["own loss"], self.own_loss = self.own_loss, 0.0
        facts["compute"], self.compute = row_text(self.compute), []
        facts["sent"] = [list(pair) for pair in sorted(self._sent)]
        facts["memory"] = sorted(self.memory)
        return Record(facts, {"gradient": self.gradients})


def _with_numbers(record: Record, report: StepReport) -> Record:
    """A step's record with what its ranks have agreed on."""
    numbers = {"targets": report.targets, "loss": report.loss, "norm": report.grad_norm, "learning rate": report.lr}
    record.facts.update(numbers, scale=report.scale, skipped=int(report.skipped))
    if report.counted:
        counted = {name: list(numbers) for name, numbers in report.counted.items()}
        record.facts.update(rows=report.rows, counted=counted)
    return record


def _cut(executor: Executor) -> set[str]:
    """Which of CUT this rank does: what it keeps of the parameters that it shares with others, and lets go."""
    stages = set()
    for flat in executor.model.flats:
        for p, share in zip(flat.parameters, flat.shares, strict=True):
            if share is not p:
                stages.add(3 if p.visits else 2 if p.grad is None else 1)
    return {CUT[max(stages)]} if stages else set()


def _gradient(p: Parameter, scaler: Scaler | None) -> Array:
    """A final gradient without the scale that it carries, by which tensors could not be compared in size."""
    if not p.touched:
        return np.zeros_like(p.grad)
    return p.grad if scaler is None else p.grad * scaler.inverse(scaler.group(p))


def _place(tensor: Parameter | StateTensor | Buffer) -> list[Fact]:
    """The full shape of a tensor, and this rank's rectangle of it."""
    return [list(tensor.full_shape), [[part.start, part.stop] for part in tensor.rectangle]]


def _vector(arrays: Iterable[Array]) -> np.ndarray:
    """Copies of the arrays, one after the other, on the host."""
    flat = [to_host(array).reshape(-1) for array in arrays]
    return np.concatenate(flat) if flat else np.empty(0)


# ------------------------------------------------------------------------------------------------------------- in files


def write(file: BinaryIO, record: Record) -> None:
    """Append a record: a line of JSON, then each array in NumPy's format.  Nothing stays in a buffer."""
    line = json.dumps({**record.facts, "arrays": [*record.arrays]})
    file.write(line.encode() + b"\n")
    for array in record.arrays.values():
        np.save(file, array, allow_pickle=False)
    file.flush()


def read(path: Path) -> Iterator[Record]:
    """The records of a file, up to its end or to where its rank died."""
    with open(path, "rb") as file:
        for line in iter(file.readline, b""):
            try:
                facts = json.loads(line)
                arrays = {kind: np.load(file, allow_pickle=False) for kind in facts.pop("arrays")}
            except (ValueError, EOFError, OSError):
                return
            yield Record(facts, arrays)

"""Noting what happens while a run goes on: `--trace`, or around any part of a script

    with tracing(world(), "my-trace"):
        for batch in batches:
            executor.step(batch)

A witness of all actions and messages; it hears of ops (which are the frequent ones) in the first steps and in each
tenth after, and then also asks who holds how much memory when an action ends.

Where ranks share cores, or wait, nothing that is needed is in the core's caches, and each function called and each
object looked at costs about a microsecond.  So what happens is one small tuple in a list, which holds no array, and all
else is done in one go every few seconds (`sorter`).  The line of the program that asked for a message is looked for in
steps with ops, and outside of steps; what messages ask for in other steps is the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.autograd.tape import PATH, TAPE, Tape
from mpitrain.comm.communicator import Communicator
from mpitrain.debug.trace.held import AT, Held
from mpitrain.debug.trace.notes import ACTION, ARRIVAL, BEGIN, FILE, HELD, MESSAGE, OP, ROW, ROW_ENDS, UNIT
from mpitrain.debug.trace.sites import Sites
from mpitrain.debug.trace.sorter import Sorter
from mpitrain.debug.trace.writer import Writer
from mpitrain.events import Event, hear_ops, leave
from mpitrain.pipeline.action import Action
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.update import StepReport

FIRST_WITH_OPS = 3
"""Steps at the beginning in which ops are noted whatever `ops` says."""
OPS_EVERY = 10
WRITE_EVERY = 3_000_000_000  # ns
MOST_NOTES = 20_000  # that wait to be written
_NUMBERED = ("shift", "broadcast")
"""Collectives with a number of their own, which stands as their tag: by how much, from whom."""

clock = time.perf_counter_ns


class Tracer:
    """A witness that notes what one rank does.

    Args:
        writer: takes what was noted.
        ops: each how many-th step has its ops noted, besides the first ones.

    Cost: see docs/how-to/trace-a-run.md.
    """

    def __init__(self, writer: Writer, ops: int = OPS_EVERY) -> None:
        self._ops_every = ops
        self._sites = Sites()
        self._sorter = Sorter(writer, self._sites.text)
        self._writer = writer
        self._notes: list[tuple[Any, ...]] = []
        self._note = self._notes.append
        self._looks = True  # whether messages are asked where they come from
        self._in_row = False
        self._with_ops = False
        self._rows = 0  # of actions that have begun
        self._tape: Tape | None = None  # on which the action's ops are recorded
        self._executor: Executor | None = None
        self._held: Held | None = None
        self._files: dict[int, list[tuple[str, int]]] = {}  # thread -> operations on files that have begun
        self._written = clock()

    # -- what is frequent ---------------------------------------------------------------------------------------------

    def message(
        self,
        axis: Communicator,
        verb: str,
        number: int,
        began: int,
        a: Any,
        how: Sequence[Any],
        peer: int,
        nbytes: float,
    ) -> None:
        """A call of the door is over, or a wait."""
        now = clock()
        tag = how[1] if peer >= 0 else how[0] if verb in _NUMBERED else 0
        what = verb, axis.name, peer, tag, a.shape, a.dtype, nbytes
        if self._looks:
            self._note((MESSAGE, began, now, (self._sites.here(2), PATH.get()), what, number))
            self._writer.meet(axis.name, axis.ranks)
            if len(self._notes) > MOST_NOTES and not self._in_row:
                self.write()
        else:
            self._note((MESSAGE, began, now, None, what, number))

    def action(self, action: Action, step: int, began: int) -> None:
        """An action is over."""
        self._note((ACTION, began, clock(), action, step))
        if self._with_ops:
            if action.kind in AT and self._held is not None:
                self._note((HELD, clock(), step, self._held.now(action, self._tape)))
            self._tape = None
            if len(self._notes) > MOST_NOTES:  # of a row that is long
                self.write()

    def __call__(self, event: Event) -> None:
        kind, phase, name, info = event
        if kind != "op":
            self._rare(kind, phase, name, info)
        elif phase == "begin":
            self._note((BEGIN, clock(), name, info["path"]))
            if self._tape is None:
                self._tape = TAPE.get()
        else:
            now = clock()
            value = info["output"] if "output" in info else info["grad"]
            if type(value) is tuple:
                value = next((part for part in value if part is not None), None)
            self._note((OP, now, name, getattr(value, "shape", None), getattr(value, "dtype", None)))

    # -- rows of actions ----------------------------------------------------------------------------------------------

    def row_begins(self, executor: Executor) -> None:
        """A row of actions begins."""
        if executor is not self._executor or self._held is None:
            self._executor, self._held = executor, Held(executor)
        self._held.forget()
        number, self._rows = self._rows, self._rows + 1
        with_ops = number < FIRST_WITH_OPS or number % self._ops_every == 0
        if with_ops is not self._with_ops:
            self._with_ops = with_ops
            hear_ops(self, with_ops)
        self._looks, self._in_row = with_ops, True
        self._note((ROW, with_ops))

    def row_ended(self, reports: Sequence[StepReport]) -> None:
        """A row has come to its end."""
        self._note((ROW_ENDS, [(report.loss, report.targets) for report in reports]))
        self._looks, self._in_row = True, False
        if len(self._notes) > MOST_NOTES or clock() - self._written > WRITE_EVERY:
            self.write()

    # -- what is rare -------------------------------------------------------------------------------------------------

    def arrival(self, axis: Communicator, verb: str, number: int, how: Sequence[Any], peer: int) -> None:
        """What a call that did not block brought is there."""
        self._note((ARRIVAL, clock(), (verb, axis.name, peer, how[1] if peer >= 0 else 0), number))

    def _rare(self, kind: str, phase: str, name: str, info: Mapping[str, Any]) -> None:
        if kind == "disk":
            self._file(phase, name, info)
        elif kind == "copy":
            start, stop = int(1e9 * info["start"]), int(1e9 * info["stop"])
            self._note((FILE, start, stop, "copy", info["kind"], name, float(info["nbytes"]), 0))
        elif kind == "unit" and phase == "begin":
            self._note((BEGIN, clock(), name, info["path"]))
        elif kind == "unit":
            self._note((UNIT, clock(), name, info["path"], float(info["bytes"])))

    def _file(self, phase: str, name: str, info: Mapping[str, Any]) -> None:
        """An operation on a file, maybe in a thread of its own; not one of the trace itself."""
        path = info["path"]
        if self._writer.owns(path):
            return
        opened = self._files.setdefault(threading.get_ident(), [])
        if phase == "begin":
            opened.append((name, clock()))
            return
        stop = clock()
        while opened:
            begun, start = opened.pop()
            if begun == name:
                self._note((FILE, start, stop, "disk", name, path, float(info["nbytes"]), len(opened)))
                return

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Hand all that was noted on; after an error of the disk listen no more."""
        count = len(self._notes)  # another thread may add one meanwhile
        notes = self._notes[:count]
        del self._notes[:count]
        self._written = clock()
        if not self._sorter.sort(notes):
            leave(self)

    def close(self) -> None:
        """The end of the trace."""
        self.write()
        self._sorter.close()

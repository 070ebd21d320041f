"""From notes to rows: what belongs together, what is around what, and what each message was for."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitrain.autograd.recompute import Recompute
from mpitrain.debug.trace import notes as n
from mpitrain.debug.trace.sites import Place
from mpitrain.debug.trace.writer import Writer
from mpitrain.pipeline.action import Action

AROUND_ALL = (Recompute.title(), f"{Recompute.title()}.backward")
"""Ops around all that a module does: a message in them is that of the module, not theirs."""

What = tuple[str, str, int, int, tuple[int, ...], Any, float]
"""Of a message: name, axis, peer, tag, shape, dtype, bytes."""
Where = tuple[str, str]
"""Of a message: site and path."""
NOWHERE: Where = "", ""
WAIT = "wait "


@dataclass
class Learned:
    """Where the messages of an action come from: its calls in their order, and its waits, which it may do without."""

    calls: list[What] = field(default_factory=list)
    wheres: list[Where | None] = field(default_factory=list)
    waits: dict[What, Where | None] = field(default_factory=dict)


class Sorter:
    """Makes rows of notes, and has them written.

    Args:
        writer: of them.
        site_text: of a place of `Sites`.

    What a step sends does not change from step to step.  So where the messages of an action come from is learned when
    somebody looked, and holds for the same action in other steps if it sends the same messages in the same order.
    """

    def __init__(self, writer: Writer, site_text: Callable[[Place], str]) -> None:
        self._writer = writer
        self._kinds = writer.kinds
        self._numbers = writer.kinds.numbers
        self._site_text = site_text
        self._rows = array("q")
        self._names: dict[Action, tuple[str, str]] = {}  # of actions, and their kinds
        self._waiting: list[tuple[Any, ...]] = []  # for the end of their action
        self._open: list[tuple[int, str, str]] = []  # what has begun: when, its name, its path
        self._in_row = False
        self._with_ops = False
        self._action = ""
        self._step = 0
        self._whats: list[What] = []  # messages of an action: what, where from, and the rest of their rows
        self._wheres: list[Where | None] = []
        self._times: list[tuple[int, int, int, int]] = []  # begin, end, number of the call, depth
        self._learned: dict[str, Learned] = {}  # by name of the action
        self._steps: dict[int, list[int]] = {}  # of the row: when they began, and when their newest action ended

    def sort(self, notes: Sequence[tuple[Any, ...]]) -> bool:
        """Write what notes tell.

        Returns:
            Whether more can be written.
        """
        notes = [*self._waiting, *notes]
        first = 0  # of those that wait for the end of their action
        for place, note in enumerate(notes):
            code = note[0]
            if code == n.ACTION:
                self._end_action(notes[first:place], *note[1:])
            elif code == n.ROW or code == n.ROW_ENDS:
                self._in_action("", self._step, notes[first:place])  # of an action that an error has ended
                self._end_steps(note[1] if code == n.ROW_ENDS else ())
                self._in_row = code == n.ROW
                if self._in_row:
                    self._with_ops = note[1]
            elif self._in_row:
                continue
            else:
                self._take(note)
            first = place + 1
            if len(self._rows) > self._writer.most:
                self._write()
        self._waiting = notes[first:]
        return self._write()

    def close(self) -> None:
        """There will be no more notes."""
        self._in_action("", self._step, self._waiting)
        self._waiting = []
        self._end_steps(())
        self._write()
        self._writer.close()

    def _write(self) -> bool:
        rows, self._rows = self._rows, array("q")
        return self._writer.write(rows)

    def _take(self, note: tuple[Any, ...]) -> None:
        code = note[0]
        if code == n.MESSAGE:
            self._message(*note)
        elif code == n.BEGIN:
            self._open.append(note[1:])
        elif code == n.OP:
            self._op(*note)
        elif code == n.ARRIVAL:
            self._arrival(*note)
        elif code == n.HELD:
            self._writer.hold(*note[1:])
        elif code == n.UNIT:
            self._unit(*note)
        else:
            self._file(*note)

    def _close(self, name: str, stop: int) -> tuple[int, str]:
        """When what ends began, and its path; what raised inside of it has no end."""
        opened = self._open
        while opened:
            start, begun, path = opened.pop()
            if begun == name:
                return start, path
        return stop, ""  # it began before anybody listened

    @property
    def _depth(self) -> int:
        return len(self._open) + self._in_row

    # -- steps and actions --------------------------------------------------------------------------------------------

    def _in_action(self, name: str, step: int, notes: Sequence[tuple[Any, ...]]) -> None:
        """What happened in an action; the name is "" if it did not come to its end."""
        self._step = step
        for note in notes:
            self._take(note)
        if self._whats:
            self._place_messages(name)
        self._open.clear()  # an op that raised has no end

    def _end_action(self, notes: Sequence[tuple[Any, ...]], start: int, stop: int, action: Action, step: int) -> None:
        known = self._names.get(action)
        name, kind = known if known is not None else self._names.setdefault(action, (str(action), action.kind))
        self._action = kind
        self._in_action(name, step, notes)
        self._action = ""
        number = self._numbers.get(name)
        if number is None:
            number = self._kinds.add(name, "action", name, action=kind)
        self._rows.extend((start, stop, number, step, 0))
        self._steps.setdefault(step, [start, stop])[1] = stop

    def _end_steps(self, reports: Sequence[tuple[float, int]]) -> None:
        """The steps of a row, with loss and tokens of those that came to their end."""
        whole = len(reports) == len(self._steps)
        for place, (step, (start, stop)) in enumerate(self._steps.items()):
            loss, tokens = reports[place] if whole else (math.nan, 0)
            about = {"loss": loss, "tokens": tokens} if math.isfinite(loss) else {}
            self._writer.step({"step": step, "start": start, "stop": stop, "ops": self._with_ops, **about})
        self._steps.clear()
        self._step = 0

    # -- messages -----------------------------------------------------------------------------------------------------

    def _message(
        self,
        _: int,
        start: int,
        stop: int,
        seen: tuple[Place, str] | None,
        what: What,
        call: int,
    ) -> None:
        where: Where | None = None
        if seen is not None:
            around, path = self._open[-1][1:] if self._open else ("", "")
            if not path or around in AROUND_ALL:
                path = seen[1] or path
            where = self._site_text(seen[0]), path
        times = start, stop, call, self._depth
        if self._in_row:
            self._whats.append(what)
            self._wheres.append(where)
            self._times.append(times)
        else:
            self._add_message(what, where, times)

    def _place_messages(self, name: str) -> None:
        """The messages of an action, whose name is `name` if it came to its end, and where they come from."""
        whats, wheres, times = self._whats, self._wheres, self._times
        self._whats, self._wheres, self._times = [], [], []
        calls = [what for what in whats if not what[0].startswith(WAIT)]
        if None not in wheres:
            learned = self._learned.setdefault(name, Learned())
            learned.calls, learned.wheres = calls, []
            for what, where in zip(whats, wheres, strict=True):
                if what[0].startswith(WAIT):
                    learned.waits[what] = where
                else:
                    learned.wheres.append(where)
        else:
            known = self._learned.get(name)
            if known is not None and known.calls == calls:
                of_calls = iter(known.wheres)
                wheres = [known.waits.get(what) if what[0].startswith(WAIT) else next(of_calls) for what in whats]
        for what, where, when in zip(whats, wheres, times, strict=True):
            self._add_message(what, where, when)

    def _add_message(self, what: What, where: Where | None, times: tuple[int, int, int, int]) -> None:
        start, stop, call, depth = times
        key = what, where, self._action, depth
        number = self._numbers.get(key)
        if number is None:
            name, axis, peer, tag, shape, dtype, nbytes = what
            site, path = where or NOWHERE
            waits = name.startswith(WAIT)
            number = self._kinds.add(
                key,
                "wait" if waits else "message",
                name.removeprefix(WAIT),
                depth=depth,
                path=path,
                action=self._action,
                site=site,
                axis=axis,
                shape=_shape(shape, dtype),
                peer=peer,
                tag=tag,
                nbytes=nbytes,
            )
        self._rows.extend((start, stop, number, self._step, call))

    def _arrival(self, _: int, now: int, what: tuple[str, str, int, int], call: int) -> None:
        key = what, self._action, self._depth
        number = self._numbers.get(key)
        if number is None:
            name, axis, peer, tag = what
            number = self._kinds.add(
                key, "arrival", name, depth=self._depth, action=self._action, axis=axis, peer=peer, tag=tag
            )
        self._rows.extend((now, now, number, self._step, call))

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _op(self, _: int, stop: int, name: str, shape: Any, dtype: Any) -> None:
        start, path = self._close(name, stop)
        key = name, path, shape, dtype, self._action, self._depth
        number = self._numbers.get(key)
        if number is None:
            number = self._kinds.add(
                key, "op", name, depth=self._depth, path=path, action=self._action, shape=_shape(shape, dtype)
            )
        self._rows.extend((start, stop, number, self._step, 0))

    def _unit(self, _: int, stop: int, name: str, path: str, nbytes: float) -> None:
        """Weights came, which takes time, or went."""
        start = self._close(name, stop)[0] if name == "fetch" else stop
        key = name, path, nbytes, self._action, self._depth
        number = self._numbers.get(key)
        if number is None:
            number = self._kinds.add(
                key, "unit", name, depth=self._depth, path=path, action=self._action, nbytes=nbytes
            )
        self._rows.extend((start, stop, number, self._step, 0))

    def _file(self, _: int, start: int, stop: int, kind: str, name: str, path: str, nbytes: float, depth: int) -> None:
        key = kind, name, path, nbytes, depth
        number = self._numbers.get(key)
        if number is None:
            number = self._kinds.add(key, kind, name, depth=depth, path=path, nbytes=nbytes)
        self._rows.extend((start, stop, number, self._step, 0))


def _shape(shape: Any, dtype: Any) -> str:
    """`(4, 512) float32`."""
    return "" if shape is None else f"{tuple(shape)} {dtype}"

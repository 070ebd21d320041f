"""The message ledger: what a rank sends, by axis and by place in the model, and how long it stands in messages.

    ledger = Ledger()
    with listen(ledger):
        for batch in batches:
            executor.step(batch)
    print(ledger.table())

    a step sends 37,931,024 bytes, and 25.8 % of its time stands in messages (mean of 20)

           bytes  calls    time  axis
      37,773,312     38  25.4 %  tp
         157,696      1   0.3 %  dp+cp+tp
              16      1   0.0 %  world

          bytes  calls   time  axis      where                    op
      4,194,304      4  5.1 %  tp        blocks.*.attention.qkv   all_gather.backward
      4,194,304      4  4.8 %  tp        blocks.*.mlp.up          all_gather.backward
      ...

A listener: it hears of actions, ops and messages, so no layer and no reducer knows of it.  A message belongs to the
innermost op that has begun and not ended, hence to forward or to backward, and to the action that the executor is in;
one that a module sends outside of ops, to the module.

Bytes are what the door counts: payload times the factor of the best algorithm, whatever the MPI library does.  Time is
that between the begin and the end of a call, and of a wait for one: also the time in which a rank waits for others that
are late.  Where ranks are threads (`mpitrain local`) they take turns, and times mean little.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from mpitrain.autograd.recompute import Recompute
from mpitrain.autograd.tape import PATH
from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.comm.site import site_of
from mpitrain.events import Event, listen

K = TypeVar("K", bound=Hashable)

ROWS = 20  # places that a table shows
NO_OPS_OWN = ("", Recompute.title(), f"{Recompute.title()}.backward")  # the last two are around all that a module does


class Place(NamedTuple):
    """Where messages of one kind happen.

    axis: its name: `tp`, `pp`, `dp+cp`, `world`; verb: `all_reduce`, also for `iall_reduce`; action: what the executor
    does, `F`, `SEND_F`, `REDUCE`; empty outside of steps; path: of the module, `blocks.0.attention.proj`; op:
    `all_reduce`, or `copy.backward` on the way back; site: `train.py:31` where there is neither an action nor an op to
    name.
    """

    axis: str
    verb: str
    action: str
    path: str
    op: str
    site: str = ""

    @property
    def where(self) -> str:
        """The module; else the action; else the line of the program."""
        return self.path or self.action or self.site


@dataclass
class Sum:
    """What was added up.

    Attributes:
        calls: messages that were sent; a receive is none.
        bytes: sent by this rank.  A float, since an axis of 3 ranks has a factor of 4/3.
        seconds: in these messages, waits for them included.
    """

    calls: int = 0
    bytes: float = 0.0
    seconds: float = 0.0

    def add(self, other: Sum) -> None:
        """Add another one."""
        self.calls += other.calls
        self.bytes += other.bytes
        self.seconds += other.seconds


class Ledger:
    """A listener that adds up this rank's messages.

    Attributes:
        steps: steps of executors that it has heard from begin to end.
        step_seconds: their time.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.step_seconds = 0.0
        self._sums: dict[tuple[str, str, str, str, str, str], Sum] = {}
        self._action = ""
        self._ops: list[tuple[str, str]] = []  # (path, name) of those that have begun and not ended
        self._message_began = 0.0
        self._row_began: float | None = None

    def __call__(self, event: Event) -> None:
        kind, phase, name, info = event
        if kind == "op" or (kind == "unit" and name == "fetch"):
            if phase == "begin":
                self._ops.append((info["path"], name))
            elif self._ops:
                self._ops.pop()
        elif kind == "message":
            now = time.perf_counter()
            if phase == "begin":
                self._message_began = now
            else:
                self._book(name, info, now - self._message_began)
        elif kind == "action":
            self._act(phase, info["action"], info["executor"].row)

    def _act(self, phase: str, action: Any, row: list[Any]) -> None:
        self._ops.clear()  # an op that raised has no end
        self._action = action.kind if phase == "begin" else ""
        if phase == "begin" and action is row[0]:
            self._row_began = time.perf_counter()
        elif phase == "end" and action is row[-1] and self._row_began is not None:
            self.steps += sum(each.kind == "STEP" for each in row)  # a pipeline that never drains makes several
            self.step_seconds += time.perf_counter() - self._row_began
            self._row_began = None

    def _book(self, name: str, info: Mapping[str, Any], seconds: float) -> None:
        verb = name.removeprefix("wait ")
        verb = LIKE_BLOCKING.get(verb, verb)
        path, op = self._ops[-1] if self._ops else ("", "")
        if op in NO_OPS_OWN:
            path = PATH.get() or path
        site = "" if op or self._action else site_of(sys._getframe(2))  # of who told us
        key = info["axis"], verb, self._action, path, op, site
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = Sum()
        found.seconds += seconds
        if verb != "recv" and not name.startswith("wait "):
            found.calls += 1
            found.bytes += info["bytes"]

    # -- what it found ------------------------------------------------------------------------------------------------

    def by(self, name: Callable[[Place], K], where: Callable[[Place], bool] | None = None) -> dict[K, Sum]:
        """Sums over all places of one name, the largest first, then in the order in which they were first heard of.

        Args:
            name: of a place: `lambda place: place.axis`.
            where: which places count, `in_step` those of steps; None: all.
        """
        found: dict[K, Sum] = {}
        for key, amount in self._sums.items():
            place = Place(*key)
            if where is None or where(place):
                found.setdefault(name(place), Sum()).add(amount)
        return dict(sorted(found.items(), key=lambda item: (-item[1].bytes, -item[1].calls)))

    def total(self, axis: str | None = None) -> int:
        """Bytes that this rank has sent over an axis, in steps and outside; None: over all axes."""
        return round(sum(s.bytes for name, s in self.by(lambda place: place.axis).items() if axis in (None, name)))

    def share(self, axis: str | None = None) -> float:
        """The part of the steps' time that this rank stood in messages over an axis, or all: 0 ... 1.

        Waiting for ranks that are late counts.  0 before a step has ended.
        """
        sums = self.by(lambda place: place.axis, in_step)
        seconds = sum(s.seconds for name, s in sums.items() if axis in (None, name))
        return seconds / self.step_seconds if self.steps else 0.0

    def table(self, rows: int = ROWS, each_layer: bool = False) -> str:
        """What was sent, by axis and by place, the largest first: in a mean step, and in all outside of steps.

        Args:
            rows: places that are shown; the others are added up in a last line.
            each_layer: a line for each layer instead of one for `blocks.*`.
        """

        def axis(p: Place) -> tuple[str, ...]:
            return (p.axis,)

        def place(p: Place) -> tuple[str, ...]:
            return p.axis, p.where if each_layer else _any_layer(p.where), p.op

        if not self.steps:
            return f"{self.total():,} bytes were sent\n\n{_columns(self.by(place), rows)}".rstrip()
        sums = self.by(axis, in_step), self.by(place, in_step)
        sent = _number(sum(s.bytes for s in sums[0].values()) / self.steps)
        head = (
            f"a step sends {sent} bytes, and {100 * self.share():.1f} % of its time stands in messages"
            f" (mean of {self.steps})"
        )
        parts = [head, *(_columns(s, rows, self.steps, self.step_seconds) for s in sums)]
        outside = self.by(place, lambda p: not in_step(p))
        if outside:
            sent = _number(sum(s.bytes for s in outside.values()))
            parts += [f"outside of steps {sent} bytes were sent", _columns(outside, rows)]
        return "\n\n".join(part for part in parts if part)


def share_in_messages(step: Callable[[], object], steps: int = 1) -> float:
    """The part of a step's time in which this rank stands in messages.

    Args:
        step: makes one step: `lambda: executor.step(batch)`.
        steps: how many to make.

    Returns:
        0 ... 1; waiting for ranks that are late counts.
    """
    ledger = Ledger()
    with listen(ledger):
        for _ in range(steps):
            step()
    return ledger.share()


def in_step(place: Place) -> bool:
    """Whether a place is one of a step's."""
    return bool(place.action)


def _any_layer(path: str) -> str:
    """`blocks.3.mlp.up` as `blocks.*.mlp.up`: layers are alike."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _number(amount: float) -> str:
    """`1,234`, and a digit behind the point where the mean is not whole."""
    return f"{amount:,.0f}" if abs(amount - round(amount)) < 0.05 else f"{amount:,.1f}"


def _columns(sums: Mapping[tuple[str, ...], Sum], rows: int, steps: int = 1, seconds: float = 0.0) -> str:
    """Lines of (bytes, calls, time, the names); time as a share of `seconds`, in milliseconds where there are none."""
    shown = [*sums.items()]
    if len(shown) > rows:
        rest = Sum()
        for _, amount in shown[rows:]:
            rest.add(amount)
        shown = [*shown[:rows], ((f"({len(shown) - rows} more)",), rest)]
    lines = [["bytes", "calls", "time", "axis", "where", "op"]]
    for names, s in shown:
        times = f"{100 * s.seconds / seconds:.1f} %" if seconds else f"{1000 * s.seconds:.1f} ms"
        lines.append([_number(s.bytes / steps), _number(s.calls / steps), times, *names])
    width = max(map(len, lines[1:]), default=0)
    return _aligned([line[:width] + [""] * (width - len(line)) for line in lines])


def _aligned(lines: list[list[str]]) -> str:
    """Columns two spaces apart, the first three, which are numbers, flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [
            cell.rjust(w) if at < 3 else cell.ljust(w) for at, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        text.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(text)

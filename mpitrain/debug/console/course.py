"""What a rank did in this step so far: actions, ops, messages, losses."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from mpitrain.backend import to_host
from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.events import Event
from mpitrain.pipeline.action import Action

RECEIVES = ("recv", "irecv")


class Done(NamedTuple):
    """An action that is over, and how many seconds it took."""

    action: Action
    seconds: float


class Traffic:
    """Messages of one axis and verb.

    Attributes:
        ranks: of the axis; calls: how many were made; bytes: that this rank sent, as the door counts; seconds: inside.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.calls = 0
        self.bytes = 0.0
        self.seconds = 0.0


class Course:
    """A listener.  Where steps overlap, a step here is a row of the executor.

    Attributes:
        step: counted from 1; 0 before the first.
        row: the actions that the step is made of.
        done: those that are over.
        now: the one that runs; None: none.
        ops, ops_back: how many have begun, forward and backward.
        traffic: (axis, verb) -> messages.
        losses: what the forward passes of the last stage gave, by micro-batch: sums over their targets.
        report: of the step, once it is known.
    """

    def __init__(self) -> None:
        self._begin(0, [])
        self._message_began = self._action_began = 0.0

    def _begin(self, step: int, row: list[Action]) -> None:
        self.step, self.row = step, row
        self.done: list[Done] = []
        self.now: Action | None = None
        self.ops = self.ops_back = 0
        self.traffic: dict[tuple[str, str], Traffic] = {}
        self.losses: dict[str, float] = {}
        self.report: Any = None

    def __call__(self, event: Event) -> None:
        kind, phase, name, info = event
        if kind == "op":
            if phase == "begin":
                self.ops, self.ops_back = self.ops + ("node" not in info), self.ops_back + ("node" in info)
        elif kind == "message":
            self._message(phase, name, info)
        elif kind == "action":
            self._act(phase, name, info)

    def _act(self, phase: str, name: str, info: Any) -> None:
        action: Action = info["action"]
        if phase == "begin":
            row = info["executor"].row
            if action is row[0]:
                self._begin(info["step"], row)
            self.now, self._action_began = action, time.perf_counter()
            return
        self.now = None
        self.done.append(Done(action, time.perf_counter() - self._action_began))
        if action.kind == "F" and info["output"] is not None:
            self.losses[name] = float(to_host(info["output"].data))
        if action.kind == "STEP" and info["reports"]:
            self.report = info["reports"][-1]

    def _message(self, phase: str, name: str, info: Any) -> None:
        if phase == "begin":
            self._message_began = time.perf_counter()
        verb = name.removeprefix("wait ")
        verb = LIKE_BLOCKING.get(verb, verb)
        traffic = self.traffic.setdefault((info["axis"], verb), Traffic(info["ranks"]))
        if phase == "end":
            traffic.seconds += time.perf_counter() - self._message_began
        elif not name.startswith("wait "):
            traffic.calls += 1
            traffic.bytes += 0.0 if verb in RECEIVES else info["bytes"]

"""`follow NAME`: from now on each touch of a parameter is told, with the numbers of all ranks, and where they part.

    follow blocks.0.mlp.up.weight  (16, 64) on ranks 0,1,2,3   dp Replicate, tp Shard(1)
    up.weight step 1  F0@0: used by linear of blocks.0.mlp.up     |w| 6 (0,2)  5.72 (1,3)
    up.weight step 1  B0@0: linear.backward adds                  |g| 0.0834 (0)  0.0911 (1)  0.0712 (2) ...
    up.weight step 1  REDUCE@0: summed by all_reduce on dp+cp     |g| 0.1841 (0,2)  0.2024 (1,3)
    up.weight step 1  STEP@0: updated, lr 0.01, gradient scaled by 0.54   |dw| 0.32 (0,2)  0.31 (1,3)

Ranks go on one by one, so a touch is told when all ranks that hold the parameter have made it, or when the step is over
and some have not, which is told as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, to_host
from mpitrain.comm.places import listed, named
from mpitrain.comm.wire import share_memory
from mpitrain.debug.console import tensors
from mpitrain.debug.console.apart import differences
from mpitrain.debug.console.found import Found
from mpitrain.debug.console.numbers import short, summary
from mpitrain.debug.console.shown import wrapped
from mpitrain.debug.console.watch import Watch
from mpitrain.errors import ConsoleError
from mpitrain.events import Event
from mpitrain.nn.parameter import Parameter

HELP_FOLLOW = """\
follow NAME      from now on tell each touch of a parameter on all ranks, and where ranks part
  Told are: each use in a forward, each time a gradient is added, the sum over ranks, the update
  with what clipping and scales did; and at a step's end what should have happened and did not.
  |w| is the norm of the weights, |g| of the gradient that is there by then, |dw| of the change.
  Numbers stand once for ranks that have the same.  What one rank has done is told when all that
  hold the parameter have done it.  NAME may be of a model that is not there yet."""

MOST = 4
"""Values by rank that a line tells apart."""
_WORDS = 60
"""Columns of the words of a line, where they fit."""


class Touch(NamedTuple):
    """What happened to a parameter on one rank.

    what: in words, without numbers; symbol: of the number; number: the norm; found: what is compared over ranks; more:
    what else there is to say, of the first rank.
    """

    what: str
    symbol: str
    number: float
    found: Found
    more: str = ""


class _Rank:
    """What is known of the parameter on one rank."""

    def __init__(self, view: Watch) -> None:
        self.counts: dict[Hashable, int] = {}  # touches of one kind in this step
        self.used = self.added = 0
        self.summed = False  # by a message that was seen
        self.before: Array | None = None  # weights before the update
        self.norm = float("nan")
        self.adding = ""  # op whose gradient the tape adds before the next event
        self.step = 0
        self.seen = view.course.step > 0 and not view.course.ops  # this step from its first forward on


class Follow:
    """What follows one parameter on all ranks; only one of them runs at a time.

    Args:
        name: of the parameter; the end of it is enough.  It may be one of a model that is not there yet.
        out: takes lines of text.
        views: of all ranks, by which it is known who holds the parameter.
        width: columns of the terminal.

    Raises:
        ConsoleError: there is a model, but no such parameter, or several.
    """

    def __init__(self, name: str, out: Callable[[str], None], views: Sequence[Watch], width: int = 100) -> None:
        self.name = name
        self._out = out
        self._views = views
        self._width = width
        self._label = name
        self._holders: list[int] | None = None  # not known yet
        self._ranks = {view.rank: _Rank(view) for view in views}
        self._waiting: dict[tuple[int, str, str, int], dict[int, Touch]] = {}
        if all(view.parameters for view in views):
            self.name = tensors.one(views, name)
        if not self._is_named():
            out(f"follow {name}: pending, until there is a model that runs")

    def _is_named(self) -> bool:
        """Whether a model has the parameter; once all ranks have one it is known who holds it, which is told."""
        if self._holders is not None:
            return bool(self._holders)
        everybody = all(view.parameters for view in self._views)
        try:
            self.name = tensors.one(self._views, self.name)
        except ConsoleError as error:
            if everybody:
                self._holders = []
                self._out(f"! follow: {error}")
            return False
        self._label = ".".join(self.name.split(".")[-2:])
        if everybody:
            self._holders = [view.rank for view in self._views if self.name in view.parameters]
            found = tensors.find(self._views, self.name, tensors.WEIGHT)[0][1]
            state = next((each.state for each in found if each.state), "")
            full = next((each.full for each in found if each.full), ())
            head = f"follow {self.name}  {full} on {named(self._holders)}"
            self._out("   ".join(part for part in (head, state) if part))
            for key in list(self._waiting):
                self._tell_complete(key)
        return True

    # -- what it hears ------------------------------------------------------------------------------------------------

    def hear(self, view: Watch, event: Event) -> None:
        """An event of a rank, which its `Watch` has heard before."""
        p = view.parameters.get(self.name) if self._is_named() else None
        if p is None:
            return
        rank = self._ranks[view.rank]
        if rank.adding:
            self._touch(view, f"{rank.adding} adds", "|g|", tensors.GRAD)
            rank.adding = ""
        if event.kind == "op":
            self._op(view, rank, event, p)
        elif event.kind == "action":
            self._action(view, rank, event)
        elif event.kind in ("message", "arrival") and event.phase == "end":
            self._message(view, rank, event, p)

    def _op(self, view: Watch, rank: _Rank, event: Event, p: Parameter) -> None:
        info = event.info
        if event.phase == "begin" and "tensors" in info and "node" not in info:
            if any(x is p for x in info["tensors"] if isinstance(x, Tensor)):
                rank.used += 1
                of = f" of {info['path']}" if info["path"] else ""
                self._touch(view, f"used by {event.name}{of}", "|w|", tensors.WEIGHT)
        elif event.phase == "end" and "grads" in info:
            tape = info["tape"]
            for slot, grad in zip(info["node"].inputs, info["grads"], strict=False):
                if slot >= 0 and grad is not None and tape.leaf(slot) is p:
                    rank.added += 1
                    rank.adding = event.name

    def _message(self, view: Watch, rank: _Rank, event: Event, p: Parameter) -> None:
        result: Any = event.info.get("result")
        grad: Any = p.grad
        is_sum = "reduce" in event.name and not event.name.startswith("wait ")
        if not (is_sum and hasattr(result, "dtype") and type(grad) is type(result) and grad.size):
            return
        if share_memory(result, grad):
            rank.summed = True
            self._touch(view, f"summed by {event.name} on {event.info['axis']}", "|g|", tensors.GRAD)

    def _action(self, view: Watch, rank: _Rank, event: Event) -> None:
        kind, info = event.info["action"].kind, event.info
        if event.phase == "begin" and event.info["action"] is info["executor"].row[0]:
            rank.used, rank.added, rank.summed = 0, 0, False
            rank.counts.clear()
            rank.seen = True
        if kind == "REDUCE" and event.phase == "end" and not rank.summed:  # as halves, or rows: in another buffer
            self._touch(view, "after the sum over ranks", "|g|", tensors.GRAD)
        if kind != "STEP":
            return
        share = view.shares[self.name]
        if event.phase == "begin":
            rank.before = None if hasattr(share.master, "here") else np.array(to_host(share.master))
            grad = _seen(view, self.name, tensors.GRAD)
            rank.norm = float("nan") if grad.array is None else summary(grad.array).norm
            return
        self._updated(view, rank, info)
        self._over(view, rank)

    def _updated(self, view: Watch, rank: _Rank, info: Mapping[str, Any]) -> None:
        share = view.shares[self.name]
        reports = info["reports"]
        what = "skipped: gradients overflowed" if reports and reports[-1].skipped else "updated"
        more = f"lr {reports[-1].lr:.4g}" if reports else ""
        after = _seen(view, self.name, tensors.GRAD)
        norm = float("nan") if after.array is None else summary(after.array).norm
        if norm and rank.norm and abs(norm / rank.norm - 1) > 1e-9:
            more += f"{', ' * bool(more)}gradient scaled by {norm / rank.norm:.4g}"
        if rank.before is None:
            self._touch(view, what, "|w|", tensors.WEIGHT, more)
            return
        change = np.asarray(to_host(share.master), np.float64) - rank.before.astype(np.float64)
        rank.before = None
        self._touch(view, what, "|dw|", tensors.MASTER, more, summary(change).norm)

    def _over(self, view: Watch, rank: _Rank) -> None:
        """A step is over on a rank: what did not happen to the parameter in it."""
        if rank.seen and not rank.used:
            self._touch(view, "! no op of a forward used it in this step", "", tensors.WEIGHT)
        elif rank.seen and not rank.added and view.parameters[self.name].requires_grad:
            self._touch(view, "! no backward gave it a gradient in this step", "", tensors.WEIGHT)
        others = [self._ranks[number] for number in self._holders or () if number != view.rank]
        rank.step = view.step
        if self._holders is not None and all(other.step >= view.step for other in others):
            self._flush(view.step)

    # -- what it tells ------------------------------------------------------------------------------------------------

    def _touch(
        self, view: Watch, what: str, symbol: str, kind: str, more: str = "", number: float | None = None
    ) -> None:
        """A touch on one rank; told when it is the last one."""
        rank = self._ranks[view.rank]
        in_action = view.acts or (view.event is not None and view.event.kind == "action")
        where = (view.step, str(view.action), what) if in_action else (0, "", what)
        count = rank.counts[where] = rank.counts.get(where, 0) + 1
        key = (*where, count)
        found = _seen(view, self.name, kind)
        if number is None:
            number = float("nan") if found.array is None else summary(found.array).norm
        copied = found if found.array is None else found._replace(array=np.array(to_host(found.array)))
        waiting = self._waiting.setdefault(key, {})
        waiting[view.rank] = Touch(what, symbol, number, copied, more)
        self._tell_complete(key)

    def _tell_complete(self, key: tuple[int, str, str, int]) -> None:
        """Tell a touch, if all have made it who hold the parameter."""
        touches = self._waiting[key]
        if self._holders is not None and len(touches) >= len(self._holders):
            del self._waiting[key]
            self._tell(key[:3], touches)

    def _tell(self, where: tuple[int, str, str], touches: Mapping[int, Touch]) -> None:
        step, action, what = where
        touches = dict(sorted(touches.items()))
        first = next(iter(touches.values()))
        is_odd = what.startswith("! ")
        place = f"step {step}  {action}: " if step else ""
        head = f"{self._label} {place}{what.removeprefix('! ')}{', ' * bool(first.more)}{first.more}"
        numbers: dict[str, list[int]] = {}
        for rank, touch in touches.items():
            numbers.setdefault(short(touch.number), []).append(rank)
        text = ""
        if first.symbol:
            texts = [f"{number} ({listed(sorted(ranks))})" for number, ranks in numbers.items()]
            more = f"  {len(texts) - MOST} more" if len(texts) > MOST else ""
            told = next(iter(numbers)) if len(numbers) == 1 else "  ".join(texts[:MOST])
            text = f"{first.symbol} {told}{more}"
        elif is_odd:
            text = f"({named(sorted(touches))})"
        lines = wrapped(f"{'! ' * is_odd}{head:{_WORDS}s}   {text}".rstrip(), self._width)
        for found in differences([touch.found for touch in touches.values()]):
            lines += wrapped(f"! here they part: {found}", self._width)
        self._out("\n".join(lines))

    def _flush(self, step: int) -> None:
        """Tell what only some ranks have done in a step that is over for all."""
        for key in [key for key in self._waiting if key[1] and key[0] <= step]:
            touches = self._waiting.pop(key)
            self._tell(key[:3], touches)
            missing = [rank for rank in self._holders or () if rank not in touches]
            text = (
                f"! {self._label} {named(missing)} did not: {key[2].removeprefix('! ')}, in {key[1]} of step {key[0]}"
            )
            self._out("\n".join(wrapped(text, self._width)))

    def rest(self) -> str:
        """What only some ranks have done so far; "" for nothing."""
        lines = []
        for (step, action, what, _), touches in self._waiting.items():
            missing = [rank for rank in self._holders or () if rank not in touches]
            lines.append(f"step {step}  {action}  {what} on {named(sorted(touches))}, not yet on {named(missing)}")
        return "\n".join(lines)


def _seen(view: Watch, name: str, kind: str) -> Found:
    return tensors.find([view], name, kind)[0][1][0]

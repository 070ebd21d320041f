"""The listener that looks at every value of a step for the first that is not finite.

It looks at what ops make of what, forward and backward (a gradient that is only a recipe is computed), at gradients
after they were added up, at both ends of every message, at the batch, at weights and at the optimizer's state.  Since
it looks everywhere, the first thing it sees is either made there, of finite inputs, or came in a message.

Minus infinity that is made of minus infinity passes: masks are made of it.

Cost: one pass over every value of the step; gradients of weights are computed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd.lazy import Lazy
from mpitrain.autograd.tape import PATH
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, is_half, to_host
from mpitrain.comm.wire import is_inexact
from mpitrain.events import Event
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.nn.share import is_absent
from mpitrain.optim.clip import squares
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.sound import unsound
from mpitrain.pipeline.action import Action
from mpitrain.pipeline.finding import AFTER, BAD, FINITE, LOW, Finding, Range, ranges, verdict
from mpitrain.pipeline.packed import Bucket, Packed

SUMS = ("all_reduce", "iall_reduce", "reduce_scatter", "ireduce_scatter")
"""Verbs that add up: finite numbers may give one that is not."""

NO_GIFT = ("recv", "irecv", "barrier")
"""Verbs to which a rank gives nothing."""


class Gift(NamedTuple):
    """What this rank gave to a message.

    finite: whether all of it was; largest: magnitude, where the message is a sum.
    """

    finite: bool
    largest: float


class _Work(NamedTuple):
    """An op that has begun."""

    title: str
    info: Mapping[str, Any]
    number: int


class Hunter:
    """Finds the first value of a step on this rank that is not finite.

    Args:
        model: whose gradients and weights to look at.
        optimizer: whose state to look at.
        rank: of this rank in the world, for the finding.

    Attributes:
        finding: the first of the row that runs, or ran last; None: everything is finite.
        gifts: message -> what this rank gave to it.
    """

    def __init__(self, model: Module, optimizer: Optimizer, rank: int) -> None:
        self.rank = rank
        self.finding: Finding | None = None
        self.gifts: dict[str, Gift] = {}
        self._model = model
        self._optimizer = optimizer
        self._parameters = model.shares()
        self._whole = model.parameters()
        self._packed: Packed | None = None
        self._buckets: dict[str, Bucket] = {}  # message -> whose gradients are in it
        self._unit = ""  # whose weights are being brought
        self._action: Action | None = None
        self._step = 1
        self._ops = 0
        self._works: list[_Work] = []
        self._added: list[tuple[Parameter, _Work]] = []  # gradients that an op's backward has just been added to
        self._last: dict[Parameter, _Work] = {}  # that was added to each

    def __call__(self, event: Event) -> None:
        if event.kind == "action":
            self._act(event)
        elif self._action is not None:
            self._look_at_sums()
            if event.kind == "op":
                self._op(event)
            elif event.kind == "message":
                self._message(event)
            elif event.kind == "unit":
                self._unit = event.info["path"] if event.phase == "begin" else ""
            elif event.kind == "arrival" and self.finding is None and verdict(event.info["result"]) != FINITE:
                self._arrived(event.info["result"], event.name, event.info)

    # -- a row --------------------------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """A row begins.

        Args:
            step: its number, or that of its first batch, counted from 1.
        """
        self.finding = None
        self._step = step
        self._ops = 0
        self.gifts.clear()
        self._works.clear()
        self._added.clear()
        self._last.clear()
        self._buckets.clear()
        for p in self._parameters:
            for name, array in ((p.name, p.master), (f"{p.name}, rounded to {p.data.dtype}", p.data)):
                if verdict(array) != FINITE:
                    self._found("weight", array, name, "", inputs=() if array is p.master else [p.master], early=-2)
        for p in self._whole:  # rows of other ranks are here too, where whole weights are
            if not p.visits and verdict(p.data) != FINITE:
                self._found("weight", p.data, p.name, "", early=-2)
        for kind, name, array in unsound(self._optimizer.state_dict()):
            self._found("state", array, name, kind, early=-1)

    def finish(self) -> None:
        """The row is over: a norm that is not finite may have been made of finite gradients."""
        self._look_at_sums()
        self._action = None
        if self.finding is not None:
            return
        for p, length in zip(self._parameters, squares(p.grad for p in self._parameters), strict=True):
            if not np.isfinite(length):
                kind = "norm" if verdict(p.grad) == FINITE else "gradient"
                self._found(kind, p.grad, p.name, "sum of squares")

    def _act(self, event: Event) -> None:
        action: Action = event.info["action"]
        if event.phase == "end":
            self._look_at_sums()
            if action.kind in ("W", "REDUCE"):  # sums that no event tells of: what B kept for W, buckets that arrived
                self._look_at_gradients()
            self._action = None
            return
        self._action = action
        executor = event.info["executor"]
        if action == executor.row[0]:
            self.start(executor.steps + 1)
        if self._packed is None:
            self._packed = Packed(self._model, executor.mesh.sizes)
        self._packed.begin()
        self._works.clear()
        batch = event.info["batch"]
        if isinstance(getattr(batch, "step", None), int):
            self._step = batch.step + 1  # of the run, which may have begun before this start of it
            if self.finding is not None and self.finding.order[0] < 0:  # found before a batch was there to ask
                self.finding = replace(self.finding, step=self._step)
        if action.kind == "F" and self.finding is None:
            self._look_at_batch(batch)
            for t in event.info["inputs"]:
                if verdict(t.data) != FINITE:
                    self._found("outside", t.data, "", f"input of stage {action.stage}")

    def _look_at_batch(self, batch: Any) -> None:
        for name, value in _attributes(batch):
            if verdict(value) == BAD:
                numbers = to_host(value)
                first = np.argwhere(np.isnan(numbers) | (numbers == np.inf))[0]
                self._found("data", value, "", name, at=tuple(map(int, first)))

    # -- ops ----------------------------------------------------------------------------------------------------------

    def _op(self, event: Event) -> None:
        info = event.info
        if event.phase == "begin":
            self._ops += 1
            self._works.append(_Work(event.name, info, self._ops))
            if "grad" in info and self.finding is None:
                for grad in _several(info["grad"]):
                    if _verdict_of_gradient(grad) != FINITE:
                        self._found("backward", _array(grad), info["path"], "sum of gradients")
            return
        work = self._works.pop() if self._works else _Work(event.name, info, self._ops)
        if self.finding is not None:
            return
        if "grads" not in info:
            self._look_at_results(work, [*_several(info["output"]), *_new(info)], _given(info))
            return
        node = info["node"]
        for slot, grad, wanted in zip(node.inputs, info["grads"], info["wanted"], strict=True):
            if wanted and grad is not None:
                leaf = info["tape"].leaf(slot)
                if leaf is not None and leaf.is_parameter:
                    self._added.append((leaf, work))
                    self._last[leaf] = work
        self._look_at_results(work, [grad for grad in info["grads"] if grad is not None], _given(info))

    def _look_at_results(self, work: _Work, results: Iterable[Any], inputs: Iterable[Any]) -> None:
        for result in results:
            seen = _verdict_of_gradient(result)
            if seen == FINITE:
                continue
            given = [_array(x) for x in inputs]
            worst = max((verdict(x) for x in given), default=FINITE)
            if worst == BAD:
                odd = next(x for x in given if verdict(x) == BAD)
                self._found("outside", odd, work.info["path"], work.title)
            elif seen == BAD or worst == FINITE:
                kind = "backward" if "grad" in work.info else "forward"
                self._found(kind, _array(result), work.info["path"], work.title, given, number=work.number)
            if self.finding is not None:
                return

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _look_at_sums(self) -> None:
        """The gradients to which the last op's backward was added, unless they have left already."""
        added, self._added = self._added, []
        if self.finding is None:
            for p, work in added:
                if p.touched and p.grad is not None and verdict(p.grad) != FINITE and self.finding is None:
                    self._found("gradient", p.grad, p.name, work.title, number=work.number)

    def _look_at_gradients(self) -> None:
        """Those that are this rank's; what has left may hold already what others gave, of which an arrival tells."""
        left = self._packed.left if self._packed is not None else ()
        for p in self._parameters:
            if self.finding is None and p.touched and p not in left and verdict(p.grad) != FINITE:
                self._found("gradient", p.grad, p.name, "sum over micro-batches")

    # -- messages -----------------------------------------------------------------------------------------------------

    def _message(self, event: Event) -> None:
        assert self._action is not None
        info, verb = event.info, event.name
        if self._action.kind == "STEP" or verb.startswith("wait "):  # in STEP ranks tell whether all is finite
            return
        if event.phase == "begin":
            if verb not in NO_GIFT and not self._is_not_root(verb, info):
                self._give(verb, info)
            return
        result = info["result"]
        in_flight = result is None or type(result) is tuple  # what it brings, an arrival tells
        if self.finding is None and not in_flight and _verdict_of(result, verb, info) != FINITE:
            self._arrived(result, verb, info)

    def _give(self, verb: str, info: Mapping[str, Any]) -> None:
        array = info["array"]
        finite = _verdict_of(array, verb, info) == FINITE
        self.gifts[self._key(verb, info)] = Gift(finite, _largest(array) if finite and verb in SUMS else 0.0)
        bucket = self._bucket(verb, info)
        if finite or self.finding is not None:
            return
        if self._works:
            work = self._works[-1]
            self._look_at_results(work, [array], _given(work.info))
            return
        for p in self._whole:
            if p.touched and p.grad is not None and verdict(p.grad) != FINITE:
                self._found("gradient", p.grad, p.name, "sum over micro-batches")
                return
        if bucket is None:
            self._found("outside", array, self._path, verb)
            return
        p = bucket.sent(_first_odd(array))
        if is_half(array.dtype) and not np.isnan(to_host(array)).any():
            # finite as it is, not as it was rounded for the wire
            self._found("gradient", array, p.name, f"rounding to {array.dtype}", [] if p.grad is None else [p.grad])
            return
        last = self._last.get(p)  # what it was added to is not here any more
        title, number = ("sum over micro-batches", None) if last is None else (last.title, last.number)
        self._found("gradient", array, p.name, title, number=number)

    def _bucket(self, verb: str, info: Mapping[str, Any]) -> Bucket | None:
        """Whose gradients a message is to sum up; None: it is of something else."""
        if verb not in SUMS or self._works or self._packed is None or self._action is None:
            return None
        cut = verb.endswith("reduce_scatter")
        stage = self._action.stage if self._action.kind in ("B", "W") else None
        bucket = self._packed.bucket(info["array"].size, len(info["ranks"]), stage, cut)
        if bucket is not None:
            self._buckets[self._key(verb, info)] = bucket
        return bucket

    @property
    def _path(self) -> str:
        """Of the op at work, else of the part whose weights are brought, else of the module."""
        if self._works:
            path: str = self._works[-1].info["path"]
            return path
        return self._unit or PATH.get()

    def _is_not_root(self, verb: str, info: Mapping[str, Any]) -> bool:
        return verb == "broadcast" and info["ranks"][info["how"][0]] != self.rank

    def _key(self, name: str, info: Mapping[str, Any]) -> str:
        """The same text on all ranks of a message, and of no other message of the row."""
        axis, ranks, peer = info["axis"], info["ranks"], info["peer"]
        if peer < 0:
            return f"{axis} {','.join(map(str, ranks))} #{info['number']}"
        ends = (self.rank, ranks[peer])
        source, dest = ends if "send" in name else ends[::-1]
        return f"{axis} {source} to {dest}, tag {info['how'][1]} #{info['number']}"

    # -- what was found -----------------------------------------------------------------------------------------------

    def _arrived(self, array: Array, verb: str, info: Mapping[str, Any]) -> None:
        op = self._works[-1].title if self._works else ""
        key = self._key(verb, info)
        bucket = self._buckets.get(key)
        if bucket is not None:
            path = bucket.received(_first_odd(array)).name
        else:
            path = self._path or next((p.name for p in self._parameters if _is_part_of(p.grad, array)), "")
        message = {"message": key, "verb": verb, "axis": info["axis"], "site": info["site"]()}
        self._found("message", array, path, op, **message)

    def _found(
        self,
        kind: str,
        array: Array,
        path: str,
        op: str,
        inputs: Iterable[Any] = (),
        *,
        early: int = 0,
        number: int | None = None,
        **more: Any,
    ) -> None:
        if self.finding is not None:
            return
        order = (early, 0, 0, self._ops) if early else self._order(self._ops if number is None else number)
        action = "" if early or self._action is None else str(self._action)
        micro = order[0] if 0 <= order[0] < AFTER else None
        self.finding = Finding(
            kind, self.rank, order, self._step, micro, action, path, op, Range.of(array), ranges(inputs), **more
        )

    def _order(self, number: int) -> tuple[int, int, int, int]:
        action = self._action
        if action is None or action.kind in ("REDUCE", "STEP"):
            return AFTER, 0, 0, number
        if action.kind == "COUNT" or action.micro is None:
            return 0, 0, 0, number
        forward = action.kind in ("LOAD", "F", "RECV_F", "SEND_F")
        return action.micro, 0 if forward else 1, action.stage if forward else -action.stage, number


# -- looking at values ------------------------------------------------------------------------------------------------


def _several(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)


def _array(value: Any) -> Any:
    """What an op was given as an array: a recipe is computed as the gradient buffer gets it, a tensor's array taken."""
    if isinstance(value, Lazy):
        return value.unrounded()
    return value.data if isinstance(value, Tensor) else value


def _verdict_of_gradient(value: Any) -> int:
    return FINITE if value is None else verdict(_array(value))


def _verdict_of(array: Array, verb: str, info: Mapping[str, Any]) -> int:
    """A maximum begins at minus infinity, where a rank has nothing to bring."""
    found = verdict(array)
    return FINITE if found == LOW and verb == "all_reduce" and info["how"][0] == "max" else found


def _given(info: Mapping[str, Any]) -> list[Any]:
    """What an op was given: the inputs of its forward; of its backward the gradient, and what was saved."""
    if "grad" not in info:
        return list(info["inputs"])
    items = info["saved"] if "saved" in info else [t.data for t in info["tensors"]]  # of a recomputed function
    gradients = [grad for grad in _several(info["grad"]) if grad is not None]
    return gradients + [item for item in items if hasattr(item, "dtype") and not is_absent(item)]


def _new(info: Mapping[str, Any]) -> list[Any]:
    """What a forward saves that is neither an input nor minus infinity."""
    known = [id(x) for x in (*info["inputs"], *_several(info["output"]))]
    return [x for x in info["saved"] or () if hasattr(x, "dtype") and id(x) not in known and verdict(x) == BAD]


def _attributes(batch: Any) -> list[tuple[str, Any]]:
    """The arrays of a batch, by name; also those in lists."""
    names = list(getattr(batch, "__dict__", {})) or list(getattr(type(batch), "__slots__", ()))
    found = []
    for name in names:
        value = getattr(batch, name, None)
        items = [(f"{name}[{i}]", item) for i, item in enumerate(value)] if isinstance(value, (list, tuple)) else []
        found += [(name, item) for name, item in (items or [(name, value)]) if hasattr(item, "dtype")]
    return found


def _is_part_of(gradient: Array, array: Array) -> bool:
    """Whether what is not finite in an array is this gradient, which lies in it."""
    return bool(np.may_share_memory(gradient, array)) and verdict(gradient) != FINITE


def _first_odd(array: Array) -> int:
    """The place of the first element that is not finite."""
    return int(np.argmin(np.isfinite(to_host(array).reshape(-1))))


def _largest(array: Array) -> float:
    if not is_inexact(array.dtype) or not array.size:
        return 0.0
    return max(float(array.max()), -float(array.min()))

"""The listener that follows states through a forward pass, op by op, and has ranks compare what should be the same.

Nothing is sent while ops run: all ranks of an axis run the same program, so what is wrong is wrong on all of them, and
each finds it by itself.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from types import FrameType
from typing import Any, NamedTuple

from mpitrain.autograd.carry import Leaf
from mpitrain.autograd.inner import Sketch
from mpitrain.autograd.node import Node
from mpitrain.autograd.recompute import Recompute
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.collectives import Arrow
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.site import site_of
from mpitrain.debug.states import arrows, report
from mpitrain.debug.states.digests import Digests, digest
from mpitrain.debug.states.known import BatchArrays, Known, Place, of_parameter, outside
from mpitrain.debug.states.mixing import Call, Mismatch
from mpitrain.debug.states.table import PICKS, VIEWS, check_shape, rule_of
from mpitrain.events import Event, tell
from mpitrain.nn.module import Boundary
from mpitrain.nn.parameter import Parameter
from mpitrain.pipeline.action import COMPUTE
from mpitrain.spec import INVARIANT, MERGED_AXES, PARTIAL, REPLICATE, State

AXES = ("edp", "ep", "cp", "tp")
"""The axes that are followed.  On pp ranks run different programs."""


class StateChecker:
    """Checks every op of forward passes by rule, and equality of values by digest.

        checker = StateChecker(model.parameters(), mesh)
        with listen(checker):
            executor.step(batch)

    With an executor nothing else is needed: its F begins a forward pass, whose micro-batch is Shard(0) on the data
    axes, Shard(1) on cp and Invariant on tp, and whose inputs from another stage are as the model's boundary says.
    Where F ends, losses leave, or what goes to the next stage, which must be as its boundary says.  Ops outside of F, B
    and W (evaluation, sampling) are not looked at.  A program of its own calls `start`, `finish`, `add_loss` and
    `confirm` itself.

    Args:
        parameters: of the model; their specs say their states.
        mesh: the layout.  Only axes of more than one rank are followed.
        apart: axes along which ranks do not hold the same weights, though specs say so: with a reducer whose workers
            learn apart (`Reducer.apart`).

    Raises:
        StateError: (by the op, `finish` or `confirm`, in whose course it is found) on all ranks of the axis: what is
            wrong, at which line, which message is missing or doubled, and where the value comes from.

    Cost: some tens of microseconds an op, a checksum of what several ranks should hold alike, and one message of 16
        bytes an axis and action.  benchmarks/check_cost.py measures it.
    """

    def __init__(self, parameters: Iterable[Parameter], mesh: Mesh, apart: Iterable[str] = ()) -> None:
        self._digests = {axis: Digests(getattr(mesh, axis)) for axis in AXES if mesh.sizes[axis] > 1}
        self._axes = tuple(self._digests)
        self._names = {axis: "dp" if axis == "edp" and mesh.sizes["ep"] == 1 else axis for axis in AXES}
        self._known: weakref.WeakKeyDictionary[Tensor, Known] = weakref.WeakKeyDictionary()
        self._slots: weakref.WeakKeyDictionary[Tape, dict[int, Known]] = weakref.WeakKeyDictionary()
        self._given: weakref.WeakKeyDictionary[Node, tuple[Known | None, ...]] = weakref.WeakKeyDictionary()
        for p in parameters:
            self._known[p] = replace(of_parameter(p, self._axes), own=frozenset(apart))
        self._batch = BatchArrays(None, self._axes)
        self._begun: list[_Begun] = []
        self._watches = False
        self._mode = mesh.world.mode

    # -- what a program calls -----------------------------------------------------------------------------------------

    def start(self, batch: Any = None) -> None:
        """A pass begins: ops are looked at from here on.

        Args:
            batch: the micro-batch of a forward pass, whose arrays are known from now on.
        """
        self._batch = BatchArrays(batch, self._axes)
        self._begun.clear()
        self._watches = True

    def declare(self, x: Tensor | Array, states: Mapping[str, State], name: str = "a declared value") -> None:
        """Say how a value lies that no op made: an input that is no part of the batch.

        Args:
            x: a leaf, or an array, which is known until the next `start`.
            states: by axis; "dp" is short for edp and ep.  On an axis that is not named, it takes the state of what it
                meets.
            name: for errors.
        """
        known = outside(self._by_axis(states), name)
        if isinstance(x, Tensor):
            self._known[x] = known
        else:
            self._batch.add(x, known)

    def _by_axis(self, states: Mapping[str, State]) -> dict[str, State]:
        """The states on the axes that are followed."""
        atoms = {atom: state for axis, state in states.items() for atom in MERGED_AXES.get(axis, (axis,))}
        return {axis: state for axis, state in atoms.items() if axis in self._axes}

    def enter_stage(self, stage: int, inputs: Sequence[Tensor], boundary: Sequence[Boundary]) -> None:
        """What comes into a stage of a pipeline lies as its boundary says.

        Args:
            stage: its number.
            inputs: leaves.
            boundary: what there is to say of each.
        """
        for x, kind in zip(inputs, boundary, strict=True):
            self.declare(x, kind.states, f"the boundary of stage {stage}")
            known = self._known[x]
            self._note([x.data], filter(known.is_same, self._axes), partial(report.arrival, stage, known))

    def leave_stage(self, stage: int, outputs: Sequence[Tensor], boundary: Sequence[Boundary]) -> None:
        """What a stage hands on to the next: it must lie as the next one's boundary says.

        Raises:
            StateError: it is in another state.
        """
        for y, kind in zip(outputs, boundary, strict=True):
            known = self._known.get(y)
            for axis, state in self._by_axis(kind.states).items():
                if known is not None and state not in known.states.get(axis, (state,)):
                    raise report.boundary_error(known, stage, state, axis, self._names[axis])

    def states(self, x: Tensor) -> dict[str, State]:
        """The states of a value by axis, as far as they are known and certain."""
        known = self._known.get(x)
        return {} if known is None else {axis: found[0] for axis, found in known.states.items() if len(found) == 1}

    def finish(self, loss: Tensor) -> None:
        """The loss leaves: Invariant on tp, where all ranks hold it, Partial on axes over which tokens are divided.

        Raises:
            StateError: it is in another state.
        """
        self._watches = False
        known = self._known.get(loss)
        if known is None:
            return
        for axis, found in known.states.items():
            if (INVARIANT if axis == "tp" else PARTIAL) not in found:
                raise report.loss_error(known, axis, self._names[axis])

    def add_loss(self, name: str, loss: Tensor) -> None:
        """A loss besides leaves: what this rank's own tokens add to it.

        So it is Partial on axes over which tokens are divided; on tp as well where the stream is cut there, else all
        ranks hold it, Invariant.

        Args:
            name: of the part of the model that added it.
            loss: the sum over the rows that are here.

        Raises:
            StateError: it is in another state.
        """
        known = self._known.get(loss)
        if known is None:
            return
        for axis, found in known.states.items():
            is_summed = known.made is not None and known.made.op == "all_reduce" and axis == "tp"
            if PARTIAL not in found and (axis != "tp" or INVARIANT not in found or is_summed):
                raise report.auxiliary_error(name, known, axis, self._names[axis])

    def confirm(self) -> None:
        """Have the ranks of each axis compare what they should hold alike; collective over each axis.

        Raises:
            StateError: something differs; the first such value is named, on all ranks of the axis.
        """
        for axis, digests in self._digests.items():
            odd = digests.confirm()
            if odd is not None:
                raise report.odd_error(odd, self._names[axis])

    # -- what a listener is told --------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        if not self._axes:
            return
        if event.kind == "action":
            if event.info["action"].kind in COMPUTE:
                self._action(event.phase, event.info)
        elif event.kind == "op" and self._watches:
            if event.info["function"] is Recompute:
                self._recompute(event.phase, event.info)
            elif "node" in event.info:
                begins = event.phase == "begin"
                self._mode.within = event.name if begins and issubclass(event.info["function"], Arrow) else ""
                if not begins:
                    self._went_back(event.info)
            elif event.phase == "begin":
                self._begin(event.info, _site())
            else:
                self._end(event.info)

    def _action(self, phase: str, info: Mapping[str, Any]) -> None:
        """F, B or W of the executor."""
        kind, _, stage, _ = info["action"]
        if phase == "begin":
            self.start(info["batch"])
            if kind == "F":
                self.enter_stage(stage, info["inputs"], info["boundary"])
            return
        self._watches = False
        if kind == "F" and info["output"] is not None:
            self.finish(info["output"])
        if kind == "F":
            for name, loss, _ in info["auxiliary"]:
                self.add_loss(name, loss)
        if kind == "F" and info["outputs"] and info["output"] is None:
            self.leave_stage(stage, info["outputs"], info["executor"].model.boundary(stage + 1, info["batch"]))
        self.confirm()

    def _begin(self, info: Mapping[str, Any], site: str) -> None:
        """Judge an op before it computes or sends anything."""
        function, inputs, static = info["function"], info["tensors"], info["static"]
        call = Call(function, inputs, static)
        place = Place(call.title, site, info["path"])
        known = tuple([self._look_up(x) for x in inputs])
        sends_over = arrows.axes_of(function, static)
        states: dict[str, tuple[State, ...]] = {}
        origins: dict[str, Place | str] = {}
        own = set()
        for axis in self._axes:
            before = [None if x is None else x.states.get(axis) for x in known]
            arrow = function if axis in sends_over else None
            try:
                after = _judge(call, before, arrow)
            except Mismatch as wrong:
                raise report.mismatch_error(wrong, call, place, axis, self._names[axis], known) from None
            if not after:
                continue
            states[axis] = after
            origins[axis] = place
            if arrow is None:
                kept = next((x for x in known if x is not None and _is_kept(x.states.get(axis), after)), None)
                if kept is not None:
                    origins[axis] = kept.origins[axis]
                picks = call.function in PICKS and (len(before) == 1 or before[1] is None)
                if after == (REPLICATE,) and (picks or any(x is not None and axis in x.own for x in known)):
                    own.add(axis)
        for p, x in zip(inputs, known, strict=True):
            if isinstance(p, Parameter) and x is not None and x.version != p.version:  # replicas, after each update
                x.version = p.version
                self._note([p.data], filter(x.is_same, self._axes), partial(report.weight, p.name, x))
        self._begun.append(_Begun(inputs, call, known, Known(states, origins, place, frozenset(own))))
        self._mode.within = self._in_words(place, known, states, sends_over) if sends_over else ""

    def _in_words(
        self,
        place: Place,
        known: Sequence[Known | None],
        states: Mapping[str, tuple[State, ...]],
        sends_over: Sequence[str],
    ) -> str:
        """An op that sends, for reports about its messages: `all_reduce in blocks.0.mlp: Partial -> Invariant`."""
        title = f"{place.op} in {place.path}" if place.path else place.op
        for axis in sends_over:
            before = next((x.states[axis] for x in known if x is not None and axis in x.states), ())
            after = states.get(axis, ())
            if before and after:
                return f"{title}: {before[0]} -> {after[0]}"
        return title

    def _end(self, info: Mapping[str, Any]) -> None:
        """Give the outputs the states that were found, and note digests of what should be the same everywhere."""
        while self._begun:
            inputs, call, known, result = self._begun.pop()
            if inputs is info["tensors"]:  # else an op that never ended: somebody caught its error
                break
        else:
            return
        self._mode.within = ""
        outputs, function = info["outputs"], info["function"]
        if not issubclass(function, Arrow):
            self._check_shape(call, known, result, outputs)
        for y in outputs:
            self._known[y] = result
        tape = outputs[0].tape
        if tape is not None and not isinstance(tape, Sketch):
            node = tape.nodes[-1]
            slots = self._slots.setdefault(tape, {})
            slots.update((slot, x) for slot, x in zip(node.inputs, known, strict=True) if x is not None and slot >= 0)
            slots.update(dict.fromkeys(node.outputs, result))
        if function not in VIEWS:
            arrays = [y.data for y in outputs]
            self._note(arrays, filter(result.is_same, self._axes), partial(report.value, result))

    def _check_shape(self, call: Call, known: Sequence[Known | None], result: Known, outputs: Sequence[Tensor]) -> None:
        """An op without a rule works element by element, or nothing can be said of cut values."""
        for axis in self._axes:
            before = [None if x is None else x.states.get(axis, (None,))[0] for x in known]
            try:
                check_shape(call, before, [y.shape for y in outputs])
            except Mismatch as wrong:
                assert result.made is not None
                raise report.mismatch_error(wrong, call, result.made, axis, self._names[axis], known) from None

    def _recompute(self, phase: str, info: Mapping[str, Any]) -> None:
        """A recomputed function is seen op by op, both times; what it was given is known the second time, too."""
        node: Node | None = info.get("node")
        if node is not None and phase == "begin":
            given = self._given.pop(node, None)
            if given is None:  # recorded before anybody looked, as is all that this walk has still to come to
                self._watches = False
            else:
                self._known.update((t, x) for t, x in zip(info["tensors"], given, strict=True) if x is not None)
        elif node is None and phase == "end" and info["outputs"]:
            tape: Tape = info["outputs"][0].tape
            self._given[tape.nodes[-1]] = tuple([self._look_up(t) for t in info["tensors"]])

    def _went_back(self, info: Mapping[str, Any]) -> None:
        """Note digests of the gradients that should be the same everywhere."""
        node: Node = info["node"]
        slots = self._slots.get(info["tape"], {})
        result = slots.get(node.outputs[0])
        if result is None:  # recorded before anybody looked
            return
        for slot, grad in zip(node.inputs, info["grads"], strict=True):
            x = slots.get(slot)
            if x is not None and grad is not None:
                self._note([grad], filter(x.has_same_gradient, self._axes), partial(report.gradient, result, x))

    def _look_up(self, x: Any) -> Known | None:
        """What is known of an input."""
        if isinstance(x, Tensor):
            known = self._known.get(x.stands_for if isinstance(x, Leaf) else x)
            if known is not None or x.tape is not None:
                return known
            x = x.data
        return self._batch.find(x) if getattr(x, "ndim", 0) else None

    def _note(self, values: Sequence[Any], axes: Iterable[str], what: Callable[[str], str]) -> None:
        """Add the digest of some values to the lists of these axes."""
        total = None
        for axis in axes:
            if total is None:
                total = 0
                for value in values:
                    total = digest(value, total)
            self._digests[axis].add(total, partial(what, axis))


def _site() -> str:
    """Where the op was called of which a listener is told just now; whoever hands events on does not count."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not tell.__code__:
        frame = frame.f_back
    return site_of(frame)


class _Begun(NamedTuple):
    """An op that runs: its inputs, what is known of them, and what will be known of its outputs."""

    inputs: Sequence[Any]
    call: Call
    known: tuple[Known | None, ...]
    result: Known


def _judge(call: Call, before: Sequence[tuple[State, ...] | None], arrow: type[Arrow] | None) -> tuple[State, ...]:
    """The states in which the outputs may be on one axis; () if nothing is known.

    Args:
        call: the op.
        before: the states in which each input may be.
        arrow: the op, if it sends over this axis.

    Raises:
        Mismatch: the inputs are in no states in which the op can be.
    """
    if arrow is None and not any(before):
        return ()
    rule = rule_of(call.function) if arrow is None else partial(arrows.follow, arrow)
    found: dict[State, None] = {}
    wrong = None
    for states in product(*[each or (None,) for each in before]):
        try:
            after = rule(call, states)
        except Mismatch as mismatch:
            wrong = wrong or mismatch
            continue
        possible = after if isinstance(after, tuple) else (after,)
        found.update((state, None) for state in possible if state is not None)
    if wrong is not None and not found:
        raise wrong
    return tuple(found)


def _is_kept(before: tuple[State, ...] | None, after: tuple[State, ...]) -> bool:
    """Whether a value brought its state along; the dim of a Shard may have moved."""
    return before is not None and before[0].name == after[0].name

"""Recomputation: a part of the model whose inner values are dropped, and made again on the way back.

    y = recompute(block, x)                          # as y = block(x), to the last bit, with less that waits

What backward needs of a part is most of what its ops make.  A recomputed part keeps its inputs instead, and runs a
second time when backward comes to it:

    forward     %9 = recompute(%3, %5; block)        fn runs under a sketch, which notes what it uses and keeps nothing
    backward    fn runs again on a tape of its own, from the inputs that were kept, and that tape is walked in place

On the outer tape it is one node.  Its inputs are what the function uses and did not make: the tensors it was given,
those that it finds by itself (in a closure, in an object), and parameters.  The tape of the second forward is walked
inside of the outer walk, so parameters become final, listeners hear of ops, and a backward in two halves parts itself
as they would without.

The function must be pure: given the same inputs it does the same again, messages included, and it leaves nothing
behind.  What must happen once a pass (a counter, a running mean) asks `recomputing()`.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; Griewank and Walther 2000,
ACM TOMS 26(1), algorithm 799.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpitrain.autograd.arguments import Arguments, tensors_in
from mpitrain.autograd.function import Function
from mpitrain.autograd.inner import Inner, Sketch
from mpitrain.autograd.lazy import Lazy
from mpitrain.autograd.node import Node
from mpitrain.autograd.tape import PATH, TAPE, Seed, Slot, Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, to_host
from mpitrain.errors import GraphError
from mpitrain.events import OP_LISTENERS, Event, tell

R = TypeVar("R")

RECOMPUTING: ContextVar[bool] = ContextVar("mpitrain.recomputing", default=False)
"""Whether what runs just now is a second forward."""

CHECKS_PURITY: ContextVar[bool] = ContextVar("mpitrain.checks_purity", default=False)
"""Whether first forwards note a checksum of what they give, which the second must give as well."""


def recomputing() -> bool:
    """Whether this is a second forward: what counts passes, or gathers statistics of them, must not do so again."""
    return RECOMPUTING.get()


def recompute(fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Call a function, keep its inputs only, and call it again when backward comes to it.

    Args:
        fn: any callable that is pure: a module, a method, a closure.  It may use tensors that it is not given, and
            return anything; what it makes and others use must be returned, in tuples, lists or dicts if need be.
        args, kwargs: handed on.  Tensors among them, also in tuples, lists and dicts, are what is kept.

    Returns:
        What `fn` returns; its tensors are then values of the tape that records.  Where none does this is a plain call,
        and so it is in the first forward of another recomputed function, which keeps nothing anyway.

    Raises:
        GraphError: (by the walk back) the second call did not do the same as the first.

    Cost: a second forward with its messages, in backward; in memory the bytes of the inputs.
    """
    tape = TAPE.get()
    if tape is None or isinstance(tape, Sketch):
        return fn(*args, **kwargs)
    path = PATH.get()
    arguments = Arguments(args, kwargs)
    given = arguments.tensors
    arrays = tuple([t.data for t in given])
    listeners = OP_LISTENERS.get()
    info: dict[str, Any] = {}
    if listeners:
        info = {"path": path, "function": Recompute, "inputs": arrays, "tensors": given, "static": {}}
        tell(listeners, Event("op", "begin", Recompute.title(), info))
    sketch = Sketch()
    with sketch:
        returned = fn(*args, **kwargs)
    leaves, outputs = tuple(sketch.used), _outputs(sketch, returned)
    sketch.close()
    if outputs:
        tape.record(Recompute, leaves, outputs, arrays, {}, path)
        node = tape.nodes[-1]
        assert isinstance(node, Recomputed)
        node.fill(fn, arguments, tape, leaves, outputs)
        if isinstance(tape, Inner):  # what leaves an inner function by another way leaves this one, too
            tape.handed_out += sketch.handed_out
    if listeners:
        made = tuple([t.data for t in outputs])
        info |= {"output": made, "saved": arrays, "outputs": tuple(outputs)}
        tell(listeners, Event("op", "end", Recompute.title(), info))
    arguments.forget()
    return returned


class Recomputed(Node):
    """A recomputed function on the tape, and all that is needed to call it again.

    It saves the arrays of the tensors that it was given.

    Attributes:
        name, fn, arguments: of the call.
        places: of the tensors among the arguments on the outer tape; None: they are not on it.
        weights: parameters that it uses, with the arrays and the counts of writes that they had; without an array
            where it comes and goes.
        captured: arrays of the tensors that it uses and was not given; it keeps them alive.
        checksums: of its outputs, if they were asked for.
        again: the tape of the second forward, from its begin to the end of the walk; None before and after.
    """

    name: str
    fn: Callable[..., Any]
    arguments: Arguments
    places: tuple[Slot | None, ...]
    weights: tuple[_Binding, ...]
    captured: tuple[Array, ...]
    checksums: tuple[int, ...] | None

    def __init__(self) -> None:
        self.again: Inner | None = None
        self._leaves: list[_Leaf] = []  # of that tape

    def fill(
        self, fn: Callable[..., Any], arguments: Arguments, tape: Tape, leaves: Sequence[Any], outputs: Sequence[Tensor]
    ) -> None:
        """What the first forward has shown."""
        self.fn, self.arguments, self.name = fn, arguments, _name(fn)
        given = set(arguments.tensors)
        self.places = tuple([tape.slot(t) for t in arguments.tensors])
        self.weights = tuple([(p, None if p.visits else p.data, p.writes) for p in leaves if p.is_parameter])
        self.captured = tuple([t.data for t in leaves if t not in given and not t.is_parameter])
        self.checksums = tuple([_checksum(t.data) for t in outputs]) if CHECKS_PURITY.get() else None

    def details(self) -> list[str]:
        return [self.name]

    def held(self, packed: bool) -> Iterator[Any]:
        yield from super().held(packed)
        if self.saved is not None:
            yield from self.captured
        if self.again is not None:
            yield from self.again.held()

    # -- the way back -------------------------------------------------------------------------------------------------

    def walk(self, tape: Tape, grad: Any, half: str) -> Iterator[tuple[Any, ...]]:
        firsts = dict.fromkeys(self.firsts)  # parameters that were used before are not final here
        seeds: list[Seed] = []
        if grad is not None and half != "weights":
            seeds = self._run_again(tape, grad if type(grad) is tuple else (grad,))
        self._forget()
        again = self.again
        if again is not None:
            for leaf in self._leaves:
                tape.lend(leaf.outer, again, leaf.inner)
            if half == "inputs":
                again.backward_inputs(seeds)
            else:
                for final in again.backward_weights() if half else again.backward(seeds):
                    now = tuple([p for p in final if p in firsts])
                    for p in now:
                        del firsts[p]
                    yield now
            for leaf in self._leaves:
                tape.take_back(leaf.outer, again, leaf.tensor)
            # For the other half only what weights need stays.
            self._leaves = [leaf for leaf in self._leaves if leaf.tensor.weight_side and half == "inputs"]
            self.again = again if half == "inputs" else None
        if half != "inputs":
            yield tuple(firsts)

    def _run_again(self, tape: Tape, grads: tuple[Any, ...]) -> list[Seed]:
        """The second forward; the seeds for its tape."""
        leaves, args, kwargs = self.arguments.again(tape.saved_of(self))
        given = {place.number: t for place, t in zip(self.places, leaves, strict=True) if place is not None}
        again = self.again = Inner(tape, given)
        listeners = OP_LISTENERS.get()
        name = f"{Recompute.title()}.backward"
        info: dict[str, Any] = {}
        if listeners:
            info = {"path": self.path, "function": Recompute, "grad": grads, "wanted": self.wanted}
            info |= {"tape": tape, "node": self, "tensors": leaves}
            tell(listeners, Event("op", "begin", name, info))
        path, second = PATH.set(self.path), RECOMPUTING.set(True)
        try:
            with self._own_weights(), again:
                returned = self.fn(*args, **kwargs)
        finally:
            RECOMPUTING.reset(second)
            PATH.reset(path)
        again.close()
        outputs = _outputs(again, returned)
        again.handed_out = []  # they know their tape: a cycle, which would keep all of it alive
        self._compare(again, outputs)
        slots = dict(zip(leaves, self.places, strict=True))
        for t, slot in again.leaves():
            if not t.is_parameter:
                place = slots[t] if t in slots else tape.slot(t)
                if place is None:
                    raise self._impure(f"used a value of shape {t.shape} that it did not use at first")
                self._leaves.append(_Leaf(t, slot, place.number))
        if listeners:
            tell(listeners, Event("op", "end", name, {**info, "grads": (None,) * len(self.inputs)}))
        seeds: list[Seed] = []
        for t, grad in zip(outputs, grads, strict=True):
            place = again.slot(t)
            assert place is not None
            if grad is not None:
                seeds.append((place, grad.array() if isinstance(grad, Lazy) else grad))
        return seeds

    def _forget(self) -> None:
        """Let go of all that only the second forward needs."""
        self.saved = None
        self.captured = self.weights = ()
        self.fn, self.arguments = recompute, Arguments((), {})

    @contextmanager
    def _own_weights(self) -> Iterator[None]:
        """Parameters have the arrays of the first forward: some pipelines exchange them in between."""
        now = [(p, None if p.visits else p.data, p.writes) for p, _, _ in self.weights]
        _bind(self.weights)
        try:
            yield
        finally:
            _bind(now)

    def _compare(self, again: Inner, outputs: Sequence[Tensor]) -> None:
        """Refuse a second forward that was not the first one once more."""
        made = tuple([(t.shape, t.dtype) for t in outputs])
        if made != self.kinds:
            raise self._impure(f"made {_kinds_text(made)}, at first {_kinds_text(self.kinds)}")
        if {t for t, _ in again.leaves() if t.is_parameter} != {p for p, _, _ in self.weights}:
            raise self._impure("used other parameters than at first")
        if self.checksums is not None:
            for number, (t, checksum) in enumerate(zip(outputs, self.checksums, strict=True)):
                if _checksum(t.data) != checksum:
                    raise self._impure(f"gave other numbers than at first, in value {number} of shape {t.shape}")

    def _impure(self, what: str) -> GraphError:
        where = f"{self.path} ({self.name})" if self.path else self.name
        return GraphError(
            f"{where}, called again in backward, {what}: it is not a pure function of its inputs.\n"
            "Dropout from np.random, a counter, or an array that was written in between may be why.  Draw from a"
            " stream that is named by its place, and ask recomputing() of mpitrain.autograd.recompute before you count."
        )


class Recompute(Function):
    """The op under which tapes and events know a recomputed function.  It computes nothing itself."""

    node_type = Recomputed


class _Leaf(NamedTuple):
    """A tensor that a second forward uses: its slots on the inner and on the outer tape."""

    tensor: Tensor
    inner: int
    outer: int


def _name(fn: Callable[..., Any]) -> str:
    """`block` for a module of class Block or a method of one; else the function's own name."""
    owner = getattr(fn, "__self__", None)
    own = getattr(fn, "__name__", None)
    return own if owner is None and own is not None else type(fn if owner is None else owner).__name__.lower()


_Binding = tuple[Any, Array | None, Any]  # a parameter, its array, the count of writes into it


def _bind(bindings: Iterable[_Binding]) -> None:
    for parameter, data, writes in bindings:
        parameter.writes = writes
        if data is not None:
            parameter.data = data


def _outputs(tape: Inner, returned: Any) -> list[Tensor]:
    """What a function that ran on a tape has made for others: each value once, what it handed out at the end."""
    return [t for t in dict.fromkeys((*tensors_in(returned), *tape.handed_out)) if t.tape is tape]


def _checksum(array: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(to_host(array)).reshape(-1).view(np.uint8).data)


def _kinds_text(kinds: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{shape} {dtype}" for shape, dtype in kinds) or "nothing"

"""What happens, told to whoever listens.

Events are emitted at exactly four places: the executor (actions), `Function.apply` and `Tape.backward` (ops), the
`Communicator` (messages), and `disk` (operations on files).  Timeline, recorder, stepper and ledgers are listeners, so
no parallel algorithm has a line about debugging.  A listener is called in the rank's own thread, before the work
(`begin`) and after it (`end`): one that waits is a breakpoint.

Listeners belong to a context (`contextvars`), hence to one rank also where ranks are threads.  Emission points read

    listeners = LISTENERS.get()
    if listeners:
        tell(listeners, Event(...))

so that with nobody listening an event costs one look-up and is not even built.  Ops are by far the most: who can do
without them listens with `ops=False`, and then they cost nothing either (OP_LISTENERS).

Who only wants to know of every action and message when it was is a *witness*: told once, when it is over, by a call
with what is at hand (WITNESSES).  Where ranks share cores nothing is in the caches when an action ends or a message has
arrived, and to build two events of it and hand them on takes 30 us; a witness needs a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, Protocol


class Event(NamedTuple):
    """One thing that begins or ends on one rank.

    kind   "action" | "op" | "message" | "arrival": what a message brought that did not wait for it, whoever waited |
           "unit": weights of a part of the model that come when it works, and go | "copy": what the I/O thread of a
           store moved, told by the rank when it next has to do with the store | "disk": an operation on a file of a
           checkpoint; of a save in the background told in the thread that does it
    phase  "begin" | "end"; an arrival and a copy only end
    name   `F3@0`, `gelu`, `gelu.backward`, `all_reduce`
    info   what there is to know, by kind: module path, shapes, axis, bytes, arrays (references, never copies)
    """

    kind: str
    phase: str
    name: str
    info: Mapping[str, Any]


Listener = Callable[[Event], None]


class Witness(Protocol):
    """Who is told of actions and messages when they are over, and by events of all else.

    Times are those of `time.perf_counter_ns`; arrays are not for keeping.
    """

    def __call__(self, event: Event) -> None:
        """Hear of an event that is neither an action nor a message, and of no op unless it asks (`hear_ops`)."""

    def row_begins(self, executor: Any) -> None:
        """A row of actions begins."""

    def action(self, action: Any, step: int, began: int) -> None:
        """An action is over."""

    def row_ended(self, reports: Sequence[Any]) -> None:
        """A row has come to its end, and its steps with these reports."""

    def message(
        self, axis: Any, verb: str, number: int, began: int, a: Any, how: Sequence[Any], peer: int, nbytes: float
    ) -> None:
        """A call of the door is over, or a wait; the arguments are those of `Communicator._info`."""

    def arrival(self, axis: Any, verb: str, number: int, how: Sequence[Any], peer: int) -> None:
        """What a call that did not block brought is there."""


LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("mpitrain.listeners", default=())
"""Who hears of what is neither an op, nor an action or a message."""

STEP_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("mpitrain.step_listeners", default=())
"""Who hears of actions and messages: the same, without witnesses."""

WITNESSES: ContextVar[tuple[Witness, ...]] = ContextVar("mpitrain.witnesses", default=())
"""Who is told of actions and messages when they are over."""

OP_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("mpitrain.op_listeners", default=())
"""Who hears of ops."""


def tell(listeners: tuple[Listener, ...], event: Event) -> None:
    """Give one event to each listener, in the order in which they began to listen."""
    for listener in listeners:
        listener(event)


@contextmanager
def listen(listener: Listener, ops: bool = True) -> Iterator[None]:
    """Call `listener` with every event of this rank while the block runs.

    Args:
        listener: comes after those that listen already.
        ops: whether it hears of ops, too; it may change its mind (`hear_ops`).
    """
    with _changed():
        join(listener, ops)
        yield


@contextmanager
def attest(witness: Witness) -> Iterator[None]:
    """Have a witness while the block runs."""
    with _changed():
        WITNESSES.set((*WITNESSES.get(), witness))
        join(witness, ops=False)
        yield


def join(listener: Listener, ops: bool = True) -> None:
    """Call `listener` with every event of this context from here on."""
    _listen((*LISTENERS.get(), listener))
    hear_ops(listener, ops)


def leave(listener: Listener) -> None:
    """The end of `join`, or of `attest`."""
    hear_ops(listener, False)
    WITNESSES.set(tuple(one for one in WITNESSES.get() if one is not listener))
    _listen(tuple(one for one in LISTENERS.get() if one is not listener))


def hear_ops(listener: Listener, on: bool) -> None:
    """Tell one who listens of ops from here on, or no more."""
    hear = {id(one) for one in OP_LISTENERS.get()} - {id(listener)} | ({id(listener)} if on else set())
    OP_LISTENERS.set(tuple(one for one in LISTENERS.get() if id(one) in hear))


@contextmanager
def alone(*listeners: Listener) -> Iterator[None]:
    """Tell these of every event while the block runs, and nobody else but those who must not miss any (`hears_all`)."""
    always = tuple(one for one in LISTENERS.get() if getattr(one, "hears_all", False))
    with _changed():
        WITNESSES.set(())
        _listen((*always, *listeners))
        OP_LISTENERS.set(listeners)
        yield


def _listen(listeners: tuple[Listener, ...]) -> None:
    """From here on these are who listens."""
    LISTENERS.set(listeners)
    witnesses = {id(one) for one in WITNESSES.get()}
    STEP_LISTENERS.set(tuple(one for one in listeners if id(one) not in witnesses))


@contextmanager
def _changed() -> Iterator[None]:
    """After the block all hear again who heard before."""
    variables: tuple[ContextVar[Any], ...] = (LISTENERS, STEP_LISTENERS, OP_LISTENERS, WITNESSES)
    tokens: list[Token[Any]] = [variable.set(variable.get()) for variable in variables]
    try:
        yield
    finally:
        for variable, token in zip(variables, tokens, strict=True):
            variable.reset(token)

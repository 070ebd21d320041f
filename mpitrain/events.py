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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


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

LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("mpitrain.listeners", default=())
"""Who hears of all that is no op."""

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
    tokens = LISTENERS.set((*LISTENERS.get(), listener)), OP_LISTENERS.set(OP_LISTENERS.get())
    hear_ops(listener, ops)
    try:
        yield
    finally:
        LISTENERS.reset(tokens[0])
        OP_LISTENERS.reset(tokens[1])


def join(listener: Listener, ops: bool = True) -> None:
    """Call `listener` with every event of this context from here on."""
    LISTENERS.set((*LISTENERS.get(), listener))
    hear_ops(listener, ops)


def leave(listener: Listener) -> None:
    """The end of `join`."""
    hear_ops(listener, False)
    LISTENERS.set(tuple(one for one in LISTENERS.get() if one is not listener))


def hear_ops(listener: Listener, on: bool) -> None:
    """Tell one who listens of ops from here on, or no more."""
    hear = {id(one) for one in OP_LISTENERS.get()} - {id(listener)} | ({id(listener)} if on else set())
    OP_LISTENERS.set(tuple(one for one in LISTENERS.get() if id(one) in hear))


@contextmanager
def alone(*listeners: Listener) -> Iterator[None]:
    """Tell these, and nobody else, of every event while the block runs."""
    tokens = LISTENERS.set(listeners), OP_LISTENERS.set(listeners)
    try:
        yield
    finally:
        LISTENERS.reset(tokens[0])
        OP_LISTENERS.reset(tokens[1])

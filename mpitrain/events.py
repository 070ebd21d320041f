"""What happens, told to whoever listens.

Events are emitted at exactly four places: the executor (actions), `Function.apply` and `Tape.backward` (ops), the
`Communicator` (messages), and `disk` (operations on files).  Timeline, recorder, stepper and ledgers are listeners, so
no parallel algorithm has a line about debugging.  A listener is called in the rank's own thread, before the work
(`begin`) and after it (`end`): one that waits is a breakpoint.

Listeners belong to a context (`contextvars`), hence to one rank also where ranks are threads.  Emission points read

    listeners = LISTENERS.get()
    if listeners:
        tell(listeners, Event(...))

so that with nobody listening an event costs one look-up and is not even built.
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


def tell(listeners: tuple[Listener, ...], event: Event) -> None:
    """Give one event to each listener, in the order in which they began to listen."""
    for listener in listeners:
        listener(event)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call `listener` with every event of this rank while the block runs."""
    token = LISTENERS.set((*LISTENERS.get(), listener))
    try:
        yield
    finally:
        LISTENERS.reset(token)

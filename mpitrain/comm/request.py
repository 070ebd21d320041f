"""A message in flight, as its owner sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.comm.transport import Pending


class Request:
    """What the non-blocking verbs of a `Communicator` return.

    The arrays of the message (also those that were passed in) belong to it until `wait` returned or `test` said True:
    do not write them, and do not read the result.  In deterministic mode and for halves a sum makes progress only
    inside `test`, `wait` and later calls of `iall_reduce`.
    """

    __slots__ = ("_finish", "_pending", "_result", "_wait")

    def __init__(self, pending: Pending, finish: Callable[[], Any], wait: Callable[[Pending], None]) -> None:
        self._pending: Pending | None = pending
        self._finish = finish
        self._wait = wait
        self._result: Any = None

    @classmethod
    def done(cls, result: Any) -> Request:
        """A message that was complete when it started."""
        request = cls.__new__(cls)
        request._pending = None
        request._result = result
        return request

    def test(self) -> bool:
        """True once the message is complete; never blocks.

        Raises:
            CommError: it cannot complete.
        """
        if self._pending is not None and self._pending.test():
            self._complete()
        return self._pending is None

    def wait(self) -> Any:
        """Block until the message is complete.

        Returns:
            What the verb without `i` returns: the sum, the received array, None for a send.  The same again when called
            again.

        Raises:
            CommError: it cannot complete.
        """
        if not self.test():
            assert self._pending is not None
            self._wait(self._pending)
            self._complete()
        return self._result

    def _complete(self) -> None:
        self._pending = None
        self._result = self._finish()

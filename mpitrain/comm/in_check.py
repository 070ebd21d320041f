"""Messages in flight that are checked: what non-blocking calls return in checked mode is made of these.

    Both(check, message)     complete when both are; the check speaks first
    Later(check, post)       the message is not even posted before its check is complete
    Untouched(message, a)    the array must be at the end what it was at the beginning

Why `Later`?  Open MPI 5.0 writes beyond the end of a receive buffer when a longer message meets it in a non-blocking
call, and dies.  So what might not fit must not reach it.  A message that waits for its check moves on whenever its rank
waits for anything (`Mode.unfinished`), so a call that has returned still holds up nobody.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable

import numpy as np

from mpitrain.backend import to_host
from mpitrain.comm.site import call_site
from mpitrain.comm.transport import Array, Pending, Unfinished
from mpitrain.errors import CommError


class Both:
    """A message that is complete when `check` and then `message` are: a `Pending`."""

    def __init__(self, check: Pending, message: Pending) -> None:
        self._check = check
        self._message = message

    def test(self) -> bool:
        """True once both are complete.

        Raises:
            CollectiveMismatch: the check fails; whatever the message did then is of no interest.
        """
        return self._check.test() and self._message.test()

    def wait(self) -> None:
        """Block until both are complete."""
        self._check.wait()
        self._message.wait()


class Later:
    """A message that is posted when its check is complete: a `Pending`, and one of a rank's unfinished ones.

    Args:
        check: of the message.
        post: posts it.
        queue: of messages that must be posted in this order on all ranks; this one joins it.
        unfinished: where this object stands until it is posted, so that whoever waits can `advance` it.
    """

    def __init__(
        self, check: Pending, post: Callable[[], Pending], queue: deque[Later], unfinished: list[Unfinished]
    ) -> None:
        self._check = check
        self._post = post
        self._queue = queue
        self._unfinished = unfinished
        self._message: Pending | None = None
        self._error: BaseException | None = None
        queue.append(self)
        unfinished.append(self)

    def advance(self) -> None:
        """Post this message and those before it whose checks are complete; never blocks.

        Raises:
            CollectiveMismatch: a check fails.  Its message is given up.
        """
        while self in self._queue and self._queue[0]._has_left():
            pass

    def _has_left(self) -> bool:
        """Of the first of the queue: post it, unless its check is still open."""
        try:
            if not self._check.test():
                return False
            self._message = self._post()
        except BaseException as error:
            self._error = error
            raise
        finally:
            if self._message is not None or self._error is not None:
                self._queue.remove(self)
                self._unfinished.remove(self)
        return True

    def test(self) -> bool:
        """True once the message is complete."""
        self.advance()
        if self._error is not None:
            raise self._error
        return self._message is not None and self._message.test()

    def wait(self) -> None:
        """Block until the message is complete."""
        while self in self._queue:
            self._queue[0]._check.wait()
            self._queue[0]._has_left()
        if self._error is not None:
            raise self._error
        assert self._message is not None
        self._message.wait()


class Untouched:
    """A message whose array must not be written while it is in flight: a `Pending` that looks at the end."""

    def __init__(self, message: Pending, a: Array, text: str) -> None:
        """`text`: what to say if the array was written."""
        self._message = message
        self._a = a
        self._digest = self._digest_now()
        self._text = text

    def test(self) -> bool:
        """True once the message is complete.

        Raises:
            CommError: the array is not what it was.
        """
        if not self._message.test():
            return False
        self._look()
        return True

    def wait(self) -> None:
        """Block until the message is complete."""
        self._message.wait()
        self._look()

    def _look(self) -> None:
        if self._digest_now() != self._digest:
            raise CommError(f"{self._text} (found at {call_site()}).")

    def _digest_now(self) -> int:
        return zlib.crc32(to_host(self._a).reshape(-1).view(np.uint8).data)

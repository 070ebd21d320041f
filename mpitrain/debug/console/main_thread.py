"""The main thread, which reads the keyboard and hears signals, while something runs in other threads.

main = MainThread(interrupted)
main.serve(run)                    in the main thread: runs it in a thread, and does what others ask for meanwhile
main.do(lambda: input("> "))       in any of those threads: is done in the main one, and waited for
"""

from __future__ import annotations

import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

_LOOK = 0.2  # seconds between looks for signals


class MainThread:
    """Does in the thread that made it what other threads ask for.

    Args:
        interrupted: called at a Ctrl-C while nothing was asked for, with its number since something last was.
    """

    def __init__(self, interrupted: Callable[[int], None]) -> None:
        self._interrupted = interrupted
        self._ident = threading.get_ident()
        self._inbox: SimpleQueue[Callable[[], bool]] = SimpleQueue()
        self._busy = False
        self._bells = 0

    def serve(self, run: Callable[[], Any]) -> Any:
        """Run something in a thread of its own, in this context, and do meanwhile what is asked for; what it returns.

        A Ctrl-C is a KeyboardInterrupt of what is being done, if something is.
        """
        context = contextvars.copy_context()
        ends: list[tuple[Any, BaseException | None]] = []

        def body() -> None:
            ends.append(_outcome(lambda: context.run(run)))
            self._inbox.put(lambda: True)

        thread = threading.Thread(target=body, name="ranks", daemon=True)
        with self._signals():
            thread.start()
            while True:
                try:
                    over = self._inbox.get(timeout=_LOOK)()  # a signal that came just before an endless wait is heard
                except Empty:
                    continue
                if over:
                    return _delivered(*ends[0])

    def do(self, function: Callable[[], Any]) -> Any:
        """Have something done in the main thread, and wait for it."""
        if threading.get_ident() == self._ident:
            return function()
        done: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def job() -> bool:
            self._busy, self._bells = True, 0
            try:
                done.put(_outcome(function))
            finally:
                self._busy = False
            return False

        self._inbox.put(job)
        return _delivered(*done.get())

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only that one may
            yield
            return
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._busy:
            raise KeyboardInterrupt
        self._bells += 1
        self._interrupted(self._bells)


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:
        return None, error


def _delivered(result: Any, error: BaseException | None) -> Any:
    if error is not None:
        raise error
    return result

"""The requests of one rank that nobody has waited for yet, in checked mode: their buffers, and what is left at the end.

    with world.checked():
        a = axis.irecv((4,), "f8", 0, out=x)
        b = axis.irecv((4,), "f8", 1, out=x)       CommError: it writes where the message of a is still to be written
        sys.exit()                                 CommError: nobody has waited for a

A request's arrays belong to it until `wait` has returned or `test` has said True.  So no other message may write one of
them meanwhile, nor read one that is being written.  And a program that ends without having waited is wrong: it does
not know whether what it sends has arrived, and has not looked at what it received.  A send of which nobody has kept the
request is let through, as long as it has arrived when all ranks have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from mpitrain.backend import address
from mpitrain.errors import CommError

_MANY = 256  # sends: beyond that those that have arrived are forgotten
_SHOWN = 3


class _Message(Protocol):
    def test(self) -> bool: ...


class _Open(NamedTuple):
    words: str  # the call, with its place
    message: _Message
    is_send: bool
    reads: tuple[int, int]  # addresses
    writes: tuple[int, int]
    kept: tuple[Any, Any]  # the arrays: while it is open nobody else gets their memory


class OpenRequests:
    """Those of one rank."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(
        self, words: str, message: _Message, is_send: bool, reads: NDArray[Any] | None, writes: NDArray[Any] | None
    ) -> int:
        """One more.

        Args:
            words: the call, with its place.
            message: in flight.
            is_send: whether it brings nothing to this rank.
            reads: the array that it sends; C-contiguous, as the other one.
            writes: the one that it fills.

        Returns:
            A number for `close`.

        Raises:
            CommError: it shares an array with another one, and one of the two writes it.
        """
        new = _Open(words, message, is_send, _span(reads), _span(writes), (reads, writes))
        for old in self._open.values():
            if _meet(new.writes, old.writes) or _meet(new.writes, old.reads) or _meet(new.reads, old.writes):
                what = "writes" if _meet(new.writes, old.writes) or _meet(new.writes, old.reads) else "reads"
                raise CommError(
                    f"{words}: it {what} an array that is in flight already.\n"
                    f"  It belongs to {old.words}, until that has been waited for."
                )
        if len(self._open) >= _MANY:
            self._open = {key: old for key, old in self._open.items() if not (old.is_send and _has_arrived(old))}
        self._next += 1
        self._open[self._next] = new
        return self._next

    def close(self, number: int) -> None:
        """It has been waited for."""
        self._open.pop(number, None)

    def clear(self) -> None:
        """Forget them all: of a rank that has caught an error, and goes on."""
        self._open.clear()

    def left_undone(self, all_have_ended: bool) -> CommError | None:
        """What a rank that ends well has not waited for; None: nothing.

        Args:
            all_have_ended: whether all ranks have, so that a message which has not arrived never will.
        """
        lost = [one for one in self._open.values() if one.is_send and all_have_ended and not _has_arrived(one)]
        if lost:
            return CommError(told_lost([one.words for one in lost]))
        unseen = [one for one in self._open.values() if not one.is_send and not _has_failed(one)]
        if not unseen:
            return None
        return CommError(_told("the program ends, and nobody has waited for a request", [one.words for one in unseen]))


def told_lost(calls: Sequence[str]) -> str:
    """What is said of messages that nobody receives."""
    return _told("the program ends, and nobody has received what was sent", calls)


def _told(what: str, calls: Sequence[str]) -> str:
    more = [f"and {len(calls) - _SHOWN} more"] if len(calls) > _SHOWN else []
    return "\n  ".join([f"{what}:", *calls[:_SHOWN], *more])


def _has_arrived(send: _Open) -> bool:
    try:
        return send.message.test()
    except CommError:  # it was written meanwhile, or fits no receive: that is told to whoever waits for it
        return True


def _has_failed(one: _Open) -> bool:
    try:
        one.message.test()
    except CommError:  # whoever has waited for it was told
        return True
    return False


def _span(a: NDArray[Any] | None) -> tuple[int, int]:
    if a is None or a.nbytes == 0:
        return 0, 0
    start = address(a)
    return start, start + a.nbytes


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]

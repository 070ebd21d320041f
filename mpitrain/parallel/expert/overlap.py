"""Messages to experts that travel while this rank computes: half of the experts works as the other half's rows arrive.

An all-to-all falls into two ops, and what stands between them on the tape is computed while the message travels:

    send_off    posts the message, and gives the rows themselves, as a promise
    arrive      takes the promise, waits, and gives what has come

Each is the other's dual: the gradient of what `arrive` gave is posted there, and waited for at `send_off`.  So the tape
overlaps on the way back because it does on the way forth; read this from below for backward, with `A'` the gradient:

    send_off(A, B)              waits for A' B'
    arrive(A)                   posts A'
    experts(A)                  experts(A)'             while B' travels
    send_off(A)                 waits for A'
    arrive(B)                   posts B'
    experts(B)                  experts(B)'             while A' travels
    send_off(B)                 waits for B'
    arrive(A, B)                posts B' A'

Between posting and waiting a gradient is a recipe (`autograd.lazy.Arriving`), so whoever looks at it early just waits
early.

Source: Tutel, Hwang et al. 2022, arXiv:2206.03382, pipelines the all-to-all of a part of the tokens with the experts'
work on another; here the parts are experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import Arriving, Lazy
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.collectives import Arrow
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.request import Request
from mpitrain.spec import Shard


class Mail:
    """One all-to-all of rows that is sent off in one place and arrives in another; made for one pass.

    Args:
        axis: the ranks that write to each other.
        sent: rows for each rank.
        received: rows from each rank.

    Attributes:
        rows: that are sent.
    """

    def __init__(self, axis: Communicator, sent: Sequence[int], received: Sequence[int]) -> None:
        self.rows = sum(sent)
        self._axis, self._sent, self._received = axis, sent, received
        self._request: Request | None = None

    def post(self, rows: Array) -> None:
        """Send rows off: they must not be written until the mail is taken."""
        assert self._request is None, "a mail is sent once"
        self._request = self._axis.iall_to_all(rows, counts=(self._sent, self._received))

    def take(self) -> Array:
        """Wait for the rows that come; they are the caller's, the mail forgets them."""
        request, self._request = self._request, None
        assert request is not None, "a mail is sent off before it arrives, and arrives once"
        rows: Array = request.wait()
        return rows

    def post_back(self, grad: Array) -> Arriving:
        """Send the gradient of what came back to where it came from."""
        request = self._axis.iall_to_all(grad, counts=(self._received, self._sent))
        return Arriving(request.wait, grad.dtype)


class SendOff(Function):
    """Rows leave.  Backward: their gradients have come."""

    linear = (0,)
    takes_lazy = True

    @staticmethod
    def forward(x: Array, *, axis: Communicator, mails: tuple[Mail, ...]) -> tuple[tuple[Array, ...], tuple[()]]:
        parts = tuple(_cut(x, [mail.rows for mail in mails]))
        for mail, rows in zip(mails, parts, strict=True):
            mail.post(rows)
        return parts, ()

    @staticmethod
    def backward(grad: Any, *, wanted: Any, axis: Communicator, mails: tuple[Mail, ...]) -> tuple[Array]:
        grads = grad if type(grad) is tuple else (grad,)
        return (_joined([g.array() if isinstance(g, Lazy) else g for g in grads]),)


class Arrive(Arrow):
    """Shard(0) -> Shard(0): rows have come.  Backward: their gradients leave."""

    arrow = (Shard(0), Shard(0))
    alike = True

    @staticmethod
    def forward(*promises: Array, axis: Communicator, mails: tuple[Mail, ...]) -> tuple[Array, tuple[Any, ...]]:
        parts = [mail.take() for mail in mails]
        return _joined(parts), tuple([len(part) for part in parts])

    @staticmethod
    def backward(
        grad: Array, *lengths: int, wanted: Any, axis: Communicator, mails: tuple[Mail, ...]
    ) -> tuple[Arriving, ...]:
        posted = [mail.post_back(part) for part, mail in reversed([*zip(_cut(grad, lengths), mails, strict=True)])]
        return tuple(reversed(posted))  # the last one is waited for first


def _cut(x: Array, lengths: Sequence[int]) -> list[Array]:
    """Views of consecutive rows, all of x."""
    ends = [0, *accumulate(lengths)]
    assert ends[-1] == len(x), "the parts are all that there is"
    return [x[start:stop] for start, stop in pairwise(ends)]


def _joined(parts: Sequence[Array]) -> Array:
    """Rows of one after those of the other."""
    return parts[0] if len(parts) == 1 else array_module(parts[0]).concatenate(parts)


def send_off(x: Tensor, axis: Communicator, *mails: Mail) -> tuple[Tensor, ...]:
    """Post rows, and go on.

    Backward: waits for the gradients of the rows.

    Args:
        x: (n, h) the rows of each mail, one mail after the other, sorted by rank within each.
        axis: over which they go.
        mails: in which; made for this.

    Returns:
        A promise for each mail, to be handed to `arrive` and to nobody else: the rows of x, which the message reads
        until then.

    Cost: (n-1)/n of x's bytes sent by each rank, both ways.
    """
    promises: tuple[Tensor, ...] = SendOff.apply(x, axis=axis, mails=mails)
    return promises


def arrive(axis: Communicator, *mails: tuple[Tensor, Mail]) -> Tensor:
    """Wait for rows.   Shard(0) -> Shard(0).

    Backward: posts their gradients, and goes on.

    Args:
        axis: over which they come.
        mails: with the promises that `send_off` gave.

    Returns:
        (n', h) what has come, one mail after the other, sorted by rank within each.
    """
    rows: Tensor = Arrive.apply(*[promise for promise, _ in mails], axis=axis, mails=tuple([mail for _, mail in mails]))
    return rows

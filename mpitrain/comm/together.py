"""What can fail on one rank only, done so that all ranks learn how it went."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpitrain.comm.communicator import Communicator
from mpitrain.errors import UserError

T = TypeVar("T")


def _of_system(error: Exception) -> UserError:
    """What the operating system refused, as a message."""
    if isinstance(error, OSError):
        return UserError(f"{error.filename or 'a file of the run'}: {error.strerror or error}.")
    raise error


def together(
    axis: Communicator,
    work: Callable[[], T],
    *,
    here: bool = True,
    refused: Callable[[Exception], UserError] = _of_system,
) -> T | None:
    """Do something that can fail on one rank only, and agree on how it went.

    Args:
        axis: ranks which all call this.
        work: what to do; sends nothing.
        here: whether this rank does it.
        refused: makes the message of an OSError or RuntimeError.

    Returns:
        What `work` returned; None on ranks that had nothing to do.

    Raises:
        UserError: the error of the lowest rank that failed, on every rank.

    Cost: one small message.
    """
    result: T | None = None
    error: UserError | None = None
    if here:
        try:
            result = work()
        except UserError as known:
            error = known
        except (OSError, RuntimeError) as found:
            error = refused(found)
    axis.agree(error)
    return result

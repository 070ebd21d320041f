"""What a user can get wrong in a call of the door: refused before anything is sent, if this rank alone can see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpitrain.comm.site import call_site
from mpitrain.comm.transport import DType
from mpitrain.comm.wire import is_inexact, is_known
from mpitrain.errors import CommError, ShapeError

MAX_TAG = 16000  # larger ones are the door's own (checked.py, chunked.py); MPI guarantees 32767


class Axis(Protocol):
    """The part of a `Communicator` that is asked here."""

    name: str
    rank: int
    size: int


def check_sum(axis: Axis, dtype: DType, op: str) -> None:
    """Refuse a reduction that nobody can make.

    Raises:
        CommError: `op` does not exist, or is not defined for `dtype`.
    """
    if op not in ("sum", "max"):
        raise CommError(f"all_reduce on axis {axis.name}: op is {op!r}; known: sum, max, at {call_site()}")
    if is_inexact(dtype):
        if dtype.kind == "c" and op == "max":
            raise CommError(f"all_reduce on axis {axis.name}: complex numbers have no maximum, at {call_site()}")
    elif not is_known(dtype) or (dtype == np.bool_ and op == "sum"):
        raise CommError(f"all_reduce on axis {axis.name}: the {op} of {dtype} is not defined, at {call_site()}")


def check_divides(axis: Axis, shape: tuple[int, ...], dim: int, verb: str) -> None:
    """Refuse to cut a dim that the axis does not divide.

    Raises:
        ShapeError: it does not.
    """
    if shape[dim] % axis.size:
        what = f"{verb}: dim {dim} of shape {shape}"
        raise _misshapen(f"{what} is not divisible by axis {axis.name} of size {axis.size}")


def check_counts(
    axis: Axis, shape: tuple[int, ...], i: int, j: int, counts: tuple[Sequence[int], Sequence[int]] | None
) -> tuple[list[int], list[int]]:
    """Lengths of the slices that an all-to-all sends and receives; made up when they are even, else checked.

    Raises:
        ShapeError: they do not fit the array or each other.
    """
    n = axis.size
    if counts is None:
        check_divides(axis, shape, j, "all_to_all")
        return [shape[j] // n] * n, [shape[j] // n if i == j else shape[i]] * n
    sent, received = ([int(c) for c in side] for side in counts)
    where = f"all_to_all on axis {axis.name} of size {n}"
    if len(sent) != n or len(received) != n or min(sent + received) < 0:
        raise _misshapen(f"{where}: counts are {sent} and {received}; {n} numbers from 0 are needed in each")
    if sum(sent) != shape[j]:
        raise _misshapen(f"{where}: counts sent {sent} add up to {sum(sent)}, dim {j} of shape {shape} does not")
    if i == j and sent[axis.rank] != received[axis.rank]:
        raise _misshapen(f"{where}: rank {axis.rank} sends itself {sent[axis.rank]}, receives {received[axis.rank]}")
    if i != j and received[axis.rank] != shape[i]:
        raise _misshapen(f"{where}: counts received {received} give rank {axis.rank} another length than {shape}")
    return sent, received


def check_slices(
    axis: Axis, shape: tuple[int, ...], dim: int, counts: Sequence[int] | None, verb: str, whole: bool
) -> list[int] | None:
    """Lengths along `dim` of each rank's slice of an array; None where all have the same.

    Args:
        axis: of the ranks.
        shape: of the whole array, or of this rank's slice.
        dim: which is cut.
        counts: what the caller says; None: all slices have the same length.
        verb: named in errors.
        whole: which of the two `shape` is.

    Raises:
        ShapeError: they do not fit the array, or the axis does not divide the whole.
    """
    if counts is None:
        if whole:
            check_divides(axis, shape, dim, verb)
        return None
    n, lengths = axis.size, [int(count) for count in counts]
    where = f"{verb} on axis {axis.name} of size {n}"
    if len(lengths) != n or min(lengths) < 0:
        raise _misshapen(f"{where}: counts are {lengths}; {n} numbers from 0 are needed")
    if whole and sum(lengths) != shape[dim]:
        raise _misshapen(f"{where}: counts {lengths} add up to {sum(lengths)}, dim {dim} of shape {shape} does not")
    if not whole and lengths[axis.rank] != shape[dim]:
        raise _misshapen(f"{where}: counts {lengths} give rank {axis.rank} another length than dim {dim} of {shape}")
    return None if len(set(lengths)) == 1 else lengths


def _misshapen(text: str) -> ShapeError:
    return ShapeError(f"{text}, at {call_site()}")


def check_rank(axis: Axis, rank: int, what: str) -> None:
    """Refuse a rank that is not on the axis.

    Raises:
        CommError: naming `what` it was wanted for.
    """
    if not 0 <= rank < axis.size:
        raise CommError(f"{what} {rank} is not on axis {axis.name} of size {axis.size}, at {call_site()}")


def check_peer(axis: Axis, peer: int, tag: int, what: str) -> None:
    """Refuse a partner or a tag that cannot be.

    Raises:
        CommError: the partner is not on the axis, or this rank itself; the tag is out of range.
    """
    check_rank(axis, peer, f"{what} rank")
    if peer == axis.rank:
        raise CommError(f"rank {peer} of axis {axis.name} cannot {what} itself, at {call_site()}")
    if not 0 <= tag <= MAX_TAG:
        raise CommError(f"tag {tag} is out of range: 0 ... {MAX_TAG}, at {call_site()}")

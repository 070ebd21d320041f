"""What a call of the door counts: its bytes, and under which name.

Bytes are those of the best algorithm, whatever the MPI library does.  With n ranks and S bytes of the larger side, the
array to be scattered or the array that was gathered, each rank sends

    all_reduce  2 (n-1)/n S      reduce_scatter, all_gather, all_to_all  (n-1)/n S      broadcast, shift, send  S
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mpitrain.comm.slices import GATHERS, shape_of_call
from mpitrain.comm.transport import Array

LIKE_BLOCKING = {
    "iall_reduce": "all_reduce",
    "iall_gather": "all_gather",
    "ireduce_scatter": "reduce_scatter",
    "iall_to_all": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}
"""Verbs that return at once, and those with which they are counted."""


class Payload:
    """Counts bytes on an axis of `size` ranks."""

    def __init__(self, size: int) -> None:
        each = (size - 1) / size
        factors: dict[str, float] = {
            "all_reduce": 2 * each,
            "reduce_scatter": each,
            "all_gather": size - 1,  # the whole is `size` times what one rank brings
            "exchange": size - 1,
            "all_to_all": each,
            "broadcast": 1,
            "shift": 1,
            "send": 1,
            "recv": 0,
            "barrier": 0,
        }
        self._factors = factors | {verb: factors[like] for verb, like in LIKE_BLOCKING.items()}
        self._each = each

    def bytes(self, verb: str, a: Array, how: Sequence[Any]) -> float:
        """What this rank sends in a call.

        Args:
            verb: its name.
            a: the array that this rank brings.
            how: the further arguments.
        """
        if verb in GATHERS and how[1] is not None:  # slices of different lengths: all ranks send as much
            return prod(shape_of_call(verb, a, how)) * a.itemsize * self._each
        return a.nbytes * self._factors[verb]

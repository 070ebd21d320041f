"""What must work when all else waits: saying farewell, hearing of it between hosts, and ending the job.

It owns a communicator on which no other message travels.  mpi4py's module comes in as an argument (only mpi.py imports
it).
"""

from __future__ import annotations

import faulthandler
import os
import platform
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mpitrain.comm.page import Gone

FAREWELL_TAG = 1
ABORT_SECONDS = 5.0
LAST_WORDS = 0.2  # seconds: MPICH's launcher loses what was written just before an abort


class Farewell(NamedTuple):
    """What all ranks left with: the lowest and highest exit code, and whether all had the same to say."""

    lowest: int
    highest: int
    same_words: bool


class Lifeline:
    """A private communicator of all ranks.

    Attributes:
        can_listen: True if a thread beside the main one may use MPI.
        keeps_codes: True if the launcher reports the exit code that all ranks leave MPI with.  MPICH's may report 9
            (it kills the others when the first has ended), and 0 where codes differ.  srun does with any MPI.
    """

    def __init__(
        self,
        comm: Any,
        mpi: ModuleType,
        *,
        can_listen: bool,
        keeps_codes: bool,
        before_end: Callable[[], None],
        before_look: Callable[[], None],
    ) -> None:
        """`before_end` is called before MPI is left, `before_look` by other threads than the main one before a call."""
        self.can_listen = can_listen
        self.keeps_codes = keeps_codes
        self._comm, self._mpi = comm, mpi
        self._before_end = before_end
        self._before_look = before_look
        self._sent: list[tuple[Any, Any]] = []

    def farewell(self, code: int, words: int) -> Callable[[], Farewell | None]:
        """Say that this rank leaves, with an exit code and a hash of what it has to say.

        Returns:
            A function to ask again and again: None until all ranks have left.
        """
        own, all_ = np.array([code, -code, words, -words], np.int64), np.zeros(4, np.int64)
        request = self._comm.Iallreduce(own, all_, self._mpi.MAX)

        def result() -> Farewell | None:
            if not request.Test():
                return None
            return Farewell(-int(all_[1]), int(all_[0]), bool(all_[2] == -all_[3]))

        return result

    def tell(self, gone: Gone, ranks: Sequence[int]) -> None:
        """Tell ranks of other hosts how this rank left: [code, spoke, (channel, count) ...]."""
        pairs = [word for pair in gone.counts.items() for word in pair]
        message = np.array([gone.code, gone.spoke, *pairs], np.int64)
        self._sent += [(self._comm.Isend(message, rank, FAREWELL_TAG), message) for rank in ranks]

    def hear(self) -> list[tuple[int, Gone]]:
        """What ranks of other hosts told since the last call: (rank, how it left)."""
        found: list[tuple[int, Gone]] = []
        if not self.can_listen:
            return found
        self._before_look()
        status = self._mpi.Status()
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, FAREWELL_TAG, status):
            message = np.empty(status.Get_count(self._mpi.INT64_T), np.int64)
            self._comm.Recv(message, status.source, FAREWELL_TAG)
            code, spoke, *pairs = message.tolist()
            found.append((status.source, Gone(code, bool(spoke), "", dict(zip(pairs[::2], pairs[1::2], strict=True)))))
        return found

    def abort(self, code: int) -> None:
        """End all ranks of the job with this exit code; does not return."""
        time.sleep(LAST_WORDS)
        # Should MPI be too broken to abort, a C timer ends this process, and its end makes the launcher end the others.
        faulthandler.dump_traceback_later(ABORT_SECONDS, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        self._mpi.COMM_WORLD.Abort(code)

    def finalize(self) -> None:
        """Leave MPI; returns when all ranks do."""
        if not self._mpi.Is_finalized():
            self._before_end()
            self._mpi.Finalize()


def host_name() -> str:
    """The name of this rank's host."""
    return platform.node()

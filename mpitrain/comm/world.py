"""The ranks that surround this one, whoever started them.

    mpirun -n 8 python train.py            MPI's ranks
    mpitrain local -n 8 train.py           threads of one process
    python train.py                        one rank; MPI is not even imported

A script calls `world()` and never learns which.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mpitrain import faults
from mpitrain.comm.alone import Alone
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.launcher import announced, check_size
from mpitrain.comm.transport import Board, Mode, NoBoard, Transport
from mpitrain.errors import CommError, LaunchError, UserError

SURROUNDING: ContextVar[World | None] = ContextVar("mpitrain.world", default=None)
"""The world of this rank, once it is known.  A context variable, since ranks may be threads of one process."""


class World(Communicator):
    """All ranks; the axis named "world".

    Attributes:
        kind: "mpi", "local" or "alone".
        library: what moves the messages, for people: "Open MPI 5.0.11".
        progress: one line: who drives messages on while ranks compute.
        host: name of this rank's host.
        device_messages: how arrays of devices travel (device_messages.py), for people; "": there are none yet.
    """

    def __init__(
        self,
        transport: Transport,
        library: str,
        board: Board | None = None,
        progress: str = "",
        host: str = "",
        mode: Mode | None = None,
    ) -> None:
        super().__init__("world", transport, range(transport.size), board, mode)
        self.board.at_end = self._left_undone
        self.kind = transport.kind
        self.library = library
        self.progress = progress
        self.host = host or platform.node()
        self.device_messages = ""
        if os.environ.get("MPITRAIN_DETERMINISTIC", "0") not in ("", "0"):
            self.set_deterministic()
        if os.environ.get("MPITRAIN_CHECK", "0") not in ("", "0"):
            self.set_checked()

    def _left_undone(self, all_have_ended: bool) -> UserError | None:
        """See `AtEnd`: requests that nobody has waited for, and messages that nobody has received."""
        undone = self.mode.requests.left_undone(all_have_ended)
        if undone is None and all_have_ended and self.mode.asked:
            undone = self.board.unreceived()
        return undone

    @property
    def deterministic(self) -> bool:
        """Whether sums are taken in rank order."""
        return self.mode.deterministic

    def set_deterministic(self, on: bool = True) -> None:
        """Take sums in rank order, on this communicator and all that are cut from it: the same bits everywhere.

        All ranks call it with the same value, between messages.  BLAS goes down to one thread, since float32 products
        differ with the number of threads; switching off leaves it there.

        Cost: an all-reduce takes at most 1.4 times as long from 1 MiB up.
        """
        self.mode.deterministic = on
        if on:
            from threadpoolctl import threadpool_limits

            threadpool_limits(1)

    def set_checked(self, on: bool = True) -> None:
        """Have ranks compare their calls before they exchange data, here and on all communicators cut from this one.

        All ranks call it with the same value, when no message is in flight.  It sends nothing itself.  What then raises
        `CollectiveMismatch` stands in `mpitrain.comm.checked`.

        Cost: one message of 256 bytes a rank more for each call.
        """
        self.mode.ask(on)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """`set_checked` for a block; what is on before stays on."""
        self.hold_checks()
        try:
            yield
        finally:
            self.release_checks()

    def hold_checks(self) -> None:
        """Checked mode from here on, until as many `release_checks` have been called, or longer if it is asked for."""
        self.mode.hold(1)

    def release_checks(self) -> None:
        """The end of one `hold_checks`."""
        self.mode.hold(-1)


def world(start_timeout: float | None = None) -> World:
    """The surrounding world; the same object each time.

    Args:
        start_timeout: seconds until all ranks of an MPI job must have arrived; None: the environment's
            MPITRAIN_START_TIMEOUT, else 300.

    Raises:
        ConfigError: the environment's MPITRAIN_FAULTS is none (`mpitrain.faults.parse`).
        LaunchError: the launcher started another number of ranks than MPI sees, or MPI cannot be loaded.
        CommError: called in a thread that belongs to no rank.

    Cost: the first call may start MPI (0.2 ... 2 s).
    """
    found = SURROUNDING.get()
    if found is None:
        if threading.current_thread() is not threading.main_thread():
            raise CommError(
                "world() was called in a thread that belongs to no rank.  Start the thread with the rank's context:\n"
                "  threading.Thread(target=contextvars.copy_context().run, args=(function,))"
            )
        if text := os.environ.get(faults.VARIABLE, ""):
            faults.parse(text, faults.VARIABLE)  # refused before MPI starts
        found = _find(start_timeout)
        surround(found)
    return found


def surround(found: World) -> None:
    """Make a world the surrounding one of this context, in which the environment's MPITRAIN_FAULTS happen.

    Raises:
        ConfigError: a fault is of a rank that does not exist.
    """
    SURROUNDING.set(found)
    if text := os.environ.get(faults.VARIABLE, ""):
        faults.begin(text, found, faults.VARIABLE)


def _find(start_timeout: float | None) -> World:
    """MPI's world where a launcher is to be seen, else a world of one."""
    seen = announced(os.environ)
    if seen is None:
        return World(Alone(), "none (one rank)", NoBoard())
    try:
        from mpitrain.comm.mpi import start
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError when it finds no MPI library
        raise LaunchError(
            f"{seen[0]}={seen[1]} says that a launcher started this process, but MPI cannot be loaded:\n"
            f"  {str(error).splitlines()[0]}\n"
            '  Install one: pip install "mpitrain[mpi]" (or mpich), or start with ./run_mpi.sh'
        ) from error
    started = start(start_timeout)
    check_size(os.environ, started.transport.size)
    return World(started.transport, started.library, started.board, started.progress, started.host)

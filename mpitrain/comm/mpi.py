"""MPI as a world: the only file that imports mpi4py.

`start()` brings MPI up once: with a time limit, with a communicator of our own, with a flight board for each host, and
with the knowledge whether messages arrive while their sender computes.

Who drives a message on?  MPI moves data inside MPI calls; some libraries also while the program computes (a large
Isend through shared memory needs the receiver alone).  Where that is not so, over TCP for example, an Isend that is
followed by computing lies still until the next call.  `_arrives_alone` finds out which at start; if nothing moves by
itself, a helper thread enters MPI while messages are in flight.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import mpi4py
import numpy as np

from mpitrain.comm.arrival import initialize
from mpitrain.comm.board import FlightBoard
from mpitrain.comm.board_file import BoardFile, sweep
from mpitrain.comm.guard import Guard
from mpitrain.comm.in_flight import InFlight
from mpitrain.comm.launcher import is_task_of_slurm, one_host
from mpitrain.comm.library_memory import forget_names
from mpitrain.comm.lifeline import Lifeline, host_name
from mpitrain.comm.mpi_transport import MpiTransport
from mpitrain.comm.page import PROBED
from mpitrain.comm.transport import Board, NoBoard, Transport
from mpitrain.comm.watch import Watch
from mpitrain.errors import LaunchError
from mpitrain.options import show

PROBE_BYTES, PROBE_SECONDS = 1 << 20, 0.05
PROBE_PATIENCE = 0.15  # seconds, where the receiver can say at once that the message is there

# What Open MPI shall use where all ranks share a host: shared memory, without looking for network cards first.
NO_NETWORK = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct"}


@dataclass(frozen=True)
class MpiStart:
    """MPI as it was found.

    Attributes:
        transport: of all ranks.
        library: "Open MPI 5.0.11".
        board: of this rank.
        progress: one line: who drives messages on while ranks compute.
        host: name of this rank's host.
    """

    transport: Transport
    library: str
    board: Board
    progress: str
    host: str


def start(timeout: float | None = None) -> MpiStart:
    """Bring MPI up; the same answer each time in one process.

    Args:
        timeout: seconds until all ranks must have arrived; None: the environment's MPITRAIN_START_TIMEOUT, else 300.

    Returns:
        MPI's ranks as a transport.  With more than one rank the guard and the watch are running.

    Raises:
        LaunchError: no MPI library can be loaded.

    Cost: MPI's own start, a few small collectives, 2 ms for the progress probe (60 between hosts).
    """
    parent = os.getppid()
    mpi = _load(timeout)
    if not hasattr(mpi, "mpitrain_start"):  # kept where MPI is: both are there once a process
        mpi.mpitrain_start = _start(mpi, parent)
    started: MpiStart = mpi.mpitrain_start
    return started


def _start(mpi: Any, parent: int) -> MpiStart:
    library = _library_name(mpi.Get_library_version())
    world = mpi.COMM_WORLD.Dup()
    host = host_name()
    flight = InFlight(mpi)
    ranks = tuple(range(world.size))
    if world.size == 1:
        atexit.register(lambda: None if mpi.Is_finalized() else mpi.Finalize())
        return MpiStart(MpiTransport(world, flight, NoBoard(), ranks, (0,), "world"), library, NoBoard(), "alone", host)
    threads = mpi.Query_thread() == mpi.THREAD_MULTIPLE
    private = mpi.COMM_WORLD.Dup()
    board = _make_board(private)
    forget_names()
    keeps_codes = library.startswith("Open MPI") or is_task_of_slurm(parent)
    lifeline = Lifeline(
        private,
        mpi,
        can_listen=threads,
        keeps_codes=keeps_codes,
        before_end=flight.stop,
        before_look=flight.enter,
    )
    watch = Watch(board, lifeline)
    Guard(board, watch, lifeline, parent).install(mpi)
    watch.start()
    progress = _arrange_progress(private, flight, board, threads)
    transport = MpiTransport(world, flight, board, ranks, board.hosts, "world")
    return MpiStart(transport, library, board, progress, host)


def _load(timeout: float | None) -> Any:
    """mpi4py.MPI, with MPI running and its end left to us."""
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        if "mpi4py.MPI" not in sys.modules:
            if one_host(os.environ) and not NO_NETWORK.keys() & os.environ.keys():
                os.environ.update(NO_NETWORK)  # halves the time of Open MPI's start
            limit = _start_timeout() if timeout is None else timeout
            spec = importlib.util.find_spec("mpi4py.MPI")
            if spec is not None and spec.origin is not None:
                initialize(spec.origin, limit)
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:  # mpi4py's RuntimeError lists all that it tried
        raise LaunchError(
            f"a launcher started this process, but MPI cannot be loaded: {str(error).splitlines()[0]}.\n"
            '  Install one: pip install "mpitrain[mpi]" (or "mpitrain[mpich]"), or start with ./run_mpi.sh'
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def _start_timeout() -> float:
    """The environment's MPITRAIN_START_TIMEOUT, else 300.

    Raises:
        LaunchError: it is no number of seconds above 0.
    """
    text = os.environ.get("MPITRAIN_START_TIMEOUT", "") or "300"
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= threading.TIMEOUT_MAX:
            return float(text)
    raise LaunchError(f"MPITRAIN_START_TIMEOUT={show(text)}: must be a number of seconds above 0.")


def _library_name(version: str) -> str:
    """`Open MPI 5.0.11` from what the library says about itself."""
    words = version.replace(",", " ").split()
    if words[:2] == ["Open", "MPI"]:
        return f"Open MPI {words[2].lstrip('v')}"
    if words[:2] == ["MPICH", "Version:"]:
        return f"MPICH {words[2]}"
    return version.splitlines()[0].strip()[:60]


def _make_board(comm: Any) -> FlightBoard:
    """One file for the ranks that see the same memory; collective."""
    mine = _digest(host_name())
    nodes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([mine], np.int64), nodes)
    locals_ = tuple(int(rank) for rank in np.flatnonzero(nodes == mine))
    here = comm.Split(locals_[0], comm.rank)
    path = np.zeros(512, np.uint8)
    file: BoardFile | None = None
    if here.rank == 0:
        sweep()
        with contextlib.suppress(OSError):
            file = BoardFile.create(here.size)
            path[: len(file.path)] = np.frombuffer(os.fsencode(file.path), np.uint8)
    here.Bcast(path, 0)
    try:
        file = file or BoardFile.attach(os.fsdecode(bytes(path).rstrip(b"\0")), here.size)
    except OSError:  # no room, or equal host names that share no memory (containers): a host of its own
        file, locals_ = BoardFile.private(), (comm.rank,)
    here.Barrier()
    if here.rank == 0:
        file.unlink()
    here.Free()
    boards = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([file.identity], np.int64), boards)
    hosts = tuple(np.unique(boards, return_inverse=True)[1].tolist())
    board = FlightBoard(file, comm.rank, locals_, hosts)
    comm.Barrier()  # every page is taken: from here on an unlocked page means a dead rank
    return board


def _arrange_progress(comm: Any, flight: InFlight, board: FlightBoard, threads: bool) -> str:
    """See that messages move while ranks compute; says how.  Collective."""
    far = next((rank for rank, host in enumerate(board.hosts) if host != board.hosts[0]), 1)
    if _arrives_alone(comm, board, far):
        return "messages arrive while their sender computes"
    if not threads:
        return "messages wait for their sender's next call (this MPI gives no threads)"
    flight.drive(comm)
    return "a helper thread drives messages while ranks compute"


def _arrives_alone(comm: Any, board: FlightBoard, receiver: int) -> bool:
    """True if a message of rank 0 reaches `receiver` while rank 0 makes no MPI call.  Collective.

    Where the two share a host, each sees on the board when the other is done; between hosts the clock must do.
    """
    tag = 2
    arrived = np.zeros(1, np.int64)
    comm.Barrier()
    other = board.pages.get({0: receiver, receiver: 0}.get(comm.rank, -1))
    began = time.monotonic()

    def is_over(limit: float) -> bool:
        if other is not None:
            return bool(other.words[PROBED]) or time.monotonic() - began > PROBE_PATIENCE
        return time.monotonic() - began > limit

    if comm.rank == 0:
        data = np.zeros(PROBE_BYTES, np.uint8)
        request = comm.Isend(data, receiver, tag)
        while not is_over(PROBE_SECONDS):
            time.sleep(0.0005)  # as good as computing: this rank is out of MPI
        board.page.words[PROBED] = 1
        request.Wait()
    elif comm.rank == receiver:
        data = np.empty(PROBE_BYTES, np.uint8)
        request = comm.Irecv(data, 0, tag)
        over = False
        while not (over or arrived[0]):
            over = is_over(0.8 * PROBE_SECONDS)  # asked first: what comes after the sender has gone on proves nothing
            arrived[0] = request.Test() and not over
            if not arrived[0]:
                time.sleep(0.0005)
        board.page.words[PROBED] = 1
        request.Wait()
    answer = comm.Ibcast(arrived, receiver)
    while not answer.Test():  # the idle ranks must not take the cores from the two
        time.sleep(0.001)
    return bool(arrived[0])


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

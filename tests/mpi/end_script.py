"""Ways in which a job ends, well or badly.   python end_script.py SCENARIO [ARG]

Every function is a scenario, called on every rank.
"""

from __future__ import annotations

import os
import sys

if sys.argv[1:] == ["one_never_starts"] and "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    sys.exit(0)  # before the imports: Open MPI's launcher itself notices a rank that ends while others are in MPI_Init

import contextlib
import faulthandler
import threading
import time

import numpy as np

from mpitrain.comm.board import FlightBoard
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import MeshError

SMALL, LARGE = np.ones(4), np.ones(1 << 21)  # below and far above the size up to which MPI sends without asking


def nobody_sends() -> None:
    """Rank 1 ends while rank 0 waits for its message."""
    ranks = world()
    ranks.barrier()
    if ranks.rank == 0:
        ranks.recv(SMALL.shape, SMALL.dtype, 1)


def nobody_receives() -> None:
    """Rank 1 ends while rank 0 waits that it takes a message."""
    ranks = world()
    ranks.barrier()
    if ranks.rank == 0:
        ranks.send(LARGE, 1)


def nobody_answers_a_request() -> None:
    """Rank 1 ends while rank 0 waits for a sum that it started earlier."""
    ranks = world()
    ranks.all_reduce(SMALL)
    if ranks.rank == 0:
        ranks.iall_reduce(SMALL).wait()


def nobody_makes_the_axis() -> None:
    """Rank 1 ends while rank 0 makes an axis with it."""
    ranks = world()
    ranks.barrier()
    if ranks.rank == 0:
        ranks.transport.group((0, 1), "tp")


def ranks_wait_for_each_other() -> None:
    """Rank 1 sums over an axis while rank 0 sums over the world."""
    ranks = world()
    mesh = Mesh(ranks)
    ranks.barrier()
    if ranks.rank == 1:
        mesh.dp.all_reduce(SMALL)
    ranks.all_reduce(SMALL)


def all_raise_a_user_error() -> None:
    world()
    raise MeshError("--pp 3 needs 3 ranks, but MPI started another number.\n  Run: ./run_mpi.sh -n 3 ...")


def one_raises_a_user_error() -> None:
    ranks = world()
    if ranks.rank == 1:
        raise MeshError("only rank 1 sees it")
    ranks.barrier()


def all_exit_with_85() -> None:
    world().barrier()
    sys.exit(85)


def one_raises_system_exit() -> None:
    ranks = world()
    if ranks.rank == 1:
        raise SystemExit(4)
    ranks.barrier()


def interrupted() -> None:
    ranks = world()
    if ranks.rank == 1:
        raise KeyboardInterrupt
    ranks.barrier()


def a_thread_fails() -> None:
    ranks = world()
    if ranks.rank == 1:
        threading.Thread(target=lambda: 1 // 0).start()
    ranks.recv(SMALL.shape, SMALL.dtype, (ranks.rank + 1) % ranks.size)


def hard_exit_with_0() -> None:
    ranks = world()
    if ranks.rank == 1:
        os._exit(0)
    ranks.barrier()


def hangs() -> None:
    """Rank 1 computes on and on; the others reach the time limit."""
    ranks = world()
    assert isinstance(ranks.board, FlightBoard)
    ranks.board.limit = 3.0
    ranks.board.run_folder = sys.argv[2] if len(sys.argv) > 2 else None
    ranks.all_reduce(SMALL)
    if ranks.rank == 1:
        time.sleep(60)
    ranks.all_reduce(np.ones((4, 3), np.float32))


def sleeps() -> None:
    world().barrier()
    print("under way", flush=True)
    time.sleep(60)


def one_never_starts() -> None:
    """Rank 1 ended above, before anybody started MPI."""
    world()


def all_is_well() -> None:
    """What must not be taken for the end: early leavers whom nobody needs, slow ranks, caught exits, forks."""
    ranks = world()
    with contextlib.suppress(SystemExit):
        sys.exit(3)
    try:
        raise LookupError("told, not fatal")
    except LookupError:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    faulthandler.cancel_dump_traceback_later()  # its thread does not survive a fork, and Python would wait for it
    child = os.fork()
    if child == 0:
        sys.exit(7)  # runs the exit handlers that it inherited
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ranks.barrier()
    if ranks.rank == 0:
        time.sleep(1.6)  # three looks of those who wait here
    ranks.barrier()
    if ranks.rank == 1:
        ranks.send(SMALL, 0)
        return
    if ranks.rank == 0:
        time.sleep(1.6)  # rank 1 is gone by now, but its message is there
        assert (ranks.recv(SMALL.shape, SMALL.dtype, 1) == SMALL).all()


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["MPITRAIN_TEST_STACKS_AFTER"]), exit=True)
    globals()[sys.argv[1]]()


if __name__ == "__main__":
    main()

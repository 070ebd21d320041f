"""Ways in which ranks miss each other, which end the job.   python mismatch_script.py SCENARIO

Every function is a scenario, called on every rank; the last rank goes astray.
"""

from __future__ import annotations

import faulthandler
import os
import sys

import numpy as np

from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world

SMALL, LARGE = np.ones(4), np.ones(1 << 20)  # below and far above the size up to which MPI sends without asking


def another_op(ranks: World) -> None:
    ranks.all_reduce(SMALL, "max" if ranks.rank == ranks.size - 1 else "sum")


def another_verb_on_one_axis_of_a_mesh(ranks: World) -> None:
    """The other ranks wait for the two of that axis in the next call."""
    mesh = Mesh(ranks, tp=2)
    mesh.tp.barrier()
    if ranks.rank == ranks.size - 1:
        mesh.tp.all_gather(SMALL)
    else:
        mesh.tp.all_reduce(SMALL)
    ranks.barrier()


def another_count_in_flight(ranks: World) -> None:
    """MPI has the data of both when the fingerprints are compared."""
    request = ranks.iall_reduce(LARGE if ranks.rank == ranks.size - 1 else SMALL)
    ranks.group(range(ranks.size), "other").barrier()
    request.wait()


def another_count_in_flight_in_rank_order(ranks: World) -> None:
    ranks.set_deterministic()
    another_count_in_flight(ranks)


def a_longer_message(ranks: World) -> None:
    if ranks.rank == 0:
        ranks.isend(LARGE, ranks.size - 1, 7).wait()
    elif ranks.rank == ranks.size - 1:
        ranks.irecv(SMALL.shape, SMALL.dtype, 0, 7).wait()
    ranks.barrier()


def another_tag(ranks: World) -> None:
    if ranks.rank == 0:
        ranks.send(SMALL, ranks.size - 1, 1)
    elif ranks.rank == ranks.size - 1:
        ranks.recv(SMALL.shape, SMALL.dtype, 0, 2)
    ranks.barrier()


def another_sender(ranks: World) -> None:
    """Rank 1 waits for a message of rank 2 that rank 0 has sent."""
    if ranks.rank == 0:
        ranks.send(SMALL, 1)
    elif ranks.rank == 1:
        ranks.recv(SMALL.shape, SMALL.dtype, 2)
    ranks.barrier()


def all_send_first(ranks: World) -> None:
    ranks.send(LARGE, (ranks.rank + 1) % ranks.size)
    ranks.recv(LARGE.shape, LARGE.dtype, (ranks.rank - 1) % ranks.size)


def all_receive_first(ranks: World) -> None:
    ranks.recv(SMALL.shape, SMALL.dtype, (ranks.rank - 1) % ranks.size)
    ranks.send(SMALL, (ranks.rank + 1) % ranks.size)


def nobody_sends_what_was_asked_for(ranks: World) -> None:
    if ranks.rank == ranks.size - 1:
        ranks.irecv(SMALL.shape, SMALL.dtype, 0).wait()
    ranks.barrier()


def one_turn_less(ranks: World) -> None:
    """The last rank ends while the others wait in the next turn."""
    for _ in range(4 if ranks.rank == ranks.size - 1 else 5):
        ranks.all_reduce(SMALL)


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["MPITRAIN_TEST_STACKS_AFTER"]), exit=True)
    ranks = world()
    ranks.set_checked()
    ranks.barrier()
    globals()[sys.argv[1]](ranks)


if __name__ == "__main__":
    main()

"""What the `Communicator` adds to a small message: its verbs beside mpi4py's own, on two ranks.

    mpirun -n 2 python -m mpi4py benchmarks/message_cost.py --rounds 5

Both use buffers that exist already.  The fastest of several stretches counts, by turns: what is asked for is the cost
of the code around the message, not that of a core that was taken away.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpitrain.comm.world import world

SIZES = (8, 64)  # bytes
MESSAGES = 300  # of a stretch
STRETCHES = 8  # of a round and side


def messages(nbytes: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """verb -> side -> what one call on each rank does; of sends, one goes and one comes back: two messages."""
    door, raw = world(), MPI.COMM_WORLD.Dup()
    x, out = np.zeros(nbytes // 8), np.zeros(nbytes // 8)
    peer = 1 - door.rank

    def there_and_back(send: Callable[[], Any], receive: Callable[[], Any]) -> Callable[[], Any]:
        first, second = (send, receive) if door.rank == 0 else (receive, send)

        def run() -> None:
            first()
            second()

        return run

    return {
        "all_reduce": {
            "mpitrain": lambda: door.all_reduce(x, out=out),
            "raw": lambda: raw.Allreduce(x, out),
        },
        "send and recv": {
            "mpitrain": there_and_back(
                lambda: door.send(x, peer), lambda: door.recv(out.shape, out.dtype, peer, out=out)
            ),
            "raw": there_and_back(lambda: raw.Send(x, peer), lambda: raw.Recv(out, peer)),
        },
    }


def stretch(call: Callable[[], Any], messages_of_call: int) -> float:
    """Microseconds a message on the slower rank."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(MESSAGES):
        call()
    seconds = MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)
    return float(1e6 * seconds / MESSAGES / messages_of_call)


def measure(rounds: int) -> dict[str, Any]:
    """Microseconds a message: "verb, bytes" -> side -> one a round."""
    found: dict[str, Any] = {}
    for nbytes in SIZES:
        for verb, sides in messages(nbytes).items():
            times: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(rounds):
                best = dict.fromkeys(sides, float("inf"))
                for number in range(STRETCHES):
                    for side in list(sides) if number % 2 == 0 else list(reversed(sides)):
                        best[side] = min(best[side], stretch(sides[side], 1 if verb == "all_reduce" else 2))
                for side, value in best.items():
                    times[side].append(value)
            found[f"{verb}, {nbytes} bytes"] = times
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    assert world().size == 2, "it takes two ranks"
    found = measure(options.rounds)
    if world().rank == 0:
        print(json.dumps({"microseconds": found}), flush=True)


if __name__ == "__main__":
    main()

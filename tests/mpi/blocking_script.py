"""A pipeline whose sends block.   python blocking_script.py SCHEDULE CHUNKS SECONDS BYTES...

For each of the sizes it trains with boundary messages of so many bytes.  It goes well where they are small, and hangs
where they are not; after SECONDS the watch says so.
"""

from __future__ import annotations

import faulthandler
import os
import sys

import checks_boundary

from mpitrain.comm.board import FlightBoard
from mpitrain.comm.world import world

if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(os.environ["MPITRAIN_TEST_STACKS_AFTER"]), exit=True)
    schedule, (chunks, seconds, *sizes) = sys.argv[1], map(int, sys.argv[2:])
    ranks = world()
    assert isinstance(ranks.board, FlightBoard)
    ranks.board.limit = float(seconds)
    for nbytes in sizes:
        checks_boundary.train(ranks, schedule, ranks.size, chunks, nbytes, checks_boundary.with_blocking_sends)
        if ranks.rank == 0:
            print(f"{nbytes} bytes went well", flush=True)

"""Among threads, too, a rank that runs on and on is named; not one that nobody waits for, or that a debugger holds."""

import bdb
import time
from pathlib import Path

import numpy as np
import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import CommError

ONE = np.ones(3, np.float32)


def line_of(mark):
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(at for at, line in enumerate(lines) if line.endswith(f"# HERE it {mark}"))


def test_a_rank_in_an_endless_loop_is_named_with_its_line_and_unwinds():
    unwound = []

    def rank():
        mesh = Mesh(world())
        mesh.world.barrier()  # HERE it meets
        try:
            if mesh.world.rank == 1:
                while True:
                    pass  # HERE it loops
            mesh.dp.all_reduce(ONE)  # HERE it sums
        finally:
            unwound.append(mesh.world.rank)

    began = time.monotonic()
    with pytest.raises(CommError) as caught:
        LocalWorld(3, timeout=0.5).run(rank)
    assert time.monotonic() - began < 5
    lines = str(caught.value).splitlines()
    barrier = f"barrier on world, call 1, (0,) uint8, at test_stalled.py:{line_of('meets')}"
    assert lines[0] == "no answer for 0.5 s (--timeout).  Rank 1 is behind: it is in no call."
    assert lines[1] in {
        f"  rank 1 runs at test_stalled.py:{line_of('loops') - up}, after {barrier} (for {seconds} s)"
        for up in (0, 1)
        for seconds in (0, 1)
    }
    waits = f"all_reduce on dp, call 1, (3,) float32, at test_stalled.py:{line_of('sums')}"
    assert lines[2] == f"  ranks 0,2 wait in {waits}"
    assert lines[4] == f"Last common call: {barrier}"
    assert lines[6].startswith(f"  rank 1 at test_stalled.py:{line_of('loops')}"[:-1])
    assert f"    {waits}" in lines
    assert sorted(unwound) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["nobody waits", "a debugger holds it", "a message now and then"])
def test_who_may_take_its_time(kind):
    def rank():
        ranks = world()
        ranks.barrier()
        if ranks.rank == 1 and kind == "nobody waits":
            ranks.all_reduce(ONE)
            return time.sleep(1.2)
        if ranks.rank == 0 and kind == "a debugger holds it":  # rank 1 waits already
            bdb.Bdb().runcall(time.sleep, 1.2)
        if kind == "a message now and then":
            for _ in range(4):
                if ranks.rank == 1:
                    time.sleep(0.2)
                ranks.barrier()
        return ranks.all_reduce(ONE)

    LocalWorld(2, timeout=0.5).run(rank)

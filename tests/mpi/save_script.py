"""A training that is struck at one point of its saves.   python save_script.py HOW RANK NUMBER MARK FLAGS...

At that point of that rank (tests/crash/points.py) the time is written to the file MARK, and then

    kill      SIGKILL
    ENOSPC    (or another error's name) the disk operation that begins is refused; only disk operations are counted
    count     no point: each rank writes to MARK.RANK how many points it has, and how many disk operations
    limit     files may not be longer than NUMBER bytes, on any rank, from the beginning
"""

from __future__ import annotations

import errno
import resource
import sys
import time
from pathlib import Path

from crash.points import Points, Strike, kill, refuse

from mpitrain.comm.world import world
from mpitrain.events import Event, listen
from mpitrain.train import main


def struck(how: str, rank: int, number: int, mark: Path) -> Points:
    """The listener of this rank."""
    if rank != world().rank:
        return Points(())

    def blow(event: Event) -> None:
        mark.write_text(repr(time.time()))
        (kill if how == "kill" else refuse(getattr(errno, how)))(event)

    return Strike(number, blow) if how == "kill" else Strike(number, blow, kinds=("disk",))


if __name__ == "__main__":
    how, rank, number, mark, *flags = sys.argv[1:]
    world()  # with MPI's own files
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(number), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        main(flags)
    elif how == "count":
        points = Points()
        with listen(points):
            main(flags)
        disk = sum(kind == "disk" for kind, _ in points.passed)
        Path(f"{mark}.{world().rank}").write_text(f"{len(points.passed)} {disk}")
    else:
        with listen(struck(how, int(rank), int(number), Path(mark))):
            main(flags)

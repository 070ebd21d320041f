"""What ranks that are killed would leave behind in shared memory, of the MPI library's own.

MPICH's ranks of a host share a file in /dev/shm, of 4 MB and more, which the last one to leave removes.  Ranks that are
killed leave it there, in the machine's memory, and nothing ever takes it away.  But a file that all have mapped needs
no name any more, like the flight board's (board_file.py), and one without a name goes with the last process that has
it.  Open MPI's launcher tidies up by itself.
"""

from __future__ import annotations

import contextlib
import os
import re

_OF_MPICH = re.compile(r"/dev/shm/mpich_shm_[0-9a-f]+_[0-9]+")


def forget_names(maps: str = "/proc/self/maps") -> None:
    """Take away the names of the library's shared memory.  Every rank may call it once all of them have started MPI.

    Args:
        maps: what this process has mapped, as Linux tells it.

    Cost: a millisecond.
    """
    with contextlib.suppress(OSError), open(maps, encoding="utf-8", errors="replace") as file:  # no Linux: no names
        for path in {line.split(maxsplit=5)[5].strip() for line in file if "/mpich_shm_" in line}:
            if _OF_MPICH.fullmatch(path):
                with contextlib.suppress(FileNotFoundError):  # another rank was faster
                    os.unlink(path)

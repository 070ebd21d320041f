"""The inside of a run that `mpitrain verify` makes: run a script, and record each rank's training.

    python -m mpitrain.verify.run FOLDER here|threads RANKS STEPS SCRIPT [args]

`here`: this process is the one rank, or one of mpirun's.  `threads`: RANKS ranks are threads of this process.  Each
rank writes FOLDER/rank-NNNNN.records.  The script finds itself as `__main__`, its own folder on the path, and its own
arguments; it knows nothing of all this.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpitrain.comm.local import run_script
from mpitrain.comm.world import world
from mpitrain.debug.capture import recording, write
from mpitrain.errors import UserError


def records_of(folder: Path, rank: int) -> Path:
    """Where a rank's records lie."""
    return folder / f"rank-{rank:05d}.records"


@contextmanager
def recorded(folder: Path, steps: int) -> Iterator[None]:
    """Record what this rank trains in the block into its file."""
    ranks = world()
    with open(records_of(folder, ranks.rank), "wb") as file, recording(ranks, lambda r: write(file, r), steps):
        yield


def main(argv: list[str]) -> int:
    """Run the script; the exit code is the script's."""
    folder, way, ranks, steps, script, *args = argv
    if way == "threads":
        return run_script(int(ranks), script, args, lambda: recorded(Path(folder), int(steps)))
    sys.argv = [script, *args]
    if not sys.flags.safe_path if sys.version_info >= (3, 11) else True:
        sys.path[0] = os.path.dirname(os.path.abspath(script))  # it was the folder of `python -m`
    try:
        with recorded(Path(folder), int(steps)):
            runpy.run_path(script, run_name="__main__")
    except UserError as error:
        if world().size > 1:
            raise  # the guard prints it, once for all ranks
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

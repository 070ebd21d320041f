"""The inside of a run that `mpitrain verify` makes: run a script, and record each rank's training.

    python -m mpitrain.verify.run FOLDER here|threads RANKS STEPS plain|states SCRIPT [args]

`here`: this process is the one rank, or one of mpirun's.  `threads`: RANKS ranks are threads of this process.
`states`: the states of all values are checked, too.  Each rank writes FOLDER/rank-NNNNN.records.  Where there is a
FOLDER/courses.json, the one rank computes with the weights of the pipeline that it tells of.  The script finds itself
as `__main__`, its own folder on the path, and its own arguments; it knows nothing of all this.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from mpitrain.comm.local import run_script
from mpitrain.comm.world import world
from mpitrain.debug.capture import recording, write
from mpitrain.debug.states.around import checking_states
from mpitrain.errors import ConfigError, UserError
from mpitrain.events import Event, listen
from mpitrain.verify import stale


def records_of(folder: Path, rank: int) -> Path:
    """Where a rank's records lie."""
    return folder / f"rank-{rank:05d}.records"


def courses_of(folder: Path) -> Path:
    """Where it stands which pipeline a run replays."""
    return folder / "courses.json"


@contextmanager
def recorded(folder: Path, steps: int, states: bool) -> Iterator[None]:
    """Record what this rank trains in the block into its file, and perhaps check states, or replay a pipeline."""
    ranks = world()
    courses = stale.read(courses_of(folder))
    with ExitStack() as stack:
        stack.enter_context(listen(_refuse_another_run))
        if courses:
            stack.enter_context(listen(stale.Replay(ranks, courses)))
        file = stack.enter_context(open(records_of(folder, ranks.rank), "wb"))
        stack.enter_context(recording(ranks, lambda record: write(file, record), steps))
        if states:
            stack.enter_context(checking_states(ranks))
        yield


def _refuse_another_run(event: Event) -> None:
    """A listener that ends a script whose reducer makes every layout a run of its own, before its first step.

    Raises:
        ConfigError: it does; on every rank.
    """
    why = event.info["executor"].reducer.another_run if event.kind == "action" else ""
    if why:
        raise ConfigError(
            f"{why}: every layout is a training run of its own.\nThere is nothing to prove; take another reducer."
        )


def main(argv: list[str]) -> int:
    """Run the script; the exit code is the script's."""
    folder, way, ranks, steps, check, script, *args = argv

    def around() -> AbstractContextManager[None]:
        return recorded(Path(folder), int(steps), check == "states")

    if way == "threads":
        return run_script(int(ranks), script, args, around)
    sys.argv = [script, *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(script))  # it was the folder of `python -m`
    try:
        with around():
            runpy.run_path(script, run_name="__main__")
    except Exception as error:
        if world().size > 1:
            raise  # the guard prints it, once for all ranks
        if isinstance(error, UserError):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2
        traceback.print_exception(type(error), error, _from_script_on(error.__traceback__, script))
        return 1
    return 0


def _from_script_on(trace: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback without our own frames; whole where the script was not even begun."""
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename != script:
        own = own.tb_next
    return own or trace


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

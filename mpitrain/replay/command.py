"""The command line of `mpitrain replay`."""

from __future__ import annotations

import bdb
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from mpitrain.blas import one_thread
from mpitrain.comm.script import EndOfRecording, Script
from mpitrain.errors import RecordingError
from mpitrain.options import Interval, Option, help_text, read_flags, show
from mpitrain.recording.outline import outline, told_spans
from mpitrain.recording.reading import RankReader, ranks_in
from mpitrain.replay import stop
from mpitrain.replay.forward import Forward
from mpitrain.replay.run import Outcome, replay, script_of, trainer

TITLE = """usage: mpitrain replay DIR                                     tell what is recorded
       mpitrain replay DIR --rank N [options]                  run that rank of the trainer again
       mpitrain replay DIR --rank N [options] -- --lr 1e-3     with other flags of the trainer
       mpitrain replay DIR --rank N [options] SCRIPT [args]    of a script, which a recording does not name

Runs one recorded rank alone, without MPI: its messages are answered from the recording.  What it sends, and all that
outlives a step, is compared with what was; it stops where something differs.  Exit code 2: it does."""

OPTIONS = {
    option.name: option
    for option in (
        Option("rank", int, None, "which rank", Interval(0, 2**20), metavar="N", unset="default: tell what is there"),
        Option("pdb", bool, False, "debug it: from its first step, or line, on, and where it differs", off="--no-pdb"),
        Option(
            "at",
            int,
            None,
            "debug it in the line that sends message N",
            Interval(1, 10**12),
            metavar="N",
            unset="default: not",
        ),
        Option("keep_going", bool, False, "tell all values that differ, and go on", off="--no-keep-going"),
        Option("run", str, None, "keep what the run writes", metavar="FOLDER", unset="default: it is removed"),
    )
}
GROUPS = {"rank": "Options"}
MOST_TOLD = 20
_VALUED = tuple(option.flag for option in OPTIONS.values() if option.kind is not bool)


def main(argv: Sequence[str]) -> int:
    """Run `mpitrain replay`.

    Args:
        argv: words behind `replay`.

    Returns:
        0; 2 if something differs and it went on all the same; 130 if the debugger was left.

    Raises:
        UserError: the command line is wrong, the recording is damaged, or the rank does something else than it did.
    """
    words = list(argv)
    if words[:1] in ([], ["--help"], ["-h"]):
        print(help_text(TITLE, OPTIONS, GROUPS))
        return 0
    folder = Path(words.pop(0))
    own, program, more = _parted(words)
    flags = read_flags(own, OPTIONS.values())
    rank = flags.get("rank")
    if rank is None:
        print(_told(folder))
        return 0
    assert isinstance(rank, int)
    one_thread()
    debug, at = bool(flags.get("pdb")), flags.get("at")
    if isinstance(at, int):
        _can_stop(folder, rank, at)
    reader = RankReader(folder, rank)
    keep_going = bool(flags.get("keep_going"))
    with tempfile.TemporaryDirectory(prefix="mpitrain-replay-") as own_folder:
        place = Path(str(flags["run"])) if flags.get("run") else Path(own_folder)
        try:
            run = _program(reader, Path(own_folder), folder, rank, program, more)
        except RecordingError:
            reader.close()
            raise

        stopped: list[int] = []

        def before(n: int) -> None:
            if n == at:
                stopped.append(n)
                stop.here(f"before message {n}", steps=True)

        def prepare(script: Script, forward: Forward) -> None:
            if at is not None:
                script.before = before
            if debug and at is None:
                if program:
                    stop.at_first_line(program[0])
                else:
                    forward.breakpoint = lambda: stop.here("the first step that is made again")

        def ended(end: EndOfRecording) -> None:
            if debug and not end.as_asked:
                stop.after(end.__traceback__, f"the recording ends here, {end}")

        def again() -> Outcome:
            return replay(reader, run, place, keep_going=keep_going, prepare=prepare, ended=ended)

        try:
            outcome = _debugged(again, debug)
        except bdb.BdbQuit:
            return 130
    if at is not None and not stopped:
        print(f"message {at}, before which to stop, was not made again: the rank ended before it")
    print(_verdict(rank, outcome))
    return 2 if outcome.differences else 0


def _can_stop(folder: Path, rank: int, at: int) -> None:
    """Refuse a message that the replay will not come to.

    Raises:
        RecordingError: it is not recorded; which are.
    """
    found = outline(folder, rank)
    if found.has(at):
        return
    steps = f"\nMessages {found.steps[0]} to {found.steps[1]} are of recorded steps." if found.steps else ""
    raise RecordingError(
        f"--at {at}: that message of rank {rank} is not in {folder}, so a replay cannot stop there.\n"
        f"Recorded are {told_spans(found.spans) or 'none'}.{steps}"
    )


def _parted(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Options, the script with its arguments, and flags of the trainer."""
    place = 0
    while place < len(words):
        word = words[place]
        if word == "--":
            return words[:place], [], words[place + 1 :]
        if not word.startswith("-"):
            return words[:place], words[place:], []
        place += 2 if word in _VALUED else 1
    return words, [], []


def _program(
    reader: RankReader, own: Path, folder: Path, rank: int, program: list[str], more: list[str]
) -> Callable[[], object]:
    """What to run.

    Raises:
        RecordingError: it is of a script, which must be named.
    """
    if program:
        return script_of(program[0], program[1:])
    if reader.header["program"] != "train":
        words = " ".join(["SCRIPT", *(show(word) for word in reader.header["words"][1:])])
        was = f" (it was {show(reader.header['words'][0][:200])})" if reader.header["words"] else ""
        raise RecordingError(
            f"{folder} is of a script{was}.  A recording is data and names no code that is run: type it yourself.\n"
            f"  mpitrain replay {folder} --rank {rank} {words[:300]}"
        )
    return trainer(reader, own, more)


def _debugged(run: Callable[[], Outcome], debug: bool) -> Outcome:
    """Run it; with a prompt where it ends in an error."""
    try:
        return run()
    except bdb.BdbQuit:
        raise
    except Exception as error:
        if debug:
            print(f"{type(error).__name__}: {error}", flush=True)
            stop.after(error.__traceback__, "here it ended")
        raise


def _told(folder: Path) -> str:
    """What a folder holds.

    Raises:
        RecordingError: no recording.
    """
    lines: list[str] = []
    broken: list[str] = []
    ways: list[str] = []
    for rank in ranks_in(folder):
        try:
            reader = RankReader(folder, rank)
        except RecordingError as error:
            broken.append(f"  rank {rank}: {error}")
            continue
        header = reader.header
        reader.close()
        if not lines:
            steps = header.get("steps")
            which = f"steps {steps[0]} to {steps[-1]}" if isinstance(steps, list) and len(steps) == 2 else "all steps"
            words = " ".join(show(word) for word in header["words"])
            lines += [
                f"{folder}: {which} of a run on {header['size']} ranks ({header['library']})",
                f"  of {'the trainer with' if header['program'] == 'train' else 'a script:'} {words[:600]}".rstrip(),
            ]
            script = "" if header["program"] == "train" else " SCRIPT [args]"
            again = f"mpitrain replay {folder} --rank {rank}"
            ways = [f"run one again:      {again}{script}", f"stop at a message:  {again} --at N{script}"]
        size = sum(path.stat().st_size for path in folder.glob(f"rank-{rank:05}[-.]*"))
        lines.append(f"  rank {rank}: {_messages(folder, rank, reader)}, {size / 2**20:,.1f} MiB, on {header['host']}")
    if not lines:
        raise RecordingError(broken[0].partition(": ")[2] if broken else f"{folder} holds no recording.")
    return "\n".join([*lines, *broken, *ways])


def _messages(folder: Path, rank: int, reader: RankReader) -> str:
    """How many messages there were, and which of them a replay can stop at."""
    try:
        found = outline(folder, rank)
    except RecordingError as error:
        return f"{reader.messages:,} messages; {error}"
    which = f"{found.steps[0]} to {found.steps[1]} of recorded steps" if found.steps else ""
    return f"{reader.messages:,} messages" + (f" ({which})" if which else "")


def _verdict(rank: int, outcome: Outcome) -> str:
    lines: list[str] = []
    if outcome.end:
        lines.append(f"rank {rank} ends {outcome.end}")
    for text in outcome.differences[:MOST_TOLD]:
        lines.append(text)
    if len(outcome.differences) > MOST_TOLD:
        lines.append(f"... and {len(outcome.differences) - MOST_TOLD} more")
    skipped = f", {outcome.skipped:,} before them skipped" if outcome.skipped else ""
    steps = f", and all that outlives each of {outcome.steps:,} steps{skipped}" if outcome.steps else ""
    if outcome.differences:
        count = len(outcome.differences)
        differ = "values differ" if count > 1 else "value differs"
        lines.append(f"rank {rank} replayed: {count:,} {differ} from the recording")
    else:
        lines.append(f"rank {rank} replayed, bit by bit the same: {outcome.compared:,} messages that it sent{steps}")
    return "\n".join(lines)

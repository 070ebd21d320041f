"""The program of a recording again, on the one rank that is here.

A run of the trainer starts by its recorded flags, without those that write into other places.  A script is code, and a
recording is data: which script runs is what the user types.
"""

from __future__ import annotations

import contextvars
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.comm.replay import ReplayWorld
from mpitrain.comm.script import WAY_OUT, EndOfRecording, Script, spoken
from mpitrain.comm.world import SURROUNDING
from mpitrain.errors import RecordingError, ReplayDivergence
from mpitrain.events import join
from mpitrain.pipeline.stand_in import STAND_IN
from mpitrain.recording.lines import End
from mpitrain.recording.outside import OUTSIDE
from mpitrain.recording.reading import RankReader
from mpitrain.replay.forward import Forward

LEFT_OUT = ("--faults", "--config", "--offload-to")
"""Flags of the trainer that a replay does not repeat: they fail on purpose, or name a file, or a place to write."""


@dataclass
class Outcome:
    """How a replay went.

    Attributes:
        messages: that were answered or compared, steps: made again, skipped: not made.
        end: where it ended, if the recording ended before the program.
        differences: what differed, with --keep-going.
    """

    messages: int
    of: int
    compared: int
    steps: int
    skipped: int
    end: str
    differences: list[str]


def replay(
    reader: RankReader,
    program: Callable[[], object],
    folder: Path,
    *,
    keep_going: bool = False,
    prepare: Callable[[Script, Forward], None] = lambda script, forward: None,
    ended: Callable[[EndOfRecording], None] = lambda end: None,
) -> Outcome:
    """Run a program as the recorded rank, in a context of its own.

    Args:
        reader: of the recording.
        program: what to run; finds the recorded world with `world()`.
        folder: where it writes what it would write into its run's folder.
        keep_going: note other values and go on.
        prepare: may set breakpoints.
        ended: called where the recording ends before the program.

    Raises:
        ReplayDivergence: the program does something else than it did then.
        RecordingError: the recording is damaged.
        BaseException: what the program raises.
    """
    script = Script(reader, keep_going)
    forward = Forward(script, folder)
    prepare(script, forward)

    def body() -> str:
        SURROUNDING.set(ReplayWorld(script))  # not `surround`: faults of the environment happen in runs alone
        STAND_IN.set(forward)
        OUTSIDE.set(forward)
        join(forward, ops=False)
        try:
            program()
        except EndOfRecording as end:
            ended(end)
            return str(end)
        line = reader.peek()
        if line is not None and not isinstance(line, End):
            raise ReplayDivergence(f"the program has ended; there the recording {spoken(line)}.\n{WAY_OUT}")
        return ""

    try:
        end = contextvars.copy_context().run(body)
    finally:
        reader.close()
    return Outcome(
        script.answered, reader.messages, script.compared, forward.steps, forward.skipped, end, script.differences
    )


def trainer(reader: RankReader, folder: Path, more: Sequence[str] = ()) -> Callable[[], object]:
    """The trainer as it was started, with more flags."""
    from mpitrain.train import main

    flags = without(reader.header["words"], LEFT_OUT)
    if (settings := reader.header.get("settings")) is not None:
        path = folder / "settings.toml"
        path.write_text(settings, encoding="utf-8")
        flags = ["--config", os.fspath(path), *flags]
    offload = next((word for word in values(reader.header["words"], "--offload-to") if word.startswith("hdf5")), None)
    if offload is not None:
        flags += ["--offload-to", f"hdf5:{folder / 'store'}"]
    if reader.header["deterministic"]:
        flags.append("--deterministic")
    return lambda: main([*flags, *more])


def script_of(path: str, argv: Sequence[str]) -> Callable[[], object]:
    """A script that the user names, with its arguments."""

    def run() -> None:
        before = sys.argv, sys.path[:]
        sys.argv = [path, *argv]
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        finally:
            sys.argv, sys.path[:] = before

    if not os.path.isfile(path):
        raise RecordingError(f"{path}: there is no such script.")
    return run


def without(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    """Flags without those of these names, and their values."""
    kept: list[str] = []
    skip = False
    for word in flags:
        name, equals, _ = word.partition("=")
        if skip and not word.startswith("--"):
            skip = False
            continue
        skip = name in names and not equals
        if name not in names:
            kept.append(word)
    return kept


def values(flags: Sequence[str], name: str) -> list[str]:
    """What a command line gives for a flag."""
    pairs = zip(flags, [*flags[1:], ""], strict=True)
    found = [after for word, after in pairs if word == name]
    return found + [word.partition("=")[2] for word in flags if word.startswith(f"{name}=")]

"""Where a schedule comes from: its name, or a text file with one rank's actions a line.

    # two ranks, two micro-batches
    F0@0 F1@0 B0@0 B1@0
    F0@1 B0@1 F1@1 B1@1

Either way it is completed by the same passes as the schedule of a training run.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from typing import NamedTuple

from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.options import show, suggest
from mpitrain.pipeline.action import COMPUTE, MESSAGES, PER_STEP, Row, Schedule, parse, row_text
from mpitrain.pipeline.passes import complete, with_messages, with_update, with_updates
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.schedule.places import in_the_file, words

SIZES = ("stages", "microbatches", "chunks", "slices", "batches")
"""What a schedule by name depends on."""

_MAX_FILE = 4 << 20  # bytes; a row of 1,000 micro-batches with its messages is 50 KiB
_MOST_ROWS = 1024
_MOST_WORK = 100_000  # Fs of all ranks; some seconds of checking


class Asked(NamedTuple):
    """A schedule, completed, with what is known of it.

    title: what it is, in half a line; versions: the rule of `mpitrain.pipeline.versions`, where there is one; batches:
    how many the rows go over; file: the file it is from, as errors name it, empty for a name; text: what is in it.
    """

    rows: Schedule
    title: str
    versions: str | None = None
    batches: int = 1
    file: str = ""
    text: str = ""


def by_name(name: str, given: Mapping[str, int]) -> Asked:
    """The schedule with a name.

    Args:
        name: one of `SCHEDULES`.
        given: those of `SIZES` that are not left to their default.

    Raises:
        ConfigError: there is no such schedule, or it is too large to be looked at.
        ScheduleError: it does not take these sizes.
    """
    if name not in SCHEDULES:
        hint = suggest(name, SCHEDULES)
        raise ConfigError(f"{show(name)}: there is no such schedule.{hint}  Schedules: {' '.join(SCHEDULES)}.")
    kind = SCHEDULES[name]
    ranks = given.get("stages", 4)
    micros = given.get("microbatches", 8 if kind.versions is None else 1 if kind.versions == "newest" else ranks)
    if kind.versions == "newest" and micros != 1:
        raise ConfigError(
            f"mpitrain schedule {name}: every batch is an update and is not cut; --microbatches {micros} must be 1."
            "\nWay out: --batches for more of them in a row; pipedream-2bw adds up gradients of several micro-batches."
        )
    chunks = given.get("chunks", 2 if kind.chunked else 1)
    slices = given.get("slices", 4 if kind.sliced else 1)
    batches = given.get("batches", 1 if kind.versions is None else 8 if kind.versions == "newest" else 3)
    work = ranks * micros * chunks * slices * batches
    if work > _MOST_WORK:
        raise ConfigError(f"mpitrain schedule {name}: {work:,} forward passes are too many; at most {_MOST_WORK:,}.")
    rows = complete(name, ranks=ranks, microbatches=micros, chunks=chunks, slices=slices, batches=batches)
    parts = [_counted(ranks, "rank"), _counted(micros, "micro-batch")]
    if kind.versions is not None:
        parts[1] = f"{_counted(batches, 'batch')} of {parts[1]}"
    parts += [_counted(chunks, "chunk")] * kind.chunked + [_counted(slices, "slice")] * kind.sliced
    return Asked(rows, f"{name}: {', '.join(parts)}", kind.versions, batches)


def from_file(path: str, batches: int | None) -> Asked:
    """The schedule in a file; `-` is standard input.

    Raises:
        ConfigError: it cannot be read, is too large, or is no text.
        ScheduleError: a word is no action, or `completed` refuses the rows.
    """
    file = "standard input" if path == "-" else show(path)
    try:
        text = _read_text(path, file)
        rows = read_rows(text)
    except ScheduleError as error:
        raise ScheduleError(f"{file}: {error}") from None
    try:
        rows = completed(rows, batches)
    except ScheduleError as error:
        raise ScheduleError(f"{file}: {in_the_file(str(error), text)}") from None
    return Asked(rows, file, batches=batches or 1, file=file, text=text)


def _read_text(path: str, file: str) -> str:
    """A file is not trusted: what it is and how large is looked at before it is read."""
    wanted = "it must hold a line of actions for each rank"
    try:
        if path == "-":
            data = sys.stdin.buffer.read(_MAX_FILE + 1)
        else:
            if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would block, a device would never end
                raise ConfigError(f"--file {file}: is not a regular file; {wanted} (--file - reads standard input).")
            with open(path, "rb") as opened:
                data = opened.read(_MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"--file {file}: cannot be read: {error.strerror}; {wanted}.") from None
    if len(data) > _MAX_FILE:
        raise ConfigError(f"--file {file}: is larger than {_MAX_FILE >> 20} MiB, the most that is read.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--file {file}: byte {error.start} is not UTF-8; {wanted}.") from None


def read_rows(text: str) -> Schedule:
    """Rows from their text: a line for each rank, actions parted by white space, # begins a comment.

    Raises:
        ScheduleError: a word is no action, naming its line and column; or there is no row, or there are too many.
    """
    rows = []
    for number, line in words(text):
        row: Row = []
        for column, word in line:
            try:
                row.append(parse(word))
            except ScheduleError as error:
                raise ScheduleError(f"line {number}, column {column}: {error}") from None
        rows.append(row)
    if not 1 <= len(rows) <= _MOST_ROWS:
        found = f"{len(rows):,} rows, at most {_MOST_ROWS:,} are read" if rows else "no rows"
        raise ScheduleError(f"there are {found}; a row reads F0@0 F1@0 B0@0 B1@0, one line for each rank")
    return rows


def rows_text(rows: Schedule, compute: bool = False) -> str:
    """The text that `read_rows` reads; of F, B and W alone if `compute`."""
    return "\n".join(row_text([a for a in row if a.kind in COMPUTE] if compute else row) for row in rows)


def completed(rows: Schedule, batches: int | None = None) -> Schedule:
    """Rows with messages and updates, each added where the rows have none of them.

    What is there is left where it stands, and must then be whole: where a LOAD belongs depends on where the COUNT is.

    Args:
        rows: at least the F and B of every stage.
        batches: how many the rows go over, with an update after each; None for one step.

    Raises:
        ScheduleError: a stage is on two ranks or on none, the micro-batches do not divide into batches, or the rows
            have updates of their own besides, or some kinds of LOAD, COUNT, REDUCE and STEP without the others.
    """
    kinds = {action.kind for row in rows for action in row}
    if not kinds & set(MESSAGES):
        rows = with_messages(rows)
    update = ("LOAD", *PER_STEP)
    if given := [kind for kind in update if kind in kinds]:
        if len(given) < len(update):
            missing = ", ".join(kind for kind in update if kind not in kinds)
            raise ScheduleError(
                f"the rows have {' and '.join(given)} but no {missing}.\n"
                f"Way out: leave {' and '.join(given)} out, and all of {', '.join(update)} are added where they "
                f"belong; or give all four in every row."
            )
        if batches is not None:
            raise ScheduleError("the rows have updates of their own; leave out --batches")
        return rows
    if batches is None:
        return with_update(rows)
    micros = len({action.micro for row in rows for action in row if action.kind == "F"})
    if micros % batches:
        raise ScheduleError(f"{micros} micro-batches do not divide into {batches} batches")
    return with_updates(rows, micros // batches)


def _counted(number: int, thing: str) -> str:
    plural = thing + ("es" if thing.endswith("ch") else "s")
    return f"{number} {thing if number == 1 else plural}"

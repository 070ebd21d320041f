"""The command line of `mpitrain schedule`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence

from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.options import Interval, Option, Value, help_text, read_flags, show
from mpitrain.pipeline.picture import svg
from mpitrain.pipeline.simulate import Costs, check, simulate
from mpitrain.schedule.costs import costs_from, costs_of_passes, sizes_from
from mpitrain.schedule.places import in_the_file
from mpitrain.schedule.report import list_of_schedules, report, up_to_the_hang
from mpitrain.schedule.source import SIZES, Asked, by_name, from_file, rows_text

UNREAD = 128 + signal.SIGPIPE  # as shells have it

TITLE = """usage: mpitrain schedule                        list the schedules
       mpitrain schedule NAME [options]         print, draw and check one
       mpitrain schedule --file FILE [options]  check one of yours

Prints a pipeline schedule as a table of time, with its makespan, idle time and bubble, what it holds in flight, and
whether it would hang if sends were blocking.  A file has a line for each rank, its actions parted by spaces; # begins
a comment.  Messages and updates are added to it, unless it has some.  Exit code 2: the schedule cannot run."""

_UNSET = {
    "microbatches": "default 8; 1 for pipedream, as many as ranks for pipedream-2bw",
    "chunks": "default 2 for interleaved, else 1",
    "slices": "default 4 for terapipe, else 1",
    "batches": "default 8 or 3 for pipedream, 3 for pipedream-2bw, else 1",
}
_COSTS = "time of F, B and W of a rank's layers, shared by its chunks and slices; or of each stage: f=1:1:2"
_BYTES = (
    "saved from F to B by a rank's layers, kept of it from B to W, boundary of a message; or of each stage: "
    "saved=9KiB:5KiB"
)

OPTIONS = {
    option.name: option
    for option in (
        Option("stages", int, 4, "ranks of the pipeline", Interval(1, 1024), metavar="P"),
        Option("microbatches", int, None, "of a batch", Interval(1, 10**5), metavar="M", unset=_UNSET["microbatches"]),
        Option("chunks", int, None, "stages of a rank", Interval(1, 64), metavar="V", unset=_UNSET["chunks"]),
        Option("slices", int, None, "of a sequence", Interval(1, 1024), metavar="N", unset=_UNSET["slices"]),
        Option("batches", int, None, "without a flush", Interval(1, 10**5), metavar="N", unset=_UNSET["batches"]),
        Option("file", str, None, "a schedule of yours; - is standard input", metavar="FILE", unset="default: none"),
        Option("costs", str, "f=1,b=1,w=1,message=0", _COSTS, metavar="COSTS"),
        Option("bytes", str, None, _BYTES, metavar="SIZES", unset="default: not counted"),
        Option("rows", bool, False, "print the rows alone, as --file reads them", off="--no-rows"),
        Option("compute_rows", bool, False, "print F, B and W of the rows alone", off="--no-compute-rows"),
        Option("svg", str, None, "write a picture", metavar="FILE", unset="default: none"),
        Option("arrows", bool, False, "draw messages between neighbours into the picture", off="--no-arrows"),
        Option("width", int, None, "of the table", Interval(20, 10**6), metavar="N", unset="default: the terminal's"),
    )
}
GROUPS = {"stages": "A schedule by name", "file": "A schedule from a file", "costs": "Figures", "rows": "Output"}


def main(argv: Sequence[str]) -> int:
    """Run `mpitrain schedule`.

    Args:
        argv: words behind `schedule`.

    Returns:
        0; 141 if whoever read the output is gone (`| head`).

    Raises:
        UserError: the command line is wrong, a file cannot be read or written, or the schedule cannot run.
    """
    try:
        _run(list(argv))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed at the end
        return UNREAD
    return 0


def _run(words: list[str]) -> None:
    if words[:1] in (["--help"], ["-h"]):
        print(help_text(TITLE, OPTIONS, GROUPS))
        return
    if not words:
        print(list_of_schedules())
        return
    name = "" if words[0].startswith("-") else words.pop(0)
    flags = read_flags(words, OPTIONS.values())
    given = {option: flags.get(option, OPTIONS[option].default) for option in OPTIONS}
    asked = _asked(name, flags)
    costs = costs_from(str(given["costs"]))
    width = int(given["width"] or shutil.get_terminal_size((120, 24)).columns)
    try:
        checked = check(asked.rows)
        timeline = simulate(asked.rows, costs_of_passes(costs, asked.rows), sizes_from(given["bytes"], asked.rows))
    except ScheduleError as error:
        raise _refusal(asked, str(error), costs, width) from None
    if given["svg"] is not None:
        _write(str(given["svg"]), svg(timeline, asked.title, messages=bool(given["arrows"])))
    elif given["arrows"]:
        raise ConfigError("--arrows is of the picture that --svg FILE writes; give both.")
    if given["rows"] and given["compute_rows"]:
        raise ConfigError("--rows prints all actions, --compute-rows F, B and W alone; give one of them.")
    if given["rows"] or given["compute_rows"]:
        compute = bool(given["compute_rows"])
        hint = f"; read it with --batches {asked.batches}" if compute and asked.batches > 1 else ""
        print(f"# {asked.title}{hint}\n{rows_text(asked.rows, compute)}")
        return
    print(report(asked, timeline, checked, costs, width))


def _refusal(asked: Asked, said: str, costs: Costs, width: int) -> ScheduleError:
    """What is wrong, in the places of the user's file; of a deadlock the table up to it is printed before."""
    if said.startswith("deadlock"):
        print(up_to_the_hang(asked, costs, width), flush=True)
    return ScheduleError(f"{asked.file}: {in_the_file(said, asked.text)}" if asked.file else said)


def _asked(name: str, flags: dict[str, Value]) -> Asked:
    sizes = {option: int(flags[option] or 0) for option in SIZES if option in flags}
    if name:
        if "file" in flags:
            raise ConfigError(f"{show(name)} and --file: give the name of a schedule or a file, not both.")
        return by_name(name, sizes)
    if "file" not in flags:
        raise ConfigError("mpitrain schedule: give the name of a schedule first, or --file FILE; --help says more.")
    batches = sizes.pop("batches", None)
    if sizes:
        raise ConfigError(f"{OPTIONS[next(iter(sizes))].flag}: is read off the rows of --file; leave it out.")
    return from_file(str(flags["file"]), batches)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--svg {show(path)}: cannot be written: {error.strerror}.") from None

"""The command line of `mpitrain schedule`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.options import Interval, Option, Value, help_text, read_flags, show
from mpitrain.pipeline.picture import svg
from mpitrain.pipeline.simulate import Costs, Sizes, check, simulate
from mpitrain.schedule.report import list_of_schedules, report
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
_COSTS = "time of each kind of action, or of each stage: f=1:1:2; a backward that is not split takes b + w"
_BYTES = (
    "sizes of a stage: saved from F to B, kept of it from B to W, boundary of a message; or of each: saved=9KiB:5KiB"
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

_SIZE = re.compile(r"([0-9]{1,15})(|B|KiB|MiB|GiB)")
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

_N = TypeVar("_N")


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
    costs = _costs(str(given["costs"]))
    try:
        checked = check(asked.rows)
        timeline = simulate(asked.rows, costs, _sizes(given["bytes"], len(checked.placement)))
    except ScheduleError as error:
        raise ScheduleError(f"{asked.file}: {error}" if asked.file else str(error)) from None
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
    print(report(asked, timeline, checked, costs, int(given["width"] or shutil.get_terminal_size((120, 24)).columns)))


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


def _costs(text: str) -> Costs:
    number = Option("", float, None, "", Interval(0, 10**9))
    found = _pairs("--costs", text, ("f", "b", "w", "message"), lambda word, at: float(number.parse(word, at) or 0))
    message = found.pop("message", [0.0])
    if len(message) > 1:
        raise ConfigError("--costs message: is one number, not one for each stage.")
    # A list of one number is that of every stage.
    return Costs(**{kind: times if len(times) > 1 else times[0] for kind, times in found.items()}, message=message[0])


def _sizes(text: Value, num_stages: int) -> Sizes | None:
    if text is None:
        return None

    def number(word: str, where: str) -> int:
        match = _SIZE.fullmatch(word)
        if match is None:
            raise ConfigError(f"{where}: must be a whole number of bytes, KiB, MiB or GiB, such as 40MiB.")
        return int(match[1]) * _UNITS[match[2]]

    found = _pairs("--bytes", str(text), ("saved", "kept", "boundary"), number)
    sizes = {name: found.get(name, [0]) for name in ("saved", "kept", "boundary")}
    return Sizes(**{name: size if len(size) > 1 else size * num_stages for name, size in sizes.items()})


def _pairs(flag: str, text: str, names: Sequence[str], number: Callable[[str, str], _N]) -> dict[str, list[_N]]:
    """What `name=1:2:3,name=4` says, each name at most once."""
    found: dict[str, list[_N]] = {}
    for pair in text.split(","):
        name, equals, values = (word.strip() for word in pair.partition("="))
        if name not in names or not equals:
            raise ConfigError(f"{flag} {show(pair.strip())}: must read NAME=NUMBER, NAME one of {', '.join(names)}.")
        if name in found:
            raise ConfigError(f"{flag}: {name} stands twice.")
        found[name] = [number(word.strip(), f"{flag} {name}={show(values)}") for word in values.split(":")]
    return found


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--svg {show(path)}: cannot be written: {error.strerror}.") from None

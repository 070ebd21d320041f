"""The command line of `mpitrain compare`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence

from mpitrain.compare import curves, recordings, report, saved, settings
from mpitrain.compare.findings import Walk
from mpitrain.compare.sources import Source, source
from mpitrain.compare.walk import walk
from mpitrain.errors import ConfigError
from mpitrain.options import Interval, Option, help_text, read_flags, show

SAME, PARTED = 0, 1  # exit codes; a mistake of the user is 2
UNREAD = 128 + signal.SIGPIPE  # as shells have it

TITLE = """usage: mpitrain compare RUN1 RUN2 [options]

The first op, message or parameter at which two runs part: of other layouts, versions or machines.  Runs that were
trained with --digests are compared op by op, others by their metrics and checkpoints; two recordings (--record) of
one layout message by message.  Exit code 0: no difference beyond rounding; 1: they part."""

OPTIONS = {
    option.name: option
    for option in (
        Option("bytes", bool, False, "other bytes in runs of one layout count as a difference, too", off="--no-bytes"),
        Option("tolerance", float, 1e-5, "relative difference of metrics and checkpoints", Interval(0, 1), metavar="X"),
        Option("json", bool, False, "print the result as one JSON object", off="--no-json"),
    )
}


def main(argv: Sequence[str]) -> int:
    """Run `mpitrain compare`.

    Args:
        argv: words behind `compare`.

    Returns:
        0: no difference beyond rounding; 1: the runs part; 141 if whoever read the output is gone.

    Raises:
        UserError: the command line is wrong, or a run cannot be read.
    """
    words = list(argv)
    if words[:1] in ([], ["--help"], ["-h"]):
        print(help_text(TITLE, OPTIONS, {"bytes": "Options"}))
        return SAME
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed at the end
        return UNREAD
    return code


def _run(words: list[str]) -> int:
    folders = [word for word in words[:2] if not word.startswith("-")]
    if len(folders) != 2:
        raise ConfigError("mpitrain compare RUN1 RUN2 [options]: give the folders of two runs; mpitrain compare --help")
    flags = read_flags(words[2:], OPTIONS.values())
    given = {name: flags.get(name, option.default) for name, option in OPTIONS.items()}
    one, other = source(folders[0], 1), source(folders[1], 2)
    tolerance = float(given["tolerance"] or 0.0)
    if one.recorded and other.recorded:
        return _recordings(one, other, bool(given["json"]))
    if one.digests is None or other.digests is None:
        return _without_digests(one, other, tolerance, bool(given["json"]))
    found = walk(one.digests, other.digests)
    parted = found.first is not None or not found.steps or (bool(given["bytes"]) and found.bits is not None)
    if given["json"]:
        print(json.dumps({"parted": parted, **report.as_json(found, None, None)}, allow_nan=False))
    else:
        print(report.text_of([*_heading(one, other), "", *report.of_walk(found, _notes(one, other, found))]))
    return PARTED if parted else SAME


def _recordings(one: Source, other: Source, as_json: bool) -> int:
    """Message by message."""
    found = recordings.compared(one.folder, other.folder)
    if as_json:
        told = {
            "apart": [message._asdict() for message in found.apart],
            "messages": found.messages,
            "notes": found.notes,
        }
        print(json.dumps({"parted": bool(found.apart), "recordings": told}, allow_nan=False))
    else:
        print(report.text_of([*_heading(one, other), "", *report.of_recordings(found)]))
    return PARTED if found.apart else SAME


def _without_digests(one: Source, other: Source, tolerance: float, as_json: bool) -> int:
    """By metrics, then by checkpoints.

    Raises:
        ConfigError: there is nothing that both have.
    """
    of_steps = curves.compare(one.metrics, other.metrics, tolerance) if one.metrics and other.metrics else None
    both = {*one.checkpoints} & {*other.checkpoints}
    of_files = saved.compared(one.checkpoints, other.checkpoints, tolerance) if both else None
    if (of_steps is None or not of_steps.steps) and of_files is None:
        raise ConfigError(
            f"{show(one.folder)} and {show(other.folder)} have nothing in common to compare: digests of both, metrics"
            " of the same steps or checkpoints of the same step.\nTrain both with --digests."
        )
    apart = of_steps is not None and of_steps.first is not None
    parted = apart or (of_files is not None and of_files.step is not None)
    if as_json:
        print(json.dumps({"parted": parted, **report.as_json(None, of_steps, of_files)}, allow_nan=False))
        return PARTED if parted else SAME
    lines = [*_heading(one, other), ""]
    lines += report.of_curves(of_steps, tolerance) if of_steps is not None else []
    lines += report.of_saved(of_files, tolerance) if of_files is not None else []
    lines.append("Which op it is, digests would tell: train both with --digests for a few steps.")
    print(report.text_of(lines))
    return PARTED if parted else SAME


def _heading(one: Source, other: Source) -> list[str]:
    told = settings.others(settings.read(one.folder), settings.read(other.folder))
    return report.heading(one, other, told, settings.facts(one.facts, other.facts))


def _notes(one: Source, other: Source, found: Walk) -> list[str]:
    """Why runs may part without anybody's mistake."""
    notes = []
    for each in (one, other):
        assert each.digests is not None
        begin = each.digests.begin(each.digests.executors[0])
        why = begin.get("another_run")
        if isinstance(why, str) and why:
            notes.append(f"run {each.number}: {show(why)}: every layout is a training run of its own")
        if not each.digests.whole(each.digests.executors[0]):
            there = " ".join(map(str, each.digests.ranks))
            notes.append(f"run {each.number}: only ranks {there} have digests: what others hold parts of is left out")
        for rank, steps in each.digests.lacking(each.digests.executors[0]).items():
            which = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
            notes.append(f"run {each.number}: rank {rank} has no digests of {which}: other ranks have, it may be cut")
        if begin.get("late") is True:
            notes.append(
                f"run {each.number}: its pipeline updates without draining, with weights that are steps old: from the"
                " second step on it is another training run than one that drains"
            )
    if not found.steps and not found.first:
        notes.append("give both runs --digests with the same number, and let them make some steps")
    return notes

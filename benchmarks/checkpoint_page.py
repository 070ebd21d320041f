"""Figures of docs/explanation/checkpoints.md, from a result of `checkpoint.py`.

The page is written by hand but for what stands between two marks in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from precision_page import DOCS, MARKED, text_of

PAGE = DOCS / "explanation/checkpoints.md"
KEPT = DOCS / "figures/checkpoint.json"

PLAIN_WRITE, SAVE, SAVE_BACK = WRITES = "plain write", "save", "save, read back"
PLAIN_COLD, LOAD_COLD, TRUST_COLD = READS = "plain read", "load", "load without checks"


def from_memory(name: str) -> str:
    """The same, with the files in memory."""
    return f"{name} from memory"


PLAIN_WARM, LOAD_WARM, TRUST_WARM = (from_memory(name) for name in READS)
DISK = (*WRITES, PLAIN_COLD, PLAIN_WARM, LOAD_COLD, LOAD_WARM, TRUST_COLD, TRUST_WARM)
"""What is timed on the disk."""

RANKS = (1, 2, 4)
"""That hold the same, and share the writing."""
MB = 1e6

Result = Mapping[str, Any]


class Row(NamedTuple):
    """The time of one thing over that of another, what the ratio is called, and what it should reach."""

    title: str
    above: str
    below: str
    bar: float | None = None


SPEEDS = (
    Row("save, of the speed of a plain write with fsync", PLAIN_WRITE, SAVE, 0.80),
    Row("load, of the speed of a plain read", PLAIN_COLD, LOAD_COLD, 0.60),
    Row("load, of the speed of a plain read, the files in memory", PLAIN_WARM, LOAD_WARM),
)
COSTS = (
    Row("what the checks take of a load", LOAD_COLD, TRUST_COLD),
    Row("what the checks take of a load, the files in memory", LOAD_WARM, TRUST_WARM),
    Row("what `--read-back` adds to a save", SAVE_BACK, SAVE),
)
STALL = 0.05
"""Of a step, at most, that training stands still for a save in the background."""


def ratios(found: Result, row: Row) -> list[float]:
    """The first thing's time over the second's, round by round."""
    seconds = found["seconds"]
    return [above / below for above, below in zip(seconds[row.above], seconds[row.below], strict=True)]


def stalls(found: Result) -> list[float]:
    """Of each save in the background, how long training stood still as a share of a quiet step."""
    seconds = found["seconds"]
    rounds = zip(seconds["begin"], seconds["publish"], seconds["quiet"], strict=True)
    return [(begin + publish) / statistics.fmean(quiet) for begin, publish, quiet in rounds]


def slower(found: Result) -> list[float]:
    """Of each save in the background, a step meanwhile over a quiet one."""
    seconds = found["seconds"]
    rounds = zip(seconds["beside"], seconds["quiet"], strict=True)
    return [statistics.fmean(beside) / statistics.fmean(quiet) for beside, quiet in rounds]


def reaches(result: Result) -> bool:
    """Whether all bars are reached, as far as they were measured."""
    speeds = [
        statistics.median(ratios(found, row)) >= row.bar
        for found in result.get("disk", {}).values()
        for row in SPEEDS
        if row.bar is not None
    ]
    return all(speeds + [statistics.median(stalls(found)) < STALL for found in result.get("steps", {}).values()])


def lines(result: Result) -> list[str]:
    """What is kept, for a terminal."""
    texts = []
    for size, found in result.get("disk", {}).items():
        texts.append(f"{size}: {found['bytes'] / MB:.0f} MB")
        for name, seconds in found["seconds"].items():
            texts.append(f"  {name:<36}{found['bytes'] / MB / statistics.median(seconds):8.0f} MB/s")
        for row in SPEEDS:
            texts.append(f"  {row.title.replace('`', ''):<64}{_percent(ratios(found, row))}")
        for row in COSTS:
            texts.append(f"  {row.title.replace('`', ''):<64}{_percent(_above(found, row))}")
    for ranks, found in result.get("steps", {}).items():
        quiet = statistics.median(map(statistics.fmean, found["seconds"]["quiet"]))
        texts += [
            f"{ranks} rank{'s' * (ranks != '1')}, {found['bytes'] / MB:.0f} MB, a step {1e3 * quiet:.0f} ms",
            f"  {'training stands still, of a step':<64}{_percent(stalls(found))}",
            f"  {'a step meanwhile, of a quiet one':<64}{_percent(slower(found))}",
        ]
    for ranks, sizes in result.get("shares", {}).items():
        texts.append(f"dp {ranks}: files of {', '.join(f'{size:,}' for size in sizes)} bytes")
    return texts


def _above(found: Result, row: Row) -> list[float]:
    """How much longer the first thing takes."""
    return [ratio - 1 for ratio in ratios(found, row)]


def _percent(values: list[float]) -> str:
    return f"{100 * statistics.median(values):6.1f} %  ({100 * min(values):.1f} to {100 * max(values):.1f})"


def parts(result: Result) -> dict[str, str]:
    """What stands between marks, by their names."""
    written = {}
    if "disk" in result:
        written["disk"] = _disk_table(result["disk"])
    if "steps" in result:
        written["steps"] = _steps_table(result["steps"])
    if "shares" in result:
        written["shares"] = _shares_table(result["shares"])
    if about := result.get("about", {}).get("disk"):
        written["about"] = (
            f"{about['cpu']}, {about['cores']} cores; {about['time'][:10]}; numpy {about['versions']['numpy']};"
            f" load average before {about['load']:.1f}; commit {about['commit']}."
        )
    return written


def _disk_table(disk: Result) -> str:
    sizes = list(disk.values())
    bytes_ = " | ".join(f"{found['bytes'] / MB:,.0f} MB of tensors" for found in sizes)
    rows = [f"| | bar | {bytes_} |", "|---|---|" + "--:|" * len(sizes)]
    for name in (PLAIN_WRITE, SAVE, PLAIN_COLD, LOAD_COLD):
        speeds = (found["bytes"] / MB / statistics.median(found["seconds"][name]) for found in sizes)
        rows.append(f"| {name} | | {' | '.join(f'{speed:,.0f} MB/s' for speed in speeds)} |")
    for row in SPEEDS:
        bar = "" if row.bar is None else f"{100 * row.bar:.0f} %"
        rows.append(f"| {row.title} | {bar} | {' | '.join(_cell(ratios(found, row)) for found in sizes)} |")
    for row in COSTS:
        rows.append(f"| {row.title} | | {' | '.join(_cell(_above(found, row)) for found in sizes)} |")
    return "\n".join(rows)


def _steps_table(steps: Result) -> str:
    names = [f"{ranks} rank" if ranks == "1" else f"{ranks} ranks" for ranks in steps]
    rows = [f"| | bar | {' | '.join(names)} |", "|---|---|" + "--:|" * len(names)]
    quiet = (statistics.median(map(statistics.fmean, found["seconds"]["quiet"])) for found in steps.values())
    rows.append(f"| a quiet step | | {' | '.join(f'{seconds:.2f} s' for seconds in quiet)} |")
    stalled = " | ".join(_cell(stalls(found), 1) for found in steps.values())
    rows.append(f"| training stands still, of a step | < {100 * STALL:.0f} % | {stalled} |")
    beside = " | ".join(_cell([ratio - 1 for ratio in slower(found)]) for found in steps.values())
    rows.append(f"| a step takes longer while a save is written | | {beside} |")
    return "\n".join(rows)


def _shares_table(shares: Result) -> str:
    rows = ["| ranks that hold the same | bytes that each writes | all together |", "|--:|---|--:|"]
    for ranks, sizes in shares.items():
        rows.append(f"| {ranks} | {', '.join(f'{size:,}' for size in sizes)} | {sum(sizes):,} |")
    return "\n".join(rows)


def _cell(values: list[float], digits: int = 0) -> str:
    low, middle, high = (100 * of(values) for of in (min, statistics.median, max))
    return f"**{middle:.{digits}f} %** ({low:.{digits}f} to {high:.{digits}f})"


def files(result: Result) -> dict[Path, str]:
    """What stands in docs/ for a result."""
    written = parts(result)
    text = PAGE.read_text(encoding="utf-8")
    text = MARKED.sub(lambda found: f"{found[1]}{written.get(found[2], 'Not measured.')}\n{found[3]}", text)
    return {KEPT: text_of(result), PAGE: text}


def write(result: Result) -> list[Path]:
    """Write them; the paths."""
    texts = files(result)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)

"""Figures of docs/how-to/trace-a-run.md, from a result of `trace_cost.py`.

The page is written by hand but for what stands between two marks in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precision_page import DOCS, MARKED, text_of

PAGE = DOCS / "how-to/trace-a-run.md"
KEPT = DOCS / "figures/trace.json"
BAR = 0.03
"""Of a step, at most, of the default run as it is."""
DEFAULT = "the default run, `dp 8`"

Result = Mapping[str, Any]


def costs(found: Result, of: str) -> tuple[float, float]:
    """By how much traced steps take longer, as a share of the others, and the standard error of that.

    Args:
        found: rounds of one layout.
        of: "seconds" by the clock, or "cpu" of all ranks.
    """
    off, on = found["off"][of], found["on"][of]
    more = [with_trace - without for with_trace, without in zip(on, off, strict=True)]
    error = statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else math.inf
    return statistics.fmean(more) / statistics.fmean(off), error / statistics.fmean(off)


def reaches(result: Result) -> bool:
    """Whether the default run's trace costs less than the bar, as far as it was measured."""
    found = result.get("layouts", {}).get(DEFAULT)
    return found is None or all(costs(found, of)[0] < BAR for of in ("seconds", "cpu"))


def _row(name: str, found: Result, pairs: int) -> list[str]:
    step = 1e3 * statistics.median(found["off"]["seconds"]) / pairs
    shares = [f"{100 * share:+.1f} ± {100 * error:.1f} %" for share, error in (costs(found, of) for of in _MEASURES)]
    return [name, f"{step:.0f} ms", *shares, f"{found['bytes'] / 1e3:.1f} kB"]


_MEASURES = ("seconds", "cpu")
_HEAD = ["", "a step", "longer by the clock", "more CPU time of all ranks", "bytes a step and rank"]


def lines(result: Result) -> list[str]:
    """What is kept, for a terminal."""
    rows = [_HEAD, *(_row(name, found, result["pairs"]) for name, found in result.get("layouts", {}).items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def parts(result: Result) -> dict[str, str]:
    """What stands between marks, by their names."""
    rows = [_row(name, found, result["pairs"]) for name, found in result["layouts"].items()]
    table = ["| " + " | ".join(_HEAD) + " |", "|---|" + "--:|" * (len(_HEAD) - 1)]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    about = result["about"]
    where = (
        f"{about['cpu']}, {about['cores']} cores; {about['time'][:10]}; load average before {about['load']:.1f},"
        f" rounds {'at real-time priority' if about['undisturbed'] else 'beside whatever else ran'};"
        f" commit {about['commit']}."
    )
    return {"cost": "\n".join(table), "about": where}


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

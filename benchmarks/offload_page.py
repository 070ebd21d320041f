"""Figures and pictures of docs/explanation/offload.md, from a result of `offload.py`.

The page is written by hand but for what stands between two marks in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precision_page import DOCS, MARKED, text_of

PAGE = DOCS / "explanation/offload.md"
KEPT = DOCS / "figures/offload.json"
PICTURES = [DOCS / "images/offload-naive.svg", DOCS / "images/offload-ahead.svg"]

HERE = "everything here"
PLACES = ("host", "hdf5")
WHAT = ("o", "a", "oap")
WORDS = {"o": "`optimizer`", "a": "`activations`", "oap": "all three"}

Result = Mapping[str, Any]


def name(what: str, place: str, prefetch: int) -> str:
    """Of a measurement."""
    return f"{what} to {place}, {prefetch} ahead"


def ratios(result: Result, of: str) -> list[float]:
    """The time of a step as a multiple of that with everything here, round by round."""
    seconds = result["seconds"]
    return [there / here for there, here in zip(seconds[of], seconds[HERE], strict=True)]


def lines(result: Result) -> list[str]:
    """What is kept, for a terminal."""
    base = statistics.median(result["seconds"][HERE])
    texts = [f"{HERE}: {1e3 * base:.1f} ms a step"]
    for of in result["seconds"]:
        if of != HERE:
            found = ratios(result, of)
            texts.append(f"{of:<24}{statistics.median(found):6.2f}  ({min(found):.2f} to {max(found):.2f})")
    return texts


def parts(result: Result) -> dict[str, str]:
    """What stands between marks, by their names."""
    rows = [
        "| offloaded | host, when needed | host, one ahead | file, when needed | file, one ahead |",
        "|---|--:|--:|--:|--:|",
    ]
    for what in WHAT:
        cells = []
        for place in PLACES:
            for prefetch in (0, 1):
                found = ratios(result, name(what, place, prefetch))
                cells.append(f"**{statistics.median(found):.2f}** ({min(found):.2f} to {max(found):.2f})")
        rows.append(f"| {WORDS[what]} | {' | '.join(cells)} |")
    about, base = result["about"], statistics.median(result["seconds"][HERE])
    told = (
        f"Times of a step as multiples of {1e3 * base:.1f} ms with everything here; medians of"
        f" {len(result['seconds'][HERE])} rounds.  {about['cpu']}, 2 cores; {about['time'][:10]}; numpy"
        f" {about['versions']['numpy']}, kernels {about['kernels']}; commit {about['commit']}."
    )
    return {"time": "\n".join(rows), "about": told}


def files(result: Result) -> dict[Path, str]:
    """What stands in docs/ for a result."""
    written = parts(result)
    text = PAGE.read_text(encoding="utf-8")
    text = MARKED.sub(lambda found: f"{found[1]}{written.get(found[2], 'Not measured.')}\n{found[3]}", text)
    return {KEPT: text_of(result), PAGE: text, **dict(zip(PICTURES, result["pictures"], strict=True))}


def write(result: Result) -> list[Path]:
    """Write them; the paths."""
    texts = files(result)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)

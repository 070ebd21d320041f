"""Figures and picture of docs/explanation/gist.md, from a result of `gist.py`.

The page is written by hand but for what stands between two marks in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import plots
from precision_page import DOCS, MARKED, text_of

PAGE = DOCS / "explanation/gist.md"
KEPT = DOCS / "figures/gist.json"
PICTURE = DOCS / "images/gist.svg"

LOSSLESS, SIXTEEN = "lossless", "16 bits"
NAMES = {"inputs of products": 0, "relu before a pool": 1, "maxima of pools": 2}
"""What keeps bytes in a network for images, and its colour; all else has another."""
REST = "all else"

Result = Mapping[str, Any]


def holds(result: Result) -> bool:
    """What the page promises: with 16 bits 1.8 times less waits, and accuracy is within 0.3 points."""
    least = factor(result, "digits", SIXTEEN) >= 1.8 if "bytes" in result else True
    near = mean(result, SIXTEEN) >= mean(result, "none") - 0.003 if "digits" in result else True
    return least and near


def waits(result: Result, model: str, kind: str) -> int:
    """Bytes of a batch."""
    return sum(result["bytes"][model][kind].values())


def factor(result: Result, model: str, kind: str) -> float:
    """How many times less waits than without encoding."""
    return waits(result, model, "none") / waits(result, model, kind)


def mean(result: Result, kind: str) -> float:
    """Test accuracy, mean of the seeds."""
    return statistics.fmean(result["digits"][kind]["accuracy"])


def lines(result: Result) -> list[str]:
    """What is kept, for a terminal."""
    texts = []
    for model, kinds in result.get("bytes", {}).items():
        for kind in kinds:
            times = f"{factor(result, model, kind):>7.2f}x"
            texts.append(f"{model:<8}{kind:<10}{waits(result, model, kind):>12,} bytes{times}")
    for kind in result.get("digits", {}):
        texts.append(f"digits  {kind:<10}{mean(result, kind):>12.2%} of the test images")
    for kind, of in result.get("gpt", {}).items():
        texts.append(f"gpt     {kind:<10}{statistics.fmean(of['validation']):>12.4f} validation loss")
    for model, kinds in result.get("time", {}).items():
        texts.append(f"time of a step, {model}: " + ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in kinds.items()))
    return texts


# ------------------------------------------------------------------------------------------------------------- the page


def parts(result: Result) -> dict[str, str]:
    """What stands between marks, by their names."""
    return {
        "digits": _digits(result),
        "gpt": _gpt(result),
        "time": _time(result),
        "about": _about(result),
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    texts = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    return "\n".join([*texts, *(f"| {' | '.join(row)} |" for row in rows)])


def _digits(result: Result) -> str:
    if "bytes" not in result or "digits" not in result:
        return "Not measured."
    columns = [*NAMES, REST]
    rows = []
    for kind, found in result["bytes"]["digits"].items():
        accuracies = result["digits"][kind]["accuracy"]
        by_name = grouped(found)
        rows.append(
            [
                kind,
                *(f"{by_name[name]:,}" for name in columns),
                f"**{waits(result, 'digits', kind):,}**",
                f"{factor(result, 'digits', kind):.2f}",
                f"**{statistics.fmean(accuracies):.2%}**, {min(accuracies):.2%} to {max(accuracies):.2%}",
            ]
        )
    return _table(["encoding", *columns, "all, bytes", "times less", "test accuracy"], rows)


def grouped(found: Mapping[str, int]) -> dict[str, int]:
    """Bytes by the names of `NAMES`, and the rest."""
    named = {name: found.get(name, 0) for name in NAMES}
    return named | {REST: sum(found.values()) - sum(named.values())}


def _gpt(result: Result) -> str:
    if "bytes" not in result or "gpt" not in result:
        return "Not measured."
    rows = []
    for kind, of in result["gpt"].items():
        losses = of["validation"]
        each = f" ({', '.join(f'{loss:.4f}' for loss in losses)})" if len(losses) > 1 else ""
        rows.append(
            [
                kind,
                f"{waits(result, 'gpt', kind):,}",
                f"{factor(result, 'gpt', kind):.2f}",
                f"{statistics.fmean(of['training']):.4f}",
                f"{statistics.fmean(losses):.4f}{each}",
            ]
        )
    return _table(["encoding", "bytes that wait", "times less", "training loss at the end", "validation loss"], rows)


def _time(result: Result) -> str:
    if "time" not in result:
        return "Not measured."
    kinds = list(next(iter(result["time"].values())))
    rows = [[model, *(f"{of[kind]:.2f}" for kind in kinds)] for model, of in result["time"].items()]
    return _table(["processor time of a step", *kinds], rows)


def _about(result: Result) -> str:
    about = result.get("about")
    if not about:
        return "Not measured."
    numpy = about["versions"]["numpy"]
    return f"{about['time'][:10]}; {about['cpu']}; numpy {numpy}, kernels {about['kernels']}; commit {about['commit']}."


# ---------------------------------------------------------------------------------------------------------- the picture

WIDTH, LEFT, RIGHT, ROW = 820, 110, 640, 30


def picture(result: Result) -> str:
    """Bytes that wait for the backward of a batch of digits, by what keeps them, and the accuracy that is reached."""
    kinds = result["bytes"]["digits"]
    most = max(sum(found.values()) for found in kinds.values())
    title = "Bytes that wait for backward, and what is learned"
    drawn = [f'<text class="title" x="16" y="26">{title}</text>']
    drawn.append('<text x="16" y="46">a batch of 64 digits; test accuracy after 16 epochs, mean of the seeds</text>')
    for place, (kind, found) in enumerate(kinds.items()):
        y, x = 92 + place * ROW, float(LEFT)
        drawn.append(f'<text class="end" x="{LEFT - 10}" y="{y + 15}">{escape(kind)}</text>')
        for colour, nbytes in enumerate(grouped(found).values()):
            length = nbytes / most * (RIGHT - LEFT)
            drawn.append(f'<rect class="bar c{colour}" x="{x:.1f}" y="{y}" width="{length:.1f}" height="{ROW - 9}"/>')
            x += length
        text = f"{sum(found.values()) / 1024:,.0f} KiB"
        if kind != "none":
            text += f", {factor(result, 'digits', kind):.1f} times less"
        if "digits" in result:
            text += f", {mean(result, kind):.1%}"
        drawn.append(f'<text x="{x + 8:.1f}" y="{y + 15}">{text}</text>')
    for colour, name in enumerate([*NAMES, REST]):
        x = 16 + 165 * colour
        drawn.append(f'<rect class="bar c{colour}" x="{x}" y="62" width="12" height="12"/>')
        drawn.append(f'<text class="c{colour}" x="{x + 18}" y="73">{name}</text>')
    return plots.svg(title, WIDTH, 104 + len(kinds) * ROW, drawn)


# ---------------------------------------------------------------------------------------------------------------- files


def files(result: Result) -> dict[Any, str]:
    """What stands in docs/ for a result."""
    written = parts(result)
    text = PAGE.read_text(encoding="utf-8")
    text = MARKED.sub(lambda found: f"{found[1]}{written.get(found[2], 'Not measured.')}\n{found[3]}", text)
    return {KEPT: text_of(result), PAGE: text, PICTURE: picture(result)}


def write(result: Result) -> list[Any]:
    """Write them; the paths."""
    texts = files(result)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)

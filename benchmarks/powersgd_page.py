"""Figures and plot of docs/explanation/powersgd.md, from a result of `powersgd.py`.

The page is written by hand but for what stands between two marks in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import plots
from plots import Line, Panel
from precision_page import DOCS, MARKED, text_of

PAGE = DOCS / "explanation/powersgd.md"
KEPT = DOCS / "figures/powersgd.json"
PICTURE = DOCS / "images/powersgd.svg"

OPTIMIZERS = ("adafactor", "adamw")
BOUND = 0.02  # by how much the validation loss of rank 4 may be above that of exact sums
WINDOW = 10

VARIANTS = {
    "exact, seed 1": "exact",
    "rank 16": "rank 16",
    "rank 8": "rank 8",
    "rank 4, seed 1": "**rank 4**",
    "rank 2": "rank 2",
    "rank 1": "rank 1",
    "rank 4, tables too": "rank 4, tables and head too",
    "rank 4, Q fixed": "rank 4, Q fixed at its start",
    "rank 4, no feedback": "rank 4, no feedback",
}

Result = Mapping[str, Any]


def above(result: Result, optimizer: str) -> dict[int, float]:
    """By seed, how far rank 4 ends above exact sums, as a share of their loss."""
    runs, found = result["runs"], {}
    for seed in (1, 2, 3):
        exact, compressed = (runs.get(f"{optimizer}, {kind}, seed {seed}") for kind in ("exact", "rank 4"))
        if exact and compressed:
            found[seed] = compressed["val"] / exact["val"] - 1
    return found


def mean_above(result: Result, optimizer: str) -> float:
    """The mean of the seeds; 0 where there are none."""
    return statistics.fmean(above(result, optimizer).values() or [0.0])


def lines(result: Result) -> list[str]:
    """What is kept, for a terminal."""
    texts = [f"{'run':<42}{'val loss':>10}{'bytes a step':>14}"]
    texts += [f"{name:<42}{run['val']:>10.4f}{run['sent']:>14,}" for name, run in result["runs"].items()]
    for optimizer in OPTIMIZERS:
        found = above(result, optimizer)
        if found:
            shown = ", ".join(f"seed {seed} {share:+.2%}" for seed, share in found.items())
            texts.append(f"{optimizer}, rank 4 above exact: {shown}; mean {mean_above(result, optimizer):+.2%}")
    return texts


def parts(result: Result) -> dict[str, str]:
    """What stands between marks, by their names."""
    return {"claim": _claim(result), "variants": _variants(result), "about": _about(result)}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _claim(result: Result) -> str:
    runs, rows = result["runs"], []
    for optimizer in OPTIMIZERS:
        found = above(result, optimizer)
        for kind, words in (("exact", "exact sums"), ("rank 4", "PowerSGD of rank 4")) if found else ():
            of_seeds = [runs[f"{optimizer}, {kind}, seed {seed}"] for seed in found]
            exact = runs[f"{optimizer}, exact, seed {min(found)}"]["sent"]
            losses = [run["val"] for run in of_seeds]
            each = ", ".join(f"{loss:.4f}" for loss in losses) if len(losses) > 1 else f"seed {min(found)} alone"
            cells = [f"{optimizer}, {words}", f"{of_seeds[0]['sent']:,}", f"{exact / of_seeds[0]['sent']:.1f}"]
            seeds = "" if len(losses) > 1 else ", one seed"
            gap = f"**{mean_above(result, optimizer):+.2%}**{seeds}" if kind != "exact" else ""
            rows.append([*cells, f"{statistics.fmean(losses):.4f} ({each})", gap])
    head = ["gradients", "bytes a rank and step", "less by", "validation loss, by seed", "above exact"]
    return _table(head, rows) if rows else "Not measured."


def _variants(result: Result) -> str:
    runs, rows = result["runs"], []
    for name, words in VARIANTS.items():
        found = [runs.get(f"{optimizer}, {name}") for optimizer in OPTIMIZERS]
        exact = [runs.get(f"{optimizer}, exact, seed 1") for optimizer in OPTIMIZERS]
        if not all((*found, *exact)):
            continue
        cells = [f"{found[0]['sent']:,}", f"{exact[0]['sent'] / found[0]['sent']:.1f}"]
        for run, best in zip(found, exact, strict=True):
            share = "" if run is best else f" ({run['val'] / best['val'] - 1:+.1%})"
            cells.append(f"{run['val']:.4f}{share}")
        rows.append([words, *cells])
    return _table(["gradients", "bytes a rank and step", "less by", *OPTIMIZERS], rows) if rows else "Not measured."


def _about(result: Result) -> str:
    if not result["runs"]:
        return "Not measured."
    about = next(iter(result["runs"].values()))["about"]
    numpy = about["versions"]["numpy"]
    return f"{about['time'][:10]}; numpy {numpy}, kernels {about['kernels']}; commit {about['commit']}."


def picture(result: Result) -> str:
    """Training loss over steps, by rank, and by what is kept between steps."""
    by_rank = {"exact, seed 1": "exact", "rank 8": "rank 8", "rank 4, seed 1": "rank 4", "rank 1": "rank 1"}
    by_rest = {
        "exact, seed 1": "exact",
        "rank 4, Q fixed": "Q fixed",
        "rank 4, seed 1": "rank 4",
        "rank 4, no feedback": "no feedback",
    }
    drawn = [
        _panel(f"{title}, {optimizer}", result, {f"{optimizer}, {name}": words for name, words in names.items()})
        for title, names in (("By rank", by_rank), ("By what is kept", by_rest))
        for optimizer in OPTIMIZERS
    ]
    return plots.panels("PowerSGD beside exact sums", [panel for panel in drawn if panel.lines])


def _panel(title: str, result: Result, names: Mapping[str, str]) -> Panel:
    shown = [
        Line(words, [(WINDOW * (i + 1), loss) for i, loss in enumerate(result["runs"][name]["loss"]) if i > 1], colour)
        for colour, (name, words) in enumerate(names.items())
        if name in result["runs"]
    ]
    ys = [y for line in shown for _, y in line.points] or [0.0, 1.0]
    room = 0.06 * (max(ys) - min(ys))
    between = min(ys) - room, max(ys) + room
    return Panel(title, shown, "step", "training loss, nats a byte", log_y=False, log_x=False, between=between)


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

"""Figures and plot of docs/explanation/asynchronous.md, from a result of `asynchronous.py`.

The page is written by hand but for what stands between two marks in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plots
from plots import Line, Panel
from precision_page import DOCS, MARKED, text_of

__all__ = ["text_of"]

PAGE = DOCS / "explanation/asynchronous.md"
KEPT = DOCS / "figures/asynchronous.json"
PICTURE = DOCS / "images/asynchronous.svg"

METHODS = {"adamw": "AdamW", "sgd": "SGD, momentum 0.9"}
SCHEMES = {
    "synchronous": "synchronous",
    **{f"K={k}": f"gradients {k} step{'s' * (k > 1)} late" for k in (1, 3, 7, 15)},
    "K=3, workers": "worker i late by i mod 4 steps",
    **{f"H={h}": f"averages every {h} steps" for h in (4, 16, 64)},
    "H=16, moments": "every 16 steps, moments too",
}
SEEDS = (1, 2, 3)
HIGHEST = 4.0  # nats a byte that a plot shows: a run that ends above has not learned
WINDOW = 20

Result = Mapping[str, Any]
Points = list[tuple[float, float]]


# ------------------------------------------------------------------------------------------------------------- figures


def finals(result: Result, method: str, scheme: str) -> list[float]:
    """The last validation loss of each seed that was run; infinity for a run that broke."""
    found = [result["runs"].get(f"{method}, {scheme}, seed {seed}") for seed in SEEDS]
    return [math.inf if run["val"] is None else float(run["val"]) for run in found if run is not None]


def worst_gaps(result: Result) -> dict[str, float]:
    """By method and scheme, how far it ends above synchronous training at the least of all seeds."""
    gaps = {}
    for method in METHODS:
        best = finals(result, method, "synchronous")
        for scheme in SCHEMES:
            found = finals(result, method, scheme)
            if scheme != "synchronous" and found and len(found) == len(best):
                gaps[f"{method}, {scheme}"] = min(a - b for a, b in zip(found, best, strict=True))
    return gaps


def stability(delay: int, momentum: float) -> float:
    """The largest rate times curvature at which late gradient descent into a bowl converges.

    Without momentum 2 sin(pi / (2 (2 K + 1))).  With it the largest at which all roots of

        z^(K+1) - (1 + mu) z^K + mu z^(K-1) + rate = 0       (K = 0: z^2 - (1 + mu - rate) z + mu = 0)

    lie in the unit circle, where w(t+1) = w(t) + mu (w(t) - w(t-1)) - rate w(t-K).
    """
    if momentum == 0.0:
        return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    low, high = 0.0, 4.0
    for _ in range(60):
        rate = (low + high) / 2
        powers = np.zeros(max(delay, 1) + 2)
        powers[:3] = 1.0, -1.0 - momentum, momentum
        powers[-1 if delay else 1] += rate
        low, high = (rate, high) if np.abs(np.roots(powers)).max() < 1 else (low, rate)
    return low


def lines(result: Result) -> list[str]:
    """What is kept, for a terminal."""
    texts = [f"{'run':<34}{'val loss':>10}"]
    for name, run in result["runs"].items():
        texts.append(f"{name:<34}{'broke' if run['val'] is None else format(run['val'], '.4f'):>10}")
    for name, gap in worst_gaps(result).items():
        texts.append(f"{name:<34}{gap:>+10.4f} above synchronous, at the least of its seeds")
    for momentum, found in result["bowl"].get("limits", {}).items():
        pairs = ", ".join(f"{delay}: {rate:.4f} ({stability(delay, float(momentum)):.4f})" for delay, rate in found)
        texts.append(f"bowl, momentum {momentum}: largest rate by K, measured (computed): {pairs}")
    return texts


# ------------------------------------------------------------------------------------------------------------ the page


def parts(result: Result) -> dict[str, str]:
    """What stands between marks, by their names."""
    return {
        "losses": _losses(result),
        "bowl": _bowl(result),
        "rates": _rates(result),
        "every": _every(result),
        "about": _about(result),
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    texts = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    return "\n".join([*texts, *(f"| {' | '.join(row)} |" for row in rows)])


def _losses(result: Result) -> str:
    rows = []
    for scheme, words in SCHEMES.items():
        cells = []
        for method in METHODS:
            found, best = finals(result, method, scheme), finals(result, method, "synchronous")
            if not found or len(found) != len(best):
                cells += ["not measured", ""]
                continue
            each = " ".join("broke" if math.isinf(loss) else f"{loss:.3f}" for loss in found)
            gap = statistics.fmean(found) - statistics.fmean(best)
            cells += [each, "" if scheme == "synchronous" else "broke" if math.isinf(gap) else f"**{gap:+.3f}**"]
        rows.append([words, *cells])
    head = [cell for name in METHODS.values() for cell in (f"{name}: seeds 1 2 3", "worse by")]
    return _table(["at equal samples", *head], rows)


def _bowl(result: Result) -> str:
    found = result["bowl"].get("limits", {})
    delays = [delay for delay, _ in found.get("0", [])]
    rows = []
    for momentum, pairs in found.items():
        rows.append([f"momentum {momentum}, formula", *(f"{stability(d, float(momentum)):.3f}" for d in delays)])
        rows.append([f"momentum {momentum}, found", *(f"{rate:.3f}" for _, rate in pairs)])
    return _table(["steps late", *map(str, delays)], rows)


def best_of_rates(result: Result, momentum: str, delay: int) -> Points:
    """(rate, validation loss) of the runs that ended below HIGHEST."""
    points = []
    for name, run in result["runs"].items():
        if name.startswith(f"sgd, {momentum}, lr ") and name.endswith(f", K={delay}"):
            rate = float(name.partition(", lr ")[2].partition(",")[0])
            if run["val"] is not None and run["val"] < HIGHEST:
                points.append((rate, float(run["val"])))
    return sorted(points)


def _rates(result: Result) -> str:
    rows = []
    for delay in (0, 3, 15):
        cells = []
        for momentum in ("momentum 0", "momentum 0.9"):
            points = best_of_rates(result, momentum, delay)
            if not points:
                cells += ["none learned", ""]
                continue
            rate, loss = min(points, key=lambda point: point[1])
            cells += [f"{loss:.3f}", f"{rate:g}"]
        rows.append([f"{delay} steps late" if delay else "not late", *cells])
    return _table(["best of five rates", "plain SGD", "at rate", "momentum 0.9", "at rate"], rows)


def _every(result: Result) -> str:
    """What is left of the damage if weights are averaged at once."""
    one, four, best = (finals(result, "adamw", scheme) for scheme in ("H=1", "H=4", "synchronous"))
    if not (one and four and best):
        return "Not measured."
    gaps = [statistics.fmean(each) - statistics.fmean(best) for each in (one, four)]
    each = " ".join(f"{loss:.3f}" for loss in one)
    return (
        f"AdamW with averages after *every* step, so that nobody parts: {each}, worse by **{gaps[0]:+.3f}**;"
        f" after every fourth, by {gaps[1]:+.3f}."
    )


def _about(result: Result) -> str:
    if not result["runs"]:
        return "Not measured."
    about, run = next(iter(result["runs"].values()))["about"], next(iter(result["runs"].values()))
    numpy = about["versions"]["numpy"]
    text = f"gpt-tiny, {run['steps']} steps of 16 x 32 tokens, four workers; {about['time'][:10]}; numpy {numpy}"
    return f"{text}, kernels {about['kernels']}; commit {about['commit']}."


# --------------------------------------------------------------------------------------------------------- the picture


def picture(result: Result) -> str:
    """Six panels: the bowl, the loss by staleness and by local steps, curves, and rates without and with momentum."""
    found = result["bowl"].get("limits", {})
    bowl = [
        Line(f"momentum {momentum}, formula", [(d, stability(d, float(momentum))) for d in range(16)], colour)
        for colour, momentum in enumerate(found)
    ] + [
        Line(f"momentum {momentum}, found", [tuple(pair) for pair in pairs], colour + 2, dots=True)
        for colour, (momentum, pairs) in enumerate(found.items())
    ]
    late, apart = (0, 1, 3, 7, 15), (1, 4, 16, 64)
    by_late = [Line(words, _by(result, method, late, "K"), i) for i, (method, words) in enumerate(METHODS.items())]
    by_apart = [Line(words, _by(result, method, apart, "H"), i) for i, (method, words) in enumerate(METHODS.items())]
    by_apart += [
        Line(f"{method}, synchronous", [(x, statistics.fmean(found)) for x in (apart[0], apart[-1])], i, True, False)
        for i, (method, found) in enumerate(
            (words.partition(",")[0], finals(result, method, "synchronous")) for method, words in METHODS.items()
        )
        if found
    ]
    names = ("synchronous", "K=3", "K=15", "H=16")
    curves = [Line(SCHEMES[name], _curve(result, "adamw", name), i) for i, name in enumerate(names)]
    drawn = [
        Panel("Largest stable rate, gradients K steps late", bowl, "K", "rate x curvature", log_x=False),
        Panel("AdamW, training loss", curves, "step", "nats a byte", False, log_x=False, between=(2.0, HIGHEST)),
        Panel(
            "Validation loss, gradients K steps late",
            by_late,
            "K",
            "nats a byte",
            False,
            log_x=False,
            between=_room(by_late),
        ),
        Panel("Validation loss, averages every H steps", by_apart, "H", "nats a byte", False, between=_room(by_apart)),
    ]
    for momentum, words in (("momentum 0", "plain SGD"), ("momentum 0.9", "SGD, momentum 0.9")):
        rates = [
            Line(f"{delay} steps late" if delay else "not late", best_of_rates(result, momentum, delay), colour)
            for colour, delay in enumerate((0, 3, 15))
        ]
        drawn.append(
            Panel(f"Validation loss, {words}", rates, "learning rate", "nats a byte", False, between=(2.2, HIGHEST))
        )
    return plots.panels("Asynchronous training at equal samples", [panel for panel in drawn if _is_filled(panel)])


def _is_filled(panel: Panel) -> bool:
    return bool(panel.lines) and all(line.points for line in panel.lines)


def _room(of: Sequence[Line]) -> tuple[float, float]:
    ys = [y for line in of for _, y in line.points] or [2.0, HIGHEST]
    return min(ys) - 0.1, max(ys) + 0.1


def _by(result: Result, method: str, numbers: Sequence[int], letter: str) -> Points:
    """Mean of the seeds by K or H, those that were run and learned.

    K = 0 is synchronous training, to the last bit.  H = 1 is not where an optimizer has moments: each worker's are its
    own.
    """
    points = []
    for number in numbers:
        found = finals(result, method, f"{letter}={number}" if number else "synchronous")
        if found and statistics.fmean(found) < HIGHEST:
            points.append((float(number), statistics.fmean(found)))
    return points


def _curve(result: Result, method: str, scheme: str) -> Points:
    runs = [result["runs"].get(f"{method}, {scheme}, seed {seed}") for seed in SEEDS]
    losses = [run["loss"] for run in runs if run is not None]
    means = [statistics.fmean(each) for each in zip(*losses, strict=False)]
    return [(WINDOW * (i + 1), mean) for i, mean in enumerate(means) if mean < HIGHEST]


# --------------------------------------------------------------------------------------------------------------- files


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

"""Figures and plots of docs/explanation/mixture-of-experts.md, from a result of `experts.py`.

The page is written by hand but for what stands between two marks in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import plots
from plots import Line, Panel
from precision_page import DOCS, MARKED, text_of

PAGE = DOCS / "explanation/mixture-of-experts.md"
KEPT = DOCS / "figures/experts.json"
LOSSES = DOCS / "images/experts-loss.svg"
DROPS = DOCS / "images/experts-drops.svg"

SIZES = {"width 64": "", "gpt-mini": ", gpt-mini"}
"""What the claim is measured at, and how the names of the runs go on."""
KINDS = ("dense", "switch")
ABOVE = "nats; above 0: experts are better"

Result = Mapping[str, Any]
Points = list[tuple[float, float]]


def final(run: Result) -> float:
    """The last validation loss of a run."""
    return float(run["val"][-1][1])


def gaps(result: Result, size: str = "") -> dict[int, float]:
    """By seed, how far the mixture ends below its dense twin, in nats."""
    runs, found = result["runs"], {}
    for seed in (1, 2, 3):
        dense, switch = (runs.get(f"{kind}{size}, seed {seed}") for kind in ("dense", "switch"))
        if dense and switch:
            found[seed] = final(dense) - final(switch)
    return found


def curves(result: Result, size: str) -> dict[str, Points]:
    """Validation loss over steps of the dense twin and of the mixture, means of the seeds that both have."""
    found = {}
    for kind in KINDS:
        runs = [result["runs"][f"{kind}{size}, seed {seed}"]["val"] for seed in gaps(result, size)]
        found[kind] = [
            (float(points[0][0]), statistics.fmean(loss for _, loss in points)) for points in zip(*runs, strict=True)
        ]
    return found


def lead(of: Mapping[str, Points]) -> Points:
    """How far the mixture is below its dense twin over steps."""
    return [(step, dense - switch) for (step, dense), (_, switch) in zip(*(of[kind] for kind in KINDS), strict=True)]


def lines(result: Result) -> list[str]:
    """What is kept, for a terminal."""
    texts = [f"{'run':<30}{'val loss':>10}{'parameters':>12}{'dropped':>9}{'at the end':>12}{'busiest':>9}{'least':>7}"]
    for name, run in result["runs"].items():
        text = f"{name:<30}{final(run):>10.4f}{run['parameters']:>12,}"
        if run["routing"]:
            first, last = run["routing"][0], run["routing"][-1]
            text += f"{first['dropped']:>9.1%}{last['dropped']:>12.1%}{last['busiest']:>9.2f}{last['least']:>7.2f}"
        texts.append(text)
    for what, size in SIZES.items():
        found = gaps(result, size)
        if found:
            shown = ", ".join(f"seed {seed} {gap:+.4f}" for seed, gap in found.items())
            texts.append(f"{what}, dense - switch: {shown}; mean {statistics.fmean(found.values()):+.4f} nats")
    return texts


# ------------------------------------------------------------------------------------------------------------- the page


def parts(result: Result) -> dict[str, str]:
    """What stands between marks, by their names."""
    return {
        "claim": _claim(result),
        "rates": _rates(result),
        "variants": _variants(result),
        "rows": _rows(result),
        "about": _about(result),
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _claim(result: Result) -> str:
    rows, words = [], []
    for what, size in SIZES.items():
        found = gaps(result, size)
        if not found:
            continue
        dense, switch = (result["runs"][f"{kind}{size}, seed 1"] for kind in KINDS)
        gap = f"**{statistics.fmean(found.values()):+.3f}**"
        gap += f", {min(found.values()):+.3f} to {max(found.values()):+.3f}" if len(found) > 1 else ""
        met = f"{switch['active']:,} of {switch['parameters']:,}"
        losses = (_seeds([final(result["runs"][f"{kind}{size}, seed {seed}"]) for seed in found]) for kind in KINDS)
        rows.append([what, f"{dense['steps']:,}", f"{dense['parameters']:,}", met, *losses, gap])
        words.append(f"{what}: {_overtaking(lead(curves(result, size)))}.")
    head = ["2 layers", "steps", "parameters, dense", "switch: met by a token", "validation loss, dense", "switch"]
    return "\n".join([_table([*head, "dense - switch"], rows), "", *words])


def _overtaking(points: Points) -> str:
    """When the mixture goes ahead for good, and how far it was behind before."""
    behind = [step for step, ahead in points if ahead <= 0]
    if not behind:
        return "ahead from the first measurement on"
    worst = min(ahead for _, ahead in points)
    if behind[-1] == points[-1][0]:
        return f"behind at the end, by {-worst:.3f} nats at most"
    return f"the mixture is behind until step {behind[-1]:,.0f}, by {-worst:.3f} nats at most, and ahead from then on"


def _seeds(losses: Sequence[float]) -> str:
    each = f" ({', '.join(f'{loss:.3f}' for loss in losses)})" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.4f}{each}"


def _rates(result: Result) -> str:
    runs, rows = result["runs"], []
    for rate in ("2.5e-3", "5e-3", "1e-2"):
        names = [f"{kind}, {'seed 1' if rate == '2.5e-3' else f'lr {rate}'}" for kind in ("dense", "switch")]
        if all(name in runs for name in names):
            dense, switch = (final(runs[name]) for name in names)
            rows.append([rate, f"{dense:.4f}", f"{switch:.4f}", f"{dense - switch:+.3f}"])
    return _table(["peak learning rate", "dense", "switch", "dense - switch"], rows)


VARIANTS = {
    "dense, seed 1": "dense twin",
    "capacity 1": "factor 1",
    "switch, seed 1": "**factor 1.25**",
    "capacity 2": "factor 2",
    "dropless": "dropless",
    "no balance loss": "factor 1.25, no balance loss",
    "no balance loss, dropless": "dropless, no balance loss",
    "every other block": "factor 1.25, experts in every other block",
    "top 2, gshard": "factor 1.25, two experts a token (gshard)",
}


def _variants(result: Result) -> str:
    rows = []
    for name, words in VARIANTS.items():
        run = result["runs"].get(name)
        if run is None:
            continue
        gain = final(result["runs"]["dense, seed 1"]) - final(run)
        cells = [words, f"{final(run):.4f}", f"{gain:+.3f}" if run["routing"] else ""]
        if run["routing"]:
            first, last = run["routing"][0], run["routing"][-1]
            drops = f"{first['dropped']:.1%}, {last['dropped']:.1%}" if first["dropped"] else "none"
            cells += [drops, f"{last['busiest']:.2f}, {last['least']:.2f}", f"{last['entropy']:.2f}"]
            cells += [f"{run['parameters']:,}"]
        else:
            cells += ["", "", "", f"{run['parameters']:,}"]
        rows.append(cells)
    head = ["run", "validation loss", "dense - run", "dropped in the first, last 100 steps", "busiest, least expert"]
    return _table([*head, "entropy", "parameters"], rows)


def _rows(result: Result) -> str:
    rows = []
    for length, dense, switch in (
        (64, "dense, seed 1", "switch, seed 1"),
        (256, "dense, rows of 256", "switch, rows of 256"),
    ):
        runs = result["runs"]
        if dense in runs and switch in runs:
            drops = [runs[switch]["routing"][place]["dropped"] for place in (0, -1)]
            losses = [final(runs[name]) for name in (dense, switch)]
            cells = [*(f"{drop:.1%}" for drop in drops), *(f"{loss:.4f}" for loss in losses)]
            rows.append([f"{length} tokens", *cells, f"{losses[0] - losses[1]:+.3f}"])
    head = ["rows of", "dropped in the first 100 steps", "in the last 100", "validation loss, dense", "switch"]
    return _table([*head, "dense - switch"], rows)


def _about(result: Result) -> str:
    if not result["runs"]:
        return "Not measured."
    about = next(iter(result["runs"].values()))["about"]
    numpy = about["versions"]["numpy"]
    return f"{about['time'][:10]}; numpy {numpy}, kernels {about['kernels']}; commit {about['commit']}."


# --------------------------------------------------------------------------------------------------------- the pictures


def loss_picture(result: Result) -> str:
    """Validation loss, and how far the mixture is below the dense twin, over steps; means of the seeds."""
    shown = [(what, curves(result, size)) for what, size in SIZES.items() if gaps(result, size)]
    losses = [
        Line(f"{kind}, {what}", [point for point in of[kind] if point[0] >= 300], colour, kind == "dense")
        for colour, (what, of) in enumerate(shown)
        for kind in KINDS
    ]
    below = [Line(what, lead(of), colour) for colour, (what, of) in enumerate(shown)]
    return plots.panels(
        "Eight experts beside their dense twin",
        [_panel("Validation loss", losses, "nats a byte"), _panel("Dense less switch", below, ABOVE)],
    )


def _panel(title: str, lines: Sequence[Line], y_label: str) -> Panel:
    ys = [y for line in lines for _, y in line.points]
    room = 0.06 * (max(ys) - min(ys))
    between = min(ys) - room, max(ys) + room
    return Panel(title, lines, "step", y_label, log_y=False, log_x=False, between=between)


def drop_picture(result: Result) -> str:
    """The share of choices that found no place over steps: by capacity factor, and by what else changes it."""
    by_factor = {"capacity 1": "factor 1", "switch, seed 1": "factor 1.25", "capacity 2": "factor 2"}
    by_rest = {
        "switch, seed 1": "rows of 64",
        "switch, rows of 256": "rows of 256",
        "no balance loss": "rows of 64, no balance loss",
    }
    panels = [
        Panel(title, _drop_lines(result, names), "step", "% of choices", log_y=False, log_x=False)
        for title, names in (("Dropped, by capacity factor", by_factor), ("Dropped at factor 1.25", by_rest))
    ]
    return plots.panels("Tokens that find no place", panels)


def _drop_lines(result: Result, names: Mapping[str, str]) -> list[Line]:
    return [
        Line(words, [(float(at["step"]), 100 * at["dropped"]) for at in result["runs"][name]["routing"]], colour)
        for colour, (name, words) in enumerate(names.items())
        if name in result["runs"]
    ]


# ---------------------------------------------------------------------------------------------------------------- files


def files(result: Result) -> dict[Any, str]:
    """What stands in docs/ for a result."""
    written = parts(result)
    text = PAGE.read_text(encoding="utf-8")
    text = MARKED.sub(lambda found: f"{found[1]}{written.get(found[2], 'Not measured.')}\n{found[3]}", text)
    return {KEPT: text_of(result), PAGE: text, LOSSES: loss_picture(result), DROPS: drop_picture(result)}


def write(result: Result) -> list[Any]:
    """Write them; the paths."""
    texts = files(result)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)

"""docs/performance.md and its figures, written from a result of `table.py`.

What is written by hand stands in two files that are put in: methods.md says how each figure is measured, findings.md
what was found out about a row, above all about one that falls short.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pipeline_page
import plots
from growth import SWEEPS
from plots import Bar, Line, Panel
from rows import ROWS, Figure, Row, column, flops_of

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
FIGURES = DOCS / "figures"
KEPT = FIGURES / "performance.json"
PAGE = DOCS / "performance.md"

Result = dict[str, Any]
"""measurements: name -> {about, rounds, seconds, loadavg, data}."""


def sections(path: Path) -> dict[str, str]:
    """The text below each `## NAME` of a page."""
    parts = re.split(r"^## (.+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name.strip(): text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def figures_of(result: Result) -> Iterator[tuple[Row, Figure | None]]:
    """Each row with its figure, None where it was not measured."""
    for row in ROWS:
        measured = result["measurements"].get(row.measurement)
        yield row, None if measured is None else row.figure(measured["data"])


def foreign(data: Any) -> float | None:
    """The largest share of the cores' time that went to others in any stretch; None if nobody looked."""
    if isinstance(data, dict) and "foreign" in data:
        return float(data["foreign"] + data["steal"])
    inside = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    found = [share for share in map(foreign, inside) if share is not None]
    return max(found, default=None)


def share(value: float | None) -> str:
    """As a percentage; "-" for None."""
    return "-" if value is None else f"{100 * value:.0f} %"


# ------------------------------------------------------------------------------------------------------------ the page

INTRO = """# Performance

Written by `python benchmarks/table.py --write-docs` from [figures/performance.json](figures/performance.json);
[benchmarks/README.md](../benchmarks/README.md) says how to measure it again.

S has 4 layers, d 256, 4 heads, T 128, B 8; M has 6 layers, d 384, 6 heads, T 256, B 8; vocabulary 256, float32, AdamW,
gradients clipped. The peer is PyTorch on the CPU as its users write it: eager, `scaled_dot_product_attention`, fused
AdamW, `DistributedDataParallel` with gloo. A plain number is a ratio, mpitrain's figure over PyTorch's, or over that of
the other way to train that the row names. Each is the median of rounds in which all took turns; min-max is the range of
the rounds. *bar* is what must be reached, *ambition* what should be.
"""


def page(result: Result) -> str:
    """The text of docs/performance.md."""
    methods, findings = sections(HERE / "methods.md"), sections(HERE / "findings.md")
    measured = [(row, figure) for row, figure in figures_of(result) if figure is not None]
    parts = [INTRO, "## The table\n", *_machine(result), _table(result)]
    short = [(row, figure) for row, figure in measured if row.verdict(figure.value) == "no"]
    parts.append("## Where it falls short\n")
    lines = [_shortfall(row, figure) for row, figure in short]
    parts.append("\n".join(lines or ["Every row that was measured reaches its bar."]) + "\n")
    told = [row for row in ROWS if row.name in findings]
    if told:
        parts.append("## What was found\n")
        parts += [f"### {row.title}\n\n{findings[row.name]}\n" for row in told]
    parts += [*_pictures(result), "## How it is measured\n"]
    for name, text in methods.items():
        if name in result["measurements"]:
            parts.append(f"### {name}\n\n{text}\n\n{_details(result, name)}\n")
    return "\n".join(parts).rstrip() + "\n"


def _machine(result: Result) -> list[str]:
    """What it ran on; where the pieces were measured on different commits or machines, each."""
    texts: dict[str, list[str]] = {}
    for name, measured in result["measurements"].items():
        about = measured["about"]
        versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items() if version)
        text = (
            f"{about['cpu']}, {about['cores']} cores; {about['system']}; Python {about['python']}; {versions}; "
            f"BLAS {about['blas']}; kernels {about['kernels']}; commit {about['commit']}"
        )
        texts.setdefault(text, []).append(name)
    if len(texts) == 1:
        return [f"{next(iter(texts))}.\n"]
    return [f"{text} (measured: {', '.join(names)}).\n" for text, names in texts.items()]


def _table(result: Result) -> str:
    lines = [
        "| metric | mpitrain | PyTorch | measured | min-max | bar | ambition | reached | foreign load |",
        "|---|--:|--:|--:|--:|--:|--:|---|--:|",
    ]
    for row, figure in figures_of(result):
        if figure is None:
            cells = ["-", "-", "not measured", "-", row.asked(row.bar), row.asked(row.ambition), "-", "-"]
        else:
            load = foreign(result["measurements"][row.measurement]["data"])
            verdict = row.verdict(figure.value)
            cells = [
                figure.mine or "-",
                figure.peer or "-",
                f"**{row.text(figure.value)}**",
                row.between(figure.low, figure.high),
                row.asked(row.bar),
                row.asked(row.ambition),
                "**no**" if verdict == "no" else verdict or "-",
                share(load),
            ]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shortfall(row: Row, figure: Figure) -> str:
    asked = "at least" if row.more else "at most"
    return f"- {row.title}: **{row.text(figure.value)}**, where {asked} {row.text(row.bar)} is asked for."


def _details(result: Result, name: str) -> str:
    """What the table has no room for."""
    measured = result["measurements"][name]
    load = foreign(measured["data"])
    lines = [f"- {row.title}: {figure.note}." for row, figure in figures_of(result) if _belongs(row, name, figure)]
    others = "" if load is None else f", at most {share(load)} of the cores taken by others"
    rounds = f"{measured['rounds']} round{'s' if measured['rounds'] > 1 else ''}"
    when = f"{rounds}, {measured['seconds']:.0f} s, {measured['about']['time']}"
    lines.append(f"- {when}; load average at the start {measured['loadavg']:.2f}{others}.")
    return "\n".join([*lines, *_extra(name, measured["data"])])


def _belongs(row: Row, name: str, figure: Figure | None) -> bool:
    return row.measurement == name and figure is not None and bool(figure.note)


def _extra(name: str, data: Any) -> list[str]:
    if name == "ordered sums":
        lines = ["", "| ranks | MiB | in rank order, ms | MPI's own, ms | ratio |", "|--:|--:|--:|--:|--:|"]
        for ranks, sizes in data["by_ranks"].items():
            for mib, modes in sizes.items():
                ordered, mpi = (statistics.median(modes[mode]) for mode in ("ordered", "mpi"))
                lines.append(f"| {ranks} | {mib} | {ordered:.2f} | {mpi:.2f} | {ordered / mpi:.2f} |")
        return lines
    if name in ("memory and time", "recompute T 1024"):
        return ["", *_memory_table(data)]
    if name == "first line":
        return ["", *(f"    {command}" for command in data["commands"].values())]
    return []


OWNERS = {
    "weights": ("weights",),
    "masters": ("masters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer state",),
    "activations": ("activations",),
    "recompute": ("recompute scratch",),
}
"""Columns, and the owners of each; all others are the last column."""


def _memory_table(data: Any) -> list[str]:
    """MB by owner when most were alive, time and operations of a step, in each combination."""
    lines = [f"| MB at the peak | {' | '.join(OWNERS)} | other | all | ms a step | operations |"]
    lines.append(f"|---|{'--:|' * (len(OWNERS) + 4)}")
    fewest = min(flops_of(data, name) for name in data["looks"])
    for name, look in data["looks"].items():
        groups = [sum(look["owners"].get(owner, 0) for owner in owners) for owners in OWNERS.values()]
        groups += [look["peak"] - sum(groups), look["peak"]]
        cells = [f"{number / 1e6:.{1 if number > 5e4 else 2}f}" if number else "" for number in groups]
        cells += [f"{statistics.median(column(data, name, 'ms_per_step')):.0f}", f"{flops_of(data, name) / fewest:.3f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


# -------------------------------------------------------------------------------------------------------- the pictures


def _pictures(result: Result) -> list[str]:
    texts = {
        "performance-step.svg": ("Where a step's time goes", "A step of S on one rank by kind of work."),
        "performance-ranks.svg": (
            "Over ranks",
            "Tokens a second of S over ranks of one thread; with more ranks than cores they share these.",
        ),
        "performance-cost.svg": (
            "As numbers grow",
            "Cost over ranks, layers, tensors, micro-batches, T and d, with fitted exponents; dashed is linear.",
        ),
    }
    drawn = pictures(result)
    return [
        f"## {title}\n\n{text}\n\n![{title}](figures/{name})\n"
        for name, (title, text) in texts.items()
        if name in drawn
    ]


def pictures(result: Result) -> dict[str, str]:
    """The figures for which there are measurements: file name -> SVG."""
    found = {name: measured["data"] for name, measured in result["measurements"].items()}
    drawn = {}
    if "step" in found:
        drawn["performance-step.svg"] = _step_picture(found["step"])
    if "many ranks" in found or "two ranks" in found:
        drawn["performance-ranks.svg"] = _ranks_picture(found.get("many ranks"), found.get("two ranks"))
    sweeps = [name for name in SWEEPS if f"cost over {name}" in found]
    if sweeps:
        drawn["performance-cost.svg"] = plots.panels(
            "Cost as numbers grow", [_sweep_panel(name, found[f"cost over {name}"]["sweeps"][name]) for name in sweeps]
        )
    return drawn


def _step_picture(data: Any) -> str:
    kinds = {
        kind: statistics.median(run["ms"].get(kind, 0.0) for run in data["rounds"]) for kind in data["rounds"][0]["ms"]
    }
    total = sum(kinds.values())
    products = sum(ms for kind, ms in kinds.items() if kind.startswith("products"))
    return plots.bars(
        f"A step of {data['size']}: {total:.0f} ms, {100 * products / total:.0f} % of it matrix products",
        "one rank, one thread; blue: products of matrices, orange: everything else",
        [
            Bar(kind, ms, f"{ms:.2f} ms, {100 * ms / total:.1f} %", 0 if kind.startswith("products") else 1)
            for kind, ms in kinds.items()
        ],
    )


def _ranks_picture(many: Any, two: Any) -> str:
    lines = []
    if many is not None:
        points = [(int(ranks), statistics.median(column(many, ranks, "tokens_per_s"))) for ranks in many["rounds"]]
        lines.append(Line("mpitrain, 8 shared out", points, 0))
    for colour, side in enumerate(("mpitrain", "torch")) if two is not None else ():
        name = "PyTorch DDP" if side == "torch" else side
        for kind, turn in (("8 shared out", f"{side} 2"), ("8 each", f"{side} 2, each")):
            if (side, kind) == ("mpitrain", "8 shared out") and many is not None:
                continue
            speeds = [statistics.median(column(two, place, "tokens_per_s")) for place in (f"{side} 1", turn)]
            lines.append(Line(f"{name}, {kind}", list(zip((1, 2), speeds, strict=True)), colour, kind == "8 each"))
    return plots.panels(
        "Tokens a second over ranks", [Panel("S over ranks", lines, "ranks", "tokens/s", log_y=False)], columns=1
    )


def _sweep_panel(name: str, parts: Any) -> Panel:
    lines = [
        Line(
            f"{part}: {found['exponent']:.2f}",
            [(size, 1e3 * seconds) for size, seconds in zip(found["sizes"], found["seconds"], strict=True)],
            colour,
        )
        for colour, (part, found) in enumerate(parts.items())
    ]
    return Panel(f"over {name}", lines, SWEEPS[name][2], "ms of CPU", linear=True)


# --------------------------------------------------------------------------------------------------------------- files


def files(result: Result) -> dict[Path, str]:
    """What stands in docs/ for a result."""
    return {
        KEPT: json.dumps(result, indent=1) + "\n",
        PAGE: page(result),
        **{FIGURES / name: text for name, text in pictures(result).items()},
        **pipeline_page.files(result["measurements"]),
    }


def write(result: Result) -> list[Path]:
    """Write them; the paths."""
    FIGURES.mkdir(exist_ok=True)
    texts = files(result)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)

"""The figures and pictures of docs/explanation/pipelines/measured.md, from a result of `table.py`.

The page is written by hand but for what stands between two marks in it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.debug.timeline import Measured
from mpitrain.pipeline.action import parse
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.picture import svg
from mpitrain.pipeline.simulate import Span, simulate

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "explanation/pipelines/measured.md"
IMAGES = DOCS / "images"

MARKED = re.compile(r"(<!-- measured: ([a-z]+) -->\n).*?(<!-- end of measured -->)", re.DOTALL)
CHUNKS = {"interleaved": 2}

GROUPS = {
    "F": ("F",),
    "B": ("B",),
    "W": ("W",),
    "receives": ("RECV_F", "RECV_B"),
    "sends": ("SEND_F", "SEND_B"),
    "sum of gradients": ("REDUCE",),
    "update": ("STEP",),
}
"""Columns, and the kinds of actions in each; who is done first waits for the others in the update."""

Measurements = Mapping[str, Any]


def files(measurements: Measurements) -> dict[Path, str]:
    """The page and its pictures; nothing where bubbles were not measured."""
    if "bubbles" not in measurements:
        return {}
    parts = {"bubbles": _bubbles(measurements["bubbles"]), "times": _times(measurements.get("pipelines"))}
    text = MARKED.sub(
        lambda found: f"{found[1]}{parts[found[2]]}\n{found[3]}",
        PAGE.read_text(encoding="utf-8"),
    )
    return {PAGE: text, **_pictures(measurements["bubbles"]["data"])}


def _bubbles(measured: Any) -> str:
    lines = [
        "| schedule | measured | min-max | by formula | simulated | a step | F | B | W | ranks 0 and 1 wait |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, steps in measured["data"]["schedules"].items():
        shares = {key: [step[key] for step in steps] for key in ("measured", "formula", "simulated")}
        middle = {key: f"{100 * statistics.median(values):.1f} %" for key, values in shares.items()}
        low, high = min(shares["measured"]), max(shares["measured"])
        costs = [statistics.median(statistics.fmean(step[kind]) for step in steps) for kind in "fbw"]
        waits = [statistics.median(step["waiting"][rank] for step in steps) for rank in range(2)]
        cells = [
            name,
            f"**{middle['measured']}**",
            f"{100 * low:.1f}-{100 * high:.1f} %",
            middle["formula"],
            middle["simulated"],
            f"{statistics.median(step['makespan'] for step in steps):.0f} ms",
            *(f"{cost:.1f} ms" if cost else "" for cost in costs),
            f"{waits[0]:.0f} and {waits[1]:.0f} ms",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _about(measured)])


def _times(measured: Any) -> str:
    """Steps of each way to share the work, and where each rank's time goes in them."""
    if measured is None:
        return "Not measured here."
    rounds = measured["data"]["rounds"]
    ms = {name: [run["ms_per_step"] for run in runs] for name, runs in rounds.items()}
    replicas = min((name for name in ms if name.startswith("dp")), key=lambda name: statistics.median(ms[name]))
    lines = ["| two ranks | a step | over the faster replicas | min-max |", "|---|--:|--:|--:|"]
    for name, times in ms.items():
        ratios = [a / b for a, b in zip(times, ms[replicas], strict=True)]
        lines.append(
            f"| {name} | {statistics.median(times):.0f} ms | {statistics.median(ratios):.3f} |"
            f" {min(ratios):.3f}-{max(ratios):.3f} |"
        )
    lines += ["", "Where the time of a step goes, in ms on rank 0 and on rank 1:", ""]
    lines += [f"| two ranks | {' | '.join(GROUPS)} |", f"|---|{'--:|' * len(GROUPS)}"]
    for name, runs in rounds.items():
        lines.append(f"| {name} | {' | '.join(_both_ranks(runs, kinds) for kinds in GROUPS.values())} |")
    return "\n".join([*lines, "", _about(measured)])


def _both_ranks(runs: list[Any], kinds: tuple[str, ...]) -> str:
    """Milliseconds of a step in some kinds of actions; nothing where neither rank has any."""
    of_rank = (
        statistics.median(sum(run["actions"][rank].get(kind, 0.0) for kind in kinds) for run in runs) for rank in (0, 1)
    )
    texts = [f"{ms:.1f}" for ms in of_rank]
    return "" if texts == ["0.0", "0.0"] else " and ".join(texts)


def _about(measured: Any) -> str:
    about, when = measured["about"], f"{measured['rounds']} rounds, {measured['seconds']:.0f} s"
    machine = f"{about['cpu']}, {about['cores']} cores; load average at the start {measured['loadavg']:.2f}"
    return f"Medians of {when}, {about['time']}; {machine}; commit {about['commit']}."


def _pictures(data: Any) -> dict[Path, str]:
    """Of each schedule its median step, and the simulator's with the costs of that step."""
    drawn = {}
    for name, lanes in data["drawn"].items():
        step = _step(lanes)
        rows = complete(name, ranks=len(lanes), microbatches=data["microbatches"], chunks=CHUNKS.get(name, 1))
        for suffix, what, timeline in (
            ("", "measured", step.timeline),
            ("-simulated", "simulated with these costs", simulate(rows, step.costs)),
        ):
            title = f"{name}, {what}, times in ms"
            drawn[IMAGES / f"pipeline-measured-{name}{suffix}.svg"] = svg(timeline, title)
    return drawn


def _step(lanes: list[str]) -> Measured:
    """From what pipeline_bubble.py keeps."""
    spans = tuple(
        tuple(Span(parse(word), float(start), float(stop)) for word, start, stop in map(str.split, lane.split(";")))
        for lane in lanes
    )
    end = max(span.stop for lane in spans for span in lane if span.action.kind in ("F", "B", "W"))
    return Measured(spans, end, None)

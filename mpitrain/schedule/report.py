"""What `mpitrain schedule` says of a schedule: its table, the figures of each rank, and those of the whole."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from mpitrain.pipeline import render
from mpitrain.pipeline.action import Action, Schedule, placement
from mpitrain.pipeline.check import sent_by
from mpitrain.pipeline.render import in_flight
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.pipeline.simulate import Checked, Costs, Timeline, until_stuck
from mpitrain.pipeline.versions import live_versions, versions_of
from mpitrain.schedule.costs import costs_of_passes, shares_of, slices_of
from mpitrain.schedule.source import Asked


def list_of_schedules() -> str:
    """All names with a line each."""
    width = max(map(len, SCHEDULES))
    lines = [f"  {kind.name:<{width}}  {kind.meaning} ({kind.paper})" for kind in SCHEDULES.values()]
    stale = " and ".join(kind.name for kind in SCHEDULES.values() if kind.versions is not None)
    return "\n".join(
        [
            "Pipeline schedules:",
            *lines,
            "",
            f"{stale} use older weights: that is another algorithm, not only another order.",
            "mpitrain schedule NAME draws one, mpitrain schedule --file FILE checks one of yours; --help says more.",
        ]
    )


def report(asked: Asked, timeline: Timeline, checked: Checked, costs: Costs, width: int) -> str:
    """All that is printed."""
    parts = [f"{asked.title}\n{_costs(timeline, costs)}", render.text(timeline, width), _ranks(asked, timeline)]
    if asked.versions is not None:
        parts.append(_versions(asked.rows, asked.versions, width))
    ideal = sum(timeline.busy) / len(timeline.busy)
    relative = f", {100 * (timeline.makespan - ideal) / ideal:.1f} % of the ideal {_number(ideal)}" if ideal else ""
    hang = "would do"
    if checked.blocking_hang is not None:
        hang = f"would hang (mpitrain's never block): {checked.blocking_hang.removeprefix('deadlock: ')}"
    whole = {
        "makespan": _number(timeline.makespan),
        "bubble": f"{100 * timeline.bubble:.1f} % of the makespan{relative}",
        "blocking sends": hang,
    }
    ranks = len(asked.rows)
    if checked.placement != tuple(stage % ranks for stage in range(len(checked.placement))):
        place = ", ".join(f"{stage} on {rank}" for stage, rank in enumerate(checked.placement))
        whole["placement"] = (
            f"stage {place}.  To be trained, a model must place its stages so: GPT and MLP have stage q on rank q mod "
            f"{ranks}"
        )
    lines = (textwrap.wrap(f"{name:<16}{said}", width, subsequent_indent=" " * 16) for name, said in whole.items())
    parts.append("\n".join(line for wrapped in lines for line in wrapped))
    return "\n\n".join(parts)


def up_to_the_hang(asked: Asked, costs: Costs, width: int) -> str:
    """The table of a schedule that does not end, up to where it stands, and who waits for whom."""
    timeline = until_stuck(asked.rows, costs_of_passes(costs, asked.rows))
    place = placement(asked.rows)
    lines = [render.text(timeline, width), "", "Here it stands:"]
    for rank, (row, spans) in enumerate(zip(asked.rows, timeline.spans, strict=True)):
        if len(spans) < len(row):
            kind, micro, stage, part = sent_by(row[len(spans)])
            send = Action(kind, micro, stage, part)
            lines.append(f"rank {rank} waits at {row[len(spans)]} for {send} of rank {place[stage]}")
    return "\n".join(lines)


def _costs(timeline: Timeline, costs: Costs) -> str:
    def said(cost: float | Sequence[float]) -> str:
        return ":".join(map(_number, cost)) if isinstance(cost, Sequence) else _number(cost)

    parts = [f"F takes {said(costs.f)}"]
    if any(span.action.kind == "W" for spans in timeline.spans for span in spans):
        parts += [f"B {said(costs.b)}", f"W {said(costs.w)}"]
    elif isinstance(costs.b, Sequence) or isinstance(costs.w, Sequence):
        parts.append(f"B {said(costs.b)} + {said(costs.w)}")
    else:
        parts.append(f"B {_number(costs.b + costs.w)}")
    if costs.message:
        parts.append(f"a message {_number(costs.message)}")
    chunks = max(shares_of(timeline.rows)) > 1 and not all(isinstance(c, Sequence) for c in (costs.f, costs.b, costs.w))
    by = ["the stages of a rank"] * chunks + ["the slices of a sequence"] * (slices_of(timeline.rows) > 1)
    return ", ".join(parts) + (f"; shared by {' and '.join(by)}" if by else "")


def _number(value: float) -> str:
    return f"{value:.6g}"


def _ranks(asked: Asked, timeline: Timeline) -> str:
    """A line for each rank."""
    ranks = range(len(asked.rows))
    stages: list[list[str]] = [[] for _ in ranks]
    for stage, rank in enumerate(placement(asked.rows)):
        stages[rank].append(str(stage))
    columns = [
        ("rank", [str(rank) for rank in ranks]),
        ("stage", [",".join(held) for held in stages]),
        ("busy", [_number(time) for time in timeline.busy]),
        ("idle", [_number(time) for time in timeline.idle]),
        ("in flight", [_number(peak) for peak in in_flight(timeline)]),
    ]
    if in_flight(timeline) != list(timeline.peak_micros):
        columns.append(("passes", [str(peak) for peak in timeline.peak_micros]))
    if asked.versions is not None:
        columns.append(("versions", [str(live) for live in live_versions(asked.rows, asked.versions)]))
    if timeline.peak_bytes is not None:
        columns.append(("bytes in flight", [f"{size:,}" for size in timeline.peak_bytes]))
    widths = [max(map(len, [head, *cells])) for head, cells in columns]
    lines = zip(*([head, *cells] for head, cells in columns), strict=True)
    return "\n".join("   ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def _versions(rows: Schedule, rule: str, width: int) -> str:
    """Which version of its weights a stage uses for each micro-batch, as far as a line goes."""
    used = versions_of(rows, rule)
    cell = len(str(max(map(max, used)))) + 1
    left = len(f"stage {len(used) - 1}")
    room = max(1, (width - left - 5) // cell)
    lines = ["version of the weights, forward and backward, by micro-batch"]
    for stage, versions in enumerate(used):
        more = " ..." if len(versions) > room else ""
        lines.append(f"stage {stage}".ljust(left) + "|" + "".join(f"{v:>{cell}}" for v in versions[:room]) + more)
    return "\n".join(lines)

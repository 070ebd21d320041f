"""What `mpitrain trace RUN` prints: where the time went, what was sent beside theory, slow ops, memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from mpitrain.trace.findings import Findings
from mpitrain.trace.known import Known
from mpitrain.trace.places import layout_of
from mpitrain.trace.told_messages import axes_told, sent_told
from mpitrain.trace.told_time import time_told
from mpitrain.trace.told_work import held_told, ops_told
from mpitrain.trace.words import count, labelled, ms, plain, ranges

Mark = Callable[[str], str]


def summary(found: Findings, mark: Mark = str) -> str:
    """All sections.

    Args:
        found: of a trace.
        mark: makes a heading stand out.
    """
    told = [section(found, mark) for section in (time_told, axes_told, sent_told, ops_told, held_told)]
    return "\n\n".join([_head(found, mark), *filter(None, told)])


def _head(found: Findings, mark: Mark) -> str:
    known = found.known
    hosts = len({lane.rank.host for lane in known.lanes})
    layout = layout_of(known)
    head = f"{found.title}: {count(len(known.lanes), 'rank')} on {count(hosts, 'host')}"
    lines = [mark(f"{head}, {layout}" if layout else head)]
    if known.fact("model", str):
        lines.append(labelled("model", plain(known.fact("model", str), 200)))
    if known.fact("command", list):
        words = " ".join(plain(word) for word in known.fact("command", list)[:40])
        lines.append(labelled("command", plain(words, 300)))
    lines.append(labelled("steps", _steps(found)))
    lines.append(labelled("clocks", known.clocks.said))
    if known.fact("world", str) == "local":
        lines.append(labelled("times", "ranks were threads that take turns: waits say little of processes"))
    lines += [labelled("missing", text) for text in _missing(known)]
    return "\n".join(lines)


def _steps(found: Findings) -> str:
    known = found.known
    if not known.steps:
        return "none: the trace is looked at as a whole"
    times = found.step_ns
    said = f"{ranges(known.steps)}; a step takes {ms(statistics.median(times))} ms, the median of {len(times)}"
    if len(known.steps) > len(times):
        start, stop = known.spans_of[known.steps[0]]
        said += f" (step {known.steps[0]}, which warms up, took {ms(stop - start)} ms and is left out)"
    ops = known.with_ops
    return f"{said}; ops were noted in {f'steps {ranges(ops)}' if ops else 'none'}"


def _missing(known: Known) -> list[str]:
    """What is not in the trace, so that nobody takes it for all."""
    size = max(lane.rank.size for lane in known.lanes)
    absent = sorted(set(range(size)).difference(lane.number for lane in known.lanes))
    said = [f"no file of rank {ranges(absent)}, of {size}: who waits for them seems to wait for nobody"] * bool(absent)
    if not any(lane.spans.size for lane in known.lanes):
        said.append("what was noted: the processes ended before it was written, which they do every few seconds")
    dropped = {lane.number: lane.rank.dropped for lane in known.lanes if lane.rank.dropped}
    if dropped:
        most = max(dropped, key=lambda rank: dropped[rank])
        said.append(
            f"{sum(dropped.values()):,} spans did not fit (most on rank {most}: {dropped[most]:,}): the first steps and"
            " the newest are here; --trace-limit keeps more"
        )
    gaps = known.gaps
    if gaps:
        said.append(f"steps {ranges(gaps)}, which are in the files of some ranks alone, or of none")
    return said

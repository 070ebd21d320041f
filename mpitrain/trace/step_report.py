"""One step on one page: what each rank computed, sent, waited for and for whom, and held."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.errors import DataError
from mpitrain.pipeline.action import COMPUTE
from mpitrain.trace.held import Held, held, owners
from mpitrain.trace.known import Known, Lane
from mpitrain.trace.places import place_of
from mpitrain.trace.shares import UPDATE, Share, shares
from mpitrain.trace.strips import letters, strip
from mpitrain.trace.words import WIDTH, count, mib, ms, percent, plain, ranges, size

MOST_RANKS = 8  # that are told of, so that it stays one page
MOST_STRIPS = 24

Mark = Callable[[str], str]


def step_report(known: Known, title: str, step: int, ranks: Sequence[int] | None = None, mark: Mark = str) -> str:
    """The page.

    Args:
        known: a trace.
        title: what to call it.
        step: which.
        ranks: those to tell of; None: all, of more than `MOST_RANKS` those that delay the others most.
        mark: makes a heading stand out.

    Raises:
        DataError: the step is not in the trace from begin to end, or there is no such rank.
    """
    if step not in known.steps:
        there = ranges(known.steps) if known.steps else "none"
        cut = f"; of steps {ranges(known.cut)} some ranks have nothing" if step in known.cut else ""
        raise DataError(f"{title}: holds no step {step} from its begin to its end on every rank; it has {there}{cut}.")
    of = {share.rank: share for share in shares(known, [step])}
    if ranks is not None and (lacking := sorted(set(ranks).difference(of))):
        raise DataError(f"{title}: has no rank {ranges(lacking)}; it has {ranges(list(of))}.")
    shown = _shown(of) if ranks is None else sorted(set(ranks))
    lanes = [lane for lane in known.lanes if lane.number in shown]
    memory = {found.rank: found for found in held(known, step)}
    label = max(len(text) for lane in lanes for text in _labels(known, lane)) + 2
    sections = [_head(known, title, step, mark), _strips(known, step)]
    sections.append(
        "\n".join(_of_rank(known, lane, step, of[lane.number], memory.get(lane.number), label) for lane in lanes)
    )
    if len(shown) < len(of) and ranks is None:
        sections.append(f"These {len(shown)} of {len(of)} ranks delay the others most; --ranks 0,5 shows others.")
    return "\n\n".join(sections)


def _shown(of: dict[int, Share]) -> list[int]:
    delays: dict[int, float] = defaultdict(float)
    for share in of.values():
        for rank, ns in share.waits_for.items():
            delays[rank] += ns
    return sorted(sorted(of, key=lambda rank: (-delays[rank], rank))[:MOST_RANKS])


def _head(known: Known, title: str, step: int, mark: Mark) -> str:
    start, stop = known.spans_of[step]
    about = known.about(step)
    said = f"step {step} of {title}: {ms(stop - start)} ms"
    said += f", loss {about['loss']:.4f}" if "loss" in about else ""
    said += f", {about['tokens']:,} tokens" if "tokens" in about else ""
    lines = [mark(said), known.clocks.said]
    lines += ["ops and memory were not noted in this step"] * (step not in known.with_ops)
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def _strips(known: Known, step: int) -> str:
    start, stop = known.spans_of[step]
    lanes = known.lanes[:MOST_STRIPS]
    label = len(f"rank {lanes[-1].number}")
    columns = WIDTH - label - 1
    drawn = [strip(lane, step, start, stop, columns) for lane in lanes]
    ruler = ""
    for at in range(0, columns - 8, columns // 5):
        ruler = ruler.ljust(at) + f"|{ms((stop - start) * at / columns)}" + ("" if at else " ms")
    lines = [" " * (label + 1) + ruler]
    lines += [f"{f'rank {lane.number}':<{label}} {line}".rstrip() for lane, line in zip(lanes, drawn, strict=True)]
    more = len(known.lanes) - len(lanes)
    lines += [f"({count(more, 'rank')} more)"] * (more > 0)
    return "\n".join([*lines, " " * (label + 1) + letters(lanes, drawn)])


def _labels(known: Known, lane: Lane) -> tuple[str, str]:
    """What stands before the lines of a rank: its number, and below its place."""
    return f"rank {lane.number}", place_of(known, lane)


def _of_rank(known: Known, lane: Lane, step: int, share: Share, memory: Held | None, label: int) -> str:
    room = WIDTH - label - 10
    told = {
        "computed": _fit(*_computed(lane, step, share), room),
        "sent": _fit(*_sent(share), room),
        "waited": _fit(*_waited(lane, step, share), room),
        "held": "" if memory is None else _fit(*_held(memory), room),
    }
    lines = []
    for at, (name, text) in enumerate((name, text) for name, text in told.items() if text):
        head = [*_labels(known, lane), "", ""][at]
        lines.append(f"{head:<{label}}{name:<9} {text}")
    return "\n".join(lines)


def _fit(head: str, parts: Sequence[str], room: int) -> str:
    """A head and as many of its parts as there is room for."""
    for shown in range(len(parts), 0, -1):
        more = f", +{len(parts) - shown}" if shown < len(parts) else ""
        text = f"{head}: {', '.join(parts[:shown])}{more}"
        if len(text) <= room:
            return text
    return head


def _computed(lane: Lane, step: int, share: Share) -> tuple[str, list[str]]:
    """Own time by kind of action, and the op that took longest."""
    inside = lane.during([step])
    work = inside & (lane.of("action") | lane.of("op") | lane.of("unit")) & lane.flags("action", (*COMPUTE, *UPDATE))
    kinds: dict[str, float] = defaultdict(float)
    for kind, ns in zip(lane.words("action", work), lane.own[work].tolist(), strict=True):
        kinds[kind] += ns
    parts = [f"{kind} {ms(kinds[kind])}" for kind in sorted(kinds, key=lambda kind: -kinds[kind])[:4]]
    ops = np.flatnonzero(inside & lane.of("op"))
    if ops.size:
        total: dict[str, float] = defaultdict(float)
        for op, ns in zip(lane.words("name", ops), lane.own[ops].tolist(), strict=True):
            total[op] += ns
        op = max(total, key=lambda key: total[key])
        parts[2:] = [f"most in {plain(op, 30)} {ms(total[op])}"]
    busy = share.compute + share.update
    late = f" after {ms(share.before)} ms in the script" if share.before > share.step else ""
    return f"{ms(busy)} ms, {percent(busy, share.step)} %{late}", parts


def _sent(share: Share) -> tuple[str, list[str]]:
    axes = sorted((axis for axis in share.axes if share.axes[axis].calls), key=lambda axis: -share.axes[axis].nbytes)
    total = sum(share.axes[axis].nbytes for axis in axes)
    calls = sum(share.axes[axis].calls for axis in axes)
    parts = [f"{plain(axis, 20)} {size(share.axes[axis].nbytes)}" for axis in axes]
    return (f"{size(total)} in {count(round(calls), 'call')}" if axes else "nothing"), parts


def _waited(lane: Lane, step: int, share: Share) -> tuple[str, list[str]]:
    """For whom, over which axis, in which verb."""
    late = np.flatnonzero(lane.during([step]) & (lane.waited.ns > 0))
    total: dict[tuple[int, str, str], float] = defaultdict(float)
    for whom, axis, verb, ns in zip(
        lane.waited.whom[late].tolist(),
        lane.words("axis", late),
        lane.words("name", late),
        lane.waited.ns[late].tolist(),
        strict=True,
    ):
        total[whom, axis, LIKE_BLOCKING.get(verb, verb)] += ns
    parts = [
        f"rank {key[0]} {ms(total[key])} ({plain(key[1], 16)} {plain(key[2], 16)})"
        for key in sorted(total, key=lambda key: -total[key])
    ]
    return f"{ms(share.waits)} ms, {percent(share.waits, share.step)} %", parts


def _held(memory: Held) -> tuple[str, list[str]]:
    names = sorted(owners([memory]), key=lambda owner: -memory.at_peak[owner])
    parts = [f"{plain(owner, 20)} {mib(memory.at_peak[owner])}" for owner in names if memory.at_peak[owner]]
    return f"{mib(memory.peak)} MiB", parts

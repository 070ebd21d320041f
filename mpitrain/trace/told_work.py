"""The sections of the summary on ops and on memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from mpitrain.debug.columns import aligned
from mpitrain.trace.findings import Findings
from mpitrain.trace.held import owners
from mpitrain.trace.words import indented, mib, ms, note, number, percent, plain

MOST_OPS = 12  # lines

Mark = Callable[[str], str]


def ops_told(found: Findings, mark: Mark) -> str:
    """The slowest ops; "" where none were noted."""
    if not found.ops:
        return ""
    step = statistics.fmean(share.step for share in found.shares)
    rows = [["ms", "% of step", "calls", "op", "in", "slowest"]]
    for op in found.ops[:MOST_OPS]:
        ratio = op.worst / op.ns if op.ns else 1.0
        rows.append(
            [
                ms(op.ns),
                percent(op.ns, step),
                number(op.calls),
                plain(op.op, 34),
                plain(op.where, 26),
                f"rank {op.slowest} x{ratio:.1f}",
            ]
        )
    lines = [mark("OPS of a mean rank and step, by their own time"), indented(aligned(rows, (3, 4, 5)))]
    rest = found.ops[MOST_OPS:]
    if rest:
        lines.append(f"  ({len(rest)} more, {ms(sum(op.ns for op in rest))} ms together)")
    lines.append(
        note("Own time is without what is inside: messages of an op are not its own.  * stands for each layer.")
    )
    return "\n".join(lines)


def held_told(found: Findings, mark: Mark) -> str:
    """What each owner held at most; "" where memory was not noted."""
    if not found.held:
        return ""
    top = max(found.held, key=lambda of: of.peak)
    theory = any(of.predicted for of in found.held)
    rows = [
        ["owner", "mean", "largest", "on rank", *(["predicted"] if theory else []), f"at the peak of rank {top.rank}"]
    ]
    for owner in owners(found.held):
        most = max(found.held, key=lambda of: of.largest.get(owner, 0))
        rows.append(
            [
                plain(owner, 24),
                mib(statistics.fmean(of.largest.get(owner, 0) for of in found.held)),
                mib(most.largest.get(owner, 0)),
                str(most.rank),
                *([mib(most.predicted[owner]) if owner in most.predicted else "-"] if theory else []),
                mib(top.at_peak.get(owner, 0)),
            ]
        )
    rows.append(
        [
            "all",
            mib(statistics.fmean(of.peak for of in found.held)),
            mib(top.peak),
            str(top.rank),
            *[""] * theory,
            mib(top.peak),
        ]
    )
    return "\n".join(
        [
            mark(f"MEMORY at the ends of actions, the most of each owner, in MiB (all: step {top.step})"),
            indented(aligned(rows)),
            note("What only the running code holds inside of an action is not seen here: train --memory sees it."),
        ]
    )

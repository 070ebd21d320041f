"""The sections of the summary on messages: time and bytes by axis, and what was sent beside theory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpitrain.debug.columns import aligned
from mpitrain.trace.findings import Findings
from mpitrain.trace.shares import OfAxis
from mpitrain.trace.words import count, indented, ms, note, number, plain, ranges, size

MOST_KINDS = 16  # lines of what was sent

Mark = Callable[[str], str]


def axes_told(found: Findings, mark: Mark) -> str:
    """Calls, bytes and time of each axis; "" where nothing was sent."""
    names = list(dict.fromkeys(axis for share in found.shares for axis in share.axes))
    if not names:
        return ""
    rows = [["axis", "ranks", "calls", "bytes", "ms", "waits", "moves", "bytes/s"]]
    for axis in sorted(names, key=lambda axis: -sum(share.axes.get(axis, OfAxis()).ns for share in found.shares)):
        of = [share.axes[axis] for share in found.shares if axis in share.axes]
        mean = OfAxis(
            *(sum(column) / len(of) for column in zip(*((o.calls, o.nbytes, o.ns, o.waits) for o in of), strict=True))
        )
        moves = mean.ns - mean.waits
        rows.append(
            [
                plain(axis, 24),
                str(len(of)),
                number(mean.calls),
                size(mean.nbytes),
                ms(mean.ns),
                ms(mean.waits),
                ms(moves),
                size(1e9 * mean.nbytes / moves) if moves > 0 and mean.nbytes else "-",
            ]
        )
    of_what = "a mean rank and step" if found.known.steps else "a mean rank"
    return "\n".join(
        [
            mark(f"MESSAGES of {of_what}, by axis"),
            indented(aligned(rows)),
            note("moves: ms in which all others had come, so that bytes could move; bytes/s: over that time."),
        ]
    )


def sent_told(found: Findings, mark: Mark) -> str:
    """Bytes by axis, verb and cause, what was predicted, and where in the program they were sent."""
    sent = found.sent
    if not sent.kinds:
        return ""
    head = ["axis", "verb", *(["cause"] if sent.by_cause else []), "ranks", "calls", "bytes"]
    words: tuple[int, ...] = (0, 1, 2) if sent.by_cause else (0, 1)
    rows = [[*head, *(["theory"] if sent.predicted else []), "", "at"]]
    for kind in sent.kinds[:MOST_KINDS]:
        rows.append(
            [
                *(
                    plain(text, 24)
                    for text in ([kind.axis, kind.verb, kind.cause] if sent.by_cause else [kind.axis, kind.verb])
                ),
                str(kind.ranks),
                number(kind.calls),
                number(kind.nbytes),
                *([number(kind.theory)] if kind.theory is not None else []),
                ("=" if kind.agrees else "<" if sent.at_most and kind.nbytes <= (kind.theory or 0) else "!")
                if sent.predicted
                else "",
                _site(kind.sites),
            ]
        )
    words += (len(rows[0]) - 2, len(rows[0]) - 1)
    beside = ", beside theory" if sent.predicted else ""
    where = (
        f"steps {ranges([s for s in found.known.judged if s in found.known.with_ops])}"
        if sent.by_cause
        else "all steps"
    )
    whom = "a mean rank and step" if found.known.steps else "a mean rank"
    lines = [mark(f"SENT by {whom}, in bytes{beside}"), indented(aligned(rows, words))]
    if len(sent.kinds) > MOST_KINDS:
        rest = sent.kinds[MOST_KINDS:]
        lines.append(f"  ({len(rest)} more, {number(sum(kind.nbytes for kind in rest))} bytes; --json has all)")
    lines.append(note(_verdict(found, where)))
    if sent.outside_calls:
        said = f"{size(sent.outside_bytes)} in {count(sent.outside_calls, 'call')}"
        lines.append(note(f"Outside of steps all ranks together sent {said}: checks, validation, samples, saves."))
    return "\n".join(lines)


def _verdict(found: Findings, where: str) -> str:
    sent = found.sent
    said = f"Of {where}; payload times the factor of the best algorithm, as the door counts."
    if not found.known.steps:
        return "Payload times the factor of the best algorithm, as the door counts."
    if not sent.predicted:
        return f"{said}  There is no theory in this trace: runs of mpitrain train have one."
    if sent.agrees:
        return (
            f"{said}  =: every rank sent what was predicted, to the byte, in each of {len(found.known.judged)} steps."
        )
    if sent.at_most:
        return f"{said}  Theory is a bound here, or the mean of steps that differ.  =: to the byte; <: less."
    if sent.odd:
        step, rank, axis, verb, is_sent, wanted = sent.odd[0]
        said += (
            f"  Not as predicted: step {step}, rank {rank} sent {number(is_sent)} bytes by {plain(verb, 20)} over"
            f" {plain(axis, 24)} and not {number(wanted)}; {len(sent.odd)} such."
        )
    return f"{said}  =: to the byte as predicted on every rank; !: not."


def _site(sites: Sequence[str]) -> str:
    named = [plain(site, 24) for site in sites if site]
    return named[0] + (f" +{len(named) - 1}" if len(named) > 1 else "") if named else ""

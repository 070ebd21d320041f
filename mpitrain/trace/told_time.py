"""The section of the summary on time: a line a rank, and how idle pipelines were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpitrain.debug.columns import aligned
from mpitrain.trace.findings import Findings
from mpitrain.trace.places import place_of
from mpitrain.trace.shares import OfAxis, Share
from mpitrain.trace.words import WIDTH, indented, ms, note, percent, plain

MOST_RANKS = 16  # lines
MOST_AXES = 5  # columns
OTHERS = "others"
AXIS = 16  # characters of a name, which a file holds
WORTH_TELLING = 0.1  # of a step

Mark = Callable[[str], str]


def time_told(found: Findings, mark: Mark) -> str:
    """Shares of a mean step, rank by rank; "" where no time was traced."""
    shares, bubbles = found.shares, found.bubbles
    if not any(share.step for share in shares):
        return ""
    delayed = _delayed(shares)
    shown = _worth_showing(shares, delayed)
    for most in range(MOST_AXES, 1, -1):
        axes = _by_time(shares, most)
        table = _table(found, shown, axes, delayed)
        if max(map(len, table.splitlines())) <= WIDTH:
            break
    of = "a mean step" if found.known.steps else "the trace"
    lines = [mark(f"TIME of {of}, in %"), table]
    if len(shown) < len(shares):
        lines.append(f"  ({len(shares) - len(shown)} ranks more, which nobody waits for longer)")
    work = "compute: F, B and W outside of messages; update: LOAD, COUNT, REDUCE, STEP; "
    work = work if "compute" in table else ""
    named = ", ".join(plain(axis, AXIS) for axis in axes) or "axes"
    lines.append(
        note(
            f"{work}{named}: in messages over them; waits: the part of these until the last of the others had come, for"
            " rank: most of it for which; delays: what all others together wait for this rank."
        )
    )
    lines += [note(_idle(found))] if bubbles is not None else []
    lines += [note(between)] if (between := _between(shares)) else []
    return "\n".join(lines)


def _table(found: Findings, shown: Sequence[Share], axes: Sequence[str], delayed: dict[int, float]) -> str:
    """A line for each rank."""
    bubbles = found.bubbles
    places = {lane.number: place_of(found.known, lane) for lane in found.known.lanes}
    placed = any(places.values())
    digits = len(str(max(rank for share in shown for rank in (share.rank, *share.waits_for))))
    acts = any(share.compute + share.update for share in found.shares)
    rows = [["rank", *(["place"] if placed else []), *(["compute", "update"] if acts else [])]]
    rows[0] += [plain(axis, AXIS) for axis in axes]
    rows[0] += ["rest", "waits", "for rank", "delays", *(["idle"] if bubbles is not None else [])]
    for share in shown:
        whole = share.step
        named = [share.axes.get(axis, OfAxis()).ns for axis in axes]
        if axes and axes[-1] == OTHERS:
            named[-1] = share.messages - sum(named)
        whom = max(share.waits_for, key=lambda rank: share.waits_for[rank], default=None)
        rows.append(
            [
                str(share.rank),
                *([places[share.rank]] if placed else []),
                *(percent(ns, whole) for ns in ((share.compute, share.update) if acts else ())),
                *(percent(ns, whole) for ns in (*named, share.rest, share.waits)),
                "-" if whom is None else f"{whom:<{digits}} {percent(share.waits_for[whom], whole):>4}",
                percent(delayed.get(share.rank, 0.0), whole),
                *([percent(bubbles.idle.get(share.rank, 0.0), 1.0)] if bubbles is not None else []),
            ]
        )
    return indented(aligned(rows, (1,) if placed else ()))


def _by_time(shares: Sequence[Share], most: int) -> list[str]:
    """Axes, those first in which most time passes; the last ones together where there are more than `most`."""
    total: dict[str, float] = {}
    for share in shares:
        for axis, of in share.axes.items():
            total[axis] = total.get(axis, 0.0) + of.ns
    axes = sorted(total, key=lambda axis: -total[axis])
    return axes if len(axes) <= most else [*axes[: most - 1], OTHERS]


def _delayed(shares: Sequence[Share]) -> dict[int, float]:
    """Rank -> ns that the others wait for it."""
    found: dict[int, float] = {}
    for share in shares:
        for rank, ns in share.waits_for.items():
            found[rank] = found.get(rank, 0.0) + ns
    return found


def _worth_showing(shares: Sequence[Share], delayed: dict[int, float]) -> list[Share]:
    """All, or those that delay the others most."""
    if len(shares) <= MOST_RANKS:
        return list(shares)
    most = sorted(shares, key=lambda share: -delayed.get(share.rank, 0.0))[:MOST_RANKS]
    return sorted(most, key=lambda share: share.rank)


def _between(shares: Sequence[Share]) -> str:
    """What is said of the time between steps, if some rank spends a good part of it there."""
    late = max(shares, key=lambda share: share.before)
    if late.before < WORTH_TELLING * max(share.step for share in shares):
        return ""
    said = f"between steps, in the script: rank {late.rank} {ms(late.before)} ms"
    others = sorted(share.before for share in shares if share is not late)
    return f"{said}{f', the others {ms(others[0])} to {ms(others[-1])} ms' if others else ''}."


def _idle(found: Findings) -> str:
    """What is said of pipelines."""
    bubbles = found.bubbles
    assert bubbles is not None
    name = plain(found.known.fact("schedule", dict).get("name", "this schedule"), 20)
    said = f"idle: outside of F, B and W from the first F to the last B of its pipeline, {100 * bubbles.measured:.1f} %"
    said += " in the mean"
    if bubbles.played is not None:
        said += (
            f"; {name} with the same times of F, B and W and messages that take none has {100 * bubbles.played:.1f} %"
        )
    if bubbles.formula is not None:
        said += f", with equal stages {100 * bubbles.formula:.1f} %"
    return f"{said}."

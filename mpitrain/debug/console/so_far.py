"""`report`: what each rank has done in this step so far: computed, sent, waited, and what it holds.

    step 2 so far; sums of losses: F0@1 93.54 (4,5); F0@1 90.81 (6,7)

    ranks    step  are at     done                                         ops  back      hold  tapes
    0,1,2,3  2     RECV_B1@0  13 of 23: LOAD0-3 COUNT F0 SEND_F0 F1 S...   48    16  134.4 KiB      2
    4,5,6,7  2     F1@1       10 of 23: LOAD0-3 COUNT RECV_F0 F0 B0 S...   17    17   72.5 KiB      0

    axis   message     calls by rank              sent by rank
    dp+cp  all_reduce  1                          8 B
    tp     all_reduce  11 (0,1,2,3)  7 (4,5,6,7)  33.0 KiB (0,1,2,3)  15.6 KiB (4,5,6,7)

`tapes` are those on which something waits for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from mpitrain.comm.places import listed, named
from mpitrain.debug.columns import aligned
from mpitrain.debug.console.numbers import cut, nbytes, short
from mpitrain.debug.console.shown import wrapped
from mpitrain.debug.console.watch import Watch
from mpitrain.pipeline.action import COMPUTE, PER_STEP

HELP_REPORT = """\
report      what each rank has done in this step so far: computed, sent, and what it holds
  done is the row of actions up to here (F0 F1 B0 ...); ops and back are those of both ways.
  Messages by axis and verb: calls, and bytes sent, as the door counts.  A ! marks an axis whose
  ranks stand between the same actions and have made different numbers of calls.  Ranks take
  turns here, so times mean little: write a trace (--trace), read it with mpitrain trace RUN."""


def report(views: Sequence[Watch], words: str, focus: int, width: int = 100) -> str:
    """This step so far.

    Args:
        views: of the ranks.
        words: nothing.
        focus: the rank that the prompt is about.
        width: columns of the terminal.
    """
    if not any(view.course.row for view in views):
        return "\n".join(["no step has begun", *_messages(views, width)])
    lines = wrapped(_head(views), width)
    stands: dict[tuple[str, ...], list[int]] = {}
    for view in views:
        course = view.course
        done = _done(view)
        now = str(course.now) if course.now is not None else "between actions"
        view.ledger.settle()
        tapes = sum(bool(tape.nodes) and tape.nbytes > 0 for tape in view.slots.tapes())
        left = f"{len(course.done)} of {len(course.row)}{': ' * bool(done)}{done}"
        cells = str(course.step), now, left, f"{course.ops:,}", f"{course.ops_back:,}", nbytes(view.ledger.total)
        stands.setdefault((*cells, str(tapes)), []).append(view.rank)
    rows = [["ranks", "step", "are at", "done", "ops", "back", "hold", "tapes"]]
    rows += [[listed(ranks), *cells] for cells, ranks in stands.items()]
    fixed = sum(max(len(row[at]) for row in rows) + 2 for at in (0, 1, 2, 4, 5, 6, 7))
    for row in rows:
        row[3] = cut(row[3], max(width - fixed, 12), left=False)
    lines += ["", *aligned(rows, words=(0, 1, 2, 3)).splitlines(), *_messages(views, width)]
    for trouble in dict.fromkeys(view.trouble for view in views if view.trouble):
        ranks = [view.rank for view in views if view.trouble == trouble]
        lines += wrapped(f"! {named(ranks)}, by the rules of states: {trouble.splitlines()[0]}", width)
    return "\n".join(line[:width] for line in lines)


def _head(views: Sequence[Watch]) -> str:
    """Which step, and what is known of its loss."""
    steps = sorted({view.course.step for view in views})
    head = f"step {steps[0]} so far" if len(steps) == 1 else f"steps {listed(steps)} so far"
    known = next((view.course.report for view in views if view.course.report is not None), None)
    if known is not None:
        skipped = ", skipped: gradients overflowed" if known.skipped else ""
        return f"{head}: loss {known.loss:.4f}, gradient norm {short(known.grad_norm)}, lr {known.lr:.4g}{skipped}"
    told: dict[str, list[int]] = {}
    for view in views:
        if view.course.losses:
            losses = [f"{name} {short(loss)}" for name, loss in view.course.losses.items()]
            told.setdefault(" ".join(losses[-3:]), []).append(view.rank)
    parts = [f"{text} ({listed(ranks)})" for text, ranks in told.items()]
    sums = f"; sums of losses: {'; '.join(parts[:4])}{' ...' * (len(parts) > 4)}" if parts else ""
    return f"{head}{sums}"


def _done(view: Watch) -> str:
    """Actions that are over, those of a kind that follow each other joined: `LOAD0-3 COUNT F0 F1 B0`."""
    words = []
    for kind, actions in groupby((each.action for each in view.course.done), key=lambda action: action.kind):
        these = list(actions)
        if kind in PER_STEP and these[0].micro is None:
            words += [kind] * len(these)
        elif kind in COMPUTE or len(these) == 1:
            words += [str(action).removesuffix(f"@{action.stage}") for action in these]
        else:
            words.append(f"{kind}{these[0].micro}-{these[-1].micro}")
    return " ".join(words)


def _messages(views: Sequence[Watch], width: int) -> list[str]:
    """Calls and bytes by axis and verb."""
    keys = list(dict.fromkeys(key for view in views for key in view.course.traffic))
    if not keys:
        return []
    rows = [["axis", "message", "calls by rank", "sent by rank"]]
    odd = []
    for key in keys:
        calls: dict[str, list[int]] = {}
        sent: dict[str, list[int]] = {}
        for view in views:
            traffic = view.course.traffic.get(key)
            calls.setdefault(f"{traffic.calls:,}" if traffic is not None else "0", []).append(view.rank)
            sent.setdefault(nbytes(traffic.bytes) if traffic is not None else "0 B", []).append(view.rank)
        rows.append([*key, _by_rank(calls), _by_rank(sent)])
        odd += _uneven(views, key)
    lines = ["", *aligned(rows, words=range(4)).splitlines()]
    for text in odd:
        lines += wrapped(f"! {text}", width)
    return lines


def _by_rank(values: dict[str, list[int]]) -> str:
    if len(values) == 1:
        return next(iter(values))
    shown = [f"{value} ({listed(ranks)})" for value, ranks in values.items()]
    return "  ".join(shown[:3]) + (" ..." if len(shown) > 3 else "")


def _uneven(views: Sequence[Watch], key: tuple[str, str]) -> list[str]:
    """Ranks of one axis that stand at the same end of an action, with different numbers of its collectives."""
    axis, verb = key
    if verb in ("send", "recv"):
        return []
    groups: dict[tuple[object, ...], dict[int, list[int]]] = {}
    for view in views:
        traffic = view.course.traffic.get(key)
        if view.event is not None and view.event.kind == "action" and traffic is not None:
            stands = (view.course.step, len(view.course.done), view.event.name, view.event.phase)
            groups.setdefault((traffic.ranks, *stands), {}).setdefault(traffic.calls, []).append(view.rank)
    lines = []
    for calls in groups.values():
        if len(calls) > 1:
            parts = [f"{named(ranks)} {number}" for number, ranks in calls.items()]
            lines.append(f"calls of {verb} on {axis}: {'; '.join(parts)}")
    return lines

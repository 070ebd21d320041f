"""`memory`: who holds how many bytes on which rank, and what lives on from step to step.

    memory now           rank 0     rank 1
    weights            12.0 KiB   12.0 KiB
    values             24.0 KiB   24.0 KiB
    ...
    all                 4.4 MiB    4.4 MiB
    at the peak         6.4 MiB    6.4 MiB
    ! ranks 0,1: values grow with each step: 8.0 KiB, 16.0 KiB, 24.0 KiB when steps 3, 4, 5 began
    ! ranks 0,1: of step 1: values (8, 128) float64, 8.0 KiB, kept as Net.activity

A ledger counts arrays; it notes each by a reference that keeps nothing alive.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.autograd.tape import Tape
from mpitrain.comm.places import named
from mpitrain.debug.columns import aligned
from mpitrain.debug.console.current import pass_text
from mpitrain.debug.console.kept import Survivor, keeper
from mpitrain.debug.console.numbers import nbytes
from mpitrain.debug.console.shown import wrapped
from mpitrain.debug.console.tapes import view_of
from mpitrain.debug.console.watch import Watch
from mpitrain.debug.owners import OWNERS

HELP_MEMORY = """\
memory [RANK]      who holds how many bytes on which rank, and what lives on from step to step
  Of one rank: now, at the peak, and the most that each owner ever had, by the owners of --memory.
  Lines with ! tell of values of steps that are over, who keeps them, and what grows."""

COLUMNS = 7
"""Ranks that have a column each; of more the least and the largest are told."""
SURVIVORS = 4
"""Kinds of arrays of earlier steps that are named a rank."""


def memory(views: Sequence[Watch], words: str, focus: int, width: int = 100) -> str:
    """The bytes that are alive.

    Args:
        views: of the ranks.
        words: a rank, or nothing: all.
        focus: the rank that the prompt is about.
        width: columns of the terminal.

    Raises:
        ConsoleError: there is no such rank.
    """
    if words.strip():
        view = view_of(views, words.strip())
        ledger = view.ledger
        ledger.settle()
        rows = [["", "now", "at peak", "largest"]]
        for owner in [each for each in OWNERS if ledger.largest.get(each)]:
            columns = (ledger.now, ledger.at_peak, ledger.largest)
            rows.append([owner, *(nbytes(column.get(owner, 0)) for column in columns)])
        rows.append(["all", nbytes(ledger.total), nbytes(ledger.peak), ""])
        return "\n".join([f"memory of rank {view.rank}", *aligned(rows).splitlines(), *_troubles([view], width)])
    for view in views:
        view.ledger.settle()
    owners = [owner for owner in OWNERS if any(view.ledger.now.get(owner) for view in views)]
    if len(views) <= COLUMNS:
        rows = [["memory now", *(f"rank {view.rank}" for view in views)]]
        rows += [[owner, *(nbytes(view.ledger.now.get(owner, 0)) for view in views)] for owner in owners]
        rows.append(["all", *(nbytes(view.ledger.total) for view in views)])
        rows.append(["at the peak", *(nbytes(view.ledger.peak) for view in views)])
    else:
        rows = [["memory now", "least", "", "most", "", f"rank {focus}"]]
        for owner in owners:
            rows.append([owner, *_ends([(view.ledger.now.get(owner, 0), view.rank) for view in views], focus)])
        rows.append(["all", *_ends([(view.ledger.total, view.rank) for view in views], focus)])
        rows.append(["at the peak", *_ends([(view.ledger.peak, view.rank) for view in views], focus)])
    return "\n".join([*(line[:width] for line in aligned(rows).splitlines()), *_troubles(views, width)])


def _ends(of_ranks: Sequence[tuple[int, int]], focus: int) -> list[str]:
    least, most = min(of_ranks), max(of_ranks)
    own = next((nbytes(size) for size, rank in of_ranks if rank == focus), "-")
    return [nbytes(least[0]), f"rank {least[1]}", nbytes(most[0]), f"rank {most[1]}", own]


def _troubles(views: Sequence[Watch], width: int) -> list[str]:
    """What lives on, the same words of several ranks once."""
    told: dict[str, list[int]] = {}
    for view in views:
        for text in _of_rank(view, views):
            told.setdefault(text, []).append(view.rank)
    lines = []
    for text, ranks in told.items():
        lines += wrapped(f"! {named(ranks)}: {text}", width)
    if any(view.slots.keep for view in views):
        lines.append("values of tapes are kept for show (keep off ends that): they count as activations and values")
    return lines


def _of_rank(view: Watch, views: Sequence[Watch]) -> list[str]:
    texts = []
    marks = list(view.kept.marks)
    for owner, sizes in view.kept.growth():
        steps = ", ".join(str(mark.step) for mark in marks[-len(sizes) :])
        texts.append(f"{owner} grow with each step: {', '.join(map(nbytes, sizes))} when steps {steps} began")
    survivors = view.kept.survivors()
    alike: dict[tuple[object, ...], list[Survivor]] = {}
    for each in survivors:
        alike.setdefault((each.since, each.owner, each.path, each.array.shape, each.array.dtype), []).append(each)
    for those in list(alike.values())[:SURVIVORS]:
        each = those[0]
        name = keeper(each.array, [survivors, those, each, views])
        of = f" of {each.path}" if each.path else ""
        kept = f", kept as {name}" if name else ", kept by an object that has no name"
        what = f"{each.owner}{of} {each.array.shape} {each.array.dtype}, {nbytes(each.array.nbytes)}"
        texts.append(f"of step {each.since}: {f'{len(those)} times ' * (len(those) > 1)}{what}{kept}")
    tapes = [tape for tape in view.slots.tapes() if tape.nodes and _is_past(view, tape)]
    if tapes:
        name = keeper(tapes[0], [tapes, view])
        kept = f", by what is kept as {name}" if name else ""
        first = pass_text(view, tapes[0])
        texts.append(
            f"{len(tapes)} tape{'s' * (len(tapes) > 1)} of steps that are over kept alive{kept}: {first} first"
        )
    rest = [each for those in list(alike.values())[SURVIVORS:] for each in those]
    if rest:
        size = nbytes(sum(each.array.nbytes for each in rest))
        texts.append(f"and {len(rest)} more array{'s' * (len(rest) > 1)} of steps that are over, {size}")
    return texts


def _is_past(view: Watch, tape: Tape) -> bool:
    """Whether a tape was recorded in a step before the one before this: that one may be in somebody's hands still."""
    of = view.slots.pass_of(tape)
    if view.executor is None or view.executor.versions is not None:
        return False  # steps overlap
    return len(of) > 1 and of[0] < view.step - 1

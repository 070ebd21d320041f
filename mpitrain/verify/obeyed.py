"""Has a script run the layout that it was told?  What was not run is not proven.

    mesh        the sizes of its axes, as it began
    ways        the ops that sent in its forwards, by axis; what it kept, and made again in backward; so too for an
                axis that a mesh may have and a model not use
    schedule    the order in which its ranks computed

What it did in their place is the reason for which the layout is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.debug.capture import Record
from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import Row, parse_row, row_text
from mpitrain.pipeline.schedules import compute_rows
from mpitrain.verify.launch import Run
from mpitrain.verify.layouts import AXES, AXIS_OPS, COUNTS, WAYS, Layout

SHOWN = 60  # characters of a row


def disobeyed(layout: Layout, run: Run) -> str:
    """What the script did in place of what it was told, in a line; empty if it did as told, or did not get so far."""
    ranks = [list(_beginning(run, rank)) for rank in range(max(1, run.ranks))]
    return _other_mesh(layout, ranks) or _other_way(layout, ranks) or _other_schedule(layout, ranks)


def _beginning(run: Run, rank: int) -> list[Record]:
    """The records of a rank without their arrays."""
    return [Record(record.facts, {}) for record in run.records()[rank]]


def _other_mesh(layout: Layout, ranks: Sequence[Sequence[Record]]) -> str:
    for records in ranks:
        if not records:
            continue
        sizes: dict[str, Any] = dict(records[0].facts["sizes"])
        sizes["dp"] = sizes.pop("edp") * sizes["ep"]
        if any(size != dict(layout.axes).get(axis, 1) for axis, size in sizes.items()):
            grid = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes[axis] > 1) or "one rank"
            return f"the script did not obey {' '.join(layout.flags)}: its mesh was {grid}"
    return ""


def _steps(records: Sequence[Record]) -> list[Mapping[str, Any]]:
    return [record.facts for record in records if record.facts["is"] == "step"]


def _first_row(steps: Sequence[Mapping[str, Any]]) -> int:
    """How many steps the first row has: those up to the next that begins one."""
    return next((i for i, facts in enumerate(steps) if i and not facts.get("batch")), len(steps))


def _other_way(layout: Layout, ranks: Sequence[Sequence[Record]]) -> str:
    """Whether an axis has worked in another way; a stage that holds no block sends nothing, so all ranks are asked."""
    told = [way for way in map(WAYS.__getitem__, layout.simple.ways) if way.ops or way.seen]
    steps = [facts for records in ranks for facts in _steps(records)]
    sent = {(op, axis) for facts in steps for op, axis in facts["sent"]}
    seen = {word for facts in steps for word in facts["memory"]}
    for axis, ops in AXIS_OPS.items() if steps else ():
        if axis in layout.sizes and not any((op, axis) in sent for op in ops):
            return f"the script did not obey {AXES[axis]}: it called no {' or '.join(ops)} over {axis}"
    for way in told if steps else ():
        if way.seen and way.seen not in seen:
            return f"the script did not obey {' '.join(way.flags)}: no step was seen in which {way.meaning}"
        if way.ops and not any((op, way.axis) in sent for op in way.ops):
            return f"the script did not obey {' '.join(way.flags)}: it called no {' or '.join(way.ops)} over {way.axis}"
    return ""


def _other_schedule(layout: Layout, ranks: Sequence[Sequence[Record]]) -> str:
    """Whether the stages have worked in another order than that of the schedule, in the first row."""
    name = layout.schedule
    if not name or any(not _steps(records) for records in ranks):
        return ""
    batches = _first_row(_steps(ranks[0]))
    seen = []
    for records in ranks:
        text = " ".join(facts["compute"] for facts in _steps(records)[:batches])
        seen.append((records[0].facts["coords"]["pp"], parse_row(text)))
    every = [action for _, row in seen for action in row]
    pp = layout.sizes["pp"]
    chunks = (1 + max(action.stage for action in every)) // pp
    slices = 1 + max(action.part or 0 for action in every)
    flags = " ".join(layout.flags_of([name]))
    for letter, has in (("v", chunks), ("s", slices)):
        count = COUNTS[letter]
        wanted = dict(layout.counts).get(letter)
        if name == count.way and (has < 2 if wanted is None else has != wanted):
            return f"the script did not obey {flags}: its {count.meaning} were {has}"
    if layout.is_stale and batches == 1:
        return f"the script did not obey {flags}: no two of its steps overlapped (executor.run takes several batches)"
    micros = len({action.micro for action in every}) // batches
    try:
        rows = compute_rows(name, ranks=pp, microbatches=max(1, micros), chunks=chunks, slices=slices, batches=batches)
    except ScheduleError as error:
        return f"the script did not obey {flags}: its stages worked in an order that is none of it ({error})"
    for index, row in seen:
        if row != rows[index]:
            return (
                f"the script did not obey {flags}: rank {index} of pp computed {_shown(row)}, not {_shown(rows[index])}"
            )
    return ""


def _shown(row: Row) -> str:
    text = row_text(row)
    return text if len(text) <= SHOWN else f"{text[:SHOWN].rpartition(' ')[0]} ..."

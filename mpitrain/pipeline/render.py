"""What a schedule looks like: a simulated step as a table of text.

    time    0              5             10             15
    rank 0| F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2 F6 B3 F7 B4
    rank 1|  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3 F6 B4 F7

One line a rank, time to the right, and for each F, B and W as many columns as it takes time.  What takes no time is not
seen.  `mpitrain.pipeline.picture` draws the same as a picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from mpitrain.pipeline.action import COMPUTE, Action
from mpitrain.pipeline.simulate import Span, Timeline

IDLE, GOES_ON, LEFT_OUT, CURSOR = ".", "-", "~", ">"
_MOST_COLUMNS = 100_000


def text(
    timeline: Timeline,
    width: int | None = None,
    blocks: int = 4,
    heads: Sequence[str] = (),
    cursors: Sequence[Action | None] = (),
) -> str:
    """A table of a simulated schedule: a line for each rank, a column for each unit of time.

    A cell reads `F3` (`F3.1` for a slice of a sequence, `F3@4` where a rank has several stages), dashes behind it say
    that it goes on, a dot is idle time.  A column is the shortest action, or the half, third or quarter of it that all
    times are multiples of; where there is none, times are rounded to columns, and a last line says so.

    Args:
        timeline: what to draw.
        width: characters of a line; None for lines as long as it takes.
        blocks: into how many tables, one below the other, what is wider is folded; of what is wider still the middle is
            left out, since a pipeline fills and drains at its ends.
        heads: of the lines; `rank 0` and so on unless given.
        cursors: of each line an action before which a `>` stands.
    """
    column, exact = _column(timeline)
    count = max(1, _place(timeline.makespan, column))
    name_of = _names(timeline)
    cell = max((len(name_of(span.action)) for span in all_drawn(timeline)), default=1)
    lanes = [_lane(drawn(spans), name_of, column, count, cell) for spans in timeline.spans]
    for lane, spans, cursor in zip(lanes, timeline.spans, cursors, strict=False):
        at = next((min(_place(span.start, column), count - 1) for span in drawn(spans) if span.action == cursor), None)
        if at is not None:
            lane[at] = CURSOR + lane[at][1:]
    heads = heads or [f"rank {rank}" for rank in range(len(lanes))]
    left = max(map(len, heads))
    room = count if width is None else max(1, (width - left - 1) // (cell + 1))
    shown: list[int | None] = list(range(count))
    missing = max(0, count - room * blocks)
    if missing:
        before = room * blocks // 2
        shown[before : before + missing + 1] = [None]
    parts = []
    even = math.ceil(len(shown) / math.ceil(len(shown) / room))  # no last block of two columns
    for at in range(0, len(shown), even):
        block = shown[at : at + even]
        lines = ["time".ljust(left) + " " + _ruler(block, column, cell)]
        for head, lane in zip(heads, lanes, strict=True):
            cells = (f" {LEFT_OUT:>{cell}}" if c is None else lane[c] for c in block)
            lines.append(head.ljust(left) + "|" + "".join(cells))
        parts.append("\n".join(lines))
    notes = [f"({missing + 1} of {count} columns are left out at {LEFT_OUT})"] if missing else []
    if not exact:
        notes.append(f"(a column lasts {column:.4g}; times are rounded to columns)")
    return "\n".join(["\n\n".join(parts), *notes])


def _column(timeline: Timeline) -> tuple[float, bool]:
    """How long a column lasts, and whether everything begins and ends with one."""
    spans = list(all_drawn(timeline))
    if not spans:
        return 1.0, True
    shortest = min(span.stop - span.start for span in spans)
    times = {time for span in spans for time in (span.start, span.stop)}
    for parts in (1, 2, 3, 4):
        column = shortest / parts
        fits = timeline.makespan <= _MOST_COLUMNS * column
        if fits and all(abs(time / column - round(time / column)) < 1e-6 for time in times):
            return column, True
    return max(shortest, timeline.makespan / _MOST_COLUMNS), False


def _names(timeline: Timeline) -> Callable[[Action], str]:
    """How actions are called in a cell: without their stage where the lane says it."""
    if any(len({span.action.stage for span in drawn(spans)}) > 1 for spans in timeline.spans):
        return str
    return lambda action: str(action).partition("@")[0]


def _place(time: float, column: float) -> int:
    """The column at which a time is drawn; times that are a column apart or more never fall together."""
    return math.floor(time / column + 0.5)


def _lane(spans: Iterator[Span], name_of: Callable[[Action], str], column: float, count: int, cell: int) -> list[str]:
    """One rank's columns, each of a space and `cell` characters."""
    lane = [f" {IDLE:>{cell}}"] * count
    for action, start, stop in spans:
        first = min(_place(start, column), count - 1)
        last = min(max(_place(stop, column), first + 1), count)
        room = (last - first) * (cell + 1) - 1
        name = name_of(action)
        drawn = " " + (name.rjust(cell) if last - first == 1 else name.ljust(room, GOES_ON))
        lane[first:last] = [drawn[at : at + cell + 1] for at in range(0, room + 1, cell + 1)]
    return lane


def _ruler(block: Sequence[int | None], column: float, cell: int) -> str:
    """The line of times above a block of columns: of its first, and round ones behind it."""
    digits = max(len(f"{c * column:.4g}") for c in block if c is not None)
    step = round_up(column * max(3, (digits + 1) / (cell + 1)))
    line = ""
    for place, c in enumerate(block):
        if c is None:
            continue
        time = step * round(c * column / step)
        is_round = _place(time, column) == c
        mark = f"{time if is_round else c * column:.4g}"
        at = place * (cell + 1) + 1
        if (is_round or not place) and len(line) < at and (not line or at + len(mark) <= len(block) * (cell + 1)):
            line = line.ljust(at) + mark
    return line


def round_up(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (or 0.5, 0.2, ...) that is at least so much."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))


def drawn(spans: Iterable[Span]) -> Iterator[Span]:
    """The spans that are seen: F, B and W, if they take time."""
    return (span for span in spans if span.action.kind in COMPUTE and span.stop > span.start)


def all_drawn(timeline: Timeline) -> Iterator[Span]:
    """`drawn` of all ranks, rank by rank."""
    return (span for spans in timeline.spans for span in drawn(spans))


def in_flight(timeline: Timeline) -> list[float]:
    """By rank the most that waits for its backward at a time, in micro-batches on all layers of the rank.

    A pass of one of v stages of a rank is 1/v of that, one of a slice of n another 1/n: in these units schedules with
    and without chunks and slices can be compared.  `Timeline.peak_micros` counts passes.
    """
    slices: dict[int | None, set[int | None]] = {}
    for row in timeline.rows:
        for action in row:
            if action.kind == "F":
                slices.setdefault(action.micro, set()).add(action.part)
    peaks = []
    for row in timeline.rows:
        stages = len({action.stage for action in row if action.kind == "F"})
        flying = peak = 0.0
        for action in row:
            if action.kind in ("F", "B"):
                share = 1 / (stages * len(slices[action.micro]))
                flying += share if action.kind == "F" else -share
                peak = max(peak, flying)
        peaks.append(round(peak, 9))
    return peaks


def describe(timeline: Timeline) -> str:
    """The figures of a timeline in one line."""
    micros = len({span.action.micro for span in all_drawn(timeline)})
    ranks, peak, passes = len(timeline.spans), max(in_flight(timeline)), max(timeline.peak_micros)
    many = "" if peak == passes else f" ({passes} passes)"
    return (
        f"{_counted(ranks, 'rank')}, {_counted(micros, 'micro-batch')}; makespan {timeline.makespan:.4g}; "
        f"bubble {100 * timeline.bubble:.1f} % of the time; at most {_counted(peak, 'micro-batch')}{many} in flight"
    )


def _counted(number: float, thing: str) -> str:
    plural = thing + ("es" if thing.endswith("h") else "s")
    return f"{number:.4g} {thing if number == 1 else plural}"

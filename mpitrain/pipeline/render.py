"""What a schedule looks like: a simulated step as a table of text, and as a picture.

    time    0              5             10             15
    rank 0| F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2 F6 B3 F7 B4
    rank 1|  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3 F6 B4 F7

Both draw the same thing, what `mpitrain.pipeline.simulate` found: one lane a rank, time to the right, and a box for each
F, B and W that takes as much room as it takes time.  What takes no time has no box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from mpitrain.pipeline.action import Action
from mpitrain.pipeline.simulate import Span, Timeline

WORK = ("F", "B", "W")


def _drawn(spans: Iterable[Span]) -> Iterator[Span]:
    return (span for span in spans if span.action.kind in WORK and span.stop > span.start)


def _all_drawn(timeline: Timeline) -> Iterator[Span]:
    return (span for spans in timeline.spans for span in _drawn(spans))


def _updates(timeline: Timeline) -> list[list[float]]:
    """When each rank's weights change."""
    return [[span.stop for span in spans if span.action.kind == "STEP"] for spans in timeline.spans]


# ---------------------------------------------------------------------------------------------------------------- text

IDLE, GOES_ON, LEFT_OUT = ".", "-", "~"
_MOST_COLUMNS = 100_000


def text(timeline: Timeline, width: int | None = None, blocks: int = 4) -> str:
    """A table of a simulated schedule: a line for each rank, a column for each unit of time.

    A cell reads `F3` (`F3.1` for a slice of a sequence, `F3@4` where a rank has several stages), dashes behind it say
    that it goes on, a dot is idle time.  A column is the shortest action, or the half, third or quarter of it that all
    times are multiples of; where there is none, times are rounded to columns, and a last line says so.

    Args:
        timeline: what to draw.
        width: characters of a line; None for lines as long as it takes.
        blocks: into how many tables, one below the other, what is wider is folded; of what is wider still the middle is
            left out, since a pipeline fills and drains at its ends.
    """
    column, exact = _column(timeline)
    count = max(1, _place(timeline.makespan, column))
    name_of = _names(timeline)
    cell = max((len(name_of(span.action)) for span in _all_drawn(timeline)), default=1)
    lanes = [_lane(_drawn(spans), name_of, column, count, cell) for spans in timeline.spans]
    heads = [f"rank {rank}" for rank in range(len(lanes))]
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
    spans = list(_all_drawn(timeline))
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
    if any(len({span.action.stage for span in _drawn(spans)}) > 1 for spans in timeline.spans):
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
    """The line of times above a block of columns: of its first, and of round ones behind it."""
    digits = max(len(f"{c * column:.4g}") for c in block if c is not None)
    step = _round_up(max(5, (digits + 1) / (cell + 1)))
    line = ""
    for place, c in enumerate(block):
        mark = "" if c is None or (c % step and place) else f"{c * column:.4g}"
        at = place * (cell + 1) + 1
        if mark and len(line) < at and (not line or at + len(mark) <= len(block) * (cell + 1)):
            line = line.ljust(at) + mark
    return line


def _round_up(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (or 0.5, 0.2, ...) that is at least so much."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))


# ------------------------------------------------------------------------------------------------------------- picture

_FONT = "ui-monospace, Menlo, DejaVu Sans Mono, monospace"
_TEXT, _QUIET, _LINE = "#1f2933", "#52606d", "#cbd2d9"

# From light to dark: forward, backward, backward of the weights alone.  Blue, orange and purple stay apart for every
# kind of colour vision, and since no shade of one is as light as any of another, also in grey print.
_SHADES = {"F": ("#d3e8fa", "#8bbdea"), "B": ("#f7ab5e", "#d97a1e"), "W": ("#7b56ad", "#452a70")}
_ON = {"F": _TEXT, "B": _TEXT, "W": "#ffffff"}

_SHORTEST, _WIDEST, _NARROWEST = 26.0, 940.0, 5.0  # pixels: of the shortest action, of all time, of a box that is seen
_HIGH, _GAP, _TOP = 30, 8, 76


def svg(timeline: Timeline, title: str = "A pipeline schedule", messages: bool = False) -> str:
    """A picture of a simulated schedule: complete in itself, without scripts, readable on light and dark pages.

    A lane for each rank with a box for each F, B and W, the micro-batch in it; later stages of a rank are darker; idle
    time is hatched; a thick line is an update.  At the right each rank's idle time and peak of micro-batches in flight.

    Args:
        timeline: what to draw.
        title: the heading, also read by screen readers.
        messages: draw an arrow for each message between neighbours in the picture.
    """
    return _Picture(timeline, title, messages).draw()


class _Picture:
    """The measures of one picture, and its parts."""

    def __init__(self, timeline: Timeline, title: str, messages: bool) -> None:
        self.timeline = timeline
        self.title = title
        self.messages = messages
        self.ranks = len(timeline.spans)
        self.stages = [sorted({span.action.stage for span in _drawn(spans)}) for spans in timeline.spans]
        self.kinds = [kind for kind in "FBW" if any(span.action.kind == kind for span in _all_drawn(timeline))]
        shortest = min((span.stop - span.start for span in _all_drawn(timeline)), default=1.0)
        total = timeline.makespan or 1.0
        self.scale = max(min(_SHORTEST / shortest, _WIDEST / total), min(_NARROWEST / shortest, 20 * _WIDEST / total))
        self.sizes = {kind: self._letters(kind) for kind in self.kinds}
        self.pitch = _HIGH + (18 if messages else _GAP)
        self.left = 78 if max(map(len, self.stages)) < 2 else 110
        self.right = self.left + total * self.scale
        self.bottom = _TOP + self.pitch * self.ranks - (self.pitch - _HIGH)
        self.width = math.ceil(max(self.right + 132, 560))
        self.height = math.ceil(self.bottom + 74)

    def _letters(self, kind: str) -> float:
        """The size of the numbers in the boxes of a kind, the same for all of them."""
        fits = [
            (self.scale * (span.stop - span.start) - 5) / (0.61 * len(_number(span.action)))
            for span in _all_drawn(self.timeline)
            if span.action.kind == kind
        ]
        return math.floor(2 * min(12, *fits)) / 2

    def x(self, time: float) -> float:
        return self.left + time * self.scale

    def y(self, rank: int) -> float:
        return _TOP + self.pitch * rank

    def draw(self) -> str:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
            f' height="{self.height}" font-family="{_FONT}" font-size="12" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<desc>{escape(describe(self.timeline))}</desc>",
            '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<rect width="6" height="6" fill="#f5f7fa"/><rect width="1.2" height="6" fill="#d5dbe1"/></pattern></defs>',
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8" fill="#ffffff"'
            f' stroke="{_LINE}"/>',
            _write(16, 28, self.title, size=15, weight="bold"),
            *self._legend(),
            *self._axis(),
        ]
        for rank, spans in enumerate(self.timeline.spans):
            parts += self._lane(rank, spans)
        if self.messages:
            parts += self._arrows()
        parts.append(_write(16, self.height - 16, describe(self.timeline), _QUIET))
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _legend(self) -> list[str]:
        split = "W" in self.kinds
        names = {
            "F": "forward",
            "B": "backward of inputs" if split else "backward",
            "W": "backward of weights",
        }
        x, y, parts = 16.0, 42, []
        for kind in self.kinds:
            shades = max(map(len, self.stages))
            for chunk in range(min(shades, 4)):
                fill = self._fill(kind, chunk if shades <= 4 else chunk * (shades - 1) // 3)
                parts.append(f'<rect x="{x:g}" y="{y}" width="14" height="14" rx="2" fill="{fill}"/>')
                x += 15
            parts.append(_write(x + 4, y + 11.5, names[kind], _QUIET))
            x += 24 + 7.25 * len(names[kind])
        parts.append(f'<rect x="{x:g}" y="{y}" width="14" height="14" fill="url(#idle)"/>')
        parts.append(_write(x + 19, y + 11.5, "idle", _QUIET))
        x += 68
        if any(_updates(self.timeline)):
            parts.append(f'<path d="M{x + 7:g} {y - 1} v16" stroke="{_TEXT}" stroke-width="2.5"/>')
            parts.append(_write(x + 15, y + 11.5, "update", _QUIET))
        return parts

    def _fill(self, kind: str, chunk: int) -> str:
        """The shade of a rank's chunk-th stage."""
        low, high = _SHADES[kind]
        most = max(map(len, self.stages)) - 1
        return _mix(low, high, chunk / most if most else 0.35)

    def _axis(self) -> list[str]:
        """Lines and numbers of time, and the heads of the columns at the right."""
        step = _round_up(46 / self.scale)
        end = self.timeline.makespan
        parts = []
        for tick in range(math.floor(end / step) + 1):
            time = tick * step
            if time and (end - time) * self.scale < 34 and time < end:
                continue  # the number at the end stands there
            parts.append(self._tick(time))
        if end % step > 1e-9 * end:
            parts.append(self._tick(end))
        parts.append(_write(16, self.bottom + 24, "time", _QUIET))
        parts.append(_write(self.right + 44, _TOP - 8, "idle", _QUIET, "end", 11))
        parts.append(_write(self.right + 120, _TOP - 8, "in flight", _QUIET, "end", 11))
        return parts

    def _tick(self, time: float) -> str:
        x = self.x(time)
        line = f'<path d="M{x:.4g} {_TOP - 4} V{self.bottom + 8}" stroke="{_LINE}" stroke-width="0.8"/>'
        return line + _write(x, self.bottom + 24, f"{time:.4g}", _QUIET, "middle", 11)

    def _lane(self, rank: int, spans: Sequence[Span]) -> list[str]:
        y, total = self.y(rank), self.timeline.makespan * self.scale
        parts = [_write(16, y + 20, f"rank {rank}", _QUIET)]
        if len(self.stages[rank]) > 1:
            parts[0] = _write(16, y + 13, f"rank {rank}", _QUIET)
            parts.append(_write(16, y + 26, f"stages {_listed(self.stages[rank])}", _QUIET, size=10))
        parts.append(f'<rect x="{self.left}" y="{y}" width="{total:.6g}" height="{_HIGH}" fill="url(#idle)"/>')
        parts += [self._box(rank, span) for span in _drawn(spans)]
        for time in _updates(self.timeline)[rank]:
            parts.append(f'<path d="M{self.x(time):.6g} {y - 3} v{_HIGH + 6}" stroke="{_TEXT}" stroke-width="2.5"/>')
        parts.append(_write(self.right + 44, y + 20, f"{self.timeline.idle[rank]:.4g}", _TEXT, "end"))
        parts.append(_write(self.right + 120, y + 20, f"{self.timeline.peak_micros[rank]}", _TEXT, "end"))
        return parts

    def _box(self, rank: int, span: Span) -> str:
        action, x, y = span.action, self.x(span.start), self.y(rank)
        wide = (span.stop - span.start) * self.scale
        size = self.sizes[action.kind]
        fill = self._fill(action.kind, self.stages[rank].index(action.stage))
        box = f'<rect x="{x + 0.5:.6g}" y="{y}" width="{wide - 1:.6g}" height="{_HIGH}" rx="2.5" fill="{fill}"/>'
        if size >= 6:
            box += _write(x + wide / 2, y + 19.5, _number(action), _ON[action.kind], "middle", size)
        return f"<g><title>{action}: {span.start:.6g} to {span.stop:.6g}</title>{box}</g>"

    def _arrows(self) -> list[str]:
        """An arrow for each message between ranks whose lanes are neighbours; longer ones would cross the boxes."""
        places = {span.action: (rank, span) for rank, spans in enumerate(self.timeline.spans) for span in _drawn(spans)}
        parts = []
        for action, (rank, span) in places.items():
            there = places.get(action._replace(stage=action.stage + (1 if action.kind == "F" else -1)))
            if action.kind == "W" or there is None or abs(there[0] - rank) != 1:
                continue
            down = there[0] > rank
            y = self.y(rank) + (_HIGH + 1 if down else -1)
            end = self.y(there[0]) + (-1 if down else _HIGH + 1)
            # Away from the corners of both boxes, so that a message that takes no time is still seen to lean forward.
            x, to, tip = self.x(span.stop) - 4, self.x(there[1].start) + 4, -4 if down else 4
            parts.append(f"M{x:.6g} {y:g} L{to:.6g} {end:g} m-3.4 {tip} l3.4 {-tip} l1.6 {tip * 1.2:g}")
        return [f'<path d="{" ".join(parts)}" fill="none" stroke="{_QUIET}" stroke-width="1"/>']


def _number(action: Action) -> str:
    return f"{action.micro}" if action.part is None else f"{action.micro}.{action.part}"


def describe(timeline: Timeline) -> str:
    """The figures of a timeline in one line."""
    micros = len({span.action.micro for span in _all_drawn(timeline)})
    ranks = len(timeline.spans)
    return (
        f"{_counted(ranks, 'rank')}, {_counted(micros, 'micro-batch')}; makespan {timeline.makespan:.4g}; "
        f"bubble {100 * timeline.bubble:.1f} % of the time; at most {max(timeline.peak_micros)} in flight"
    )


def _counted(number: int, thing: str) -> str:
    plural = thing + ("es" if thing.endswith("h") else "s")
    return f"{number} {thing if number == 1 else plural}"


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers)) if len(numbers) <= 3 else f"{numbers[0]},{numbers[1]}..{numbers[-1]}"


def _mix(low: str, high: str, share: float) -> str:
    """The colour at a share of the way between two."""
    pairs = ((int(low[i : i + 2], 16), int(high[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in pairs)


def _write(
    x: float, y: float, text: str, fill: str = _TEXT, anchor: str = "start", size: float = 12, weight: str = ""
) -> str:
    more = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (f' font-size="{size:g}"' if size != 12 else "")
    more += f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x:.6g}" y="{y:g}" fill="{fill}"{more}>{escape(text, quote=False)}</text>'

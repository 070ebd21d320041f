"""What a schedule looks like: a simulated step as a picture.

A lane a rank, time to the right, and a box for each F, B and W with its micro-batch, as wide as it takes time.  Idle
time is hatched.  Below a lane a thin one shows what moves to and from the rank's store meanwhile.  The picture is an
SVG that needs nothing else.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from html import escape

from mpitrain.pipeline.action import Action
from mpitrain.pipeline.render import all_drawn, describe, drawn, in_flight, round_up
from mpitrain.pipeline.simulate import Span, Timeline

_FONT = "ui-monospace, Menlo, DejaVu Sans Mono, monospace"
_TEXT, _QUIET, _LINE = "#1f2933", "#52606d", "#cbd2d9"

# From light to dark: forward, backward, backward of the weights alone.  Blue, orange and purple stay apart for every
# kind of colour vision, and since no shade of one is as light as any of another, also in grey print.
_SHADES = {"F": ("#d9ebfb", "#a0cbf0"), "B": ("#f0a050", "#d0741e"), "W": ("#7b56ad", "#452a70")}
_ON = {"F": _TEXT, "B": _TEXT, "W": "#ffffff"}
_OUT, _BACK = "#9aa5b1", "#1b998b"  # what leaves for the store, what returns

_SHORTEST, _USUAL, _NARROWEST = 26.0, 940.0, 5.0  # pixels: of the shortest action, of all time, of a box that is seen
_LEAST, _WIDEST = 800, 1600  # pixels of a whole picture: less only if all that is written fits
_HIGH, _GAP, _LINE_HIGH = 30, 8, 20
_COPIES = 7  # of the thin lane
_COLUMNS = 132  # pixels at the right, for the figures of each rank
_LETTER = 0.61  # width of a letter of size 1


def svg(timeline: Timeline, title: str = "A pipeline schedule", messages: bool = False) -> str:
    """A picture of a simulated schedule: complete in itself, without scripts, readable on light and dark pages.

    A lane for each rank with a box for each F, B and W, the micro-batch in it; later stages of a rank are darker; idle
    time is hatched; a thick line is an update.  At the right each rank's idle time and peak of micro-batches in flight.
    At most 1,600 pixels wide: the longer the schedule, the narrower its boxes.

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
        self.updates = [[span.stop for span in spans if span.action.kind == "STEP"] for spans in timeline.spans]
        self.stages = [sorted({span.action.stage for span in drawn(spans)}) for spans in timeline.spans]
        self.flying = in_flight(timeline)
        self.kinds = [kind for kind in "FBW" if any(span.action.kind == kind for span in all_drawn(timeline))]
        self.left = 78 if max(map(len, self.stages)) < 2 else 110
        shortest = min((span.stop - span.start for span in all_drawn(timeline)), default=1.0)
        total = timeline.makespan or 1.0
        wanted = max(min(_SHORTEST / shortest, _USUAL / total), _NARROWEST / shortest)
        self.scale = min(wanted, (_WIDEST - self.left - _COLUMNS) / total)
        self.sizes = {kind: self._letters(kind) for kind in self.kinds}
        self.right = self.left + total * self.scale
        written = max(12 * len(describe(timeline)), 15 * len(title)) * _LETTER + 32
        self.width = math.ceil(max(self.right + _COLUMNS - 1e-6, min(written, _LEAST)))
        # What is written above and below the lanes goes on in the next line where it does not fit.
        self.heading = self._wrapped(self.title, 15)
        self.footer = self._wrapped(describe(timeline), 12)
        self.under = 28 + _LINE_HIGH * (len(self.heading) - 1)
        legend, lines = self._legend()
        self.legend = legend
        self.top = self.under + 38 + _LINE_HIGH * lines
        self.pitch = _HIGH + (18 if messages else _GAP) + (_COPIES + 2 if timeline.copies else 0)
        self.bottom = self.top + self.pitch * self.ranks - (self.pitch - _HIGH)
        self.height = math.ceil(self.bottom + 54 + _LINE_HIGH * len(self.footer))

    def _wrapped(self, text: str, size: float) -> list[str]:
        return textwrap.wrap(text, math.floor((self.width - 32) / (_LETTER * size))) or [""]

    def _letters(self, kind: str) -> float:
        """The size of the numbers in the boxes of a kind, the same for all of them."""
        fits = [
            (self.scale * (span.stop - span.start) - 5) / (_LETTER * len(_number(span.action)))
            for span in all_drawn(self.timeline)
            if span.action.kind == kind
        ]
        return math.floor(2 * min(12, *fits)) / 2

    def x(self, time: float) -> float:
        return self.left + time * self.scale

    def y(self, rank: int) -> float:
        return self.top + self.pitch * rank

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
            *(_write(16, 28 + _LINE_HIGH * n, line, size=15, weight="bold") for n, line in enumerate(self.heading)),
            *self.legend,
            *self._axis(),
        ]
        for rank, spans in enumerate(self.timeline.spans):
            parts += self._lane(rank, spans)
        if self.messages:
            parts += self._arrows()
        for n, line in enumerate(self.footer):
            parts.append(_write(16, self.bottom + 58 + _LINE_HIGH * n, line, _QUIET))
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _legend(self) -> tuple[list[str], int]:
        """What the colours are, and how many lines that takes."""
        split, shades = "W" in self.kinds, max(map(len, self.stages))
        names = {
            "F": "forward",
            "B": "backward of inputs" if split else "backward",
            "W": "backward of weights",
        }
        entries: list[tuple[list[str], str]] = []
        for kind in self.kinds:
            chunks = [chunk if shades <= 4 else chunk * (shades - 1) // 3 for chunk in range(min(shades, 4))]
            entries.append(([self._fill(kind, chunk) for chunk in chunks], names[kind]))
        entries.append((["url(#idle)"], "idle"))
        if self.timeline.copies:
            entries += [([_OUT], "leaves for the store"), ([_BACK], "returns")]
        if any(self.updates):
            entries.append(([], "update"))
        x, y, lines, parts = 16.0, self.under + 14, 1, []
        for fills, name in entries:
            room = 15 * max(1, len(fills)) + 4 + 12 * _LETTER * len(name)
            if x + room > self.width - 16 and x > 16:
                x, y, lines = 16.0, y + _LINE_HIGH, lines + 1
            for n, fill in enumerate(fills):
                parts.append(f'<rect x="{x + 15 * n:g}" y="{y}" width="14" height="14" rx="2" fill="{fill}"/>')
            if not fills:
                parts.append(f'<path d="M{x + 7:g} {y - 1} v16" stroke="{_TEXT}" stroke-width="2.5"/>')
            parts.append(_write(x + 15 * max(1, len(fills)) + 4, y + 11.5, name, _QUIET))
            x += room + 20
        return parts, lines

    def _fill(self, kind: str, chunk: int) -> str:
        """The shade of a rank's chunk-th stage."""
        low, high = _SHADES[kind]
        most = max(map(len, self.stages)) - 1
        return _mix(low, high, chunk / most if most else 0.35)

    def _axis(self) -> list[str]:
        """Lines and numbers of time, and the heads of the columns at the right."""
        step = round_up(46 / self.scale)
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
        parts.append(_write(self.right + 44, self.top - 8, "idle", _QUIET, "end", 11))
        parts.append(_write(self.right + 120, self.top - 8, "in flight", _QUIET, "end", 11))
        return parts

    def _tick(self, time: float) -> str:
        x = self.x(time)
        line = f'<path d="M{x:.4g} {self.top - 4} V{self.bottom + 8}" stroke="{_LINE}" stroke-width="0.8"/>'
        return line + _write(x, self.bottom + 24, f"{time:.4g}", _QUIET, "middle", 11)

    def _lane(self, rank: int, spans: Sequence[Span]) -> list[str]:
        y, total = self.y(rank), self.timeline.makespan * self.scale
        parts = [_write(16, y + 20, f"rank {rank}", _QUIET)]
        if len(self.stages[rank]) > 1:
            parts[0] = _write(16, y + 13, f"rank {rank}", _QUIET)
            parts.append(_write(16, y + 26, f"stages {_listed(self.stages[rank])}", _QUIET, size=10))
        parts.append(f'<rect x="{self.left}" y="{y}" width="{total:.6g}" height="{_HIGH}" fill="url(#idle)"/>')
        parts += [self._box(rank, span) for span in drawn(spans)]
        parts += [self._copy(rank, span) for span in (self.timeline.copies or [()] * self.ranks)[rank]]
        for time in self.updates[rank]:
            parts.append(f'<path d="M{self.x(time):.6g} {y - 3} v{_HIGH + 6}" stroke="{_TEXT}" stroke-width="2.5"/>')
        parts.append(_write(self.right + 44, y + 20, f"{self.timeline.idle[rank]:.4g}", _TEXT, "end"))
        parts.append(_write(self.right + 120, y + 20, f"{self.flying[rank]:.4g}", _TEXT, "end"))
        return parts

    def _box(self, rank: int, span: Span) -> str:
        action, x, y = span.action, self.x(span.start), self.y(rank)
        wide = (span.stop - span.start) * self.scale
        size = self.sizes[action.kind]
        fill = self._fill(action.kind, self.stages[rank].index(action.stage))
        white = min(1.0, wide / 4)  # between boxes
        box = f'<rect x="{x + white / 2:.6g}" y="{y}" width="{wide - white:.6g}" height="{_HIGH}"'
        box += f' rx="{min(2.5, wide / 4):.3g}" fill="{fill}"/>'
        if size >= 6:
            box += _write(x + wide / 2, y + 19.5, _number(action), _ON[action.kind], "middle", size)
        return f"<g><title>{action}: {span.start:.6g} to {span.stop:.6g}</title>{box}</g>"

    def _copy(self, rank: int, span: Span) -> str:
        x, wide = self.x(span.start), (span.stop - span.start) * self.scale
        fill = _OUT if span.action.kind == "EVICT" else _BACK
        box = f'<rect x="{x:.6g}" y="{self.y(rank) + _HIGH + 2}" width="{wide:.6g}" height="{_COPIES}" fill="{fill}"/>'
        return f"<g><title>{span.action}: {span.start:.6g} to {span.stop:.6g}</title>{box}</g>" if wide else ""

    def _arrows(self) -> list[str]:
        """An arrow for each message between ranks whose lanes are neighbours; longer ones would cross the boxes."""
        places = {span.action: (rank, span) for rank, spans in enumerate(self.timeline.spans) for span in drawn(spans)}
        parts = []
        for action, (rank, span) in places.items():
            there = places.get(action._replace(stage=action.stage + (1 if action.kind == "F" else -1)))
            if action.kind == "W" or there is None or abs(there[0] - rank) != 1:
                continue
            down = 1 if there[0] > rank else -1
            # Away from the corners of both boxes, so that a message that takes no time is still seen to lean forward.
            x, y = self.x(span.stop) - 4, self.y(rank) + (_HIGH + 1 if down > 0 else -1)
            to, end = self.x(there[1].start) + 4, self.y(there[0]) + (-1 if down > 0 else _HIGH + 1)
            along = 5 / math.hypot(to - x, end - y)  # the head is 5 pixels long and as wide
            u, v = (to - x) * along, (end - y) * along
            left, right = (to - u - v / 2, end - v + u / 2), (to - u + v / 2, end - v - u / 2)
            head = f"M{left[0]:.5g} {left[1]:.5g}L{to:.5g} {end:g}L{right[0]:.5g} {right[1]:.5g}"
            parts.append(f"M{x:.5g} {y:g}L{to:.5g} {end:g}{head}")
        return [f'<path d="{" ".join(parts)}" fill="none" stroke="{_QUIET}" stroke-width="1"/>']


def _number(action: Action) -> str:
    return f"{action.micro}" if action.part is None else f"{action.micro}.{action.part}"


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

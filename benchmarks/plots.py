"""Plots as SVG text, without a plotting library: lines on linear or logarithmic axes, and bars.

They are plain XML that turns dark where the reader's system is dark, like the loss curve of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from mpitrain.curve import linear_ticks, log_ticks

_LIGHT = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#7d6608")
_DARK = ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#f778ba", "#d4b106")


def _colours(colours: Sequence[str]) -> str:
    return "\n".join(
        f".line.c{i} {{ stroke: {c} }} .dot.c{i}, .bar.c{i}, text.c{i} {{ fill: {c} }}" for i, c in enumerate(colours)
    )


_STYLE = f"""
text {{ font: 12.5px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #57606a }}
.back {{ fill: #ffffff }} .title {{ font-size: 15px; font-weight: 600; fill: #1f2328 }} .end {{ text-anchor: end }}
.middle {{ text-anchor: middle }} .grid {{ stroke: #d8dee4 }} .axis {{ stroke: #8c959f }}
.band {{ fill: #cf222e; fill-opacity: .13 }} .light {{ fill-opacity: .05 }} .small {{ font-size: 11px }}
.line {{ fill: none; stroke-width: 2; stroke-linejoin: round }} .thin {{ stroke-dasharray: 4 4; stroke-width: 1.5 }}
{_colours(_LIGHT)}
@media (prefers-color-scheme: dark) {{
text {{ fill: #9198a1 }} .back {{ fill: #0d1117 }} .title {{ fill: #f0f6fc }}
.grid {{ stroke: #262c36 }} .axis {{ stroke: #656c76 }}
{_colours(_DARK)}
}}"""


class Line(NamedTuple):
    """A series.

    dashed: for what stands beside the main ones; dots: True for dots alone, without a line through them, False for a
    line alone, None for what the panel's x axis asks for.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False
    dots: bool | None = None


class Band(NamedTuple):
    """A stretch of the x axis that stands out, with a few words in it."""

    left: float
    right: float
    text: str
    light: bool = False


class Panel(NamedTuple):
    """Axes with lines; the legend stands below the title, in rows of two.

    linear: whether a thin line shows what grows as x does, through the last point of the first series; log_x: or plain
    numbers, then points have no dots; bands: behind the lines; between: least and greatest y of plain numbers, None:
    from 0 to what there is.
    """

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    log_y: bool = True
    linear: bool = False
    log_x: bool = True
    bands: Sequence[Band] = ()
    between: tuple[float, float] | None = None


class Bar(NamedTuple):
    """A horizontal bar with its value as text."""

    name: str
    value: float
    text: str
    colour: int


PANEL_WIDTH, PANEL_HEIGHT = 450, 340


def panels(title: str, drawn: Sequence[Panel], columns: int = 2) -> str:
    """Panels in a grid, as one SVG file."""
    rows = math.ceil(len(drawn) / columns)
    parts = []
    for place, panel in enumerate(drawn):
        row, column = divmod(place, columns)
        parts.append(f'<g transform="translate({column * PANEL_WIDTH} {row * PANEL_HEIGHT})">')
        parts += [*_panel(panel), "</g>"]
    return svg(title, min(columns, len(drawn)) * PANEL_WIDTH, rows * PANEL_HEIGHT, parts)


def _panel(panel: Panel) -> list[str]:
    legend_rows = math.ceil(len(panel.lines) / 2)
    left, right, top, bottom = 62, PANEL_WIDTH - 22, 64 + 18 * legend_rows, PANEL_HEIGHT - 52
    xs = [x for line in panel.lines for x, _ in line.points]
    ys = [y for line in panel.lines for _, y in line.points]
    low_x, high_x = (min(xs) / 1.15, max(xs) * 1.15) if panel.log_x else (min(xs), max(xs))
    low_y, high_y = (min(ys) / 1.3, max(ys) * 1.3) if panel.log_y else panel.between or (0.0, max(ys) * 1.08 or 1.0)

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / low_x) / math.log(high_x / low_x) if panel.log_x else (x - low_x) / (high_x - low_x)
        up = math.log(y / low_y) / math.log(high_y / low_y) if panel.log_y else (y - low_y) / (high_y - low_y)
        return left + across * (right - left), bottom - up * (bottom - top)

    parts = [f'<text class="title" x="{left - 46}" y="26">{escape(panel.title)}</text>']
    for place, line in enumerate(panel.lines):
        x, y = left - 46 + place % 2 * (PANEL_WIDTH - 40) / 2, 46 + place // 2 * 18
        parts.append(_dot(line, x + 9, y - 4) if line.dots else _stroke(line, f"M{x:.0f},{y - 4}h18"))
        parts.append(f'<text class="c{line.colour}" x="{x + 24:.0f}" y="{y}">{escape(line.name)}</text>')
    for band in panel.bands:
        (x, _), (end, _) = at(max(band.left, low_x), high_y), at(min(band.right, high_x), high_y)
        light = " light" if band.light else ""
        parts.append(f'<path class="band{light}" d="M{x:.1f},{top}H{end:.1f}V{bottom}H{x:.1f}z"/>')
        parts.append(f'<text class="small middle" x="{(x + end) / 2:.1f}" y="{top + 14}">{escape(band.text)}</text>')
    for tick in log_ticks(low_y, high_y) if panel.log_y else linear_ticks(low_y, high_y):
        y = at(low_x, tick)[1]
        parts.append(f'<path class="grid" d="M{left},{y:.1f}H{right}"/>')
        parts.append(f'<text class="end" x="{left - 8}" y="{y + 4:.1f}">{_number(tick)}</text>')
    # Sizes may lie as 1, 3, 6, 12: a label where there is room, of the points themselves.
    last = -math.inf
    for tick in sorted(set(xs)) if panel.log_x else linear_ticks(low_x, high_x):
        x = at(tick, high_y)[0]
        parts.append(f'<path class="axis" d="M{x:.1f},{bottom}v5"/>')
        if x - last > 34:
            parts.append(f'<text class="middle" x="{x:.1f}" y="{bottom + 19}">{_number(tick)}</text>')
            last = x
    parts.append(f'<path class="axis" d="M{left},{bottom}H{right}"/>')
    if panel.linear:
        x, y = panel.lines[0].points[-1]
        start = max(min(xs), x * low_y / y)
        (x1, y1), (x2, y2) = at(start, y * start / x), at(x, y)
        parts.append(f'<path class="axis thin" d="M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}"/>')
    for line in panel.lines:
        places = [at(x, y) for x, y in line.points]
        if not line.dots:
            parts.append(_stroke(line, "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places)))
        if panel.log_x if line.dots is None else line.dots:
            parts += [_dot(line, x, y) for x, y in places]
    parts.append(f'<text class="middle" x="{(left + right) / 2:.0f}" y="{bottom + 38}">{escape(panel.x_label)}</text>')
    parts.append(f'<text x="{left - 46}" y="{top - 8}">{escape(panel.y_label)}</text>')
    return parts


def _stroke(line: Line, path: str) -> str:
    return f'<path class="line c{line.colour}{" thin" if line.dashed else ""}" d="{path}"/>'


def _dot(line: Line, x: float, y: float) -> str:
    return f'<circle class="dot c{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def bars(title: str, caption: str, drawn: Sequence[Bar]) -> str:
    """Horizontal bars from the greatest to the least, as one SVG file."""
    width, left, right, height = 820, 190, 680, 24
    most = max(bar.value for bar in drawn)
    parts = [
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        f'<text x="16" y="46">{escape(caption)}</text>',
    ]
    for place, bar in enumerate(sorted(drawn, key=lambda bar: -bar.value)):
        y, length = 62 + place * height, max(1.0, bar.value / most * (right - left))
        parts.append(f'<text class="end" x="{left - 10}" y="{y + 14}">{escape(bar.name)}</text>')
        parts.append(
            f'<rect class="bar c{bar.colour}" x="{left}" y="{y}" width="{length:.1f}" height="{height - 6}" rx="2"/>'
        )
        parts.append(f'<text x="{left + length + 8:.1f}" y="{y + 14}">{escape(bar.text)}</text>')
    return svg(title, width, 76 + len(drawn) * height, parts)


def svg(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """Parts on a background, as one SVG file."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}\n</style>",
        f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.6g}"

"""The loss curve of a run as one SVG file that stands alone.

    loss |:.
         | ::.                thin: the loss of every step        thick: its moving mean
         |   '::...           dots: the loss on the validation text
         |        ''':::.....
         +-------------------- step

No plotting library: a curve is a path, an axis a few lines.  The text is valid XML, needs no font, no script and no
net, and turns dark where the reader's system is dark.  A run of a million steps makes a file as small as one of a
thousand: each column of the picture shows the lowest and highest loss of its steps.  A step whose loss was not finite
is a red tick on the axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Points = list[tuple[float, float]]

_WIDTH, _HEIGHT = 840, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 708, 62, 408  # of the plot; the labels of the curves stand to its right
_COLUMNS = _RIGHT - _LEFT
_STEEP = 1.75  # a loss that falls by more than this factor is drawn on a logarithmic scale

# Plain colours, and a media query that replaces them: readers without CSS variables exist (librsvg, cairosvg).
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #57606a }
.back { fill: #ffffff } .title { font-size: 17px; font-weight: 600; fill: #1f2328 }
.grid { stroke: #d8dee4; stroke-width: 1 } .axis { stroke: #8c959f; stroke-width: 1 }
.raw { fill: none; stroke: #54aeff; stroke-width: 1; stroke-opacity: .45 }
.mean { fill: none; stroke: #0969da; stroke-width: 2.25; stroke-linejoin: round }
.val { fill: none; stroke: #bc4c00; stroke-width: 1.5; stroke-opacity: .55 } .dot { fill: #bc4c00 }
.bad { stroke: #cf222e; stroke-width: 1.5 } .train-text { fill: #0969da } .val-text { fill: #bc4c00 }
.number { font-weight: 600; font-variant-numeric: tabular-nums }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1 } .back { fill: #0d1117 } .title { fill: #f0f6fc }
.grid { stroke: #262c36 } .axis { stroke: #656c76 }
.raw { stroke: #388bfd; stroke-opacity: .4 } .mean { stroke: #58a6ff } .train-text { fill: #58a6ff }
.val { stroke: #f0883e } .dot { fill: #f0883e } .val-text { fill: #f0883e } .bad { stroke: #ff7b72 }
}"""


def loss_curve(
    records: Iterable[Mapping[str, Any]], title: str, caption: str = "", *, log: bool | None = None, unit: str = ""
) -> str:
    """The curve of a run.

    Args:
        records: of the run's metrics, steps ascending: `step`, `loss` (None where it was not finite), `val_loss` where
            it was measured.
        title: a line at the top.
        caption: a smaller line below it.
        log: whether the loss has a logarithmic axis; None: where it falls by more than a factor of 1.75.
        unit: of the loss, e.g. "nats/byte".

    Returns:
        The text of an SVG file.
    """
    train: Points = []
    valid: Points = []
    bad: list[int] = []
    last_step = 1
    for record in records:
        last_step = record["step"]
        if _finite(record.get("loss")):
            train.append((last_step, float(record["loss"])))
        elif "loss" in record:
            bad.append(last_step)
        if _finite(record.get("val_loss")):
            valid.append((last_step, float(record["val_loss"])))
    mean = moving_mean(train)
    losses = [loss for _, loss in train + valid] or [1.0]
    # The first losses and rare spikes may leave the picture, the curve that is read may not.
    low, high = min(losses), max(max((loss for _, loss in mean + valid), default=1.0), _quantile(losses, 0.999))
    log = 0 < low < high < 1e250 * low and (high / low > _STEEP if log is None else log)  # else a quotient overflows
    low, high = _margin(low, high, log)
    left_step = min([step for step, _ in train + valid[:1]] + bad + [1])
    right_step = max(last_step, left_step + 1)

    def x(step: float) -> float:
        return _LEFT + (step - left_step) / (right_step - left_step) * _COLUMNS

    def y(loss: float) -> float:
        share = math.log(loss / low) / math.log(high / low) if log else (loss - low) / (high - low)
        return min(max(_BOTTOM - share * (_BOTTOM - _TOP), _TOP), _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img">',
        f"<title>{_clean(title)}</title>",
        f"<style>{_STYLE}\n</style>",
        f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
        f'<text class="title" x="{_LEFT}" y="28">{_clean(title)}</text>',
        f'<text x="{_LEFT}" y="47">{_clean(caption)}</text>',
        *_axes(x, y, (left_step, right_step), (low, high), log),
        *(
            f'<path class="bad" d="M{x(step):.1f},{_BOTTOM}v-8"><title>step {step}: not finite</title></path>'
            for step in _thin(bad)
        ),
        _path("raw", _columns(train, x), x, y),
        _path("mean", mean, x, y),
        _path("val", valid, x, y),
        *(
            f'<circle class="dot" cx="{x(step):.1f}" cy="{y(loss):.1f}" r="3"/>'
            for step, loss in valid[:: _every(valid)]
        ),
        *_labels(mean, valid, y),
        f'<text x="{(_LEFT + _RIGHT) / 2:.0f}" y="{_BOTTOM + 40}" text-anchor="middle">step</text>',
        f'<text x="{_RIGHT}" y="{_TOP - 2}" text-anchor="end">loss{f" in {_clean(unit)}" if unit else ""}'
        f"{', logarithmic' if log else ''}</text>",
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def moving_mean(points: Points) -> Points:
    """The mean of the neighbours of each point, a sixtieth of all to each side, at about 400 of the points.

    At the beginning, where a curve is steep, the window is short: a quarter of what lies before the point.  At the end,
    where a curve is flat, it is cut on the right.
    """
    count = len(points)
    half = count // 60
    losses = [loss for _, loss in points]
    every = max(1, count // 400)
    chosen = sorted({*range(0, count, every), count - 1} - {-1})
    means: Points = []
    for i in chosen:
        reach = min(half, i // 4)
        start, stop = i - reach, min(i + reach + 1, count)
        # Not as a difference of running sums: after one loss of 1e18 that would be noise, and perhaps below zero.
        means.append((points[i][0], math.fsum(losses[start:stop]) / (stop - start)))
    return means


def _columns(points: Points, x: Callable[[float], float]) -> Points:
    """The points that make the picture: all of them if few, else the first, lowest, highest, last of each column."""
    if len(points) <= 2 * _COLUMNS:
        return points
    kept: Points = []
    column: Points = []
    for point in points:
        if column and int(x(point[0])) != int(x(column[0][0])):
            kept += _outline(column)
            column = []
        column.append(point)
    return kept + _outline(column)


def _outline(column: Points) -> Points:
    extremes = (min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1]))
    return sorted({column[0], *extremes, column[-1]})


def _path(css: str, points: Points, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    if len(points) < 2:
        return ""
    line = "L".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
    return f'<path class="{css}" d="M{line}"/>'


def _axes(
    x: Callable[[float], float],
    y: Callable[[float], float],
    steps: tuple[float, float],
    losses: tuple[float, float],
    log: bool,
) -> list[str]:
    """Grid, ticks and their labels."""
    parts = []
    ticks = log_ticks(*losses) if log else linear_ticks(*losses)
    digits = max((_digits(tick) for tick in ticks), default=0)
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{_LEFT},{y(tick):.1f}H{_RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 9}" y="{y(tick) + 4.5:.1f}" text-anchor="end">{tick:.{digits}f}</text>')
    for tick in linear_ticks(*steps, whole=True):
        parts.append(f'<path class="axis" d="M{x(tick):.1f},{_BOTTOM}v5"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{_BOTTOM + 20}" text-anchor="middle">{tick:,.0f}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT},{_BOTTOM}H{_RIGHT}"/>')
    return parts


def _labels(mean: Points, valid: Points, y: Callable[[float], float]) -> list[str]:
    """The names of the curves and their last values, to the right of the plot, never over one another."""
    named = [
        (y(points[-1][1]), css, name, points[-1][1])
        for css, name, points in (("train-text", "training (mean)", mean), ("val-text", "validation", valid))
        if points
    ]
    named.sort()
    places = [place for place, *_ in named]
    if len(places) == 2 and places[1] - places[0] < 40:
        middle = min(sum(places) / 2, _BOTTOM - 30)
        places = [middle - 20, middle + 20]
    return [
        f'<text class="{css}" x="{_RIGHT + 12}" y="{place:.1f}">{name}'
        f'<tspan class="number" x="{_RIGHT + 12}" dy="17">{loss:.4f}</tspan></text>'
        for place, (_, css, name, loss) in zip(places, named, strict=True)
    ]


def linear_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Four to eight round numbers from low to high, a step of 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / 7
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    gap = max(gap, 1.0) if whole else gap
    # Multiples are rounded, so that 3 * 0.1 is 0.3.
    return [round(i * gap, 12) for i in range(math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Three to eight round numbers from low to high for a logarithmic axis."""
    powers = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    for digits in (
        (1,),
        (1, 3),
        (1, 2, 5),
        (1, 1.5, 2, 3, 4, 6),
        (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8),
    ):
        ticks = [round(digit * power, 12) for power in powers for digit in digits if low <= digit * power <= high]
        if len(ticks) >= 4:
            return ticks[:: 1 + len(ticks) // 9]
    return linear_ticks(low, high)


def _digits(tick: float) -> int:
    """Digits after the point that a tick needs."""
    return len(f"{tick:.10f}".rstrip("0").partition(".")[2])


def _margin(low: float, high: float, log: bool) -> tuple[float, float]:
    """A range a little wider than what is shown, never empty."""
    if log:
        room = (high / low) ** 0.04
        return low / room, high * room
    room = max((high - low) * 0.05, abs(high) * 1e-4) or 1.0
    return low - room, high + room


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def _every(points: Points) -> int:
    return 1 + len(points) // 200


def _thin(steps: Sequence[int]) -> Sequence[int]:
    return steps[:: 1 + len(steps) // 500]


def _finite(value: object) -> bool:
    """Whether it is a number that can be drawn: differences and powers of ten around it are finite, too."""
    return isinstance(value, (int, float)) and -1e300 < value < 1e300


def _clean(text: str) -> str:
    """Text that XML allows: escaped, without control characters and lone surrogates."""
    plain = "".join(sign if sign.isprintable() else " " for sign in text)
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

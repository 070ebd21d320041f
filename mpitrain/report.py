"""What a person sees in the terminal: the start block, a line a logged step, a progress bar.

    model        gpt-mini: 2 layers, width 128, 4 heads, 64 tokens
    parameters   470,528 in float32
    ...
    step  100/3563  loss 2.6211  val 2.6034  grad  0.871  lr 2.34e-03   41,234 tok/s  left 3:28

Formatting is done by pure functions; a `Terminal` is the one thing that prints.  Ranks cannot know whether they print
to a person: under Open MPI every rank's stdout is a terminal of size 0x0, even when mpirun writes to a file, and under
MPICH a pipe.  So the launcher says it, by MPITRAIN_TTY=1 (and COLUMNS); without that lines are plain.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import TextIO

from mpitrain.optim.scaler import power

_BOLD, _DIM, _BLUE, _PLAIN = "\033[1m", "\033[2m", "\033[34m", "\033[0m"
_CLEAR_LINE = "\r\033[K"


def start_block(title: str, facts: Sequence[tuple[str, str]]) -> str:
    """A title and labelled facts in two columns; a fact of several lines stays in its column."""
    column = max((len(label) for label, _ in facts), default=0) + 3
    lines = [title]
    for label, fact in facts:
        first, *rest = fact.splitlines() or [""]
        lines.append(f"  {label:<{column}}{first}".rstrip())
        lines += [" " * (column + 2) + line for line in rest]
    return "\n".join(lines)


def step_line(
    step: int,
    steps: int,
    *,
    loss: float,
    val_loss: float | None = None,
    grad_norm: float,
    lr: float,
    tokens_per_s: float,
    seconds_left: float,
    skipped: bool = False,
    scales: tuple[float, float] | None = None,
) -> str:
    """The line of a logged step; columns stand under one another whatever the values are.

    Args:
        step: counted from 1.
        steps: of the whole run.
        loss: nats a token, mean over the global batch.
        val_loss: the same on the validation text; blank where it was not measured.
        grad_norm: global norm before clipping.
        lr: learning rate of this step.
        tokens_per_s: over all ranks.
        seconds_left: until the last step.
        skipped: whether gradients overflowed, so that the step changed nothing.
        scales: of the loss in this step and in the next, shown behind a skipped step.
    """
    grad = "  skip" if skipped else _fixed(grad_norm, 3, 6)
    val = " " * 10 if val_loss is None else f"val {_fixed(val_loss, 4, 6)}"
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {_fixed(loss, 4, 6)}  {val}  grad {grad}  "
        f"lr {lr:.2e}  {tokens_per_s:>8,.0f} tok/s  left {duration(seconds_left)}"
        + (f"  scale {' -> '.join(dict.fromkeys(map(power, scales)))}" if skipped and scales is not None else "")
    )


def _fixed(value: float, digits: int, width: int) -> str:
    """`digits` after the point while they fit in `width` columns, else fewer, else an exponent."""
    for fewer in range(digits, -1, -1):
        text = f"{value:.{fewer}f}"
        if len(text) <= width:
            return f"{text:>{width}}"
    return f"{value:>{width}.0e}"


def duration(seconds: float) -> str:
    """`0:07`, `3:28`, `1:02:03`, `2d 03:04`; `?` where it is not known."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def bar(step: int, steps: int, text: str, width: int, signs: str = "━─", paint: Sequence[str] = ("", "", "")) -> str:
    """A progress bar with a text behind it, exactly `width` columns.

    Args:
        step: steps that are done.
        steps: of the whole run.
        text: e.g. "loss 1.9321  41,234 tok/s  left 2:10"; cut where it does not fit.
        width: columns, at least 1.
        signs: one column of what is done, one of what is left.
        paint: escape sequences that begin what is done, begin what is left, and end both.
    """
    share = step / steps if steps else 1.0
    head = f"{math.floor(100 * share):>3}% "
    room = width - len(head) - len(text) - 2
    if room < 5:
        return f"{head}{text}"[:width].ljust(width)
    done = math.floor(room * share)
    return f"{head}{paint[0]}{signs[0] * done}{paint[1]}{signs[1] * (room - done)}{paint[2]}  {text}"


class Terminal:
    """Prints lines, and below them, where a person watches, a bar that is redrawn in place.

    Args:
        stream: where to print.
        live: a person watches: draw the bar, use colour.
        width: columns of the terminal.
        colour: allow colour.
    """

    def __init__(self, stream: TextIO | None, *, live: bool = False, width: int = 80, colour: bool = True) -> None:
        self._stream = stream
        self._live = live
        self._width = max(width, 20)
        self._colour = live and colour
        self._bar = ""
        encoding = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "")
        self._signs = "━─" if encoding in ("utf8", "utf8sig") else "#."

    @classmethod
    def of_launcher(cls, stream: TextIO | None, environ: Mapping[str, str] = os.environ) -> Terminal:
        """The terminal that the launcher described: MPITRAIN_TTY, COLUMNS, NO_COLOR (not empty: no colour)."""
        columns = environ.get("COLUMNS", "")
        width = int(columns) if columns.isascii() and columns.isdigit() and 0 < int(columns[:6]) < 1000 else 80
        return cls(stream, live=environ.get("MPITRAIN_TTY") == "1", width=width, colour=not environ.get("NO_COLOR"))

    def line(self, text: str = "") -> None:
        """Print text, one or more lines; a bar stays below it."""
        self._put(f"{_CLEAR_LINE if self._bar else ''}{text}\n{self._bar}")

    def heading(self, text: str) -> None:
        """Print text of which the first line stands out."""
        first, newline, rest = text.partition("\n")
        self.line(f"{_BOLD}{first}{_PLAIN}{newline}{rest}" if self._colour else text)

    def progress(self, step: int, steps: int, text: str) -> None:
        """Redraw the bar; does nothing where nobody watches."""
        if not self._live:
            return
        # One column stays free: a terminal that is filled to its edge wraps, and then \r goes back too little.
        paint = (_BLUE, _PLAIN + _DIM, _PLAIN) if self._colour else ("", "", "")
        drawn = bar(step, steps, text, self._width - 1, self._signs, paint)
        self._bar = drawn
        self._put(f"{_CLEAR_LINE}{drawn}")

    def end(self) -> None:
        """Take the bar away; the next line begins where it was."""
        if self._bar:
            self._bar = ""
            self._put(_CLEAR_LINE)

    def _put(self, text: str) -> None:
        """Write; a reader that has gone (`| head`, a closed terminal) must not end a training that goes well."""
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            stream, self._stream = self._stream, None
            with contextlib.suppress(OSError, ValueError):  # what is left in its buffer must not fail at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

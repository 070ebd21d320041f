"""A picture of the console at work: a session that is played, its lines in the frame of a terminal.

The session is examples/14_console.py on eight ranks; what is drawn is what the console prints, with its colours.
"""

from __future__ import annotations

import io
import re
from html import escape
from pathlib import Path
from typing import NamedTuple

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPT = "14_console.py"
RANKS, COLUMNS = 8, 100
COMMANDS = (
    "to F1@1; pipeline; rank 4; to op gelu_tanh; tape 3:8; break parameter *.mlp.up.weight norm > 0.02; continue;"
    " backward"
)

WIDE, HIGH = 7.8, 17.0  # pixels of a character
SIZE = 13  # of the letters
LEFT, TOP, BELOW = 18.0, 62.0, 16.0
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
GROUND, BAR, PLAIN = "#17202b", "#263241", "#d5dde6"
COLOURS = {"1": "#ffffff", "2": "#8b99a8", "31": "#ff8f8f", "33": "#f0c674"}
DOTS = ("#ff5f57", "#febc2e", "#28c840")
_STYLE = re.compile(r"\033\[([0-9]+)m")


class Run(NamedTuple):
    """Characters of one style, and the column at which they begin."""

    column: int
    text: str
    style: str


def session() -> str:
    """What the console prints, with its codes of colour."""
    from mpitrain.debug.console.console import Console
    from mpitrain.debug.console.terminal import Terminal, commands_of

    out = io.StringIO()
    terminal = Terminal(commands_of(COMMANDS), io.StringIO(), out, colour=True, width=COLUMNS)
    Console(RANKS, str(EXAMPLES / SCRIPT), [], terminal).run()
    greeting, _, rest = out.getvalue().partition("\n")
    assert SCRIPT in greeting
    return rest.rstrip("\n")


def console_picture() -> str:
    """The session as a picture that needs nothing else; letters keep their columns in any fixed-width font."""
    title = f"mpitrain debug -n {RANKS} examples/{SCRIPT}"
    lines = [_runs(line) for line in session().split("\n")]
    width, height = 2 * LEFT + COLUMNS * WIDE, TOP + len(lines) * HIGH + BELOW - SIZE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" font-family="{FONT}" font-size="{SIZE}" role="img" aria-label="{title}">',
        f"<title>{title}: a session in a terminal</title>",
        f'<rect width="{width:g}" height="{height:g}" rx="9" fill="{GROUND}"/>',
        f'<path d="M0 34V9a9 9 0 0 1 9-9H{width - 9:g}a9 9 0 0 1 9 9V34Z" fill="{BAR}"/>',
        *(f'<circle cx="{20 + 20 * n}" cy="17" r="6" fill="{dot}"/>' for n, dot in enumerate(DOTS)),
        f'<text x="{width / 2:g}" y="22" fill="{COLOURS["2"]}" text-anchor="middle">{title}</text>',
    ]
    for number, runs in enumerate(lines):
        y = TOP + number * HIGH
        for column, text, style in runs:
            weight = ' font-weight="bold"' if style == "1" else ""
            parts.append(
                f'<text x="{LEFT + column * WIDE:.1f}" y="{y:g}" textLength="{len(text) * WIDE:.1f}"'
                f' lengthAdjust="spacingAndGlyphs" fill="{COLOURS.get(style, PLAIN)}"{weight}'
                f' xml:space="preserve">{escape(text)}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _runs(line: str) -> list[Run]:
    """A line cut where its style changes, without the blanks around."""
    runs, column, style = [], 0, ""
    for place, part in enumerate(_STYLE.split(line)):
        if place % 2:
            style = "" if part == "0" else part
            continue
        text = part.rstrip(" ")
        head = len(text) - len(text.lstrip(" "))
        if text.strip():
            runs.append(Run(column + head, text[head:], style))
        column += len(part)
    return runs


if __name__ == "__main__":
    print(console_picture(), end="")

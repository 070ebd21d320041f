"""Which expert takes which kind of token: a listener that counts, and what it has counted as a table and as a picture.

    routes = Routes(["letter", "digit", "other"], experts=8)
    with routes.watch(kinds):                       # kinds (b, s): 0, 1 or 2 for each token of the batch
        executor.evaluate([batch])
    print(table(routes, "blocks.1.mlp"))

A router's choices are the second input of the op `gates`, so nothing has to be built into a model to look at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from xml.sax.saxutils import escape

import numpy as np

from mpitrain.backend import Array, to_host
from mpitrain.comm.communicator import Communicator
from mpitrain.events import Event, listen


class Routes:
    """Choices by layer, kind of token and expert.

    Args:
        names: of the kinds.
        experts: E.

    Attributes:
        counts: path of each layer of experts, in the order in which it was first met -> int64 (kinds, E).
    """

    def __init__(self, names: Sequence[str], experts: int) -> None:
        self.names = tuple(names)
        self.experts = experts
        self.counts: dict[str, np.ndarray] = {}

    @contextmanager
    def watch(self, kinds: Array) -> Iterator[None]:
        """Count while the block runs, in which one batch goes through the model.

        Args:
            kinds: int (b, s) of the tokens that this rank routes: those of its part of the stream; -1 does not count.
        """
        counted = kinds >= 0

        def look(event: Event) -> None:
            if event.kind != "op" or event.phase != "end" or event.name not in ("gates", "normalized_gates"):
                return
            chosen = to_host(event.info["inputs"][1])
            found = self.counts.setdefault(event.info["path"], np.zeros((len(self.names), self.experts), np.int64))
            np.add.at(found, (kinds[counted][:, None], chosen[counted]), 1)

        with listen(look):
            yield

    def sum_over(self, ranks: Communicator) -> None:
        """Add up what the ranks have counted, each for its tokens.  All of them have the same layers."""
        for path, count in self.counts.items():
            self.counts[path] = ranks.all_reduce(count)

    def shares(self, path: str) -> np.ndarray:
        """(kinds, E) of the choices of each kind, the share of each expert; 0 where there were none."""
        count = self.counts[path]
        return count / np.maximum(count.sum(1, keepdims=True), 1)


def table(routes: Routes, path: str) -> str:
    """The shares of a layer in percent, a dot for less than half of one, and how many choices each kind had."""
    wide = max(map(len, routes.names)) + 2
    lines = [" " * wide + "".join(f"{f'E{expert}':>5}" for expert in range(routes.experts)) + f"{'choices':>11}"]
    for name, shares, number in zip(routes.names, routes.shares(path), routes.counts[path].sum(1), strict=True):
        cells = (f"{100 * share:5.0f}" if share >= 0.005 else "    ." for share in shares)
        lines.append(f"{name:<{wide}}{''.join(cells)}{number:>11,}")
    return "\n".join(lines)


_STYLE = """
text { font: 12.5px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #57606a }
.back { fill: #ffffff } .title { font-size: 15px; font-weight: 600; fill: #1f2328 }
.cell { fill: #0969da } .share { fill: #1f2328 } .on { fill: #ffffff }
.name { text-anchor: end } .middle { text-anchor: middle }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1 } .back { fill: #0d1117 } .title, .share, .on { fill: #f0f6fc } .cell { fill: #1f6feb }
}"""
_CELL, _ROW = 40, 24
_SHOWN = 0.05  # a share below it has no number in its cell
_DARK = 0.85  # from here on white is easier to read on a cell than black


def heat_map(routes: Routes, title: str) -> str:
    """The shares of all layers side by side, as one SVG file: the darker, the more of a kind's tokens an expert takes.

    Percentages of 5 and more stand in their cells.
    """
    left = 7 * max(map(len, (*routes.names, "expert"))) + 26
    panel = left + _CELL * routes.experts + 14
    bottom = 80 + _ROW * len(routes.names)
    height = bottom + 32
    parts = [f'<text class="title" x="16" y="27">{escape(title)}</text>']
    for place, path in enumerate(routes.counts):
        x0 = place * panel + left
        parts.append(f'<text x="{x0}" y="52">{escape(path)}</text>')
        parts.append(f'<text class="name" x="{x0 - 10}" y="72">expert</text>')
        for expert in range(routes.experts):
            parts.append(f'<text class="middle" x="{x0 + (expert + 0.5) * _CELL:g}" y="72">{expert}</text>')
        for row, (name, shares) in enumerate(zip(routes.names, routes.shares(path), strict=True)):
            y = 80 + row * _ROW
            parts.append(f'<text class="name" x="{x0 - 10}" y="{y + 16}">{escape(name)}</text>')
            for expert, share in enumerate(shares):
                x = x0 + expert * _CELL
                parts.append(
                    f'<rect class="cell" x="{x}" y="{y}" width="{_CELL - 2}" height="{_ROW - 2}" rx="2"'
                    f' fill-opacity="{max(0.04, share):.2f}"/>'
                )
                if share >= _SHOWN:
                    on = "on" if share >= _DARK else "share"
                    middle = x + _CELL / 2 - 1
                    parts.append(f'<text class="middle {on}" x="{middle:g}" y="{y + 16}">{100 * share:.0f}</text>')
    parts.append(f'<text x="16" y="{bottom + 19}">A cell without a number is below {100 * _SHOWN:.0f} %.</text>')
    width = panel * max(1, len(routes.counts))
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}\n</style>",
        f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"

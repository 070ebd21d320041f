"""The page of a trace: one HTML file with everything in it, for any browser, without a network.

    write_page(path, trace, clocks, records, title="runs/a")

The page's program and style are files of this package.  Its data are text in elements that no browser runs.  A content
security policy in the page names the only script and the only style that may work, by their digests, and forbids every
connection; so whatever names a trace holds, and whatever the program made of them, nothing of it could run, load or be
sent away.  The program itself writes text as text, never as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from mpitrain import disk
from mpitrain.debug.trace.clocks import Clocks
from mpitrain.debug.trace.matches import matched
from mpitrain.debug.trace.page.choice import choose
from mpitrain.debug.trace.page.contents import Contents
from mpitrain.debug.trace.page.plain import shown
from mpitrain.debug.trace.records import Trace
from mpitrain.errors import DataError

MOST_SPANS = 400_000
"""In a page: some 2.5 MB of it, and what a browser draws without delay."""

PROGRAM = ("reading", "view", "colours", "lanes", "ties", "strips", "pointer", "telling", "finding", "cards", "start")
"""Parts of the page's program, in order."""

_FACTS = 12  # of a run, that stand in the page


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        nbytes: of the file.
        left_out: which spans are not in it, in words; empty where all are.
    """

    nbytes: int
    left_out: str


def write_page(
    path: Path,
    trace: Trace,
    clocks: Clocks,
    records: Iterable[Mapping[str, Any]] = (),
    title: str = "",
    most: int = MOST_SPANS,
) -> Written:
    """Write the page of a trace.

    Args:
        path: of the file; what has the name is replaced, a link is not followed.
        trace: what the ranks did.
        clocks: that put it on one clock.
        records: of the run's metrics, for the loss curve; where there are none, the losses in the trace serve.
        title: of the page.
        most: spans.  Of a longer trace ops of old steps are left out, then old steps.

    Raises:
        DataError: the file cannot be written.

    Cost: about a second for 100,000 spans; 6 bytes of the page for each.
    """
    choice = choose(trace, most)
    text = page(Contents(trace, clocks, matched(trace), choice, records), title, facts_of(trace))
    data = text.encode("ascii")
    try:
        disk.replace(Path(path), data)
    except OSError as error:
        raise DataError(f"{shown(path)}: the page cannot be written: {error.strerror}.") from None
    return Written(len(data), choice.left_out)


def page(contents: Contents, title: str, facts: Iterable[tuple[str, str]]) -> str:
    """The text of a page; ASCII."""
    style = _source("page.css")
    program = '"use strict";\n' + "".join(_source(f"js/{part}.js") for part in PROGRAM)
    told = {**contents.facts, "title": shown(title), "facts": [[shown(name), shown(fact)] for name, fact in facts]}
    parts = {
        "{{policy}}": "; ".join(
            [
                "default-src 'none'",
                f"script-src '{_digest(program)}'",
                f"style-src '{_digest(style)}'",
                "base-uri 'none'",
                "form-action 'none'",
            ]
        ),
        "{{title}}": html.escape(shown(title) or "trace").encode("ascii", "xmlcharrefreplace").decode(),
        "{{style}}": style,
        "{{program}}": program,
        "{{facts}}": _json(told),
        "{{columns}}": contents.columns.text(),
    }
    # In one pass: what is put in is not looked through for further places.
    return "".join(parts.get(piece, piece) for piece in re.split(r"(\{\{[a-z]+\}\})", _source("page.html")))


def facts_of(trace: Trace) -> list[tuple[str, str]]:
    """What the run is, a few lines."""
    found = {key: value for rank in trace.ranks[:1] for key, value in rank.facts.items()}
    lines: list[tuple[str, str]] = []
    for key, value in found.items():
        if isinstance(value, str | int | float):
            lines.append((str(key), str(value)))
        elif key == "command" and isinstance(value, list):
            lines.append((key, " ".join(map(str, value))))
        elif key == "layout" and isinstance(value, Mapping):
            known = "dp" if value.get("ep", 1) == 1 else "edp"  # without experts the replicas are simply dp
            named = ((known if axis == "edp" else axis, size) for axis, size in value.items())
            lines.append((key, " ".join(f"{axis} {size}" for axis, size in named if size != 1)))
        elif key == "schedule" and isinstance(value, Mapping):
            lines.append((key, f"{value.get('name', '')}, {value.get('microbatches', '?')} micro-batches"))
    return lines[:_FACTS]


def _source(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="ascii")


def _digest(text: str) -> str:
    """As a content security policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: Any) -> str:
    """JSON that ends no element and begins no comment, whatever stands in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

"""Figures and plot of docs/explanation/mixed-precision.md, from a result of `precision.py`.

The page is written by hand but for what stands between two marks in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plots
from plots import Band, Line, Panel

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "explanation/mixed-precision.md"
KEPT = DOCS / "figures/precision.json"
PICTURE = DOCS / "images/underflow.svg"

MARKED = re.compile(r"(<!-- measured: ([a-z]+) -->\n).*?(<!-- end of measured -->)", re.DOTALL)

REFERENCE = "float32"
PROMISED = frozenset({"float16", "float16, scales of branches", "bfloat16"})
"""Runs whose validation loss must be within 1 % of the reference's."""

SMALLEST_NORMAL, SMALLEST = -14, -24
"""Exponents of float16: of the smallest normal number, and of the smallest above 0."""
SCALE = 16
"""Exponent of the scale that float16 has at the start."""
MORE_TARGETS = 11
"""As an exponent: 1024 targets a step are 2^11 times as few as two million."""
LEFT, RIGHT = -48, 0
"""Exponents that the plot shows."""
X_LABEL, Y_LABEL = "exponent: log2 of |gradient|", "% of gradients per power of two"

KINDS = ("activations", "weights")

Result = Mapping[str, Any]


def ratio(result: Result, name: str) -> float:
    """Validation loss of a run over that of float32; not a number where there is none."""
    reference = result["runs"].get(REFERENCE)
    return result["runs"][name]["val_loss"] / reference["val_loss"] if reference else float("nan")


# ----------------------------------------------------------------------------------------- what halves would lose


def nonzero(look: Result, kind: str) -> int:
    """How many gradients of a kind are not 0."""
    return int(look[kind]["elements"] - look[kind]["zeros"])


def share(look: Result, kind: str, lowest: int, highest: int, scale: int = 0) -> float:
    """Of the gradients that are not 0, the share whose exponent, times 2^scale, is within both bounds."""
    found = look["exponents"][kind]
    inside = sum(number for exponent, number in found.items() if lowest <= int(exponent) + scale <= highest)
    return inside / max(1, nonzero(look, kind))


def lost(look: Result, kind: str, scale: int = 0) -> float:
    """The share that float16 would make 0: a number below 2^-25 is nearer to 0 than to 2^-24."""
    return share(look, kind, -10_000, SMALLEST - 2, scale)


def blurred(look: Result, kind: str, scale: int = 0) -> float:
    """The share that float16 would hold with less than its 11 bits."""
    return share(look, kind, SMALLEST - 1, SMALLEST_NORMAL - 1, scale)


def zeros(found: Result, name: str, step: str) -> float:
    """The share of zeros of a run among the gradients of activations that float16 stores as halves."""
    ops = {_bare(op): counts for op, counts in found["runs"][name][step]["ops"].items()}
    counts = [ops[op] for op in halves(found, step) if op in ops]
    return sum(zero for _, zero in counts) / max(1, sum(number for number, _ in counts))


def halves(found: Result, step: str) -> list[str]:
    """Ops and modules whose gradients are halves in float16, in the order of their sizes."""
    return [_bare(op) for op in found["runs"]["float16"][step]["ops"] if op.endswith(" float16")]


def _bare(op: str) -> str:
    """Without the dtype."""
    return op.rpartition(" ")[0]


def underflow_lines(found: Result) -> list[str]:
    """For a terminal."""
    texts = [f"{'gradients':<14}{'step':>6}{'not 0':>12}{'lost':>9}{'blurred':>9}{'lost, 2^16':>12}{'2^-11':>9}"]
    looks = found["runs"][REFERENCE]
    for kind in KINDS:
        for step, look in looks.items():
            shares = [lost(look, kind), blurred(look, kind), lost(look, kind, SCALE), lost(look, kind, -MORE_TARGETS)]
            cells = [percent(of) for of in shares]
            number = f"{nonzero(look, kind):,}"
            texts.append(f"{kind:<14}{step:>6}{number:>12}{cells[0]:>9}{cells[1]:>9}{cells[2]:>12}{cells[3]:>9}")
    texts.append(f"{'zeros, of activations':<30}" + "".join(f"{f'step {step}':>12}" for step in looks))
    for name in found["runs"]:
        texts.append(f"{name:<30}" + "".join(f"{percent(zeros(found, name, step)):>12}" for step in looks))
    return texts


def percent(value: float) -> str:
    """With enough digits to see that something small is not nothing."""
    return "0" if value == 0 else f"{100 * value:.1f} %" if value >= 0.001 else f"{100 * value:.2g} %"


# ------------------------------------------------------------------------------------------------------------- the page


def parts(result: Result) -> dict[str, str]:
    """What stands between marks, by their names."""
    found = {"losses": _losses(result)}
    if "underflow" in result:
        found |= {"lost": _lost(result["underflow"]), "zeros": _zeros(result["underflow"])}
    return found


def _losses(result: Result) -> str:
    lines = ["| run | validation loss | over float32's | skipped steps | loss scale |", "|---|--:|--:|---|---|"]
    for name, run in result["runs"].items():
        skipped = f"{len(run['skipped'])}: {_steps(run['skipped'])}" if run["skipped"] else "none"
        cells = [name, f"{run['val_loss']:.4f}", f"**{ratio(result, name):.4f}**", skipped, _scales(run["scales"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _about(result["runs"][REFERENCE])])


def _steps(steps: list[int], most: int = 6) -> str:
    shown = ", ".join(map(str, steps[:most]))
    return f"{shown} ... {steps[-1]}" if len(steps) > most else shown


def _scales(scales: list[list[float]]) -> str:
    if not scales:
        return "-"
    texts = [f"{_power(scale)} from step {step}" if step > 1 else _power(scale) for step, scale in scales]
    return ", ".join(texts) if len(texts) < 4 else f"{texts[0]} ... {texts[-1]}"


def _power(scale: float) -> str:
    """2^16 for a power of two, else the number."""
    exponent = scale.hex().partition("p")
    return f"2^{int(exponent[2])}" if exponent[0] == "0x1.0000000000000" else f"{scale:,.0f}"


def _about(run: Result) -> str:
    about = run["about"]
    numpy = about["versions"]["numpy"]
    return f"{about['time'][:10]}; numpy {numpy}, kernels {about['kernels']}; commit {about['commit']}."


def _lost(found: Result) -> str:
    head = ("gradients in float32", "step", "not 0", "would be 0", "would lose bits", "the same with S = 2^16")
    lines = [f"| {' | '.join(head)} | would be 0 at 2^21 targets |", f"|---|{'--:|' * len(head)}"]
    for kind in KINDS:
        for step, look in found["runs"][REFERENCE].items():
            plain = f"**{percent(lost(look, kind))}** | {percent(blurred(look, kind))}"
            scaled = f"{percent(lost(look, kind, SCALE))} and {percent(blurred(look, kind, SCALE))}"
            small = percent(lost(look, kind, -MORE_TARGETS)) if kind == "activations" else ""
            lines.append(f"| of {kind} | {step} | {nonzero(look, kind):,} | {plain} | {scaled} | {small} |")
    return "\n".join(lines)


def _zeros(found: Result) -> str:
    """Zeros of the gradients that are stored as halves; all together, and op by op in the last step."""
    steps = list(found["runs"][REFERENCE])
    lines = [f"| zeros among gradients of activations | {' | '.join(f'step {step}' for step in steps)} |"]
    lines.append(f"|---|{'--:|' * len(steps)}")
    for name in found["runs"]:
        lines.append(f"| {name} | {' | '.join(percent(zeros(found, name, step)) for step in steps)} |")
    last = steps[-1]
    looks = {name: {_bare(op): counts for op, counts in of[last]["ops"].items()} for name, of in found["runs"].items()}
    lines += ["", f"By what made the value, in step {last}:", ""]
    lines += [f"| gradient of the result of | elements | {' | '.join(looks)} |", f"|---|--:|{'--:|' * len(looks)}"]
    for op in halves(found, last):
        name, _, module = op.partition(" ")
        cells = [percent(ops[op][1] / ops[op][0]) if op in ops else "-" for ops in looks.values()]
        place = f"`{name}`, `{module}`" if module else f"`{name}`"
        lines.append(f"| {place} | {looks['float16'][op][0]:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(found: Result) -> str:
    """Histograms of exponents, of activations and of weights, in each step that was looked at."""
    bands = [
        Band(LEFT, SMALLEST - 1.5, "0 in float16"),
        Band(SMALLEST - 1.5, SMALLEST_NORMAL - 0.5, "loses bits", light=True),
    ]
    panels = []
    for kind in KINDS:
        lines = []
        for colour, (step, look) in enumerate(found["runs"][REFERENCE].items()):
            exponents = look["exponents"][kind]
            points = [
                (float(e), 100 * exponents.get(str(e), 0) / max(1, nonzero(look, kind))) for e in range(LEFT, RIGHT + 1)
            ]
            lines.append(Line(f"step {step}: {percent(lost(look, kind))} lost", points, colour))
        name = f"Gradients of {kind}"
        panels.append(Panel(name, lines, X_LABEL, Y_LABEL, log_y=False, log_x=False, bands=bands))
    return plots.panels("Which gradients float16 can hold", panels)


# ---------------------------------------------------------------------------------------------------------------- files


def text_of(result: Result) -> str:
    """A result as a file."""
    return json.dumps(result, indent=1) + "\n"


def files(result: Result) -> dict[Path, str]:
    """What stands in docs/ for a result."""
    written = parts(result)
    text = PAGE.read_text(encoding="utf-8")
    text = MARKED.sub(lambda found: f"{found[1]}{written.get(found[2], 'Not measured.')}\n{found[3]}", text)
    drawn = {PICTURE: picture(result["underflow"])} if "underflow" in result else {}
    return {KEPT: text_of(result), PAGE: text, **drawn}


def write(result: Result) -> list[Path]:
    """Write them; the paths."""
    texts = files(result)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)

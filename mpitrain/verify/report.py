"""What a proof says: a line a layout, tables with the worst first, and everything as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpitrain.backend import dtype_of, is_half
from mpitrain.debug.capture import Record
from mpitrain.errors import ConfigError
from mpitrain.options import show
from mpitrain.verify.judge import Finding, Verdict
from mpitrain.verify.proof import Outcome
from mpitrain.verify.suspect import Hint

ROWS = 8  # of a table of a run that is equal, or that is not


def one_rank_line(records: Sequence[Record], name: str = "one rank") -> str:
    """What the run of one rank was; `name` is what to call it."""
    steps = [record for record in records if record.facts["is"] == "step"]
    begin = next(record for record in records if record.facts["is"] == "begin")
    losses = [record.facts["loss"] for record in steps if "loss" in record.facts]
    course = f", loss {losses[0]:.4f} -> {losses[-1]:.4f}" if losses else ""
    dtype = begin.facts["asked dtype"]
    asked = f"; proved in float64, not {dtype}" if is_half(dtype_of(dtype)) else ""
    kinds = ", ".join(map(_several, steps[0].arrays))
    return f"{name}: {len(steps)} steps of {len(begin.facts['parameters'])} tensors ({kinds}){course}{asked}"


def _several(kind: str) -> str:
    """The name of a kind of arrays, of many of them."""
    one = kind.replace("_", " ").removesuffix("s")
    return f"{one.removesuffix('y')}ies" if one.endswith("y") else f"{one}s"


def line(name: str, word: str, detail: str, seconds: float, width: int) -> str:
    """One layout."""
    shown = word if word in ("equal", "refused") else word.upper()
    return f"{name:<{width}}  {shown:<8}{seconds:6.1f} s  {detail}"


def detail(outcome: Outcome) -> str:
    """The end of a layout's line."""
    if outcome.word in ("refused", "failed"):
        return outcome.message.splitlines()[0]
    assert outcome.verdict is not None
    return of_verdict(outcome.verdict) + (", against its replay" if outcome.layout.is_stale else "")


def of_verdict(verdict: Verdict) -> str:
    """A verdict in a line."""
    first = verdict.first
    if first is not None and first.kind == "step":
        return first.problem
    if first is not None:
        return f"first at step {first.step}, {first.what}"
    worst = verdict.worst()[0]
    return f"{len(verdict.findings)} comparisons; the worst is {worst.share:.2g} of its bound: {worst.what}"


def table(verdict: Verdict, rows: int | None = ROWS) -> str:
    """Errors and bounds, the worst first; each tensor at its worst step."""
    worst = verdict.worst()
    shown = worst if rows is None else worst[:rows]
    lines = [f"  {'error':>8}  {'allowed':>8}  {'of that':>8}  {'ratio':>9}  step  {'what':<46} why so much is allowed"]
    lines += [_row(finding) for finding in shown]
    if len(shown) < len(worst):
        lines.append(f"  ... and {len(worst) - len(shown)} more, none of them worse")
    if verdict.moved.number:
        lines.append(
            f"  {verdict.moved.number} weights with next to no gradient differ by what rounding does to them, "
            f"{verdict.moved.error:.1e} at most (verify/noise.py)."
        )
    return "\n".join(lines)


def _row(finding: Finding) -> str:
    d = finding.difference
    if d is None:
        return f"  {'-':>8}  {'-':>8}  {'-':>8}  {'-':>9}  {finding.step:>4}  {finding.what:<46} {finding.problem}"
    ratio = d.ratio if math.isnan(d.factor) else d.factor
    why = finding.problem or d.why
    return (
        f"  {d.error:8.1e}  {d.bound:8.1e}  {finding.share:8.2g}  {ratio:9.6g}  {finding.step:>4}  "
        f"{finding.what:<46} {why}"
    )


def explanation(name: str, found: Iterable[Hint], is_stale: bool = False) -> str:
    """The hints under the name of their layout."""
    what = "replay on" if is_stale else "training run of"
    rows = (f"  {hint.label:<9} " + hint.text.replace("\n", "\n" + " " * 12) for hint in found)
    return "\n".join([f"{name} is not the {what} one rank:", *rows])


# ----------------------------------------------------------------------------------------------------------------- JSON


def as_json(
    command: Sequence[str], records: Sequence[Record], outcomes: Sequence[Outcome], code: int
) -> dict[str, Any]:
    """Everything, for programs.  A number that JSON does not have is a word: "nan", "inf"."""
    steps = [record for record in records if record.facts["is"] == "step"]
    return {
        "command": list(command),
        "steps": len(steps),
        "losses": [_number(record.facts.get("loss", math.nan)) for record in steps],
        "layouts": [_outcome(outcome) for outcome in outcomes],
        "exit_code": code,
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    verdict = outcome.verdict
    first = verdict.first if verdict is not None else None
    return {
        "layout": str(outcome.layout),
        "ranks": outcome.layout.ranks,
        "flags": list(outcome.flags),
        "outcome": outcome.word,
        "seconds": round(outcome.seconds, 3),
        "replay": outcome.layout.is_stale,
        "message": outcome.message,
        "compared": len(verdict.findings) if verdict is not None else 0,
        "steps": verdict.steps if verdict is not None else 0,
        "first": None if first is None else _finding(first),
        "worst": [] if verdict is None else [_finding(finding) for finding in verdict.worst()],
        "hints": [{"label": h.label, "text": h.text, "axes": list(h.axes)} for h in outcome.hints],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    d = finding.difference
    found: dict[str, Any] = {
        "step": finding.step,
        "kind": finding.kind,
        "name": finding.name,
        "equal": finding.ok,
        "problem": finding.problem,
        "ranks": list(finding.ranks),
        "axes": list(finding.split.axes) if finding.split is not None else [],
    }
    if d is not None:
        found |= {"error": _number(d.error), "allowed": _number(d.bound), "ratio": _number(d.ratio)}
        found |= {"factor": _number(d.factor), "at": list(d.at), "why": d.why}
    return found


def check_writable(path: str) -> None:
    """Refuse a place for the JSON before anything is run.

    Raises:
        ConfigError: it cannot be written.
    """
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else os.path.dirname(path) or ".", os.W_OK):
        raise ConfigError(f"--json {show(path)}: cannot be written.  Name a file in a folder that exists.")


def write(path: str, found: dict[str, Any]) -> None:
    """Write a JSON file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {show(path)}: cannot be written: {error.strerror}.") from None


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)

"""What `mpitrain checkpoint verify` and `diff` print, and the JSON of diff."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from mpitrain.checkpoint.tools import wording
from mpitrain.checkpoint.tools.comparing import Compared, Comparison, Other
from mpitrain.checkpoint.tools.source import Source, kind_of
from mpitrain.checkpoint.tools.verifying import Verdict
from mpitrain.options import show

ROWS = 20
"""Rows of a table of differences; JSON has all."""

# --------------------------------------------------------------------------------------------------------------- verify


def verdict_text(verdict: Verdict) -> str:
    """One checkpoint: a line, and another for each thing that is damaged."""
    read = wording.speed(verdict.nbytes, verdict.seconds)
    if verdict.whole:
        of = f"{wording.count(verdict.tensors, 'tensor')}, {wording.count(verdict.files, 'file')}"
        lines = [f"{show(verdict.path)}: whole; {of}, {read}"]
    else:
        lines = [f"{show(verdict.path)}: DAMAGED; {wording.count(len(verdict.damages), 'finding')}, {read}"]
        for file, tensor, what in verdict.damages:
            lines.append(f"  {show(file)}: {tensor}: {what}" if tensor else f"  {show(file)}: {what}")
    if verdict.strangers:
        lines.append(f"  not part of it: {wording.some([show(name) for name in verdict.strangers])}")
    return "\n".join(lines)


def verdicts_text(verdicts: Sequence[Verdict]) -> str:
    """A run in a line."""
    damaged = sum(not verdict.whole for verdict in verdicts)
    nbytes, seconds = sum(v.nbytes for v in verdicts), sum(v.seconds for v in verdicts)
    said = f"{damaged} of {len(verdicts)} damaged" if damaged else "all whole"
    return f"{wording.count(len(verdicts), 'checkpoint')}: {said}; {wording.speed(nbytes, seconds)}"


# ----------------------------------------------------------------------------------------------------------------- diff


def comparison_text(a: Source, b: Source, found: Comparison) -> str:
    """What is not the same in two checkpoints."""
    lines = [f"passed over: {note}" for note in (*a.notes, *b.notes)]
    lines += [f"A  {_about(a)}", f"B  {_about(b)}", ""]
    for word, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            lines += [f"only in {word}: {_names(names, a if word == 'A' else b)}", ""]
    if found.shapes:
        rows = [["shape in A", "shape in B", "tensor"]]
        rows += [[wording.shape(mine), wording.shape(theirs), name] for name, (mine, theirs) in found.shapes.items()]
        lines += [*wording.table(rows), ""]
    if counted := [other for other in found.others if other.counts]:
        lines += [*_others(counted), ""]
    if differing := found.differing():
        lines += [*_tensors(found, differing), ""]
    if uncounted := [other for other in found.others if not other.counts]:
        told = (f"{other.name} {_value(other.a)} | {_value(other.b)}" for other in uncounted)
        lines += [f"not counted: {', '.join(told)}", ""]
    return "\n".join([*lines, _end(found)])


def _names(names: Sequence[str], source: Source) -> str:
    """Names, or where all of a kind are meant the kind."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    told: list[str] = []
    for kind, of in kinds.items():
        every = sum(kind_of(name) == kind for name in source.manifest.tensors)
        told += [f"all {every:,} of {kind}"] if kind and len(of) == every > 1 else of
    return wording.some(told, 8)


def _about(source: Source) -> str:
    manifest = source.manifest
    files = wording.count(len(manifest.files), "file")
    return f"{show(source)}: step {manifest.step:,}, on {wording.layout(manifest.layout)}, {files}"


def _others(others: Sequence[Other]) -> list[str]:
    rows = [["", "A", "B"], *([show(other.name), _value(other.a), _value(other.b)] for other in others[:ROWS])]
    rest = [f"  ... and {len(others) - ROWS} more"] if len(others) > ROWS else []
    return wording.table(rows) + rest


def _value(value: Any) -> str:
    if value is None:
        return "-"
    text = json.dumps(value) if isinstance(value, bool | float | list | dict) else str(value)
    return show(text) if len(text) <= 60 else f"{show(text[:57])}..."


def _tensors(found: Comparison, differing: Sequence[Compared]) -> list[str]:
    bounds = found.bounds()
    unit = "of largest" if found.tolerance is None else "allowed"
    rows = [["difference", unit, "elements", "of", "tensor", "worst at: A | B"]]
    for t in differing[:ROWS]:
        beside = _share(t.share) if found.tolerance is None else f"{bounds[t.name]:.1e}"
        where = f"{wording.shape(t.at)}: {_number(t.a)} | {_number(t.b)}" if t.other else ""
        if t.dtypes[0] != t.dtypes[1]:
            where = f"{t.dtypes[0]} | {t.dtypes[1]}" + (f", {where}" if where else "")
        rows.append([_error(t), beside, f"{t.other:,}", f"{t.elements:,}", t.name, where])
    rest = [f"  ... and {len(differing) - ROWS} more"] if len(differing) > ROWS else []
    return wording.table(rows, right="0123") + rest


def _share(share: float) -> str:
    return "" if math.isinf(share) else f"{share:.1e}" if share < 0.001 else f"{share:.1%}"


def _error(t: Compared) -> str:
    return "NaN" if math.isnan(t.error) else f"{t.error:.1e}" if t.error else "0"


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _end(found: Comparison) -> str:
    """The last line."""
    equal = sum(t.same_bits for t in found.tensors)
    number = len(found.differing())
    near = len(found.tensors) - equal - number
    said = [f"{wording.count(equal, 'tensor')} with the same bits"]
    if near:
        said.append(f"{near:,} within the tolerance")
    if number:
        said.append(f"{number:,} that differ")
    if apart := len(found.only_a) + len(found.only_b) + len(found.shapes):
        said.append(f"{apart:,} that cannot be compared")
    if other := sum(other.counts for other in found.others):
        said.append(f"{wording.count(other, 'other thing')} that {'differs' if other == 1 else 'differ'}")
    return f"{'the same' if found.same else 'DIFFERENT'}: {', '.join(said)}"


def comparison_json(a: Source, b: Source, found: Comparison) -> dict[str, Any]:
    """All of it, for programs; a number that JSON does not have is a word: "nan"."""
    bounds, differing = found.bounds(), {t.name for t in found.differing()}
    return {
        "a": str(a),
        "b": str(b),
        "same": found.same,
        "tolerance": found.tolerance,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "shapes": found.shapes,
        "settings": [{**other._asdict(), "counts": other.counts} for other in found.others],
        "tensors": {
            t.name: {
                "same": t.name not in differing,
                "same_bits": t.same_bits,
                "dtypes": t.dtypes,
                "elements": t.elements,
                "other": t.other,
                "error": _json(t.error),
                "allowed": bounds[t.name] if found.tolerance is not None else None,
                "at": t.at,
                "a": _json(t.a),
                "b": _json(t.b),
            }
            for t in found.tensors
        },
    }


def _json(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)

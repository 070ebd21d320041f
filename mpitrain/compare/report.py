"""What a comparison says: as text of at most 100 columns, and as JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.compare.curves import Curves
from mpitrain.compare.findings import Finding, Walk
from mpitrain.compare.recordings import Recorded
from mpitrain.compare.saved import Saved
from mpitrain.compare.settings import Other
from mpitrain.compare.sources import Source
from mpitrain.options import show

WIDTH = 100
LONGEST = 400
_AXES = ("pp", "dp", "ep", "cp", "tp")
_SUMS = {
    "plain": "of all elements",
    "rows": "of all elements, each row with a factor of its own",
    "columns": "of all elements, each column with a factor of its own",
    "both": "of all elements, each row and each column with a factor of its own",
    "size": "of absolute values",
    "root of squares": "of squares, its root",
}
_PHASES = {
    "weights before": "the weights before",
    "batch": "the batch",
    "forward": "values of ops",
    "backward": "gradients of values",
    "gradient": "gradients of parameters",
    "number": "numbers of steps",
    "weight": "weights",
    "state": "tensors of the optimizer",
}
MOST_TENSORS = 5
MOST_OPS = 4


def text_of(lines: Sequence[str]) -> str:
    """Lines as they are printed: names come from files, and may hold anything."""
    return "\n".join("".join(c if c.isprintable() else "?" for c in line[:LONGEST]) for line in lines)


def heading(one: Source, other: Source, settings: Sequence[Other], facts: Sequence[Other]) -> list[str]:
    """Who is compared, and what they do not have in common from the start."""
    lines = [_of_run(each) for each in (one, other)]
    shown = _AXES if one.digests is not None and other.digests is not None else ()
    mine = [o for o in settings if not o.is_layout]
    layout = [o for o in settings if o.is_layout and o.name not in shown]
    for title, found in (("settings", mine), ("layout", layout), ("made with", facts)):
        if found:
            text = "; ".join(
                f"{each.name.replace('_', '-')} {_word(each.one)} -> {_word(each.other)}" for each in found
            )
            lines += _wrapped(f"{title:<10} {text}", 11)
    return lines


def _of_run(source: Source) -> str:
    has = []
    side = source.digests
    if side is not None:
        begin = side.begin(side.executors[0])
        axes = {axis: size for axis, size in begin["sizes"].items() if size > 1}
        names = {axis if axis != "edp" or "ep" in axes else "dp": size for axis, size in axes.items()}
        ranks = math.prod(axes.values())
        layout = f": {', '.join(f'{axis} {size}' for axis, size in names.items())}" if axes else ""
        has = [f"{ranks} rank{'s' * (ranks > 1)}{layout}", str(begin.get("dtype"))]
        if len(side.ranks) < ranks:
            has.append(f"digests of {len(side.ranks)} of them only")
    elif source.metrics:
        has.append(f"no digests; {len(source.metrics):,} steps of metrics")
    if source.recorded:
        has.append("a recording")
    if source.checkpoints and side is None:
        has.append(f"{len(source.checkpoints)} checkpoints")
    return f"run {source.number}      {show(source.folder)}  ({'; '.join(has)})"


def _word(value: Any) -> str:
    return "not given" if value is None else show(value)


# ----------------------------------------------------------------------------------------------------------- by digests


def of_walk(walk: Walk, notes: Sequence[str] = ()) -> list[str]:
    """Where two runs with digests part, or that they do not."""
    lines: list[str] = []
    if walk.first is not None:
        lines += [f"They part at {_title(walk.first)}", *_details(walk.first)]
        lines += _wrapped(f"  before   {_equal(walk)}", 11)
    elif not walk.steps:
        lines.append("There is nothing to compare: no step has digests in both runs.")
    else:
        lines.append(f"No difference beyond rounding in {_steps(walk.steps)}.")
        lines += _wrapped(f"  compared {_equal(walk)}", 11)
        largest = max(walk.largest.values(), default=0.0)
        lines.append(f"  largest  {largest:.2g} of what rounding may make")
    bits = walk.bits
    if bits is not None and walk.first is not None and walk.first.problem and bits is not walk.first:
        lines += _wrapped(f"  earlier  other bytes, within rounding, from {_title(bits)} on", 11)
    elif bits is not None and bits is not walk.first:
        lines += [f"Their bytes differ first at {_title(bits)}", *_details(bits)]
    elif walk.same_layout and walk.first is None and walk.steps:
        lines.append("  bytes    the same everywhere")
    for note in notes:
        lines += _wrapped(f"  note     {note}", 11)
    return lines


def _title(finding: Finding) -> str:
    step = f"step {finding.step}" if finding.phase != "weights before" or finding.step else "the beginning"
    return f"{step}, {what(finding)}"


def what(finding: Finding) -> str:
    """`forward: gelu in blocks.1.mlp`, `gradient of table.weight`, `loss`."""
    if finding.is_op:
        title = finding.op if finding.places is None else finding.places[0].title
        title += ".backward" * (finding.phase == "backward")
        where = f" in {finding.name}" if finding.name else ""
        nth = f", call {finding.count + 1} of that name there" if finding.count else ""
        side = f", gradient of input {finding.which}" if finding.phase == "backward" else ""
        side = side or (f", output {finding.which}" if finding.which else "")
        return f"{finding.phase}: {title}{where}{nth}{side}"
    if finding.phase == "weights before":
        return f"weight {finding.name} before the first step" if not finding.step else f"weight {finding.name}"
    if finding.phase == "state":
        return f"{finding.op.replace('_', ' ')} of {finding.name}"
    if finding.phase in ("gradient", "weight"):
        return f"{finding.phase} of {finding.name}"
    return f"{finding.phase}: {finding.name}" if finding.phase in ("batch", "message", "states") else finding.name


def _details(finding: Finding) -> list[str]:
    lines = []
    if finding.places is not None:
        one, other = finding.places
        names = one.title == other.title
        each = [f"{'' if names else p.title + ' '}at {p.site or '?'}" for p in (one, other)]
        lines.append(f"  place    {each[0]}" if each[0] == each[1] else f"  place    run 1 {each[0]}, run 2 {each[1]}")
        if one.stage or other.stage:
            lines[-1] += f"; stage {one.stage}" + (f" and {other.stage}" if one.stage != other.stage else "")
    for run, ops in enumerate(finding.between, start=1):
        if ops:
            named = ", ".join(f"{op.title} at {op.site or '?'}" for op in ops[:MOST_OPS])
            more = f" and {len(ops) - MOST_OPS} more" if len(ops) > MOST_OPS else ""
            lines += _wrapped(f"  between  only run {run} has {named}{more}", 11)
    if finding.problem:
        lines += _wrapped(f"  problem  {finding.problem}", 11)
    gap = finding.gap
    if gap is not None and finding.problem and gap.share <= 1:
        if gap.error:  # what is wrong is not the distance: it must not read like the reason
            lines.append(f"  values   equal within rounding: {gap.error:.3g} apart, it may make {gap.allowed:.2g}")
    elif gap is not None:
        relative = f", {gap.relative:.2g} of it" if not math.isnan(gap.relative) else ""
        if gap.what in _SUMS:
            lines.append(f"  sum      {_SUMS[gap.what]}")
        lines.append(f"  values   run 1 {gap.values[0]:.12g}, run 2 {gap.values[1]:.12g}")
        lines.append(f"  distance {gap.error:.3g}{relative}; rounding may make {gap.allowed:.2g}")
    if finding.ranks:
        many = "s" if len(finding.ranks) > 1 else ""
        lines += _wrapped(
            f"  where    on rank{many} {' '.join(map(str, finding.ranks))} (both runs have one layout)", 11
        )
    return lines


def _equal(walk: Walk) -> str:
    """What was compared and is equal."""
    counted = [
        f"{number:,} {_PHASES[phase]}" if phase not in ("weights before", "batch") else _PHASES[phase]
        for phase, number in walk.compared.items()
        if phase in _PHASES and number - (walk.first is not None and walk.first.phase == phase) > 0
    ]
    last = f"; the last op that is equal: {what(walk.before)}" if walk.first is not None and walk.before else ""
    beside = f"; {walk.left_out:,} values of one run alone are left out" if walk.left_out else ""
    return f"{', '.join(counted) or 'nothing'}{last}{beside}"


def _steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"


# ------------------------------------------------------------------------------------------------------ without digests


def of_curves(curves: Curves, tolerance: float) -> list[str]:
    """Where two curves part."""
    if not curves.steps:
        return ["Their metrics have no step in common."]
    if curves.first is None:
        return [
            f"No difference beyond {tolerance:g} in the metrics of {curves.steps:,} steps"
            f" (largest {curves.largest:.2g})."
        ]
    step, name, (a, b) = curves.first
    return [
        f"Their metrics part at step {step}: {name}",
        f"  values   run 1 {a:.12g}, run 2 {b:.12g}: {curves.first.relative:.2g} of it, allowed {tolerance:g}",
        f"  before   {curves.steps - 1:,} steps, largest difference {curves.largest:.2g}",
    ]


def of_saved(saved: Saved, tolerance: float) -> list[str]:
    """Where two rows of checkpoints part."""
    if not saved.steps:
        return ["They have no checkpoints of the same step."]
    if saved.step is None:
        return [f"No difference beyond {tolerance:g} in the checkpoints of {_steps(saved.steps)}."]
    lines = [f"Their checkpoints part at step {saved.step}: {len(saved.tensors)} tensors differ"]
    for tensor in saved.tensors[:MOST_TENSORS]:
        at = f" at {list(tensor.at)}" if tensor.at else ""
        lines.append(f"  {show(tensor.name)}: {tensor.a!r} and {tensor.b!r}{at}, {tensor.share:.2g} of its largest")
    if saved.other_names:
        lines.append(f"  only in one, or of another shape: {', '.join(map(show, saved.other_names[:MOST_TENSORS]))}")
    before = [step for step in saved.steps if step != saved.step]
    lines.append(f"  before   {_steps(before)} equal" if before else "  before   no checkpoint of both")
    return lines


def of_recordings(found: Recorded) -> list[str]:
    """The first message that differs, and that of the other ranks."""
    of = f"{found.ranks} rank{'s' * (found.ranks > 1)}"
    if not found.apart:
        lines = [f"No difference: {found.messages:,} messages of {of} are the same, by the checksums of their bytes."]
        return lines + [line for note in found.notes for line in _wrapped(f"  note     {note}", 11)]
    first = found.apart[0]
    place = first.sites[0] if first.sites[0] == first.sites[1] else f"{first.sites[0]}, in run 2 {first.sites[1]}"
    which = f"message {first.n} of rank {first.rank}" if first.n else f"what rank {first.rank} holds"
    step = f"step {first.step}, " if first.step else ""
    lines = _wrapped(f"They part at {step}{which}: {first.what}", 11)
    lines += _wrapped(f"  place    at {place}", 11) if place else []
    lines += _wrapped(f"  problem  {first.said}", 11)
    for message in found.apart[1 : 1 + MOST_TENSORS]:
        at = f"message {message.n}: {message.what} at {message.sites[0]}" if message.n else message.what
        lines += _wrapped(f"  beside   rank {message.rank}, {at}: {message.said}", 11)
    lines.append(f"  before   {found.messages:,} messages of {of} are the same")
    return lines + [line for note in found.notes for line in _wrapped(f"  note     {note}", 11)]


def as_json(walk: Walk | None, curves: Curves | None, saved: Saved | None) -> dict[str, Any]:
    """The same for programs."""
    found: dict[str, Any] = {}
    if walk is not None:
        found["digests"] = {
            "first": _json_of(walk.first),
            "bits": _json_of(walk.bits),
            "compared": walk.compared,
            "steps": walk.steps,
            "left_out": walk.left_out,
            "same_layout": walk.same_layout,
        }
    if curves is not None:
        first = curves.first
        of = None if first is None else {"step": first.step, "name": first.name, "values": _plain(first.values)}
        found["metrics"] = {"first": of, "steps": curves.steps}
    if saved is not None:
        found["checkpoints"] = {"step": saved.step, "steps": saved.steps, "tensors": [t.name for t in saved.tensors]}
    return found


def _json_of(finding: Finding | None) -> Mapping[str, Any] | None:
    if finding is None:
        return None
    gap = finding.gap
    return {
        "step": finding.step,
        "phase": finding.phase,
        "what": what(finding),
        "name": finding.name,
        "op": finding.op,
        "problem": finding.problem,
        "sites": None if finding.places is None else [place.site for place in finding.places],
        "ranks": list(finding.ranks),
        "sum": None if gap is None else gap.what,
        "values": None if gap is None else _plain(gap.values),
        "distance": None if gap is None else _plain([gap.error])[0],
        "allowed": None if gap is None else _plain([gap.allowed])[0],
    }


def _plain(values: Sequence[float]) -> list[float | str]:
    return [value if math.isfinite(value) else repr(value) for value in values]


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, drop_whitespace=True)

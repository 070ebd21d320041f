"""What is told beside the distance of two values: replicas, messages, rules of states, ops of one run alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpitrain.compare.findings import Finding, Place
from mpitrain.compare.wholes import Name, Split, Whole


def split_of(one: Split | None, other: Split | None) -> str:
    """What is wrong where ranks of one run alone hold other bytes than others that should hold the same."""
    if (one is None) == (other is None):
        return ""
    split, run = (one, 1) if one is not None else (other, 2)
    assert split is not None
    along = f" of axis {split.axis}" if split.axis else ""
    odd = " ".join(map(str, split.odd))
    many = "s" if len(split.odd) > 1 else ""
    return f"in run {run} rank{many} {odd}{along} hold{'' if many else 's'} other bytes than the ranks beside"


def between(
    kind: str, mine: Mapping[Name, Whole], theirs: Mapping[Name, Whole], last: Name | None, now: Name
) -> tuple[Place, ...]:
    """Ops of one run that the other lacks, between two that both have; in the order of forward."""
    ends = sorted((of.stage, of.place) for name in (last, now) if name is not None and (of := mine.get(name)))
    start = ends[0] if last is not None else (ends[0][0], -1)
    if kind == "B" and last is None:
        return ()
    has = {name[1:4] for name in theirs}
    found = {
        (of.stage, of.place): Place(of.title, of.site, of.stage)
        for name, of in mine.items()
        if name[0] == kind and name[1:4] not in has and start < (of.stage, of.place) < ends[-1]
    }
    return tuple(found[place] for place in sorted(found))


def messages(step: int, lost: Sequence[int | None], stages: Sequence[int] | None = None) -> Iterator[Finding]:
    """Messages between stages that did not bring what was sent; of those before these stages, or all."""
    for run, stage in enumerate(lost, start=1):
        if stage is not None and (stages is None or stage <= stages[run - 1]):
            problem = f"in run {run} stage {stage} works on other bytes than stage {stage - 1} has sent"
            yield Finding(step, "message", f"from stage {stage - 1} to stage {stage}", problem=problem)


def states(step: int, records: Sequence[Mapping[int, Mapping[str, Any]]]) -> Iterator[Finding]:
    """Rules of states that are broken in one of the runs: what comes after cannot be added up over its ranks."""
    told = []
    for of in records:
        found = next((r["trouble"] for r in of.values() if isinstance(r.get("trouble"), list)), None)
        told.append(found if found is not None and len(found) == 4 and isinstance(found[3], str) else None)
    for run, trouble in enumerate(told, start=1):
        if trouble is not None and told[2 - run] is None:
            _, _, op, text = trouble
            yield Finding(step, "states", str(op), problem=f"run {run} breaks a rule of states {text}")

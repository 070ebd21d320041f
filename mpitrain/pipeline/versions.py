"""Which version of a stage's weights a micro-batch uses, where schedules update without draining.

Version 0 is what training starts from, or goes on from; each STEP of a rank makes the next.  A micro-batch's backward
uses the version that its forward used.  Read off the rows, so executor, replay and drawing cannot disagree.

    rule         the F of micro-batch j uses                           paper
    None         the newest; all micro-batches of a step the same      flush schedules
    "newest"     the newest of its stage (weight stashing)             Harlap et al. 2018, arXiv:1806.03377
    "previous"   max(j // m - 1, 0) on every stage, m to a batch       Narayanan et al. 2020, arXiv:2006.09503
"""

from __future__ import annotations

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import Row, Schedule, placement


def versions_of(rows: Schedule, rule: str | None) -> list[list[int]]:
    """The version that each F uses, by stage and micro-batch.

    Args:
        rows: that `check` accepts.
        rule: the `versions` of the schedule's `Kind`.

    Raises:
        ScheduleError: an F comes before the STEP that makes the version it uses, or slices of one micro-batch use
            different versions.
    """
    versions: list[dict[int, int]] = [{} for _ in placement(rows)]
    for rank, row in enumerate(rows):
        for (micro, stage), version in _used(rank, row, rule).items():
            versions[stage][micro] = version
    return [[by_micro[micro] for micro in sorted(by_micro)] for by_micro in versions]


def live_versions(rows: Schedule, rule: str | None) -> list[int]:
    """For each rank the largest number of versions that are in use at once, the newest included.

    Arguments and errors as in `versions_of`.
    """
    return [_live(rank, row, rule) for rank, row in enumerate(rows)]


def _used(rank: int, row: Row, rule: str | None) -> dict[tuple[int, int], int]:
    """The version by (micro-batch, stage)."""
    num_steps = sum(action.kind == "STEP" for action in row)
    num_micros = len({action.micro for action in row if action.kind == "F"})
    used: dict[tuple[int, int], int] = {}
    made = 0
    for place, (kind, micro, stage, _) in enumerate(row):
        made += kind == "STEP"
        if kind != "F":
            continue
        assert micro is not None
        version = max(micro // (num_micros // num_steps) - 1, 0) if rule == "previous" else made
        if version > made:
            raise ScheduleError(
                f"row {rank}: {row[place]} at place {place} uses version {version} of the weights, which"
                f" STEP{version - 1} makes later"
            )
        if used.setdefault((micro, stage), version) != version:
            raise ScheduleError(f"row {rank}: the slices of micro-batch {micro} use different versions of the weights")
    return used


def _live(rank: int, row: Row, rule: str | None) -> int:
    used = _used(rank, row, rule)
    last_use: dict[int, int] = {}
    for place, (kind, micro, stage, _) in enumerate(row):
        if kind in ("F", "B", "W") and micro is not None:
            last_use[used[micro, stage]] = place
    ends = {place: version for version, place in last_use.items()}
    made = older = 0  # number of the newest version; how many before it are still to be used
    peak = 1
    for place, action in enumerate(row):
        if action.kind == "STEP":
            older += last_use.get(made, -1) > place
            made += 1
            peak = max(peak, 1 + older)
        elif ends.get(place, made) < made:
            older -= 1
    return peak

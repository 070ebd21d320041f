"""By checkpoints: the first step that both runs have saved at which their tensors differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpitrain.checkpoint.tools.comparing import Compared, compare
from mpitrain.checkpoint.tools.source import Source, kind_of


class Saved(NamedTuple):
    """What came of it.

    steps: at which both were compared; step: the first that differs; None: none does; tensors: those that differ there,
    weights first, the worst first; other_names: tensors that one of them lacks.
    """

    steps: list[int]
    step: int | None
    tensors: list[Compared]
    other_names: list[str]


def compared(one: Mapping[int, Path], other: Mapping[int, Path], tolerance: float) -> Saved:
    """Compare the checkpoints of the same steps, in order, up to the first that differs.

    Raises:
        CheckpointError: one cannot be read.
    """
    steps = []
    for step in sorted({*one} & {*other}):
        steps.append(step)
        found = compare(Source.of(str(one[step])), Source.of(str(other[step])), tolerance=tolerance)
        apart = sorted(found.differing(), key=lambda tensor: kind_of(tensor.name) != "weight")
        names = [*found.only_a, *found.only_b, *found.shapes]
        if apart or names:
            return Saved(steps, step, apart, names)
    return Saved(steps, None, [], [])

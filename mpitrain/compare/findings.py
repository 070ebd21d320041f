"""What was compared, and where two runs part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mpitrain.compare.bounds import Gap, Precision


class Place(NamedTuple):
    """Where one of the two runs has what is compared: the op's name there, its line, its stage."""

    title: str
    site: str
    stage: int


@dataclass
class Finding:
    """One thing that was compared.

    Attributes:
        step: counted from 1; 0: before the first.
        phase: "weights before", "batch", "forward", "message" (between stages), "states" (a rule of them), "loss",
            "backward", "gradient", "number", "weight", "state".
        name: of the parameter, the number, or the part of the model.
        op: what the op is called on every layout; "" of what is no op.
        which: 0: its first value; of backward the number of the input.
        count: how many of that name came before it in its part.
        gap: how far the two are from each other; None where there is nothing to take a distance of.
        problem: what is wrong besides.
        places: in both runs.
        between: of both runs ops that only they have, between this one and the last that is equal.
        ranks: on which ranks they differ, where layouts agree.
        bits: whether all ranks of both runs hold the same bytes; None: layouts differ.
    """

    step: int
    phase: str
    name: str
    op: str = ""
    which: int = 0
    count: int = 0
    gap: Gap | None = None
    problem: str = ""
    places: tuple[Place, Place] | None = None
    between: tuple[tuple[Place, ...], tuple[Place, ...]] = ((), ())
    ranks: tuple[int, ...] = ()
    bits: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether it counts as equal."""
        return not self.problem and (self.gap is None or self.gap.share <= 1)

    @property
    def is_op(self) -> bool:
        """Whether it is of an op."""
        return self.phase in ("forward", "backward")


@dataclass
class Walk:
    """What came of it.

    Attributes:
        first: where the runs part; None: nowhere.
        before: the last op that is equal, ahead of it.
        bits: the first of which bytes differ, where layouts agree and nothing parts before.
        compared: by phase, how much.
        steps: that were compared.
        largest: error in units of its bound, by phase.
        ops: of forward, in a step.
        left_out: values of one run alone, or of which nobody can say how they add up.
        same_layout: whether bytes could be compared.
        precision: of the coarser one.
    """

    first: Finding | None = None
    before: Finding | None = None
    bits: Finding | None = None
    compared: dict[str, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    left_out: int = 0
    ops: int = 0
    same_layout: bool = False
    precision: Precision | None = None

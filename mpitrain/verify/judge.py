"""Is a layout the same training run as one rank?  Everything that was recorded, compared in the order of execution.

    before   weights                  what the model starts from
    step 1   choices, router's losses where there are experts
             targets, loss            what forward made
             gradients                in the order in which backward made them final
             norm, learning rate      what clipping and the schedule make of them
             weights, moments         what the optimizer made
    step 2   ...

Sizes are judged by `debug.compare`; what has no size (a tensor that nobody holds, replicas with other bits, a step that
is missing) is a problem by itself.  Nothing to compare is not equality.  The one exception stands in `noise`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from mpitrain.debug.capture import Record
from mpitrain.debug.compare import FLOAT64_TOLERANCE, Difference, compare
from mpitrain.verify.noise import Moved, Noise
from mpitrain.verify.routed import compare_routing
from mpitrain.verify.whole import Moment, Plan, Seat, Split, Whole, at, moments, same_bits

NUMBERS_BEFORE = ("targets", "rows", "loss")
NUMBERS_AFTER = ("skipped", "scale", "norm", "learning rate", "updates")
EXACT = ("targets", "rows", "skipped", "scale", "learning rate", "updates")  # no sum of floats is in them
OF_A_SOUND_STEP = ("gradient", "norm")
"""What is not compared of a step that all have skipped: somewhere in it is infinity, or what became of one."""


class Finding(NamedTuple):
    """One tensor, or one number, of one step.

    Attributes:
        step: counted from 1.
        kind: "choices", "loss", "gradient", "weight", "first_moment" ...
        name: of the tensor; empty for a number.
        difference: how far it is from one rank's; None where there is nothing to take a difference of.
        problem: what is wrong besides its size.
        split: where replicas differ.
        ranks: whose parts are wrong, if not all are.
    """

    step: int
    kind: str
    name: str = ""
    difference: Difference | None = None
    problem: str = ""
    split: Split | None = None
    ranks: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it counts as equal."""
        return not self.problem and self.difference is not None and self.difference.ok

    @property
    def share(self) -> float:
        """The error in units of its bound; infinite for a problem."""
        return float("inf") if self.problem or self.difference is None else self.difference.share

    @property
    def what(self) -> str:
        """`gradient of norm.bias`, `loss`."""
        return f"{self.kind.replace('_', ' ')} of {self.name}" if self.name else self.kind


@dataclass
class Verdict:
    """What was found, in the order of execution.

    Attributes:
        findings: every comparison, the good ones too.
        steps: that were compared.
        moved: weights that rounding alone has moved, beyond the bound of their tensor.
    """

    findings: list[Finding]
    steps: int
    moved: Moved

    @property
    def ok(self) -> bool:
        """Whether the layout is the same training run."""
        return self.steps > 0 and all(finding.ok for finding in self.findings)

    @property
    def first(self) -> Finding | None:
        """The first thing in the order of execution that is not equal."""
        return next((finding for finding in self.findings if not finding.ok), None)

    def worst(self) -> list[Finding]:
        """For each tensor its worst step, the worst first; of equals the earlier."""
        worst: dict[tuple[str, str], Finding] = {}
        for finding in self.findings:
            key = finding.kind, finding.name
            if key not in worst or finding.share > worst[key].share:
                worst[key] = finding
        return sorted(worst.values(), key=lambda finding: (finding.ok, -finding.share))


def judge(reference: Iterable[Record], ranks: Sequence[Iterable[Record]]) -> Verdict:
    """Compare the records of a layout's ranks with those of one rank alone."""
    findings: list[Finding] = []
    steps = 0
    courses: dict[int, _Course] = {}  # of each executor
    moved = Moved(0, 0.0)
    for alone, *others in zip_longest(moments(reference), *(moments(records) for records in ranks)):
        problem = _out_of_step(steps + 1, alone, others)
        if problem:
            findings.append(Finding(steps + 1, "step", problem=problem))
            break
        if alone.facts["is"] == "begin":
            course = _Course([alone.seat], [other.seat for other in others])
            courses[alone.facts["executor"]] = course
            findings += _Comparison(steps + 1, alone, others, course).beginning()
            continue
        steps += 1
        comparison = _Comparison(steps, alone, others, courses[alone.facts["executor"]])
        findings += comparison.step()
        moved = max(moved, comparison.moved)
    return Verdict(findings, steps, moved)


def _out_of_step(step: int, alone: Moment | None, others: Sequence[Moment | None]) -> str:
    """What is wrong if not all of them are at the same step of the same executor."""
    gone = [rank for rank, moment in enumerate(others) if moment is None]
    if alone is None:
        return f"one rank alone ended before step {step}, which the layout made"
    if gone:
        who = "the layout" if len(gone) == len(others) else f"{_ranks(gone)} of the layout"
        return f"{who} ended before the end of step {step}"
    names = ("is", "executor", "step")
    places = {tuple(moment.facts.get(name) for name in names) for moment in (alone, *others) if moment is not None}
    return "ranks are at steps of different executors" if len(places) > 1 else ""


class _Course:
    """What holds for all steps of an executor: who holds what, and which weights rounding may move."""

    def __init__(self, alone: Sequence[Seat], others: Sequence[Seat]) -> None:
        self.noise = Noise()
        self._seats = alone, others
        self._plans: dict[str, tuple[Plan, Plan]] = {}

    def plans(self, kind: str) -> tuple[Plan, Plan]:
        """Of one rank alone, and of the layout; one pair for all kinds whose tensors have the parameters' shapes."""
        alone, others = self._seats
        kind = kind if any(kind in seat.states for seat in (*alone, *others)) else "weight"
        if kind not in self._plans:
            self._plans[kind] = Plan(alone, kind), Plan(others, kind)
        return self._plans[kind]


class _Comparison:
    """One record of one rank alone against the same of all ranks of a layout."""

    def __init__(self, step: int, alone: Moment, others: Sequence[Moment], course: _Course) -> None:
        self._number = step
        self._alone = alone
        self._others = others
        self._course = course
        self.moved = Moved(0, 0.0)

    def beginning(self) -> Iterator[Finding]:
        """The weights before the first step."""
        yield from self._tensors("weight", "initial weight")

    def step(self) -> Iterator[Finding]:
        """Everything of a step, in the order of execution."""
        yield from self._routing()
        yield from self._own_losses()
        for kind in NUMBERS_BEFORE:
            yield from self._number_of(kind)
        sound = not all(moment.facts.get("skipped") for moment in (self._alone, *self._others))
        if sound:
            yield from self._tensors("gradient")
        for kind in NUMBERS_AFTER:
            if sound or kind not in OF_A_SOUND_STEP:
                yield from self._number_of(kind)
        kinds = dict.fromkeys(kind for moment in (self._alone, *self._others) for kind in moment.arrays)
        for kind in kinds:
            if kind != "gradient":
                yield from self._tensors(kind)

    def _routing(self) -> Iterator[Finding]:
        """What experts were asked for, and the router's losses: the same numbers on every rank."""
        there = self._alone.facts.get("counted", {})
        here = [(moment.seat.rank, moment.facts.get("counted", {})) for moment in self._others]
        for kind, name, difference, problem in compare_routing(there, here):
            yield Finding(self._number, kind, name, difference, problem)

    def _own_losses(self) -> Iterator[Finding]:
        """Ranks of a tp axis compute one loss; only the first rank's is counted, and the others' must be the same."""
        groups: dict[tuple[tuple[str, int], ...], Moment] = {}
        for moment in self._others:
            place = tuple((axis, index) for axis, index in moment.seat.coords.items() if axis != "tp")
            first = groups.setdefault(place, moment)
            mine, theirs = np.float64(moment.facts["own loss"]), np.float64(first.facts["own loss"])
            if not same_bits(mine, theirs):
                ranks = first.seat.rank, moment.seat.rank
                problem = f"rank {ranks[1]} computed {mine:.17g}, rank {ranks[0]} of its tp axis {theirs:.17g}"
                split = Split(ranks, ("tp",), float(abs(mine - theirs)))
                yield Finding(self._number, "loss before it is summed", problem=problem, split=split)
                return

    def _number_of(self, kind: str) -> Iterator[Finding]:
        """A number that every rank reports, the same on all of them."""
        there = kind in self._alone.facts
        lacks = [m.seat.rank for m in self._others if kind not in m.facts]
        if not there or lacks:
            if there or len(lacks) < len(self._others):
                yield Finding(self._number, kind, problem=_cut_short(there, lacks))
            return
        values = [np.float64(moment.facts[kind]) for moment in self._others]
        tolerance = 0.0 if kind in EXACT else FLOAT64_TOLERANCE
        (difference,) = compare({"": values[0]}, {"": np.float64(self._alone.facts[kind])}, tolerance, kind)
        if kind in EXACT:
            difference = difference._replace(why="must be exactly equal")
        odd = [m.seat.rank for m, value in zip(self._others, values, strict=True) if not same_bits(value, values[0])]
        problem = f"rank 0 reports {values[0]:.17g}, rank {odd[0]} {values[odd[0]]:.17g}" if odd else ""
        yield Finding(self._number, kind, difference=difference, problem=problem)

    def _tensors(self, kind: str, title: str = "") -> Iterator[Finding]:
        """All tensors of one kind, in the order in which they come to be."""
        title = title or kind
        there = kind in self._alone.arrays
        lacks = [m.seat.rank for m in self._others if kind not in m.arrays]
        if not there or lacks:
            yield Finding(self._number, title, problem=_cut_short(there, lacks))
            return
        alone, others = self._course.plans(kind)
        for place, moment in enumerate(self._others):
            has, needs = moment.arrays[kind].size, others.size_of(place)
            if has != needs:
                problem = f"rank {moment.seat.rank} keeps {has} numbers of it for {needs} of the model"
                yield Finding(self._number, title, problem=problem)
                return
        reference = alone.join([self._alone.arrays[kind]]).tensors
        whole = others.join([moment.arrays[kind] for moment in self._others])
        mine = self._without_noise(title, whole.tensors, reference)
        both = [name for name in reference if name in mine and mine[name].shape == reference[name].shape]
        found = compare({n: mine[n] for n in both}, {n: reference[n] for n in both}, kind=title)
        differences = {difference.name: difference for difference in found}
        order = self._alone.facts["order"] if kind == "gradient" else []
        for name in dict.fromkeys([*order, *reference, *whole.tensors]):
            difference = differences.get(name)
            problem, split = self._problem(kind, name, reference, whole, difference)
            ranks: tuple[int, ...] = ()
            if difference is not None and not difference.ok:
                ranks = _wrong(whole, name, reference[name], difference.bound)
            yield Finding(self._number, title, name, difference, problem, split, ranks)

    def _without_noise(
        self, title: str, mine: dict[str, np.ndarray], reference: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        if title == "initial weight":
            self._course.noise.begin(reference)
        elif title == "gradient":
            self._course.noise.gradients(mine, reference, {slab.name for slab in self._alone.seat.slabs if slab.decays})
        elif title == "weight":
            mine, self.moved = self._course.noise.weights(mine, reference)
        return mine

    def _problem(
        self, kind: str, name: str, reference: dict[str, np.ndarray], whole: Whole, difference: Difference | None
    ) -> tuple[str, Split | None]:
        """What is wrong with a tensor besides the size of its elements; and where its replicas differ."""
        plan = whole.plan
        if name in plan.problems:
            return plan.problems[name], None
        if name not in whole.tensors:
            return "no rank of the layout has it", None
        if name not in reference:
            return "one rank alone has no such tensor", None
        if difference is None:
            return f"is {whole.tensors[name].shape} in the layout, {reference[name].shape} on one rank", None
        if name in plan.gaps:
            return f"no rank holds {plan.gaps[name]} of its {whole.tensors[name].size} elements", None
        split = whole.splits.get(name)
        if split is None or (kind == "gradient" and split.error <= difference.bound):
            return "", None
        far = f"by {split.error:.3g}" if split.error else "in their bits"
        return f"ranks {split.ranks[0]} and {split.ranks[1]} hold the same part and differ {far}", split


def _wrong(whole: Whole, name: str, reference: np.ndarray, bound: float) -> tuple[int, ...]:
    """The ranks whose part of a tensor is wrong; none where all are."""
    holders = whole.holders(name)
    gaps = [np.abs(holder.slab - reference[at(holder.rectangle)]).max(initial=0.0) for holder in holders]
    wrong = [holder.seat.rank for holder, gap in zip(holders, gaps, strict=True) if not gap <= bound]
    return tuple(wrong) if len(wrong) < len(holders) else ()


def _cut_short(alone_has_it: bool, lacks: Sequence[int]) -> str:
    if not alone_has_it:
        return "one rank alone has none"
    return f"{_ranks(lacks)} came to no end of the step and {'has' if len(lacks) == 1 else 'have'} none"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {' '.join(map(str, numbers))}"

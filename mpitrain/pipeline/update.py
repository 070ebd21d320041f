"""The end of a step: the norm of its gradients, clipping, the optimizer, and what the step did.

In a step whose ranks all wait for its end they agree by one small all-reduce: the loss, the squares of the gradients,
who has one that is not finite, and what forward passes counted.  Where gradients are scaled such a step is skipped by
all ranks, else it is an error.  Where steps overlap, the stages of a pipeline update at different times; nobody waits
then, and the row ends with one message about all its steps.  Clipping needs the norm of each step, so with it they meet
at every update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd.tape import PATH
from mpitrain.backend import Array, floats
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import NumericsError, ScheduleError
from mpitrain.kernels.several import Several
from mpitrain.nn.module import Module
from mpitrain.optim.clip import coefficient, first_not_finite, found_squares, scale
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.scaler import LossScaler, Scaler
from mpitrain.optim.versions import Versions
from mpitrain.parallel.data import Reducer
from mpitrain.pipeline.autopsy import Autopsy

UNCHANGED = "No weight was changed by this step."
TOO_LONG = "its square is beyond the precision of the moments"
UNSOUND = "the optimizer's state is not finite, or negative where it is a mean of squares"


@dataclass(frozen=True)
class StepReport:
    """What one step did; the same on every rank.

    loss: mean over all valid targets of the step, in nats; grad_norm: global, without the scale and before clipping,
    and of workers with gradients of their own the root of the mean of their squares; lr: used in this step; targets:
    how many counted; skipped: whether gradients overflowed, so that no weight was changed; scale, next_scale: of the
    gradients in this step and in the next, 1 where they have none; rows: sequences that are no padding, and counted: by
    name what forward passes counted, both of models that count only; asked: what ranks were asked at the step's end
    (`ask` of the executor), summed over them.
    """

    loss: float
    grad_norm: float
    lr: float
    targets: int
    skipped: bool = False
    scale: float = 1.0
    next_scale: float = 1.0
    rows: int = 0
    counted: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    asked: tuple[float, ...] = ()


class Measured(NamedTuple):
    """What a step measured: losses of passes and counts on this rank, its targets and rows over all of them."""

    losses: Sequence[Array]
    targets: int
    rows: int
    counts: Mapping[str, Array]


class NotFinite(Exception):
    """A step was refused, on every rank; what is told of it waits for an autopsy.

    Args:
        head: what is not finite, in the words of the first line.
        gradient: name of the first gradient that is not; "": all are.
        consequence: what became of the weights.
        way_out: the usual one.
        lower: the one of gradients that overflow, "" where they do not; it comes first.
    """

    def __init__(self, head: str, gradient: str, consequence: str, way_out: str, lower: str = "") -> None:
        super().__init__(head)
        self._parts = head, gradient, consequence, way_out
        self._lower = lower

    def told(self, found: Autopsy | None) -> NumericsError:
        """The error for the user, with what an autopsy found, if there was one."""
        head, gradient, consequence, way_out = self._parts
        if found is None:
            where = f"; the first gradient that is not: {gradient}" if gradient else ""
            return NumericsError(f"{head}{where}.\n{consequence}  Way out: {_joined(self._lower, way_out)}.")
        lower = self._lower if found.may_be_of_a_scale else ""
        way_out = _joined(lower, found.way_out or way_out)
        error = NumericsError(f"{head}.\n{found}\n{consequence}  Way out: {way_out}.")
        error.autopsy = found
        return error


class Update:
    """What STEP does on this rank.

    Args:
        model: whose gradients are final, and summed over ranks.
        optimizer: over its parameters.
        mesh: the layout.
        clip: largest global gradient norm; 0 leaves gradients alone.
        lr: learning rate by number of updates done; the optimizer's own constant unless given.
        rule: of the versions of the weights where steps overlap ("newest", "previous"); None: they do not.
        scaler: of the gradients; None: they have no scale.
        reducer: what had the gradients summed; None: nothing follows from it.
        ask: numbers of this rank, always as many, whose sums over all ranks the report tells: whether it was asked to
            stop, say.  They travel with the rest.

    Attributes:
        versions: of the weights; None where steps do not overlap.
        report: of the last step of which it is known what it did, also where that was no good.

    Raises:
        ScheduleError: the rule does not go together with clipping, scaling or tied weights, or with workers that
            learn on their own.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        mesh: Mesh,
        clip: float,
        lr: Callable[[int], float] | None,
        rule: str | None,
        scaler: Scaler | None = None,
        reducer: Reducer | None = None,
        ask: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        if rule == "newest" and (clip or scaler is not None or any(p.spec.tied for p in model.parameters())):
            raise ScheduleError(
                "stages that update with their newest weights do so at different times: no global norm is known, no"
                " step can be skipped by all, and tied weights cannot be kept equal.\n"
                "Leave out clip, scale no gradients (float16) and tie no weights, or take versions='previous'."
            )
        if rule is not None and reducer is not None and reducer.local:
            raise ScheduleError(
                f"with {type(reducer).__name__} workers learn on their own, and stages would update with weights of"
                " other steps besides.\nTake a schedule that drains at each step (gpipe, 1f1b, interleaved, zb-h1)."
            )
        self.versions = None if rule is None else Versions(model.flats, optimizer, rule)
        self.report: StepReport | None = None
        self._model = model
        self._optimizer = optimizer
        self._mesh = mesh
        self._clip = clip
        self._lr = lr
        self._scaler = scaler
        self._reducer = Reducer() if reducer is None else reducer
        self._ask = ask
        self._worker = mesh.merged(("pp", "ep", "cp", "tp")) if self._reducer.local else None
        self._parameters = model.shares()
        self._grads: Several[Array] = Several()
        self._counted = [p for p in self._parameters if self._counts(p)]
        self._sums = sum(model.counted.values())  # numbers that forward passes count
        self._waiting: dict[int, tuple[Array, float]] = {}  # step of the row -> what this rank measured, learning rate

    def make(self, number: int, measured: Measured) -> StepReport | None:
        """Norm, clipping, optimizer.

        Args:
            number: of the step in its row.
            measured: in its passes.

        Returns:
            What the step did; None where that is known at the end of the row only.

        Raises:
            NumericsError: loss or norm is not finite; on every rank, and no weight was changed.
        """
        lr = self._lr(self._optimizer.updates) if self._lr is not None else self._optimizer.lr
        report = None
        if self.versions is None or self._clip or self._scaler is not None:
            report = self._agree(measured, lr)
        else:
            self._waiting[number] = self._measure([1.0])[1:], lr
        if self.versions is not None:
            self.versions.renew()
        if (report is None or not report.skipped) and self._reducer.arrive():
            self._optimizer.step(lr)
        if self.versions is not None:
            self._model.start_step()
        return report

    def _agree(self, measured: Measured, lr: float) -> StepReport:
        """Unscaling, norm over all ranks, clipping.  One small all-reduce; every rank gets the same bits.

        That gradients are finite is asked of all that a rank holds, also of those that another one counts.
        """
        scaler = self._scaler
        inverses = [1.0] if scaler is None else [scaler.inverse(group) for group in range(scaler.groups)]
        mine = self._measure(inverses, measured.losses)
        told = np.concatenate([mine, self._ask(), self._counts_of(measured)])
        found, asked, counts = self._parted(self._mesh.world.all_reduce(told), len(mine))
        unsound = bool(found[-1])
        bad = [bool(flag) for flag in found[2:-1]]
        workers = 1 if self._worker is None else self._mesh.edp.size
        norm = math.nan if any(bad) else math.sqrt(found[1] / workers)
        skipped = scaler is not None and any(bad)
        shown = 1.0 if scaler is None else scaler.shown
        loss, targets = mean(found[0], measured.targets), measured.targets
        told_of = measured.rows, self._by_name(counts), asked
        report = StepReport(loss, norm, lr, targets, skipped, shown, shown, *told_of)
        self.report = report
        if unsound:
            self._refuse(report, self._optimizer.updates, UNCHANGED, UNSOUND)
        if not (math.isfinite(report.loss) and (skipped or math.isfinite(norm))):
            self._refuse(report, self._optimizer.updates, UNCHANGED)
        if scaler is not None:
            before = scaler.state_dict()
            why = scaler.settle(bad)
            if why is not None:
                scaler.load_state(before)  # with which the same step has the same gradients again
                self._refuse(report, self._optimizer.updates, UNCHANGED, why, self._lower())
            report = self.report = replace(report, next_scale=scaler.shown)
        if not skipped:
            clipped = coefficient(math.sqrt(found[1]), self._clip or None)  # no worker's gradient is longer
            if self._parameters and found[1] * clipped**2 > np.finfo(self._parameters[0].master.dtype).max:
                self._refuse(report, self._optimizer.updates, UNCHANGED, f"the gradient norm is {norm:g}: {TOO_LONG}")
            if self._worker is not None and self._clip:
                clipped = coefficient(self._own_norm(self._worker, mine[1:2]), self._clip)
            self._rescale(inverses, clipped)
        return report

    def _own_norm(self, worker: Communicator, squares: Array) -> float:
        """Of the gradient of this rank's worker."""
        path = PATH.set("loss and norm")  # else a ledger would take the message for the optimizer's own
        total = float(worker.all_reduce(squares)[0])
        PATH.reset(path)
        return math.sqrt(total)

    def _measure(self, inverses: Sequence[float], losses: Sequence[Array] = ()) -> Array:
        """What ranks tell each other: the loss; the squares of the gradients that this rank counts; of each group
        whether one is not finite; whether the optimizer's state must not be used.

        A device is waited for once, for all of them.
        """
        mine = np.zeros(3 + len(inverses))
        counted, looks = set(self._counted), self._optimizer.look()
        self._grads = self._grads.renewed([p.grad for p in self._parameters])
        found = iter(floats([*looks, *losses, *found_squares(self._grads)]))
        mine[-1] = not self._optimizer.is_sound([next(found) for _ in looks])
        mine[0] = self._once_on_tp(added([next(found) for _ in losses]))
        for p, length in zip(self._parameters, found, strict=True):
            group = 0 if self._scaler is None else self._scaler.group(p)
            if not math.isfinite(length):
                mine[2 + group] = 1.0
            elif p in counted:
                mine[1] += length * inverses[group] ** 2
        return mine

    def _rescale(self, inverses: Sequence[float], clipped: float) -> None:
        """Take the scale off the gradients and clip them, in one pass."""
        if len(inverses) == 1:
            if inverses[0] * clipped != 1.0:
                scale([grad for flat in self._model.flats for grad in flat.updated], inverses[0] * clipped)
            return
        assert self._scaler is not None
        for p in self._parameters:
            scale([p.grad], inverses[self._scaler.group(p)] * clipped)

    def close(self, measured: Sequence[Measured]) -> list[StepReport]:
        """What the steps of a row did of which nobody knows yet: one small all-reduce, if there are any.

        Args:
            measured: in the passes of each step of the row.

        Raises:
            NumericsError: a loss or norm is not finite; on every rank, when weights were changed already.
        """
        if not self._waiting:
            return []
        answers = self._ask()
        mine = [
            (self._once_on_tp(added(floats(found.losses))), *norm, *answers, *self._counts_of(found))
            for found, (norm, _) in ((measured[number], waits) for number, waits in self._waiting.items())
        ]
        all_found = self._mesh.world.all_reduce(np.array(mine))
        reports = []
        for (number, (_, lr)), of_step in zip(self._waiting.items(), all_found, strict=True):
            (loss, total, bad, unsound), asked, counts = self._parted(of_step, 4)
            norm = math.nan if bad or unsound else math.sqrt(total)
            _, targets, rows, _ = measured[number]
            report = StepReport(mean(loss, targets), norm, lr, targets, rows=rows, counted=self._by_name(counts))
            reports.append(replace(report, asked=asked))
        self._waiting.clear()
        before = self._optimizer.updates - len(reports)
        for number, self.report in enumerate(reports):
            if not (math.isfinite(self.report.loss) and math.isfinite(self.report.grad_norm)):
                self._refuse(self.report, before + number, "Steps overlap: weights were changed before this was known.")
        return reports

    def settle(self) -> None:
        """The row is over: who looks at a weight sees the newest; the steps of a row that failed are forgotten."""
        self._waiting.clear()
        if self.versions is not None:
            self.versions.settle()

    def _counts_of(self, measured: Measured) -> Array:
        """What this rank counted, one vector after the other; zeros for what other stages count."""
        vectors = [np.zeros(0)]
        for name, length in self._model.counted.items():
            vectors.append(measured.counts.get(name, np.zeros(length)))
        return np.concatenate(vectors)

    def _parted(self, found: Array, own: int) -> tuple[Array, tuple[float, ...], Array]:
        """What ranks told each other: what every step has, what they were asked, and the counts."""
        end = len(found) - self._sums
        return found[:own], tuple(map(float, found[own:end])), found[end:]

    def _by_name(self, counts: Array) -> Mapping[str, tuple[float, ...]]:
        ends = np.cumsum([*self._model.counted.values()])
        return {
            name: tuple(map(float, counts[end - length : end]))
            for (name, length), end in zip(self._model.counted.items(), ends, strict=True)
        }

    def _once_on_tp(self, loss: float) -> float:
        """Ranks of a tp group hold the same loss; the first one's counts."""
        return loss if self._mesh.coords["tp"] == 0 else 0.0

    def _lower(self) -> str:
        """The way out of gradients that overflow; '' where there is no scale that could be lower."""
        scaler = self._scaler
        adapts = isinstance(scaler, LossScaler) and (scaler.window > 0 or scaler.scale > 1.0)
        return "a lower --loss-scale" if adapts else ""

    def _refuse(self, report: StepReport, updates: int, consequence: str, why: str = "", lower: str = "") -> None:
        """Raise for a step that came after so many updates; on every rank."""
        bad = self._mesh.world.exchange(first_not_finite(self._parameters))
        where = next((name for name in bad if name), "")
        what = f"the loss is {report.loss} and the gradient norm {report.grad_norm}: not finite"
        clipping = "" if self.versions is not None and self.versions.rule == "newest" else ", or --clip 1"
        way_out = f"a lower --lr, a longer --warmup{clipping}"
        raise NotFinite(f"after {updates} updates {why or what}", where, consequence, way_out, lower)

    def _counts(self, p: Any) -> bool:
        """Whether this rank counts a parameter in the norm: where it is neither cut nor local, the first rank does."""
        counted_everywhere = [axis for axis in p.spec.norm_axes() if axis != "pp" or not p.spec.tied]
        if self._worker is not None:
            counted_everywhere.append("edp")
        return all(index == 0 or axis in counted_everywhere for axis, index in self._mesh.coords.items())


def _joined(*ways: str) -> str:
    return ", ".join(way for way in ways if way)


def added(losses: Sequence[float]) -> float:
    """Their sum, one after the other: `sum` rounds otherwise from Python 3.12 on."""
    found = 0.0
    for loss in losses:
        found += loss
    return found


def mean(total: float, targets: int) -> float:
    """The mean over targets; 0 where there are none."""
    return float(total) / targets if targets else 0.0

"""The end of a step: the norm of its gradients, clipping, the optimizer, and what the step did.

In a step whose ranks all wait for its end they agree by one small all-reduce: the loss, and the squares of the
gradients.  Where steps overlap, the stages of a pipeline update at different times; nobody waits then, and the row ends
with one message about all its steps.  Clipping needs the norm of each step, so with it they meet at every update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.comm.mesh import Mesh
from mpitrain.errors import NumericsError, ScheduleError
from mpitrain.nn.module import Module
from mpitrain.optim.clip import clip, first_not_finite, sum_of_squares
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.versions import Versions


@dataclass(frozen=True)
class StepReport:
    """What one step did; the same on every rank.

    loss: mean over all valid targets of the step, in nats; grad_norm: global, before clipping; lr: used in this step;
    targets: how many counted.
    """

    loss: float
    grad_norm: float
    lr: float
    targets: int


class Update:
    """What STEP does on this rank.

    Args:
        model: whose gradients are final, and summed over ranks.
        optimizer: over its parameters.
        mesh: the layout.
        clip: largest global gradient norm; 0 leaves gradients alone.
        lr: learning rate by number of updates done; the optimizer's own constant unless given.
        rule: of the versions of the weights where steps overlap ("newest", "previous"); None: they do not.

    Attributes:
        versions: of the weights; None where steps do not overlap.
        report: of the last step of which it is known what it did, also where that was no good.

    Raises:
        ScheduleError: the rule does not go together with clipping or tied weights.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        mesh: Mesh,
        clip: float,
        lr: Callable[[int], float] | None,
        rule: str | None,
    ) -> None:
        if rule == "newest" and (clip or any(p.spec.tied for p in model.parameters())):
            raise ScheduleError(
                "stages that update with their newest weights do so at different times: no global norm is known, and"
                " tied weights cannot be kept equal.\nLeave out clip and tie no weights, or take versions='previous'."
            )
        self.versions = None if rule is None else Versions(model.flats, optimizer, rule)
        self.report: StepReport | None = None
        self._model = model
        self._optimizer = optimizer
        self._mesh = mesh
        self._clip = clip
        self._lr = lr
        self._counted = [p for p in model.parameters() if self._counts(p)]
        self._waiting: dict[int, tuple[float, float]] = {}  # step of the row -> squares of this rank, learning rate

    def make(self, number: int, loss: float, targets: int) -> StepReport | None:
        """Norm, clipping, optimizer.

        Args:
            number: of the step in its row.
            loss: sum over the targets of this rank.
            targets: of the step, over all ranks.

        Returns:
            What the step did; None where that is known at the end of the row only.

        Raises:
            NumericsError: loss or norm is not finite; on every rank, and no weight was changed.
        """
        lr = self._lr(self._optimizer.updates) if self._lr is not None else self._optimizer.lr
        report = None
        if self.versions is None or self._clip:
            report = self._agree(loss, targets, lr)
        else:
            self._waiting[number] = sum_of_squares(p.grad for p in self._counted), lr
        if self.versions is not None:
            self.versions.renew()
        self._optimizer.step(lr)
        if self.versions is not None:
            self._model.start_step()
        return report

    def _agree(self, loss: float, targets: int, lr: float) -> StepReport:
        """Norm over all ranks and clipping.  One small all-reduce; every rank gets the same bits."""
        mine, found = self._once_on_tp(loss), np.zeros(2)

        def sum_over_ranks(squares: float) -> float:
            found[:] = self._mesh.world.all_reduce(np.array([mine, squares]))
            return float(found[1])

        grads = [flat.grads for flat in self._model.flats]
        norm = clip((p.grad for p in self._counted), grads, self._clip or None, sum_over_ranks).norm
        report = self.report = StepReport(mean(found[0], targets), norm, lr, targets)
        self._refuse_if_not_finite(report, self._optimizer.updates, "No weight was changed by this step.")
        return report

    def close(self, losses: Sequence[float], targets: Mapping[int, int]) -> list[StepReport]:
        """What the steps of a row did of which nobody knows yet: one small all-reduce, if there are any.

        Args:
            losses: of each step of the row, the sum over the targets of this rank.
            targets: of each step, over all ranks.

        Raises:
            NumericsError: a loss or norm is not finite; on every rank, when weights were changed already.
        """
        if not self._waiting:
            return []
        mine = [(self._once_on_tp(losses[number]), squares) for number, (squares, _) in self._waiting.items()]
        found = self._mesh.world.all_reduce(np.array(mine))
        reports = []
        for (number, (_, lr)), (loss, squares) in zip(self._waiting.items(), found, strict=True):
            norm = math.sqrt(squares) if squares >= 0 else math.nan
            reports.append(StepReport(mean(loss, targets[number]), norm, lr, targets[number]))
        self._waiting.clear()
        before = self._optimizer.updates - len(reports)
        for number, self.report in enumerate(reports):
            self._refuse_if_not_finite(
                self.report, before + number, "Steps overlap: weights were changed before this was known."
            )
        return reports

    def settle(self) -> None:
        """The row is over: who looks at a weight sees the newest; the steps of a row that failed are forgotten."""
        self._waiting.clear()
        if self.versions is not None:
            self.versions.settle()

    def _once_on_tp(self, loss: float) -> float:
        """Ranks of a tp group hold the same loss; the first one's counts."""
        return loss if self._mesh.coords["tp"] == 0 else 0.0

    def _refuse_if_not_finite(self, report: StepReport, updates: int, consequence: str) -> None:
        """Raise for a step that came after so many updates, if its loss or norm is not finite."""
        loss, norm = report.loss, report.grad_norm
        if math.isfinite(norm) and math.isfinite(loss):
            return
        bad = self._mesh.world.exchange(first_not_finite(self._model.parameters()))
        where = next((f"; the first gradient that is not: {name}" for name in bad if name), "")
        clipping = "" if self.versions is not None and self.versions.rule == "newest" else ", or --clip 1"
        raise NumericsError(
            f"after {updates} updates the loss is {loss} and the gradient norm {norm}: not finite{where}.\n"
            f"{consequence}  Way out: a lower --lr, a longer --warmup{clipping}."
        )

    def _counts(self, p: Any) -> bool:
        """Whether this rank counts a parameter in the norm: where it is neither cut nor local, the first rank does."""
        counted_everywhere = [axis for axis in p.spec.norm_axes() if axis != "pp" or not p.spec.tied]
        return all(index == 0 or axis in counted_everywhere for axis, index in self._mesh.coords.items())


def mean(total: float, targets: int) -> float:
    """The mean over targets; 0 where there are none."""
    return float(total) / targets if targets else 0.0

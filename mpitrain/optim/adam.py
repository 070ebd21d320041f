"""AdamW: steps of about the learning rate in every weight, with weight decay kept out of the moments.

Paper: Kingma and Ba 2014, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2, with
the decay times the learning rate, as PyTorch does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpitrain import kernels
from mpitrain.backend import Array
from mpitrain.comm.mesh import Mesh
from mpitrain.kernels.several import AdamwRun, Several
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.elementwise import WINDOW, Elementwise, Keep
from mpitrain.optim.groups import Group
from mpitrain.optim.optimizer import require
from mpitrain.optim.runs import Run
from mpitrain.optim.windows import AHEAD


class Hyper(NamedTuple):
    """Numbers of an update: t, counted from 1; alpha; the decay rates of the moments; epsilon; lambda."""

    update: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def update(p: Array, g: Array, state: Sequence[Array], hyper: Hyper) -> None:
    """One update in place of the weights p and their moments (m, v) by the gradient g, which is kept.

        m = beta1 m + (1 - beta1) g                  v = beta2 v + (1 - beta2) g^2
        p = p - lr weight_decay p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    All are vectors of one length and dtype, passed over once.
    """
    m, v = state
    kernels.adamw(p, g, m, v, **hyper._asdict())


class AdamW(Elementwise):
    """Adam with decoupled weight decay; the same numbers as torch.optim.AdamW.

    Args:
        parameters: what to train.
        lr: learning rate of a `step` that is given none.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: applies to the parameters with `decay`.
        groups: other learning rates and decays by name (`mpitrain.optim.groups`).
        mesh: the layout; with groups, where not all parameters of the model are on this rank.
        keep, window, ahead: where the state lives, and how much of it is here at a time (`Elementwise`).

    Memory: two vectors of the masters' dtype.
    """

    kinds = ("first_moment", "second_moment")

    def __init__(
        self,
        parameters: Iterable[Parameter],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        groups: Sequence[Group] = (),
        mesh: Mesh | None = None,
        keep: Keep | None = None,
        window: int = WINDOW,
        ahead: int = AHEAD,
    ) -> None:
        super().__init__(
            parameters, lr=lr, weight_decay=weight_decay, groups=groups, mesh=mesh, keep=keep, window=window
        )
        for name, beta in zip(("beta1", "beta2"), betas, strict=True):
            require(name, beta, 0 <= beta < 1, "at least 0, below 1")
        require("eps", eps, eps >= 0, "0 or more")
        self.beta1, self.beta2 = betas
        self.eps = eps
        self._given: Sequence[Run] = ()
        self._together: Several[AdamwRun] = Several()  # the runs that were given last, with their state

    def _update_runs(self, runs: Sequence[Run], lr: float) -> None:
        if runs is not self._given:
            self._given = runs
            treated = ((run, *self._state_of(run), run.treatment) for run in runs)
            self._together = Several(
                [AdamwRun(run.weights, run.grads, m, v, run.halves, of.rate, of.decay) for run, m, v, of in treated]
            )
        kernels.adamw_runs(self._together, update=self.updates, lr=lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps)

    def _update(self, p: Array, g: Array, state: Sequence[Array], lr: float, decay: float) -> None:
        update(p, g, state, Hyper(self.updates, lr, self.beta1, self.beta2, self.eps, decay))

"""Stochastic gradient descent: plain, with momentum, or with Nesterov's look ahead.

Paper: Polyak 1964 (heavy ball); Sutskever et al. 2013, "On the importance of initialization and momentum in deep
learning", eq. 1 to 4, in the form that PyTorch uses: the velocity holds gradients, not steps, so a change of the
learning rate acts at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpitrain import kernels
from mpitrain.backend import Array
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ConfigError
from mpitrain.kernels.several import Several, SgdRun
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.elementwise import WINDOW, Elementwise, Keep
from mpitrain.optim.groups import Group
from mpitrain.optim.optimizer import require
from mpitrain.optim.runs import Run
from mpitrain.optim.windows import AHEAD


class Hyper(NamedTuple):
    """Numbers of an update.

    lr: learning rate; momentum: mu, 0 for none; nesterov: step by the velocity as it will be after the next decay;
    weight_decay: L2 penalty, part of the gradient.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


def update(p: Array, g: Array, state: Sequence[Array], hyper: Hyper) -> None:
    """One update in place of the weights p, and with momentum of their velocity (u), by the gradient g, which is kept.

        d = g + weight_decay p          u = mu u + d
        p = p - lr u                    or, with Nesterov,   p = p - lr (d + mu u)

    Without momentum u is d, and nothing is kept.  All are vectors of one length and dtype.
    """
    kernels.sgd(p, g, *(state or (None,)), **hyper._asdict())


class Sgd(Elementwise):
    """Gradient descent; the same numbers as torch.optim.SGD without dampening.

    Args:
        parameters: what to train.
        lr: learning rate of a `step` that is given none.
        momentum: mu in [0, 1); 0 keeps no state.
        nesterov: needs a momentum.
        weight_decay: applies to the parameters with `decay`.
        groups: other learning rates and decays by name (`mpitrain.optim.groups`).
        mesh: the layout; with groups, where not all parameters of the model are on this rank.
        keep, window, ahead: where the state lives, and how much of it is here at a time (`Elementwise`).

    Raises:
        ConfigError: Nesterov without momentum, or a value out of its range.

    Memory: one vector of the masters' dtype with momentum, none without.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        *,
        lr: float = 1e-3,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        groups: Sequence[Group] = (),
        mesh: Mesh | None = None,
        keep: Keep | None = None,
        window: int = WINDOW,
        ahead: int = AHEAD,
    ) -> None:
        require("momentum", momentum, 0 <= momentum < 1, "at least 0, below 1")
        if nesterov and momentum == 0:
            raise ConfigError("nesterov needs a momentum above 0; there is nothing to look ahead along.")
        self.kinds = ("velocity",) if momentum else ()
        self.momentum = momentum
        self.nesterov = nesterov
        self._given: Sequence[Run] = ()
        self._together: Several[SgdRun] = Several()  # the runs that were given last, with their state
        super().__init__(
            parameters, lr=lr, weight_decay=weight_decay, groups=groups, mesh=mesh, keep=keep, window=window
        )

    def _update_runs(self, runs: Sequence[Run], lr: float) -> None:
        if runs is not self._given:
            self._given = runs
            velocities = (self._state_of(run)[0] if self.kinds else None for run in runs)
            treated = ((run, u, run.treatment) for run, u in zip(runs, velocities, strict=True))
            self._together = Several(
                [SgdRun(run.weights, run.grads, u, run.halves, of.rate, of.decay) for run, u, of in treated]
            )
        kernels.sgd_runs(self._together, lr=lr, momentum=self.momentum, nesterov=self.nesterov)

    def _update(self, p: Array, g: Array, state: Sequence[Array], lr: float, decay: float) -> None:
        update(p, g, state, Hyper(lr, self.momentum, self.nesterov, decay))

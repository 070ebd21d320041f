"""AdamW: steps of about the learning rate in every weight, with weight decay kept out of the moments.

Paper: Kingma and Ba 2014, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2, with
the decay times the learning rate, as PyTorch does it.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpitrain import kernels
from mpitrain.backend import Array
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.optimizer import Optimizer, require


class AdamW(Optimizer):
    """Adam with decoupled weight decay; the same numbers as torch.optim.AdamW.

    Args:
        parameters: what to train.
        lr: learning rate of a `step` that is given none.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: applies to the parameters with `decay`.

    Memory: two vectors of the weights' dtype.
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
    ) -> None:
        super().__init__(parameters, lr=lr, weight_decay=weight_decay)
        for name, beta in zip(("beta1", "beta2"), betas, strict=True):
            require(name, beta, 0 <= beta < 1, "at least 0, below 1")
        require("eps", eps, eps >= 0, "0 or more")
        self.beta1, self.beta2 = betas
        self.eps = eps

    def _update(self, p: Array, g: Array, *state: Array, lr: float, decay: float) -> None:
        m, v = state
        kernels.adamw(
            p,
            g,
            m,
            v,
            update=self.updates,
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=decay,
        )

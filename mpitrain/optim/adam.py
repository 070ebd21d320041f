"""AdamW: steps of about the learning rate in every weight, with weight decay kept out of the moments.

Paper: Kingma and Ba 2014, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2, with
the decay times the learning rate, as PyTorch does it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from mpitrain.backend import Array, array_module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.optimizer import Optimizer, require


def adamw(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    scratch: Array,
    *,
    update: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One update in place of the weights p and the moments m and v by the gradient g.

        m = beta1 m + (1 - beta1) g                  v = beta2 v + (1 - beta2) g^2
        p = p - lr weight_decay p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    The corrections of the bias are folded into lr and eps, which saves a pass over the block.

    Args:
        p: weights, a vector.
        g: their gradient, of the same length and dtype; kept.
        m: first moment.
        v: second moment.
        scratch: a vector like them, overwritten.
        update: t, counted from 1.
        lr: learning rate, alpha in the paper.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled; lambda in the paper.
    """
    xp = array_module(p)
    correction = math.sqrt(1.0 - beta2**update)
    xp.multiply(m, beta1, out=m)
    xp.multiply(g, 1.0 - beta1, out=scratch)
    xp.add(m, scratch, out=m)
    xp.multiply(v, beta2, out=v)
    xp.multiply(g, g, out=scratch)
    xp.multiply(scratch, 1.0 - beta2, out=scratch)
    xp.add(v, scratch, out=v)
    if weight_decay:
        xp.multiply(p, 1.0 - lr * weight_decay, out=p)
    xp.sqrt(v, out=scratch)
    xp.add(scratch, eps * correction, out=scratch)
    xp.divide(m, scratch, out=scratch)
    xp.multiply(scratch, lr * correction / (1.0 - beta1**update), out=scratch)
    xp.subtract(p, scratch, out=p)


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

    def _update(self, p: Array, g: Array, *state_and_scratch: Array, lr: float, decay: float) -> None:
        m, v, scratch = state_and_scratch
        adamw(
            p,
            g,
            m,
            v,
            scratch,
            update=self.updates,
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=decay,
        )

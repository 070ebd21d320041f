"""Stochastic gradient descent: plain, with momentum, or with Nesterov's look ahead.

Paper: Polyak 1964 (heavy ball); Sutskever et al. 2013, "On the importance of initialization and momentum in deep
learning", in the form that PyTorch uses: the velocity holds gradients, not steps, so a change of the learning rate acts
at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpitrain.backend import Array, array_module
from mpitrain.errors import ConfigError
from mpitrain.kernels.blocks import vector_blocks
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.optimizer import Optimizer, require


def sgd(p: Array, g: Array, *, lr: float, weight_decay: float) -> None:
    """One update in place, p = p - lr (g + weight_decay p); g is kept."""
    xp = array_module(p)
    for block, scratch in vector_blocks(p):
        weights = p[block]
        if weight_decay:
            xp.multiply(weights, 1.0 - lr * weight_decay, out=weights)
        xp.multiply(g[block], lr, out=scratch)
        xp.subtract(weights, scratch, out=weights)


def momentum(p: Array, g: Array, u: Array, *, lr: float, mu: float, nesterov: bool, weight_decay: float) -> None:
    """One update in place of the weights p and the velocity u by the gradient g.

        d = g + weight_decay p          u = mu u + d
        p = p - lr u                    or, with Nesterov,   p = p - lr (d + mu u)

    Args:
        p: weights, a vector.
        g: their gradient, of the same length and dtype; kept.
        u: velocity.
        lr: learning rate.
        mu: momentum.
        nesterov: step by the velocity as it will be after the next decay.
        weight_decay: L2 penalty, part of the gradient.
    """
    xp = array_module(p)
    for block, scratch in vector_blocks(p):
        weights, d, velocity = p[block], g[block], u[block]
        if weight_decay:
            xp.multiply(weights, weight_decay, out=scratch)
            xp.add(scratch, d, out=scratch)
            d = scratch
        xp.multiply(velocity, mu, out=velocity)
        xp.add(velocity, d, out=velocity)
        if nesterov:
            # p - lr d first, while scratch still holds d, then p - lr mu u.
            xp.multiply(d, lr, out=scratch)
            xp.subtract(weights, scratch, out=weights)
            xp.multiply(velocity, lr * mu, out=scratch)
        else:
            xp.multiply(velocity, lr, out=scratch)
        xp.subtract(weights, scratch, out=weights)


class Sgd(Optimizer):
    """Gradient descent; the same numbers as torch.optim.SGD without dampening.

    Args:
        parameters: what to train.
        lr: learning rate of a `step` that is given none.
        momentum: mu in [0, 1); 0 keeps no state.
        nesterov: needs a momentum.
        weight_decay: applies to the parameters with `decay`.

    Raises:
        ConfigError: Nesterov without momentum, or a value out of its range.

    Memory: one vector of the weights' dtype with momentum, none without.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        *,
        lr: float = 1e-3,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        require("momentum", momentum, 0 <= momentum < 1, "at least 0, below 1")
        if nesterov and momentum == 0:
            raise ConfigError("nesterov needs a momentum above 0; there is nothing to look ahead along.")
        self.kinds = ("velocity",) if momentum else ()
        self.momentum = momentum
        self.nesterov = nesterov
        super().__init__(parameters, lr=lr, weight_decay=weight_decay)

    def _update(self, p: Array, g: Array, *state: Array, lr: float, decay: float) -> None:
        if self.momentum:
            (u,) = state
            momentum(p, g, u, lr=lr, mu=self.momentum, nesterov=self.nesterov, weight_decay=decay)
        else:
            sgd(p, g, lr=lr, weight_decay=decay)

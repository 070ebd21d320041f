"""How tokens find their experts: the numbers of a mixture of experts, and the places that an expert has.

A layer of experts replaces the MLP of a block.  A router gives each token a probability for each expert, the token goes
to the likeliest, and what comes back is weighted with that probability.

    switch    top 1, weight p                                                  Fedus et al. 2021, arXiv:2101.03961
    gshard    top 2, weights p1/(p1+p2) and p2/(p1+p2); the second expert is used with probability
              min(1, 2 p2/(p1+p2))                                             Lepikhin et al. 2020, arXiv:2006.16668
    topk      top k, weights p, or p over their sum                            Shazeer et al. 2017, arXiv:1701.06538

In training an expert takes a limited number of tokens of each row of the batch, its capacity; those that come too late
are dropped: they pass by the layer on the residual stream.  The group of tokens that compete is one row of the batch,
whatever the layout, so every layout drops the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError

ROUTERS = ("switch", "gshard", "topk")
DEFAULT_CAPACITY = 1.25
DEFAULT_BALANCE = 0.01


def usual_router(top_k: int) -> str:
    """The router of so many experts a token, where none is named."""
    return {1: "switch", 2: "gshard"}.get(top_k, "topk")


def usual_balance(router: str, experts: int) -> float:
    """The coefficient of the balance loss, where none is given: the same pressure for every router.

    GShard's loss has a factor 1/E where Switch's has E, so its coefficient is E^2 times as large.
    """
    return DEFAULT_BALANCE * (experts**2 if router == "gshard" else 1)


def _found() -> Any:
    """A field that may be left out: what it is then follows from the others."""
    return field(default=None)


@dataclass(frozen=True)
class Routing:
    """The numbers of a mixture of experts.

    Attributes:
        experts: E, in each layer that has them.
        top_k: k, experts of a token; where it is not given 1, for gshard 2.
        router: switch (k = 1), gshard (k = 2) or topk; where it is not given, by k.
        capacity_factor: places of all experts together, as a multiple of the k T choices of a row's T tokens; None:
            dropless, an expert takes all that come.
        renormalize: topk: whether a token's weights sum to 1.
        balance_loss: coefficient of the loss that spreads tokens over experts, in the router's own definition; where it
            is not given `usual_balance`.
        z_loss: coefficient of the mean square of the log of the router's partition function (Zoph et al. 2022,
            arXiv:2202.08906, equation 5).
        jitter: in training the router's input is multiplied with uniform numbers in [1 - jitter, 1 + jitter].
        every: 1: all blocks have experts; 2: the second, fourth, sixth ...; 3: the third, sixth ...

    Raises:
        ConfigError: numbers that do not go together.
    """

    experts: int
    top_k: int = _found()
    router: str = _found()
    capacity_factor: float | None = DEFAULT_CAPACITY
    renormalize: bool = False
    balance_loss: float = _found()
    z_loss: float = 0.0
    jitter: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        given = {"experts": self.experts, "top_k": self.top_k, "every": self.every}
        for name, value in given.items():
            if not (value is None and name == "top_k") and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise ConfigError(f"Routing: {name} {value!r} must be a whole number.")
        # The class is frozen for its users; here it is still being made.
        if self.top_k is None:
            object.__setattr__(self, "top_k", 2 if self.router == "gshard" else 1)
        if self.router is None:
            object.__setattr__(self, "router", usual_router(self.top_k))
        if self.balance_loss is None:
            object.__setattr__(self, "balance_loss", usual_balance(self.router, self.experts))
        if self.experts < 1 or not 1 <= self.top_k <= self.experts:
            raise ConfigError(f"--top-k {self.top_k} of --experts {self.experts}: a token has from 1 to all of them.")
        if self.router not in ROUTERS:
            raise ConfigError(f"--router {self.router}: there are {', '.join(ROUTERS)}.")
        only = {"switch": 1, "gshard": 2}.get(self.router, self.top_k)
        if self.top_k != only:
            raise ConfigError(
                f"--router {self.router} and --top-k {self.top_k}: its tokens have --top-k {only}; --router topk takes"
                " any number."
            )
        if self.renormalize and (self.router != "topk" or self.top_k == 1):
            why = (
                "gshard's weights sum to 1 anyway"
                if self.router == "gshard"
                else "a single weight would be 1, and the router would learn nothing from the loss"
            )
            raise ConfigError(f"--renormalize is for --router topk with 2 experts a token or more: {why}.")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ConfigError(f"--capacity-factor {self.capacity_factor}: must be above 0.")
        in_range = self.every >= 1, 0 <= self.jitter < 1, 0 <= self.balance_loss < math.inf, 0 <= self.z_loss < math.inf
        if not all(in_range):
            raise ConfigError(
                f"Routing: every {self.every}, jitter {self.jitter:g}, balance_loss {self.balance_loss:g} and z_loss"
                f" {self.z_loss:g} must be 1 or more, in [0, 1), and 0 or more."
            )

    @property
    def normalizes(self) -> bool:
        """Whether a token's weights sum to 1, before anything is dropped."""
        return self.renormalize or self.router == "gshard"

    @property
    def least_balance(self) -> float:
        """The balance loss of a router that uses all experts alike, in its own definition."""
        return self.experts**-2.0 if self.router == "gshard" else 1.0

    @property
    def counted_choices(self) -> int:
        """Choices of a token that count for the balance loss: the first, or all."""
        return self.top_k if self.router == "topk" else 1

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers for it."""
        return self.jitter > 0 or self.router == "gshard"

    def has_experts(self, block: int) -> bool:
        """Whether a block, by its global number, has experts."""
        return block % self.every == self.every - 1

    def layers(self, blocks: int) -> list[int]:
        """Numbers of the blocks with experts, of so many."""
        return [block for block in range(blocks) if self.has_experts(block)]

    def capacity(self, tokens: int) -> int:
        """Places of one expert for a row of so many tokens that are no padding: ceil(k T f / E), from 1 to T.

        The factor counts as the decimal number that it is written as, so 1.1 x 100 / 10 is 11 and not 12.  More than T
        are never used: a token chooses an expert once.

        Without a capacity factor T.
        """
        return int(self.capacities(np.array([tokens]))[0])

    def capacities(self, lengths: np.ndarray) -> np.ndarray:
        """`capacity` of each of several rows: int64, of the shape of `lengths`."""
        if self.capacity_factor is None:
            return lengths.astype(np.int64)
        tokens = lengths.astype(object)  # Python's integers: a factor of 16 digits would overflow others
        share = self._share
        wanted = -(-(tokens * share.numerator) // share.denominator)
        places: np.ndarray = np.minimum(tokens, np.maximum(wanted, 1)).astype(np.int64)
        return places

    @cached_property
    def _share(self) -> Fraction:
        """k f / E."""
        assert self.capacity_factor is not None
        return Fraction(repr(float(self.capacity_factor))) * self.top_k / self.experts

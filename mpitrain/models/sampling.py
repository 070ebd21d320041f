"""Which token comes next, from the scores of all: the likeliest, or a draw from the likely ones.

    scores / temperature  ->  the k highest  ->  of these the fewest whose probabilities come to p  ->  a draw

Draws come from the counter-based generator: a number depends on the seed, on which text it is and on the token's place
in it, and on nothing else.  So the same weights and seed write the same text on every layout, alone and among others.

Source: temperature, Ackley et al. 1985; the k highest, Fan et al. 2018, arXiv:1805.04833, section 5; the fewest that
come to p ("nucleus"), Holtzman et al. 2020, arXiv:1904.09751, section 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mpitrain.errors import ConfigError, NumericsError
from mpitrain.rng import absorb, stream_key, uniform


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: scores are divided by it: below 1 the likely becomes likelier; 0 takes the likeliest every time,
            and of equal ones that with the lowest number.
        top_k: only so many tokens with the highest scores are drawn from; None: all.
        top_p: of these only the fewest, likeliest first, whose probabilities together come to this; None: all.
        seed: of the draws.

    Raises:
        ConfigError: a number outside its range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature {self.temperature}: must be 0 or more, and finite.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k {self.top_k}: must be 1 or more, the number of tokens that are drawn from.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p}: must be above 0, up to 1, a sum of probabilities.")

    def choose(self, scores: np.ndarray, place: int) -> np.ndarray:
        """The next token of each of some texts.

        Args:
            scores: (b, vocab) of the token that comes next in each, finite.
            place: how many tokens were chosen before, of each text.

        Returns:
            int64 (b,).

        Raises:
            NumericsError: a score is not a finite number.

        Cost: a sort of the vocabulary with `top_p`, else a few passes over it.
        """
        if not np.isfinite(scores).all():
            raise NumericsError(
                f"the scores of token {place} are not finite numbers, so no token can be chosen: the weights are NaN or"
                " infinite, or too large for their dtype.\nTake a checkpoint from before the run went wrong, or another"
                " --dtype."
            )
        if self.temperature == 0:
            return scores.argmax(axis=1).astype(np.int64)
        cumulated = self.weights(scores).cumsum(axis=1)
        chances = uniform(absorb(_streams(self.seed, len(scores)), place), 1)
        return (cumulated < chances * cumulated[:, -1:]).sum(axis=1, dtype=np.int64)

    def weights(self, scores: np.ndarray) -> np.ndarray:
        """What each token is drawn in proportion to; 0 for those that are not.

        Args:
            scores: (b, vocab), finite; the temperature is above 0.

        Returns:
            float64 (b, vocab); the largest of each row is 1.
        """
        scores = scores.astype(np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        with np.errstate(over="ignore"):  # -inf is a weight of 0
            weights = np.exp(scores / self.temperature)
        k = scores.shape[1] if self.top_k is None else min(self.top_k, scores.shape[1])
        if self.top_p is None and k == scores.shape[1]:
            return weights
        order = np.argsort(-scores, axis=1, kind="stable")  # of equal scores the lower number comes first
        ordered = np.take_along_axis(weights, order, 1)
        ordered[:, k:] = 0.0
        if self.top_p is not None and self.top_p < 1:
            sums = ordered.cumsum(axis=1)
            enough = sums[:, :-1] >= self.top_p * sums[:, -1:]
            ordered[:, 1:][enough] = 0.0
        np.put_along_axis(weights, order, ordered, 1)
        return weights


@lru_cache(maxsize=8)
def _streams(seed: int, texts: int) -> np.ndarray:
    """The streams of draws of so many texts."""
    return np.array([stream_key(seed, "generate", *([text] if text else ())) for text in range(texts)])

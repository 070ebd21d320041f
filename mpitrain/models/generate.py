"""Text from a trained model: one token after the other, drawn from what the model expects next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpitrain.errors import ShapeError
from mpitrain.models.gpt import GPT
from mpitrain.rng import absorb, stream_key, uniform


def generate(
    model: GPT, prompt: Sequence[int], length: int, *, seed: int = 0, temperature: float = 0.8
) -> Iterator[int]:
    """Yield `length` tokens that continue `prompt`.

    The model sees the last `seq_len` tokens.  Draws come from the counter-based generator, so the same weights and seed
    give the same text on every layout.

    Args:
        model: a GPT; the ranks of one pp, tp and ep axis call together, those of ep because they hold experts for each
            other.
        prompt: token ids, at least one.
        temperature: scores are divided by it; 0 takes the likeliest token every time.

    Raises:
        ShapeError: the prompt is empty.

    Cost: one forward pass over at most seq_len tokens a token.
    """
    tokens = list(prompt)
    if not tokens:
        raise ShapeError("generate: a prompt has at least one token; a model of next tokens needs one to begin with.")
    key = stream_key(seed, "generate")
    for place in range(length):
        window = np.array([tokens[-model.config.seq_len :]], np.int64)
        scores = model.next_scores(window)[0].astype(np.float64)
        tokens.append(_draw(scores, temperature, float(uniform(absorb(key, place), 1)[..., 0])))
        yield tokens[-1]


def _draw(scores: np.ndarray, temperature: float, chance: float) -> int:
    """The token at `chance` in (0, 1) of the cumulated probabilities."""
    if temperature <= 0:
        return int(scores.argmax())
    weights = np.exp((scores - scores.max()) / temperature)
    cumulated = np.cumsum(weights)
    return int(np.searchsorted(cumulated, chance * cumulated[-1]))

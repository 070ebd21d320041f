"""Text from a trained model: one token after the other, chosen from what the model expects next.

    fill    all tokens of the prompts in one pass; their keys and values stay (mpitrain.models.cache)
    step    one more token of each text, with one query a head on what has stayed

A model sees `seq_len` tokens at most.  A text that is longer is seen without its beginning, and since its tokens then
have other positions all of it is looked at anew: for each token that is written, so that always the last `seq_len` are
seen; or after every `slide` of them, if as many may be forgotten at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpitrain.errors import ConfigError, DataError, ShapeError
from mpitrain.models.cache import Cache
from mpitrain.models.decoder import Decoder
from mpitrain.models.sampling import Sampling
from mpitrain.models.sizes import DecoderConfig


def generate(
    model: Decoder,
    prompt: Sequence[int],
    length: int,
    *,
    seed: int = 0,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    slide: int = 1,
) -> Iterator[int]:
    """Yield `length` tokens that continue one prompt; see `write` and `Sampling`."""
    sampling = Sampling(temperature, top_k, top_p, seed)
    yield from (int(token) for (token,) in write(model, [prompt], length, sampling, slide))


def write(
    model: Decoder, prompts: Sequence[Sequence[int]], length: int, sampling: Sampling, slide: int = 1
) -> Iterator[np.ndarray]:
    """Yield the next token of each of some texts, `length` times.

    What comes of a prompt depends on its place among the prompts and on nothing else of the others; the same weights
    and seed give the same texts on every layout.

    Args:
        model: the ranks of one pp, tp and ep axis call together, those of ep because they hold experts for each other.
        prompts: token ids of each, at least one of each.
        sampling: how tokens are chosen.
        slide: how many tokens a text forgets at a time when it is longer than the model sees: 1, so that always the
            last `seq_len` are seen, up to `seq_len`.

    Yields:
        int64 (len(prompts),).

    Raises:
        ShapeError: a prompt is empty; DataError: a token is none of the vocabulary; ConfigError: no such slide.

    Cost: a pass over the longest prompt, then over one token of each; of a text that is longer than `seq_len` every
        slide-th is a pass over up to `seq_len` of each.
    """
    texts = [list(prompt) for prompt in prompts]
    check_prompts(texts, model.config, slide)
    longest = model.config.seq_len
    cache: Cache | None = None
    starts: list[int] = []
    for place in range(length):
        found = [_start(len(text), longest, slide) for text in texts]
        if cache is None or found != starts:
            starts = found
            seen = [text[start:] for text, start in zip(texts, starts, strict=True)]
            lasts = [_start(len(text) + 1, longest, slide) == start for text, start in zip(texts, starts, strict=True)]
            cache = _cache(model, seen, min(longest, max(map(len, seen)) + length - place)) if all(lasts) else None
            scores = _fill(model, seen, cache)
        else:
            scores = model.step_scores(np.array([text[-1] for text in texts], np.int64), cache)
        if cache is not None:
            cache.advance()
        chosen = sampling.choose(scores, place)
        for text, token in zip(texts, chosen, strict=True):
            text.append(int(token))
        yield chosen


def _start(length: int, longest: int, slide: int) -> int:
    """The first token that is seen of a text of so many."""
    return -(-max(0, length - longest) // slide) * slide


def _cache(model: Decoder, seen: Sequence[Sequence[int]], capacity: int) -> Cache:
    """Room for what the layers of this rank keep."""
    layers = {block.attention.name: (block.attention.kv_heads, model.config.head_width) for block in model.blocks}
    return Cache(np.array(list(map(len, seen))), capacity, layers, model.like, model.config.window)


def _fill(model: Decoder, seen: Sequence[Sequence[int]], cache: Cache | None) -> np.ndarray:
    """Scores after the last token of each text, all tokens in one pass."""
    lengths = np.array(list(map(len, seen)))
    inputs = np.zeros((len(seen), int(lengths.max())), np.int64)
    for row, text in zip(inputs, seen, strict=True):
        row[: len(text)] = text
    return model.next_scores(inputs, cache, lengths - 1)


def check_prompts(prompts: Sequence[Sequence[int]], config: DecoderConfig, slide: int = 1) -> None:
    """Refuse what `write` cannot go on with; sends nothing, so that all ranks do alike.

    Raises:
        ShapeError: a prompt is empty; DataError: a token is none of the vocabulary; ConfigError: no such slide.
    """
    if not prompts or not all(prompts):
        raise ShapeError("generate: a prompt has at least one token; a model of next tokens needs one to begin with.")
    for prompt in prompts:
        if not 0 <= min(prompt) <= max(prompt) < config.vocab:
            odd = next(token for token in prompt if not 0 <= token < config.vocab)
            raise DataError(
                f"generate: token {odd} of a prompt is none of the model's {config.vocab:,}, which are 0 to"
                f" {config.vocab - 1}."
            )
    if not 1 <= slide <= config.seq_len:
        raise ConfigError(f"slide {slide}: of the {config.seq_len} tokens that a model sees it forgets 1 to all.")

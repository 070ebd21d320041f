"""The text at the end of a run: how the validation text begins, and what the model writes after that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from mpitrain.comm.mesh import Mesh
from mpitrain.data.corpus import Corpus
from mpitrain.errors import NumericsError
from mpitrain.generation.turns import in_turns, writes
from mpitrain.models.decoder import Decoder
from mpitrain.models.generate import generate

LOOKED_AT = 4096  # tokens among which a line end is looked for


def sample(model: Decoder, mesh: Mesh, corpus: Corpus, length: int, seed: int, timeout: float) -> str:
    """The beginning of the validation text, half a sequence long, and `length` tokens that the model adds.

    Collective over the world; the whole text is on the ranks that write.
    """
    start = _line_start(corpus)
    prompt = [int(token) for token in corpus.val[start : start + max(1, model.config.seq_len // 2)]]
    tokens = [*prompt, *continued(model, mesh, prompt, length, seed, timeout)]
    return " ".join(map(str, tokens)) if corpus.words is None else corpus.words.decode(tokens)


def _line_start(corpus: Corpus) -> int:
    """Where the first whole line of the validation text begins; 0 where nobody knows."""
    words, val = corpus.words, corpus.val[:LOOKED_AT]
    if words is None:
        return 0
    return next((i + 1 for i, token in enumerate(val) if words.decode([int(token)]).endswith("\n")), 0)


def continued(model: Decoder, mesh: Mesh, prompt: Sequence[int], length: int, seed: int, timeout: float) -> list[int]:
    """What the model writes after a prompt; nothing on ranks that only wait.  Collective over the world."""
    more = _while_finite(generate(model, prompt, length, seed=seed))
    return list(in_turns(more, length, mesh, writes(model, mesh), timeout))


def _while_finite(tokens: Iterator[int]) -> Iterator[int]:
    """No more tokens where the scores are no numbers: a run that has learned nothing still comes to its end."""
    with contextlib.suppress(NumericsError):
        yield from tokens

"""The text at the end of a run: how the validation text begins, and what the model writes after that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import numpy as np

from mpitrain.comm.mesh import Mesh
from mpitrain.data.corpus import Corpus
from mpitrain.models.generate import generate
from mpitrain.models.gpt import GPT
from mpitrain.recording.outside import heard

SHARE = 0.1  # of the longest that a message may wait: for about so long ranks that only wait hear nothing


def sample(model: GPT, mesh: Mesh, corpus: Corpus, length: int, seed: int, timeout: float) -> str:
    """The beginning of the validation text, half a sequence long, and `length` tokens that the model adds.

    Collective over the world; the whole text is on the ranks that write.
    """
    val, is_text = corpus.val, corpus.kind == "bytes"
    start = int(np.argmax(val[:4096] == ord("\n"))) + 1 if is_text and b"\n" in val[:4096].tobytes() else 0
    prompt = [int(token) for token in val[start : start + max(1, model.config.seq_len // 2)]]
    tokens = [*prompt, *continued(model, mesh, prompt, length, seed, timeout)]
    return bytes(tokens).decode("utf-8", errors="replace") if is_text else " ".join(map(str, tokens))


def continued(model: GPT, mesh: Mesh, prompt: Sequence[int], length: int, seed: int, timeout: float) -> list[int]:
    """What the model writes after a prompt; nothing on ranks that only wait.

    Every replica holds the same weights, so the ranks of one pipeline, tp axis and set of experts write; with zero 3,
    where each holds some rows only, all do.  The others hear of it every now and then: however long it takes, no
    message waits for as long as `timeout`.

    Collective over the world.
    """
    writes = model.zero == 3 or all(index == 0 for axis, index in mesh.coords.items() if axis not in ("pp", "tp", "ep"))
    more = generate(model, prompt, length, seed=seed)
    written: list[int] = []
    done, size = 0, 1
    while done < length:
        began = time.perf_counter()
        if writes:
            written += islice(more, size)
        seconds = time.perf_counter() - began
        slowest = max(mesh.world.exchange(heard("seconds of writing", lambda seconds=seconds: seconds)))
        done += size
        size = min(length - done, max(1, int(size * SHARE * timeout / max(slowest, 1e-9))))
    return written

"""Tokens a second that a model writes after a prompt, mpitrain's and PyTorch's, each with a cache of keys and values.

    python benchmarks/generation.py --rounds 5

The same GPT of size S with the same weights, one thread, one text, greedy: a prompt of 16 tokens is filled in, and 112
are written.  PyTorch has its cache twice: one that is as long as the model's sequence from the start and is written in
place, and one that grows by `torch.cat`; the faster one counts.  Both sides in this process and by turns.
"""

from __future__ import annotations

import mpitrain  # noqa: F401 - before NumPy

# isort: split
import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sides import SIZES
from torch.nn import functional
from twin_gpt import TwinGPT, load_initial_values

from mpitrain import kernels
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.models.generate import generate
from mpitrain.models.gpt import GPT, GPTConfig

PROMPT, LENGTH = 16, 112  # together the whole sequence
SEED = 0

Writes = Callable[[list[int], int], list[int]]
"""(prompt, how many) -> the tokens that come after it."""


class Peer:
    """The twin, with a cache.

    Args:
        twin: the model.
        config: its sizes.
        grows: whether keys and values are joined to those before, or written into room that is there from the start.
    """

    def __init__(self, twin: TwinGPT, config: GPTConfig, grows: bool) -> None:
        self.twin, self.config, self.grows = twin.eval(), config, grows
        self.kept: list[list[torch.Tensor]] = []

    @torch.inference_mode()
    def write(self, prompt: list[int], length: int) -> list[int]:
        config, d = self.config, self.config.width // self.config.heads
        room = (1, config.heads, 0 if self.grows else config.seq_len, d)
        self.kept = [[torch.empty(room), torch.empty(room)] for _ in range(config.layers)]
        tokens, written = torch.tensor([prompt]), []
        for place in range(length):
            at = 0 if place == 0 else len(prompt) + place - 1
            tokens = self._scores(tokens, at).argmax(dim=-1, keepdim=True)
            written.append(int(tokens))
        return written

    def _scores(self, tokens: torch.Tensor, at: int) -> torch.Tensor:
        """(1, vocab) after the last of some tokens, of which the first stands at this place."""
        twin = self.twin
        x = twin.table(tokens) + twin.positions.weight[at : at + tokens.shape[1]]
        for block, kept in zip(twin.blocks, self.kept, strict=True):
            x = x + self._attention(block.attention, block.norm1(x), kept, at)
            x = x + block.mlp(block.norm2(x))
        assert twin.head is not None
        return twin.head(twin.norm(x[:, -1]))

    def _attention(self, layer: Any, x: torch.Tensor, kept: list[torch.Tensor], at: int) -> torch.Tensor:
        _, s, width = x.shape
        q, k, v = (part.view(1, s, layer.heads, -1).transpose(1, 2) for part in layer.qkv(x).split(width, dim=2))
        for number, new in enumerate((k, v)):
            if self.grows:
                kept[number] = torch.cat([kept[number], new], dim=2)
            else:
                kept[number][:, :, at : at + s] = new
        keys, values = (each[:, :, : at + s] for each in kept)
        y = functional.scaled_dot_product_attention(q, keys, values, is_causal=s > 1)
        return layer.proj(y.transpose(1, 2).reshape(1, s, width))


def sides() -> dict[str, Writes]:
    """The ways to write, of the same weights."""
    sizes = {name: value for name, value in SIZES["S"].items() if name != "batch"}
    config = GPTConfig(**sizes)
    model = GPT(config, Mesh(world()), seed=SEED)
    twin = TwinGPT(config)
    load_initial_values(twin, config, SEED)
    return {
        "mpitrain": lambda prompt, length: list(generate(model, prompt, length, temperature=0)),
        "torch, in place": Peer(twin, config, grows=False).write,
        "torch, growing": Peer(twin, config, grows=True).write,
    }


def measure(rounds: int) -> dict[str, Any]:
    """Tokens a second: side -> one a round.

    Raises:
        AssertionError: they do not write the same, so it is not the same model.
    """
    ways = sides()
    prompt = np.random.default_rng(0).integers(256, size=PROMPT).tolist()
    texts = {name: write(prompt, LENGTH) for name, write in ways.items()}
    assert all(text == texts["mpitrain"] for text in texts.values()), texts
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 == 0 else list(reversed(ways)):
            clock, cpu = time.perf_counter(), time.process_time()
            ways[name](prompt, LENGTH)
            cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
            found[name].append({"tokens_per_s": LENGTH / clock, "cpu_ms_per_token": 1e3 * cpu / LENGTH})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"rounds": measure(options.rounds), "kernels": kernels.level(), "length": LENGTH}))


if __name__ == "__main__":
    main()

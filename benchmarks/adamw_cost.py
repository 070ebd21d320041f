"""Nanoseconds a parameter of one AdamW update, mpitrain's and PyTorch's fused one, on the same parameter lists.

    python benchmarks/adamw_cost.py --rounds 5

The parameters are those of whole models, with their real shapes, weight decay on matrices and embeddings only.  Both
optimizers live in this process and take turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from mpitrain.backend import keep_freed_memory
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import AdamW

MODELS = {
    "3 M": GPTConfig(layers=4, width=256, heads=4, seq_len=128),
    "20 M": GPTConfig(layers=6, width=512, heads=8, seq_len=256),
}
STRETCH_S = 0.25
LR, BETAS, WEIGHT_DECAY = 1e-4, (0.9, 0.99), 0.1


class Optimizers(NamedTuple):
    """size: number of weights; updates: side -> one update; pairs: each parameter with its counterpart in PyTorch."""

    size: int
    updates: dict[str, Callable[[], Any]]
    pairs: list[tuple[Parameter, torch.Tensor]]


def optimizers(config: GPTConfig) -> Optimizers:
    """Both sides on the parameters of a model, with gradients of ordinary size."""
    parameters = GPT(config, Mesh(world())).parameters()
    draws = np.random.default_rng(0)
    pairs = []
    for p in parameters:
        p.grad[...] = draws.normal(0, 1e-3, p.data.shape)
        p.touched = True
        tensor = torch.tensor(p.data, requires_grad=True)
        tensor.grad = torch.tensor(p.grad)
        pairs.append((p, tensor))
    mine = AdamW(parameters, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    groups = [
        {"params": [tensor for p, tensor in pairs if p.decay is decay], "weight_decay": WEIGHT_DECAY if decay else 0.0}
        for decay in (True, False)
    ]
    peer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    updates: dict[str, Callable[[], Any]] = {"mpitrain": mine.step, "torch": peer.step}
    return Optimizers(sum(p.data.size for p in parameters), updates, pairs)


def seconds_of(update: Callable[[], Any], repeats: int) -> float:
    """Of one update."""
    start = time.perf_counter()
    for _ in range(repeats):
        update()
    return (time.perf_counter() - start) / repeats


def measure(rounds: int) -> dict[str, Any]:
    """ns a parameter: model -> side -> one a round."""
    result: dict[str, Any] = {}
    for name, config in MODELS.items():
        size, updates, _ = optimizers(config)
        repeats = max(3, round(STRETCH_S / max(seconds_of(update, 3) for update in updates.values())))
        found: dict[str, list[float]] = {side: [] for side in updates}
        for number in range(rounds):
            for side in list(updates) if number % 2 == 0 else list(reversed(updates)):
                seconds_of(updates[side], 1)
                found[side].append(1e9 * seconds_of(updates[side], repeats) / size)
        result[name] = {"parameters": size, "ns": found}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(json.dumps({"models": measure(options.rounds)}))


if __name__ == "__main__":
    main()

"""What is written on any layout, which every rank of a world checks: by tests/local on threads, by tests/mpi on MPI.

The oracle is the rule itself: for each token a pass over the last `seq_len` tokens, without a cache, on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as remembered
from typing import Any

import numpy as np

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.generation.turns import in_turns, writes
from mpitrain.models.decoder import Decoder
from mpitrain.models.families import build
from mpitrain.models.generate import write
from mpitrain.models.gpt import GPTConfig
from mpitrain.models.llama import LlamaConfig
from mpitrain.models.sampling import Sampling
from mpitrain.models.sizes import DecoderConfig
from mpitrain.routing import Routing

SIZES: dict[str, Any] = {"vocab": 19, "layers": 4, "width": 32, "heads": 4, "seq_len": 16}
CONFIGS: dict[str, DecoderConfig] = {
    "gpt": GPTConfig(**SIZES),
    "gpt, tied, groups": GPTConfig(**SIZES, tied=True, kv_heads=2),
    "experts": GPTConfig(**SIZES, routing=Routing(4, top_k=2)),
    "llama": LlamaConfig(**SIZES),
    "llama, one head": LlamaConfig(**SIZES, kv_heads=1, tied=True),
    "llama, window": LlamaConfig(**SIZES, kv_heads=2, window=5),
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 0, 0, 12], [7]]
LENGTH = 17  # all texts become longer than the model sees
SAMPLING = Sampling(0.9, top_k=15, top_p=0.98, seed=3)

LAYOUTS: dict[int, list[tuple[dict[str, int], dict[str, Any]]]] = {
    2: [
        ({"tp": 2}, {}),
        ({"tp": 2}, {"sequence_parallel": True}),
        ({"pp": 2}, {}),
        ({"dp": 2}, {}),
        ({"dp": 2}, {"zero": 3}),
        ({"cp": 2}, {}),
        ({"ep": 2}, {}),
    ],
    4: [
        ({"tp": 4}, {"sequence_parallel": True}),
        ({"tp": 2, "pp": 2}, {}),
        ({"pp": 4}, {}),
        ({"dp": 2, "tp": 2}, {"zero": 3}),
        ({"ep": 2, "tp": 2}, {}),
        ({"cp": 2, "pp": 2}, {}),
    ],
    8: [
        ({"pp": 2, "tp": 2, "dp": 2, "ep": 2}, {"sequence_parallel": True}),
        ({"pp": 2, "dp": 2, "tp": 2}, {"zero": 3}),
    ],
}


def model_of(name: str, mesh: Mesh, **how: Any) -> Decoder:
    """A model whose scores are far apart, so that texts have something to differ in."""
    model = build(CONFIGS[name], mesh, **{"dtype": np.float64, "seed": 5, **how})
    for share in model.shares():
        if len(share.full_shape) > 1:
            share.master[...] *= 3.0
    for flat in model.flats:
        flat.refresh()
    return model


def by_the_rule(model: Decoder, prompt: list[int], row: int, sampling: Sampling, length: int) -> list[int]:
    """The text, every token from a pass of its own over the last `seq_len`."""
    tokens = list(prompt)
    for place in range(length):
        scores = model.next_scores(np.array([tokens[-model.config.seq_len :]]))
        tokens.append(int(sampling.choose(np.repeat(scores, row + 1, axis=0), place)[row]))
    return tokens[len(prompt) :]


@remembered
def expected(name: str) -> list[list[int]]:
    """The texts of one rank, without a cache."""

    def main() -> list[list[int]]:
        model = model_of(name, Mesh(world()))
        return [by_the_rule(model, prompt, row, SAMPLING, LENGTH) for row, prompt in enumerate(PROMPTS)]

    return LocalWorld(1).run(main)[0]


def written(model: Decoder, mesh: Mesh, slide: int = 1) -> list[list[int]]:
    """The texts on this layout; nothing on ranks that wait."""
    tokens = write(model, PROMPTS, LENGTH, SAMPLING, slide)
    found = list(in_turns(tokens, LENGTH, mesh, writes(model, mesh), timeout=60.0))
    return np.array(found).T.tolist()


def fits(name: str, sizes: dict[str, int]) -> bool:
    """Whether a model can lie so, and differs from what it is without."""
    groups, tp = CONFIGS[name].groups, sizes.get("tp", 1)
    return (groups % tp == 0 or tp % groups == 0) and (sizes.get("ep", 1) == 1 or name == "experts")


def check_texts(world: World, name: str, sizes: dict[str, int], how: dict[str, Any]) -> None:
    """They are those of one rank."""
    mesh = Mesh(world, **sizes)
    model = model_of(name, mesh, **how)
    found = written(model, mesh)
    assert found == (expected(name) if writes(model, mesh) else []), (name, sizes, how)


def every_model_writes_as_on_one_rank(world: World) -> None:
    for name in CONFIGS:
        for sizes, how in LAYOUTS[world.size]:
            if fits(name, sizes):
                check_texts(world, name, sizes, how)


def every_layout_writes_as_one_rank(world: World) -> None:
    """Each with one of the models."""
    names = list(CONFIGS)
    for number, (sizes, how) in enumerate(LAYOUTS[world.size]):
        check_texts(world, next(x for x in names[number % 6 :] + names if fits(x, sizes)), sizes, how)


def ranks_that_wait_hear_of_the_end(world: World) -> None:
    mesh = Mesh(world, dp=world.size)
    model = model_of("gpt", mesh)
    here, count = writes(model, mesh), []
    for _ in in_turns(write(model, PROMPTS[:1], 200, SAMPLING), 200, mesh, here, 1e-9, lambda: len(count) >= 7):
        count.append(1)
    assert here == (mesh.coords["edp"] == 0)
    assert len(count) == (7 if here else 0)


def all_ranks_hear_that_a_reader_has_gone(world: World) -> None:
    mesh = Mesh(world, dp=world.size)
    model = model_of("gpt", mesh)
    here, count, asked = writes(model, mesh), [], []

    def unread() -> bool:
        asked.append(1)
        return world.rank == world.size - 1 and len(asked) >= 5

    for _ in in_turns(write(model, PROMPTS[:1], 200, SAMPLING), 200, mesh, here, 1e-9, unread=unread):
        count.append(1)
    assert len(asked) == 5
    assert len(count) == (5 if here else 0)


CHECKS: list[Callable[[World], None]] = [
    every_layout_writes_as_one_rank,
    ranks_that_wait_hear_of_the_end,
    all_ranks_hear_that_a_reader_has_gone,
]

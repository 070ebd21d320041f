"""Frozen weights on any layout are those of one rank, and what is sent and held of them is what was predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from checks_layouts import LLAMA, SIZES, equals_one_rank
from checks_ledger import SIZES as SENT
from checks_ledger import sends_what_was_predicted
from checks_memory import SIZES as HELD
from checks_memory import holds_what_was_predicted

from mpitrain.comm.world import World
from mpitrain.routing import Routing

DEEP = replace(SIZES, layers=4)
TIED = replace(DEEP, tied=True)
GROUPED = replace(DEEP, kv_heads=2)
EXPERTS = replace(DEEP, routing=Routing(4, top_k=2))
DEEP_LLAMA = replace(LLAMA, layers=4)

FIRST = ("table", "positions", "blocks.0")
"""The first of four stages, or half of the first of two, has nothing to train."""
HEAD = ("*", "!head")
SOME = ("blocks.1", "*.bias")
BETWEEN = ("*", "!blocks.3.norm2.weight", "!blocks.1.attention.proj.bias")
"""Backward ends within a block."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 pp2 zero 3 first": {"dp": 2, "pp": 2, "zero": 3, "micros": 2, "bucket_bytes": 512, "freeze": FIRST},
    "pp4 first": {"pp": 4, "micros": 2, "freeze": FIRST},
    "tp2 sp dp2 zero 3 some": {"tp": 2, "sp": True, "dp": 2, "zero": 3, "prefetch": 2, "freeze": SOME},
    "dp4 zero 1 head": {"dp": 4, "zero": 1, "freeze": HEAD},
    "dp2 tp2 zero 2 between": {"dp": 2, "tp": 2, "zero": 2, "micros": 2, "freeze": BETWEEN},
    "cp2 tp2 between": {"cp": 2, "tp": 2, "freeze": BETWEEN},
    "cp2 ulysses some": {"cp": 2, "kind": "ulysses", "freeze": SOME},
    "cp2 rsa first": {"cp": 2, "kind": "rsa", "freeze": FIRST},
    "pp2 dp2 zb-h1 zero 3": {
        **{"pp": 2, "dp": 2, "micros": 2, "schedule": "zb-h1", "zero": 3},
        **{"recompute": ("blocks.*",), "freeze": ("*", "!*.bias")},
    },
    "pp2 dp2 interleaved": {
        **{"pp": 2, "dp": 2, "micros": 4, "schedule": "interleaved", "chunks": 2},
        **{"bucket_bytes": 512, "freeze": FIRST},
    },
    "pp2 terapipe": {"pp": 2, "micros": 2, "schedule": "terapipe", "slices": (6, 1, 9), "freeze": BETWEEN},
    "pp2 dp2 made again": {"pp": 2, "dp": 2, "micros": 2, "recompute": ("blocks.*.mlp", "blocks.0"), "freeze": SOME},
    "pp4 dp2 adafactor": {"pp": 4, "dp": 2, "micros": 2, "adafactor": True, "zero": 3, "freeze": FIRST},
    "pp2 dp2 sgd, a scaled loss": {"pp": 2, "dp": 2, "sgd": True, "scaling": "loss", "freeze": HEAD},
    "pp2 dp2 tied": {"pp": 2, "dp": 2, "micros": 2, "sizes": TIED, "freeze": ("blocks.0", "positions")},
    "pp2 dp2 tied and frozen": {"pp": 2, "dp": 2, "zero": 3, "micros": 2, "sizes": TIED, "freeze": FIRST},
    "tp4 two heads of keys": {"tp": 4, "sp": True, "sizes": GROUPED, "freeze": ("*.kv", "blocks.0")},
    "dp2 ep2 pp2 experts": {"dp": 2, "ep": 2, "pp": 2, "micros": 2, "sizes": EXPERTS, "freeze": ("*.experts", "table")},
    "dp2 ep2 a router": {"dp": 2, "ep": 2, "sizes": EXPERTS, "overlap": True, "freeze": ("*", "!blocks.1.mlp.router")},
    "dp2 pp2 llama": {"dp": 2, "pp": 2, "micros": 2, "zero": 3, "sizes": DEEP_LLAMA, "freeze": ("table", "blocks.0")},
    "tp2 cp2 llama": {"tp": 2, "cp": 2, "sp": True, "sizes": DEEP_LLAMA, "freeze": ("blocks.1.mlp.gate", "*.norm1")},
}
"""Name -> how to train."""
BY_DEFAULT = ("dp2 pp2 zero 3 first", "cp2 tp2 between")

BOOKS: dict[str, dict[str, Any]] = {
    "dp2 pp2 zero 3": {
        "dp": 2,
        "pp": 2,
        "zero": 3,
        "microbatches": 2,
        "freeze": (*FIRST, "blocks.1", "blocks.2.norm1"),
    },
    "tp2 sp": {"tp": 2, "dp": 2, "sequence_parallel": True, "freeze": BETWEEN},
    "cp2": {"cp": 2, "dp": 2, "dtype": np.float16, "freeze": SOME},
    "cp2 rsa": {"cp": 2, "cp_attention": "rsa", "tp": 2, "freeze": HEAD},
    "pp4": {"pp": 4, "microbatches": 2, "recompute": "full", "freeze": ("table", "positions", "blocks.0", "blocks.1")},
    "zb-h1": {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "zb-h1", "zero": 3, "freeze": ("*", "!*.bias")},
    "parts": {
        **{"pp": 2, "tp": 2, "recomputed": frozenset(("blocks.1.attention", "blocks.2.mlp", "blocks.3"))},
        **{"freeze": ("table", "positions", "blocks.0", "blocks.1.norm1", "blocks.2.mlp.up")},
    },
}
"""What is sent and held, to the byte."""
BOOKS_BY_DEFAULT = ("dp2 pp2 zero 3", "parts")


def equals(world: World, name: str) -> None:
    equals_one_rank(world, **{"sizes": DEEP, "steps": 2, **LAYOUTS[name]})


def sends(world: World, name: str) -> None:
    sends_what_was_predicted(world, replace(SENT, layers=4), **BOOKS[name])


def holds(world: World, name: str) -> None:
    holds_what_was_predicted(world, replace(HELD, layers=4), **BOOKS[name])


def at_the_ends_of_a_pipeline(world: World) -> None:
    """For real MPI: stages without a backward, a tied table that is frozen, rows of weights; four ranks."""
    equals_one_rank(world, sizes=DEEP, steps=2, pp=4, micros=2, freeze=FIRST)
    equals_one_rank(world, sizes=TIED, steps=2, pp=2, dp=2, micros=2, zero=3, freeze=FIRST)


CHECKS = [at_the_ends_of_a_pipeline]

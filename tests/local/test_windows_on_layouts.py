"""Sliding windows and packed documents: any layout is one rank, in loss, gradients, weights and moments."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_layouts as checks

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world

slow = pytest.mark.slow
GPT, LLAMA = replace(checks.SIZES, window=5), replace(checks.LLAMA, window=7)
ALL = [
    pytest.param(layout, id=checks.name_of(layout), marks=slow)
    for ranks in (2, 4)
    for pp in (1, 2)
    for layout in checks.layouts(ranks, pp)
    if pp < ranks
]
SLICES = {"pp": 2, "micros": 2, "schedule": "terapipe", "slices": (3, 7, 6)}


def run(layout, **how):
    ranks = 1
    for axis in ("pp", "dp", "tp", "cp"):
        ranks *= layout.get(axis, 1)
    LocalWorld(ranks).run(lambda: checks.equals_one_rank(world(), **layout, **how))


@pytest.mark.parametrize("layout", [{"cp": 4}, SLICES, *ALL])
def test_a_window(layout):
    run(layout, sizes=LLAMA)


@pytest.mark.parametrize("layout", [{"cp": 2, "tp": 2, "sp": True}, pytest.param(SLICES, marks=slow), *ALL])
def test_documents_in_windows(layout):
    """With learned positions, which count from the first token of a document."""
    run(layout, sizes=GPT, documents=True)


@slow
@pytest.mark.parametrize("sizes", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("kind", ["ulysses", "rsa"])
def test_other_kinds_of_context_attention(kind, sizes):
    run({"cp": 2, "kind": kind, "dp": 2}, sizes=sizes, documents=True)
    run({"cp": 2, "kind": kind, "tp": 2}, sizes=sizes)


@slow
@pytest.mark.parametrize("recompute", [(), ("blocks.*",)], ids=["", "recomputed"])
@pytest.mark.parametrize("sizes", [GPT, LLAMA], ids=["gpt", "llama"])
def test_zero_and_recomputation(sizes, recompute):
    run({"dp": 2, "tp": 2, "zero": 3, "recompute": recompute}, sizes=sizes, documents=True)

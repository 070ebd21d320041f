"""Every layout is the same training run as one rank: checks_layouts.py on ranks that are threads."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_layouts as checks

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world


def run(ranks, **how):
    LocalWorld(ranks).run(lambda: checks.equals_one_rank(world(), **how))


def cases(*ranks):
    return [
        pytest.param(n, layout, id=checks.name_of(layout) or "one rank") for n in ranks for layout in checks.layouts(n)
    ]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("ranks", "layout"), cases(1, 2, 4, 8))
def test_every_layout_is_the_same_run(ranks, layout, tied):
    """T2.2, T11.1, T11.3, T11.5, T13.1, T14.6, C39: with dropout; after each step replicas hold the same bits."""
    run(ranks, tied=tied, **layout)


@pytest.mark.parametrize(("ranks", "layout"), cases(3, 6))
def test_six_heads_on_three_and_six_ranks(ranks, layout):
    run(ranks, sizes=replace(checks.SIX, seq_len=36 if layout["cp"] in (3, 6) else 12), **layout)


@pytest.mark.parametrize("axis", ["dp", "tp", "cp"])
def test_five_ranks(axis):
    run(5, sizes=checks.FIVE, batch=20, **{axis: 5})


@pytest.mark.parametrize("kind", ["ulysses", "rsa"])
@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, {"cp": 2}), (4, {"cp": 4}), (8, {"cp": 2, "tp": 2, "sp": True}), (8, {"cp": 8})]
)
def test_every_kind_of_context_attention(ranks, layout, kind):
    run(ranks, kind=kind, micros=2, **layout)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, {"tp": 2}), (8, {"tp": 8, "sp": True}), (8, {"tp": 4, "cp": 2}), (4, {"cp": 4})]
)
def test_heads_of_keys_that_queries_share(ranks, layout, kv_heads):
    run(ranks, sizes=replace(checks.SIZES, kv_heads=kv_heads), **layout)


@pytest.mark.parametrize("micros", [2, 3])
def test_micro_batches(micros):
    run(8, micros=micros, dp=2, tp=2, cp=2, sp=True)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, {}), (2, {"tp": 2}), (4, {"cp": 4}), (8, {"dp": 2, "tp": 2, "cp": 2})]
)
def test_packed_documents_and_padding(ranks, layout, kind):
    run(ranks, documents=True, kind=kind, **layout)


@pytest.mark.parametrize("vocab", [1, 2, 257, 1003])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_any_vocabulary(vocab, tp, tied):
    """C34, T12.5: ranks that hold fewer words than others, or none."""
    run(tp, sizes=replace(checks.SIZES, vocab=vocab), tied=tied, tp=tp, steps=2)


@pytest.mark.parametrize("tp", [2, 4])
def test_the_vocabulary_of_gpt2(tp):
    sizes = checks.GPTConfig(vocab=50257, layers=1, width=4, heads=4, seq_len=4)
    run(tp, sizes=sizes, tied=True, tp=tp, steps=1, batch=8)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_on_four_ranks(check):
    LocalWorld(4).run(lambda: check(world()))

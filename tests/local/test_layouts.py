"""Every layout is the same training run as one rank: checks_layouts.py on ranks that are threads."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_layouts as checks
from often import some

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.errors import ShapeError, UserError
from mpitrain.models.generate import generate
from mpitrain.models.gpt import GPT
from mpitrain.optim.adam import AdamW
from mpitrain.parallel import context
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete


def run(ranks, **how):
    LocalWorld(ranks).run(lambda: checks.equals_one_rank(world(), **how))


def cases(*ranks):
    return [
        pytest.param(n, layout, id=checks.name_of(layout) or "one rank") for n in ranks for layout in checks.layouts(n)
    ]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("ranks", "layout"), some(cases(1, 2, 4, 8), 5))
def test_every_layout_is_the_same_run(ranks, layout, tied):
    """T2.2, T11.1, T11.3, T11.5, T13.1, T14.6, C39: with dropout; after each step replicas hold the same bits."""
    run(ranks, tied=tied, **layout)


def pipelines():
    """Every layout of 2, 4 and 8 ranks with a pipeline in it; schedules, tied and untied are dealt out in turn."""
    hows = itertools.cycle(
        [
            {"schedule": "1f1b", "tied": True},
            {"schedule": "interleaved", "chunks": 2},
            {"schedule": "zb-h1", "tied": True},
            {"schedule": "gpipe"},
            {"schedule": "1f1b"},
            {"schedule": "interleaved", "chunks": 2, "tied": True},
            {"schedule": "zb-h1"},
        ]
    )
    for ranks, pp in ((2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)):
        for layout in checks.layouts(ranks, pp):
            rows = checks.BATCH // layout["dp"]
            how = {**layout, **next(hows), "micros": max(m for m in range(pp, max(pp, 4) + 1, pp) if rows % m == 0)}
            yield pytest.param(ranks, how, id=checks.name_of(how))


@pytest.mark.parametrize(("ranks", "layout"), some(pipelines()))
def test_every_layout_with_a_pipeline_is_the_same_run(ranks, layout):
    """T15.4, C39, C44."""
    run(ranks, sizes=replace(checks.SIZES, layers=4), steps=3, **layout)


@pytest.mark.parametrize(("ranks", "layout"), some(cases(3, 6)))
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


@pytest.mark.parametrize("vocab", some([1003, 1, 2, 257]))
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


def refused(ranks, prepare, sp=False, kind="ring", **axes):
    """What every rank is told where its script cuts the batches by `prepare(tokens, mesh, model)`."""
    told = []

    def main():
        mesh = Mesh(world(), **axes)
        model = GPT(checks.SIZES, mesh, sequence_parallel=sp, cp_attention=kind, dtype=np.float64)
        rows = complete("1f1b", ranks=mesh.pp.size, microbatches=1)
        executor = Executor(model, AdamW(model.parameters()), mesh, rows)
        text = (np.arange(2000) * 7919 % checks.SIZES.vocab).astype(np.uint16)
        tokens = Tokens(Corpus(text, text, checks.SIZES.vocab, "bytes", "numbers", (), (), ""), checks.SIZES.seq_len)
        try:
            executor.step(prepare(tokens, mesh, model))
        except UserError as error:
            told.append(f"{type(error).__name__}: {error}")

    LocalWorld(ranks).run(main)
    assert len(told) == ranks
    return set(told)


@pytest.mark.parametrize(
    ("axis", "what"), [("tp", "places, inputs, targets"), ("cp", "places"), ("pp", "places, inputs, targets")]
)
@pytest.mark.parametrize("dp", [1, 2])
def test_rows_that_are_divided_over_all_ranks_are_refused(axis, what, dp):
    """Right for data parallelism alone; here the ranks of an axis would compute parts of different rows."""

    def over_the_world(tokens, mesh, model):
        return tokens.batch_at(0, 8, mesh.world.rank, mesh.world.size).part(model.positions_here)

    (told,) = refused(2 * dp, over_the_world, **{axis: 2})
    other = dp if axis == "pp" else 1  # the first rank of the second stage, or a neighbour
    assert told.startswith(f"DataError: rank {other} was given another batch than rank 0 ({what} differ)")
    assert f"the ranks of axis {axis} work on the same rows" in told


def test_documents_that_differ_along_a_sequence_are_refused():
    def own_documents(tokens, mesh, model):
        batch = tokens.batch_at(0, 8, mesh.dp.rank, mesh.dp.size)
        return replace(batch, documents=np.full((8, 16), mesh.cp.rank)).part(model.positions_here)

    (told,) = refused(2, own_documents, cp=2)
    assert "(documents differ)" in told


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("ring", lambda mesh: context.positions(16, mesh.cp, "ulysses")),
        ("ulysses", lambda mesh: context.positions(16, mesh.cp, "ring")),
        ("ring", lambda mesh: np.arange(8)),
        ("rsa", lambda mesh: None),
    ],
    ids=["one chunk for a ring", "two chunks for ulysses", "the same for all", "whole sequences"],
)
def test_a_part_of_the_sequence_that_is_another_ranks_is_refused(kind, part):
    def cut(tokens, mesh, model):
        return tokens.batch_at(0, 8).part(part(mesh))

    words = "which are not the 8 of 16 that this rank of axis cp holds"
    assert all(words in told for told in refused(2, cut, kind=kind, cp=2))


def test_a_text_begins_with_a_token():
    model = GPT(checks.SIZES, Mesh(world()))
    with pytest.raises(ShapeError, match="a prompt has at least one token"):
        next(generate(model, [], 3))

"""A Llama is the same training run on every layout: checks_layouts.py with its blocks.

A few layouts always; all of dp x tp x pp x cp over eight ranks where it is asked for (-m slow).
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_layouts as checks

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.nn.rotary import Scaling

STRETCHED = Scaling("llama3", 8.0, 1.0, 4.0, 8)


def run(ranks, sizes=checks.LLAMA, **how):
    LocalWorld(ranks).run(lambda: checks.equals_one_rank(world(), sizes=sizes, **how))


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, {"tp": 2, "sp": True, "tied": True}),
        (4, {"cp": 2, "tp": 2, "sp": True, "zero": 3, "documents": True}),
        (4, {"pp": 2, "dp": 2, "micros": 2, "schedule": "zb-h1", "recompute": ["blocks.*"]}),
        (4, {"pp": 2, "tp": 2, "schedule": "terapipe", "slices": [7, 5, 4], "micros": 2}),
    ],
    ids=lambda each: checks.name_of(each) if isinstance(each, dict) else None,
)
def test_some_layouts(ranks, how):
    run(ranks, **how)


@pytest.mark.parametrize("kind", ["ring", "ulysses", "rsa"])
def test_positions_are_those_of_the_whole_sequence(kind):
    """Each rank turns the queries and keys of its own places, in zig-zag order or not, stretched or not."""
    run(2, sizes=replace(checks.LLAMA, rope_scaling=STRETCHED, rope_theta=50.0), cp=2, kind=kind, steps=1)


def test_more_ranks_than_heads_of_keys():
    run(4, sizes=replace(checks.LLAMA, kv_heads=1, hidden=20), tp=4, steps=1)


def every():
    """All layouts of eight ranks; schedules, ZeRO, recompute, kinds of attention and a tied head are dealt out."""
    hows = itertools.cycle(
        [
            {"schedule": "1f1b", "tied": True},
            {"schedule": "interleaved", "chunks": 2, "recompute": ["blocks.*"]},
            {"schedule": "zb-h1", "tied": True},
            {"schedule": "gpipe", "recompute": ["blocks.*.mlp"]},
            {"schedule": "1f1b"},
        ]
    )
    zero, kinds = itertools.cycle([0, 3, 1, 2]), itertools.cycle(["ring", "ulysses", "rsa"])
    for pp in (1, 2, 4, 8):
        for layout in checks.layouts(8, pp):
            rows = checks.BATCH // layout["dp"]
            how = {"pp": pp, **layout, **next(hows), "zero": next(zero)}
            how["micros"] = max(m for m in range(pp, max(pp, 4) + 1, pp) if rows % m == 0)
            kind = next(kinds) if layout["cp"] > 1 else "ring"
            fits = max(1, 4 // layout["tp"]) % layout["cp"] == 0
            how["kind"] = kind if kind != "ulysses" or fits else "ring"
            if pp == 1:
                how |= {"schedule": "1f1b", "chunks": 1}
            yield pytest.param(how, id=checks.name_of(how))


@pytest.mark.slow
@pytest.mark.parametrize("how", [*every()])
def test_every_layout_of_eight_ranks(how):
    """Loss, each gradient, each weight and moment after three steps."""
    run(8, sizes=replace(checks.LLAMA, layers=4), **how)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["loss", "blocks"])
@pytest.mark.parametrize("how", [{"dp": 2, "tp": 2, "sp": True}, {"pp": 2, "cp": 2}, {"dp": 4, "zero": 3}])
def test_halves_learn_as_one_rank_does(how, scaling):
    """float16 rounds otherwise on other layouts: losses stay within a part in a hundred."""
    losses = []

    def main(**layout):
        losses.append(
            checks.train(world(), sizes=checks.LLAMA, dtype="float16", scaling=scaling, **layout)["losses"]["loss"]
        )

    LocalWorld(1).run(main)
    LocalWorld(4).run(lambda: main(**how))
    np.testing.assert_allclose(losses[1:], np.broadcast_to(losses[0], (4, 3)), rtol=1e-2)

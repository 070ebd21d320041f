"""The memory ledger equals the formula to the byte, module by module, on every layout; and its sum is what is alive."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_memory as checks
from checks_layouts import layouts, name_of

from mpitrain.backend import dtype_of
from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import World, world
from mpitrain.debug import owners

slow = pytest.mark.slow


def run(ranks, sizes=checks.SIZES, **how):
    LocalWorld(ranks).run(lambda: checks.holds_what_was_predicted(world(), sizes, **how))


def of_layout(layout):
    return {"dp": layout["dp"], "tp": layout["tp"], "cp": layout["cp"], "sequence_parallel": layout["sp"]}


def cases(*ranks, marks=()):
    return [
        pytest.param(n, of_layout(each), id=name_of(each) or "one rank", marks=marks)
        for n in ranks
        for each in layouts(n)
    ]


# ------------------------------------------------------------------------------------------ measured equals predicted


@pytest.mark.parametrize(("ranks", "layout"), [*cases(1, 2), *cases(4, marks=slow)])
def test_every_layout_holds_what_was_predicted(ranks, layout):
    """The decision on activation memory: our ledger equals our own formula exactly."""
    run(ranks, microbatches=2, optimizer="adamw", **layout)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("ranks", "layout"), [*cases(2), *cases(1, 4, marks=slow)])
def test_with_and_without_what_is_made_again(ranks, layout, recompute):
    run(ranks, recompute=recompute, **layout)


@slow
@pytest.mark.parametrize(("ranks", "layout"), cases(3, 6))
def test_three_and_six_ranks(ranks, layout):
    run(ranks, replace(checks.SIX, seq_len=36 if layout["cp"] in (3, 6) else 12), batch=12, **layout)


SOME = [{}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"cp": 2, "cp_attention": "rsa"}]


@pytest.mark.parametrize("name", ["float16", "bfloat16", pytest.param("float64", marks=slow)])
@pytest.mark.parametrize("layout", SOME, ids=str)
def test_every_precision(name, layout):
    ranks = layout.get("tp", 1) * layout.get("cp", 1)
    run(ranks, dtype=dtype_of(name), optimizer="adamw", recompute="none", **layout)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"dp": 2}], ids=str)
def test_branches_whose_gradients_have_scales(layout):
    """The stream is then in full precision, and so is all that lies in no branch."""
    run(
        2 if set(layout) - {"sequence_parallel"} else 1,
        dtype=np.dtype(np.float16),
        scaled=True,
        microbatches=2,
        **layout,
    )


@pytest.mark.parametrize("kv_heads", [1, pytest.param(2, marks=slow), 8])
@pytest.mark.parametrize("kind", ["ring", "ulysses", "rsa"])
@pytest.mark.parametrize("layout", [{"cp": 2}, pytest.param({"cp": 2, "tp": 4, "sequence_parallel": True}, marks=slow)])
def test_every_kind_of_context_attention(layout, kind, kv_heads):
    ranks = layout["cp"] * layout.get("tp", 1)
    if kind == "ulysses" and max(1, kv_heads // layout.get("tp", 1)) % layout["cp"]:
        kv_heads = 8  # each rank needs a head of keys
    run(ranks, replace(checks.SIZES, kv_heads=kv_heads), cp_attention=kind, **layout)


@pytest.mark.parametrize(("dropout", "tied", "gelu"), [(0.0, False, "erf"), (0.1, True, "tanh"), (0.0, True, "tanh")])
def test_dropout_tied_tables_and_both_kinds_of_gelu(dropout, tied, gelu):
    run(2, replace(checks.SIZES, dropout=dropout, tied=tied, gelu=gelu), pp=2, microbatches=2)


@pytest.mark.parametrize(
    "recomputed",
    [{"blocks.1"}, {"blocks.0.mlp", "blocks.1.attention"}, {"blocks.0", "blocks.1.mlp"}],
    ids=lambda names: " ".join(sorted(names)),
)
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"pp": 2}], ids=str)
def test_parts_that_are_made_again(layout, recomputed):
    run(2, recomputed=frozenset(recomputed), microbatches=2, **layout)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        ("gpipe", {}),
        ("1f1b", {"tp": 2, "sequence_parallel": True}),
        ("zb-h1", {"tp": 2}),
        ("interleaved", {"stages": (0, 1, 1, 0)}),
        ("terapipe", {"slices": (9, 4, 3)}),
        ("pipedream-2bw", {"row": 3}),
        ("pipedream", {"row": 4, "microbatches": 1}),
    ],
)
def test_every_schedule_of_a_pipeline(schedule, how, recompute):
    how = {"microbatches": 4, **how}
    run(2 * how.get("tp", 1), pp=2, schedule=schedule, recompute=recompute, **how)


# --------------------------------------------------------------------------------------------- the sum is what is alive


@pytest.mark.parametrize(
    ("more", "how"),
    [
        (set(), {"optimizer": "adamw"}),
        ({owners.SCRATCH}, {"optimizer": "sgd", "recompute": "full"}),
        ({owners.MASTERS}, {"dtype": np.dtype(np.float16), "recompute": "none"}),
    ],
    ids=["adamw", "sgd, recompute", "float16"],
)
def test_the_sum_is_what_is_alive_and_no_owner_can_be_left_out(more, how):
    """Within 2 %, when an action or an op ends; tests/mpi/test_memory_mpi.py does the same on two ranks."""
    checks.every_owner_is_needed(World(Alone(), "none"), checks.STAYS | checks.COMES | more, every=9, **how)

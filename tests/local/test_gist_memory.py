"""What waits encoded has the bytes that were predicted, module by module, on every layout and schedule."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_memory as checks

from mpitrain.backend import dtype_of
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.models.gpt import GPTConfig
from mpitrain.plan.memory import of_stage, total
from mpitrain.plan.traffic import Step
from mpitrain.routing import Routing

slow = pytest.mark.slow


def run(ranks, sizes=checks.SIZES, **how):
    LocalWorld(ranks).run(lambda: checks.holds_what_was_predicted(world(), sizes, **how))


@pytest.mark.parametrize("bits", [16, 10, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16", pytest.param("bfloat16", marks=slow)])
def test_every_format_and_precision(bits, dtype):
    run(1, gist=bits, dtype=dtype_of(dtype), microbatches=2, optimizer="adamw")


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"cp": 2},
        {"cp": 2, "cp_attention": "ulysses"},
        pytest.param({"tp": 2, "cp": 2}, marks=slow),
    ],
    ids=str,
)
def test_every_cut(layout):
    run(layout.get("tp", 1) * layout.get("cp", 1), gist=10, **layout)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        ("1f1b", {}),
        ("zb-h1", {}),
        ("interleaved", {"stages": (0, 1, 1, 0)}),
        ("terapipe", {"slices": (9, 4, 3)}),
        pytest.param("pipedream-2bw", {"row": 3}, marks=slow),
    ],
)
def test_every_schedule_of_a_pipeline(schedule, how, recompute):
    run(2, pp=2, microbatches=4, schedule=schedule, recompute=recompute, gist=16, **how)


def test_parts_that_are_made_again_and_branches_with_scales():
    run(1, gist=8, recomputed=frozenset({"blocks.0.mlp", "blocks.1.attention"}))
    run(1, gist=16, dtype=np.dtype(np.float16), scaled=True)


def test_experts():
    routing = Routing(experts=4, router="topk", top_k=2, capacity_factor=1.0, balance_loss=0.01, z_loss=0.001)
    sizes = GPTConfig(vocab=17, layers=2, width=16, heads=2, seq_len=16, routing=routing)
    run(1, sizes, gist=10)


def test_a_gpt_keeps_a_half_a_third_and_a_quarter_of_its_bytes():
    step = Step(GPTConfig(vocab=256, layers=2, width=768, heads=12, seq_len=1024), 1)
    held = {bits: total(of_stage(replace(step, gist=bits), 0)) for bits in (None, 16, 10, 8)}
    assert [round(held[bits] / held[None], 3) for bits in (16, 10, 8)] == [0.506, 0.341, 0.258]

"""Memory and traffic of a Llama are what the formulas say, to the byte: as `test_memory_formula` and `test_ledger`."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_ledger
import checks_memory
from checks_layouts import layouts, name_of

from mpitrain.backend import dtype_of
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.kernels.blocks import kept_scores
from mpitrain.models.llama import LlamaConfig
from mpitrain.plan.memory import block_table, model_state
from mpitrain.plan.memory.activations import inside, total
from mpitrain.plan.traffic import Step, slabs

slow = pytest.mark.slow
LLAMA, SIX = checks_memory.LLAMA, checks_memory.SIX_LLAMA
CUT = {"tp": 2, "sequence_parallel": True}
HALF = np.dtype(np.float16)


def ranks_of(how):
    return how.get("dp", 1) * how.get("tp", 1) * how.get("cp", 1) * how.get("pp", 1)


def holds(sizes=LLAMA, **how):
    LocalWorld(ranks_of(how)).run(lambda: checks_memory.holds_what_was_predicted(world(), sizes, **how))


def sends(sizes=LLAMA, **how):
    LocalWorld(ranks_of(how)).run(lambda: checks_ledger.sends_what_was_predicted(world(), sizes, **how))


def both(sizes=LLAMA, **how):
    holds(sizes, **how)
    sends(sizes, **how)


def of_layout(layout):
    return {"dp": layout["dp"], "tp": layout["tp"], "cp": layout["cp"], "sequence_parallel": layout["sp"]}


def every(*ranks):
    return [pytest.param(of_layout(each), id=name_of(each) or "one rank") for n in ranks for each in layouts(n)]


PARTS = ("blocks.0.mlp", "blocks.1.attention")


@pytest.mark.parametrize("how", [{"recompute": "none"}, {**CUT, "recomputed": PARTS}, {"dp": 2, "cp": 2}], ids=str)
def test_some_layouts(how):
    both(microbatches=2, **how)


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        (replace(LLAMA, tied=True), {"schedule": "zb-h1", "tp": 2}),
        (replace(LLAMA, window=5), {"schedule": "terapipe", "slices": (9, 4, 3)}),
    ],
    ids=["tied, zb-h1", "a window, slices"],
)
def test_some_pipelines(sizes, how):
    both(sizes, pp=2, microbatches=4, **how)


def test_branches_whose_gradients_have_scales():
    both(dtype=HALF, scaled=True, microbatches=2, **CUT)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=slow), pytest.param(2, marks=slow), 3])
def test_rows_of_weights(zero):
    both(replace(LLAMA, kv_heads=1), zero=zero, dp=2, tp=2)


PACKED = [
    {},
    pytest.param({"cp": 2, "cp_attention": "ulysses"}, marks=slow),
    pytest.param({"cp": 2}, marks=slow),
    pytest.param({"cp": 2, "cp_attention": "rsa"}, marks=slow),
    pytest.param(CUT, marks=slow),
    {"pp": 2, "schedule": "terapipe", "slices": (9, 4, 3)},
]


@pytest.mark.parametrize(
    "sizes", [pytest.param(LLAMA, marks=slow, id="llama"), pytest.param(checks_memory.SIZES, id="gpt")]
)
@pytest.mark.parametrize("how", PACKED, ids=str)
def test_several_documents_in_a_sequence(sizes, how):
    holds(sizes, packed=True, microbatches=2, **how)


@pytest.mark.parametrize("window", [2, 70, 100])
def test_kept_scores_of_a_window(window):
    """Of stripes of 64 queries those keys that the window shows."""
    sizes = replace(LLAMA, layers=1, window=window, seq_len=200)
    holds(sizes, batch=2, recompute="none")
    rows = dict((name, here) for name, here, _ in block_table(Step(sizes, 2, recompute="none")))
    assert rows["softmax"] == 4 * 2 * 8 * kept_scores(200, 200, True, 1 - window)


def test_a_block_keeps_what_the_formula_of_its_letters_says():
    """beta b s (6 h + 2 h_kv + 3 H) + (2 + a) beta' b s, of one rank without dropout."""
    sizes = LlamaConfig(vocab=64, layers=1, width=48, heads=6, kv_heads=2, seq_len=32, hidden=100)
    for dtype, beta, wide in ((np.float32, 4, 4), (np.float16, 2, 4), (np.float64, 8, 8)):
        step = Step(sizes, 3, dtype=dtype)
        assert total(inside(step, 0, 0)) == 3 * 32 * (beta * (6 * 48 + 2 * 16 + 3 * 100) + wide * (2 + 6))


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "llama3.2-1b", "tinyllama-1.1b"])
def test_parameters_of_published_models(name):
    """By the formula of slabs.py, whole and in four parts of tp, beside the number that is printed for the model."""
    published = {
        "llama2-7b": (6_738_415_616, (32_000, 32, 4096, 32, 32, 11_008, False)),
        "llama3-8b": (8_030_261_248, (128_256, 32, 4096, 32, 8, 14_336, False)),
        "llama3.2-1b": (1_235_814_400, (128_256, 16, 2048, 32, 8, 8192, True)),
        "tinyllama-1.1b": (1_100_048_384, (32_000, 22, 2048, 32, 4, 5632, False)),
    }
    number, (vocab, layers, h, heads, kv, hidden, tied) = published[name]
    sizes = LlamaConfig(
        vocab=vocab, layers=layers, width=h, heads=heads, kv_heads=kv, hidden=hidden, tied=tied, seq_len=2048
    )
    assert sizes.num_parameters == sum(slab.size for slab in slabs(Step(sizes, 1))) == number
    h_kv, t = kv * h // heads, 4
    of_block = (2 * h * h + 2 * h * h_kv + 3 * h * hidden) // t + 2 * h
    expected = layers * of_block + h + (1 if tied else 2) * vocab * h // t
    assert sum(slab.size for slab in slabs(Step(sizes, 1, tp=t))) == expected


def test_turns_of_rotary_positions_are_held_once():
    d, s = LLAMA.head_width, LLAMA.seq_len
    assert model_state(Step(LLAMA, 4)).constants == 4 * s * d
    assert model_state(Step(LLAMA, 4, dtype=HALF)).constants == 4 * s * d
    apart = [model_state(Step(LLAMA, 4, cp=4, cp_rank=rank)).constants for rank in range(4)]
    assert apart == [4 * d * (s + s // 4)] * 3 + [4 * s * d]  # the last one's two chunks are neighbours
    assert model_state(Step(LLAMA, 4, cp=4, cp_attention="rsa")).constants == 4 * s * d


# ------------------------------------------------------------------------------------------------ all, when asked for


@slow
@pytest.mark.parametrize("layout", every(1, 2, 4))
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_layout_holds_what_was_predicted(layout, recompute):
    holds(microbatches=2, optimizer="adamw", recompute=recompute, **layout)


@slow
@pytest.mark.parametrize("layout", every(1, 2, 4, 8))
def test_every_layout_sends_what_was_predicted(layout):
    sends(microbatches=2, **layout)


@slow
@pytest.mark.parametrize("layout", every(3, 6))
def test_three_and_six_ranks(layout):
    both(replace(SIX, seq_len=36 if layout["cp"] in (3, 6) else 12), batch=12, **layout)


@slow
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("kind", ["ring", "ulysses", "rsa"])
@pytest.mark.parametrize("layout", [{"cp": 2}, {"cp": 2, "tp": 4, "sequence_parallel": True}], ids=str)
def test_every_kind_of_context_attention(layout, kind, kv_heads):
    if kind == "ulysses" and max(1, kv_heads // layout.get("tp", 1)) % layout["cp"]:
        kv_heads = 8  # each rank needs a head of keys
    both(replace(LLAMA, kv_heads=kv_heads, window=6), cp_attention=kind, microbatches=2, **layout)


@slow
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("layout", [{}, CUT, {"cp": 2}, {"cp": 2, "cp_attention": "rsa"}], ids=str)
def test_every_precision(name, layout):
    both(dtype=dtype_of(name), recompute="none", **layout)


@slow
@pytest.mark.parametrize("recomputed", [("blocks.1",), PARTS, ("blocks.0", "blocks.1.mlp")], ids=str)
@pytest.mark.parametrize("layout", [{"tp": 2}, CUT, {"cp": 2}, {"pp": 2}], ids=str)
def test_parts_that_are_made_again(layout, recomputed):
    both(replace(LLAMA, dropout=0.1), recomputed=frozenset(recomputed), microbatches=2, **layout)


@slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        ("gpipe", {}),
        ("1f1b", CUT),
        ("zb-h1", {"tp": 2}),
        ("interleaved", {"stages": (0, 1, 1, 0)}),
        ("terapipe", {"slices": (9, 4, 3)}),
        ("pipedream-2bw", {"row": 3}),
        ("pipedream", {"row": 4, "microbatches": 1}),
    ],
)
def test_every_schedule_of_a_pipeline(schedule, how, recompute):
    holds(**{"microbatches": 4, "pp": 2, "schedule": schedule, "recompute": recompute, **how})


@slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("layout", [{"dp": 3}, {"dp": 2, **CUT}, {"dp": 2, "pp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_every_stage_of_zero(layout, zero):
    both(replace(LLAMA, tied=True), batch=12, zero=zero, **layout)


@slow
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("how", [{}, {"tp": 2}, {"pp": 2, "schedule": "terapipe", "slices": (9, 4, 3)}], ids=str)
def test_what_waits_in_fewer_bits(how, bits):
    holds(gist=bits, microbatches=2, **how)


@slow
@pytest.mark.parametrize("layout", [{"tp": 2}, CUT, {"pp": 2}, {"dp": 2}], ids=str)
def test_other_optimizers_and_scales(layout):
    sends(optimizer="adafactor", **layout)
    both(dtype=HALF, scaled=True, microbatches=2, **layout)

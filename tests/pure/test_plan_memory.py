"""Formulas of memory and operations against the tables of the papers, and against what small models count."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_memory as checks

from mpitrain.comm.alone import Alone
from mpitrain.comm.world import World
from mpitrain.debug.flops import AGAIN, BACKWARD, FORWARD, Flops
from mpitrain.errors import ConfigError
from mpitrain.events import listen
from mpitrain.memory.recompute import choose
from mpitrain.models.gpt import GPTConfig
from mpitrain.pipeline.passes import complete
from mpitrain.plan.memory import (
    block_table,
    model_state,
    of_stage,
    paper,
    peak,
    predicted_block_bytes,
    scratch,
    segments_of,
    total,
)
from mpitrain.plan.traffic import Step, slabs

MODELS = {  # heads, width, layers, t, p, b: Korthikanti et al. 2022, table 3
    "22B": (64, 6144, 48, 8, 1, 4),
    "175B": (96, 12288, 96, 8, 8, 1),
    "530B": (128, 20480, 105, 8, 35, 1),
    "1T": (160, 25600, 128, 8, 64, 1),
}
MEGABYTES = {  # none, tp, tp + sp, tp + selective, tp + sp + selective, full
    "22B": (7079.99, 1325.40, 885.00, 654.31, 213.91, 100.66),
    "175B": (2868.90, 578.81, 358.61, 327.16, 106.95, 50.33),
    "530B": (4110.42, 880.80, 513.80, 545.26, 178.26, 83.89),
    "1T": (5138.02, 1101.00, 642.25, 681.57, 222.82, 104.86),
}
WAYS = [
    {"t": 1, "recompute": "none"},
    {"recompute": "none"},
    {"recompute": "none", "sequence_parallel": True},
    {"recompute": "selective"},
    {"recompute": "selective", "sequence_parallel": True},
    {"t": 1, "recompute": "full"},
]
S = 2048


def of_paper(name, **how):
    a, h, _, t, _, b = MODELS[name]
    return paper.block_bytes(**{"s": S, "b": b, "h": h, "a": a, "t": t, **how})


def step_of(name, t=None, recompute="none", sequence_parallel=False):
    a, h, layers, tp, _, b = MODELS[name]
    sizes = GPTConfig(vocab=51200, layers=layers, width=h, heads=a, seq_len=S, dropout=0.1)
    tp = tp if t is None else t
    return Step(sizes, b, dtype=np.float16, tp=tp, recompute=recompute, sequence_parallel=sequence_parallel)


# ----------------------------------------------------------------------------------------------- the paper's figures


@pytest.mark.parametrize("name", MODELS)
def test_the_golden_table_of_activation_bytes(name):
    """ALGORITHMS 30.8."""
    found = tuple(round(float(of_paper(name, **how)) / 1e6, 2) for how in WAYS)
    assert found == MEGABYTES[name]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_the_tensors_of_the_paper_sum_to_its_formula(name, how):
    assert sum(paper.tensors(step_of(name, **how)).values()) == of_paper(name, **how)


def test_the_first_stage_of_a_pipeline():
    """ALGORITHMS 30.8: totals in GB of tp + sp + selective, and the factors of interleaved schedules."""
    gigabytes = [float(of_paper(name, **WAYS[4]) * paper.first_stage(MODELS[name][2])) / 1e9 for name in MODELS]
    assert [round(n, 2) for n in gigabytes] == [10.27, 10.27, 18.72, 28.52]
    factors = [float(paper.first_stage(1, pp=pp, chunks=3)) for pp in (8, 35)]
    assert [round(n, 4) for n in factors] == [1.2917, 1.3238]


def test_sequence_parallelism_and_selective_recompute_are_five_times_less():
    shares = [100 * float(of_paper(name, **WAYS[4]) / of_paper(name, **WAYS[1])) for name in MODELS]
    assert [round(share, 1) for share in shares] == [16.1, 18.5, 20.2, 20.2]


@pytest.mark.parametrize(
    ("a", "h", "scores", "saving", "overhead"), [(96, 12288, 80, 70, 2.7), (128, 20480, 64, 65, 1.6)]
)
def test_what_selective_recompute_saves_and_costs(a, h, scores, saving, overhead):
    """T20.3."""
    sizes = {"s": S, "b": 1, "h": h, "a": a}
    all_of_it, kept = paper.block_bytes(**sizes), paper.block_bytes(**sizes, recompute="selective")
    assert 5 * a * S / h == scores
    assert round(100 * float(1 - kept / all_of_it)) == saving
    assert all_of_it - kept == 5 * a * S * S  # T20.2
    none, selective = (
        paper.flops(batch=1, s=S, h=h, layers=1, vocab=0, recompute=way) for way in ("none", "selective")
    )
    assert math.floor(1000 * float(selective / none - 1)) / 10 == overhead


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (4, False), (4, True)])
def test_the_formula_that_is_printed_is_the_one_that_is_counted(recompute, tp, sp):
    step = replace(step_of("22B", tp, recompute, sp))
    a, h, _, _, _, b = MODELS["22B"]
    text = paper.formula(step).replace("sbh", "*s*b*h*").replace("as", "*a*s").replace("(ht)", "(h*t)").strip("*")
    text = text.replace("h*(", "h*(").replace("h*/t", "h/t").replace("/t(", "/t*(")
    found = eval(text, {"s": S, "b": b, "h": h, "a": a, "t": tp})
    assert found == pytest.approx(sum(paper.tensors(step).values()), rel=1e-12)


# ------------------------------------------------------------------------------------------------------ our own formula


def test_a_block_keeps_sixteen_numbers_a_token_and_unit_of_width():
    """What the module says: 16 beta b s h + (4 + a) beta' b s."""
    sizes = GPTConfig(vocab=8, layers=1, width=64, heads=4, seq_len=32)
    for dtype, beta, broad in ((np.float32, 4, 4), (np.float16, 2, 4), (np.float64, 8, 8)):
        found = predicted_block_bytes(sizes, rows=3, dtype=dtype)
        assert found.kept == 16 * beta * 3 * 32 * 64 + (4 + 4) * broad * 3 * 32
        assert found.input == beta * 3 * 32 * 64
        assert found.again == found.kept - found.input


def test_kept_scores_are_the_keys_that_are_seen_in_stripes():
    sizes = GPTConfig(vocab=8, layers=1, width=64, heads=4, seq_len=128)
    kept, made_again = (predicted_block_bytes(sizes, rows=2, recompute=way).kept for way in ("none", "selective"))
    assert kept - made_again == 4 * 2 * 4 * (128 * (128 + 64) // 2)


def test_no_mesh_is_needed_to_know_what_a_block_is_worth():
    """What chooses blocks to recompute is a pure function of the sizes, before any rank is asked."""
    sizes = GPTConfig(vocab=8, layers=2, width=64, heads=4, seq_len=32, dropout=0.1)
    whole = predicted_block_bytes(sizes, rows=2)
    cut = predicted_block_bytes(sizes, rows=2, tp=4, sequence_parallel=True)
    assert cut.input * 4 == whole.input
    assert cut.kept < whole.kept
    with pytest.raises(ConfigError, match="heads 4 is not divisible by 3"):
        predicted_block_bytes(sizes, rows=2, tp=3)


def test_segments_of_a_stage_sum_to_what_it_keeps_and_can_be_chosen_from():
    sizes = GPTConfig(vocab=64, layers=4, width=32, heads=4, seq_len=16, dropout=0.1)
    step = Step(sizes, 8, 2, pp=2)
    segments = segments_of(step, 0)
    assert [segment.name for segment in segments] == ["embedding", "blocks.0", "blocks.1"]
    assert sum(segment.whole for segment in segments) == total(of_stage(step, 0))
    again = replace(step, recompute="full")
    assert sum(s.whole if s.recomputed is None else s.recomputed for s in segments) == total(of_stage(again, 0))
    assert [segment.name for segment in segments_of(replace(step, pp_rank=1), 1)][-1] == "head"
    enough = sum(segment.whole for segment in segments)
    assert choose(segments, enough) == ()
    assert len(choose(segments, enough - 1)) == 1


def test_model_state_of_ranks_sums_to_that_of_the_whole():
    """ALGORITHMS 30.3: 16 bytes a weight for float32 with AdamW; 18 for halves with float32 gradients."""
    sizes = GPTConfig(vocab=16, layers=2, width=16, heads=4, seq_len=8)
    whole = model_state(Step(sizes, 4), "adamw")
    assert sum(whole) == 16 * sizes.num_parameters
    assert sum(model_state(Step(sizes, 4, dtype=np.float16), "adamw")) == 18 * sizes.num_parameters
    assert model_state(Step(sizes, 4), "sgd", momentum=0.0).optimizer == 0
    assert model_state(Step(sizes, 4), "sgd").optimizer == 4 * sizes.num_parameters
    factored = model_state(Step(sizes, 4), "adafactor").optimizer
    assert factored == 4 * sum(sum(s.shape) for s in slabs(Step(sizes, 4)))
    stages = [model_state(Step(sizes, 4, pp=2, pp_rank=rank), "adamw") for rank in (0, 1)]
    assert [sum(parts) for parts in zip(*stages, strict=True)] == [*whole]


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_the_peak_follows_from_the_row(schedule, in_flight):
    """ALGORITHMS 30.2: stage i of 1F1B holds p - i micro-batches, GPipe all m."""
    sizes = GPTConfig(vocab=64, layers=8, width=32, heads=4, seq_len=16)
    rows = complete(schedule, ranks=4, microbatches=8)
    for rank, micros in enumerate(in_flight):
        step = Step(sizes, 8, 8, pp=4, pp_rank=rank)
        assert peak(step, rows[rank]) == micros * total(of_stage(step, rank))
        assert scratch(step, rows[rank]) == 0


def test_full_recompute_holds_inputs_and_one_block():
    """T19.2: L A_int falls to L A_in + A_int."""
    sizes = GPTConfig(vocab=64, layers=8, width=32, heads=4, seq_len=16)
    block = predicted_block_bytes(sizes, rows=4)
    row = complete("1f1b", ranks=1, microbatches=1)[0]
    kept, made = (Step(sizes, 4, recompute=way) for way in ("selective", "full"))
    outside = total(of_stage(kept, 0)) - 8 * block.kept
    assert peak(kept, row) == 8 * block.kept + outside
    assert peak(made, row) == 8 * block.input + outside
    assert scratch(made, row) == block.again


def test_a_table_names_what_is_not_in_the_paper_and_what_is_only_there():
    sizes = GPTConfig(vocab=64, layers=1, width=32, heads=4, seq_len=16)
    rows = {name: (ours, theirs) for name, ours, theirs in block_table(Step(sizes, 4, dtype=np.float16))}
    assert rows["input of norm1"] == (2 * 4 * 16 * 32,) * 2
    assert rows["lse of attention"] == (4 * 4 * 4 * 16, 0)
    assert rows["mask of drop1"] == (0, 4 * 16 * 32)  # without dropout nothing is kept of it here


# ------------------------------------------------------------------------------------------------------ operations


def counted(recompute):
    step = Step(checks.WIDE, 8, 2, recompute=recompute)
    _, executor, tokens = checks.built(World(Alone(), "none"), step)
    flops = Flops()
    with listen(flops):
        executor.step(tokens.batch_at(0, 8))
    return flops


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_formulas_of_operations_are_what_is_counted(recompute):
    """ALGORITHMS 30.1, dense attention; full recompute is at most one forward more, T20.3."""
    sizes, batch = checks.WIDE, 8
    s, h, layers = sizes.seq_len, sizes.width, sizes.layers
    blocks = layers * (24 * batch * s * h * h + 4 * batch * s * s * h)
    logits = 2 * batch * s * h * sizes.vocab
    scores = layers * 2 * batch * s * s * h  # q k^T, which backward makes again unless it was kept
    flops = counted(recompute)
    assert flops.total(FORWARD) == blocks + logits
    assert flops.total(BACKWARD) == 2 * (blocks + logits)
    assert flops.total(AGAIN) == {"none": 0, "selective": scores, "full": blocks + scores}[recompute]
    assert flops.total(AGAIN) - scores <= flops.total(FORWARD)
    of_paper = {"batch": batch, "s": s, "h": h, "layers": layers, "vocab": sizes.vocab}
    assert flops.total(FORWARD) + flops.total(BACKWARD) == paper.flops(**of_paper)
    if recompute == "full":
        assert flops.total() - scores == paper.flops(**of_paper, recompute="full")


def test_operations_by_module():
    flops = counted("full")
    text = flops.table().splitlines()
    assert text[0].split() == ["forward", "again", "backward"]
    assert {line.split()[0] for line in text[1:]} == {
        *(f"blocks.*.{part}" for part in ("attention", "attention.qkv", "attention.proj", "mlp.up", "mlp.down")),
        "head",
        "all",
    }
    up = [int(n.replace(",", "")) for n in next(line for line in text if "mlp.up" in line).split()[1:]]
    assert up == [up[0], up[0], 2 * up[0]]
    assert flops.total(where=lambda path: path == "head") == 3 * 2 * 8 * 32 * 64 * 64

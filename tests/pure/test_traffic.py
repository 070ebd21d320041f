"""Predicted bytes: the formulas as they are printed, what they refuse, and how they read."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.models.gpt import GPTConfig
from mpitrain.pipeline.partition import Partition
from mpitrain.plan.traffic import DATA, DATA_AND_TP, Line, Step, Traffic, cause_of, parameters, traffic

# A model of which every number is another, so that no two letters of a formula can be confused.
L, h, S, V, a, kv = 3, 48, 40, 101, 8, 4
SIZES = GPTConfig(vocab=V, layers=L, width=h, heads=a, seq_len=S)
GROUPED = replace(SIZES, kv_heads=kv)
d, m, b = 3, 5, 2
STEP = Step(SIZES, batch=b * m * d, microbatches=m, dp=d)


@pytest.mark.parametrize(("dtype", "beta"), [(np.float32, 4), (np.float64, 8)])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("t", [1, 2, 4])
def test_tensor_parallelism(t, sp, dtype, beta):
    """30.4, row tp; with the terms of 12: embedding, the head's input gradient, cross-entropy."""
    sent = traffic(replace(STEP, tp=t, sequence_parallel=sp, dtype=dtype))
    factor = Fraction(t - 1, t)
    assert sent.total("tp", "layers") == m * L * 8 * factor * beta * b * S * h
    assert sent.total("tp", "embedding") == m * 2 * factor * beta * b * S * h
    assert sent.total("tp", "head") == m * 2 * factor * beta * b * S * h
    assert sent.total("tp", "cross-entropy") == m * 3 * 2 * factor * beta * b * S


def test_the_example_of_the_specification():
    """T30.10: L = 4 on p = 2 stages, so two layers on each; h = 64, s = 32, b = 2, m = 4, float32, t = 2."""
    stage = GPTConfig(vocab=50, layers=4 // 2, width=64, heads=4, seq_len=32)
    assert traffic(Step(stage, batch=8, microbatches=4, tp=2)).total("tp", "layers") == 524_288


@pytest.mark.parametrize("c", [1, 2, 4])
@pytest.mark.parametrize("t", [1, 2])
def test_ring_attention(c, t):
    """30.4, with the heads of keys of a rank of tp; their gradients are as wide as they are, but at least float32."""
    for dtype, beta, beta_acc in ((np.float32, 4, 4), (np.float64, 8, 8), (np.float16, 2, 4)):
        sent = traffic(replace(STEP, sizes=GROUPED, cp=c, tp=t, dtype=dtype)).total("cp", "attention")
        h_kv = kv * (h // a) // t
        assert sent == (m * L * (4 * (c - 1) * beta + 2 * c * beta_acc) * b * (S // c) * h_kv if c > 1 else 0)


@pytest.mark.parametrize("c", [2, 4])
def test_ulysses_attention(c):
    """30.4, where keys are as wide as queries."""
    step = replace(STEP, cp=c, cp_attention="ulysses")
    assert traffic(step).total("cp", "attention") == m * L * 8 * Fraction(c - 1, c) * 4 * b * (S // c) * h
    half = traffic(replace(step, sizes=GROUPED)).total("cp", "attention")
    assert half == m * L * 6 * Fraction(c - 1, c) * 4 * b * (S // c) * h


@pytest.mark.parametrize("c", [2, 4])
def test_two_rings_send_six_eighths_of_the_papers_bytes(c):
    """14.1: 8 (N-1) B Z (L/N) A elements, 4 of them all-reduces of gradients; a reduce-scatter sends half of that."""
    sent = traffic(replace(STEP, cp=c, cp_attention="rsa")).total("cp", "attention")
    assert sent == m * L * (8 - 2) * (c - 1) * b * a * (S // c) * (h // a) * 4


def test_data_parallelism_sends_the_gradients_once_whatever_the_micro_batches_are():
    """30.4 and 4: 2 (d-1)/d beta_g Psi; and 8 bytes of the count."""
    for micros in (1, 5):
        step = replace(STEP, microbatches=micros, cp=4)
        assert traffic(step).total(DATA, "gradients") == round(2 * Fraction(11, 12) * 4 * SIZES.num_parameters)
        assert traffic(step).total(DATA, "count of targets") == round(2 * Fraction(11, 12) * 8)
        assert traffic(step).total("world") == round(2 * Fraction(11, 12) * 32)


def test_small_parameters_are_summed_over_tp_as_well_with_sequence_parallelism():
    """30.4, row SP: here over all axes at once, in one message."""
    small = L * 6 * h + 2 * h + S * h
    step = replace(STEP, tp=2, sequence_parallel=True)
    assert traffic(step).total(DATA_AND_TP) == 2 * Fraction(5, 6) * 4 * small
    assert traffic(replace(step, dp=1)).total(DATA_AND_TP) == 2 * Fraction(1, 2) * 4 * small
    plain = replace(step, sequence_parallel=False)
    assert traffic(plain).total(DATA_AND_TP) == 0
    assert traffic(plain).total(DATA, "gradients") == 2 * Fraction(2, 3) * 4 * (parameters(step)[DATA] + small)


@pytest.mark.parametrize("sizes", [SIZES, GROUPED, replace(GROUPED, tied=True), replace(SIZES, kv_heads=1)])
@pytest.mark.parametrize("t", [1, 2, 4, 8])
@pytest.mark.parametrize("sp", [False, True])
def test_the_parameters_of_all_ranks_are_those_of_the_model(sizes, t, sp):
    """11: 12 h^2/t + 7 h/t + 6 h a layer and rank; what is not cut is counted once here."""
    ranks = [of_axes(Step(sizes, batch=1, tp=t, sequence_parallel=sp, tp_rank=rank)) for rank in range(t)]
    between = L * 6 * h + 2 * h + S * h
    whole = 0 if sp and t > 1 else between  # of what every rank holds besides its part
    assert len({shared for _, shared in ranks}) == 1
    assert sum(here - whole for here, _ in ranks) + whole + ranks[0][1] == sizes.num_parameters
    if sizes is SIZES:
        layers = L * (12 * h * h // t + 7 * h // t + 6 * h)
        assert sum(ranks[0]) == layers + 2 * h + S * h + 2 * -(-V // t) * h


def of_axes(step):
    """Parameters that are not Replicate on tp, and those that are."""
    found = parameters(step)
    return found.get(DATA, 0), found.get(DATA_AND_TP, 0)


# ------------------------------------------------------------------------------------------------------------ pipelines


def of_ranks(step):
    return [traffic(replace(step, pp_rank=rank)) for rank in range(step.pp)]


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("t", "sp", "c"), [(1, False, 1), (4, False, 1), (4, True, 1), (1, False, 2), (2, True, 2)])
def test_a_pipeline(v, t, sp, c):
    """30.4, row pp: 2 m v beta b s h, / t with sequence parallelism; for v = 1 half of it on the first and last rank.

    With more stages a rank the ends save only what they would send out of the pipeline: (2 v - 1) m beta b s h.
    """
    p = 4
    stages = Partition((1,) * L + (0,) * (p * v - L))
    step = replace(STEP, tp=t, sequence_parallel=sp, cp=c, pp=p, partition=stages)
    middle = Fraction(2 * m * v * 4 * b * (S // c) * h, t if sp else 1)
    end = middle * Fraction(2 * v - 1, 2 * v)
    assert [each.total("pp") for each in of_ranks(step)] == [end, middle, middle, end]
    if v == 1:
        assert end == middle / 2
        first, *_, last = of_ranks(step)
        assert first.total(cause="activation gradients") == last.total(cause="activations") == 0


def test_the_example_of_the_specification_for_a_pipeline():
    """T30.10: pp sends 65,536 bytes on each of the two stages, tp as before."""
    sizes = GPTConfig(vocab=50, layers=4, width=64, heads=4, seq_len=32)
    for sent in of_ranks(Step(sizes, batch=8, microbatches=4, tp=2, pp=2)):
        assert sent.total("pp") == 65_536
        assert sent.total("tp", "layers") == 524_288


def test_slices_send_the_same_bytes_in_more_calls():
    """15.1: the payload of a slice is beta b l h; the same total."""
    step = replace(STEP, tp=2, pp=2)
    for whole, cut in zip(of_ranks(step), of_ranks(replace(step, slices=(15, 11, 7, 7))), strict=True):
        assert {key: sent for key, (_, sent) in whole.sums().items()} == {
            key: sent for key, (_, sent) in cut.sums().items()
        }
        for axis, times in (("pp", 4), ("tp", 4), ("dp+cp", 1), ("world", 1)):
            calls = [sum(line.calls for line in sent.lines if line.axis == axis) for sent in (whole, cut)]
            assert calls[1] == times * calls[0]


@pytest.mark.parametrize("tied", [False, True])
def test_stages_share_out_what_one_rank_would_send(tied):
    """Layers follow the blocks, the embedding the first stage, head and loss the last."""
    step = replace(STEP, sizes=replace(SIZES, tied=tied), tp=2, cp=2)
    whole = traffic(step)
    ranks = of_ranks(replace(step, pp=3, partition=Partition((1, 0, 2))))
    for cause in ("layers", "attention"):
        assert [each.total(cause=cause) for each in ranks] == [whole.total(cause=cause) // L * n for n in (1, 0, 2)]
    assert [each.total(cause="embedding") for each in ranks] == [whole.total(cause="embedding"), 0, 0]
    for cause in ("head", "cross-entropy"):
        assert [each.total(cause=cause) for each in ranks] == [0, 0, whole.total(cause=cause)]
    for each in ranks:
        assert each.total(cause="count of targets") == whole.total(cause="count of targets")
        n = 3 * d * 2 * 2
        assert each.total("world") == round(2 * Fraction(n - 1, n) * 32)


def test_a_stage_without_parameters_sums_none():
    ranks = of_ranks(replace(STEP, pp=3, partition=Partition((1, 0, 2))))
    assert [(DATA, "gradients", "all_reduce") in each.sums() for each in ranks] == [True, False, True]


@pytest.mark.parametrize("sizes", [SIZES, GROUPED, replace(GROUPED, tied=True), replace(SIZES, kv_heads=1, tied=True)])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("stages", [(1, 1, 1), (0, 3, 0), (1, 0, 0, 1, 0, 1)])
def test_the_parameters_of_all_stages_are_those_of_the_model(stages, sp, sizes):
    """A tied table counts on either end."""
    step = Step(sizes, batch=1, tp=2, sequence_parallel=sp, pp=3, partition=Partition(stages))
    found = [of_axes(replace(step, pp_rank=rank)) for rank in range(3)]
    one = of_axes(replace(step, pp=1, partition=None))
    table = -(-V // 2) * h if sizes.tied else 0
    assert (sum(here for here, _ in found), sum(shared for _, shared in found)) == (one[0] + table, one[1])


@pytest.mark.parametrize("t", [1, 2, 8])
def test_a_tied_table_is_summed_over_the_ends(t):
    """12.4: beta_g V h / t on first and last stage, once a step; here the ranks of tp have rows of their own."""
    sizes = replace(SIZES, tied=True, vocab=104)
    for pp in (2, 3):
        sent = [each.total("ends", "tied table") for each in of_ranks(replace(STEP, sizes=sizes, tp=t, pp=pp))]
        assert sent == [4 * 104 * h // t, *[0] * (pp - 2), 4 * 104 * h // t]
    assert traffic(replace(STEP, sizes=sizes, tp=t)).total("ends") == 0
    assert all(each.total("ends") == 0 for each in of_ranks(replace(STEP, tp=t, pp=2)))


def test_steps_that_overlap_agree_once_a_row():
    """One message of two numbers a step at the end of a row; all else as often as there are steps."""
    step = replace(STEP, pp=2, tp=2)
    one, row = traffic(step), traffic(replace(step, row=7))
    agreement = ("world", "loss and norm", "all_reduce")
    assert row.sums().pop(agreement) == (1, 7 * one.sums()[agreement][1])
    for key, (calls, sent) in one.sums().items():
        if key != agreement:
            assert row.sums()[key] == (7 * calls, 7 * sent)
    assert row.total() == pytest.approx(7 * one.total(), abs=7)
    assert row.table().startswith(f"{row.total():,} bytes a rank and row of 7 steps\n")


def test_one_rank_sends_nothing():
    sent = traffic(Step(SIZES, batch=4))
    assert sent.lines == ()
    assert sent.table() == "0 bytes a rank and step"
    assert str(sent) == "0 bytes a rank and step"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": 7}, "batch 7 is not divisible by 15"),
        ({"batch": 0}, "batch 0 is not divisible"),
        ({"tp": 3}, "heads 8 is not divisible by 3"),
        ({"tp": 0}, "heads 8 is not divisible by 0"),
        ({"dp": -3}, "is not divisible by -15"),
        ({"cp": 3}, "seq_len 40 is not divisible by 3"),
        ({"cp": 4, "tp": 4, "sequence_parallel": True}, "seq_len 40 is not divisible by 16"),
        ({"sizes": replace(SIZES, kv_heads=3)}, "heads 8 is not divisible by 3"),
        ({"sizes": replace(SIZES, heads=7)}, "width 48 is not divisible by 7"),
        ({"sizes": replace(SIZES, heads=12, width=48, kv_heads=3), "tp": 4}, "the larger, 4 is not divisible by 3"),
        ({"cp_attention": "star"}, "'star' is not known; known: ring, ulysses, rsa"),
        ({"pp": 0}, "stages 0 is not divisible by 0 (ranks of pp)"),
        ({"pp": 2, "partition": Partition((1, 1, 1))}, "stages 3 is not divisible by 2 (ranks of pp)"),
        ({"partition": Partition((1, 1))}, "a partition of 2 blocks for a model of 3 layers"),
        ({"pp": 2, "pp_rank": 2}, "there is no rank 2 of pp: it has 2"),
        ({"pp_rank": -1}, "there is no rank -1 of pp"),
        ({"slices": (20, 19)}, "slices of 20 + 19 tokens are not those of a sequence of 40"),
        ({"slices": (40, 0)}, "slices of 40 + 0 tokens"),
        ({"slices": ()}, "slices of no tokens"),
        ({"slices": (20, 20), "cp": 2}, "not with cp or sequence parallelism"),
        ({"slices": (20, 20), "tp": 2, "sequence_parallel": True}, "not with cp or sequence parallelism"),
        ({"row": 0}, "a row of 0 steps"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change, said):
    with pytest.raises(ConfigError) as refusal:
        replace(STEP, **change)
    assert said in str(refusal.value)


def test_the_table_adds_up_like_messages_and_shows_the_largest_first():
    sent = Traffic(
        (
            Line("tp", "head", "all_reduce", 2, 3, 1000),
            Line("cp", "attention", "send", 2, 2, 50_000),
            Line("cp", "attention", "send", 2, 1, 30_000),
        )
    )
    assert sent.table() == (
        "133,000 bytes a rank and step\n"
        "\n"
        "    bytes  calls  axis  cause      verb\n"
        "  130,000      3  cp    attention  send\n"
        "    3,000      3  tp    head       all_reduce"
    )
    assert str(sent) == "133 kB a rank and step: cp 130 kB, tp 3 kB"
    assert sent.total("cp") == 130_000
    assert sent.total(cause="head") == 3000


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (999, "999 bytes"),
        (1000, "1 kB"),
        (99_499, "99.5 kB"),
        (99_500, "100 kB"),
        (999_499, "999 kB"),
        (10**16, "10 PB"),
    ],
)
def test_short_numbers(nbytes, text):
    assert str(Traffic((Line("tp", "head", "send", 2, 1, nbytes),))) == f"{text} a rank and step"


@pytest.mark.parametrize(
    ("axis", "action", "path", "op", "cause"),
    [
        ("dp+cp", "COUNT", "", "", "count of targets"),
        ("dp+cp", "REDUCE", "", "", "gradients"),
        ("dp+cp", "B", "", "", "gradients"),
        ("dp+cp", "W", "", "", "gradients"),
        ("dp+cp", "B", "blocks.0", "recompute.backward", "gradients"),
        ("dp+cp", "F", "blocks.0", "fetch", "weights"),
        ("edp+cp", "B", "blocks.0", "fetch", "weights"),
        ("dp+cp", "STEP", "weights", "", "weights"),
        ("tp", "STEP", "", "", "optimizer"),
        ("ends", "REDUCE", "", "", "tied table"),
        ("pp", "SEND_F", "", "", "activations"),
        ("pp", "SEND_B", "", "", "activation gradients"),
        ("world", "STEP", "", "", "loss and norm"),
        ("world", "", "", "", "other"),
        ("tp", "F", "table", "all_reduce", "embedding"),
        ("tp", "B", "head", "copy.backward", "head"),
        ("tp", "F", "gpt", "vocabulary_cross_entropy", "cross-entropy"),
        ("tp", "F", "blocks.10.mlp.down", "all_reduce", "layers"),
        ("cp", "B", "blocks.0.attention", "ring_attention.backward", "attention"),
        ("tp", "F", "gpt", "all_reduce", "other"),
    ],
)
def test_causes_by_place(axis, action, path, op, cause):
    assert cause_of(axis, action, path, op) == cause

"""ZeRO, predicted: the paper's table, and what of the state of each stage a rank keeps."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.models.gpt import GPTConfig
from mpitrain.plan.memory import model_state
from mpitrain.plan.memory.zero import published
from mpitrain.plan.traffic import Step, slabs
from mpitrain.plan.traffic.slabs import shares
from mpitrain.routing import Routing

GIGABYTES = {  # ranks: stages 1, 2, 3 of 7.5 billion weights, of 128 billion, of a trillion
    1: ("120", "120", "120", "2048", "2048", "2048", "16000", "16000", "16000"),
    4: ("52.5", "41.3", "30", "896", "704", "512", "7000", "5500", "4000"),
    16: ("35.6", "21.6", "7.5", "608", "368", "128", "4750", "2875", "1000"),
    64: ("31.4", "16.6", "1.88", "536", "284", "32", "4187", "2218", "250"),
    256: ("30.4", "15.4", "0.47", "518", "263", "8", "4046", "2054", "62.5"),
    1024: ("30.1", "15.1", "0.12", "513", "257", "2", "4011", "2013", "15.6"),
}
MODELS = (7_500_000_000, 128_000_000_000, 1_000_000_000_000)


@pytest.mark.parametrize("ranks", GIGABYTES)
def test_the_papers_table(ranks):
    """T23.2, ALGORITHMS 30.5; the paper rounds some of its figures and cuts others off."""
    for column, printed in enumerate(GIGABYTES[ranks]):
        psi, stage = MODELS[column // 3], 1 + column % 3
        unit = Fraction(1, 10 ** len(printed.partition(".")[2]))
        assert abs(published(psi, ranks, stage) / 10**9 - Fraction(printed)) < unit, (psi, stage)


def test_the_papers_figure():
    """T23.2: 120, 31.4, 16.6 and 1.88 GB."""
    found = [round(float(published(MODELS[0], 64, stage)) / 1e9, 2) for stage in range(4)]
    assert found == [120.0, 31.41, 16.64, 1.88]


# ------------------------------------------------------------------------------------------------- what a rank keeps

EVEN = GPTConfig(vocab=32, layers=2, width=16, heads=4, seq_len=16)
UNEVEN = GPTConfig(vocab=17, layers=2, width=12, heads=6, seq_len=12, tied=True)
EXPERTS = replace(EVEN, routing=Routing(4))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("layout", [{"dp": 4}, {"dp": 2, "cp": 2}, {"dp": 8}], ids=str)
def test_where_rows_divide_a_rank_keeps_its_share_to_the_byte(layout, dtype, optimizer):
    """T23.2, ours: gradients are as wide as masters."""
    n, psi = layout["dp"] * layout.get("cp", 1), EVEN.num_parameters
    beta, wide = np.dtype(dtype).itemsize, max(4, np.dtype(dtype).itemsize)
    masters, moments = (4 if dtype == np.float16 else 0), (2 if optimizer == "adamw" else 1) * wide
    for zero in range(4):
        found = model_state(Step(EVEN, 8, dtype=dtype, zero=zero, **layout), optimizer)
        whole = (beta, masters, wide, moments)
        kept = tuple(b * psi // (n if zero >= cut else 1) for b, cut in zip(whole, (3, 1, 2, 1), strict=True))
        assert found == (*kept, 0, 0)


def every_rank(step):
    for dp_rank, cp_rank, tp_rank in product(range(step.dp), range(step.cp), range(step.tp)):
        yield replace(step, dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=tp_rank)


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, EXPERTS], ids=["even", "uneven", "experts"])
@pytest.mark.parametrize(
    "layout",
    [{"dp": 2}, {"dp": 3}, {"dp": 24}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "sequence_parallel": True},
     {"dp": 4, "ep": 2, "cp": 2}, {"dp": 8, "ep": 4, "tp": 2}],
    ids=str,
)  # fmt: skip
def test_every_row_is_one_ranks(sizes, layout):
    """T23.5: also where rows do not divide, and of tensors with fewer rows than ranks."""
    step = Step(sizes, 24, zero=1, **{axis: n for axis, n in layout.items() if axis != "ep" or sizes.routing})
    whole = {tp: {slab.name: slab for slab in slabs(replace(step, tp_rank=tp))} for tp in range(step.tp)}
    rows = {}
    for rank in every_rank(step):
        for slab in shares(rank):
            mine = whole[rank.tp_rank][slab.name]
            assert slab.shape[1:] == mine.shape[1:]
            ep = rank.dp_rank % step.ep if slab.axes == "edp+cp" else 0
            tp = 0 if slab.axes == "dp+cp+tp" else rank.tp_rank
            rows.setdefault((slab.name, tp, ep, mine.shape[0]), []).append(slab.shape[0])
    for (name, *_, all_rows), found in rows.items():
        assert sum(found) == all_rows, name
        if all_rows >= len(found):
            assert max(found) == -(-all_rows // len(found)), name
        else:
            assert sorted(found)[-2:] == [0, all_rows] or len(found) == 1, name


def test_small_tensors_are_dealt_out_so_that_ranks_have_as_much():
    """With more ranks than any tensor has rows each goes to the one that has least."""
    step = Step(UNEVEN, 64, dp=64, zero=3)
    found = [sum(slab.size for slab in shares(replace(step, dp_rank=rank))) for rank in range(64)]
    largest = max(slab.size for slab in slabs(step))
    assert sum(found) == UNEVEN.num_parameters
    assert max(found) == largest


def test_adafactor_keeps_sums_of_its_own_rows_and_of_all_columns():
    step = Step(EVEN, 8, dp=4, optimizer="adafactor", zero=1)
    h, v, s = 16, 32, 16
    matrices = [(v, h), (s, h), (h, v), *[(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)] * 2]
    vectors = 2 * h + 2 * (4 * h + 3 * h + h + 4 * h + h)
    assert model_state(step).optimizer == 4 * (sum(n // 4 + m for n, m in matrices) + vectors // 4)


def test_there_are_three_stages():
    with pytest.raises(ConfigError, match="ZeRO 4 is not known; known: 0, 1, 2, 3"):
        Step(EVEN, 8, zero=4)

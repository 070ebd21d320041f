"""Mixtures of experts by formula: published sizes, parameters, operations, messages; against what models count."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.config import Config
from mpitrain.config_rules import check_memory
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.flops import BACKWARD, FORWARD, Flops
from mpitrain.errors import ConfigError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.models.profile import measured_costs
from mpitrain.optim.sgd import Sgd
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import balance
from mpitrain.pipeline.passes import complete
from mpitrain.plan.experts import expert_weights
from mpitrain.plan.traffic import DATA, DATA_AND_TP, EXPERTS, Rows, Step, parameters, slabs, traffic
from mpitrain.routing import Routing

# Every number is another, so that no two letters of a formula can be confused.
L, h, S, V, E, k = 6, 48, 40, 101, 12, 5
SIZES = GPTConfig(vocab=V, layers=L, width=h, heads=8, seq_len=S, routing=Routing(E, k, "topk", every=2))
ALL_BLOCKS = replace(SIZES, routing=replace(SIZES.routing, every=1))
DROPLESS = replace(SIZES, routing=Routing(E, k, "topk", None, every=2))
d, e, m, b = 6, 3, 5, 2
STEP = Step(SIZES, batch=b * m * d, microbatches=m, dp=d, ep=e)

# -------------------------------------------------------------------------------------------------- published models

PRINTED = {  # ALGORITHMS 30.10: layers with experts, experts of each, width, hidden, gated, weights
    "GShard 2048E 60L": (30, 2048, 1024, 8192, False, 1e12),
    "GShard 2048E 36L": (18, 2048, 1024, 8192, False, 600e9),
    "GShard 2048E 12L": (6, 2048, 1024, 8192, False, 200e9),
    "GShard 512E 36L": (18, 512, 1024, 8192, False, 150e9),
    "GShard 512E 12L": (6, 512, 1024, 8192, False, 50e9),
    "GShard 128E 36L": (18, 128, 1024, 8192, False, 37e9),
    "GShard 128E 12L": (6, 128, 1024, 8192, False, 12.5e9),
    "Switch-Base": (12, 128, 768, 2048, True, 7e9),
    "Switch-Large": (24, 128, 1024, 2816, True, 26e9),
    "Switch-C": (30, 2048, 2080, 6144, False, 1571e9),
}


@pytest.mark.parametrize("name", PRINTED)
def test_the_experts_of_published_models_are_within_five_percent_of_what_is_printed(name):
    layers, experts, width, hidden, gated, printed = PRINTED[name]
    found = expert_weights(layers=layers, experts=experts, width=width, hidden=hidden, gated=gated)
    assert abs(found / printed - 1) < 0.05


def test_the_products_of_the_specification():
    keys = ("layers", "experts", "width", "hidden", "gated")
    sizes = [dict(zip(keys, PRINTED[f"Switch-{name}"][:-1], strict=True)) for name in ("C", "Base", "Large")]
    assert [f"{expert_weights(**each) / 1e9:.3g}" for each in sizes] == ["1.57e+03", "7.25", "26.6"]


@pytest.mark.parametrize("sizes", [SIZES, ALL_BLOCKS])
def test_our_own_experts_are_counted_alike(sizes):
    layers = len(sizes.routing.layers(L))
    assert sizes.num_expert_parameters == expert_weights(layers=layers, experts=E, width=h, hidden=4 * h)


# ------------------------------------------------------------------------------------------- parameters and operations


@pytest.mark.parametrize("every", [1, 2, 3, 6])
@pytest.mark.parametrize("change", [{}, {"tied": True}, {"kv_heads": 2}])
def test_parameters_are_those_that_the_model_has(every, change):
    """With every 6 of 6 blocks only the last has experts."""
    sizes = replace(SIZES, routing=replace(SIZES.routing, every=every), **change)
    model = GPT(sizes, Mesh(World(Alone(), "none")))
    assert sizes.num_parameters == model.num_parameters
    _, blocks, _ = sizes.parameters_of_parts
    assert [*blocks] == [block.num_parameters for block in model.blocks]
    assert sizes.num_expert_parameters == sum(p.data.size for p in model.parameters() if ".experts." in p.name)


def test_a_token_meets_its_own_experts_only():
    """The dense twin of top 1 has as many parameters besides the router, and biases of its MLPs."""
    routed, dense = replace(ALL_BLOCKS, routing=Routing(E)), replace(SIZES, routing=None)
    assert dense.num_active_parameters == dense.num_parameters
    assert routed.num_active_parameters - L * E * h + L * 5 * h == dense.num_parameters
    assert routed.flops_per_token - L * 6 * E * h == dense.flops_per_token


@pytest.mark.parametrize("dp", [{}, {"dp": 2, "ep": 2}])
def test_operations_are_those_that_are_counted(dp):
    """Every choice is served where nothing is dropped; over all ranks of ep."""
    sizes = replace(DROPLESS, layers=2)

    def counted():
        mesh = Mesh(world(), **dp)
        model = GPT(sizes, mesh)
        rows = complete("1f1b", ranks=1, microbatches=1)
        executor, flops = Executor(model, Sgd(model.parameters()), mesh, rows), Flops()
        text = (np.arange(20 * S) * 7919 % V).astype(np.uint16)
        tokens = Tokens(Corpus(text, text, V, "bytes", "numbers", (), (), ""), S)
        with listen(flops):
            executor.step(tokens.batch_at(0, 4, mesh.dp.rank, mesh.dp.size))
        return flops.total(FORWARD), flops.total(BACKWARD)

    forward, backward = map(sum, zip(*LocalWorld(dp.get("dp", 1)).run(counted), strict=True))
    assert backward == 2 * forward
    assert forward + backward == 4 * S * sizes.flops_per_token


def test_blocks_with_experts_weigh_more_where_stages_are_balanced():
    """By parameters a block with experts is most of a model; by operations it has k MLPs."""
    embedding, blocks, head = SIZES.parameters_of_parts
    assert blocks[1] == blocks[3] > 8 * blocks[0] == 8 * blocks[2]
    assert balance(blocks, 3, embedding, head).layers == (2, 2, 2)
    _, costs, _ = SIZES.flops_of_parts
    assert costs[1] - costs[0] == 6 * h * (8 * h * (k - 1) + E)


@pytest.mark.parametrize(("every", "kinds"), [(1, 1), (2, 2)])
def test_measured_costs_time_each_kind_of_block(every, kinds):
    sizes = GPTConfig(vocab=16, layers=3, width=16, heads=2, seq_len=8, routing=Routing(4, every=every))
    found = measured_costs(sizes, rows=2, ep=2)
    assert len(found.blocks) == 3
    assert len({*found.blocks}) <= kinds
    assert found.blocks[0] == found.blocks[2]
    assert min(found.blocks) > 0


# ----------------------------------------------------------------------------------------------------- slabs, messages


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "layout", [{}, {"dp": 2, "ep": 2}, {"tp": 2}, {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True}]
)
def test_slabs_are_the_parameters_of_the_rank(layout, dtype):
    """Names, shapes, precision and the axes of their sum."""
    sizes = replace(SIZES, layers=2, kv_heads=1, vocab=15)

    def main():
        here = dict(layout)
        sp = here.pop("sequence_parallel", False)
        model = GPT(sizes, mesh := Mesh(world(), **here), sequence_parallel=sp, dtype=dtype)
        step = Step(sizes, 8, dtype=dtype, sequence_parallel=sp, tp_rank=mesh.tp.rank, **here)
        return [*slabs(step)], [
            (p.name, p.data.shape, p.data.dtype == np.float32, mesh.merged(p.spec.replicate_axes()).name)
            for p in model.parameters()
        ]

    for predicted, found in LocalWorld(layout.get("dp", 1) * layout.get("tp", 1)).run(main):
        wide = dtype == np.float32
        assert sorted((each.name, each.shape, wide or each.is_wide, each.axes) for each in predicted) == sorted(found)


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("sp", [False, True])
def test_parameters_by_the_axes_that_sum_them(t, sp):
    """16.3: dense ones over all of dp, experts over edp alone, E/e of them here, a t-th of each."""
    step = replace(STEP, tp=t, sequence_parallel=sp)
    found, layers = parameters(step), len(step.expert_blocks)
    assert found[EXPERTS] == layers * 8 * h * h * E // (e * t)
    between = L * 6 * h - layers * h + 2 * h + S * h + layers * h * E
    matrices = (L * (12 * h * h + 7 * h) - layers * (8 * h * h + 4 * h)) // t + 2 * -(-V // t) * h
    assert found[DATA] + found.get(DATA_AND_TP, 0) == between + matrices
    assert found.get(DATA_AND_TP, 0) == (between if sp and t > 1 else 0)
    sent = traffic(step)
    n = d // e
    assert sent.total(EXPERTS, "gradients") == 2 * Fraction(n - 1, n) * 4 * found[EXPERTS]


@pytest.mark.parametrize("capacity", [0.25, 1.0, 1.25, 8.0, None])
@pytest.mark.parametrize(("dtype", "beta"), [(np.float32, 4), (np.float64, 8), (np.float16, 2)])
def test_rows_go_to_experts_and_back_and_so_do_their_gradients(capacity, dtype, beta):
    """16: 4 (e-1)/e beta h a row, of which there are at most k T, and at most as many as places."""
    step = replace(STEP, sizes=replace(SIZES, routing=replace(SIZES.routing, capacity_factor=capacity)), dtype=dtype)
    places = E * step.sizes.routing.capacity(S)
    rows, layers = b * min(k * S, places), L // 2
    assert traffic(step).total("ep", "experts") == m * layers * 4 * Fraction(e - 1, e) * beta * h * rows
    assert traffic(step).total("ep", "routing") == m * layers * Fraction(e - 1, e) * 8 * E
    again = traffic(replace(step, recompute="full"))
    assert again.total("ep", "experts") == m * layers * 6 * Fraction(e - 1, e) * beta * h * rows
    assert again.total("ep", "routing") == 2 * m * layers * Fraction(e - 1, e) * 8 * E


def test_rows_that_are_known_are_what_is_sent():
    """A rank whose experts nobody asked sends its own rows twice, and gets none."""
    rows = {block: [Rows(7 + block, 0)] * (m - 1) + [Rows(0, 90)] for block in (1, 3, 5)}
    sent = sum(7 + block for block in rows) * (m - 1) + 3 * 90
    known = traffic(replace(STEP, expert_rows=rows))
    assert known.total("ep", "experts") == round(2 * Fraction(e - 1, e) * 4 * h * sent)
    assert not known.at_most
    assert traffic(STEP).at_most
    assert not traffic(replace(STEP, ep=1)).at_most


@pytest.mark.parametrize("c", [2, 4])
def test_ranks_that_share_a_sequence_tell_each_other_what_stands_before(c):
    step = replace(STEP, cp=c)
    counts = 4 * (2 + 2 * k * b * E)
    assert traffic(step).total("cp", "routing") == m * (L // 2) * (c - 1) * counts
    without = replace(step, sizes=DROPLESS)
    assert traffic(without).total("cp", "routing") == round(m * (L // 2) * 2 * Fraction(c - 1, c) * 8 * b * E)


@pytest.mark.parametrize("t", [2, 4])
def test_weights_and_choices_enter_tensor_parallel_experts(t):
    plain = replace(STEP, tp=t, dtype=np.float16)
    dense = replace(plain, sizes=replace(SIZES, routing=None), ep=1)
    factor, chosen, layers = Fraction(t - 1, t), b * S * k, L // 2
    more = traffic(plain).total("tp", "layers") - traffic(dense).total("tp", "layers")
    assert more == m * layers * 2 * factor * 4 * chosen
    assert traffic(plain).total("tp", "routing") == 0
    cut = replace(plain, sequence_parallel=True)
    more = traffic(cut).total("tp", "layers") - traffic(dense).total("tp", "layers")
    assert more == m * layers * 2 * factor * 4 * chosen
    assert traffic(cut).total("tp", "routing") == m * layers * factor * 4 * chosen


def test_rows_of_the_batch_and_what_layers_count_travel_with_what_is_told_anyway():
    """E numbers asked, and six more of each layer; on all ranks, also where a stage has no experts."""
    ranks = [replace(STEP, pp=2, pp_rank=rank) for rank in (0, 1)]
    for step in ranks:
        assert traffic(step).total(cause="count of targets") == round(2 * Fraction(d - 1, d) * 16)
        n = 2 * d
        assert traffic(step).total("world") == round(2 * Fraction(n - 1, n) * 8 * (4 + 3 * (E + 6)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ep": 4}, "dp 6 is not divisible by 4 (ranks of ep)"),
        ({"dp": 5, "batch": 50, "ep": 5}, "experts 12 is not divisible by 5 (ranks of ep)"),
        ({"ep": 0}, "dp 6 is not divisible by 0 (ranks of ep)"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change, said):
    with pytest.raises(ConfigError) as refusal:
        replace(STEP, **change)
    assert said in str(refusal.value)


# ------------------------------------------------------------------------------------------------------------- settings


def test_a_budget_for_what_only_the_data_knows_is_refused():
    with pytest.raises(ConfigError, match=r"--dropless and --recompute-budget 8.*\n.*--capacity-factor"):
        Config(experts=4, dropless=True, recompute_budget=8.0)
    Config(experts=4, recompute_budget=8.0)


def test_ranks_of_ep_share_the_weights_of_experts():
    """1.6e10 parameters of experts fit on 64 ranks only where each holds a part of them."""
    sizes = {"layers": 4, "width": 4096, "experts": 32, "batch": 64, "seq_len": 16}
    parameters = 4 * (4 * 4096**2 + 32 * 8 * 4096**2)
    with pytest.raises(ConfigError, match="parameters need at least"):
        check_memory(Config(**sizes), parameters, 64, parameters - 16 * 4096**2, 2**36, 1)
    check_memory(Config(**sizes, ep=32), parameters, 64, parameters - 16 * 4096**2, 2**36, 1)

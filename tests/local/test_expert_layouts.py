"""Experts in any layout are the same training run as one rank: checks_experts.py on ranks that are threads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_experts as checks
from checks_layouts import name_of
from checks_recompute import is_the_same_run
from often import some

from mpitrain.autograd import Tape, Tensor
from mpitrain.autograd.auxiliary import collect
from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.config import parse
from mpitrain.config_rules import check_layout
from mpitrain.errors import ConfigError, MeshError, ShapeError
from mpitrain.models.gpt import GPT
from mpitrain.parallel.expert.moe import Moe, RoutedTokens
from mpitrain.parallel.expert.router import balance_loss
from mpitrain.rng import Draw
from mpitrain.routing import Routing


def run(axes: dict[str, Any], check: Callable[..., None], *args: Any, **how: Any) -> None:
    """A check on the ranks of a layout."""
    LocalWorld(checks.ranks_of(axes)).run(lambda: check(world(), *args, **axes, **how))


def shown(how: dict[str, Any]) -> str:
    routing = how["sizes"].routing
    unsaid = ("sizes", "recompute", "bucket_bytes", *checks.SHORT)
    words = {name: value for name, value in how.items() if name not in unsaid}
    said = [name_of(words), routing.router, f"C{routing.capacity_factor or 'none'}", f"every{routing.every}"]
    return " ".join([*said, *(name for name in ("recompute", "bucket_bytes") if name in how)])


def cases(layouts: list[dict[str, Any]], seed: int = 0) -> list[Any]:
    return [pytest.param(how, id=shown(how)) for how in checks.drawn(layouts, seed)]


# --------------------------------------------------------------------------------------------------------- every layout


@pytest.mark.parametrize("how", some(cases(checks.LAYOUTS), 5))
def test_every_layout_of_experts_is_the_same_run(how: dict[str, Any]) -> None:
    """T16.1, T28.1, C48: loss, choices, the router's losses, gradients, norms, weights and moments, and evaluation."""
    LocalWorld(checks.ranks_of(how)).run(lambda: checks.spread(world(), **how))


@pytest.mark.parametrize("how", some(cases(checks.MORE, 5)[::4], 2))
def test_experts_beside_everything_else_are_the_same_run(how: dict[str, Any]) -> None:
    LocalWorld(checks.ranks_of(how)).run(lambda: checks.spread(world(), **how))


def everything() -> list[Any]:
    """Every layout with every router, capacity, number of micro-batches, and with experts in every block or other.

    A third of them is proven, in which every two of these meet.
    """
    found = []
    choices = product([*checks.LAYOUTS, *checks.MORE], checks.ROUTERS, checks.FACTORS, (1, 4), (1, 2))
    for number, (axes, name, factor, micros, every) in enumerate(choices):
        if "chunks" in axes and micros == 1:
            continue
        sizes = checks.sizes(checks.router(name, factor, every), axes)
        extras = checks.EXTRAS[number % len(checks.EXTRAS)]
        how = {**axes, **checks.SHORT, "steps": 3, "micros": micros, "sizes": sizes, **extras}
        found.append(pytest.param(how, id=f"{number} {shown(how)}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", everything()[::3])
def test_every_layout_with_every_router_is_the_same_run(how: dict[str, Any]) -> None:
    LocalWorld(checks.ranks_of(how)).run(lambda: checks.spread(world(), **how))


@pytest.mark.parametrize(
    ("axes", "experts"),
    [({"dp": 4, "ep": 2}, 6), ({"dp": 6, "ep": 3}, 3), ({"dp": 8, "ep": 8}, 8), ({"dp": 2, "ep": 2}, 2)],
)
def test_other_numbers_of_experts_and_ranks(axes: dict[str, int], experts: int) -> None:
    """C48 with other numbers."""
    routing = Routing(experts, 2, "topk", capacity_factor=0.75, z_loss=1e-2, jitter=0.3, balance_loss=0.1)
    run(axes, checks.spread, sizes=checks.sizes(routing))


@pytest.mark.parametrize("name", ["switch", "gshard"])
@pytest.mark.parametrize(
    "axes", [{"dp": 2, "ep": 2, "tp": 2, "sp": True}, {"dp": 2, "ep": 2, "pp": 2, "schedule": "zb-h1"}]
)
def test_experts_that_are_made_again_give_the_same_bits(axes: dict[str, Any], name: str) -> None:
    """T19.5: the same choices, and the router's losses count once."""
    how = {"sizes": checks.sizes(checks.router(name, 1.0)), "micros": 2}
    run(axes, is_the_same_run, ("blocks.*",), states=True, **how)


# --------------------------------------------------------------------------------------------- only the router's losses


@pytest.mark.parametrize(
    ("axes", "micros", "name"),
    [
        ({}, 4, "switch"),
        ({"dp": 2}, 1, "gshard"),
        ({"dp": 4}, 4, "switch"),
        ({"tp": 2}, 1, "switch"),
        ({"tp": 2}, 4, "gshard"),
        ({"dp": 2, "tp": 2}, 4, "switch"),
        ({"dp": 4, "tp": 2}, 1, "gshard"),
        ({"dp": 4, "ep": 4}, 4, "gshard"),
        ({"dp": 2, "ep": 2, "tp": 2, "sp": True}, 1, "switch"),
        ({"cp": 2}, 4, "switch"),
        ({"pp": 2}, 4, "gshard"),
    ],
)
def test_a_routers_own_loss_reaches_it_with_the_same_strength_in_every_layout(
    axes: dict[str, Any], micros: int, name: str
) -> None:
    """C50."""
    routing = checks.router(name, 1.25, jitter=0.0, z_loss=0.0, balance_loss=0.01)
    run(axes, checks.routers_learn_from_their_own_losses, routing, micros=micros)


@pytest.mark.parametrize("axes", [{"dp": 3, "tp": 2, "sp": True}, {"dp": 3, "ep": 3}, {"cp": 3}])
def test_so_it_does_with_other_numbers_and_with_rows_that_are_padding(axes: dict[str, Any]) -> None:
    routing = Routing(3, 2, "topk", balance_loss=0.5, z_loss=0.25, jitter=0.2)
    sizes = replace(checks.SIZES, width=12, heads=6, seq_len=12)
    run(axes, checks.routers_learn_from_their_own_losses, routing, micros=2, batch=24, padded=5, sizes=sizes)


def test_the_gradient_is_that_of_the_losses_that_are_told() -> None:
    """T18.4 for a whole step: finite differences of what StepReport.counted says, where no choice changes."""
    routing = Routing(4, 2, "topk", balance_loss=0.01, z_loss=0.02)
    eps, name, batch = 1e-6, "blocks.1.mlp", 16

    def told(change: float) -> tuple[float, np.ndarray, np.ndarray]:
        gradients, counted = checks.silent_gradients(World(Alone(), "none"), routing, nudge=change)
        balance, z = counted[name][-2:]
        return 0.01 * balance / batch + 0.02 * z / batch, counted[name][:4], gradients[f"{name}.router.weight"][2]

    (plus, choices, _), (minus, as_many, _), (_, _, gradient) = (told(change) for change in (eps, -eps, 0.0))
    assert np.array_equal(choices, as_many)
    np.testing.assert_allclose((plus - minus) / (2 * eps), gradient[1], rtol=1e-6)


# --------------------------------------------------------------------------------------------------- one expert for all


@pytest.mark.parametrize(
    ("axes", "factor"),
    [
        ({"dp": 4, "ep": 4}, 1.25),
        ({"dp": 2, "ep": 2, "tp": 2, "sp": True}, None),
        ({"dp": 2, "ep": 2, "cp": 2}, 1.25),
        ({"dp": 2, "ep": 2, "pp": 2, "schedule": "zb-h1"}, None),
    ],
)
def test_one_expert_may_get_all_tokens(axes: dict[str, Any], factor: float | None) -> None:
    """C53."""
    run(axes, checks.one_expert_has_all_tokens, checks.router("switch", factor))


@pytest.mark.parametrize(
    ("axes", "routing", "how"),
    [
        ({"dp": 4, "ep": 4}, checks.router("switch", 1.0), {"dtype": np.float16}),
        ({"dp": 4, "ep": 2, "tp": 2}, checks.router("switch", None), {"dtype": np.float16, "size": 3.0}),
        ({"dp": 4, "ep": 4}, checks.router("switch", None), {"empty_rank": 0, "size": 3.0}),
        ({"dp": 4, "ep": 4}, checks.router("switch", 1.0), {"empty_rank": 2, "recompute": True}),
        ({"dp": 2, "ep": 2, "cp": 2}, checks.router("gshard", 1.0), {"empty_rank": 1}),
        ({"dp": 2, "ep": 2, "pp": 2}, checks.router("renormalised", 0.5), {"empty_rank": 0, "dtype": np.float16}),
        ({"dp": 8, "ep": 8}, Routing(16, capacity_factor=0.01), {"steps": 4}),
        ({"dp": 4, "ep": 4}, Routing(4, balance_loss=0.0), {"size": 50.0}),
    ],
)
def test_so_it_may_in_halves_with_other_numbers_and_on_ranks_without_a_token(
    axes: dict[str, Any], routing: Routing, how: dict[str, Any]
) -> None:
    """C53: three steps forward and backward, no hang, nothing that is not finite."""
    run(axes, checks.one_expert_has_all_tokens, routing, **how)


# ---------------------------------------------------------------------------------------------------- what a layer does


def layer(routing: Routing, width: int = 8, **how: Any) -> Moe:
    """A layer of experts on one rank."""
    mesh = Mesh(World(Alone(), "none"))
    made = Moe("moe", routing, width, 4 * width, mesh, **how)
    made.materialize(mesh, seed=1, dtype=np.float64)
    return made


def pulled(made: Moe, columns: np.ndarray) -> None:
    """Give the router these columns."""
    made.router.weight.data[...] = columns


def identity(made: Moe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every expert return what it gets."""
    monkeypatch.setattr(made.experts, "_through", lambda rows, *counts: rows)


def all_seconds_go(made: Moe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draw of GShard's second experts hold none back."""
    monkeypatch.setattr(made, "_drawn", lambda ids, *_: ids)


def training(batch: int, length: int) -> RoutedTokens:
    draw = Draw(0, 0, np.arange(batch), np.arange(length))
    return RoutedTokens(training=True, draw=draw, lengths=np.full(batch, length))


@pytest.mark.parametrize("factor", [0.5, 1.0, None])
def test_experts_that_do_nothing_give_kept_tokens_back_and_dropped_ones_as_zeros(
    monkeypatch: pytest.MonkeyPatch, factor: float | None
) -> None:
    """T16.2, T16.3: with weights of 1, which one expert of one has."""
    made = layer(Routing(1, capacity_factor=factor))
    identity(made, monkeypatch)
    x = np.random.default_rng(0).normal(size=(3, 16, 8))
    y, _ = made(Tensor(x), training(3, 16))
    kept = 16 if factor is None else int(16 * factor)
    assert np.array_equal(y.data[:, :kept], x[:, :kept])
    assert not y.data[:, kept:].any()


def test_a_factor_of_all_experts_over_k_drops_nothing_and_is_dropless() -> None:
    """T16.6."""
    x = Tensor(np.random.default_rng(0).normal(size=(3, 16, 8)))
    for k, name in ((1, "switch"), (2, "topk")):
        whole, free = (layer(Routing(4, k, name, capacity_factor=f))(x, training(3, 16))[0] for f in (4 / k, None))
        assert whole.data.tobytes() == free.data.tobytes()


def test_evaluation_is_dropless_and_adds_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(checks.router("gshard", 0.5))
    x = Tensor(np.random.default_rng(0).normal(size=(3, 16, 8)))
    free = layer(checks.router("gshard", None, jitter=0.0))
    all_seconds_go(free, monkeypatch)
    (y, losses), (wanted, _) = made(x, RoutedTokens()), free(x, training(3, 16))
    assert losses == []
    assert np.array_equal(y.data, wanted.data)


UNIFORM = np.zeros((8, 4))
CROWD = np.array([[np.log(7.0), 0.0, 0.0, 0.0]] * 8) / 8  # of inputs of ones: 7/10 for expert 0


@pytest.mark.parametrize(
    ("name", "columns", "wanted"),
    [
        ("gshard", UNIFORM, 1 / 16),
        ("gshard", CROWD, 0.175),
        ("switch", UNIFORM, 1.0),
        ("switch", CROWD, 2.8),
    ],
)
def test_the_balance_loss_is_that_of_the_papers(name: str, columns: np.ndarray, wanted: float) -> None:
    """T17.1, T17.2, T18.1.  Equal probabilities with choices that are spread evenly, and all on one."""
    routing = checks.router(name, 1.25)
    p = np.exp(np.ones((2, 8, 8)) @ columns)
    p /= p.sum(-1, keepdims=True)
    load = np.full((2, 4), 2) if columns is UNIFORM else np.array([[8, 0, 0, 0]] * 2)
    found = balance_loss(Tensor(p), load, np.full(2, 8), None, routing)
    assert float(found.data) == pytest.approx(2 * wanted, rel=1e-14)  # two rows
    if name == "switch" and columns is UNIFORM:
        assert 0.01 * float(found.data) / 2 == pytest.approx(Routing(4).balance_loss * wanted)


def test_with_room_for_all_the_weights_of_a_token_sum_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """T17.4: no second expert is held back where nothing is drawn."""
    for routing in (Routing(4, 2, "gshard", capacity_factor=2.0), Routing(4, 3, "topk", 8.0, renormalize=True)):
        made = layer(routing)
        identity(made, monkeypatch)
        all_seconds_go(made, monkeypatch)
        x = np.random.default_rng(0).normal(size=(2, 16, 8))
        y, _ = made(Tensor(x), training(2, 16))
        np.testing.assert_allclose(y.data, x, rtol=1e-14)


def test_the_router_learns_from_the_loss_alone() -> None:
    """T18.2: without a loss of its own, through the weight of the one expert."""
    made = layer(Routing(4, balance_loss=0.0))
    with Tape() as tape, collect() as said:
        y, losses = made(Tensor(np.random.default_rng(0).normal(size=(2, 16, 8)), requires_grad=True), training(2, 16))
    assert losses == []
    assert said.losses == []
    tape.run_backward([(y, np.random.default_rng(1).normal(size=y.shape))])
    assert np.abs(made.router.weight.grad).max() > 1e-3


def test_a_crowded_expert_keeps_its_share_of_a_row() -> None:
    """T18.3."""
    made = layer(Routing(4, capacity_factor=1.0))
    pulled(made, CROWD * 100)
    x = np.ones((3, 16, 8)) + 1e-3 * np.random.default_rng(0).normal(size=(3, 16, 8))
    y, _ = made(Tensor(x), training(3, 16))
    assert y.data.any(-1).sum(1).tolist() == [4, 4, 4]
    assert y.data.any(-1)[:, :4].all()


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("flags", "dp", "said"),
    [
        ("--experts 6 --dp 4 --ep 4", 4, "--experts 6 is not divisible by --ep 4"),
        ("--dp 4 --ep 2", 4, "--ep 2 is for a mixture of experts"),
        ("--top-k 2", 1, "--top-k 2 is for a mixture of experts"),
        (
            "--experts 4 --pp 2 --schedule pipedream --clip 0 --microbatches 1",
            1,
            "--schedule pipedream and --experts 4",
        ),
        ("--experts 4 --pp 2 --schedule pipedream-2bw", 1, "--schedule pipedream-2bw and --experts 4"),
        ("--experts 4 --pp 2 --schedule terapipe", 1, "--schedule terapipe and --experts 4"),
        ("--experts 4 --pp 2 --schedule terapipe --dropless", 1, "--schedule terapipe and --experts 4"),
        ("--experts 4 --dropless --recompute-budget 5", 1, "--recompute-budget"),
    ],
)
def test_settings_that_experts_do_not_go_with_are_refused(flags: str, dp: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(
            parse(["--layers", "4", "--steps", "1", "--microbatches", "2", "--batch", "16", *flags.split()]), dp
        )
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_a_pipeline_of_slices_takes_experts_that_know_no_whole_sequence() -> None:
    """Nothing of theirs depends on the other tokens of a row."""
    routing = Routing(4, 2, "topk", None, balance_loss=0.0, z_loss=0.1, jitter=0.1)
    how = {"sizes": checks.sizes(routing), "micros": 2, "slices": (6, 1, 9)}
    run({"pp": 2, "dp": 2, "ep": 2, "schedule": "terapipe"}, checks.spread, **how)


def test_experts_that_do_not_divide_are_refused_on_every_rank_before_any_message() -> None:
    def build() -> None:
        mesh = Mesh(world(), dp=4, ep=4)
        with pytest.raises(ShapeError, match="6 experts are not divisible by axis ep of size 4"):
            GPT(replace(checks.SIZES, routing=Routing(6)), mesh)

    LocalWorld(4).run(build)


def test_an_axis_of_experts_that_does_not_divide_dp_is_refused() -> None:
    def build() -> None:
        with pytest.raises(MeshError, match="--ep 4 does not divide dp 2"):
            Mesh(world(), dp=2, ep=4)

    LocalWorld(2).run(build)

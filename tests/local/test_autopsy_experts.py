"""Values that are not finite in a mixture of experts: the rank, the layer and the op are named, and no rank waits."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_autopsy as checks

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.debug.states import StateChecker
from mpitrain.errors import NumericsError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT
from mpitrain.nn.module import mark_recompute
from mpitrain.optim.scaler import LossScaler
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.expert import moe
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.hunter import Hunter
from mpitrain.pipeline.passes import complete
from mpitrain.routing import Routing

GSHARD = Routing(4, 2, "gshard", 1.0, balance_loss=0.1, z_loss=0.01, jitter=0.1)
SIZES = replace(checks.SIZES, layers=2, width=8, heads=2, routing=GSHARD)
LAYOUTS = {
    "dp4,ep2": {"dp": 4, "ep": 2},
    "dp2,ep2,tp2": {"dp": 2, "ep": 2, "tp": 2},
    "dp2,ep2,tp2,sp": {"dp": 2, "ep": 2, "tp": 2, "sp": True},
    "dp2,ep2,pp2": {"dp": 2, "ep": 2, "pp": 2},
    "dp2,ep2,pp2 zb-h1": {"dp": 2, "ep": 2, "pp": 2, "schedule": "zb-h1", "micros": 4},
    "dp2,ep2,cp2": {"dp": 2, "ep": 2, "cp": 2},
    "dp4,ep2 overlap": {"dp": 4, "ep": 2, "overlap": True},
}


def named(count, seed=0, sizes=SIZES, **how):
    with checks.spoiling():
        return LocalWorld(4).run(lambda: checks.named(world(), count, seed, sizes=sizes, **how))[0]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("how", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.slow
def test_sixty_places_of_a_mixture_are_all_named(how, seed):
    assert named(60, seed, **how) == (60, [])


def test_places_of_all_kinds_are_named_and_nothing_is_changed():
    assert named(8, 0, replace(SIZES, layers=1), micros=1, **LAYOUTS["dp2,ep2,tp2"]) == (8, [])


def spoiled(layout, spoil, sizes=SIZES, ranks=4):
    """(text, autopsy) of a step that `spoil(trial)` has prepared, the same on all ranks."""

    def main():
        trial = checks.Trial(world(), sizes=sizes, **layout)
        place = spoil(trial)
        checks.SPOIL.set(None if place is None else checks.Spoil(place))
        with pytest.raises(NumericsError) as caught:
            trial.executor.step(trial.batch)
        return str(caught.value), caught.value.autopsy

    with checks.spoiling():
        told, *others = LocalWorld(ranks).run(main)
    assert all(one == told for one in others)
    return told


def expert_on(rank, change):
    """Do something to the `up` matrices of the second layer's experts on one rank."""

    def spoil(trial):
        if trial.world.rank == rank:
            (p,) = [p for p in trial.model.parameters() if p.name == "blocks.1.mlp.experts.up"]
            change(p)

    return spoil


def test_a_weight_of_one_expert_that_is_not_finite_is_named_with_the_rank_that_holds_it():
    def change(p):
        p.master[1, 0, 0] = np.nan  # of the second expert on that rank
        p.refresh()

    text, told = spoiled({"dp": 4, "ep": 2}, expert_on(3, change))
    found = told.finding
    assert (found.kind, found.rank, found.path) == ("weight", 3, "blocks.1.mlp.experts.up")
    assert "First: the weight blocks.1.mlp.experts.up was not finite before the step, on rank 3 at step 3." in text
    assert "Way out: go on from a checkpoint that was saved before." in text


@pytest.mark.parametrize(
    ("layout", "place", "kind", "op"),
    [
        (
            LAYOUTS["dp4,ep2"],
            checks.Place("gradient", 2, "B1@0", "blocks.0.mlp.experts.down"),
            "gradient",
            "grouped_matmul",
        ),
        (
            LAYOUTS["dp2,ep2,tp2,sp"],
            checks.Place("forward", 1, "F1@0", "blocks.1.mlp.router", "linear"),
            "forward",
            "linear",
        ),
        (LAYOUTS["dp2,ep2,tp2"], checks.Place("forward", 3, "F0@0", "blocks.0.mlp", "softmax"), "forward", "softmax"),
        (
            LAYOUTS["dp2,ep2,cp2"],
            checks.Place("forward", 3, "F0@0", "blocks.0.mlp.router", "linear"),
            "forward",
            "linear",
        ),
        (
            LAYOUTS["dp2,ep2,pp2"],
            checks.Place("forward", 2, "F1@1", "blocks.1.mlp.experts", "grouped_matmul", 1),
            "forward",
            "grouped_matmul",
        ),
        (
            LAYOUTS["dp4,ep2"],
            checks.Place("forward", 1, "F0@0", "blocks.1.mlp.experts", "combine"),
            "forward",
            "combine",
        ),
    ],
    ids=["a gradient", "logits", "probabilities", "logits of a chunk", "an expert", "what comes of it"],
)
def test_what_one_rank_makes_is_named_there(layout, place, kind, op):
    """Choices of experts that nobody can compare are choices all the same: no rank waits for rows that do not come."""
    text, told = spoiled(layout, lambda trial: place)
    found = told.finding
    assert (found.kind, found.rank, found.path) == (kind, place.rank, place.path)
    assert found.op.removesuffix(".backward") == op
    assert f"of {place.path}" in text
    assert f"on rank {place.rank} at step 3, micro-batch {place.action[1]} ({place.action})" in text
    assert told.made == (place.rank,)


@pytest.mark.parametrize(("where", "seen"), [("wire", 0), ("landing", 2)])
def test_rows_that_a_message_spoils_on_their_way_to_experts_are_told_by_who_got_them(where, seen):
    """Ranks 0 and 1 and ranks 2 and 3 have the same halves of the experts: 0 and 2 write to each other."""
    place = checks.Place(where, 2, "F1@0", "", "all_to_all", 0)
    text, told = spoiled(LAYOUTS["dp2,ep2,tp2"], lambda trial: place)
    found = told.finding
    assert (found.kind, found.verb, found.axis, found.rank) == ("message", "all_to_all", "ep", seen)
    assert found.path == "blocks.0.mlp.experts"
    assert "First: all_to_all over ep (" in text
    assert "inside all_to_all of blocks.0.mlp.experts brought it, though all that was given to it is finite" in text


class Objective:
    """A listener that keeps what the passes of a step add to the objective, and the gradients that came of it."""

    def __init__(self, model):
        self.model = model
        self.losses = []
        self.gradients = []

    def __call__(self, event):
        if event.kind != "action" or event.phase != "end":
            return
        if event.info["action"].kind == "F":
            self.losses += [(name, float(loss.data), weight) for name, loss, weight in event.info["auxiliary"]]
        elif event.info["action"].kind == "REDUCE":
            self.gradients = [p.grad.copy() for p in self.model.parameters()]


@pytest.mark.parametrize(("dtype", "recomputed"), [("float64", True), ("float16", False)])
def test_the_second_run_adds_the_same_losses_to_the_objective_and_counts_nothing(dtype, recomputed):
    """Gradients are equal to the last bit, so seeds were, too; jitter and the draw of second experts are on."""

    def main():
        mesh = Mesh(world(), dp=2, ep=2)
        model = GPT(SIZES, mesh, seed=3, dtype=dtype)
        mark_recompute(model, ["blocks.*"] if recomputed else [])
        scaler = LossScaler(2.0**8) if dtype == "float16" else None
        rows = complete("1f1b", ranks=1, microbatches=2)
        executor = Executor(model, Sgd(model.parameters(), lr=0.0), mesh, rows, scaler=scaler)
        batch = next(checks.numbers(SIZES).batches(8, mesh.dp.rank, 2))
        first, second = Objective(model), Objective(model)
        with listen(first):
            executor.step(batch)
        report = executor.report
        executor.run_again([batch], second)
        assert executor.report is report
        return first.losses, second.losses, first.gradients, second.gradients, report

    for losses, again, gradients, gradients_again, report in LocalWorld(2).run(main):
        assert losses == again
        names = [(name, weight) for name, _, weight in losses]
        assert names == [(f"blocks.{n}.mlp", weight) for _ in range(2) for n in (0, 1) for weight in (0.1, 0.01)]
        assert all(value > 0 for _, value, _ in losses)
        assert all(np.array_equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
        assert report.rows == 8


@pytest.mark.parametrize(("dtype", "tp"), [("float64", 1), ("float16", 2)])
def test_ranks_to_which_no_token_comes_raise_no_alarm(dtype, tp, monkeypatch):
    """All tokens choose the experts of the first rank of ep: the other one works on nothing, and sums zeros."""
    monkeypatch.setattr(moe, "choose", lambda p, k: np.broadcast_to(np.arange(k), (*p.shape[:-1], k)).copy())

    def main():
        mesh = Mesh(world(), dp=2, ep=2, tp=tp)
        model = GPT(replace(SIZES, routing=replace(GSHARD, capacity_factor=4.0)), mesh, seed=3, dtype=dtype)
        optimizer = Sgd(model.parameters(), lr=0.1)
        executor = Executor(model, optimizer, mesh, complete("1f1b", ranks=1, microbatches=2))
        hunter = Hunter(model, optimizer, mesh.world.rank)
        found = []
        with listen(StateChecker(model.parameters(), mesh)), listen(hunter):
            for batch in checks.numbers(SIZES).batches(8, mesh.dp.rank, 2, stop_step=3):
                executor.step(batch)
                found.append(hunter.finding)
        (up,) = [p for p in model.parameters() if p.name == "blocks.1.mlp.experts.up"]
        return found, bool(up.grad.any()), mesh.ep.rank

    for found, learns, rank in LocalWorld(2 * tp).run(main):
        assert found == [None] * 3
        assert learns == (rank == 0)


def test_a_gradient_of_one_expert_that_overflows_is_skipped_by_all_ranks():
    """The expert is on one rank of ep alone, and no other rank holds any part of it."""

    def main():
        mesh = Mesh(world(), dp=4, ep=4)
        model = GPT(SIZES, mesh, seed=3, dtype="float16")
        rows = complete("1f1b", ranks=1, microbatches=2)
        executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, rows, scaler=LossScaler(2.0**8))
        batches = checks.numbers(SIZES).batches(8, mesh.dp.rank, 4)
        (up,) = [p for p in model.parameters() if p.name == "blocks.1.mlp.experts.up"]

        def spoil(event):
            if event.name.startswith("STEP") and event.phase == "begin" and world().rank == 2:
                up.grad.reshape(-1)[-1] = np.inf

        before = [p.master.copy() for p in model.parameters()]
        with listen(spoil):
            executor.step(next(batches))
        assert executor.report.skipped
        assert all(np.array_equal(p.master, old) for p, old in zip(model.parameters(), before, strict=True))
        executor.step(next(batches))
        assert not executor.report.skipped
        return executor.optimizer.updates

    assert LocalWorld(4).run(main) == [1] * 4

"""Pipelines that never drain are the serial replay of their version tables (stale_oracle.py), on every layout."""

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the oracle is
import stale_oracle as oracle
from chain import Chain, numbers, on_paper

from mpitrain import checkpoint
from mpitrain.autograd.ops import IGNORE
from mpitrain.autograd.tape import Tape
from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.compare import compare
from mpitrain.errors import NumericsError, ScheduleError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW, Sgd
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import Partition
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.pipeline.versions import live_versions, versions_of

RULES = {"pipedream": oracle.stashing, "pipedream-2bw": oracle.double_buffered}
METHODS = {
    # The true gradient of a key's bias is zero, and AdamW divides the noise that is left by eps: a larger one keeps it
    # below the digits that are compared.
    "adamw": lambda parameters: AdamW(parameters, lr=2e-3, eps=1e-6, weight_decay=0.1),
    "sgd": lambda parameters: Sgd(parameters, lr=0.1, momentum=0.9),
}


def rate(update):
    return 0.02 / (1 + update)


def executor_of(name, model, method, mesh, micros=1, **how):
    return Executor(
        model,
        method,
        mesh,
        lambda batches: complete(name, ranks=mesh.pp.size, microbatches=micros, batches=batches),
        versions=SCHEDULES[name].versions,
        **how,
    )


class Watch:
    """Notes the version that each F uses, and after each STEP how many are alive."""

    def __init__(self):
        self.used, self.alive = [], []

    def __call__(self, event):
        if event.kind != "action" or event.phase != "end":
            return
        action, versions = event.info["action"], event.info["executor"].versions
        if action.kind == "F":
            self.used.append(versions.held[(action.micro, 0, action.stage)])
        elif action.kind == "STEP":
            self.alive.append(versions.alive)


# --------------------------------------------------------------------------------------- a model that fits on paper


def chain_on(name, stages, batches, micros=1, lr=0.05):
    """Final weights, losses, and what each rank's watch saw."""

    def main():
        mesh = Mesh(world(), pp=stages)
        model = Chain(mesh, stages)
        executor = executor_of(name, model, Sgd(model.parameters(), lr=lr), mesh, micros)
        watch = Watch()
        with listen(watch):
            reports = executor.run(batches)
        assert not executor.versions.held
        return float(model.parameters()[0].data[0]), [report.loss for report in reports], watch, executor.versions.peak

    weights, losses, watches, peaks = zip(*LocalWorld(stages).run(main), strict=True)
    assert all(mine == losses[0] for mine in losses)
    return np.array(weights), losses[0], watches, peaks


def replayed(rule, stages, batches, micros=1, lr=0.05):
    model = Chain(Mesh(World(Alone(), "none")), stages)
    method = Sgd(model.parameters(), lr=lr)
    found = oracle.replay(model, method, [batches], rule, lambda name: int(name.split(".")[1]), stages, micros)
    return np.array([p.data[0] for p in model.parameters()]), found


def test_a_chain_of_three_is_the_stashing_rule_on_paper():
    """T8.3."""
    batches = numbers(20, 4)
    expected = on_paper(batches, 3, 0.05, lambda i, t: max(0, t - 2 + i))[-1]
    assert np.abs(chain_on("pipedream", 3, batches)[0] - expected).max() < 1e-12
    assert np.abs(replayed(oracle.stashing, 3, batches)[0] - expected).max() < 1e-12


def test_rules_differ_and_the_oracle_knows_each():
    """T8.3, also for vertical sync, which the library does not offer, and for a pipeline that flushes."""
    batches = numbers(20, 4)
    ages = {
        oracle.stashing: lambda i, t: max(0, t - 2 + i),
        oracle.vertical_sync: lambda i, t: max(0, t - 2),
        oracle.double_buffered: lambda i, t: max(0, t - 1),
        oracle.newest: lambda i, t: t,
    }
    found = []
    for rule, age in ages.items():
        expected = on_paper(batches, 3, 0.05, age)[-1]
        found.append(replayed(rule, 3, batches)[0])
        assert np.abs(found[-1] - expected).max() < 1e-12, rule.__name__
    for i, one in enumerate(found):
        assert all(np.abs(one - other).max() > 1e-4 for other in found[:i])


def test_versions_of_pipedream_on_four_stages():
    """T8.1."""
    _, _, watches, peaks = chain_on("pipedream", 4, numbers(10, 2))
    assert [watch.used for watch in watches] == [
        [0, 0, 0, 0, 1, 2, 3, 4, 5, 6],
        [0, 0, 0, 1, 2, 3, 4, 5, 6, 7],
        [0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    ]
    assert peaks == (4, 3, 2, 1)


def test_versions_of_double_buffering_on_four_stages():
    """T8.4: gradients are one batch old on every stage, and two versions are enough."""
    batches = numbers(4, 8)
    weights, losses, watches, peaks = chain_on("pipedream-2bw", 4, batches, micros=4)
    for watch in watches:
        assert watch.used == [0] * 8 + [1] * 4 + [2] * 4
        assert max(watch.alive) == 2
    assert peaks == (2, 2, 2, 2)
    history = on_paper(batches, 4, 0.05, lambda i, t: max(0, t - 1))
    assert np.abs(weights - history[-1]).max() < 1e-12
    for t, batch in enumerate(batches):
        error = batch.x * history[max(0, t - 1)].prod() - batch.y
        assert losses[t] == pytest.approx((error**2).mean() / 2, rel=1e-12)


def test_double_buffering_with_fewer_micro_batches_than_ranks_is_refused():
    """T8.5."""
    with pytest.raises(ScheduleError, match=r"(?s)3 for 4 ranks.*Way out"):
        complete("pipedream-2bw", ranks=4, microbatches=3, batches=2)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batches", [1, 2, 5])
def test_rows_of_any_length(name, ranks, batches):
    """Also those that end before the pipeline is full."""
    given = numbers(batches, 12)
    for micros in (ranks, 4):
        expected, found = replayed(RULES[name], ranks, given, micros)
        weights, losses, watches, peaks = chain_on(name, ranks, given, micros)
        rows, rule = complete(name, ranks=ranks, microbatches=micros, batches=batches), SCHEDULES[name].versions
        tables = versions_of(rows, rule)
        assert [watch.used for watch in watches] == tables
        assert list(zip(*tables, strict=True)) == found.versions
        if batches > 1:  # of a single one the pool does not know that no other will ask for the version before
            assert list(peaks) == live_versions(rows, rule)
        assert np.abs(weights - expected).max() < 1e-12
        assert losses == pytest.approx(found.losses, rel=1e-12)


@pytest.mark.parametrize("clip", [0.0, 5.0], ids=["", "clip"])
def test_a_step_that_is_not_finite_leaves_the_newest_weights(clip):
    """With clipping ranks agree on each step and the weights are those before it; without, at the end of the row."""
    batches = numbers(4, 4)
    batches[1].x[2] = np.inf

    def main():
        model = Chain(mesh := Mesh(world(), pp=2), 2)
        executor = executor_of("pipedream-2bw", model, Sgd(model.parameters(), lr=0.05), mesh, 2, clip=clip)
        told = "No weight was changed" if clip else "weights were changed before"
        with pytest.raises(NumericsError, match=rf"after 1 updates the loss (?s:.)*{told}"):
            executor.run(batches)
        assert executor.versions.alive == 1
        return executor.versions.number, float(model.parameters()[0].data[0])

    found = LocalWorld(2).run(main)
    assert [number for number, _ in found] == ([1, 1] if clip else [4, 4])
    assert all(math.isfinite(weight) for _, weight in found) == bool(clip)


def test_the_way_out_of_what_is_not_finite_is_one_that_the_schedule_takes():
    """PipeDream clips nothing; 2BW may.  The step that is named is the first that went wrong, not the row's last."""
    batches = numbers(4, 4)
    batches[1].x[2] = np.inf

    def main(name, micros):
        model = Chain(mesh := Mesh(world(), pp=2), 2)
        executor = executor_of(name, model, Sgd(model.parameters(), lr=0.05), mesh, micros)
        with pytest.raises(NumericsError) as caught:
            executor.run(batches)
        return str(caught.value)

    for name, micros in (("pipedream", 1), ("pipedream-2bw", 2)):
        for text in LocalWorld(2).run(lambda name=name, micros=micros: main(name, micros)):
            assert "after 1 updates" in text
            assert ("--clip 1" in text) == (name == "pipedream-2bw")


# --------------------------------------------------------------------------------------------------------------- a GPT

SEQUENCE = 8
CLIP = 2.0  # between the norms


def sizes(layers, tied=False):
    return GPTConfig(vocab=13, layers=layers, width=8, heads=2, seq_len=SEQUENCE, dropout=0.2, tied=tied)


def tokens():
    stream = (np.arange(6_000) * 7919 % 104729 % 13).astype(np.uint16)
    return Tokens(Corpus(stream[:5_000], stream[5_000:], 13, "bytes", "numbers", (), (), ""), SEQUENCE, seed=5)


def with_gaps(batch):
    """The batch without some targets: each has another number of them, and some rows have none."""
    gone = np.arange(SEQUENCE) < (batch.places[:, None] * 5 + batch.step * 2) % (SEQUENCE + 1)
    return replace(batch, targets=np.where(gone, IGNORE, batch.targets))


def rows_of(lengths, batch, rank=0, size=1):
    """The mini-batches of each row."""
    starts = np.cumsum([0, *lengths])
    return [
        [with_gaps(given) for given in tokens().batches(batch, rank, size, int(start), int(stop))]
        for start, stop in pairwise(starts)
    ]


def state_of(model, method):
    """kind -> name -> array."""
    return {"weights": {p.name: p.data for p in model.parameters()}, **method.state_dict()}


def train(name, layers, lengths, batch, micros, method, clip=0.0, tied=False, **axes):
    """What was reported of each mini-batch, and the whole final state; replicas of a slab hold the same bits."""

    def main():
        mesh = Mesh(world(), pp=len(layers), **axes)
        model = GPT(sizes(sum(layers), tied), mesh, partition=Partition(layers), seed=3, dtype=np.float64)
        optimizer = METHODS[method](model.parameters())
        executor = executor_of(name, model, optimizer, mesh, micros, lr=rate, clip=clip)
        rows = rows_of(lengths, batch, mesh.dp.rank, mesh.dp.size)
        reports = [report for row in rows for report in executor.run(row)]
        assert optimizer.updates == sum(lengths)
        return reports, {p.name: (p.full_shape, p.rectangle) for p in model.parameters()}, state_of(model, optimizer)

    found = LocalWorld(len(layers) * math.prod(axes.values())).run(main)
    assert all(reports == found[0][0] for reports, _, _ in found)
    whole = {}
    for _, places, state in found:
        for kind, arrays in state.items():
            for parameter, array in arrays.items():
                shape, rectangle = places[parameter]
                full = whole.setdefault(kind, {}).setdefault(parameter, np.full(shape, np.nan))
                assert np.isnan(full[rectangle]).all() or np.array_equal(full[rectangle], array), parameter
                full[rectangle] = array
    return found[0][0], whole


def reference(name, layers, lengths, batch, micros, method, clip=math.inf, tied=False):
    model = GPT(sizes(sum(layers), tied), Mesh(World(Alone(), "none")), seed=3, dtype=np.float64)
    optimizer = METHODS[method](model.parameters())
    stage_of = oracle.gpt_stage(layers)
    rows = rows_of(lengths, batch)
    found = oracle.replay(model, optimizer, rows, RULES[name], stage_of, len(layers), micros, rate, clip)
    return found, state_of(model, optimizer)


def equals_the_replay(name, layers, lengths, batch, micros, method, *, clip=math.inf, tied=False, **axes):
    bound = 0.0 if clip == math.inf else clip
    reports, state = train(name, layers, lengths, batch, micros, method, bound, tied, **axes)
    expected, whole = reference(name, layers, lengths, batch, micros, method, clip, tied)
    assert clip == math.inf or max(expected.norms) > clip > min(expected.norms)
    for side, losses, norms in (
        (state, [report.loss for report in reports], [report.grad_norm for report in reports]),
        (whole, expected.losses, expected.norms),
    ):
        side.update(losses={"all": np.array(losses)}, norms={"all": np.array(norms)})
    assert [report.lr for report in reports] == [rate(update) for update in range(sum(lengths))]
    assert set(state) == set(whole)
    for kind, tensors in state.items():
        worst = compare(tensors, whole[kind])[0]
        assert worst.ok, f"{kind}: {worst}"


LAYERS = {1: (2,), 2: (1, 1), 3: (2, 0, 1), 4: (1, 1, 1, 1), 8: (0, 1, 1, 0, 1, 1, 0, 0)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", LAYERS)
def test_pipedream_is_its_replay(ranks, method):
    equals_the_replay("pipedream", LAYERS[ranks], [ranks + 3, 2], 2, 1, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", LAYERS)
def test_double_buffering_is_its_replay(ranks, method):
    equals_the_replay("pipedream-2bw", LAYERS[ranks], [4, 2], ranks + 1, ranks + 1, method)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=["dp2", "tp2", "dp2 tp2"])
def test_with_data_and_tensor_parallelism(name, axes):
    equals_the_replay(name, (1, 1), [5, 3], 8, 2, "adamw", **axes)


@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"tp": 2}], ids=["pp3", "pp3 dp2", "pp3 tp2"])
def test_double_buffering_clips_and_ties_as_the_replay_does(axes):
    equals_the_replay("pipedream-2bw", (1, 0, 1), [5, 2], 6, 3, "adamw", clip=CLIP, tied=True, **axes)


def test_one_rank_is_serial_training_to_the_last_bit():
    """T8.2."""
    reports, state = train("pipedream", (2,), [6], 4, 1, "sgd")
    model = GPT(sizes(2), Mesh(World(Alone(), "none")), seed=3, dtype=np.float64)
    optimizer = METHODS["sgd"](model.parameters())
    for number, batch in enumerate(rows_of([6], 4)[0]):
        model.start_step()
        with Tape() as tape:
            loss = model(batch)
        tape.run_backward([(loss, np.full_like(loss.data, 1 / batch.count))])
        optimizer.step(rate(number))
        assert reports[number].loss == float(loss.data) / batch.count
    for kind, arrays in state_of(model, optimizer).items():
        assert all(np.array_equal(state[kind][name], array) for name, array in arrays.items()), kind


@pytest.mark.parametrize("name", RULES)
def test_a_run_that_was_saved_between_two_rows_goes_on_bit_by_bit(name, tmp_path):
    layers, micros = (1, 1, 1), 3

    def start():
        mesh = Mesh(world(), pp=3)
        model = GPT(sizes(3), mesh, partition=Partition(layers), seed=3, dtype=np.float64)
        optimizer = METHODS["adamw"](model.parameters())
        return model, optimizer, executor_of(name, model, optimizer, mesh, micros, lr=rate)

    def slabs(model, optimizer, executor):
        return checkpoint.slabs_of(model.parameters(), optimizer.state_tensors(), executor.mesh)

    def validated(executor):
        return executor.evaluate(list(tokens().validation(8))[:2])

    def whole():
        model, optimizer, executor = start()
        first, second = rows_of([4, 4], 3)
        executor.run(first)
        loss = validated(executor)
        checkpoint.save(tmp_path, 4, slabs(model, optimizer, executor), {"updates": optimizer.updates}, world())
        return loss, executor.run(second), state_of(model, optimizer)

    def resumed():
        model, optimizer, executor = start()
        scalars = checkpoint.load(checkpoint.latest(tmp_path), slabs(model, optimizer, executor), world())
        optimizer.load_state(optimizer.state_dict(), scalars["updates"])
        return validated(executor), executor.run(rows_of([4, 4], 3)[1]), state_of(model, optimizer)

    for once, again in zip(LocalWorld(3).run(whole), LocalWorld(3).run(resumed), strict=True):
        assert once[:2] == again[:2]
        for kind, arrays in once[2].items():
            assert all(np.array_equal(again[2][kind][name], array) for name, array in arrays.items()), kind

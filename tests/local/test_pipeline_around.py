"""What stands around a pipeline's steps: tied weights, the norm, evaluation, sampling, saving; and what W counts."""

import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_layouts as checks
from checks_layouts import method, numbers, whole

from mpitrain import checkpoint
from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.data.tokens import Batch
from mpitrain.debug.compare import compare
from mpitrain.errors import ConfigError, NumericsError, ScheduleError, ShapeError
from mpitrain.events import listen
from mpitrain.models.generate import generate
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.nn.module import Boundary, Module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.replicas import check_replicas
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import balance
from mpitrain.pipeline.passes import complete

SMALL = GPTConfig(vocab=11, layers=4, width=8, heads=2, seq_len=6, dropout=0.2)


def executor_of(ranks, schedule="1f1b", micros=4, chunks=1, sizes=SMALL, clip=0.5, **axes):
    """The executor of a GPT on a mesh of these ranks."""
    mesh = Mesh(ranks, **axes)
    partition = balance([1.0] * sizes.layers, mesh.pp.size * chunks)
    model = GPT(sizes, mesh, partition=partition, seed=3, dtype=np.float64)
    rows = complete(schedule, ranks=mesh.pp.size, microbatches=micros, chunks=chunks)
    return Executor(model, method(model), mesh, rows, clip=clip)


def alone():
    return World(Alone(), "none")


def batches(executor, batch, steps, first=0):
    mesh = executor.mesh
    return numbers(executor.model.config).batches(batch, mesh.dp.rank, mesh.dp.size, first, first + steps)


def weights(executor):
    parameters = executor.model.parameters()
    return whole(executor.mesh.world, executor.mesh, parameters, [p.data for p in parameters])


def gradients(executor):
    parameters = executor.model.parameters()
    return whole(executor.mesh.world, executor.mesh, parameters, [p.grad for p in parameters])


# ----------------------------------------------------------------------------------------------------------- tied table


@pytest.mark.parametrize(("pp", "chunks", "schedule"), [(2, 1, "1f1b"), (4, 1, "zb-h1"), (2, 2, "interleaved")])
def test_copies_of_a_tied_table_stay_the_same_bits_for_ten_steps(pp, chunks, schedule):
    """C44, T12.2, T12.3."""
    sizes = replace(SMALL, tied=True)

    def main(ranks, **how):
        executor = executor_of(ranks, sizes=sizes, **how)
        found = []
        for batch in batches(executor, 4, 10):
            loss = executor.step(batch)
            check_replicas(executor.model.parameters(), executor.mesh, f"after step {len(found)}")
            found.append((loss, executor.report.grad_norm))
        ends = executor.mesh.ends
        if ends.size == 2:
            copies = ends.all_gather(executor.model.table.weight.data[None], 0)
            np.testing.assert_array_equal(copies[0], copies[1])
        return {"curve": np.array(found)}, weights(executor)

    found = LocalWorld(pp).run(lambda: main(world(), schedule=schedule, pp=pp, chunks=chunks))[0]
    for mine, theirs in zip(found, main(alone()), strict=True):
        assert compare(mine, theirs)[0].ok


@pytest.mark.parametrize("pp", [2, 4])
def test_the_gradient_of_a_tied_table_is_the_sum_of_both_its_uses_and_counts_once(pp):
    """C44: on one rank, an untied model with the same numbers has the two parts."""

    def untied():
        executor = executor_of(alone(), clip=0.0)
        tied = executor_of(alone(), sizes=replace(SMALL, tied=True))
        for p in executor.model.parameters():
            name = "table.weight" if p.name == "head.weight" else p.name
            same = next(q.data for q in tied.model.parameters() if q.name == name)
            p.data[...] = same.T if p.name == "head.weight" else same
        executor.step(next(batches(executor, 4, 1)))
        return gradients(executor)

    def tied():
        executor = executor_of(world(), sizes=replace(SMALL, tied=True), pp=pp, clip=0.0)
        executor.step(next(batches(executor, 4, 1)))
        here = {p.name: p.grad.copy() for p in executor.model.parameters()}
        return here.get("table.weight"), gradients(executor), executor.report.grad_norm

    parts = untied()
    expected = parts["table.weight"] + parts.pop("head.weight").T
    found = LocalWorld(pp).run(tied)
    for rank, (here, full, norm) in enumerate(found):
        assert (here is None) == (0 < rank < pp - 1)
        if here is not None:
            np.testing.assert_allclose(here, expected, atol=1e-12 * np.abs(expected).max(), rtol=0)
        assert compare(full, {**parts, "table.weight": expected})[0].ok
        assert norm == pytest.approx(np.sqrt(sum((g**2).sum() for g in full.values())), rel=1e-12)
    np.testing.assert_array_equal(found[0][0], found[-1][0])


# ------------------------------------------------------------------------------------------------------------- the norm


class One:
    """A batch of one target."""

    count = 1

    def split(self, parts):
        return [self]


class Slope(Module):
    """The loss is 3 a + 4 b with a on the first stage and b on the last; stages between pass on what comes."""

    def __init__(self, mesh):
        super().__init__("slope")
        self.num_stages = mesh.pp.size
        self.stages = (mesh.pp.rank,)
        if mesh.pp.rank in (0, self.num_stages - 1):
            self.weight = Parameter(f"weight.{mesh.pp.rank}", (1,), init=lambda *_: np.zeros(1))
        self.materialize(mesh, 0, np.float64)

    def forward_stage(self, stage, batch, *inputs, carry=None):
        if stage == 0:
            return (self.weight * 3.0,)
        return inputs if stage < self.num_stages - 1 else ((inputs[0] + self.weight * 4.0).sum(),)

    def boundary(self, stage, batch):
        return (Boundary((1,), np.dtype(np.float64), {}),) if stage else ()


@pytest.mark.parametrize("pp", [2, 3, 5])
def test_all_ranks_clip_by_the_norm_of_all_stages(pp):
    """C28, C46: norms 3 and 4 make 5, so with 1 allowed every gradient is divided by 5."""

    def main():
        mesh = Mesh(world(), pp=pp)
        model = Slope(mesh)
        optimizer = Sgd(model.parameters(), lr=1.0)
        executor = Executor(model, optimizer, mesh, complete("1f1b", ranks=pp, microbatches=1), clip=1.0)
        executor.step(One())
        return executor.report.grad_norm, *(float(p.data[0]) for p in model.parameters())

    first, *between, last = LocalWorld(pp).run(main)
    assert first == pytest.approx((5.0, -0.6), rel=1e-6)  # clipping adds 1e-6 to the norm
    assert last == pytest.approx((5.0, -0.8), rel=1e-6)
    assert 4 * first[1] == pytest.approx(3 * last[1], rel=1e-15)
    assert between == [(5.0,)] * (pp - 2)


# ------------------------------------------------------------------------------------- micro-batches of different shape


class Ragged(Batch):
    """Its micro-batches have 1, 2, 3, ... rows, and each of them fewer tokens than the one before."""

    def split(self, parts):
        starts = np.cumsum([0, *range(1, parts + 1)])
        assert starts[-1] == len(self.places)
        plain = Batch(**{field.name: getattr(self, field.name) for field in fields(Batch)})
        return [
            replace(
                plain,
                inputs=plain.inputs[start:stop, :length],
                targets=plain.targets[start:stop, :length],
                places=plain.places[start:stop],
                positions=plain.positions[:length],
            )
            for start, stop, length in zip(starts, starts[1:], range(plain.inputs.shape[1], 0, -1), strict=False)
        ]


@pytest.mark.parametrize(
    ("pp", "chunks", "schedule"), [(2, 1, "gpipe"), (4, 1, "1f1b"), (3, 1, "zb-h1"), (2, 2, "interleaved")]
)
def test_micro_batches_may_have_different_numbers_of_rows_and_tokens(pp, chunks, schedule):
    """What comes into a stage has the shape that its own micro-batch gives it."""

    def main(ranks, **how):
        executor = executor_of(ranks, micros=4, **how)
        losses = []
        for batch in batches(executor, 10, 3):
            ragged = Ragged(**{field.name: getattr(batch, field.name) for field in fields(Batch)})
            losses.append(executor.step(ragged))
        return {"losses": np.array(losses)}, weights(executor)

    found = LocalWorld(pp).run(lambda: main(world(), pp=pp, chunks=chunks, schedule=schedule))
    for mine, theirs in zip(found[0], main(alone()), strict=True):
        assert compare(mine, theirs)[0].ok


# ----------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize(("schedule", "pp"), [("zb-h1", 1), ("zb-h1", 3), ("1f1b", 3)])
def test_every_linear_goes_back_once_a_micro_batch_for_its_weights(schedule, pp):
    """T10.4: in W where there is one, and B then makes the gradients of inputs alone."""
    micros = 5
    halves: list[Counter] = [Counter() for _ in range(pp)]

    def main():
        action = ""
        counted = halves[world().rank]

        def count(event):
            nonlocal action
            if event.kind == "action" and event.phase == "begin":
                action = event.info["action"].kind
            elif event.kind == "op" and event.phase == "end" and event.name == "linear.backward":
                x, weight = event.info["wanted"][:2]
                counted[event.info["path"], action, x, weight] += 1

        executor = executor_of(world(), schedule, micros, pp=pp)
        with listen(count):
            executor.step(next(batches(executor, micros, 1)))

    LocalWorld(pp).run(main)
    found = sum(halves, Counter())
    paths = {path for path, *_ in found}
    assert len(paths) == 4 * SMALL.layers + 1  # qkv, proj, up, down, and the head
    assert set(found.values()) == {micros}
    kinds = [("B", True, False), ("W", False, True)] if schedule == "zb-h1" else [("B", True, True)]
    assert found.keys() == {(path, *kind) for path in paths for kind in kinds}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_rank_holds_fewer_micro_batches_than_with_gpipe(schedule):
    """GPipe's m, 1F1B's p - i, and ZB-H1 what W needs of i more."""
    pp, micros = 4, 8

    def main(schedule):
        executor = executor_of(world(), schedule, micros, pp=pp)
        held = []

        def look(event):
            if event.kind == "action" and event.phase == "end" and event.info["action"].kind == "F":
                held.append(executor.bytes_in_flight)

        with listen(look):
            executor.step(next(batches(executor, micros, 1)))
        return max(held)

    gpipe, other = (LocalWorld(pp).run(main, name) for name in ("gpipe", schedule))
    for rank, (mine, all_) in enumerate(zip(other, gpipe, strict=True)):
        more = rank if schedule == "zb-h1" else 0
        assert 0.9 * (pp - rank) <= micros * mine / all_ <= 1.15 * (pp - rank + more), rank


def test_a_step_without_a_target_has_no_loss_and_moves_nothing():
    def main():
        executor = executor_of(world(), "zb-h1", pp=3)
        batch = next(batches(executor, 4, 1))
        nothing = replace(batch, targets=np.full_like(batch.targets, -100))
        first = executor.step(nothing)
        assert executor.report.grad_norm == 0.0
        some = replace(batch, targets=np.where(batch.places[:, None] == 2, batch.targets, -100))
        return first, executor.empty_steps, executor.step(some), executor.report.targets

    found = LocalWorld(3).run(main)
    assert found == [found[0]] * 3
    first, empty, second, targets = found[0]
    assert (first, empty, targets) == (0.0, 1, SMALL.seq_len)
    assert second > 0


# ----------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("number", [0, 1, 7])
@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (1, 3), (2, 1), (2, 3), (3, 1), (4, 1), (4, 2)])
def test_any_number_of_batches_is_evaluated(pp, chunks, number):
    def main(ranks, **how):
        executor = executor_of(ranks, schedule="interleaved", chunks=chunks, **how)
        mesh = executor.mesh
        found = list(numbers(SMALL).validation(5, mesh.dp.rank, mesh.dp.size))[:number]
        return executor.evaluate(iter(found)), executor.evaluate(found)

    reference = main(alone())
    assert (reference[0] > 0) == (number > 0)
    for once, again in LocalWorld(pp).run(lambda: main(world(), pp=pp)):
        assert once == again == pytest.approx(reference[0], rel=1e-12)


def test_pipelines_beside_each_other_may_evaluate_different_numbers_of_batches():
    """No row of the data axis waits for another before the last sum."""

    def main(ranks, **how):
        executor = executor_of(ranks, **how)
        found = list(numbers(SMALL).validation(5))[:7]
        return executor.evaluate([found[:5], found[5:]][executor.mesh.dp.rank] if how else found)

    found = LocalWorld(4).run(lambda: main(world(), pp=2, dp=2))
    assert found == pytest.approx([main(alone())] * 4, rel=1e-12)


def test_an_evaluation_between_steps_changes_nothing():
    def main(evaluates):
        executor = executor_of(world(), schedule="zb-h1", pp=3)
        found = list(numbers(SMALL).validation(5))[:4]
        losses = []
        for batch in batches(executor, 4, 4):
            losses.append(executor.step(batch))
            if evaluates:
                executor.evaluate(found)
        assert executor.bytes_in_flight == 0
        return losses

    assert LocalWorld(3).run(main, True) == LocalWorld(3).run(main, False)


# -------------------------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize(
    "axes", [{"pp": 2}, {"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "chunks": 2}, {"pp": 2, "dp": 2}, {"pp": 3, "tp": 2}]
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_text_is_the_one_of_one_rank(axes, tied):
    """Longer than the sequence, so that the window slides, too."""
    chunks = axes.get("chunks", 1)
    axes = {name: size for name, size in axes.items() if name != "chunks"}

    def main(ranks, **how):
        executor = executor_of(ranks, "interleaved", chunks=chunks, sizes=replace(SMALL, tied=tied), **how)
        return list(generate(executor.model, [1, 2, 3], 12, seed=4))

    texts = LocalWorld(int(np.prod(list(axes.values())))).run(lambda: main(world(), **axes))
    assert texts == [main(alone())] * len(texts)


def test_a_model_whose_stages_are_elsewhere_says_so():
    def main():
        executor = executor_of(world(), pp=2)
        with pytest.raises(ShapeError, match="this rank of axis pp holds the stages") as error:
            executor.model(next(batches(executor, 4, 1)))
        return str(error.value)

    first, last = LocalWorld(2).run(main)
    assert "the stages 0 of 2, the others are elsewhere" in first
    assert "the stages 1 of 2, the others are elsewhere" in last


def test_rows_of_another_pipeline_are_refused():
    def main():
        mesh = Mesh(world(), pp=2)
        model = GPT(SMALL, mesh, dtype=np.float64)
        for rows in (
            complete("1f1b", ranks=4, microbatches=2),
            complete("interleaved", ranks=2, microbatches=2, chunks=2),
        ):
            with pytest.raises(ScheduleError):
                Executor(model, Sgd(model.parameters(), lr=1.0), mesh, rows)

    LocalWorld(2).run(main)


def test_the_stages_of_a_rank_may_be_a_list():
    def main():
        mesh = Mesh(world(), pp=2)
        model = GPT(SMALL, mesh, dtype=np.float64)
        model.stages = list(model.stages)
        executor = Executor(model, Sgd(model.parameters(), lr=1.0), mesh, complete("1f1b", ranks=2, microbatches=2))
        return executor.step(next(batches(executor, 4, 1)))

    first, last = LocalWorld(2).run(main)
    assert first == last > 0


# --------------------------------------------------------------------------------------------------------------- saving

LAYOUTS = [{"pp": 1}, {"pp": 4, "schedule": "zb-h1"}, {"pp": 2, "dp": 2}, {"pp": 2, "chunks": 2}, {"pp": 2, "tp": 2}]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_checkpoint_goes_from_any_pipeline_to_any_other(tmp_path, tied):
    """Saved on two stages, loaded on others, saved there and loaded on two again: the same bits and the same losses."""
    sizes = replace(SMALL, tied=tied)

    def start(**how):
        how = {"schedule": "interleaved" if how.get("chunks") else "1f1b", **how}
        return executor_of(world(), sizes=sizes, micros=2, **how)

    def tensors(executor):
        return checkpoint.slabs_of(executor.model.parameters(), executor.optimizer.state_tensors(), executor.mesh)

    def state(executor):
        """Weights and moments, all whole."""
        parameters = executor.model.parameters()
        of = executor.optimizer.state_dict()
        found = {"weight": weights(executor)}
        for kind, arrays in of.items():
            found[kind] = whole(world(), executor.mesh, parameters, [arrays[p.name] for p in parameters])
        return found

    def train_and_save(first, folder, **how):
        executor = start(**how)
        if first:
            checkpoint.load(checkpoint.latest(tmp_path / "two"), tensors(executor), world())
            executor.optimizer.updates = first
        loaded = state(executor) if first else None
        if folder is not None:
            for batch in [] if first else batches(executor, 4, 3):
                executor.step(batch)
            checkpoint.save(tmp_path / folder, 3, tensors(executor), {}, world(), layout=executor.mesh.sizes)
        saved = state(executor)
        losses = [executor.step(batch) for batch in batches(executor, 4, 2, first=3)]
        return loaded, saved, losses

    _, saved, losses = LocalWorld(2).run(lambda: train_and_save(0, "two", pp=2))[0]
    for how in LAYOUTS:
        ranks = how["pp"] * how.get("dp", 1) * how.get("tp", 1)
        name = checks.name_of(how) or "one"
        loaded, _, theirs = LocalWorld(ranks).run(lambda how=how, name=name: train_and_save(3, name, **how))[0]
        assert_same_bits(loaded, saved)
        assert theirs == pytest.approx(losses, rel=1e-10)

        def back(name=name):
            executor = start(pp=2)
            checkpoint.load(checkpoint.latest(tmp_path / name), tensors(executor), world())
            return state(executor)

        assert_same_bits(LocalWorld(2).run(back)[0], saved)


def assert_same_bits(mine, theirs):
    assert mine.keys() == theirs.keys()
    for kind, arrays in theirs.items():
        assert mine[kind].keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(mine[kind][name], array, err_msg=f"{kind} {name}")


def test_a_forward_that_no_stage_would_run_is_refused():
    class Doubled(GPT):
        def forward(self, batch):
            return 2.0 * super().forward(batch)

    class Staged(Doubled):
        def forward_stage(self, stage, batch, *inputs, carry=None):
            return super().forward_stage(stage, batch, *inputs, carry=carry)

    def main(kind):
        kind(GPTConfig(layers=2, width=8, heads=2, seq_len=4), Mesh(world(), pp=world().size))

    LocalWorld(1).run(main, Doubled)
    LocalWorld(2).run(main, Staged)
    with pytest.raises(ConfigError, match="Doubled has a forward of its own, which no stage of a pipeline would run"):
        LocalWorld(2).run(main, Doubled)


@pytest.mark.parametrize("dp", [1, 2])
def test_ranks_with_different_schedules_are_told_so_before_the_first_step(dp):
    def main():
        mesh = Mesh(world(), pp=2, dp=dp)
        model = GPT(GPTConfig(layers=2, width=8, heads=2, seq_len=4), mesh)
        micros = 4 if world().rank == 2 * dp - 1 else 2
        Executor(model, Sgd(model.parameters(), lr=0.1), mesh, complete("1f1b", ranks=2, microbatches=micros))

    with pytest.raises(ScheduleError, match=f"rank {2 * dp - 1} was given another schedule than rank 0"):
        LocalWorld(2 * dp).run(main)


@pytest.mark.parametrize("pp", [1, 2])
def test_after_an_error_in_the_middle_of_a_row_no_step_takes_its_messages_for_its_own(pp):
    """2BW agrees on each step, so all ranks stop where its loss is not finite, with later micro-batches under way."""

    def main():
        mesh = Mesh(world(), pp=pp)
        model = GPT(GPTConfig(vocab=5, layers=2, width=8, heads=2, seq_len=4), mesh, dtype=np.float64)
        before = [flat.weights.copy() for flat in model.flats]
        executor = Executor(
            model,
            Sgd(model.parameters(), lr=1e200),
            mesh,
            lambda batches: complete("pipedream-2bw", ranks=pp, microbatches=2, batches=batches),
            clip=1.0,
            versions="previous",
        )
        tokens = np.ones((2, 4), np.int64)
        batch = Batch(tokens, tokens, np.arange(2), np.arange(4), 0)
        with pytest.raises(NumericsError, match="not finite"):
            executor.run([batch] * 6)
        for flat, weights in zip(model.flats, before, strict=True):
            flat.weights[...] = weights
        if pp > 1:
            with pytest.raises(ScheduleError, match="with messages between stages under way"):
                executor.step(batch)
        else:
            assert executor.step(batch) > 0

    LocalWorld(pp).run(main)


def test_a_step_that_was_refused_at_its_end_leaves_nothing_under_way():
    def main():
        mesh = Mesh(world(), pp=2)
        model = GPT(GPTConfig(vocab=5, layers=2, width=8, heads=2, seq_len=4), mesh, dtype=np.float64)
        before = [flat.weights.copy() for flat in model.flats]
        rows = complete("1f1b", ranks=2, microbatches=2)
        executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, rows)
        tokens = np.ones((2, 4), np.int64)
        batch = Batch(tokens, tokens, np.arange(2), np.arange(4), 0)
        for flat in model.flats:
            flat.weights[...] = np.inf
        with pytest.raises(NumericsError, match="not finite"):
            executor.step(batch)
        for flat, weights in zip(model.flats, before, strict=True):
            flat.weights[...] = weights
        return executor.step(batch)

    first, second = LocalWorld(2).run(main)
    assert first == second > 0

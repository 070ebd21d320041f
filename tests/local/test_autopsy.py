"""The first value of a step that is not finite is named: rank, step, micro-batch, module, op, and how it came to be."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_autopsy as checks
from chain import Chain, Numbers, numbers
from checks_layouts import layouts, reducer, with_documents

from mpitrain import collectives
from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import NumericsError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT
from mpitrain.models.mlp import MLP
from mpitrain.nn.layers import Linear
from mpitrain.nn.module import Module, mark_recompute
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.adam import AdamW
from mpitrain.optim.scaler import LossScaler
from mpitrain.optim.sgd import Sgd
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.hunter import Hunter
from mpitrain.pipeline.passes import complete, with_update
from mpitrain.pipeline.schedules import one_stage

SMALL = replace(checks.SIZES, layers=2, width=8, heads=2)


# -- any place --------------------------------------------------------------------------------------------------------


def named(ranks, count, seed=0, **how):
    with checks.spoiling():
        return LocalWorld(ranks).run(lambda: checks.named(world(), count, seed, **how))[0]


def test_a_dozen_places_on_eight_ranks_are_all_named_and_nothing_is_changed():
    """RELIABILITY 15."""
    assert named(8, 12, dp=2, tp=2, pp=2, sizes=SMALL) == (12, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "count", "how"),
    [
        (8, 60, {"dp": 2, "tp": 2, "pp": 2}),
        (8, 60, {"dp": 2, "tp": 2, "pp": 2, "schedule": "zb-h1", "micros": 4, "sp": True}),
        (4, 60, {"tp": 2, "cp": 2, "sp": True}),
        (4, 60, {"pp": 2, "dp": 2, "schedule": "interleaved", "chunks": 2, "bucketed": True}),
        (2, 60, {"pp": 2, "schedule": "terapipe", "slices": (5, 3)}),
        (2, 60, {"dp": 2, "dtype": "f8"}),
        (1, 60, {}),
    ],
    ids=lambda part: "-".join(map(str, part)) if isinstance(part, dict) else str(part),
)
@pytest.mark.parametrize("seed", [1, 2])
def test_sixty_places_of_a_layout_are_all_named(ranks, count, how, seed):
    """RELIABILITY 15."""
    assert named(ranks, count, seed, **how) == (count, [])


ZERO = [
    (2, {"dp": 2, "zero": 1}),
    (4, {"dp": 2, "pp": 2, "zero": 2, "schedule": "zb-h1", "bucketed": True}),
    (4, {"dp": 2, "tp": 2, "zero": 3, "sp": True, "bucketed": True}),
]


@pytest.mark.parametrize(("ranks", "how"), ZERO)
def test_so_are_those_of_rows_that_ranks_deal_out(ranks, how):
    """Also where whole gradients are gone before anybody can look, and weights come in messages."""
    assert named(ranks, 10, seed=how["zero"], sizes=SMALL, **how) == (10, [])


@pytest.mark.slow
@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (4, {"dp": 4, "dtype": "f8"}),
        (4, {"dp": 2, "pp": 2, "schedule": "zb-h1"}),
        (4, {"dp": 2, "pp": 2, "schedule": "interleaved", "chunks": 2}),
        (4, {"dp": 2, "pp": 2, "sizes": replace(checks.SIZES, tied=True)}),
        (4, {"dp": 2, "cp": 2}),
    ],
)
def test_so_are_sixty_of_every_stage_of_zero(ranks, how, zero, bucketed):
    assert named(ranks, 60, zero=zero, bucketed=bucketed, **how) == (60, [])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_gradient_that_a_half_cannot_hold_on_its_way_is_named(zero):
    """Finite in float32, infinite as it travels; in stages 2 and 3 its message is all that is left of it."""

    def main():
        mesh = Mesh(world())
        model = GPT(SMALL, mesh, seed=3, dtype=np.float16, zero=zero)
        scaler = LossScaler(1.0, patience=2)
        rows = complete("1f1b", ranks=1, microbatches=2)
        executor = Executor(model, AdamW(model.shares()), mesh, rows, scaler=scaler)
        checks.RANK.set(mesh.world.rank)
        checks.SPOIL.set(checks.Spoil(checks.Place("gradient", 1, "B1@0", "blocks.1.mlp.up.bias"), 1e5))

        def run():
            for batch in batches_of(executor):
                executor.step(batch)

        with pytest.raises(NumericsError) as caught:
            run()
        return caught.value.autopsy.finding

    with checks.spoiling():
        found, other = LocalWorld(2).run(main)
    assert found == other
    assert (found.kind, found.rank, found.path) == ("gradient", 1, "blocks.1.mlp.up.bias")
    assert found.op == "rounding to float16"


# -- C84 --------------------------------------------------------------------------------------------------------------


class Rows:
    """Rows of numbers, and the class of each."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    @property
    def count(self):
        return len(self.targets)

    def split(self, parts):
        pairs = zip(np.split(self.inputs, parts), np.split(self.targets, parts), strict=True)
        return [Rows(*pair) for pair in pairs]


@pytest.mark.parametrize("where", ["forward", "backward", "data"])
def test_what_is_spoiled_at_step_three_in_layer_two_on_rank_two_is_named_there(where):
    """C84."""
    places = {
        "forward": checks.Place("forward", 2, "F1@0", "blocks.2", "gelu_tanh"),
        "backward": checks.Place("backward", 2, "B1@0", "", "gelu_tanh", 1),  # of four blocks the second from the end
        "data": checks.Place("data", 2),
    }

    def main():
        mesh = Mesh(world())
        model = MLP((4, 8, 8, 8, 8, 3), mesh, seed=1)
        executor = Executor(model, AdamW(model.parameters()), mesh, with_update(one_stage(2)))
        draw = np.random.default_rng(mesh.world.rank)
        batches = [Rows(draw.normal(size=(4, 4)).astype("f4"), draw.integers(0, 3, 4)) for _ in range(3)]
        checks.RANK.set(mesh.world.rank)
        for batch in batches[:2]:
            executor.step(batch)
        before = [p.data.copy() for p in model.parameters()]
        if where == "data" and mesh.world.rank == 2:
            batches[2].inputs[3, 1] = np.nan
        checks.SPOIL.set(checks.Spoil(places[where], np.nan))
        with pytest.raises(NumericsError) as caught:
            executor.step(batches[2])
        assert all(np.array_equal(p.data, old) for p, old in zip(model.parameters(), before, strict=True))
        return str(caught.value), caught.value.autopsy.finding

    with checks.spoiling():
        (text, found), *others = LocalWorld(4).run(main)
    assert all(other == (text, found) for other in others)
    assert (found.direction, found.rank, found.step, found.micro) == (where, 2, 3, 1)
    if where == "data":
        assert found.op == "inputs"
        assert "the batch holds it, in inputs at [1, 1], on rank 2 at step 3, micro-batch 1 (F1@0)" in text
        assert text.endswith("Way out: look at this batch of the data.")
    else:
        assert (found.path, found.op) == ("blocks.2", "gelu_tanh" + ".backward" * (where == "backward"))
        assert f"of blocks.2 made it in {where}, on rank 2 at step 3, micro-batch 1" in text
    assert "  It came to ranks 0 1 3." in text
    assert len(text.split("\n")) == 4


# -- loss scaling -----------------------------------------------------------------------------------------------------


def half(mesh, **scaling):
    model = GPT(SMALL, mesh, seed=3, dtype=np.float16)
    return Executor(
        model,
        AdamW(model.parameters()),
        mesh,
        complete("1f1b", ranks=mesh.pp.size, microbatches=2),
        scaler=LossScaler(**scaling),
        clip=1.0,
    )


def batches_of(executor):
    mesh = executor.mesh
    return checks.numbers(SMALL).batches(4 * mesh.dp.size, mesh.dp.rank, mesh.dp.size)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("norm2.weight", id="replicated over tp"),
        pytest.param("mlp.up.weight", id="cut over tp", marks=pytest.mark.slow),
    ],
)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(name):
    """C18, T21.3: also where another rank counts the parameter in the norm."""

    def main():
        mesh = Mesh(world(), dp=2, tp=2, pp=2)
        executor = half(mesh)
        batches = batches_of(executor)
        (p,) = [p for p in executor.model.parameters() if p.name.endswith(name)]
        told = []
        for bad in range(8):

            def spoil(event, bad=bad, p=p):
                if event.name.startswith("STEP") and event.phase == "begin" and mesh.world.rank == bad:
                    p.grad.reshape(-1)[-1] = np.nan

            before = [p.master.copy() for p in executor.model.parameters()]
            with listen(spoil):
                executor.step(next(batches))
            assert executor.report.skipped
            assert all(
                np.array_equal(p.master, old) for p, old in zip(executor.model.parameters(), before, strict=True)
            )
            told.append((executor.scaler.scale, executor.optimizer.updates))
        executor.step(next(batches))
        assert not executor.report.skipped
        return told

    first, *others = LocalWorld(8).run(main)
    assert all(other == first for other in others)
    assert first == [(2.0 ** (16 - bad), 0) for bad in (0, 1, 2, 3, 4, 5, 6, 7)]


def test_a_gradient_that_no_scale_mends_ends_the_run_with_its_name():
    """C14."""

    def main():
        mesh = Mesh(world())
        executor = half(mesh)
        checks.RANK.set(mesh.world.rank)
        place = checks.Place("gradient", 1, "B1@0", "blocks.1.mlp.up.bias")
        scales = []

        def run():
            for step, batch in enumerate(batches_of(executor), 1):
                checks.SPOIL.set(checks.Spoil(place, np.inf) if step >= 5 else None)
                executor.step(batch)
                scales.append(executor.scaler.scale)

        with pytest.raises(NumericsError) as caught:
            run()
        return str(caught.value), caught.value.autopsy.finding, scales

    with checks.spoiling():
        (text, found, scales), (other, *_) = LocalWorld(2).run(main)
    assert text == other
    assert scales[:5] == [65536.0] * 5
    assert 1.0 <= scales[-1] <= 2.0
    assert len(scales) + 1 <= 4 + 20
    assert (found.kind, found.rank, found.path) == ("gradient", 1, "blocks.1.mlp.up.bias")
    assert found.step == len(scales) + 1
    assert f"on rank 1 at step {found.step}, micro-batch 1" in text


def test_ordinary_skips_raise_no_alarm():
    def main():
        executor = half(Mesh(world(), tp=2), scale=2.0**20, window=3)
        skipped = []
        for batch, _ in zip(batches_of(executor), range(20), strict=False):
            executor.step(batch)
            skipped.append(executor.report.skipped)
        return skipped

    skipped, other = LocalWorld(2).run(main)
    assert skipped == other
    assert skipped.count(True) > 5
    assert skipped.count(False) > 5


@pytest.mark.parametrize("case", range(3))
def test_a_healthy_run_raises_no_alarm(case):
    assert_no_alarm(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(3, 53))
def test_many_healthy_runs_raise_no_alarm(case):
    assert_no_alarm(case)


def assert_no_alarm(case):
    """A model, a layout and options at random: a hunter that listens all along finds nothing."""
    number = random.Random(case)
    ranks = number.choice([1, 2, 4])
    layout = number.choice([*layouts(ranks), *(layouts(ranks, pp=2) if ranks > 1 else [])])
    sizes = replace(SMALL, tied=number.random() < 0.5, kv_heads=number.choice([None, 1]), layers=2)
    if layout.get("tp", 1) > 2 or layout.get("cp", 1) > 2:
        sizes = replace(sizes, width=16, heads=4)
    dtype = number.choice(["f4", "f8"])
    micros, documents, bucketed = number.choice([1, 2]), number.random() < 0.5, number.random() < 0.5
    schedule, recomputed = number.choice(["1f1b", "gpipe", "zb-h1"]), number.random() < 0.5
    zero = number.choice([0, 1, 2, 3])

    def main():
        mesh = Mesh(world(), **{axis: n for axis, n in layout.items() if axis in ("pp", "dp", "tp", "cp")})
        model = GPT(
            sizes,
            mesh,
            seed=case,
            dtype=dtype,
            sequence_parallel=layout.get("sp", False),
            cp_attention=layout.get("kind", "ring"),
            zero=zero,
        )
        mark_recompute(model, ["blocks.*"] if recomputed else [], mesh.pp.exchange)
        optimizer = Sgd(model.shares(), lr=0.1) if case % 3 == 0 else AdamW(model.shares())
        rows = complete(schedule, ranks=mesh.pp.size, microbatches=micros)
        summed = reducer(model, mesh, 1 << 12 if bucketed else 0)
        executor = Executor(model, optimizer, mesh, rows, reducer=summed, clip=1.0)
        hunter = Hunter(model, optimizer, mesh.world.rank)
        found = []
        with listen(hunter):
            for batch in checks.numbers(sizes).batches(8, mesh.dp.rank, mesh.dp.size, stop_step=3):
                batch = with_documents(batch) if documents else batch
                executor.step(batch.part(model.positions_here))
                found.append(hunter.finding)
        return found

    assert LocalWorld(ranks).run(main) == [[None] * 3] * ranks


# -- kinds of causes --------------------------------------------------------------------------------------------------


class Formula(Module):
    """One weight a; the loss is a formula of it and of the rank's numbers, of a dtype."""

    def __init__(self, mesh, formula, start=1.0, dtype=np.float64):
        super().__init__("formula")
        self.formula = formula
        self.a = Parameter("a", (2,), init=lambda *_: np.full(2, start))
        self.materialize(mesh, 0, dtype)

    def forward(self, batch):
        return self.formula(self.a, batch)


def refused(ranks, formula, x, optimizer=Sgd, scaler=None, **how):
    """(text, finding) of the first step, from a rank; x is a function of the rank."""

    def main():
        mesh = Mesh(world())
        model = Formula(mesh, formula(mesh), **how)
        rows = with_update(one_stage(1))
        executor = Executor(model, optimizer(model.parameters(), lr=1.0), mesh, rows, scaler=scaler)
        with pytest.raises(NumericsError) as caught:
            executor.step(Numbers(x(mesh.world.rank), np.zeros(1)))
        return str(caught.value), caught.value.autopsy.finding

    told = LocalWorld(ranks).run(main)
    assert all(one == told[0] for one in told)
    return told[0]


@pytest.mark.parametrize(
    ("op", "formula"),
    [
        ("log", lambda mesh: lambda a, batch: ops.log(a * -2.0).sum()),
        ("sqrt", lambda mesh: lambda a, batch: ops.sqrt(a * -2.0).sum()),
        ("div", lambda mesh: lambda a, batch: ((a * 0.0) / (a * 0.0)).sum()),
        ("pow", lambda mesh: lambda a, batch: ((a * -2.0) ** 0.5).sum()),
    ],
)
def test_who_asks_what_has_no_answer_is_told_to_look_at_what_is_given(op, formula):
    text, found = refused(1, formula, lambda rank: np.zeros(2))
    assert (found.kind, found.op) == ("forward", op)
    assert (
        f"Way out: look at what {op} of formula is given: a root or logarithm of a negative number, or 0 / 0." in text
    )


def test_a_half_whose_master_passed_its_range_is_told_as_that():
    text, found = refused(
        1, lambda mesh: lambda a, batch: a.sum(), lambda rank: np.zeros(2), start=7e4, dtype=np.float16
    )
    assert (found.kind, found.path) == ("weight", "a, rounded to float16")
    assert "First: the weight a, rounded to float16, is not finite before the step, though it is in float32" in text
    assert "In: float32 (2,) 7e+04.  Out: float16 (2,) 2 inf of 2; float16 ends at 65504." in text
    assert text.endswith("Way out: a lower --lr, or --dtype bfloat16.")


class OneOfTwo:
    """A batch of one target, in the first of its micro-batches."""

    def __init__(self, count):
        self.count = count

    def split(self, parts):
        return [OneOfTwo(int(part == 0)) for part in range(parts)]


def one(rank):
    return np.ones(1)


def of_two(rank):
    return np.array([2.0, 3.0])


def test_a_logarithm_of_nothing_is_made_by_the_logarithm():
    text, found = refused(2, lambda mesh: lambda a, b: ops.log(a * 0.0).sum(), of_two)
    assert (found.kind, found.op, found.rank, found.result.infs) == ("forward", "log", 0, 2)
    assert "In: float64 (2,) 0.  Out: float64 (2,) 2 inf of 2; float64 ends at" in text
    assert "  Rank 1 made one of its own." in text


def test_minus_infinity_of_a_mask_is_no_finding_but_the_nan_that_it_becomes_is():
    def formula(mesh):
        mask = np.array([0.0, -np.inf])
        return lambda a, b: ((a + mask) * np.array([1.0, 0.0])).sum()

    _, found = refused(1, formula, of_two)
    assert (found.kind, found.op) == ("forward", "mul")
    assert found.inputs[0].infs == 1


def test_a_sum_over_ranks_of_finite_halves_may_overflow():
    """C20: 30000 from each of three ranks."""

    def formula(mesh):
        return lambda a, b: collectives.all_reduce(a * 30000.0, axis=mesh.world).astype(np.float32).sum()

    text, found = refused(3, formula, of_two, dtype=np.float16, scaler=LossScaler(1.0))
    assert (found.kind, found.verb, found.axis, found.direction) == ("sum", "all_reduce", "world", "communication")
    assert "passed the range of float16" in text
    assert "; float16 ends at 65504." in text
    assert "test_autopsy.py:" in text


def test_a_gradient_that_overflows_when_it_is_rounded_for_the_wire_is_named():
    """Each micro-batch brings 40000 into a float32 gradient, which travels as float16."""

    def main():
        mesh = Mesh(world())
        model = Formula(mesh, lambda a, b: (a.astype(np.float32) * 4e4).sum(), dtype=np.float16)
        scaler = LossScaler(2.0, window=0, patience=1)
        executor = Executor(model, Sgd(model.parameters(), lr=1.0), mesh, with_update(one_stage(2)), scaler=scaler)
        with pytest.raises(NumericsError) as caught:
            executor.step(OneOfTwo(1))
        return str(caught.value), caught.value.autopsy.finding

    (text, found), (other, _) = LocalWorld(2).run(main)
    assert text == other
    assert (found.kind, found.path, found.op, found.micro) == ("gradient", "a", "rounding to float16", None)
    assert found.inputs[0].largest == 8e4
    assert "the gradient of a is not finite after a rounding to float16" in text


def test_squares_of_finite_gradients_may_overflow():
    text, found = refused(2, lambda mesh: lambda a, b: (a * 1e200).sum(), one)
    assert (found.kind, found.path, found.result.largest) == ("norm", "a", 1e200)
    assert "the gradient of a is finite, the sum of its squares is not" in text


def test_the_sum_of_two_gradients_of_one_value_may_overflow():
    def formula(mesh):
        def loss(a, b):
            y = a * 1.0
            return (y * 1e308).sum() + (y * 1e308).sum()

        return loss

    _, found = refused(1, formula, one, start=1e-3)
    assert (found.kind, found.op) == ("backward", "sum of gradients")
    assert found.direction == "backward"


def test_the_sum_over_micro_batches_may_overflow():
    def main():
        mesh = Mesh(world())
        model = Formula(mesh, lambda a, b: (a * 1e308).sum(), start=1e-3)
        executor = Executor(model, Sgd(model.parameters(), lr=1.0), mesh, with_update(one_stage(2)))
        with pytest.raises(NumericsError) as caught:
            executor.step(OneOfTwo(1))
        return caught.value.autopsy.finding

    (found,) = LocalWorld(1).run(main)
    assert (found.kind, found.path, found.micro) == ("gradient", "a", 1)


def test_what_does_not_recur_is_said_to_be_no_function_of_the_step():
    calls = []

    def once(a, b):
        calls.append(0)
        return (a * (np.nan if len(calls) == 1 else 1.0)).sum()

    text, found = refused(1, lambda mesh: once, of_two)
    assert found is None
    assert "All values were finite when the same step ran a second time" in text
    assert len(text.split("\n")) == 4


def test_a_negative_mean_of_squares_is_found_before_it_is_used():
    def main():
        mesh = Mesh(world())
        model = Formula(mesh, lambda a, b: (a * b.x).sum())
        optimizer = AdamW(model.parameters())
        executor = Executor(model, optimizer, mesh, with_update(one_stage(1)))
        executor.step(Numbers(np.array([2.0, 3.0]), np.zeros(1)))
        before = model.a.data.copy()
        if mesh.world.rank == 1:
            optimizer.state_dict()["second_moment"]["a"][1] = -1.0
        with pytest.raises(NumericsError) as caught:
            executor.step(Numbers(np.array([2.0, 3.0]), np.zeros(1)))
        assert np.array_equal(model.a.data, before)
        return str(caught.value)

    text, other = LocalWorld(2).run(main)
    assert text == other
    assert text.startswith("after 1 updates the optimizer's state is not finite, or negative where it is a mean of")
    assert "second_moment of a" in text
    assert "on rank 1 at step 2" in text


def test_where_steps_overlap_a_hunter_that_listens_names_the_place():
    def main():
        mesh = Mesh(world(), pp=2)
        model = Chain(mesh, 2)
        optimizer = Sgd(model.parameters(), lr=0.1)
        executor = Executor(
            model,
            optimizer,
            mesh,
            lambda n: complete("pipedream", ranks=2, microbatches=1, batches=n),
            versions="newest",
        )
        batches = numbers(6, 3)
        batches[3].y[0] = np.nan
        with listen(Hunter(model, optimizer, mesh.world.rank)), pytest.raises(NumericsError) as caught:
            executor.run(batches)
        return str(caught.value)

    text, other = LocalWorld(2).run(main)
    assert text == other
    assert "the batch holds it, in y at [0], on rank 0 at step 1, micro-batch 3 (F3@0)" in text
    assert "Steps overlap: weights were changed before this was known." in text


def test_an_autopsy_leaves_loss_scale_listeners_and_counters_alone():
    def main():
        mesh = Mesh(world())
        executor = half(mesh, patience=1)
        place = checks.Place("gradient", 0, "B1@0", "blocks.0.mlp.up.bias")
        checks.RANK.set(mesh.world.rank)
        before, heard = executor.scaler.state_dict(), []
        checks.SPOIL.set(checks.Spoil(place))
        with listen(lambda event: heard.append(event.name)), pytest.raises(NumericsError):
            executor.step(next(batches_of(executor)))
        assert executor.scaler.state_dict() == before
        assert (executor.steps, executor.empty_steps, executor.optimizer.updates) == (0, 0, 0)
        assert heard.count("F1@0") == 2  # its begin and its end, in the first run alone
        checks.SPOIL.set(None)
        executor.step(next(batches_of(executor)))

    with checks.spoiling():
        LocalWorld(2).run(main)


def spoiled(place, ranks=2, schedule="1f1b", sizes=SMALL, bucketed=False, **axes):
    """(text, autopsy) of a step with this place spoiled."""

    def main():
        trial = checks.Trial(world(), sizes=sizes, schedule=schedule, bucketed=bucketed, **axes)
        checks.SPOIL.set(checks.Spoil(place))
        with pytest.raises(NumericsError) as caught:
            trial.executor.step(trial.batch)
        assert trial.executor.bytes_in_flight == 0
        return str(caught.value), caught.value.autopsy

    with checks.spoiling():
        told = LocalWorld(ranks).run(main)
    assert all(one == told[0] for one in told)
    return told[0]


def test_what_a_message_between_stages_brings_is_told_by_its_receiver():
    text, told = spoiled(checks.Place("wire", 0, "SEND_F1@0", "", "isend"), pp=2)
    found = told.finding
    assert (found.kind, found.rank, found.micro, found.verb, found.axis) == ("message", 1, 1, "irecv", "pp")
    assert "irecv over pp (executor.py:" in text
    assert "brought it, though all that was given to it is finite" in text


def test_a_gradient_that_a_bucket_brings_to_others_is_told_by_who_made_it():
    place = checks.Place("gradient", 1, "B1@0", "blocks.1.mlp.down.weight")
    _, told = spoiled(place, dp=2, bucketed=True)
    assert (told.finding.kind, told.finding.rank, told.finding.path) == ("gradient", 1, place.path)
    assert (told.made, told.reached) == ((1,), (0,))


def test_what_a_bucket_brings_is_told_with_the_parameter():
    _, told = spoiled(checks.Place("wire", 1, "B1@0", "", "iall_reduce", 1), dp=2, bucketed=True)
    found = told.finding
    assert (found.kind, found.verb, found.micro) == ("message", "iall_reduce", None)
    assert found.path == "table.weight"


def test_a_maximum_that_begins_at_minus_infinity_is_no_finding():
    """A rank that has nothing to bring; then one of which nobody has anything."""

    def main():
        mesh = Mesh(world())
        here = np.array([-np.inf, float(mesh.world.rank)])

        def formula(a, b):
            most = mesh.world.all_reduce(here, op="max")
            return (a * 1.0).sum() + ops.exp(Tensor(most)).sum() * collectives.max_over(Tensor(here), mesh.world)[1]

        model = Formula(mesh, formula)
        optimizer = Sgd(model.parameters(), lr=0.1)
        executor = Executor(model, optimizer, mesh, with_update(one_stage(1)))
        hunter = Hunter(model, optimizer, mesh.world.rank)
        with listen(hunter):
            executor.step(OneOfTwo(1))
        return hunter.finding

    assert LocalWorld(2).run(main) == [None] * 2


GELU = ("gelu_tanh", "forward")


@pytest.mark.parametrize(
    ("axes", "places", "made", "reached"),
    [
        ({}, {0: ("F1@0", "blocks.0.mlp", *GELU), 1: ("B0@0", "", "gelu_tanh", "backward")}, (1, 0), ()),
        ({}, {0: ("F0@0", "blocks.1.mlp", *GELU), 1: ("F0@0", "blocks.0.mlp", *GELU)}, (1, 0), ()),
        ({}, {0: ("F1@0", "blocks.1.mlp", *GELU), 1: ("F1@0", "blocks.1.mlp", *GELU)}, (0, 1), ()),
        # Rank 1 has the first stage of the second replica, rank 2 the second stage of the first one.
        ({"pp": 2}, {1: ("B0@0", "", "gelu_tanh", "backward"), 2: ("F0@1", "blocks.1.mlp", *GELU)}, (2, 1), (0, 3)),
    ],
    ids=["micro-batch", "op", "rank", "direction"],
)
def test_of_several_that_were_made_the_earliest_is_told(axes, places, made, reached):
    def main():
        mesh = Mesh(world(), **axes)
        executor = half(mesh, patience=1)
        rank = mesh.world.rank
        checks.RANK.set(rank)
        if rank in places:
            action, path, name, where = places[rank]
            checks.SPOIL.set(checks.Spoil(checks.Place(where, rank, action, path, name)))
        with pytest.raises(NumericsError) as caught:
            executor.step(next(batches_of(executor)))
        return caught.value.autopsy

    with checks.spoiling():
        told, *others = LocalWorld(4 if axes else 2).run(main)
    assert all(other == told for other in others)
    assert (told.finding.rank, told.made) == (made[0], tuple(sorted(made)))
    assert set(told.reached) <= set(reached)


def test_a_gradient_that_is_only_a_recipe_is_computed_to_look_at_it():
    class Huge(Module):
        def __init__(self, mesh):
            super().__init__("huge")
            self.linear = Linear("linear", 2, 2, bias=False, init=lambda *_: np.full((2, 2), 1e-200))
            self.materialize(mesh, 0, np.float64)

        def forward(self, batch):
            return (self.linear(Tensor(np.full((1, 2), 1e200))) * 1e200).sum()

    def main():
        mesh = Mesh(world())
        model = Huge(mesh)
        executor = Executor(model, Sgd(model.parameters(), lr=1.0), mesh, with_update(one_stage(1)))
        with pytest.raises(NumericsError) as caught:
            executor.step(OneOfTwo(1))
        return caught.value.autopsy.finding

    (found,) = LocalWorld(1).run(main)
    assert (found.kind, found.path, found.op) == ("backward", "linear", "linear.backward")

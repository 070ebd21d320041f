"""An MLP cut into stages is the same training run as on one rank: the smallest model for every test of a pipeline."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest

from mpitrain.autograd.ops import IGNORE
from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.debug.compare import compare
from mpitrain.debug.states import StateChecker
from mpitrain.errors import ShapeError
from mpitrain.events import listen
from mpitrain.models.mlp import MLP
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import Partition
from mpitrain.pipeline.passes import complete
from mpitrain.spec import INVARIANT, Shard

SIZES = (3, 8, 6, 10, 4, 5)  # 4 blocks
BATCH, STEPS = 24, 3


@dataclass(frozen=True)
class Points:
    """A batch: what the executor needs is how to cut it, and how many of its targets count."""

    inputs: np.ndarray
    targets: np.ndarray

    @property
    def count(self):
        return int((self.targets != IGNORE).sum())

    def split(self, parts):
        cut = zip(np.array_split(self.inputs, parts), np.array_split(self.targets, parts), strict=True)
        return [Points(*piece) for piece in cut]

    def share(self, rank, ranks):
        return Points(self.inputs[rank::ranks], self.targets[rank::ranks])


def points(step):
    random = np.random.default_rng(step)
    targets = random.integers(SIZES[-1], size=BATCH)
    targets[random.integers(BATCH, size=5)] = IGNORE
    return Points(random.standard_normal((BATCH, SIZES[0])), targets)


def train(world, schedule="1f1b", stages=None, micros=1, kind=MLP, checked=False, **axes):
    """What all ranks know, and of each parameter of this rank its slab of the last gradient and weight."""
    mesh = Mesh(world, **axes)
    partition = None if stages is None else Partition(stages)
    model = kind(SIZES, mesh, partition=partition, seed=1, dtype=np.float64)
    chunks = model.num_stages // mesh.pp.size
    rows = complete(schedule, ranks=mesh.pp.size, microbatches=micros, chunks=chunks)
    executor = Executor(model, AdamW(model.parameters(), lr=0.01), mesh, rows, clip=0.3)
    losses, norms = [], []
    with listen(StateChecker(model.parameters(), mesh)) if checked else nullcontext():
        for step in range(STEPS):
            losses.append(executor.step(points(step).share(mesh.dp.rank, mesh.dp.size)))
            norms.append(executor.report.grad_norm)
    few = [points(100 + step).share(mesh.dp.rank, mesh.dp.size) for step in range(3)]
    shared = {"losses": np.array(losses), "norms": np.array(norms), "validation": np.array(executor.evaluate(few))}
    return shared, [(p.name, p.full_shape, p.rectangle, p.grad, p.data) for p in model.parameters()]


def whole(found):
    """The full tensors, by kind and name, from all ranks' slabs; those that several ranks hold are the same."""
    tensors = {"shared": found[0][0], "gradients": {}, "weights": {}}
    for shared, slabs in found:
        assert all(np.array_equal(shared[name], found[0][0][name]) for name in shared)
        for name, shape, rectangle, grad, data in slabs:
            for kind, array in (("gradients", grad), ("weights", data)):
                full = tensors[kind].setdefault(name, np.full(shape, np.nan))
                held = full[rectangle]
                assert np.isnan(held).all() or np.array_equal(held, array)
                full[rectangle] = array
    return tensors


@pytest.fixture(scope="module")
def alone():
    return whole([train(World(Alone(), "none"))])


def equals(ranks, alone, *args, **how):
    found = whole(LocalWorld(ranks).run(lambda: train(world(), *args, **how)))
    for kind, tensors in alone.items():
        assert found[kind].keys() == tensors.keys()
        worst = compare(found[kind], tensors)[0]
        assert worst.ok, f"{kind}: {worst}"


# ------------------------------------------------------------------------------------------------- the same as one rank


@pytest.mark.parametrize("micros", [1, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "terapipe"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_schedule_is_the_run_of_one_rank(pp, schedule, micros, alone):
    equals(pp, alone, schedule, micros=micros, pp=pp)


@pytest.mark.parametrize(
    ("pp", "stages", "micros"),
    [
        (2, (1, 1, 1, 1), 4),
        (2, (0, 2, 1, 0, 0, 1), 2),
        (3, (1, 0, 0, 2, 1, 0), 3),
        (4, (0, 1, 0, 1, 0, 1, 0, 1), 8),
        (1, (1, 2, 1), 3),
    ],
)
def test_several_stages_a_rank(pp, stages, micros, alone):
    equals(pp, alone, "interleaved", stages, micros, pp=pp)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    "stages", [(0, 4), (4, 0), (3, 1), (0, 4, 0), (2, 0, 2), (0, 0, 4), (1, 1, 1, 1), (0, 0, 0, 4)]
)
def test_uneven_and_empty_stages(stages, schedule, alone):
    """A first stage without blocks passes the batch's own numbers on, for which nobody wants a gradient."""
    equals(len(stages), alone, schedule, stages, micros=3, pp=len(stages))


@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}])
def test_with_other_axes(axes, checked, alone):
    ranks = math.prod(axes.values())
    equals(ranks, alone, "1f1b", (1, 3), micros=2, checked=checked, **axes)


# ------------------------------------------------------------------------------------------------------- what it says


@pytest.mark.parametrize("pp", [1, 2])
def test_a_subclass_with_a_forward_of_its_own_is_one_stage_that_uses_it(pp):
    class Doubled(MLP):
        def forward(self, batch):
            return super().forward(batch) * 2.0

    def gradients(kind):
        return whole(LocalWorld(pp).run(lambda: train(world(), kind=kind, pp=pp)))["shared"]["losses"]

    ratio = gradients(Doubled)[0] / gradients(MLP)[0]
    assert ratio == pytest.approx(2.0 if pp == 1 else 1.0)  # more than one stage: forward_stage says what each does


def test_stages_one_after_the_other_are_the_whole_model():
    mesh, batch = Mesh(World(Alone(), "none")), points(0)
    model = MLP(SIZES, mesh, partition=Partition((1, 0, 3)), seed=1, dtype=np.float64)
    made = ()
    for stage in model.stages:
        expected = [(b.shape, b.dtype) for b in model.boundary(stage, batch)]
        assert [(x.shape, x.data.dtype) for x in made] == expected
        made = model.forward_stage(stage, batch, *made)
    assert float(made[0].data) == float(model(batch).data)
    assert model.boundary(1, batch)[0].states == {"dp": Shard(0), "tp": INVARIANT}


def test_inputs_of_another_dtype_cross_a_boundary_in_the_models():
    def main():
        mesh = Mesh(world(), pp=2)
        model = MLP((3, 8, 5), mesh, dtype=np.float32)  # float64 points
        assert model.partition.layers == (1, 0)
        rows = complete("1f1b", ranks=2, microbatches=2)
        return Executor(model, AdamW(model.parameters()), mesh, rows).step(points(0))

    losses = LocalWorld(2).run(main)
    assert losses[0] == losses[1] > 0


def test_a_rank_that_holds_some_of_the_stages_cannot_run_them_all():
    def main():
        model = MLP(SIZES, Mesh(world(), pp=2))
        with pytest.raises(ShapeError, match=r"(?s)holds the stages \d of 2.*An Executor runs all of them"):
            model(points(0))

    LocalWorld(2).run(main)


@pytest.mark.parametrize(
    ("stages", "said"), [((1, 2), "3 blocks on 2 stages, but the model has 4"), ((2, 1, 1), "3 stages are not divisib")]
)
def test_a_partition_of_another_model_or_pipeline_is_refused(stages, said):
    def main():
        with pytest.raises(ShapeError, match=said):
            MLP(SIZES, Mesh(world(), pp=2), partition=Partition(stages))

    LocalWorld(2).run(main)

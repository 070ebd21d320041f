"""The loss is one mean over the targets of the whole step, whoever holds them; gradients are its gradients."""

from dataclasses import dataclass

import numpy as np
import pytest

from mpitrain.autograd import ops
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import NumericsError
from mpitrain.nn import init
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.data import BucketedReducer, FlatReducer
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage


@dataclass
class Losses:
    """A batch that is nothing but its losses: micro-batches of (losses of the valid targets, branch)."""

    micros: list
    branch: str = "both"

    @property
    def count(self):
        return sum(len(losses) for losses in self.micros)

    def split(self, num_microbatches):
        assert num_microbatches == len(self.micros)
        return [Losses([losses], self.branch) for losses in self.micros]


class Scaled(Module):
    """loss_i = a * l_i, plus b * l_i on ranks that take the branch: d loss / d a is the mean of all l_i."""

    def __init__(self, mesh):
        super().__init__("scaled")
        self.a = Parameter("a", (1,), init=init.ones)
        self.b = Parameter("b", (1,), init=init.ones)
        self.materialize(mesh, dtype=np.float64)

    def forward(self, batch):
        losses = np.asarray(batch.micros[0], np.float64)
        y = ops.sum(self.a * losses)
        if batch.branch != "none":
            y = y + ops.sum(self.b * losses) * 0.5
        return y


def step(batches, reducer="flat", lr=1.0):
    """One SGD step on each rank's batch: (loss, gradient of a and b, weights, executor)."""
    ranks = world()
    mesh = Mesh(ranks)
    model = Scaled(mesh)
    sums = FlatReducer(model.flats, mesh) if reducer == "flat" else BucketedReducer(model.flats, mesh, 1)
    optimizer = Sgd(model.parameters(), lr=lr, momentum=0.0)
    batch = batches[ranks.rank]
    executor = Executor(model, optimizer, mesh, with_update(one_stage(len(batch.micros))), reducer=sums)
    loss = executor.step(batch)
    return loss, float(model.a.grad[0]), float(model.b.grad[0]), float(model.a.data[0]), executor


def of_mean(count, mean):
    """`count` losses with this mean, not all equal."""
    return mean + np.linspace(-0.5, 0.5, count) if count > 1 else np.full(count, mean)


@pytest.mark.parametrize("reducer", ["flat", "bucketed"])
def test_unequal_token_counts_weigh_every_token_the_same(reducer):
    """T2.1: counts [[10, 30], [100, 60]] with means [[2, 4], [1, 3]] give 420 / 200 = 2.1."""
    counts, means = [[10, 30], [100, 60]], [[2, 4], [1, 3]]
    batches = [
        Losses([of_mean(*pair) for pair in zip(*row, strict=True)], "none") for row in zip(counts, means, strict=True)
    ]
    for loss, grad, unused, weight, _ in LocalWorld(2).run(step, batches, reducer):
        assert loss == pytest.approx(2.1, rel=1e-14)
        assert grad == pytest.approx(2.1, rel=1e-14)
        assert weight == pytest.approx(1 - 2.1, rel=1e-14)
        assert unused == 0


def test_accumulation_does_not_change_the_loss():
    """C24: sums 6 over 2 tokens and 6 over 6 tokens are 12 / 8, not the mean of 3 and 1."""
    batch = Losses([of_mean(2, 3.0), of_mean(6, 1.0)], "none")
    whole = Losses([np.concatenate(batch.micros)], "none")
    for one in (batch, whole):
        ((loss, grad, *_),) = LocalWorld(1).run(step, [one])
        assert (loss, grad) == (pytest.approx(1.5, rel=1e-14), pytest.approx(1.5, rel=1e-14))


def test_a_rank_without_a_valid_target_adds_nothing():
    """C09, T2.3: rank 0 has three targets, rank 1 none; then nobody has any."""
    three, none = Losses([np.array([1.0, 2.0, 6.0])], "none"), Losses([np.zeros(0)], "none")
    for loss, grad, *_ in LocalWorld(2).run(step, [three, none]):
        assert (loss, grad) == (3.0, 3.0)
    for loss, grad, _, weight, executor in LocalWorld(2).run(step, [none, none]):
        assert (loss, grad, weight) == (0.0, 0.0, 1.0)
        assert executor.empty_steps == 1


@pytest.mark.parametrize("reducer", ["flat", "bucketed"])
@pytest.mark.parametrize("user", [0, 1])
def test_a_parameter_that_only_some_ranks_use_is_summed_over_all(user, reducer):
    """C21: the other ranks take part with zeros; with equal counts the gradient is g0 / 2."""
    batches = [Losses([np.array([4.0, 4.0])], "both" if rank == user else "none") for rank in range(2)]
    for _, grad_a, grad_b, *_ in LocalWorld(2).run(step, batches, reducer):
        assert grad_a == 4.0
        assert grad_b == 4.0 * 0.5 / 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_update(bad):
    seen = []

    def run():
        batches = [Losses([np.array([1.0])], "none"), Losses([np.array([bad])], "none")]
        mesh = Mesh(world())
        model = Scaled(mesh)
        executor = Executor(model, Sgd(model.parameters(), lr=1.0), mesh, with_update(one_stage(1)))
        with pytest.raises(
            NumericsError, match=r"the batch holds it, in micros\[0\] at \[0\], on rank 1 at step 1(?s:.)*No weight was"
        ):
            executor.step(batches[mesh.world.rank])
        seen.append(float(model.a.data[0]))

    LocalWorld(2).run(run)
    assert seen == [1.0, 1.0]

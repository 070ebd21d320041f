"""A model's own stages: what they may leave out, and what is said where they return something else than they should."""

import numpy as np
import pytest

from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import ConfigError, ScheduleError, ShapeError, UserError
from mpitrain.nn.module import Boundary, Module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.sgd import Sgd
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete, with_update
from mpitrain.pipeline.schedules import one_stage

SHAPE = (2, 3)


class Rows:
    """A batch of two targets, which may be cut into slices."""

    count = 2

    def split(self, parts):
        return [self] * parts

    def slices(self, lengths):
        return [self] * len(lengths)


class Scale(Module):
    """A factor a stage; what a stage returns and what it is said to receive can be replaced.

    forward_stage takes no `carry`.
    """

    def __init__(self, mesh, returns=None, says=None):
        super().__init__("scale")
        self.num_stages, self.stages = mesh.pp.size, (mesh.pp.rank,)
        self.factor = Parameter(f"factor.{mesh.pp.rank}", SHAPE, init=lambda *_: np.ones(SHAPE))
        self.returns, self.says = returns or {}, says
        self.materialize(mesh, 0, np.float64)

    def forward_stage(self, stage, batch, *inputs):
        x = self.factor * (inputs[0] if stage else 1.0)
        if stage in self.returns:
            return self.returns[stage](x)
        return (x,) if stage < self.num_stages - 1 else (x.sum(),)

    def boundary(self, stage, batch):
        if not stage:
            return ()
        return (Boundary(SHAPE, self.like.dtype, {}),) if self.says is None else self.says


def train(pp, returns=None, says=None, steps=1, kind=Scale, evaluates=False, **how):
    def main():
        mesh = Mesh(world(), pp=pp)
        model = kind(mesh, returns, says)
        rows = complete("1f1b", ranks=pp, microbatches=2)
        executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, rows, **how)
        if evaluates:
            return executor.evaluate([Rows()])
        return [executor.step(Rows()) for _ in range(steps)]

    return LocalWorld(pp).run(main)


def test_stages_of_whole_sequences_need_no_carry():
    assert train(3, steps=2) == [train(3, steps=2)[0]] * 3


def test_slices_for_stages_without_a_carry_are_refused_by_every_rank():
    with pytest.raises(ConfigError, match="carry=None\\), but that of Scale takes no carry"):
        train(2, slices=(2, 1))


def test_a_list_is_as_good_as_a_tuple():
    assert train(2, {0: lambda x: [x], 1: lambda x: [x.sum()]}) == train(2)


def float32(x):
    return (Tensor(x.data.astype(np.float32)),)


@pytest.mark.parametrize("evaluates", [False, True], ids=["step", "evaluate"])
@pytest.mark.parametrize(
    ("stage", "returns", "error", "said"),
    [
        (0, lambda x: x, ConfigError, r"forward_stage of stage 0 of Scale returned a Tensor\..*even of one: \(x,\)"),
        (1, lambda x: None, ConfigError, r"stage 1 of Scale returned None"),
        (1, lambda x: (x, 3.0), ConfigError, r"stage 1 of Scale returned a tuple of Tensor and float"),
        (0, lambda x: (x.data,), ConfigError, r"stage 0 of Scale returned a tuple of ndarray"),
        (0, lambda x: (), ShapeError, r"returned 0 tensors,\nbut boundary\(1, batch\) says 1 tensor: \(2, 3\) float64"),
        (1, lambda x: (x, x), ShapeError, r"returned 2 tensors: \(2, 3\) float64, \(2, 3\) float64,.*boundary\(2"),
        (1, lambda x: (x[:1],), ShapeError, r"returned 1 tensor: \(1, 3\) float64.*says 1 tensor: \(2, 3\) float64"),
        (0, float32, ShapeError, r"returned 1 tensor: \(2, 3\) float32.*says 1 tensor: \(2, 3\) float64"),
        (2, lambda x: x.sum(), ConfigError, r"stage 2 of Scale returned a Tensor\..*the loss: \(loss,\)"),
        (2, lambda x: (x,), ShapeError, r"stage 2 of Scale, the last one, returned 1 tensor: \(2, 3\).*one number"),
        (2, lambda x: (x.sum(), x), ShapeError, r"the last one, returned 2 tensors: \(\) float64, \(2, 3\) float64"),
    ],
)
def test_what_a_stage_should_not_return_is_said_by_the_rank_that_made_it(stage, returns, error, said, evaluates):
    raised = {}

    class Watched(Scale):
        def run_stage(self, stage, batch, *inputs, **how):
            try:
                return super().run_stage(stage, batch, *inputs, **how)
            except UserError as mistake:
                raised[stage] = str(mistake)
                raise

    Watched.__name__ = "Scale"
    with pytest.raises(error, match="(?s)" + said) as caught:
        train(3, {stage: returns}, kind=Watched, evaluates=evaluates)
    assert set(raised) == {stage}
    assert raised[stage] in str(caught.value)
    assert raised[stage].count("\n") < 5


@pytest.mark.parametrize("says", [(), None, Boundary(SHAPE, np.float64, {}), (SHAPE,)], ids=str)
def test_a_boundary_that_describes_no_tensor_is_refused(says):
    class Said(Scale):
        def boundary(self, stage, batch):
            return says if stage else ()

    with pytest.raises(ConfigError, match=r"boundary\(1, batch\) of Said returned .*\nIt returns a tuple of Boundary"):
        train(2, kind=Said)


def test_a_model_without_stages_hears_of_its_forward():
    class Whole(Module):
        def __init__(self, mesh, *_):
            super().__init__("whole")
            self.weight = Parameter("weight", SHAPE, init=lambda *_: np.ones(SHAPE))
            self.materialize(mesh, 0, np.float64)

        def forward(self, batch):
            return self.weight * 2.0

    with pytest.raises(ShapeError, match=r"^forward of Whole returned 1 tensor: \(2, 3\) float64"):
        train(1, kind=Whole)


# ------------------------------------------------------------------------------------------------ rows of several steps


@pytest.mark.parametrize("versions", [None, "newest"])
def test_rows_of_several_batches_given_as_one_schedule_are_refused(versions):
    def main():
        mesh = Mesh(world(), pp=2)
        model = Scale(mesh)
        rows = complete("pipedream", ranks=2, microbatches=1, batches=10)
        Executor(model, Sgd(model.parameters(), lr=0.1), mesh, rows, versions=versions)

    with pytest.raises(ScheduleError, match=r"the rows go over 10 batches, but are to run 1\.\n.*function.*batches=n"):
        LocalWorld(2).run(main)


def test_rows_of_one_step_that_are_to_overlap_are_refused():
    def main():
        mesh = Mesh(world())
        model = Scale(mesh)
        rows = with_update(one_stage(6))
        executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, rows, versions="newest")
        executor.run([Rows()] * 3)

    with pytest.raises(ScheduleError, match="the rows go over 1 batch, but are to run 3"):
        LocalWorld(1).run(main)

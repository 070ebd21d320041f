"""Models of one's own that add losses and count: what a model must say of itself, and what a router must be given."""

import numpy as np
import pytest

from mpitrain.autograd import Tensor, ops
from mpitrain.autograd.auxiliary import add_counts, add_loss
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.models.gpt import GPTConfig
from mpitrain.nn import init as initial
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.expert import Moe, RoutedTokens
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.rng import Draw
from mpitrain.routing import Routing

ROWS = 8


class Own(Module):
    """Its main loss is 0 times a weight, its own loss the weight once a row."""

    def __init__(self, mesh, *, adds_losses=True, counted=(("own", 1),), counts=1):
        super().__init__("own")
        self.weight = Parameter("weight", (1,), init=initial.ones)
        self.adds_losses, self.counted = adds_losses, dict(counted)
        self.counts = counts
        self.materialize(mesh, dtype=np.float64)

    def forward(self, batch):
        rows = float(batch.rows)
        add_loss("own", ops.sum(self.weight * rows), 0.5)
        add_counts("own", [rows] * self.counts)
        return ops.sum(self.weight * 0.0)


def step_of(how, dp=1, micros=1):
    """Gradient and report of one step of 8 rows, of which the last two are padding."""

    def main():
        mesh = Mesh(world(), dp=dp)
        model = Own(mesh, **how)
        rows = complete("1f1b", ranks=1, microbatches=micros)
        executor = Executor(model, Sgd(model.parameters(), lr=1.0, momentum=0.0), mesh, rows)
        mine = slice(mesh.dp.rank * ROWS // dp, (mesh.dp.rank + 1) * ROWS // dp)
        targets = np.where(np.arange(ROWS)[:, None] < ROWS - 2, np.ones((ROWS, 4), np.int64), ops.IGNORE)
        executor.step(Batch(targets * 0, targets[mine], np.arange(ROWS)[mine], np.arange(4), 0))
        return float(model.weight.grad[0]), executor.report

    return LocalWorld(dp).run(main)


@pytest.mark.parametrize(("dp", "micros"), [(1, 1), (1, 4), (2, 1), (4, 2)])
def test_a_loss_of_ones_own_is_a_mean_over_the_rows_of_the_step_on_every_layout(dp, micros):
    for gradient, report in step_of({}, dp, micros):
        assert gradient == 0.5  # its coefficient: each row has a loss of one weight
        assert (report.rows, report.counted) == (6, {"own": (6.0,)})


def test_a_model_that_adds_a_loss_and_does_not_say_so_is_refused():
    with pytest.raises(ConfigError, match="own adds a loss to the objective, but Own does not say so"):
        step_of({"adds_losses": False})


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"counted": ()}, "'own' counts 1 numbers, of which counted of Own knows nothing: it is {}"),
        ({"counted": (("other", 1),)}, "it is {'other': 1}"),
        ({"counts": 3}, "'own' counts 3 numbers, of which counted of Own knows nothing: it is {'own': 1}"),
    ],
)
def test_what_a_pass_counts_is_what_the_model_says_that_it_counts(how, text):
    with pytest.raises(ConfigError) as error:
        step_of(how)
    assert text in str(error.value)


def layer(routing):
    mesh = Mesh(world())
    moe = Moe("moe", routing, 8, 16, mesh)
    moe.materialize(mesh, dtype=np.float64)
    return moe


def test_a_router_that_draws_is_given_something_to_draw_from():
    x = Tensor(np.random.default_rng(0).normal(size=(2, 4, 8)))
    for routing in (Routing(4, 2), Routing(4, jitter=0.1)):
        with pytest.raises(ConfigError, match="give RoutedTokens"):
            layer(routing)(x, RoutedTokens(training=True))
        layer(routing)(x, RoutedTokens())  # evaluation draws nothing
        layer(routing)(x, RoutedTokens(training=True, draw=Draw(0, 0, np.arange(2), np.arange(4))))
    layer(Routing(4))(x, RoutedTokens(training=True))


def test_tokens_come_by_sequence():
    with pytest.raises(ShapeError, match="must be \\(sequences, tokens, width\\)"):
        layer(Routing(4))(Tensor(np.zeros((6, 8))), RoutedTokens())


def test_routing_in_python_has_the_defaults_of_the_command_line():
    assert Routing(8) == Routing(8, 1, "switch", balance_loss=0.01)
    assert Routing(8, 2) == Routing(8, 2, "gshard", balance_loss=0.64)
    assert Routing(8, router="gshard") == Routing(8, 2)
    assert Routing(8, 3).router == "topk"
    assert Routing(8, 2, "topk").balance_loss == 0.01
    assert (Routing(8).least_balance, Routing(8, 2).least_balance) == (1.0, 1 / 64)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Routing(8.0),
        lambda: Routing("8"),
        lambda: Routing(True),
        lambda: Routing(8, 2.0),
        lambda: Routing(8, every=2.5),
        lambda: Routing(8, z_loss=float("nan")),
        lambda: Routing(8, balance_loss=float("inf")),
        lambda: Routing(8, jitter=1.0),
        lambda: GPTConfig(routing=8),
        lambda: GPTConfig(layers=2, routing=Routing(8, every=3)),
    ],
)
def test_numbers_of_a_mixture_that_make_no_sense_are_refused(make):
    with pytest.raises(ConfigError):
        make()

"""Stale gradients and local SGD are what they say, on every layout: checks_asynchronous.py on ranks as threads."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_asynchronous as checks
import checks_ledger

from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.errors import ConfigError, NumericsError, ScheduleError
from mpitrain.models.gpt import GPT
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import AdamW, Sgd
from mpitrain.optim.scaler import LossScaler
from mpitrain.parallel.data import FlatReducer
from mpitrain.parallel.local_sgd import LocalSgd
from mpitrain.parallel.stale import Stale, StaleWorkers
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.plan.traffic import Step, Workers, traffic
from mpitrain.routing import Routing

EXPERTS = replace(checks.SIZES, routing=Routing(4, 2))
LAYOUTS = {
    "dp2": (2, {"micros": 3}),
    "dp4 without clipping": (4, {"batch": 16, "micros": 2, "clip": 0.0}),
    "pp2 dp2, tied": (4, {"pp": 2, "micros": 2, "sizes": replace(checks.SIZES, tied=True), "schedule": "zb-h1"}),
    "tp2 dp2, sequence parallel": (4, {"tp": 2, "sequence_parallel": True}),
    "cp2 dp2": (4, {"cp": 2, "sizes": replace(checks.SIZES, seq_len=8)}),
    "dp4 ep2, experts": (4, {"ep": 2, "sizes": EXPERTS}),
}
SCHEMES = {
    "stale": lambda model, _, mesh: Stale(model.flats, mesh, 2),
    "stale workers": lambda model, _, mesh: StaleWorkers(model.flats, mesh, 2),
    "local": lambda model, optimizer, mesh: LocalSgd(model.flats, mesh, optimizer, 2),
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request):
    return request.param


def run(check, ranks, *args, **how):
    return LocalWorld(ranks).run(lambda: check(world(), *args, **how))


# ------------------------------------------------------------------------------------------- a bowl, and its recurrence


class Bowl(Module):
    """One weight, 1 at the start; the loss is lambda w^2 / 2, times the batch's factor."""

    def __init__(self, mesh, curvature=1.0):
        super().__init__("bowl")
        self.curvature = curvature
        self.weight = Parameter("bowl.weight", (1,), init=lambda *_: np.ones(1))
        self.materialize(mesh, 0, np.float64)

    def forward(self, batch):
        return (self.weight * self.weight).sum() * (0.5 * self.curvature * batch.factor)


class Once:
    """A batch of one target."""

    count = 1

    def __init__(self, factor=1.0):
        self.factor = factor

    def split(self, parts):
        return [self]


def bowl(scheme, lr, **how):
    mesh = Mesh(World(Alone(), "none"))
    model = Bowl(mesh)
    optimizer = Sgd(model.parameters(), lr=lr)
    rows = complete("1f1b", ranks=1, microbatches=1)
    return model, Executor(model, optimizer, mesh, rows, reducer=scheme(model.flats, mesh), **how)


def path(delay, lr, steps):
    model, executor = bowl(lambda flats, mesh: Stale(flats, mesh, delay), lr)
    weights = []
    for _ in range(steps):
        executor.step(Once())
        weights.append(float(model.weight.data[0]))
    return weights


@pytest.mark.parametrize(("delay", "limit"), [(0, 2.0), (1, 1.0), (2, 0.618), (3, 0.445)])
def test_late_gradients_converge_up_to_the_rate_of_the_formula_and_diverge_above_it(delay, limit):
    """T5.1."""
    exact = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    assert exact == pytest.approx(limit, abs=5e-4)
    assert max(map(abs, path(delay, 0.96 * exact, 600)[-40:])) < 0.1
    assert max(map(abs, path(delay, 1.04 * exact, 600)[-40:])) > 10


def test_a_rate_at_which_synchronous_descent_converges_diverges_three_steps_late():
    """T5.2."""
    assert abs(path(0, 0.5, 60)[-1]) < 1e-15
    assert max(map(abs, path(3, 0.5, 200)[-10:])) > 100


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_the_weight_follows_the_recurrence_to_the_last_bit(delay):
    """The first updates are not made: no gradient has arrived."""
    by_hand = [1.0]
    for t in range(40):
        by_hand.append(by_hand[-1] - 0.1 * by_hand[t - delay] if t >= delay else by_hand[-1])
    assert path(delay, 0.1, 40) == by_hand[1:]


def test_a_gradient_that_is_not_finite_is_refused_in_its_own_step_and_does_not_wait():
    """The step that computed it can then be run again, to find where it came from."""
    model, executor = bowl(lambda flats, mesh: Stale(flats, mesh, 3), 0.1)
    for _ in range(5):
        executor.step(Once())
    before = model.weight.data.copy()
    with pytest.raises(NumericsError, match="after 2 updates"):
        executor.step(Once(math.nan))
    assert model.weight.data == before
    expected = path(3, 0.1, 9)
    for t in range(5, 9):  # as if it had never been
        executor.step(Once())
        assert float(model.weight.data[0]) == expected[t]


class Spiky(LossScaler):
    """Doubles at every step, and has gradients overflow when it is told to."""

    overflows = False

    @property
    def seed(self):
        return math.inf if self.overflows else super().seed


@pytest.mark.parametrize("name", SCHEMES)
def test_steps_that_overflow_hand_in_nothing_and_scales_are_taken_off_in_their_own_step(name):
    """Scales are powers of two, so the run is that without a scale and without these steps, to the last bit."""

    def main(scaler):
        mesh = Mesh(world())
        model = GPT(checks.SIZES, mesh, seed=3, dtype=np.float32)
        optimizer = AdamW(model.parameters(), lr=2e-3)
        rows = complete("1f1b", ranks=1, microbatches=1)
        reducer = SCHEMES[name](model, optimizer, mesh)
        executor = Executor(model, optimizer, mesh, rows, reducer=reducer, clip=checks.CLIP, scaler=scaler)
        for batch in checks.batches_of(checks.SIZES, 12, mesh.dp.rank, mesh.dp.size, 6):
            if scaler is not None and batch.step in (1, 4):
                scaler.overflows = True
                executor.step(batch)
                assert executor.report.skipped
                scaler.overflows = False
            executor.step(batch)
            assert not executor.report.skipped
        return checks.held(model, optimizer)

    plain = LocalWorld(2).run(lambda: main(None))
    scaled = LocalWorld(2).run(lambda: main(Spiky(2.0**10, window=1)))
    for expected, found in zip(plain, scaled, strict=True):
        for kind, tensors in expected.items():
            assert all(a.tobytes() == found[kind][n].tobytes() for n, a in tensors.items()), kind


# --------------------------------------------------------------------------------------------------- against the replay


def test_stale_gradients_equal_their_replay_on_every_layout(layout):
    ranks, how = layout
    run(checks.stale_equals_its_replay, ranks, 2, **how)


def test_stale_workers_equal_their_replay_on_every_layout(layout):
    ranks, how = layout
    run(checks.stale_workers_equal_their_replay, ranks, 2, **how)


def test_local_sgd_equals_a_model_for_each_worker_on_every_layout(layout):
    ranks, how = layout
    run(checks.local_sgd_equals_its_replay, ranks, 2, steps=5, **how)


@pytest.mark.parametrize(("start", "staleness"), [(2, 1), (3, 2)])
def test_gradients_may_be_late_from_an_update_on(start, staleness):
    """T24.4: with one step the delayed update of offload."""
    run(checks.stale_equals_its_replay, 2, staleness, steps=7, start=start, micros=2)


def test_other_delays_and_methods_equal_their_replay():
    run(checks.stale_equals_its_replay, 2, 1, "sgd", steps=4)
    run(checks.stale_workers_equal_their_replay, 3, 1, "plain", steps=4)
    run(checks.stale_workers_equal_their_replay, 3, 7, "sgd", steps=4)
    run(checks.local_sgd_equals_its_replay, 3, 3, "adamw", steps=4, moments=True)


# ---------------------------------------------------------------------------------- where they are synchronous training


def bits(scheme, method="adamw", ranks=4, **how):
    how = {"method": method, "steps": 4, "batch": 16, **how}

    def main():
        world().set_deterministic()
        return checks.trained(world(), scheme, **how)[2]

    return [
        {(kind, name): array.tobytes() for kind, of in held.items() for name, array in of.items()}
        for held in LocalWorld(ranks).run(main)
    ]


def flat(model, _, mesh):
    return FlatReducer(model.flats, mesh)


@pytest.mark.parametrize("how", [{}, {"ranks": 3, "batch": 12, "micros": 2}, {"tp": 2, "method": "sgd"}], ids=str)
def test_gradients_that_are_not_late_are_those_of_the_synchronous_reducer_to_the_last_bit(how):
    assert bits(lambda model, _, mesh: Stale(model.flats, mesh, 0), **how) == bits(flat, **how)


@pytest.mark.parametrize("name", ["stale workers", "local"])
def test_with_one_worker_each_scheme_is_serial_training_to_the_last_bit(name):
    """T5.3."""
    assert bits(SCHEMES[name], ranks=1) == bits(flat, ranks=1)
    assert bits(SCHEMES[name], ranks=2, tp=2) == bits(flat, ranks=2, tp=2)


@pytest.mark.parametrize(("method", "moments"), [("plain", False), ("sgd", True)])
def test_averaging_after_every_step_is_synchronous_descent(method, moments):
    """But for rounding, and without clipping, which is each worker's own; targets differ between workers."""
    how = {"method": method, "steps": 8, "batch": 16, "clip": 0.0}

    def main():
        of_scheme = {}
        for name, scheme in (
            ("flat", flat),
            ("local", lambda model, optimizer, mesh: LocalSgd(model.flats, mesh, optimizer, 1, moments)),
        ):
            of_scheme[name] = checks.trained(world(), scheme, **how)
        model, _, synchronous = of_scheme["flat"]
        local = {kind: of for kind, of in of_scheme["local"][2].items() if kind != "norms"}
        checks.same(local, model, checks.whole_of(model, synchronous))

    LocalWorld(4).run(main)


def test_momentum_that_stays_with_the_workers_is_another_run():
    how = {"method": "adamw", "steps": 4, "batch": 16, "clip": 0.0}
    kept, averaged = (
        bits(lambda model, optimizer, mesh, m=moments: LocalSgd(model.flats, mesh, optimizer, 2, m), **how)
        for moments in (False, True)
    )
    assert kept[0][("first_moment", "head.weight")] != kept[1][("first_moment", "head.weight")]
    assert averaged[0] == averaged[1]
    assert kept[0][("weights", "head.weight")] == kept[1][("weights", "head.weight")]
    assert kept[0][("weights", "head.weight")] != averaged[0][("weights", "head.weight")]


# ------------------------------------------------------------------------------------------------------------- messages


TRAFFIC = {
    "dp4": {"dp": 4},
    "tp2 dp2, sequence parallel": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "pp2 dp2": {"dp": 2, "pp": 2, "microbatches": 2},
    "cp2 dp2, float16": {"dp": 2, "cp": 2, "dtype": np.float16},
    "dp4 ep2": {"dp": 4, "ep": 2, "sizes": replace(checks_ledger.SIZES, routing=Routing(4, 2))},
}


@pytest.mark.parametrize("how", TRAFFIC.values(), ids=TRAFFIC)
def test_workers_send_what_was_predicted_to_the_byte(how):
    """Experts: an average after each step, since every one sends other rows."""
    local = 1 if "ep" in how else 3
    for scheme in (
        {"staleness": 2},
        {"staleness": 2, "workers": Workers(clips=True)},
        {"workers": Workers(local, clips=True)},
        {"workers": Workers(local, moments=2)},
    ):
        clip = 0.5 if scheme.get("workers", Workers(clips=True)).clips else 0.0
        run(checks_ledger.sends_what_was_predicted, 4, clip=clip, **how, **scheme)


def test_a_step_of_local_sgd_sends_an_nth_of_the_weights():
    """One all-reduce of the weights in place of H all-reduces of gradients."""
    step = Step(checks_ledger.SIZES, batch=16, dp=4)
    gradients, weights = traffic(step).total(cause="gradients"), traffic(replace(step, workers=Workers(8)))
    assert weights.row == 8
    assert weights.total(cause="gradients") == 0
    assert weights.total(cause="weights") == gradients
    assert "a rank and row of 8 steps" in str(weights)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_scheme_that_makes_no_sense_is_refused():
    def main():
        mesh = Mesh(world())
        model = GPT(checks.SIZES, mesh)
        optimizer = Sgd(model.parameters())
        for scheme, text in (
            (lambda: Stale(model.flats, mesh, -1), "staleness -1"),
            (lambda: Stale(model.flats, mesh, 1, -1), "start -1"),
            (lambda: StaleWorkers(model.flats, mesh, 0), "no worker would be late"),
            (lambda: LocalSgd(model.flats, mesh, optimizer, 0), "0 local steps"),
        ):
            with pytest.raises(ConfigError, match=text):
                scheme()
        rows = complete("1f1b", ranks=1, microbatches=1)
        with pytest.raises(ConfigError, match=r"rank 1 updates by Sgd with no scaler and Stale \{'staleness': 2, "):
            Executor(model, optimizer, mesh, rows, reducer=Stale(model.flats, mesh, 1 + mesh.dp.rank))

    LocalWorld(2).run(main)


def test_workers_that_learn_apart_and_steps_that_overlap_do_not_go_together():
    def main():
        mesh = Mesh(world(), pp=2)
        model = GPT(checks.SIZES, mesh)
        optimizer = Sgd(model.parameters())
        with pytest.raises(ScheduleError, match="with LocalSgd workers learn on their own"):
            Executor(
                model,
                optimizer,
                mesh,
                lambda batches: complete("pipedream", ranks=2, microbatches=1, batches=batches),
                versions="newest",
                reducer=LocalSgd(model.flats, mesh, optimizer, 2),
            )

    LocalWorld(2).run(main)

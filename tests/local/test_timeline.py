"""The clock of real steps, and what a step holds in memory: measured, by formula and by the simulator."""

import time
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.debug import timeline
from mpitrain.debug.timeline import Measured, Stopwatch, expected_bubble
from mpitrain.errors import ScheduleError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import Sgd
from mpitrain.pipeline import render
from mpitrain.pipeline.action import COMPUTE, PER_UNIT, Action
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import balance
from mpitrain.pipeline.passes import complete, with_messages, with_update
from mpitrain.pipeline.schedules import gpipe
from mpitrain.pipeline.simulate import Costs, Sizes, Span, simulate
from mpitrain.routing import Routing

TINY = GPTConfig(vocab=11, layers=4, width=8, heads=2, seq_len=4)
UNITS = {"gpipe": {}, "1f1b": {}, "interleaved": {"chunks": 2}, "zb-h1": {}, "terapipe": {"slices": 2}}


def executor(name, mesh, config=TINY, microbatches=4, **shape):
    stages = mesh.pp.size * shape.get("chunks", 1)
    model = GPT(config, mesh, partition=balance([1.0] * config.layers, stages), dtype=np.float64)
    rows = complete(name, ranks=mesh.pp.size, microbatches=microbatches, **shape)
    slices = [config.seq_len // shape["slices"]] * shape["slices"] if "slices" in shape else None
    return Executor(model, Sgd(model.parameters(), lr=0.1), mesh, rows, slices=slices)


def batch(rows, config=TINY, step=0):
    tokens = np.random.default_rng(step).integers(config.vocab, size=(rows, config.seq_len + 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], np.arange(rows), np.arange(config.seq_len), step)


def watched(name="1f1b", ranks=2, steps=1, keep=1, **shape):
    """What each rank gathers of its last step."""

    def run():
        pipeline = executor(name, Mesh(world(), pp=world().size), **shape)
        watch = Stopwatch(keep)
        with listen(watch):
            for step in range(steps):
                pipeline.step(batch(8, step=step))
        return watch.gather(world()), len(watch)

    return LocalWorld(ranks).run(run)


def played(name, ranks=3, microbatches=6, costs=None, **shape):
    """A step that goes exactly as the simulator says, in seconds, on clocks that do not begin at 0."""
    rows = complete(name, ranks=ranks, microbatches=microbatches, **shape)
    simulated = simulate(rows, costs or Costs(2.0, 3.0, 1.0, 0.25))
    lanes = [[Span(a, 7.5 + start / 1e3, 7.5 + stop / 1e3) for a, start, stop in lane] for lane in simulated.spans]
    return simulated, Measured.of(lanes)


# ----------------------------------------------------------------------------------------------------------- the clock


@pytest.mark.parametrize(("name", "shape"), UNITS.items(), ids=UNITS)
def test_every_action_of_the_step_is_seen_by_every_rank_in_the_order_of_the_rows(name, shape):
    found = [measured for measured, _ in watched(name, **shape)]
    rows = complete(name, ranks=2, microbatches=4, **shape)
    for measured in found:
        assert measured == found[0]
        for lane, row in zip(measured.spans, rows, strict=True):
            assert [span.action for span in lane] == [action for action in row if action.kind in PER_UNIT]
            assert all(span.start <= span.stop for span in lane)
            assert all(a.stop <= b.start for a, b in pairwise(lane))
    work = [span for lane in measured.spans for span in lane if span.action.kind in COMPUTE]
    assert min(span.start for span in work) == 0
    assert measured.makespan == max(span.stop for span in work)
    assert measured.bubble == pytest.approx(1 - sum(measured.busy) / (2 * measured.makespan))
    # Ranks that are threads take turns: of two, one is idle at any time.
    assert measured.bubble >= 0.5


@pytest.mark.parametrize(("name", "shape"), UNITS.items(), ids=UNITS)
def test_a_step_that_went_as_the_simulator_says_has_its_figures(name, shape):
    simulated, measured = played(name, **shape)
    assert measured.makespan == pytest.approx(simulated.makespan)
    assert measured.busy == pytest.approx(simulated.busy)
    assert measured.bubble == pytest.approx(simulated.bubble)
    drawn = measured.timeline
    assert drawn.idle == pytest.approx(simulated.idle)
    assert drawn.peak_micros == simulated.peak_micros
    assert measured.message == pytest.approx(0.25)
    assert render.text(drawn) == render.text(simulated)


def test_costs_of_a_step_give_the_simulator_the_same_step():
    costs = Costs([2.0, 1.0, 3.0], [3.0, 4.0, 5.0], [1.0, 2.0, 1.5])
    for name in ("zb-h1", "1f1b"):
        simulated, measured = played(name, costs=costs)
        again = simulate(simulated.rows, measured.costs)
        assert again.makespan == pytest.approx(simulated.makespan)
        assert again.bubble == pytest.approx(simulated.bubble)


def test_ranks_wait_in_receives():
    _, measured = played("gpipe", ranks=2, microbatches=2, costs=Costs(1.0, 1.0, 1.0))
    # F0 F1 .  .  .  . B1 B1 B0 B0       rank 0 waits 3 for the gradient of micro-batch 1: until 1 + 2 + 2 are over
    # .  F0 F1 B1 B1 B0 B0               rank 1 waits 1 for micro-batch 0, which is before its first F
    assert measured.waiting == pytest.approx((3.0, 1.0))


def test_the_time_that_tokens_take_to_their_experts_is_seen_within_the_work_of_each_stage():
    def run():
        mesh = Mesh(world(), pp=2, dp=2, ep=2)
        config = replace(TINY, layers=2, routing=Routing(4, every=2))  # the second stage has experts, the first none
        pipeline = executor("1f1b", mesh, config, microbatches=2)
        watch = Stopwatch()
        with listen(watch):
            pipeline.step(batch(4, config))
        return watch.gather(mesh.pp)

    for measured in LocalWorld(4).run(run):
        plain, experts = measured.inside
        assert plain == {}
        assert set(experts) == {"ep"}
        assert 0 < experts["ep"] < measured.busy[1]


def test_an_action_that_comes_again_begins_the_next_step_and_old_ones_are_forgotten():
    for measured, kept in watched(steps=5, keep=3):
        assert kept == 3
        assert [len(lane) for lane in measured.spans] == [16, 16]


def test_the_time_of_a_rank_by_kind_of_action_is_that_of_a_mean_step():
    def run():
        pipeline = executor("zb-h1", Mesh(world(), pp=2))
        watch = Stopwatch(keep=2)
        with listen(watch):
            for step in range(3):
                pipeline.step(batch(8, step=step))
        both = [watch.gather(world(), step) for step in (0, 1)]
        seconds = watch.seconds()
        assert set(seconds) == {action.kind for action in pipeline.row}
        work = sum(seconds[kind] for kind in COMPUTE)
        assert 1e3 * work == pytest.approx(sum(step.busy[world().rank] for step in both) / 2)

    LocalWorld(2).run(run)


def test_a_step_that_was_not_watched_is_refused_on_every_rank():
    def run():
        watch = Stopwatch()
        if world().rank == 0:
            action = Action("F", 0, 0)
            watch._steps.append(timeline._Step([Span(action, 0.0, 1.0)], {action}, [], {}))
        with pytest.raises(ScheduleError, match="rank 1 of axis world keeps no step -1"):
            watch.gather(world())

    LocalWorld(2).run(run)


def test_clocks_of_several_hosts_are_brought_together(monkeypatch):
    """Each rank's host was started at another time; a message still arrives after it was sent."""

    class Clock:
        @staticmethod
        def perf_counter():
            return time.perf_counter() + 1000.0 * world().rank

    monkeypatch.setattr(timeline, "time", Clock)
    monkeypatch.setattr(timeline, "clock_name", lambda: f"host {world().rank}")
    [measured, _], _ = watched()
    assert 0 < measured.makespan < 10_000
    sent = {span.action: span for lane in measured.spans for span in lane}
    for lane in measured.spans:
        for span in lane:
            if span.action.kind == "RECV_F":
                before = sent[span.action._replace(kind="SEND_F", stage=span.action.stage - 1)]
                assert before.start <= span.stop + 50.0  # of milliseconds: clocks differ by a million


# --------------------------------------------------------------------------------------------------------- the formulas


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("name", "shape"),
    [*UNITS.items(), ("interleaved", {"chunks": 3}), ("pipedream", {"batches": 3}), ("pipedream-2bw", {"batches": 2})],
)
@pytest.mark.parametrize("costs", [Costs(1, 1, 1), Costs(2, 2, 1), Costs(10, 11, 8)])
def test_the_formula_of_a_bubble_is_what_the_simulator_finds(name, shape, ranks, costs):
    """T6.1, T7.2, T9.3, T10.2: equal stages, messages at no cost."""
    for microbatches in (ranks, 2 * ranks, 5 * ranks):
        sizes = {"ranks": ranks, "microbatches": microbatches, **shape}
        assert expected_bubble(name, **sizes, costs=costs) == pytest.approx(
            simulate(complete(name, **sizes), costs).bubble
        ), microbatches


# ----------------------------------------------------------------------------------------------------------- in flight


class Scales:
    """A listener that weighs what a rank holds at the end of every action."""

    def __init__(self):
        self.saved, self.kept, self.boundary = {}, {}, {}
        self.tapes, self.all = [], []

    def __call__(self, event):
        if event.kind != "action" or event.phase == "begin":
            return
        action, run = event.info["action"], event.info["executor"]._running
        flying = {(micro, stage): flight for (micro, _, stage), flight in run.flying.items()}
        flight = flying.get((action.micro, action.stage))
        if action.kind == "F":
            self.saved[action.stage] = flight.tape.nbytes
            self.boundary[action.stage] = sum(t.data.nbytes for t in flight.inputs)
        elif action.kind == "B":
            self.kept[action.stage] = 0 if flight is None else flight.tape.nbytes
        self.tapes.append(sum(flight.tape.nbytes for flight in run.flying.values()))
        self.all.append(event.info["executor"].bytes_in_flight)


def own_peak(row, sizes, place):
    """The most that a rank holds if whatever it sends were gone at once: its own row alone decides it."""
    held = peak = 0
    last = len(place) - 1
    split = {action.stage for action in row if action.kind == "W"}
    for kind, _, stage, _ in row:
        if kind == "F":
            held += sizes.saved[stage] - (sizes.boundary[stage] if stage else 0)
        elif kind == "B":
            held += (sizes.kept[stage] if stage in split else 0) - sizes.saved[stage]
            held -= sizes.boundary[stage + 1] if stage < last else 0
        elif kind == "W":
            held -= sizes.kept[stage]
        elif kind in ("RECV_F", "RECV_B"):
            held += sizes.boundary[stage + (kind == "RECV_B")]
        peak = max(peak, held)
        # A gradient stays from the end of its B to its SEND_B right after it: seen at the end of the B.
        if kind == "B" and stage and place[stage - 1] != place[stage]:
            peak = max(peak, held + sizes.boundary[stage])
    return peak


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "shape"), [("gpipe", {}), ("1f1b", {}), ("interleaved", {"chunks": 2}), ("zb-h1", {})]
)
def test_bytes_in_flight_are_those_of_the_simulator(name, shape, ranks):
    """T6.4, T7.1, T9.1, T10.3 in bytes.

    Exactly: what tapes hold.  With messages: what a rank has received and not used yet is exact too, its own row
    decides it.  What it has sent is on its account until it knows that the other side has taken it, which depends on
    when that posts its receive; so the measured peak is at least that of a rank whose sends are gone at once, and at
    most the simulator's, where sends stay until the end of their receive.
    """
    config = GPTConfig(vocab=11, layers=8, width=8, heads=2, seq_len=4)

    def run():
        pipeline = executor(name, Mesh(world(), pp=ranks), config, microbatches=8, **shape)
        scales, watch = Scales(), Stopwatch(with_bytes=True)
        with listen(scales):
            pipeline.step(batch(8, config))
        with listen(watch):
            pipeline.step(batch(8, config))
        assert pipeline.bytes_in_flight == 0
        return scales, watch.gather(world()).peak_bytes

    found = LocalWorld(ranks).run(run)
    stages = range(ranks * shape.get("chunks", 1))

    def by_stage(kind):
        return [next(getattr(s, kind)[q] for s, _ in found if q in getattr(s, kind)) for q in stages]

    sizes = Sizes(by_stage("saved"), by_stage("kept"), by_stage("boundary"))
    rows = complete(name, ranks=ranks, microbatches=8, **shape)
    alone = simulate(rows, sizes=Sizes(sizes.saved, sizes.kept, [0 for _ in stages]))
    assert tuple(max(scales.tapes) for scales, _ in found) == alone.peak_bytes
    whole = simulate(rows, sizes=sizes)
    place = [q % ranks for q in stages]
    for rank, (scales, gathered) in enumerate(found):
        assert own_peak(rows[rank], sizes, place) <= max(scales.all) <= whole.peak_bytes[rank], rank
        assert gathered[rank] == max(scales.all)
    if name != "interleaved":  # there every send is taken before the peak
        assert tuple(max(scales.all) for scales, _ in found) == whole.peak_bytes


@pytest.mark.parametrize("split", [False, True], ids=["whole backward", "all W after all B"])
def test_nothing_is_alive_that_is_not_counted(split):
    """Outputs after their send, inputs and gradients after their B: one of them kept a micro-batch is seen here."""
    config = GPTConfig(vocab=11, layers=2, width=64, heads=1, seq_len=128)
    micros, boundary = 8, 128 * 64 * 8
    rows = gpipe(2, micros)
    if split:
        rows = [row + [a._replace(kind="W") for a in row if a.kind == "B"] for row in rows]
    rows = with_update(with_messages(rows))
    pipelines, uncounted = [], []

    def run():
        mesh = Mesh(world(), pp=2)
        model = GPT(config, mesh, dtype=np.float64)
        pipeline = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, rows)
        pipelines.append(pipeline)
        pipeline.step(batch(micros, config))
        with listen(weigh):
            pipeline.step(batch(micros, config, step=1))

    def weigh(event):
        if event.kind == "action" and event.phase == "end" and event.info["action"].kind != "F":
            runs = [pipeline._running for pipeline in pipelines if pipeline._running is not None]
            uncounted.append(tracemalloc.get_traced_memory()[0] - sum(run.nbytes for run in runs))

    tracemalloc.start()
    try:
        LocalWorld(2).run(run)
    finally:
        tracemalloc.stop()
    # Receives that are posted ahead have their arrays already; the rest are objects, some kilobytes for each tape.
    assert max(uncounted) - min(uncounted) < 5 * boundary

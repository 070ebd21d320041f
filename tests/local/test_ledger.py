"""The message ledger: what it adds up, and that every layout sends what the formulas say (T30.11)."""

import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_ledger as checks
from checks_layouts import layouts, name_of
from often import some

from mpitrain import collectives
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.debug.ledger import Ledger, Place, in_step, share_in_messages
from mpitrain.events import Event, listen
from mpitrain.models.gpt import GPTConfig
from mpitrain.parallel.context import KINDS
from mpitrain.pipeline.action import Action
from mpitrain.plan.traffic import Step, traffic


def run(ranks, sizes=checks.SIZES, **how):
    LocalWorld(ranks).run(lambda: checks.sends_what_was_predicted(world(), sizes, **how))


def of_layout(layout):
    return {"dp": layout["dp"], "tp": layout["tp"], "cp": layout["cp"], "sequence_parallel": layout["sp"]}


def cases(*ranks):
    return [pytest.param(n, of_layout(each), id=name_of(each) or "one rank") for n in ranks for each in layouts(n)]


# ------------------------------------------------------------------------------------------- measured equals predicted


@pytest.mark.parametrize(
    ("tied", "microbatches", "dtype"), [(False, 1, np.float32), (True, 2, np.float64)], ids=["untied", "tied, 2 micros"]
)
@pytest.mark.parametrize(("ranks", "layout"), some(cases(1, 2, 4, 8), 2))
def test_every_layout_sends_what_was_predicted(ranks, layout, tied, microbatches, dtype):
    """T30.11; the vocabulary of 17 divides over no tp, so its ranks hold different numbers of words."""
    run(ranks, replace(checks.SIZES, tied=tied), microbatches=microbatches, dtype=dtype, **layout)


@pytest.mark.parametrize(("ranks", "layout"), cases(3, 6))
def test_three_and_six_ranks(ranks, layout):
    run(ranks, replace(checks.SIX, seq_len=36 if layout["cp"] in (3, 6) else 12), batch=12, steps=2, **layout)


@pytest.mark.parametrize("kv_heads", some([2, 1, 8]))
@pytest.mark.parametrize("kind", ["ring", "ulysses", "rsa"])
@pytest.mark.parametrize("layout", [{"cp": 2}, {"cp": 4, "dp": 2}, {"cp": 2, "tp": 4, "sequence_parallel": True}])
def test_every_kind_of_context_attention(layout, kind, kv_heads):
    """T14.4, the bytes; with grouped heads, and more ranks of tp than heads of keys."""
    ranks = layout["cp"] * layout.get("tp", 1) * layout.get("dp", 1)
    if kind == "ulysses" and max(1, kv_heads // layout.get("tp", 1)) % layout["cp"]:
        kv_heads = 8  # each rank needs a head of keys
    run(ranks, replace(checks.SIZES, kv_heads=kv_heads), cp_attention=kind, microbatches=2, **layout)


@pytest.mark.parametrize(
    "layout", [*({"cp": 4, "cp_attention": kind} for kind in KINDS), {"tp": 2, "dp": 2, "sequence_parallel": True}]
)
def test_in_float16_some_messages_are_of_two_bytes_a_number_and_some_of_four(layout):
    run(4, microbatches=2, dtype=np.float16, **layout)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(("kv_heads", "tp"), [(2, 2), (4, 2), (2, 4), (1, 8), (2, 8)])
def test_heads_of_keys_that_queries_share(kv_heads, tp, sp):
    run(8, replace(checks.SIZES, kv_heads=kv_heads), dp=8 // tp, tp=tp, sequence_parallel=sp)


@pytest.mark.parametrize("vocab", [1, 5, 17, 24])
def test_ranks_with_fewer_words_or_none(vocab):
    run(8, replace(checks.SIZES, vocab=vocab), dp=2, tp=4)


def test_blocks_that_nobody_sees_travel_all_the_same():
    run(4, cp=4, documents=True)


def test_buckets_send_the_same_bytes_in_more_calls():
    step = Step(checks.SIZES, batch=16, dp=2, tp=2, sequence_parallel=True)
    for rank, ledger in enumerate(LocalWorld(4).run(lambda: checks.listened(world(), step, bucket_bytes=512))):
        found, expected = checks.measured(ledger), checks.predicted(replace(step, tp_rank=rank % 2))
        assert {key: sent for key, (_, sent) in found.items()} == {key: sent for key, (_, sent) in expected.items()}
        more = {key for key, (calls, _) in found.items() if calls > expected[key][0]}
        assert more == {("dp+cp", "gradients", "all_reduce"), ("dp+cp+tp", "gradients", "all_reduce")}


def test_the_layers_of_a_stage_send_the_bytes_of_the_specification():
    """T30.10: L = 4, p = 2, so two layers a stage; h = 64, s = 32, b = 2, m = 4, float32, t = 2."""
    step = Step(GPTConfig(vocab=16, layers=2, width=64, heads=4, seq_len=32), batch=8, microbatches=4, tp=2)
    for ledger in LocalWorld(2).run(lambda: checks.listened(world(), step)):
        assert checks.measured(ledger)["tp", "layers", "all_reduce"][1] == 524_288
    assert traffic(step).total(cause="layers") == 524_288


AGAIN = [
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"cp": 2, "cp_attention": "ring"},
    {"cp": 2, "cp_attention": "ulysses"},
    {"cp": 2, "cp_attention": "rsa"},
    {"pp": 2, "microbatches": 2, "schedule": "zb-h1"},
    {"pp": 2, "tp": 2, "sequence_parallel": True, "microbatches": 2},
    {"pp": 2, "microbatches": 2, "schedule": "terapipe", "slices": (9, 7)},
]


@pytest.mark.parametrize(
    "again",
    [
        pytest.param({"recompute": "full"}, id="all blocks"),
        pytest.param({"recomputed": frozenset({"blocks.1"})}, id="one block", marks=pytest.mark.slow),
        pytest.param({"recomputed": frozenset({"blocks.0.attention"})}, id="attention of one"),
    ],
)
@pytest.mark.parametrize("layout", AGAIN, ids=lambda layout: " ".join(f"{k} {v}" for k, v in layout.items()))
def test_what_runs_forward_twice_sends_twice(layout, again):
    """T19.4."""
    run(layout.get("pp", 1) * layout.get("tp", 1) * layout.get("cp", 1), **layout, **again)


def test_a_recomputed_layer_makes_six_all_reduces():
    """T19.4: 4 without recompute, 6 with it."""
    for recompute, calls in (("selective", 4), ("full", 6)):
        step = Step(checks.SIZES, batch=16, tp=2, recompute=recompute)
        ledger = LocalWorld(2).run(lambda step=step: checks.listened(world(), step))[0]
        layers = checks.measured(ledger)["tp", "layers", "all_reduce"]
        assert layers[0] == calls * checks.SIZES.layers


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"dp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_branches_with_scales_send_halves_and_the_stream_sends_float32(layout, tied):
    run(2, replace(checks.SIZES, tied=tied), dtype=np.float16, scaled=True, microbatches=2, **layout)


@pytest.mark.parametrize("sp", [False, True])
def test_a_layer_sends_twice_forward_and_twice_backward(sp):
    """T11.2, T13.2: with sequence parallelism each all-reduce is an all-gather and a reduce-scatter."""
    step = Step(checks.SIZES, batch=16, tp=2, sequence_parallel=sp)
    ledger = LocalWorld(2).run(lambda: checks.listened(world(), step))[0]

    def of_layer_1(place):
        return place.path.startswith("blocks.1.")

    ways = {"forward": (0, 0), "backward": (0, 0)}
    for op, amount in ledger.by(lambda place: place.op, of_layer_1).items():
        way = "backward" if op.endswith(".backward") else "forward"
        ways[way] = ways[way][0] + amount.calls, ways[way][1] + amount.bytes
    stream = 4 * 16 * 16 * 16
    assert ways == {way: (4 if sp else 2, 2 * 2 * 1 / 2 * stream) for way in ways}


# -------------------------------------------------------------------------------------------------- what it adds up


def test_the_ledger_and_the_door_count_the_same():
    def main():
        mesh, executor, tokens = checks.built(world(), Step(checks.SIZES, batch=16, tp=2, cp=2))
        ledger = Ledger()
        with listen(ledger):
            executor.step(tokens.batch_at(0, 16).part(executor.model.positions_here))
        return [(ledger.total(axis.name), sum(axis.sent_bytes.values())) for axis in (mesh.tp, mesh.cp)]

    for counts in LocalWorld(4).run(main):
        assert all(heard == counted > 0 for heard, counted in counts)


def test_messages_outside_of_steps_and_ops_stand_under_their_line():
    def main():
        ledger, ranks = Ledger(), world()
        with listen(ledger):
            ranks.all_reduce(np.zeros(3))
            ranks.all_reduce(np.zeros(5))
        return ledger

    for ledger in LocalWorld(2).run(main):
        places = ledger.by(lambda place: (place.axis, place.verb, place.action, place.path, place.op))
        assert {key: (s.calls, s.bytes) for key, s in places.items()} == {
            ("world", "all_reduce", "", "", ""): (2, 64.0)
        }
        assert [place.where[:15] for place in ledger.by(lambda place: place)] == ["test_ledger.py:"] * 2
        assert ledger.total() == ledger.total("world") == 64
        assert ledger.total("tp") == 0
        assert (ledger.steps, ledger.share()) == (0, 0.0)
        assert ledger.table().startswith("64 bytes were sent\n\n")


def test_a_message_belongs_to_the_innermost_op_forward_or_backward():
    def main():
        ledger, axis = Ledger(), world()
        x = Tensor(np.zeros((2, 2)), requires_grad=True)
        with listen(ledger):
            with Tape() as tape:
                y = collectives.all_gather(x, axis)
            tape.run_backward([(y, np.zeros((4, 2)))])
        return ledger.by(lambda place: (place.verb, place.op))

    for sums in LocalWorld(2).run(main):
        assert {key: (s.calls, s.bytes) for key, s in sums.items()} == {
            ("all_gather", "all_gather"): (1, 32.0),
            ("reduce_scatter", "all_gather.backward"): (1, 32.0),
        }


def test_a_message_in_flight_counts_once_and_a_receive_is_time_alone():
    def main():
        ledger, ranks = Ledger(), world()
        with listen(ledger):
            if ranks.rank == 0:
                ranks.recv((4,), np.float64, 1)
            else:
                time.sleep(0.05)
                ranks.isend(np.zeros(4), 0).wait()
            ranks.iall_reduce(np.zeros(2)).wait()
        return ledger.by(lambda place: place.verb)

    receiver, sender = LocalWorld(2).run(main)
    assert {verb: (s.calls, s.bytes) for verb, s in receiver.items()} == {"all_reduce": (1, 16.0), "recv": (0, 0.0)}
    assert {verb: (s.calls, s.bytes) for verb, s in sender.items()} == {"send": (1, 32.0), "all_reduce": (1, 16.0)}
    assert receiver["recv"].seconds > 0.04


def test_a_rank_that_waits_for_another_stands_in_messages():
    step = Step(checks.SIZES, batch=16, dp=2)

    def main():
        mesh, executor, tokens = checks.built(world(), step)
        batch = tokens.batch_at(0, step.batch, mesh.dp.rank, mesh.dp.size)
        executor.step(batch)

        def late_on_rank_1(event):
            if event.kind == "op" and event.name == "take" and mesh.dp.rank == 1:
                time.sleep(0.1)

        with listen(late_on_rank_1):
            return share_in_messages(lambda: executor.step(batch))

    waits, works = LocalWorld(2).run(main)
    assert 0.5 < waits < 1.0
    assert works < 0.5


def test_evaluation_is_no_part_of_a_step():
    step = Step(checks.SIZES, batch=16, dp=2, tp=2)

    def main():
        mesh, executor, tokens = checks.built(world(), step)
        ledger = Ledger()
        batch = tokens.batch_at(0, step.batch, mesh.dp.rank, mesh.dp.size)
        with listen(ledger):
            executor.step(batch)
            executor.evaluate([batch])
            executor.step(batch)
        return ledger, mesh.tp.rank

    for ledger, tp_rank in LocalWorld(4).run(main):
        assert ledger.steps == 2
        assert checks.measured(ledger) == checks.predicted(replace(step, tp_rank=tp_rank), 2)
        evaluation = sum(s.bytes for s in ledger.by(lambda place: place, lambda place: not in_step(place)).values())
        in_steps = sum(s.bytes for s in ledger.by(lambda place: place, in_step).values())
        assert ledger.total() == in_steps + evaluation > in_steps
        table = ledger.table()
        assert table.startswith(f"a step sends {traffic(replace(step, tp_rank=tp_rank)).total():,} bytes, and ")
        assert f"outside of steps {evaluation:,.0f} bytes were sent" in table


def test_the_table_shows_the_largest_first_and_counts_what_it_leaves_out():
    step = Step(checks.SIZES, batch=16, dp=2, tp=2)
    ledger = LocalWorld(4).run(lambda: checks.listened(world(), step))[0]

    def rows(text):
        tables = text.split("\n\n")[1:]
        return [[re.split(r"  +", line.strip()) for line in table.splitlines()] for table in tables]

    axes, places, *_ = rows(ledger.table())  # the rest: what ranks compare before the first step
    assert sum(ledger.share(row[3]) for row in axes[1:]) == pytest.approx(ledger.share())
    assert [row[3] for row in axes[1:]] == ["tp", "dp+cp", "world"]
    sent = [int(row[0].replace(",", "")) for row in places[1:]]
    assert sent == sorted(sent, reverse=True)
    in_steps = sum(s.bytes for s in ledger.by(lambda place: place, in_step).values())
    assert sum(sent) == sum(int(row[0].replace(",", "")) for row in axes[1:]) == in_steps
    assert sum(row[4:] == ["blocks.*.attention.proj", "all_reduce"] for row in places) == 1
    assert sum("blocks.1.mlp.up" in row for row in rows(ledger.table(each_layer=True))[1]) == 1
    short = rows(ledger.table(rows=2))[1]
    assert len(short) == 4
    assert short[3][3:] == [f"({len(places) - 3} more)"]
    assert int(short[3][0].replace(",", "")) == sum(sent[2:])


def message(name, nbytes=8.0):
    info = {"axis": "tp", "bytes": nbytes}
    return [Event("message", phase, name, info) for phase in ("begin", "end")]


def test_an_op_inside_of_an_op_has_its_own_messages():
    ledger = Ledger()
    outer = [Event("op", phase, "recompute.backward", {"path": "blocks.0"}) for phase in ("begin", "end")]
    inner = [Event("op", phase, "all_reduce", {"path": "blocks.0.mlp.down"}) for phase in ("begin", "end")]
    for event in (outer[0], inner[0], *message("all_reduce", 8.0), inner[1], *message("all_reduce", 16.0), outer[1]):
        ledger(event)
    places = ledger.by(lambda place: (place.path, place.op))
    assert {key: amount.bytes for key, amount in places.items()} == {
        ("blocks.0", "recompute.backward"): 16.0,
        ("blocks.0.mlp.down", "all_reduce"): 8.0,
    }


def test_waiting_for_a_message_is_time_and_no_second_message():
    ledger = Ledger()
    begin, end = message("wait isend")
    for event in (*message("isend"), begin):
        ledger(event)
    time.sleep(0.02)
    ledger(end)
    (amount,) = ledger.by(lambda place: place.verb).values()
    assert (amount.calls, amount.bytes) == (1, 8.0)
    assert amount.seconds >= 0.02


def test_an_op_that_raised_and_a_step_that_was_cut_short_leave_no_trace():
    load, forward, step = Action("LOAD", 0), Action("F", 0), Action("STEP")
    executor = SimpleNamespace(row=[load, forward, step])
    ledger = Ledger()
    for event in (
        Event("action", "end", "STEP@0", {"action": step, "executor": executor}),  # it began before anybody listened
        Event("action", "begin", "LOAD0@0", {"action": load, "executor": executor}),
        Event("op", "begin", "gelu", {"path": "mlp"}),  # raises, so it has no end
        Event("action", "begin", "F0@0", {"action": forward, "executor": executor}),
        *message("all_reduce"),
    ):
        ledger(event)
    assert list(ledger.by(lambda place: place)) == [Place("tp", "all_reduce", "F", "", "")]
    assert (ledger.steps, ledger.step_seconds) == (0, 0.0)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_on_four_ranks(check):
    LocalWorld(4).run(lambda: check(world()))

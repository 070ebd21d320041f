"""What a trace is found to say: every figure against one that was worked out by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the made-up traces are
from traces import ranks_of, send, together, trace_of

from mpitrain.debug.timeline import expected_bubble
from mpitrain.debug.trace.nesting import own_time, parents
from mpitrain.debug.trace.records import MEMORY, SPAN
from mpitrain.pipeline.action import COMPUTE
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.simulate import Costs, simulate
from mpitrain.trace.bubbles import bubbles
from mpitrain.trace.held import held
from mpitrain.trace.known import know
from mpitrain.trace.ops import slowest_ops
from mpitrain.trace.sent import sent
from mpitrain.trace.shares import shares

US, MS = 10**3, 10**6


def step_of(ranks, number, start, stop, **more):
    for rank in ranks:
        rank.step = number
        rank.steps.append({"step": number, "start": start, "stop": stop, "ops": False, **more})
        rank.span("action", "LOAD0@0", start, start, action="LOAD")


def waits_of(ranks):
    return [(lane.waited.ns.tolist(), lane.waited.whom.tolist()) for lane in know(trace_of(ranks)).lanes]


# --------------------------------------------------------------------------------------------------------------- waits


def test_who_comes_last_to_a_collective_waits_for_nobody():
    ranks = ranks_of(3)
    together(ranks, "world", [10, 40, 25], [50, 52, 54])
    assert waits_of(ranks) == [([30], [1]), ([0], [-1]), ([15], [1])]


def test_a_receive_waits_until_its_sender_has_called():
    ranks = ranks_of(2, pp=[(0, 1)])
    send(ranks[0], ranks[1], "pp", sent=40 * US, came=60 * US, called=10 * US)
    assert waits_of(ranks) == [([0], [-1]), ([30 * US], [0])]


def test_a_receive_of_what_is_on_its_way_already_waits_for_nobody():
    ranks = ranks_of(2, pp=[(0, 1)])
    send(ranks[0], ranks[1], "pp", sent=40 * US, came=60 * US, called=50 * US)
    assert waits_of(ranks)[1] == ([0], [-1])


def test_the_wait_for_a_receive_waits_and_not_its_posting():
    ranks = ranks_of(2, pp=[(0, 1)])
    send(ranks[0], ranks[1], "pp", sent=40 * US, came=60 * US, called=10 * US, blocks=False)
    assert waits_of(ranks)[1] == ([0, 40 * US - 10 * US - 700, 0], [-1, 0, -1])


def test_a_send_that_blocks_waits_until_its_receiver_has_called():
    ranks = ranks_of(2, pp=[(0, 1)])
    about = {"axis": "pp", "number": 1, "tag": 5}
    ranks[0].span("message", "send", 10, 90, peer=1, **about)
    ranks[1].span("message", "recv", 70, 95, peer=0, **about)
    assert waits_of(ranks) == [([60], [1]), ([0], [-1])]


def test_a_broadcast_waits_for_its_root_alone_and_a_shift_for_the_one_before():
    ranks = ranks_of(3)
    together(ranks, "world", [10, 20, 90], [12, 25, 95], "broadcast", tag=1)
    assert waits_of(ranks) == [([2], [1]), ([0], [-1]), ([0], [-1])]
    ranks = ranks_of(3)
    together(ranks, "world", [10, 20, 90], [100, 25, 95], "shift", tag=1)
    assert waits_of(ranks) == [([80], [2]), ([0], [-1]), ([0], [-1])]


def test_waits_are_seen_through_clocks_that_are_apart():
    reads = {"a": lambda true: true, "b": lambda true: true + 10**12}
    ranks = ranks_of(2, "ab", reads)
    for at in range(1 * MS, 40 * MS, 2 * MS):
        late = at % (4 * MS) == 1 * MS
        together(ranks, "world", [at, at + MS * late], [at + MS * late + 10 * US, at + MS * late + 10 * US])
        together(ranks, "world", [at + 1100 * US, at + 1050 * US], [at + 1110 * US] * 2)
    known = know(trace_of(ranks))
    first = known.lanes[0].waited
    assert abs(first.ns[0] - 1 * MS) < 60 * US
    assert first.whom[0] == 1


# -------------------------------------------------------------------------------------------------------------- nesting


def test_own_time_is_without_what_is_inside():
    (rank,) = ranks_of(1)
    rank.span("action", "F0@0", 0, 100)
    rank.depth = 1
    rank.span("op", "block", 10, 90)
    rank.depth = 2
    rank.span("op", "gelu", 20, 30)
    rank.span("message", "all_reduce", 30, 60)
    rank.depth = 1
    rank.span("arrival", "iall_reduce", 70, 70)
    rank.depth = 0
    rank.span("copy", "read", 0, 500)
    spans = rank.trace().spans
    around = parents(spans)
    found = {rank.strings[span["name"]]: at for at, span in enumerate(spans)}
    assert around[found["gelu"]] == around[found["all_reduce"]] == found["block"]
    assert around[found["block"]] == found["F0@0"]
    assert around[found["F0@0"]] == around[found["read"]] == around[found["iall_reduce"]] == -1
    assert [own_time(spans, around)[found[name]] for name in ("F0@0", "block", "gelu", "all_reduce")] == [
        20,
        40,
        10,
        30,
    ]


def test_what_encloses_nothing_is_not_taken_for_the_span_around():
    """Of a full trace the action is lost in which an op was."""
    spans = np.zeros(2, SPAN)
    spans["start"], spans["stop"], spans["kind"], spans["depth"] = [0, 50], [10, 60], [0, 1], [0, 1]
    assert parents(spans).tolist() == [-1, -1]


# --------------------------------------------------------------------------------------------------------------- shares


def two_ranks_that_step():
    """Two steps of 100 ms: on rank 0 compute 40, update 10, tp 30 of which 20 wait, rest 20."""
    ranks = ranks_of(2, tp=[(0, 1)])
    for number, at in ((1, 0), (2, 200 * MS)):
        step_of(ranks, number, at, at + 100 * MS, loss=2.5, tokens=64)
        for rank in ranks:
            rank.action, rank.depth = "F", 0
            rank.span("action", "F0@0", at, at + 70 * MS)
            rank.depth = 1
        together(ranks, "tp", [at + 10 * MS, at + 30 * MS], [at + 40 * MS] * 2)
        for rank in ranks:
            rank.action, rank.depth = "STEP", 0
            rank.span("action", "STEP@0", at + 80 * MS, at + 90 * MS)
            rank.action = ""
    return ranks


def test_shares_add_up_to_the_step():
    known = know(trace_of(two_ranks_that_step()))
    assert known.steps == [1, 2]
    assert known.judged == [2]
    first, second = shares(known, [1, 2])
    assert (first.step, first.compute, first.update, first.rest) == (100 * MS, 40 * MS, 10 * MS, 20 * MS)
    tp = first.axes["tp"]
    assert (tp.calls, tp.nbytes, tp.ns, tp.waits) == (1, 32, 30 * MS, 20 * MS)
    assert first.waits_for == {1: 20 * MS}
    assert (second.compute, second.waits, second.waits_for) == (60 * MS, 0, {})
    assert known.about(2)["loss"] == 2.5


def test_of_two_executors_that_both_count_from_1_the_later_one_is_looked_at():
    first, second = two_ranks_that_step(), two_ranks_that_step()
    for rank, later in zip(first, second, strict=True):
        rank.spans += [{**span, "start": span["start"] + 10**10, "stop": span["stop"] + 10**10} for span in later.spans]
        rank.steps += [{**step, "start": step["start"] + 10**10, "stop": step["stop"] + 10**10} for step in later.steps]
    (share, _) = shares(know(trace_of(first)), [1, 2])
    assert (share.step, share.compute, share.messages) == (100 * MS, 40 * MS, 30 * MS)


def test_steps_that_overlap_are_one_stretch_of_time():
    ranks = ranks_of(1)
    for number, (start, stop) in enumerate(((0, 60), (40, 100), (200, 220)), 1):
        step_of(ranks, number, start, stop)
        ranks[0].action = "F"
        ranks[0].span("action", f"F{number}@0", start, start + 6)
    (share,) = shares(know(trace_of(ranks)), [1, 2, 3])
    assert share.step == pytest.approx((100 + 20) / 3)
    assert share.compute == pytest.approx(18 / 3)


def test_a_step_that_some_rank_lacks_is_not_judged():
    ranks = two_ranks_that_step()
    ranks[1].steps.pop(0)
    known = know(trace_of(ranks))
    assert (known.steps, known.cut, known.gaps) == ([2], [1], [1])


def test_a_step_whose_begin_is_lost_is_no_step():
    """Of a full trace the oldest spans go, in the middle of a step."""
    ranks = two_ranks_that_step()
    lost = next(at for at, span in enumerate(ranks[0].spans) if span["start"] == 200 * MS)
    del ranks[0].spans[lost : lost + 2]
    known = know(trace_of(ranks))
    assert (known.steps, known.cut, known.gaps) == ([1], [2], [2])
    assert shares(known, known.judged)[0].compute == 40 * MS


def test_without_steps_all_of_a_trace_is_looked_at():
    ranks = ranks_of(2)
    together(ranks, "world", [0, 60], [80, 100])
    first, second = shares(know(trace_of(ranks)), [])
    assert (first.step, first.messages, first.waits) == (80, 80, 60)
    assert (second.step, second.messages, second.waits) == (40, 40, 0)


# -------------------------------------------------------------------------------------------------------------- bubbles


@pytest.mark.parametrize(("name", "costs"), [("gpipe", (4, 8)), ("1f1b", (4, 8)), ("1f1b", (3, 5)), ("gpipe", (7, 2))])
def test_the_bubble_of_a_played_schedule_is_found_again(name, costs):
    f, b = costs
    rows = complete(name, ranks=3, microbatches=5)
    played = simulate(rows, Costs(f=f, b=b, w=0))
    facts = {"schedule": {"name": name, "microbatches": 5, "chunks": 1, "slices": 1}}
    ranks = ranks_of(3, pp=[(0, 1, 2)])
    step_of(ranks, 1, 0, round(played.makespan * MS))
    for rank, spans in zip(ranks, played.spans, strict=True):
        rank.facts = facts
        rank.spans.clear()  # rows bring their own first actions
        for action, start, stop in spans:
            rank.action = action.kind
            rank.span("action", str(action), round(start * MS), round(stop * MS))
    found = bubbles(know(trace_of(ranks)), [1])
    assert found.measured == pytest.approx(played.bubble)
    assert found.played == pytest.approx(played.bubble)
    assert found.formula == pytest.approx(expected_bubble(name, ranks=3, microbatches=5))
    assert found.formula == pytest.approx(2 / 7)
    assert found.pipelines == [(0, 1, 2)]
    busy = [sum(s.stop - s.start for s in spans if s.action.kind in COMPUTE) for spans in played.spans]
    assert [found.idle[rank] for rank in range(3)] == pytest.approx([1 - time / played.makespan for time in busy])


def test_no_pipeline_has_no_bubble():
    assert bubbles(know(trace_of(two_ranks_that_step())), [1, 2]) is None


def test_actions_that_a_file_makes_up_are_passed_over():
    ranks = ranks_of(2, pp=[(0, 1)])
    step_of(ranks, 1, 0, 100)
    for rank in ranks:
        rank.action = "F"
        for name in ("F0@0", "F0@0", "Q9@9", "\x1b[2J", "F0@999999999"):
            rank.span("action", name, 0, 50)
    found = bubbles(know(trace_of(ranks)), [1])
    assert found.played is None


# ----------------------------------------------------------------------------------------------------------------- sent


def with_theory(lines, **about):
    ranks = two_ranks_that_step()
    for rank in ranks:
        rank.facts = {"traffic": {"steps": 1, "at_most": False, "lines": lines, **about}}
    return ranks


def test_what_was_sent_is_what_was_predicted():
    found = sent(know(trace_of(with_theory([["tp", "layers", "all_reduce", 1, 32]]))), [1, 2])
    (kind,) = found.kinds
    assert (kind.axis, kind.verb, kind.cause, kind.ranks, kind.calls) == ("tp", "all_reduce", "", 2, 1)
    assert (kind.nbytes, kind.theory, kind.agrees, kind.sites) == (32, 32, True, ["train.py:5"])
    assert found.agrees
    assert found.odd == []


def test_what_was_sent_otherwise_is_told_with_step_and_rank():
    ranks = with_theory([["tp", "layers", "all_reduce", 1, 32]])
    ranks[1].spans[-2]["bytes"] = 40  # of step 2
    assert ranks[1].strings[ranks[1].spans[-2]["name"]] == "all_reduce"
    found = sent(know(trace_of(ranks)), [1, 2])
    assert not found.agrees
    assert found.odd == [(2, 1, "tp", "all_reduce", 40.0, 32.0)]


def test_what_was_predicted_and_never_sent_is_told():
    lines = [["tp", "layers", "all_reduce", 1, 32], ["dp", "gradients", "all_reduce", 1, 100]]
    found = sent(know(trace_of(with_theory(lines))), [1, 2])
    assert [(kind.axis, kind.nbytes, kind.theory, kind.agrees) for kind in found.kinds] == [
        ("dp", 0, 100, False),
        ("tp", 32, 32, True),
    ]
    assert len(found.odd) == 4


def test_one_rank_that_sends_more_is_not_hidden_by_one_that_sends_less():
    ranks = with_theory([["tp", "layers", "all_reduce", 1, 32]])
    for rank, nbytes in zip(ranks, (24, 40), strict=True):
        for span in rank.spans:
            if "bytes" in span:
                span["bytes"] = nbytes
    (kind,) = sent(know(trace_of(ranks)), [1, 2]).kinds
    assert kind.nbytes == kind.theory == 32
    assert not kind.agrees


def test_a_bound_is_no_prediction_to_the_byte():
    found = sent(know(trace_of(with_theory([["tp", "layers", "all_reduce", 1, 64]], at_most=True))), [1, 2])
    assert found.at_most
    assert not found.agrees
    assert found.odd == []


def test_without_steps_there_is_no_theory():
    ranks = with_theory([["tp", "layers", "all_reduce", 1, 32]])
    for rank in ranks:
        rank.steps.clear()
    found = sent(know(trace_of(ranks)), [])
    assert not found.predicted
    assert [(kind.calls, kind.nbytes, kind.theory) for kind in found.kinds] == [(2, 64, None)]


@pytest.mark.parametrize(
    "lines",
    [None, 3, [3], [["tp", "x", "y", 1]], [["tp", "x", "y", 1, -5]], [["tp", "x", "y", 1, "many"]], [[1, 2, 3, 4, 5]]],
)
def test_a_theory_that_cannot_be_read_is_none(lines):
    found = sent(know(trace_of(with_theory(lines))), [1, 2])
    assert not found.predicted
    assert found.kinds[0].theory is None


def test_causes_come_from_the_op_and_the_action_around():
    ranks = ranks_of(2, tp=[(0, 1)])
    step_of(ranks, 1, 0, 1000)
    for rank in ranks:
        rank.steps[0]["ops"] = True
        for at, (action, op, path, fetches) in enumerate(
            [
                ("F", "all_reduce", "blocks.0.mlp.down", False),
                ("F", "vocabulary_cross_entropy", "gpt", False),
                ("F", "fetch", "blocks.1", True),
                ("STEP", "", "", False),
            ]
        ):
            rank.action, rank.path, rank.depth = action, path, 0
            rank.span("action", f"{action}@0", 100 * at, 100 * at + 90)
            if op:
                rank.depth = 1
                rank.span("unit" if fetches else "op", op, 100 * at + 10, 100 * at + 50)
                rank.depth = 2
            number = rank.count("tp")
            rank.span("message", "all_reduce", 100 * at + 20, 100 * at + 30, axis="tp", number=number, bytes=8)
    found = sent(know(trace_of(ranks)), [1])
    assert found.by_cause
    assert {kind.cause for kind in found.kinds} == {"layers", "cross-entropy", "weights", "optimizer"}


# ------------------------------------------------------------------------------------------------------ ops and memory


def test_slow_ops_come_first_and_layers_are_alike():
    ranks = ranks_of(2)
    step_of(ranks, 1, 0, 1000)
    for rank in ranks:
        rank.steps[0]["ops"] = True
        rank.action = "F"
        for layer in range(3):
            rank.span("op", "gelu", 100 * layer, 100 * layer + 10 * (1 + rank.rank), path=f"blocks.{layer}.mlp")
        rank.span("op", "linear", 500, 600, path="head")
    first, second = slowest_ops(know(trace_of(ranks)), [1])
    assert (first.op, first.where, first.calls, first.ns) == ("linear", "head", 1, 100)
    assert (second.op, second.where, second.calls, second.ns) == ("gelu", "blocks.*.mlp", 3, 45)
    assert (second.slowest, second.worst) == (1, 60)


def test_what_is_held_stays_until_it_changes():
    ranks = ranks_of(1)
    trace = trace_of(ranks)
    (rank,) = trace.ranks
    rank.strings += ["weights", "activations"]
    weights, activations = rank.strings.index("weights"), rank.strings.index("activations")
    rank.memory = np.array(
        [(10, 1, weights, 100), (10, 1, activations, 5), (20, 1, activations, 50), (30, 2, activations, 0),
         (40, 2, weights, 120), (50, 2, activations, 25)], MEMORY,
    )  # fmt: skip
    rank.facts = {"memory": {"weights": 100, "activations": "many", "masters": -3}}
    (found,) = held(know(trace))
    assert (found.peak, found.step) == (150, 1)
    assert found.at_peak == {"weights": 100, "activations": 50}
    assert found.largest == {"weights": 120, "activations": 50}
    assert found.predicted == {"weights": 100}
    (of_two,) = held(know(trace), 2)
    assert (of_two.peak, of_two.at_peak) == (145, {"weights": 120, "activations": 25})
    assert held(know(trace), 3) == []

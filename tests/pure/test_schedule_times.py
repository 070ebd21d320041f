"""The simulator: spans on a clock, idle time, bytes in flight; against a slow way to find the same."""

import random
from itertools import pairwise

import pytest
from test_schedule_random import any_order, named

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import COMPUTE, Schedule, parse_row
from mpitrain.pipeline.passes import complete, with_messages, with_update
from mpitrain.pipeline.schedules import gpipe, one_f_one_b, one_stage, zb_h1
from mpitrain.pipeline.simulate import Costs, Sizes, Timeline, simulate


def flush(rows: Schedule) -> Schedule:
    return with_update(with_messages(rows))


def spans_of(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(action): (start, stop) for spans in timeline.spans for action, start, stop in spans}


# -- the clock --------------------------------------------------------------------------------------------------------


def test_two_ranks_and_one_micro_batch_by_hand():
    timeline = simulate(flush(one_f_one_b(2, 1)), Costs(f=2, b=3, w=4, message=0.5))
    assert spans_of(timeline) == {
        "LOAD0@0": (0, 0),
        "COUNT@0": (0, 0),
        "F0@0": (0, 2),
        "SEND_F0@0": (2, 2),
        "RECV_B0@0": (2, 12),
        "B0@0": (12, 19),
        "REDUCE@0": (19, 19),
        "STEP@0": (19, 19),
        "LOAD0@1": (0, 0),
        "COUNT@1": (0, 0),
        "RECV_F0@1": (0, 2.5),
        "F0@1": (2.5, 4.5),
        "B0@1": (4.5, 11.5),
        "SEND_B0@1": (11.5, 11.5),
        "REDUCE@1": (11.5, 11.5),
        "STEP@1": (11.5, 19),
    }
    assert (timeline.makespan, timeline.busy, timeline.idle, timeline.bubble) == (19, (9, 9), (10, 10), 10 / 19)


def test_every_action_of_the_rows_has_its_span_in_order():
    rows = complete("interleaved", ranks=3, microbatches=6, chunks=2)
    timeline = simulate(rows, Costs(f=1, b=1.5, w=1, message=0.25))
    assert timeline.rows is rows
    assert [[span.action for span in spans] for spans in timeline.spans] == rows
    for spans in timeline.spans:
        assert all(one.stop == two.start for one, two in pairwise(spans))
        assert spans[-1].stop == timeline.makespan


def test_a_split_backward_costs_its_halves_and_a_whole_one_both():
    (row,) = simulate(flush(zb_h1(1, 1)), Costs(f=1, b=10, w=100)).spans
    assert [span.stop - span.start for span in row if span.action.kind in COMPUTE] == [1, 10, 100]
    assert simulate(flush(one_stage(1)), Costs(f=1, b=10, w=100)).makespan == 111


def test_stages_may_cost_differently():
    timeline = simulate(flush(gpipe(2, 3)), Costs(f=[1, 5], b=[2, 0], w=0))
    assert timeline.busy == (9, 15)
    assert timeline.makespan == 1 + 3 * 5 + 3 * 2
    assert timeline.bubble == pytest.approx(1 - 12 / 22)


def test_messages_that_take_time_lengthen_what_waits_for_them():
    """1F1B on two ranks waits for one both ways for every two micro-batches, GPipe only to fill and to drain."""
    for message in (0, 0.5, 2):
        costs = Costs(message=message)
        assert simulate(flush(gpipe(2, 4)), costs).makespan == 3 * 5 + 2 * message
        assert simulate(flush(one_f_one_b(2, 4)), costs).makespan == 3 * 5 + 2 * message * 2


def test_ranks_that_update_by_themselves_do_not_wait_for_the_others():
    timeline = simulate(complete("pipedream", ranks=2, microbatches=1, batches=6))
    assert spans_of(timeline)["STEP5@1"] == (1 + 6 * 3, 1 + 6 * 3)
    assert timeline.idle == (3, 3)
    assert timeline.makespan == 6 * 3 + 3


def test_work_that_costs_nothing_takes_no_time():
    timeline = simulate(flush(one_f_one_b(2, 2)), Costs(f=0, b=0, w=0))
    assert (timeline.makespan, timeline.bubble, timeline.idle) == (0, 0, (0, 0))


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (Costs(f=[1, 2, 3]), "costs of f are given for 3 stages, the schedule has 2"),
        (Costs(b=-1), "costs of b must be finite and not negative"),
        (Costs(w=float("nan")), "costs of w must be finite"),
        (Costs(message=float("inf")), "costs of message must be finite"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs, words):
    with pytest.raises(ScheduleError, match=words):
        simulate(flush(one_f_one_b(2, 2)), costs)


def test_what_the_checker_refuses_is_not_played():
    with pytest.raises(ScheduleError, match="LOAD0@0 is missing"):
        simulate(one_f_one_b(2, 2))


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_bytes_of_accumulation_are_those_of_one_micro_batch():
    assert simulate(flush(one_stage(5)), sizes=Sizes([70], [30], [0])).peak_bytes == (70,)
    assert simulate(flush(zb_h1(1, 5)), sizes=Sizes([70], [30], [0])).peak_bytes == (70,)
    assert simulate(flush(one_stage(5))).peak_bytes is None


def test_weights_halves_put_off_keep_their_part():
    (row,) = [parse_row("F0@0 B0@0 F1@0 B1@0 F2@0 B2@0 W0@0 W1@0 W2@0")]
    assert simulate(flush([row]), sizes=Sizes([70], [30], [0])).peak_bytes == (70 + 2 * 30,)


def test_bytes_on_their_way_count_with_the_sender_and_what_has_come_with_the_receiver():
    """Rank 1 is the slow one: what rank 0 sent waits there, and what came is in use."""
    costs, sizes = Costs(f=[1, 10], b=0, w=1), Sizes([100, 1000], [0, 0], [0, 7])
    timeline = simulate(flush(gpipe(2, 4)), costs, sizes)
    # rank 0: four tapes, and at time 4 the outputs 1, 2 and 3 are not received; rank 1: four tapes, and after its first
    # B a gradient in place of one
    assert timeline.peak_bytes == (4 * 100 + 3 * 7, 4 * 1000)


def test_a_gradient_waits_with_the_rank_that_made_it():
    """Rank 0 is slow: the gradient of 0 is there long before it is asked for."""
    rows = [parse_row("F0@0 F1@0 F2@0 B0@0 B1@0 B2@0"), parse_row("F0@1 B0@1 F1@1 B1@1 F2@1 B2@1")]
    timeline = simulate(flush(rows), Costs(f=[10, 1], b=0, w=1), Sizes([100, 1000], [0, 0], [0, 7]))
    # rank 0: three tapes, and at the moment in which B0 begins the gradient; rank 1: what 0 made, while 1 is there
    assert timeline.peak_bytes == (300 + 7, 1000 + 7)


def test_what_was_received_at_once_is_gone_before_the_next_forward():
    rows = [parse_row("F0@0 F0@2 B0@2 F1@0 B0@0 F1@2 B1@2 B1@0"), parse_row("F0@1 B0@1 F1@1 B1@1")]
    # The gradient of 50 that B0@2 made is with rank 1 when F1@0 begins, and F1@0 sends 1.
    assert simulate(flush(rows), sizes=Sizes([100, 0, 0], [0] * 3, [0, 1, 50])).peak_bytes == (2 * 100 + 1, 50)


def test_what_passes_between_stages_of_one_rank_is_held_until_it_is_used():
    (row,) = [parse_row("F0@0 F1@0 F0@1 F1@1 B1@1 B0@1 B1@0 B0@0")]
    sizes = Sizes([100, 1000], [0, 0], [0, 7])
    assert simulate(flush([row]), sizes=sizes).peak_bytes == (2 * 100 + 2 * 1000,)
    assert simulate(flush([row]), sizes=Sizes([100, 5], [0, 0], [0, 7])).peak_bytes == (2 * 100 + 2 * 7,)


def test_in_1f1b_a_rank_holds_as_many_tapes_as_stages_are_behind_it():
    for micros in (4, 8, 20):
        sizes = Sizes([10**6] * 4, [0] * 4, [0, 1, 1, 1])
        peaks = simulate(complete("1f1b", ranks=4, microbatches=micros), sizes=sizes).peak_bytes
        assert [peak // 10**6 for peak in peaks] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (Sizes([1], [0, 0], [0, 0]), "sizes of saved must be 2 numbers"),
        (Sizes([1, 1], [0, 0], [0, -1]), "sizes of boundary must be 2 numbers, one for each stage, and not negative"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes, words):
    with pytest.raises(ScheduleError, match=words):
        simulate(flush(one_f_one_b(2, 2)), sizes=sizes)


# -- the slow way -----------------------------------------------------------------------------------------------------


def stops_by_trying(rows: Schedule, f: list[int], b: list[int], w: list[int], message: int) -> dict[str, int]:
    """When every action ends: put off what ends before what it waits for, until nothing changes."""
    split = {action.stage for row in rows for action in row if action.kind == "W"}
    stops = {str(action): 0 for row in rows for action in row}
    while True:
        before = dict(stops)
        for row in rows:
            now = 0
            for action in row:
                kind, _, stage, _ = action
                cost = {"F": f[stage], "B": b[stage] + (0 if stage in split else w[stage]), "W": w[stage]}.get(kind, 0)
                if kind == "RECV_F":
                    now = max(now, stops[str(action._replace(kind="SEND_F", stage=stage - 1))] + message)
                elif kind == "RECV_B":
                    now = max(now, stops[str(action._replace(kind="SEND_B", stage=stage + 1))] + message)
                elif kind == "STEP" and action.micro is None:
                    now = max(now, *(stops[str(other)] for other_row in rows for other in other_row[-1:]))
                now += cost
                stops[str(action)] = now
        if stops == before:
            return stops


def peaks_by_looking(timeline: Timeline, sizes: Sizes) -> tuple[int, ...]:
    """Bytes of every rank at the beginning and end of each of its actions, each time counted anew.

    A point of a row is twice the place of an action, and one more for its end.
    """
    spans = {span.action: span for row in timeline.spans for span in row}
    point = {action: 2 * place for row in timeline.rows for place, action in enumerate(row)}
    rank_of = {action.stage: rank for rank, row in enumerate(timeline.rows) for action in row if action.kind == "F"}
    held: list[list[tuple[int, int, int]]] = [[] for _ in timeline.rows]  # bytes, from a point, to a point
    sent: list[list[tuple[int, int, float]]] = [[] for _ in timeline.rows]  # bytes, from a point, to a time
    for action in spans:
        kind, _, stage, _ = action
        if kind == "F":
            back, weights = action._replace(kind="B"), action._replace(kind="W")
            held[rank_of[stage]].append((sizes.saved[stage], point[action], point[back] + 1))
            if weights in point:
                held[rank_of[stage]].append((sizes.kept[stage], point[back] + 1, point[weights] + 1))
        other = stage + {"F": 1, "B": -1}.get(kind, len(rank_of))
        if other in rank_of:
            size = sizes.boundary[max(stage, other)]
            use = action._replace(stage=other)
            send, come = action._replace(kind=f"SEND_{kind}"), use._replace(kind=f"RECV_{kind}")
            made = point[come if come in point else action] + 1
            held[rank_of[other]].append((size, made, point[use]))
            if come in point:
                sent[rank_of[stage]].append((size, point[send] + 1, spans[come].stop))
    return tuple(
        max(
            sum(size for size, start, stop in held[rank] if start <= at < stop)
            + sum(size for size, start, stop in sent[rank] if at == start or (start < at and time < stop))
            for place, span in enumerate(timeline.spans[rank])
            for at, time in ((2 * place, span.start), (2 * place + 1, span.stop))
        )
        for rank in range(len(timeline.rows))
    )


def test_times_and_bytes_of_random_schedules_are_those_found_the_slow_way():
    for seed in range(150):
        rng = random.Random(seed)
        rows = named(rng) if seed % 3 == 0 else any_order(rng)
        num_stages = 1 + max(action.stage for row in rows for action in row)
        f, b, w = ([rng.randint(1, 4) for _ in range(num_stages)] for _ in range(3))
        message = rng.randint(0, 3)
        sizes = Sizes(*([rng.randint(0, 9) for _ in range(num_stages)] for _ in range(3)))
        timeline = simulate(rows, Costs(f, b, w, message), sizes)
        stops = stops_by_trying(rows, f, b, w, message)
        assert {name: stop for name, (_, stop) in spans_of(timeline).items()} == stops, seed
        assert timeline.makespan == max(stops.values())
        assert timeline.peak_bytes == peaks_by_looking(timeline, sizes), seed
        tenths = [[0.1 * cost for cost in costs] for costs in (f, b, w)]  # times that are not exact in binary
        assert simulate(rows, Costs(*tenths, 0.1 * message), sizes).peak_bytes == timeline.peak_bytes, seed

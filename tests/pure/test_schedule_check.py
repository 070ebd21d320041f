"""The checker: what it finds out about rows that run, and what it says of those that do not."""

import time

import pytest

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import Action, Schedule, parse_row
from mpitrain.pipeline.check import Checked, check
from mpitrain.pipeline.passes import complete, with_messages, with_update
from mpitrain.pipeline.schedules import one_stage, terapipe


def written(*rows: str) -> Schedule:
    return [parse_row(row) for row in rows]


def refusal(rows: Schedule) -> str:
    with pytest.raises(ScheduleError) as refused:
        check(rows)
    return str(refused.value)


TWO = (
    "LOAD0@0 LOAD1@0 COUNT@0 F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_B0@0 B0@0 RECV_B1@0 B1@0 REDUCE@0 STEP@0",
    "LOAD0@1 LOAD1@1 COUNT@1 RECV_F0@1 F0@1 B0@1 SEND_B0@1 RECV_F1@1 F1@1 B1@1 SEND_B1@1 REDUCE@1 STEP@1",
)


def test_what_is_known_of_rows_that_run():
    assert check(written(*TWO)) == Checked(
        (0, 1), (2, 1), "deadlock: rank 0 at SEND_F1@0; rank 1 at SEND_B0@1", here=(2, 1)
    )


def test_in_flight_is_what_went_forward_and_not_yet_back():
    assert check(with_update(one_stage(7))).peaks == (1,)
    assert check(written("LOAD0@0 LOAD1@0 COUNT@0 F0@0 F1@0 B1@0 B0@0 REDUCE@0 STEP@0")).peaks == (2,)
    assert check(with_update(with_messages(terapipe(2, 2, 3)))).peaks == (6, 6)


def test_a_batch_adds_to_no_gradient_before_the_update_by_the_one_before_it():
    """A whole backward waits for it, a split one only with its W: a B adds nothing."""
    row = "LOAD0@0 COUNT0@0 F0@0 B0@0 LOAD1@0 COUNT1@0 F1@0 B1@0 W0@0 REDUCE0@0 STEP0@0 W1@0 REDUCE1@0 STEP1@0"
    assert check(written(row)).peaks == (1,)
    assert "B1@0 at place 7 comes before STEP0@0" in refusal(written(row.replace("W0@0 ", "").replace("W1@0 ", "")))


def test_stages_may_be_on_ranks_in_any_way():
    rows = written("F0@2 F0@1 F1@1 F1@2 B1@2 B1@1 B0@2 B0@1", "F0@0 F1@0 F0@3 F1@3 B1@3 B0@3 B1@0 B0@0")
    assert refusal(with_update(with_messages(rows))) == "row 0: F0@2 at place 3 comes before F0@1, which it needs"
    rows[0][:3] = parse_row("F0@1 F0@2 F1@1")
    assert check(with_update(with_messages(rows))).placement == (1, 0, 0, 1)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("LOAD0@0 COUNT@0 B0@0 F0@0 REDUCE@0 STEP@0", "row 0: B0@0 at place 2 comes before F0@0, which it needs"),
        ("LOAD0@0 COUNT@0 F0@0 REDUCE@0 B0@0 STEP@0", "row 0: REDUCE@0 at place 3 comes before B0@0, which it needs"),
        ("LOAD0@0 F0@0 COUNT@0 B0@0 REDUCE@0 STEP@0", "row 0: F0@0 at place 1 comes before COUNT@0, which it needs"),
        ("COUNT@0 LOAD0@0 F0@0 B0@0 REDUCE@0 STEP@0", "row 0: COUNT@0 at place 0 comes before LOAD0@0, which it needs"),
        ("LOAD0@0 COUNT@0 F0@0 F0@0 B0@0 REDUCE@0 STEP@0", "row 0: F0@0 stands twice, at places 2 and 3"),
        ("LOAD0@0 COUNT@0 F0@0 B0@0 STEP@0 REDUCE@0", "row 0: STEP@0 at place 4 comes before REDUCE@0, which it needs"),
        ("LOAD0@0 COUNT@0 F0@0 B0@0 REDUCE@0", "row 0: STEP@0 is missing"),
        ("F0@0 B0@0", "row 0: LOAD0@0 is missing"),
        ("LOAD0@0 COUNT@0 F0@0 REDUCE@0 STEP@0", "row 0: B0@0 is missing"),
        ("LOAD0@1 COUNT@0 F0@0 B0@0 REDUCE@0 STEP@0", "LOAD0@1 at place 0 belongs to stage 1, which has no F in this"),
        ("LOAD0@0 COUNT@0 F0@0 F0@1 B0@1 B0@0 REDUCE@1 STEP@0", "REDUCE@1 at place 6 concerns the rank and must name"),
        ("LOAD0@0 LOAD1@0 COUNT@0 F0@0 B0@0 REDUCE@0 STEP@0", "LOAD1@0 at place 1 is of a micro-batch that no stage"),
        ("LOAD0@0 COUNT@0 F0@0 B0@0 W0@0 B1@0 REDUCE@0 STEP@0", "B1@0 at place 5 is of a micro-batch or slice that no"),
        (
            "LOAD1@0 COUNT@0 F1@0 B1@0 REDUCE@0 STEP@0",
            "micro-batch 0 has no F, but micro-batch 1 has; they count from 0",
        ),
        ("LOAD0@0 COUNT@0 F0.1@0 B0.1@0 REDUCE@0 STEP@0", "micro-batch 0 has no F of slice 0, but of a later one"),
        ("LOAD0@0 COUNT@0 F0@0 F0.0@0 B0@0 REDUCE@0 STEP@0", "whole in one place and in slices in another"),
        ("LOAD0@0 COUNT@0 F0@0 B0@0 REDUCE@0 STEP0@0", "name their batch in one place and not in another"),
        ("LOAD0@0 COUNT1@0 F0@0 B0@0 REDUCE1@0 STEP1@0", "no COUNT, REDUCE or STEP of batch 0, but of a later one"),
        (
            "LOAD0@0 LOAD1@0 COUNT@0 F0@0 F1@0 B0@0 B1@0 W0@0 REDUCE@0 STEP@0",
            "W1@0 is missing: for other micro-batches",
        ),
        ("LOAD0@0 COUNT@0 F0@0 W0@0 B0@0 REDUCE@0 STEP@0", "W0@0 at place 3 comes before B0@0, which it needs"),
        ("LOAD0@0 COUNT@0 F0@0 B0@0 REDUCE@0 W0@0 STEP@0", "REDUCE@0 at place 4 comes before W0@0, which it needs"),
        (
            "LOAD0@0 COUNT@0 F0@0 SEND_F0@0 B0@0 REDUCE@0 STEP@0",
            "SEND_F0@0 at place 3 has no other end: stage 0 is the l",
        ),
        (
            "LOAD0@0 COUNT@0 F0@0 B0@0 SEND_B0@0 REDUCE@0 STEP@0",
            "SEND_B0@0 at place 4 has no other end: stage 0 is the f",
        ),
        ("LOAD0@0 COUNT@0 F0@0 SEND_F0@0 F0@1 B0@1 B0@0 REDUCE@0 STEP@0", "stages 0 and 1 are both on rank 0"),
        ("LOAD0@0 COUNT@0 F0@1 F0@0 B0@1 B0@0 REDUCE@0 STEP@0", "F0@1 at place 2 comes before F0@0, which it needs"),
        ("LOAD0@0 COUNT@0 F0@0 F0@1 B0@0 B0@1 REDUCE@0 STEP@0", "B0@0 at place 4 comes before B0@1, which it needs"),
        ("LOAD0@0 COUNT@0 F0.1@0 F0.0@0 B0.1@0 B0.0@0 REDUCE@0 STEP@0", "F0.1@0 at place 2 comes before F0.0@0"),
        ("LOAD0@0 COUNT@0 F0.0@0 F0.1@0 B0.0@0 B0.1@0 REDUCE@0 STEP@0", "B0.0@0 at place 4 comes before B0.1@0"),
        (
            "LOAD0@0 COUNT0@0 F0@0 LOAD1@0 COUNT1@0 F1@0 B0@0 B1@0 REDUCE0@0 STEP0@0 REDUCE1@0 STEP1@0",
            "row 0: B1@0 at place 7 comes before STEP0@0, which it needs",
        ),
        (
            "LOAD0@0 COUNT0@0 F0@0 B0@0 LOAD1@0 COUNT1@0 F1@0 B1@0 W0@0 REDUCE0@0 W1@0 STEP0@0 REDUCE1@0 STEP1@0",
            "row 0: W1@0 at place 10 comes before STEP0@0, which it needs",
        ),
        (
            "LOAD0@0 COUNT0@0 F0@0 B0@0 REDUCE0@0 STEP0@0 COUNT1@0 LOAD1@0 F1@0 B1@0 REDUCE1@0 STEP1@0",
            "row 0: COUNT1@0 at place 6 comes before LOAD1@0, which it needs",
        ),
        (
            "LOAD0@0 LOAD1@0 LOAD2@0 COUNT0@0 F0@0 B0@0 F1@0 B1@0 F2@0 B2@0 REDUCE0@0 STEP0@0 STEP1@0",
            "3 micro-batches do not divide into 2 batches",
        ),
    ],
)
def test_a_row_that_cannot_run_is_refused_with_the_action_that_is_in_the_way(row, words):
    assert words in refusal(written(row))


@pytest.mark.parametrize(
    ("rank", "old", "new", "words"),
    [
        (0, "SEND_F1@0 ", "", "row 0: SEND_F1@0 is missing: stage 0 is on rank 0, stage 1 on rank 1"),
        (1, "RECV_F1@1 ", "", "row 1: RECV_F1@1 is missing: stage 1 is on rank 1, stage 0 on rank 0"),
        (1, "SEND_B0@1 ", "", "row 1: SEND_B0@1 is missing: stage 1 is on rank 1, stage 0 on rank 0"),
        (0, "RECV_B1@0 B1@0", "B1@0 RECV_B1@0", "row 0: B1@0 at place 9 comes before RECV_B1@0, which it needs"),
        (1, "RECV_F0@1 F0@1", "F0@1 RECV_F0@1", "row 1: F0@1 at place 3 comes before RECV_F0@1, which it needs"),
        (0, "F1@0 SEND_F1@0", "SEND_F1@0 F1@0", "row 0: SEND_F1@0 at place 5 comes before F1@0, which it needs"),
        (1, "B1@1 SEND_B1@1", "SEND_B1@1 B1@1", "row 1: SEND_B1@1 at place 9 comes before B1@1, which it needs"),
        (1, "SEND_B1@1 REDUCE@1", "REDUCE@1 SEND_B1@1", "REDUCE@1 at place 10 comes before SEND_B1@1, which it needs"),
        (1, "F1@1 B1@1 ", "", "row 1: F1@1 is missing: micro-batch 1 has an F on another stage"),
        (1, "STEP@1", "STEP@0", "row 1: STEP@0 at place 12 belongs to stage 0, which has no F in this row"),
        (1, "F0@1 B0@1", "F0@1 RECV_B0@1 B0@1", "RECV_B0@1 at place 5 has no other end: stage 1 is the last"),
    ],
)
def test_a_message_that_does_not_fit_is_refused_with_both_its_ends(rank, old, new, words):
    rows = list(TWO)
    assert old in rows[rank]
    rows[rank] = rows[rank].replace(old, new)
    assert words in refusal(written(*rows))


def test_what_no_one_could_parse_is_refused_too():
    rows = with_update(one_stage(1))
    assert "is no kind of action" in refusal([[*rows[0], Action("EVAL", 0, 0)]])
    assert "is not done slice by slice" in refusal([[*rows[0], Action("STEP", None, 0, 1)]])
    assert "F@0 names no micro-batch" in refusal([[*rows[0], Action("F", None, 0)]])


def test_ranks_that_wait_for_each_other_are_named():
    """C41: a cycle that no way to send can save."""
    rows = with_messages(written("F0@0 F1@0 B0@0 B1@0", "F0@1 F1@1 B0@1 B1@1", "F0@2 F1@2 B0@2 B1@2"))
    row = rows[0]  # the gradient is waited for before the activation leaves
    row.remove(Action("SEND_F", 1, 0))
    row.insert(row.index(Action("B", 1, 0)), Action("SEND_F", 1, 0))
    assert refusal(with_update(rows)) == "deadlock: rank 0 at RECV_B0@0; rank 1 at RECV_F1@1; rank 2 at RECV_F1@2"


def test_backward_in_another_order_than_it_comes_may_wait_for_ever():
    """Gradients of the last stage come in the order 0 1; rank 0 sends what it needs for 1 only after it had 1."""
    rows = with_messages(written("F0@0 F1@0 B1@0 B0@0", "F0@1 B0@1 F1@1 B1@1"))
    assert check(with_update(rows)).blocking_hang == "deadlock: rank 0 at SEND_F1@0; rank 1 at SEND_B0@1"
    rows = with_messages(written("F0@0 B0@0 F1@0 B1@0", "F1@1 B1@1 F0@1 B0@1"))
    assert refusal(with_update(rows)) == "deadlock: rank 0 at RECV_B0@0; rank 1 at RECV_F1@1"


def test_1f1b_would_hang_if_sends_were_synchronous_and_gpipe_would_not():
    """C41: the textbook loop with blocking sends passes every test with small messages."""
    hang = check(complete("1f1b", ranks=3, microbatches=4)).blocking_hang
    assert hang == "deadlock: rank 0 at SEND_F2@0; rank 1 at SEND_F1@1; rank 2 at SEND_B0@2"
    assert check(complete("gpipe", ranks=3, microbatches=4)).blocking_hang is None
    assert check(complete("1f1b", ranks=3, microbatches=1)).blocking_hang is None


@pytest.mark.parametrize(
    ("name", "sizes", "budget"),
    [
        ("interleaved", {"ranks": 8, "microbatches": 64, "chunks": 4}, 0.1),
        ("pipedream", {"ranks": 4, "microbatches": 1, "batches": 500}, 0.2),
    ],
)
def test_checking_takes_milliseconds(name, sizes, budget):
    """It is done before every run: 16 ms and 25 ms of one core when nothing else runs."""
    rows = complete(name, **sizes)
    times = []
    for _ in range(3):
        start = time.process_time()
        check(rows)
        times.append(time.process_time() - start)
    assert min(times) < budget

"""The step as data: actions print and parse, rows say where stages are, passes add what compute order leaves out."""

import pytest

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import (
    COMPUTE,
    PER_MICRO,
    PER_STEP,
    PER_UNIT,
    Action,
    Schedule,
    parse,
    parse_row,
    placement,
    row_text,
)
from mpitrain.pipeline.passes import complete, with_messages, with_update, with_updates
from mpitrain.pipeline.schedules import SCHEDULES, compute_rows, one_f_one_b, one_stage, terapipe, zb_h1


def written(*rows: str) -> Schedule:
    return [parse_row(row) for row in rows]


def texts(rows: Schedule) -> list[str]:
    return [row_text(row) for row in rows]


# -- actions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action("F", 3, 1), "F3@1"),
        (Action("F", 3, 1, 0), "F3.0@1"),
        (Action("SEND_B", 12, 0, 7), "SEND_B12.7@0"),
        (Action("RECV_F", 0, 15), "RECV_F0@15"),
        (Action("W", 1, 2), "W1@2"),
        (Action("LOAD", 0), "LOAD0@0"),
        (Action("COUNT"), "COUNT@0"),
        (Action("STEP", None, 12), "STEP@12"),
        (Action("STEP", 3), "STEP3@0"),
        (Action("REDUCE", 10, 1), "REDUCE10@1"),
    ],
)
def test_an_action_prints_as_the_papers_draw_it_and_parses_back(action, text):
    assert str(action) == text
    assert parse(text) == action


def test_every_kind_of_action_parses_back():
    for kind in PER_MICRO + PER_STEP:
        for micro in (0, 41) if kind in PER_MICRO else (None, 0, 41):
            for part in (None, 0, 5) if kind in PER_UNIT else (None,):
                action = Action(kind, micro, 3, part)
                assert parse(f" {action}\n") == action


@pytest.mark.parametrize(
    "text",
    "F@0 X3@0 F3 F-1@0 F3@-1 f3@0 F3.@0 F3.1.1@0 F.1@0 LOAD3.1@0 STEP3.1@0 COUNT.1@0 RECV3@0 SEND_W3@0 F3@1x F٣@0"
    " F3@1234567890 @0 F3@".split(),
)
def test_what_is_not_an_action_is_refused_by_name(text):
    with pytest.raises(ScheduleError) as refused:
        parse(text)
    assert text in str(refused.value)


@pytest.mark.parametrize("text", ["", "F3@0 B3@0", "F 3@0"])
def test_an_action_is_one_word(text):
    with pytest.raises(ScheduleError, match="is not an action"):
        parse(text)


# -- placement --------------------------------------------------------------------------------------------------------


def test_rows_say_which_rank_has_which_stage():
    assert placement(one_f_one_b(3, 2)) == [0, 1, 2]
    assert placement(compute_rows("interleaved", ranks=2, microbatches=2, chunks=3)) == [0, 1, 0, 1, 0, 1]
    assert placement(written("F0@2 F0@3", "F0@0 F0@1")) == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "at least one row"),
        (["F0@0 B0@0", ""], "row 1 has no F"),
        (["F0@0 B0@0", "B0@1"], "row 1 has no F"),
        (["F0@0 F0@1", "F0@1"], "stage 1 is on ranks 0 and 1"),
        (["F0@0", "F0@2"], "no row has an F of stage 1, but one has of stage 2"),
    ],
)
def test_a_stage_that_is_on_no_rank_or_on_two_is_refused(rows, words):
    with pytest.raises(ScheduleError, match=words):
        placement(written(*rows))


# -- passes -----------------------------------------------------------------------------------------------------------


def test_the_row_of_accumulation_reads_like_the_step():
    (row,) = with_update(one_stage(2))
    assert row_text(row) == "LOAD0@0 LOAD1@0 COUNT@0 F0@0 B0@0 F1@0 B1@0 REDUCE@0 STEP@0"


def test_messages_stand_beside_what_uses_and_what_makes_them():
    assert texts(with_messages(one_f_one_b(3, 1))) == [
        "F0@0 SEND_F0@0 RECV_B0@0 B0@0",
        "RECV_F0@1 F0@1 SEND_F0@1 RECV_B0@1 B0@1 SEND_B0@1",
        "RECV_F0@2 F0@2 B0@2 SEND_B0@2",
    ]


def test_a_gradient_is_sent_before_the_weights_half_of_its_backward():
    assert texts(with_messages(zb_h1(2, 1))) == [
        "F0@0 SEND_F0@0 RECV_B0@0 B0@0 W0@0",
        "RECV_F0@1 F0@1 B0@1 SEND_B0@1 W0@1",
    ]


def test_slices_are_sent_one_by_one():
    assert texts(with_messages(terapipe(2, 1, 2))) == [
        "F0.0@0 SEND_F0.0@0 F0.1@0 SEND_F0.1@0 RECV_B0.1@0 B0.1@0 RECV_B0.0@0 B0.0@0",
        "RECV_F0.0@1 F0.0@1 RECV_F0.1@1 F0.1@1 B0.1@1 SEND_B0.1@1 B0.0@1 SEND_B0.0@1",
    ]


def test_stages_on_one_rank_need_no_messages():
    rows = written("F0@0 F0@1 B0@1 B0@0", "F0@2 F0@3 B0@3 B0@2")
    assert texts(with_messages(rows)) == [
        "F0@0 F0@1 SEND_F0@1 RECV_B0@1 B0@1 B0@0",
        "RECV_F0@2 F0@2 F0@3 B0@3 B0@2 SEND_B0@2",
    ]
    assert with_messages(one_stage(3)) == one_stage(3)


def test_what_concerns_a_rank_names_the_first_of_its_stages():
    rows = with_update(written("F0@3 F0@1 B0@3 B0@1", "F0@0 F0@2 B0@2 B0@0"))
    for row, stage in zip(rows, (1, 0), strict=True):
        assert {action.stage for action in row if action.kind not in COMPUTE} == {stage}


def test_a_row_of_several_batches_loads_before_and_updates_after_each():
    assert texts(complete("pipedream", ranks=2, microbatches=1, batches=3)) == [
        "LOAD0@0 COUNT0@0 F0@0 SEND_F0@0 LOAD1@0 COUNT1@0 F1@0 SEND_F1@0 RECV_B0@0 B0@0 REDUCE0@0 STEP0@0"
        " LOAD2@0 COUNT2@0 F2@0 SEND_F2@0 RECV_B1@0 B1@0 REDUCE1@0 STEP1@0 RECV_B2@0 B2@0 REDUCE2@0 STEP2@0",
        "LOAD0@1 COUNT0@1 RECV_F0@1 F0@1 B0@1 SEND_B0@1 REDUCE0@1 STEP0@1"
        " LOAD1@1 COUNT1@1 RECV_F1@1 F1@1 B1@1 SEND_B1@1 REDUCE1@1 STEP1@1"
        " LOAD2@1 COUNT2@1 RECV_F2@1 F2@1 B2@1 SEND_B2@1 REDUCE2@1 STEP2@1",
    ]


def test_a_batch_of_several_micro_batches_is_loaded_as_a_whole():
    (row,) = complete("pipedream-2bw", ranks=1, microbatches=2, batches=2)
    assert row_text(row) == (
        "LOAD0@0 LOAD1@0 COUNT0@0 F0@0 B0@0 F1@0 B1@0 REDUCE0@0 STEP0@0"
        " LOAD2@0 LOAD3@0 COUNT1@0 F2@0 B2@0 F3@0 B3@0 REDUCE1@0 STEP1@0"
    )


def test_an_update_waits_for_the_weights_half_of_backward():
    (row,) = with_updates(written("F0@0 B0@0 F1@0 B1@0 W0@0 W1@0"), 1)
    assert row_text(row) == (
        "LOAD0@0 COUNT0@0 F0@0 B0@0 LOAD1@0 COUNT1@0 F1@0 B1@0 W0@0 REDUCE0@0 STEP0@0 W1@0 REDUCE1@0 STEP1@0"
    )


def test_messages_and_updates_may_be_added_in_either_order():
    rows = compute_rows("pipedream", ranks=3, microbatches=2, batches=3)
    assert texts(with_messages(with_updates(rows, 2))) == texts(with_updates(with_messages(rows), 2))
    rows = zb_h1(3, 4)
    assert with_messages(with_update(rows)) == with_update(with_messages(rows))


def test_passes_leave_the_order_of_compute_alone():
    for name, kind in SCHEDULES.items():
        sizes = {"ranks": 2, "microbatches": 4, "batches": 2 if kind.versions else 1}
        kept = [[action for action in row if action.kind in COMPUTE] for row in complete(name, **sizes)]
        assert kept == compute_rows(name, **sizes)


def test_no_micro_batch_is_refused():
    with pytest.raises(ScheduleError, match="at least 1 micro-batch, not 0"):
        one_stage(0)
    with pytest.raises(ScheduleError, match="at least 1 micro-batch, not 0"):
        with_updates(one_stage(1), 0)

"""The step as data: actions print and parse, passes add what is missing, the checker proves rows before they run."""

import pytest

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import Action, parse, parse_row, row_text
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage
from mpitrain.pipeline.simulate import check


def test_the_row_of_accumulation_reads_like_the_step():
    (row,) = with_update(one_stage(2))
    assert row_text(row) == "LOAD0@0 LOAD1@0 COUNT@0 F0@0 B0@0 F1@0 B1@0 REDUCE@0 STEP@0"


@pytest.mark.parametrize("action", [Action("F", 3, 1), Action("LOAD", 0), Action("COUNT"), Action("STEP", None, 12)])
def test_an_action_parses_back_from_what_it_prints(action):
    assert parse(str(action)) == action


@pytest.mark.parametrize("text", ["F@0", "X3@0", "F3", "", "F-1@0", "F3@0 B3@0", "f3@0"])
def test_what_is_not_an_action_is_refused_by_name(text):
    with pytest.raises(ScheduleError, match=r"action|micro-batch"):
        parse(text)


def test_at_most_one_micro_batch_of_an_accumulated_step_is_in_flight():
    assert check(with_update(one_stage(7))).peaks == (1,)
    assert check([parse_row("LOAD0@0 LOAD1@0 COUNT@0 F0@0 F1@0 B1@0 B0@0 REDUCE@0 STEP@0")]).peaks == (2,)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("LOAD0@0 COUNT@0 B0@0 F0@0 REDUCE@0 STEP@0", "B0@0 at place 2 comes before F0@0"),
        ("LOAD0@0 COUNT@0 F0@0 REDUCE@0 B0@0 STEP@0", "REDUCE@0 at place 3 comes before B0@0"),
        ("LOAD0@0 F0@0 COUNT@0 B0@0 REDUCE@0 STEP@0", "F0@0 at place 1 comes before COUNT@0"),
        ("LOAD0@0 COUNT@0 F0@0 F0@0 B0@0 REDUCE@0 STEP@0", "F0@0 stands twice"),
        ("LOAD0@0 COUNT@0 F0@0 B0@0 STEP@0 REDUCE@0", "STEP@0 at place 4 comes before REDUCE@0"),
        ("LOAD0@0 COUNT@0 LOAD1@0 F0@0 F1@0 B0@0 B1@0 REDUCE@0 STEP@0", "COUNT@0 at place 1 comes before LOAD1@0"),
        ("LOAD0@0 COUNT@0 F0@0 B0@0 REDUCE@0", "STEP@0 is missing"),
        ("LOAD0@1 COUNT@0 F0@0 B0@0 REDUCE@0 STEP@0", "belongs to stage 1"),
    ],
)
def test_a_row_that_cannot_run_is_refused_with_the_action_that_is_missing(row, words):
    with pytest.raises(ScheduleError, match=words):
        check([parse_row(row)])


def test_no_micro_batch_and_no_row_are_refused():
    with pytest.raises(ScheduleError, match="at least 1 micro-batch"):
        one_stage(0)
    with pytest.raises(ScheduleError, match="at least one row"):
        check([])

"""The replay that `mpitrain verify` judges pipelines by that never drain: its tables, and what it reads off records."""

import pytest

from mpitrain.debug.capture import Record
from mpitrain.pipeline.action import row_text
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.schedules import SCHEDULES, compute_rows
from mpitrain.pipeline.versions import versions_of
from mpitrain.verify.stale import RULES, Course, courses_of, read, write


def course(schedule="pipedream", stages=2, micros=1, rows=(4,), **stage_of):
    return Course(schedule, stages, micros, tuple(rows), stage_of or {f"w{stage}": stage for stage in range(stages)})


def test_there_is_a_rule_for_every_schedule_that_never_drains():
    assert set(RULES) == {name for name, kind in SCHEDULES.items() if kind.versions is not None}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batches", [1, 2, 7])
def test_the_papers_rules_are_what_the_rows_say(name, ranks, batches):
    """Two ways to the same table: from a formula here, from the order of the actions there."""
    for micros in (ranks, ranks + 2) if name == "pipedream-2bw" else (1,):
        rows = complete(name, ranks=ranks, microbatches=micros, batches=batches)
        mine = course(name, ranks, micros, [batches])
        for stage, versions in enumerate(versions_of(rows, SCHEDULES[name].versions)):
            places = [divmod(micro, micros) for micro in range(batches * micros)]
            assert [mine.version(f"w{stage}", step, micro) for step, micro in places] == versions


def test_versions_of_pipedream_on_four_stages():
    """T8.1."""
    four = course(stages=4, rows=[10])
    assert [four.version("w0", step, 0) for step in range(10)] == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert [four.version("w2", step, 0) for step in range(10)] == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert [four.version("w3", step, 0) for step in range(10)] == list(range(10))


def test_a_row_begins_with_the_newest_weights_on_all_stages():
    two = course(rows=[3, 2])
    assert [two.version("w0", step, 0) for step in range(6)] == [0, 0, 1, 3, 3, 5]
    assert [two.version("w1", step, 0) for step in range(6)] == [0, 1, 2, 3, 4, 5]


def records(schedule, ranks, micros, rows, executor=0):
    """What the ranks of a pipeline leave of it, without arrays."""
    found = []
    for rank in range(ranks):
        held = [[name, [1], [[0, 1]], False] for name in ("table", f"w{rank}") if name != "table" or rank != 1]
        facts = {"is": "begin", "executor": executor, "sizes": {"pp": ranks}, "coords": {"pp": rank}}
        mine = [Record({**facts, "parameters": held}, {})]
        for batches in rows:
            row = compute_rows(schedule, ranks=ranks, microbatches=micros, batches=batches)[rank]
            for batch in range(batches):  # when a step's records are written is of no account
                text = row_text(row[batch * len(row) // batches : (batch + 1) * len(row) // batches])
                mine.append(Record({"is": "step", "executor": executor, "batch": batch, "compute": text}, {}))
        found.append(mine)
    return found


def test_rows_micro_batches_and_stages_are_read_off_the_records():
    (found,) = courses_of("pipedream-2bw", records("pipedream-2bw", 3, 4, [5, 1, 2]))
    assert found == course("pipedream-2bw", 3, 4, [5, 1, 2], table=0, w0=0, w1=1, w2=2)


def test_every_executor_has_a_course_and_a_run_without_steps_has_none():
    first, second = records("pipedream", 2, 1, [3]), records("pipedream", 2, 1, [2, 2], executor=1)
    both = [one + other for one, other in zip(first, second, strict=True)]
    assert [each.rows for each in courses_of("pipedream", both)] == [(3,), (2, 2)]
    assert courses_of("pipedream", [each[:1] for each in first]) == []
    assert courses_of("pipedream", [[], []]) == []


def test_courses_survive_a_file(tmp_path):
    assert read(tmp_path / "none.json") == []
    kept = [course(), course("pipedream-2bw", 4, 4, [2, 3])]
    write(tmp_path / "courses.json", kept)
    assert read(tmp_path / "courses.json") == kept

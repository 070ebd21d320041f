"""Every bad input of the table is refused on all ranks with the same short message."""

import pytest
from bad_inputs import NEEDS_RANKS, TABLE, run_local

SOLO = [row for row in TABLE if row not in NEEDS_RANKS]


def failures(rows, tmp_path):
    wrong = []
    for number, row in enumerate(rows):
        folder = tmp_path / str(number)
        folder.mkdir()
        if complaint := run_local(row, folder):
            wrong.append(f"{row.name}: {complaint}")
    return wrong


def test_the_table_has_two_hundred_rows_of_different_names():
    assert len({row.name for row in TABLE}) == len(TABLE) >= 200
    assert len(NEEDS_RANKS) >= 40


def test_wrong_flags_and_files_are_refused(tmp_path):
    assert failures(SOLO, tmp_path) == []


@pytest.mark.parametrize("subject", ["data", "run", "resume", "layout"])
def test_what_only_shows_when_the_ranks_have_met_is_refused(tmp_path, subject):
    named = {"data", "run", "resume"}
    rows = [row for row in NEEDS_RANKS if (row.name.partition(":")[0] if ":" in row.name else "layout") == subject]
    assert len(rows) >= 7 if subject in named else rows
    assert failures(rows, tmp_path) == []

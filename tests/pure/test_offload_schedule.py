"""EVICT and FETCH in a schedule: where they stand, what is refused, and what they cost on a clock (T24.5)."""

from __future__ import annotations

import pytest

from mpitrain.errors import ScheduleError
from mpitrain.pipeline import picture
from mpitrain.pipeline.action import COMPUTE, parse_row, row_text
from mpitrain.pipeline.check import check
from mpitrain.pipeline.passes import complete, with_offload
from mpitrain.pipeline.simulate import Costs, Sizes, simulate

ALL = [
    ("gpipe", {"ranks": 3, "microbatches": 4}),
    ("1f1b", {"ranks": 4, "microbatches": 8}),
    ("interleaved", {"ranks": 2, "microbatches": 4, "chunks": 2}),
    ("zb-h1", {"ranks": 3, "microbatches": 6}),
    ("terapipe", {"ranks": 2, "microbatches": 2, "slices": 3}),
    ("pipedream", {"ranks": 3, "microbatches": 1, "batches": 5}),
    ("pipedream-2bw", {"ranks": 2, "microbatches": 2, "batches": 3}),
]


def test_evict_stands_behind_what_f_sends_and_fetch_so_many_passes_before_b():
    row = "F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_B1@0 B1@0 RECV_B0@0 B0@0"
    rows = [parse_row(row), parse_row("RECV_F0@1 F0@1 RECV_F1@1 F1@1 B1@1 SEND_B1@1 B0@1 SEND_B0@1")]
    first, last = with_offload(rows, 1)
    assert row_text(first) == ("F0@0 SEND_F0@0 EVICT0@0 F1@0 SEND_F1@0 FETCH0@0 RECV_B1@0 B1@0 RECV_B0@0 B0@0")
    assert row_text(last) == "RECV_F0@1 F0@1 EVICT0@1 RECV_F1@1 F1@1 FETCH0@1 B1@1 SEND_B1@1 B0@1 SEND_B0@1"
    assert with_offload(rows, 2) == rows  # nothing would stand between EVICT and FETCH
    with pytest.raises(ScheduleError, match="-1 actions before"):
        with_offload(rows, -1)


@pytest.mark.parametrize(("name", "sizes"), ALL, ids=[name for name, _ in ALL])
@pytest.mark.parametrize("distance", [0, 1, 2])
def test_on_every_schedule_what_leaves_returns_so_many_passes_ahead(name, sizes, distance):
    plain, rows = complete(name, **sizes), complete(name, **sizes, offload=distance)
    checked = check(rows)
    assert all(here <= peak for here, peak in zip(checked.here, checked.peaks, strict=True))
    assert checked.here != checked.peaks or distance  # something is won
    assert [[a for a in row if a.kind not in ("EVICT", "FETCH")] for row in rows] == plain
    for row in rows:
        for at, action in enumerate(row):
            if action.kind == "FETCH":
                back = row.index(action._replace(kind="B"))
                assert sum(between.kind in COMPUTE for between in row[at:back]) == distance
                left = row.index(action._replace(kind="EVICT"))
                assert any(between.kind in COMPUTE for between in row[left:at])


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("LOAD0@0 COUNT@0 F0@0 EVICT0@0 B0@0 REDUCE@0 STEP@0", r"FETCH0@0 is missing: what leaves must return"),
        ("LOAD0@0 COUNT@0 F0@0 FETCH0@0 B0@0 REDUCE@0 STEP@0", r"EVICT0@0 is missing"),
        ("LOAD0@0 COUNT@0 F0@0 FETCH0@0 EVICT0@0 B0@0 REDUCE@0 STEP@0", r"FETCH0@0 at place 3 comes before EVICT0@0"),
        ("LOAD0@0 COUNT@0 EVICT0@0 F0@0 FETCH0@0 B0@0 REDUCE@0 STEP@0", r"EVICT0@0 at place 2 comes before F0@0"),
        ("LOAD0@0 COUNT@0 F0@0 EVICT0@0 B0@0 FETCH0@0 REDUCE@0 STEP@0", r"B0@0 at place 4 comes before FETCH0@0"),
        ("LOAD0@0 COUNT@0 F0@0 EVICT1@0 FETCH1@0 B0@0 REDUCE@0 STEP@0", r"EVICT1@0 .* that no stage has an F of"),
    ],
)
def test_a_row_that_would_lose_something_is_refused(row, why):
    with pytest.raises(ScheduleError, match=why):
        check([parse_row(row)])


@pytest.mark.parametrize("copy", [0.0, 0.25, 0.5, 1.0])
def test_copies_that_take_no_longer_than_compute_are_hidden(copy):
    plain = complete("gpipe", ranks=1, microbatches=6)
    alone = simulate(plain).makespan
    ahead = simulate(with_offload(plain, 1), Costs(copy=copy)).makespan
    naive = simulate(with_offload(plain, 0), Costs(copy=copy)).makespan
    assert ahead <= alone + copy  # T24.5: compute and the first copy
    assert naive == pytest.approx(alone + 5 * copy)  # each of the five that left is waited for


def test_what_is_elsewhere_is_not_held_from_the_end_of_its_copy_to_the_fetch():
    plain, sizes = complete("gpipe", ranks=1, microbatches=6), Sizes([100], [50], [0])
    assert simulate(plain, None, sizes).peak_bytes == (600,)
    assert simulate(with_offload(plain, 1), None, sizes).peak_bytes == (200,)
    assert simulate(with_offload(plain, 1), Costs(copy=1.0), sizes).peak_bytes == (200,)
    assert simulate(with_offload(plain, 1), Costs(copy=3.0), sizes).peak_bytes > (200,)  # they queue up


def test_the_picture_has_a_lane_for_copies():
    played = simulate(complete("gpipe", ranks=2, microbatches=3, offload=1), Costs(copy=0.5))
    drawn = picture.svg(played)
    assert "leaves for the store" in drawn
    assert "<title>EVICT0@0" in drawn
    assert "<title>FETCH0@1" in drawn
    assert "leaves for the store" not in picture.svg(simulate(complete("gpipe", ranks=2, microbatches=3)))
    assert len(played.copies) == 2
    assert all(span.stop - span.start == 0.5 for lane in played.copies for span in lane)

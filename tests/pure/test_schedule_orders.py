"""The schedules against the tables of their papers: what runs when, how long it takes, what is in flight."""

import time

import pytest

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import COMPUTE, Action, Row, Schedule, row_text
from mpitrain.pipeline.check import check
from mpitrain.pipeline.passes import complete, with_messages, with_update
from mpitrain.pipeline.schedules import (
    SCHEDULES,
    compute_rows,
    gpipe,
    interleaved,
    one_f_one_b,
    one_stage,
    pipedream,
    pipedream_2bw,
    terapipe,
    zb_h1,
)
from mpitrain.pipeline.simulate import Costs, Timeline, simulate
from mpitrain.pipeline.versions import live_versions, versions_of

UNIT = Costs(f=1, b=1, w=0)  # B is the whole backward, and costs as much as F
DOUBLE = Costs(f=1, b=1, w=1)  # the whole backward costs twice as much


def played(rows: Schedule, costs: Costs) -> Timeline:
    return simulate(with_update(with_messages(rows)), costs)


def picture(timeline: Timeline, num_ranks: int, width: int = 3) -> str:
    """A column for each unit of time, the stage left out."""
    lines = []
    for rank, spans in enumerate(timeline.spans):
        slots = ["."] * round(timeline.makespan)
        for action, start, stop in spans:
            if action.kind in COMPUTE:
                slots[int(start) : int(stop)] = [short(action, num_ranks)] * int(stop - start)
        lines.append(f"s{rank}|" + "".join(f"{slot:>{width}}" for slot in slots))
    return "\n".join(lines)


def short(action: Action, num_ranks: int) -> str:
    chunk = action.stage // num_ranks
    part = "" if action.part is None else f".{action.part}"
    return f"{action.kind}{action.micro}{part}" + (f".{chunk}" if chunk else "")


def chunks(row: Row, num_ranks: int) -> str:
    """A row with chunks for stages: F5.1 is micro-batch 5 on the second chunk of the rank."""
    return " ".join(f"{action.kind}{action.micro}.{action.stage // num_ranks}" for action in row)


GPIPE = """\
s0| F0 F1 F2 F3 F4 F5 F6 F7  .  .  .  .  .  . B7 B6 B5 B4 B3 B2 B1 B0
s1|  . F0 F1 F2 F3 F4 F5 F6 F7  .  .  .  . B7 B6 B5 B4 B3 B2 B1 B0  .
s2|  .  . F0 F1 F2 F3 F4 F5 F6 F7  .  . B7 B6 B5 B4 B3 B2 B1 B0  .  .
s3|  .  .  . F0 F1 F2 F3 F4 F5 F6 F7 B7 B6 B5 B4 B3 B2 B1 B0  .  .  ."""

ONE_F_ONE_B = """\
s0| F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2 F6 B3 F7 B4  . B5  . B6  . B7
s1|  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5  . B6  . B7  .
s2|  .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6  . B7  .  .
s3|  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7  .  .  ."""

ZB_H1 = """\
s0| F0 F1 F2 F3  .  .  . B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
s1|  . F0 F1 F2  .  . B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
s2|  .  . F0 F1  . B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
s3|  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7"""

INTERLEAVED = (
    "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0 | F6.0 B0.1 F7.0 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0.0 F7.1 B1.0"
    " | B2.0 B3.0 B4.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0",
    "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 | F4.0 B0.1 F5.0 B1.1 F6.0 B2.1 F7.0 B3.1 F4.1 B0.0 F5.1 B1.0 F6.1 B2.0"
    " F7.1 B3.0 | B4.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0",
    "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 | F2.1 B0.1 F3.1 B1.1 F4.0 B2.1 F5.0 B3.1 F6.0 B0.0 F7.0 B1.0 F4.1 B2.0 F5.1 B3.0"
    " F6.1 B4.1 F7.1 B5.1 | B6.1 B7.1 B4.0 B5.0 B6.0 B7.0",
    "F0.0 F1.0 F2.0 F3.0 | F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4.0 B0.0 F5.0 B1.0 F6.0 B2.0 F7.0 B3.0 F4.1 B4.1"
    " F5.1 B5.1 F6.1 B6.1 F7.1 B7.1 | B4.0 B5.0 B6.0 B7.0",
)


# ----------------------------------------------------------------------------------------------------- flush schedules


def test_gpipe_is_the_table_of_its_paper():
    """T6.2."""
    assert picture(played(gpipe(4, 8), UNIT), 4) == GPIPE


def test_gpipe_is_idle_for_three_of_eleven_parts():
    """T6.1."""
    timeline = played(gpipe(4, 8), UNIT)
    assert (timeline.makespan, timeline.idle, timeline.bubble) == (22, (6,) * 4, pytest.approx(3 / 11))
    timeline = played(gpipe(4, 8), DOUBLE)
    assert (timeline.makespan, timeline.idle, timeline.bubble) == (33, (9,) * 4, pytest.approx(3 / 11))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_gpipe_holds_every_micro_batch_of_the_step(num_ranks):
    """T6.4."""
    for micros in (1, 3, 8):
        assert check(complete("gpipe", ranks=num_ranks, microbatches=micros)).peaks == (micros,) * num_ranks


@pytest.mark.parametrize(("num_ranks", "published", "throughput"), [(2, 1.8, 1.94), (4, 3.4, 3.66), (8, 6.3, 6.56)])
def test_throughput_of_balanced_stages_is_that_of_the_formula_and_near_the_published_one(
    num_ranks, published, throughput
):
    """T6.5: p m / (m + p - 1), with the time of the whole model cut into p."""
    alone = played(gpipe(1, 32), Costs(f=num_ranks, b=num_ranks, w=num_ranks)).makespan
    gain = alone / played(gpipe(num_ranks, 32), DOUBLE).makespan
    assert gain == pytest.approx(num_ranks * 32 / (32 + num_ranks - 1))
    assert round(gain, 2) == throughput
    assert published <= gain <= 1.08 * published


def test_1f1b_is_the_table_of_its_paper():
    """T7.2."""
    assert picture(played(one_f_one_b(4, 8), UNIT), 4) == ONE_F_ONE_B
    assert played(one_f_one_b(4, 8), UNIT).makespan == 22
    assert played(one_f_one_b(4, 8), DOUBLE).makespan == 33


def test_1f1b_warms_up_with_one_forward_for_each_stage_behind_it():
    """T7.1."""
    rows = one_f_one_b(4, 8)
    assert [[action.kind for action in row].index("B") - 1 for row in rows] == [3, 2, 1, 0]
    assert check(complete("1f1b", ranks=4, microbatches=8)).peaks == (4, 3, 2, 1)


@pytest.mark.parametrize(
    ("micros", "rows"),
    [
        (1, ["F0 B0"] * 4),
        (2, ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]),
        (3, ["F0 F1 F2 B0 B1 B2"] * 2 + ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]),
    ],
)
def test_1f1b_with_fewer_micro_batches_than_stages_warms_up_with_those_there_are(micros, rows):
    """T7.3, C42."""
    assert [" ".join(short(action, 4) for action in row) for row in one_f_one_b(4, micros)] == rows
    check(complete("1f1b", ranks=4, microbatches=micros))


def test_interleaved_is_the_table_of_its_paper():
    """T9.1."""
    rows = interleaved(4, 8, 2)
    assert [chunks(row, 4) for row in rows] == [row.replace("| ", "") for row in INTERLEAVED]
    warm_ups = [len(row.split("|")[0].split()) for row in INTERLEAVED]
    assert warm_ups == [10, 8, 6, 4]
    assert [[action.kind for action in row].index("B") - 1 for row in rows] == warm_ups
    assert check(complete("interleaved", ranks=4, microbatches=8, chunks=2)).peaks == (11, 9, 7, 5)


def test_interleaved_is_idle_half_as_long_with_two_chunks():
    """T9.2."""
    timeline = played(interleaved(4, 8, 2), UNIT)
    assert (timeline.makespan, timeline.idle) == (38, (6,) * 4)
    timeline = played(interleaved(4, 8, 2), DOUBLE)
    assert (timeline.makespan, timeline.idle) == (57, (9,) * 4)


@pytest.mark.parametrize(("num_chunks", "bubble"), [(1, 3 / 11), (2, 3 / 19), (4, 3 / 35)])
def test_the_bubble_of_interleaved_shrinks_with_the_chunks(num_chunks, bubble):
    """T9.3."""
    assert played(interleaved(4, 8, num_chunks), UNIT).bubble == pytest.approx(bubble)


def test_interleaved_takes_micro_batches_in_groups_of_the_ranks():
    """T9.4."""
    with pytest.raises(ScheduleError, match="6 do not divide by 4") as refused:
        interleaved(4, 6, 2)
    assert "4 or 8 micro-batches, 1 chunk, or schedule 1f1b" in str(refused.value)
    with pytest.raises(ScheduleError, match=r"Way out: 4 micro-batches"):
        interleaved(4, 3, 2)
    check(complete("interleaved", ranks=4, microbatches=4, chunks=2))
    assert interleaved(4, 6, 1) == one_f_one_b(4, 6)


def test_zb_h1_is_the_table_of_its_paper():
    """T10.1."""
    timeline = played(zb_h1(4, 8), DOUBLE)
    assert picture(timeline, 4) == ZB_H1
    assert (timeline.makespan, timeline.idle) == (27, (3,) * 4)
    whole = played(one_f_one_b(4, 8), DOUBLE)
    assert (whole.makespan, whole.idle) == (33, (9,) * 4)


@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 2, 1), (3, 3, 2), (10, 11, 8)])
def test_zb_h1_is_idle_by_its_formula(costs):
    """T10.2."""
    f, b, w = costs
    for p in (2, 3, 4, 6, 8):
        for m in (p, 2 * p, 3 * p, 5 * p):
            assert played(zb_h1(p, m), Costs(*costs)).idle == ((p - 1) * (f + b - w),) * p, (p, m)


def test_zb_h1_holds_no_more_micro_batches_than_1f1b():
    """T10.3."""
    assert check(complete("zb-h1", ranks=4, microbatches=8)).peaks == (4, 3, 2, 1)


@pytest.mark.parametrize(
    ("micros", "rows"),
    [
        (1, ["F0 B0 W0"] * 4),
        (2, ["F0 F1 B0 W0 B1 W1"] * 2 + ["F0 F1 B0 B1 W0 W1", "F0 B0 F1 B1 W0 W1"]),
        (3, ["F0 F1 F2 B0 W0 B1 W1 B2 W2", "F0 F1 F2 B0 B1 W0 B2 W1 W2", "F0 F1 B0 F2 B1 B2 W0 W1 W2"]),
    ],
)
def test_zb_h1_with_fewer_micro_batches_than_stages_has_its_counts_cut(micros, rows):
    """C42."""
    made = [" ".join(short(action, 4) for action in row) for row in zb_h1(4, micros)]
    assert made[: len(rows)] == rows
    check(complete("zb-h1", ranks=4, microbatches=micros))


def test_terapipe_goes_through_the_slices_and_back_in_reverse():
    """Section 15.1: a slice attends to those before it, so backward is exactly reversed."""
    row = "F0.0@0 F0.1@0 F0.2@0 F1.0@0 F1.1@0 F1.2@0 B1.2@0 B1.1@0 B1.0@0 B0.2@0 B0.1@0 B0.0@0"
    assert [row_text(row) for row in terapipe(2, 2, 3)] == [row, row.replace("@0", "@1")]
    timeline = played(terapipe(4, 2, 4), UNIT)
    assert (timeline.makespan, timeline.idle, timeline.peak_micros) == (22, (6,) * 4, (8,) * 4)
    assert terapipe(3, 4, 1) == gpipe(3, 4)


@pytest.mark.parametrize(
    ("generator", "sizes", "costs"),
    [
        (gpipe, (3, 3), UNIT),
        (one_f_one_b, (3, 4), UNIT),
        (zb_h1, (3, 4), DOUBLE),
        (terapipe, (2, 2, 2), UNIT),
    ],
)
def test_the_picture_in_a_generators_documentation_is_what_it_makes(generator, sizes, costs):
    lines = [line.split("(")[0].split() for line in generator.__doc__.splitlines() if line.strip().startswith("s")]
    drawn = [line for line in lines if line and line[0].endswith("|")]
    made = picture(played(generator(*sizes), costs), sizes[0], width=5).splitlines()
    assert drawn == [line.split() for line in made]


def test_one_rank_is_accumulation_in_every_schedule_that_alternates():
    for rows in (one_stage(3), one_f_one_b(1, 3), interleaved(1, 3, 1), pipedream(1, 3), pipedream_2bw(1, 1, 3)):
        assert [row_text(row) for row in rows] == ["F0@0 B0@0 F1@0 B1@0 F2@0 B2@0"]
    assert row_text(zb_h1(1, 2)[0]) == "F0@0 B0@0 W0@0 F1@0 B1@0 W1@0"
    assert row_text(interleaved(1, 2, 2)[0]) == "F0@0 F0@1 B0@1 F1@0 B0@0 F1@1 B1@1 B1@0"


# ---------------------------------------------------------------------------------------------- schedules that overlap


def test_pipedream_uses_the_newest_version_of_each_stage():
    """T8.1."""
    rows = complete("pipedream", ranks=4, microbatches=1, batches=10)
    assert versions_of(rows, "newest") == [
        [0, 0, 0, 0, 1, 2, 3, 4, 5, 6],
        [0, 0, 0, 1, 2, 3, 4, 5, 6, 7],
        [0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    ]
    assert live_versions(rows, "newest") == [4, 3, 2, 1]
    assert check(rows).peaks == (4, 3, 2, 1)


def test_2bw_uses_the_version_before_the_newest_on_every_stage():
    """T8.4."""
    rows = complete("pipedream-2bw", ranks=4, microbatches=4, batches=4)
    assert versions_of(rows, "previous") == [[0] * 8 + [1] * 4 + [2] * 4] * 4
    assert live_versions(rows, "previous") == [2] * 4


def test_versions_of_a_long_row_are_counted_in_a_time_that_grows_with_its_length():
    """Every STEP looking at all versions before it took a minute for what `mpitrain schedule` accepts."""
    rows = complete("pipedream", ranks=1, microbatches=1, batches=30_000)
    began = time.process_time()
    assert live_versions(rows, "newest") == [1]
    assert time.process_time() - began < 4


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_2bw_never_has_more_than_two_versions_alive(num_ranks):
    for micros in range(num_ranks, num_ranks + 4):
        for batches in (1, 2, 3, 5):
            rows = complete("pipedream-2bw", ranks=num_ranks, microbatches=micros, batches=batches)
            assert max(live_versions(rows, "previous")) <= 2
            assert {max(k // micros - 1, 0) for k in range(micros * batches)} == set(versions_of(rows, "previous")[0])


def test_2bw_with_fewer_micro_batches_than_ranks_is_refused():
    """T8.5."""
    with pytest.raises(
        ScheduleError, match=r"at least as many micro-batches as ranks: 3 for 4 ranks.\nWay out: 4 micro"
    ):
        pipedream_2bw(4, 3, 2)


def test_a_version_that_is_not_there_yet_is_refused():
    rows = complete("pipedream", ranks=4, microbatches=2, batches=6)  # what 2BW refuses to make
    with pytest.raises(
        ScheduleError, match=r"row 0: F4@0 at place \d+ uses version 1 of the weights, which STEP0 makes"
    ):
        versions_of(rows, "previous")


def test_all_micro_batches_of_a_flush_step_use_the_same_version():
    for name, kind in SCHEDULES.items():
        if kind.versions is None:
            rows = complete(name, ranks=2, microbatches=4)
            assert versions_of(rows, None) == [[0] * 4] * (4 if kind.chunked else 2)
            assert live_versions(rows, None) == [1, 1]


def test_rows_that_overlap_end_even_if_every_update_is_a_meeting_of_all_ranks():
    """Clipping makes it one in 2BW, and so does a tied embedding on the first and last stage."""
    for p in (1, 2, 3, 4, 8):
        for m in (p, p + 1, 2 * p):
            rows = complete("pipedream-2bw", ranks=p, microbatches=m, batches=4)
            assert ends_with_meetings(rows, ("REDUCE", "STEP")), (p, m)


def ends_with_meetings(rows: Schedule, kinds: tuple[str, ...]) -> bool:
    """Play rows in which all ranks wait for each other at some kinds of action."""
    place, sent = [0] * len(rows), set()
    while True:
        before = list(place)
        for rank, row in enumerate(rows):
            while place[rank] < len(row) and row[place[rank]].kind not in kinds:
                kind, micro, stage, _ = row[place[rank]]
                if kind.startswith("RECV") and (kind[-1], micro, stage + (-1 if kind == "RECV_F" else 1)) not in sent:
                    break
                if kind.startswith("SEND"):
                    sent.add((kind[-1], micro, stage))
                place[rank] += 1
        heads = [row[at] if at < len(row) else None for row, at in zip(rows, place, strict=True)]
        if all(head is None for head in heads):
            return True
        if len({(head.kind, head.micro) if head else None for head in heads}) == 1 and heads[0].kind in kinds:
            place = [at + 1 for at in place]
        elif place == before:
            return False


# ------------------------------------------------------------------------------------------------------------- by name


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_every_schedule_of_any_size_passes_the_checker_or_is_refused_by_name(name, num_ranks):
    """C42."""
    kind = SCHEDULES[name]
    for micros in range(1, 10):
        for many in (1, 2, 3):
            sizes = {
                "chunks": many if kind.chunked else 1,
                "slices": many if kind.sliced else 1,
                "batches": many if kind.versions else 1,
            }
            refused = (name == "interleaved" and many > 1 and micros % num_ranks > 0) or (
                name == "pipedream-2bw" and micros < num_ranks
            )
            if refused:
                with pytest.raises(ScheduleError, match="Way out"):
                    complete(name, ranks=num_ranks, microbatches=micros, **sizes)
                continue
            rows = complete(name, ranks=num_ranks, microbatches=micros, **sizes)
            checked = check(rows)
            assert checked.placement == tuple(stage % num_ranks for stage in range(num_ranks * sizes["chunks"]))
            total = micros * sizes["slices"] * sizes["batches"] * sizes["chunks"]
            for row, peak in zip(rows, checked.peaks, strict=True):
                assert sum(action.kind == "F" for action in row) == total
                assert peak <= total


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("pipe", {}, "no schedule is named 'pipe'; there are gpipe, 1f1b, interleaved"),
        ("1f1b", {"ranks": 0}, "at least 1 rank, not 0"),
        ("1f1b", {"microbatches": 0}, "at least 1 micro-batch, not 0"),
        ("pipedream", {"batches": 0}, "at least 1 batch, not 0"),
        ("interleaved", {"chunks": 0}, "at least 1 chunk, not 0"),
        ("terapipe", {"slices": 0}, "at least 1 slice, not 0"),
        ("gpipe", {"chunks": 2}, "several are for interleaved"),
        ("zb-h1", {"slices": 2}, "that is for terapipe"),
        ("1f1b", {"batches": 2}, "its rows are of 1 batch, not 2"),
    ],
)
def test_what_a_schedule_does_not_take_is_refused(name, sizes, words):
    with pytest.raises(ScheduleError, match=words):
        compute_rows(name, **{"ranks": 2, "microbatches": 2, **sizes})


def test_schedules_have_their_own_names():
    assert list(SCHEDULES) == ["gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "pipedream-2bw", "terapipe"]
    assert all(kind.name == name and kind.meaning and kind.paper for name, kind in SCHEDULES.items())
    with pytest.raises(TypeError):
        SCHEDULES["mine"] = SCHEDULES["gpipe"]  # type: ignore[index]

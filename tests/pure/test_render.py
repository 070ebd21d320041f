"""What a schedule looks like: the table of text says when what happens, and the picture the same."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from mpitrain.pipeline import render
from mpitrain.pipeline.action import parse, parse_row
from mpitrain.pipeline.passes import complete, with_messages, with_update
from mpitrain.pipeline.picture import svg
from mpitrain.pipeline.simulate import Costs, simulate

NAMESPACE = "{http://www.w3.org/2000/svg}"


def played(name, costs=None, **sizes):
    return simulate(complete(name, **{"ranks": 4, "microbatches": 8, **sizes}), costs)


def lanes(table):
    """The cells of each rank, blocks put behind each other."""
    found = {}
    for line in table.splitlines():
        if line.startswith("rank"):
            head, _, cells = line.partition("|")
            found[head] = found.get(head, "") + cells
    return list(found.values())


# ---------------------------------------------------------------------------------------------------------------- text


def test_a_table_of_equal_costs_reads_as_the_papers_draw_it():
    table = render.text(played("1f1b", Costs(f=1, b=0.5, w=0.5)))  # T7.2
    assert table.splitlines() == [
        "time    0              5              10             15             20",
        "rank 0| F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2 F6 B3 F7 B4  . B5  . B6  . B7",
        "rank 1|  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5  . B6  . B7  .",
        "rank 2|  .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6  . B7  .  .",
        "rank 3|  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7  .  .  .",
    ]


def test_a_cell_goes_on_in_dashes_for_as_long_as_the_action_takes():
    assert render.text(played("gpipe", ranks=2, microbatches=2)).splitlines() == [
        "time    0              5",
        "rank 0| F0 F1  .  .  . B1--- B0---",
        "rank 1|  . F0 F1 B1--- B0---  .  .",
    ]


def test_cells_name_slices_always_and_stages_where_a_rank_has_several():
    assert lanes(render.text(played("terapipe", ranks=2, microbatches=1, slices=2)))[0].split()[:2] == ["F0.0", "F0.1"]
    table = render.text(played("interleaved", chunks=2))
    assert lanes(table)[1].split()[:3] == [".", "F0@1", "F1@1"]
    assert "F7@5" in lanes(table)[1]


@pytest.mark.parametrize("width", [24, 40, 61, 100])
@pytest.mark.parametrize("name", ["zb-h1", "interleaved"])
def test_folding_a_table_changes_where_lines_end_and_nothing_else(name, width):
    timeline = played(name, chunks=2) if name == "interleaved" else played(name)
    folded = render.text(timeline, width, blocks=100)
    assert max(map(len, folded.splitlines())) <= width
    assert lanes(folded) == lanes(render.text(timeline))
    sizes = {len(line.partition("|")[2]) for line in folded.splitlines() if line.startswith("rank 0")}
    assert len(sizes) <= 2  # blocks are even, but for the last one


def test_what_does_not_fit_into_the_blocks_is_left_out_in_the_middle():
    timeline = played("1f1b", microbatches=60)
    cut = render.text(timeline, width=60, blocks=2)
    assert max(map(len, cut.splitlines())) <= 60
    assert cut.count("rank 0|") == 2
    whole, parts = lanes(render.text(timeline)), lanes(cut)
    for lane, part in zip(whole, parts, strict=True):
        before, after = part.split("   ~")
        assert lane.startswith(before)
        assert lane.endswith(after)
        assert abs(len(before) - len(after)) <= 8
    left_out, columns = map(int, re.search(r"\((\d+) of (\d+) columns are left out at ~\)", cut).groups())
    assert columns == timeline.makespan
    assert left_out == columns - (len(parts[0]) - 4) // 4


def test_the_ruler_stands_above_the_columns_in_which_its_times_begin():
    timeline = played("zb-h1", Costs(f=1, b=1.5, w=0.5, message=0.5))
    for width in (50, 90, None):
        table = render.text(timeline, width, blocks=9).splitlines()
        rulers = [line for line in table if line.startswith("time")]
        lane = [line.partition("|")[2] for line in table if line.startswith("rank 0")]
        columns = 0
        for ruler, cells in zip(rulers, lane, strict=True):
            for mark in re.finditer(r"[\d.]+", ruler):
                column = columns + (mark.start() - len("rank 0|") - 1) / 3
                assert float(mark[0]) == column * 0.5
            columns += len(cells) / 3


@pytest.mark.parametrize("costs", [Costs(10, 11, 8), Costs(0.123, 0.3, 0.05), Costs([3, 1, 4, 1], 5, 9)])
def test_every_action_has_a_cell_however_its_times_fall(costs):
    timeline = played("zb-h1", costs)
    table = render.text(timeline)
    for lane, spans in zip(lanes(table), timeline.spans, strict=True):
        drawn = [str(span.action).partition("@")[0] for span in render.drawn(spans)]
        assert re.findall(r"[FBW]\d+", lane) == drawn
    assert ("times are rounded to columns" in table) == (costs.f != [3, 1, 4, 1])


@pytest.mark.parametrize(("f", "b", "cells"), [(2, 3, "F0--- B0------"), (3, 4, "F0------ B0---------"), (4, 5, None)])
def test_a_column_is_a_part_of_the_shortest_action_where_that_fits_all_times(f, b, cells):
    table = render.text(played("gpipe", Costs(f, b / 2, b / 2), ranks=1, microbatches=1))
    assert lanes(table) == [f" {cells or 'F0--------- B0------------'}"]
    assert "rounded" not in table


@pytest.mark.parametrize("unit", [0.3, 0.01, 1 / 3, 7e-5, 1e6])
def test_the_unit_of_time_does_not_matter(unit):
    for f, b, w, message in ((1, 1, 1, 1), (4, 3, 2, 0), (4, 3, 1, 1), (4, 3, 4, 1)):
        costs = Costs(f * unit, b * unit, w * unit, message=message * unit)
        table = render.text(played("zb-h1", Costs(f, b, w, message=message)))
        assert lanes(render.text(played("zb-h1", costs))) == lanes(table)


def test_extreme_costs_are_drawn_in_a_bounded_table():
    table = render.text(played("gpipe", Costs(f=1e-6, b=1e3)), width=100)
    assert len(table) < 3000
    assert "rounded" in table


def test_what_takes_no_time_is_not_drawn():
    table = render.text(played("zb-h1", Costs(w=0)))
    assert "W" not in table
    assert "F7" in table
    assert render.text(played("gpipe", Costs(0, 0, 0), ranks=1)) == "time    0\nrank 0| ."


# ------------------------------------------------------------------------------------------------------------- picture


def boxes(picture):
    """The boxes by action: where they begin, how wide they are, the lane they are in, their colour and number."""
    found = {}
    for group in ElementTree.fromstring(picture).iter(f"{NAMESPACE}g"):
        action, _, times = group.find(f"{NAMESPACE}title").text.partition(": ")
        rect, number = group.find(f"{NAMESPACE}rect"), group.find(f"{NAMESPACE}text")
        x, y, width = (float(rect.get(name)) for name in ("x", "y", "width"))
        number = None if number is None else number.text
        found[parse(action)] = (x, x + width, y, rect.get("fill"), number, times)
    return found


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("zb-h1", {}), ("interleaved", {"chunks": 2}), ("terapipe", {"microbatches": 2, "slices": 3}), ("pipedream", {})],
)
def test_a_picture_has_a_box_for_each_action_at_its_place_in_time(name, sizes):
    timeline = played(name, **sizes)
    found = boxes(svg(timeline))
    spans = [(rank, span) for rank, lane in enumerate(timeline.spans) for span in render.drawn(lane)]
    assert len(found) == len(spans)
    left = min(box[0] for box in found.values())
    scale = (max(box[1] for box in found.values()) - left) / timeline.makespan
    tops = sorted({box[2] for box in found.values()})
    for rank, (action, start, stop) in spans:
        first, last, y, _, number, times = found[action]
        assert first == pytest.approx(left + start * scale, abs=1.2)  # a pixel of white between boxes
        assert last == pytest.approx(left + stop * scale, abs=1.2)
        assert tops.index(y) == rank
        assert number == str(action)[1:].partition("@")[0]
        assert times == f"{start:g} to {stop:g}"


def test_kinds_differ_in_lightness_too_whatever_the_shade():
    found = boxes(svg(simulate(with_update(with_messages(split_interleaved())))))

    def lightness(colour):
        return sum(w * int(colour[i : i + 2], 16) for w, i in ((0.299, 1), (0.587, 3), (0.114, 5)))

    by_kind = {kind: {lightness(box[3]) for action, box in found.items() if action.kind == kind} for kind in "FBW"}
    assert {len(shades) for shades in by_kind.values()} == {2}  # one for each stage of a rank
    assert min(by_kind["F"]) > max(by_kind["B"]) + 10
    assert min(by_kind["B"]) > max(by_kind["W"]) + 10


def split_interleaved():
    """Two ranks with two stages each, backward split."""
    return [parse_row(f"F0@{q} F0@{q + 2} B0@{q + 2} B0@{q} W0@{q + 2} W0@{q}") for q in (0, 1)]


def test_a_picture_needs_nothing_else_and_says_what_it_shows():
    picture = svg(played("1f1b"), title="Fish & <chips>", messages=True)
    root = ElementTree.fromstring(picture)
    assert root.get("role") == "img"
    assert root.find(f"{NAMESPACE}title").text == "Fish & <chips>"
    figures = "4 ranks, 8 micro-batches; makespan 33; bubble 27.3 % of the time; at most 4 micro-batches in flight"
    assert root.find(f"{NAMESPACE}desc").text == figures
    assert not re.search(r"<script|href|@import|http(?!://www.w3.org/2000/svg)", picture)
    width, height = float(root.get("width")), float(root.get("height"))
    for element in root.iter():
        x, y = (float(element.get(name, 0)) for name in ("x", "y"))
        assert x + float(element.get("width", 0)) <= width
        assert y + float(element.get("height", 0)) <= height


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("zb-h1", {"ranks": 2, "microbatches": 3}),
        ("1f1b", {"microbatches": 4}),
        ("interleaved", {"ranks": 2, "microbatches": 2, "chunks": 3}),
        ("pipedream-2bw", {"microbatches": 4, "batches": 100}),
    ],
)
@pytest.mark.parametrize("title", ["mine", "a long name of a file " * 9])
def test_nothing_that_is_written_is_cut_off_or_on_top_of_something_else(name, sizes, title):
    picture = svg(played(name, **sizes), title)
    root = ElementTree.fromstring(picture)
    width, height = float(root.get("width")), float(root.get("height"))
    assert width <= 1600
    lines = {}  # by height: where a text begins and ends
    for text in root.iterfind(f"{NAMESPACE}text"):
        size = float(text.get("font-size", 12))
        long = 0.602 * size * len(text.text)  # DejaVu Sans Mono
        start = float(text.get("x")) - long * {"end": 1, "middle": 0.5}.get(text.get("text-anchor"), 0)
        assert start >= 0, text.text
        assert start + long <= width, text.text
        assert float(text.get("y")) < height
        lines.setdefault(float(text.get("y")), []).append((start, start + long))
    for found in lines.values():
        found.sort()
        assert all(one[1] < other[0] for one, other in itertools.pairwise(found))
    assert " ".join(text.text for text in root.iterfind(f"{NAMESPACE}text")).count("in flight") == 2


def test_a_picture_of_a_long_schedule_has_narrower_boxes_and_is_no_wider():
    for timeline in (played("1f1b", microbatches=500), played("gpipe", Costs(f=1e-6, b=1e3))):
        picture = svg(timeline)
        assert float(ElementTree.fromstring(picture).get("width")) == 1600
        assert all(last > first for first, last, *_ in boxes(picture).values())


def test_in_flight_counts_micro_batches_whatever_their_passes_are():
    assert render.in_flight(played("interleaved", chunks=2)) == [5.5, 4.5, 3.5, 2.5]
    assert render.in_flight(played("terapipe", slices=3)) == [8, 8, 8, 8]
    assert render.in_flight(played("1f1b")) == [4, 3, 2, 1]
    uneven = [parse_row("F0.0@0 F0.1@0 F1@0 B1@0 B0.1@0 B0.0@0")]
    assert render.in_flight(simulate(with_update(uneven))) == [2]
    assert "at most 5.5 micro-batches (11 passes) in flight" in render.describe(played("interleaved", chunks=2))


def test_an_arrow_leads_from_the_end_of_an_action_to_the_beginning_of_the_one_that_waits_for_it():
    timeline = played("gpipe", Costs(message=1))
    found = boxes(svg(timeline, messages=True))
    assert svg(timeline).count("<path") < svg(timeline, messages=True).count("<path")
    path = re.search(r'<path d="([^"]+)" fill="none"', svg(timeline, messages=True))[1]
    shafts = re.findall(r"M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)M", path)
    assert len(shafts) == 2 * 3 * 8
    starts, ends = {round(box[1]) for box in found.values()}, {round(box[0]) for box in found.values()}
    for x, _, to, _ in shafts:
        assert min(abs(float(x) + 4 - end) for end in starts) <= 1.5
        assert min(abs(float(to) - 4 - start) for start in ends) <= 1.5
        assert float(to) > float(x)


def test_updates_are_drawn_where_they_happen():
    picture = svg(played("pipedream", microbatches=1, batches=5))
    lines = re.findall(r'<path d="M([\d.]+) [\d.]+ v36" stroke="#1f2933"', picture)
    ends = {round(box[1] + 0.5) for action, box in boxes(picture).items() if action.kind == "B"}
    assert len(lines) == 4 * 5
    assert {round(float(x)) for x in lines} <= {end + shift for end in ends for shift in (-1, 0, 1)}


def test_numbers_are_left_out_where_they_do_not_fit_for_a_whole_kind():
    found = boxes(svg(played("1f1b", microbatches=100)))
    assert {box[4] is None for action, box in found.items() if action.kind == "F"} == {True}


def test_a_picture_of_nothing_that_takes_time_is_a_picture():
    assert not boxes(svg(played("gpipe", Costs(0, 0, 0))))

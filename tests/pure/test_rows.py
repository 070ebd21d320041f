"""Rows dealt out over ranks: every row is one rank's, and what is not cut is spread by size."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import ShapeError
from mpitrain.nn.rows import assign_rows

SHAPES = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple), max_size=8)


def sizes(table):
    """Rank -> rows of each tensor that it has."""
    return [[stop - start for start, stop in of_rank] for of_rank in table]


@given(SHAPES, st.integers(1, 12), st.data())
@settings(max_examples=200, deadline=None)
def test_every_row_is_one_ranks_and_ranks_have_neighbours(shapes, ranks, data):
    places = st.sets(st.integers(0, max(0, len(shapes) - 1)))
    table = assign_rows(shapes, ranks, pinned=data.draw(places), later=data.draw(places))
    assert len(table) == ranks
    for place, (rows, *_) in enumerate(shapes):
        parts = [of_rank[place] for of_rank in table if of_rank[place][1] > of_rank[place][0]]
        assert sorted(row for start, stop in parts for row in range(start, stop)) == list(range(rows))
        assert all(stop == start for (_, stop), (start, _) in pairwise(parts))
        most = math.ceil(rows / ranks) if rows >= ranks else rows
        assert max(stop - start for start, stop in parts) == most


@given(SHAPES, st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_what_stays_whole_is_spread_within_its_largest_tensor(shapes, ranks):
    """Greedy by size: the fullest rank has at most the largest of these more than the emptiest."""
    whole = [place for place, shape in enumerate(shapes) if shape[0] < ranks]
    table = assign_rows(shapes, ranks)
    loads = [sum(math.prod(shapes[place]) for place in whole if of_rank[place][1]) for of_rank in table]
    assert max(loads) - min(loads) <= max((math.prod(shapes[place]) for place in whole), default=0)


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [
        (8, 4, [2, 2, 2, 2]),
        (1001, 4, [251, 251, 251, 248]),
        (13, 8, [2, 2, 2, 2, 2, 2, 1, 0]),
        (9, 8, [2, 2, 2, 2, 1, 0, 0, 0]),
        (7, 8, [7, 0, 0, 0, 0, 0, 0, 0]),
        (1, 1, [1]),
    ],
)
def test_rows_are_rounded_up_and_the_last_ranks_may_have_none(rows, ranks, expected):
    """T23.5."""
    assert sizes(assign_rows([(rows, 3)], ranks)) == [[n] for n in expected]


def test_the_largest_is_placed_first_each_where_least_is():
    table = assign_rows([(1, 2), (1, 8), (1, 5), (1, 4), (64, 1), (1, 5)], 3 + 1)
    owners = [next(rank for rank, of_rank in enumerate(table) if of_rank[place][1]) for place in (0, 1, 2, 3, 5)]
    assert owners == [3, 0, 1, 3, 2]


def test_elements_of_full_tensors_may_decide_so_that_uneven_slabs_are_dealt_out_alike():
    """Ranks of tp hold slabs of other lengths of one tensor, and must come to the same owners."""
    full = [6, 5, 4]
    here, there = ([(1, 3), (1, 5), (1, 4)], [(1, 3), (1, 1), (1, 4)])
    assert assign_rows(here, 2, sizes=full) == assign_rows(there, 2, sizes=full)
    assert assign_rows(here, 2) != assign_rows(there, 2)


def test_what_is_pinned_goes_to_the_first_rank_and_counts_there():
    table = assign_rows([(1, 4), (1, 3), (1, 2)], 2, pinned={1})
    assert sizes(table) == [[0, 1, 1], [1, 0, 0]]


def test_what_comes_later_does_not_move_what_was_dealt_out():
    shapes = [(1, 9), (1, 3), (1, 2)]
    others = [of_rank[1:] for of_rank in assign_rows(shapes, 2, later={0})]
    alone = assign_rows(shapes[1:], 2)
    assert others == alone


def test_so_it_is_with_what_is_pinned_and_comes_later():
    """A tied table of uneven slabs: cut on one rank of tp, whole on the other; the rest sees neither."""
    here, there = ([(rows, 8), (3, 8), (2, 8)] for rows in (4, 3))
    tables = [assign_rows(shapes, 4, sizes=[56, 24, 16], pinned={0}, later={0}) for shapes in (here, there)]
    assert [of_rank[1:] for of_rank in tables[0]] == [of_rank[1:] for of_rank in tables[1]]
    assert tables[1][0][0] == (0, 3)


def test_a_tensor_without_dims_is_refused():
    with pytest.raises(ShapeError, match=r"without dims .* \(1,\)"):
        assign_rows([(3,), ()], 2)


def test_it_is_a_function_of_shapes_alone():
    shapes = [tuple(map(int, np.random.default_rng(seed).integers(1, 9, 2))) for seed in range(30)]
    assert assign_rows(shapes, 5) == assign_rows(list(shapes), 5)

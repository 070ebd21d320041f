"""The listener on routers counts each choice by kind of token and expert, and shows what it has counted."""

from xml.etree import ElementTree

import numpy as np

from mpitrain.autograd import Tensor, ops
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.debug.routes import Routes, heat_map, table

IDS = np.array([[[0, 1], [1, 2], [1, 0]], [[2, 1], [2, 1], [0, 2]]])
KINDS = np.array([[0, 1, 1], [0, -1, 1]])


def watched(renormalize=False):
    routes = Routes(["a", "b"], experts=3)
    with routes.watch(KINDS):
        ops.gates(Tensor(np.full((2, 3, 3), 0.25)), IDS, renormalize)
    ops.gates(Tensor(np.full((2, 3, 3), 0.25)), IDS)  # nobody looks any more
    return routes


def test_each_choice_of_each_token_counts_where_it_is_of_a_kind():
    # kind a: tokens (0, 1) and (2, 1); kind b: (1, 2), (1, 0) and (0, 2); the token of no kind does not count
    for renormalize in (False, True):
        [(path, counts)] = watched(renormalize).counts.items()
        assert path == ""
        np.testing.assert_array_equal(counts, [[1, 2, 1], [2, 2, 2]])


def test_shares_are_of_the_choices_of_a_kind():
    routes = Routes(["a", "none"], experts=2)
    routes.counts["mlp"] = np.array([[3, 1], [0, 0]])
    np.testing.assert_array_equal(routes.shares("mlp"), [[0.75, 0.25], [0, 0]])
    assert table(routes, "mlp").splitlines()[1:] == ["a        75   25          4", "none      .    .          0"]


def test_counts_of_ranks_are_added_up():
    def count() -> int:
        routes = watched()
        routes.sum_over(world())
        return int(routes.counts[""].sum())

    assert LocalWorld(2).run(count) == [20, 20]


def test_the_picture_is_a_file_of_its_own_with_a_cell_for_each_kind_and_expert():
    routes = Routes(["a < b", "c"], experts=3)
    routes.counts["blocks.0.mlp"] = np.array([[56, 43, 1], [0, 0, 7]])
    root = ElementTree.fromstring(heat_map(routes, "Who & what"))
    name = "{http://www.w3.org/2000/svg}"
    cells = [r for r in root.iter(f"{name}rect") if r.get("class") == "cell"]
    assert len(cells) == 6
    texts = [t.text for t in root.iter(f"{name}text")]
    cells = ["a < b", "56", "43", "c", "100"]
    note = "A cell without a number is below 5 %."
    assert texts == ["Who & what", "blocks.0.mlp", "expert", "0", "1", "2", *cells, note]


def test_a_number_is_dark_on_all_but_the_darkest_cells():
    routes = Routes(["a"], experts=3)
    routes.counts["mlp"] = np.array([[84, 10, 6]])
    middling = heat_map(routes, "")
    routes.counts["mlp"] = np.array([[90, 10, 0]])
    assert middling.count('class="middle share"') == 3
    assert heat_map(routes, "").count('class="middle on"') == 1

"""Which tokens find a place: one after the other, as the papers have it, against one sort; and checks_assign.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_assign as checks

from mpitrain.autograd import Tensor, ops
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.parallel.expert.assign import Assignment, assign, choose
from mpitrain.parallel.expert.moe import Moe, RoutedTokens
from mpitrain.rng import Draw
from mpitrain.routing import Routing


def run(check: Any, ranks: int, **how: Any) -> list[Any]:
    return LocalWorld(ranks, timeout=60, **how).run(lambda: check(world()))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_check(check: Any, ranks: int) -> None:
    run(check, ranks)


def whole(codes: np.ndarray, routing: Routing, *, training: bool = True, **given: Any) -> Assignment:
    """Of whole rows on one rank."""
    how = {"lengths": None, "real": None, "positions": None, **given}
    return assign(codes, routing, axis=checks.alone(), training=training, **how)


# -- who is chosen


def test_the_likeliest_are_chosen_in_their_order_and_of_equals_the_lowest() -> None:
    random = np.random.default_rng(0)
    for experts, k in ((8, 1), (8, 2), (8, 8), (64, 3), (2048, 2)):
        p = (random.integers(0, 5, (3, 7, experts)) / 5).astype(np.float32)  # many are equal
        ids = choose(p, k)
        assert ids.dtype == np.int64
        assert np.array_equal(ids, np.argsort(-p, axis=-1, kind="stable")[..., :k])


def test_the_order_of_memory_is_no_matter_and_probabilities_are_left_as_they_are() -> None:
    p = np.random.default_rng(1).random((5, 4, 6))
    before, turned = p.copy(), np.asfortranarray(p)
    assert np.array_equal(choose(p, 3), choose(turned, 3))
    assert np.array_equal(p, before)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_what_is_not_a_number_breaks_nothing(k: int) -> None:
    p = np.full((2, 3, 4), np.nan, np.float32)
    p[0, 1] = [0.1, np.nan, 0.5, 0.2]
    p[0, 2] = 0.25
    ids = choose(p, k)
    assert all(len(set(token)) == k for token in ids.reshape(-1, k).tolist())
    assert ids.min() >= 0
    assert ids.max() < 4
    to = whole(ids, Routing(4, k, "topk", 1.0))
    assert to.rows.size + to.dropped == 6 * k


# -- who finds a place


def in_turn(g: np.ndarray, chances: np.ndarray, capacity: int) -> tuple[list[Any], list[Any], int, int]:
    """GShard's algorithm 1, one token after the other: ((token, choice) at each slot of each expert, gates of each
    token, drops, choices held back)."""
    tokens, experts = g.shape
    count, slots = [0] * experts, [[None] * capacity for _ in range(experts)]
    best = [sorted(range(experts), key=lambda e, s=s: (-g[s, e], e))[:2] for s in range(tokens)]
    gates = [[0.0, 0.0] for _ in range(tokens)]
    dropped = held_back = 0
    for s in range(tokens):
        e1, e2 = best[s]
        at = count[e1]
        if at < capacity:
            slots[e1][at] = (s, 0)
            gates[s][0] = g[s, e1] / (g[s, e1] + g[s, e2])
        else:
            dropped += 1
        count[e1] += 1
    for s in range(tokens):
        e1, e2 = best[s]
        second = g[s, e2] / (g[s, e1] + g[s, e2])
        at = count[e2]
        if not 2 * second > chances[s]:
            held_back += 1
        elif at < capacity:
            slots[e2][at] = (s, 1)
            gates[s][1] = second
        else:
            dropped += 1
        count[e2] += 1
    return slots, gates, dropped, held_back


def test_a_thousand_groups_are_those_of_the_sequential_algorithm() -> None:
    """T17.3, T16.3."""
    random = np.random.default_rng(17)
    for factor in (0.3, 0.5, 1.0, 1.25, 2.0):
        for experts, s in ((2, 9), (4, 16), (4, 1), (8, 13)):
            b = 50
            routing = Routing(experts, 2, "gshard", factor)
            g = np.exp(random.standard_normal((b, s, experts)) + random.standard_normal((b, 1, experts)))
            g = np.round(g, 1) + 0.1  # some are equal
            g /= g.sum(-1, keepdims=True)
            chances = random.random((b, s))
            ids = choose(g, 2)
            gates = ops.gates(Tensor(g), ids, True).data
            codes = np.stack([ids[..., 0], np.where(2 * gates[..., 1] > chances, ids[..., 1], ~ids[..., 1])], -1)
            to = whole(codes, routing)
            kept = to.places >= 0
            assert np.array_equal(to.rows[to.places[kept]], np.nonzero(kept)[0] * s + np.nonzero(kept)[1])
            wanted: list[list[int]] = [[] for _ in range(experts)]
            dropped = held_back = 0
            for row in range(b):
                slots, expected, *losses = in_turn(g[row], chances[row], routing.capacity(s))
                for expert in range(experts):
                    wanted[expert] += [row * s + slot[0] for slot in slots[expert] if slot is not None]
                assert np.abs(np.where(kept[row], gates[row], 0) - expected).max() < 1e-12
                dropped, held_back = dropped + losses[0], held_back + losses[1]
            assert to.rows.tolist() == [token for tokens in wanted for token in tokens]
            assert to.counts.tolist() == [len(tokens) for tokens in wanted]
            assert (to.dropped, to.held_back) == (dropped, held_back)
            assert to.rows.size + dropped + held_back == 2 * b * s


@settings(deadline=None)
@given(st.data())
def test_any_row_is_filled_as_one_would_fill_it_by_hand(data: st.DataObject) -> None:
    """Any number of choices, padding anywhere, any choice held back."""
    experts = data.draw(st.integers(1, 4))
    k, s = data.draw(st.integers(1, experts)), data.draw(st.integers(0, 6))
    routing = Routing(experts, k, "topk", data.draw(st.sampled_from((0.3, 1.0, 1.5))))
    tokens = [data.draw(st.permutations(range(experts)))[:k] for _ in range(s)]
    held = [data.draw(st.lists(st.booleans(), min_size=k, max_size=k)) for _ in range(s)]
    real = data.draw(st.lists(st.booleans(), min_size=s, max_size=s))
    taken = [0] * experts
    places = [[-1] * k for _ in range(s)]
    filled: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for choice in range(k):
        for token in (token for token in range(s) if real[token]):
            expert = tokens[token][choice]
            if taken[expert] < routing.capacity(sum(real)) and not held[token][choice]:
                filled[expert].append((token, choice))
            taken[expert] += 1
    rows = [each for of in filled for each in of]
    for number, (token, choice) in enumerate(rows):
        places[token][choice] = number
    codes = np.array(tokens, np.int64).reshape(1, s, k) ^ -np.array(held, np.int64).reshape(1, s, k)
    to = whole(codes, routing, real=np.array(real, bool)[None], lengths=np.array([sum(real)]))
    assert to.places.reshape(s, k).tolist() == places
    assert to.rows.tolist() == [token for token, _ in rows]
    assert to.asked.tolist() == to.load[0].tolist() == taken
    assert to.held_back == sum(sum(held[token]) for token in range(s) if real[token])
    assert to.dropped == k * sum(real) - to.held_back - len(rows)


def test_no_expert_takes_more_than_its_places_and_none_is_lost() -> None:
    """T16.3."""
    random = np.random.default_rng(3)
    for routing in checks.ROUTINGS:
        rows = checks.draw_rows(random, routing, 4, 50, padded=False)
        to = whole(rows.codes, routing)
        kept = to.places >= 0
        for row in range(4):
            taken = np.bincount(rows.codes[row][kept[row]], minlength=routing.experts)
            assert taken.max() <= routing.capacity(50)
        assert kept.sum() == to.rows.size == to.counts.sum()
        assert to.rows.size + to.dropped + to.held_back == to.asked.sum() == routing.top_k * 4 * 50
        assert sorted(to.places[kept]) == list(range(to.rows.size))


def test_a_crowded_expert_keeps_the_first_of_each_row() -> None:
    """T18.3, C53."""
    to = whole(np.zeros((3, 20, 1), np.int64), Routing(4, capacity_factor=1.0))
    assert to.rows.tolist() == [20 * row + token for row in range(3) for token in range(5)]
    assert to.counts.tolist() == [15, 0, 0, 0]
    assert to.dropped == 45
    assert to.load.tolist() == [[20, 0, 0, 0]] * 3  # before any is dropped


def test_room_for_all_is_dropless() -> None:
    """T16.6."""
    random = np.random.default_rng(4)
    for experts, k, router in ((4, 1, "switch"), (6, 2, "gshard"), (7, 3, "topk")):
        room = Routing(experts, k, router, experts / k)
        codes = checks.draw_rows(random, room, 3, 30, padded=False).codes
        roomy, dropless = (whole(codes, Routing(experts, k, router, factor)) for factor in (experts / k, None))
        assert roomy.dropped == dropless.dropped == 0
        assert all(np.array_equal(a, b) for a, b in zip(roomy, dropless, strict=True))


def test_second_choices_wait_for_all_first_ones_and_count_even_if_they_are_not_sent() -> None:
    """Expert 0 has 2 places: token 2's first choice has one, token 0's second has the other, and is not sent."""
    codes = np.array([[[1, ~0], [2, 0], [0, 1], [3, 0]]])
    to = whole(codes, Routing(4, 2, "gshard", 1.0))
    assert to.places[0].tolist() == [[1, -1], [3, -1], [0, 2], [4, -1]]
    assert (to.dropped, to.held_back) == (2, 1)
    assert to.asked.tolist() == [4, 2, 1, 1]
    assert to.load.tolist() == [[1, 1, 1, 1]]  # gshard counts first choices
    other = whole(codes, Routing(4, 2, "topk", 1.0))
    assert other.load.tolist() == [[4, 2, 1, 1]]


def test_padding_takes_no_place_and_changes_nothing_for_the_others() -> None:
    random = np.random.default_rng(5)
    for routing in checks.ROUTINGS:
        dense = checks.draw_rows(random, routing, 1, 17, padded=False).codes
        where = np.sort(random.permutation(40)[:17])
        real = np.zeros((1, 40), bool)
        real[0, where] = True
        codes = np.full((1, 40, routing.top_k), dense[0, 0])  # padding prefers what the first token prefers
        codes[:, where] = dense
        padded = whole(codes, routing, real=real, lengths=np.array([17]))
        plain = whole(dense, routing)
        assert np.array_equal(padded.rows, where[plain.rows])
        assert np.array_equal(padded.places[:, where], plain.places)
        assert (padded.places[~real] == -1).all()
        assert all(np.array_equal(a, b) for a, b in zip(padded[3:], plain[3:], strict=True))


def test_each_row_has_the_capacity_of_its_own_length() -> None:
    real = np.arange(12) < np.array([[12], [5], [1], [0]])
    to = whole(np.zeros((4, 12, 1), np.int64), Routing(3, capacity_factor=1.1), real=real, lengths=real.sum(1))
    assert [int((row >= 0).sum()) for row in to.places] == [5, 2, 1, 0]  # of 4.4, 1.83, 0.37
    assert to.dropped == 7 + 3


def test_documents_of_a_row_share_its_places() -> None:
    """Documents packed into a row, with padding between them: one group, in order of position."""
    documents = np.array([[0, 0, -1, 1, 1, 1, -1, 2, 2, -1]])
    real = documents >= 0
    to = whole(np.zeros((1, 10, 1), np.int64), Routing(2, capacity_factor=1.0), real=real, lengths=real.sum(1))
    assert to.rows.tolist() == [0, 1, 3, 4]


def test_an_empty_batch_has_no_rows() -> None:
    for shape in ((0, 5, 2), (2, 0, 2)):
        to = whole(np.zeros(shape, np.int64), Routing(4, 2, "gshard"))
        assert to.rows.size == to.counts.sum() == to.dropped == 0
        assert to.places.shape == shape
        assert to.load.shape == (shape[0], 4)


def test_more_experts_than_a_byte_can_number() -> None:
    for experts in (255, 256, 257, 70_000):
        codes = np.array([[[experts - 1], [0], [experts - 1], [1]]])
        real = np.array([[True, True, True, False]])
        to = whole(codes, Routing(experts, capacity_factor=float(experts)), real=real, lengths=np.array([3]))
        assert to.rows.tolist() == [1, 0, 2]
        assert (to.counts[0], to.counts[-1], to.counts.sum()) == (1, 2, 3)


# -- GShard's draw


def test_second_experts_are_sent_as_often_as_their_weight_says() -> None:
    """T17.5: 0.6 of those of weight 0.3, within three standard deviations; and all from weight 0.5 on."""
    moe = Moe("moe", Routing(4, 2, "gshard"), 4, 4, Mesh(World(checks.Alone(), "none")))
    b, s = 20, 500
    ids = np.broadcast_to(np.array([2, 1]), (b, s, 2))
    tokens = RoutedTokens(training=True, draw=Draw(0, 1, np.arange(b), np.arange(s)))
    codes = moe._drawn(ids, np.broadcast_to(np.array([0.7, 0.3]), ids.shape), tokens)
    assert (codes[..., 0] == 2).all()
    assert set(codes[..., 1].flat) == {1, ~1}
    sent = (codes[..., 1] >= 0).mean()
    assert abs(sent - 0.6) < 3 * np.sqrt(0.6 * 0.4 / (b * s))
    assert (moe._drawn(ids, np.full(ids.shape, 0.5), tokens)[..., 1] == 1).all()


def test_positions_that_nobody_deals_out_are_refused() -> None:
    def check(ranks: World) -> None:
        for positions in ([0, 2, 4], [3, 1, 2]):
            with pytest.raises(AssertionError, match="positions"):
                assign(
                    np.zeros((1, 3, 1), np.int64),
                    Routing(2),
                    lengths=None,
                    real=None,
                    positions=np.array(positions),
                    axis=checks.cp_of(ranks),
                    training=True,
                )

    run(check, 2)

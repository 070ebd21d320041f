"""Which rank left the path, and the last common call: from what ranks remember, by hand."""

from __future__ import annotations

import pytest

from mpitrain.comm.page import Call, answer_key, members_word
from mpitrain.comm.path import (
    Standing,
    Turns,
    deadlock_report,
    judged,
    last_common_call,
    places_told,
    who_left,
)

WORLD, DP, PAIR = 100, 102, 105  # channels


def call(
    key: int, number: int, verb: str = "all_reduce", site: str = "a.py:1", is_new: bool = False, to: int = -1
) -> Call:
    return Call(number, "x", number, verb, "f4", to, (2,), 0, key, to, 0, site, is_new, (0, 1, 2))


def waits(*calls: Call) -> Standing:
    counts: dict[int, int] = {}
    for one in calls:
        counts[one.key] = max(counts.get(one.key, 0), one.number)
    return Standing(calls, counts, True, False)


def test_a_turn_is_new_only_to_a_rank_that_knows_its_way() -> None:
    turns = Turns()
    assert [turns.is_new(n) for n in (1, 2, 3)] == [False] * 3  # all is new in the first round
    assert [turns.is_new(n) for n in (1, 2, 3)] == [False] * 3
    assert [turns.is_new(n) for n in (1, 3)] == [False, True]
    assert [turns.is_new(n) for n in (1, 3)] == [False, False]  # taken before, by now
    assert turns.is_new(9)


@pytest.mark.parametrize(
    ("new", "places", "ended", "been", "said"),
    [
        ((False, False, True), "aab", [], False, "Rank 2 left the path: a new turn for it alone."),
        ((False, True), "ab", [], False, "Rank 1 left the path: a new turn for it alone."),
        ((False, True, True), "abc", [], False, "Ranks 1,2 left the path: a new turn for them alone."),
        ((False, False), "ab", [], False, ""),
        ((True, True), "ab", [], False, ""),
        ((True, True, True), "aab", [], False, "Rank 2 left the path: the other 2 are together."),
        ((False, False, False), "abc", [], False, ""),
        ((False, False, False, False), "aabb", [], False, ""),
        ((False, False), "aa", [], False, ""),
        ((False,), "a", [1], True, "Rank 1 left the path: it has ended."),
        ((False,), "a", [1], False, ""),
        ((False, False), "aa", [2], False, "Rank 2 left the path: it has ended."),
        ((False,), "a", [1, 2], False, "Rank 0 left the path: the other 2 are together."),
        ((True,), "a", [1, 2], True, "Rank 0 left the path: a new turn for it alone."),
        ((False,), "a", [1, 2], True, "Ranks 1,2 left the path: they have ended."),
    ],
)
def test_the_rank_that_took_a_new_turn_or_ended_or_is_not_where_most_are(new, places, ended, been, said) -> None:
    assert judged(dict(enumerate(new)), dict(enumerate(places)), ended, been) == said


def test_the_last_common_call_is_the_last_that_all_have_entered() -> None:
    first, second = call(WORLD, 6, "barrier"), call(DP, 3, "all_gather")
    standings = {
        0: waits(first, second, call(WORLD, 7)),
        1: waits(first, second, call(WORLD, 7)),
        2: waits(first, second, call(DP, 4)),
    }
    assert last_common_call(standings) is second
    late = standings | {2: waits(first, call(DP, 1))}
    assert last_common_call(late) is first
    stranger = standings | {2: waits(call(999, 1))}
    assert last_common_call(stranger) is None


def test_ranks_that_wait_in_one_call_have_not_made_it() -> None:
    before, now = call(WORLD, 6), call(WORLD, 7)
    assert last_common_call({0: waits(before, now), 1: waits(before, now)}) is before


def test_a_message_between_two_is_common_to_both_when_both_have_entered_it() -> None:
    sent = call(PAIR, 4, "send", to=1)
    got = call(answer_key(PAIR), 4, "recv", to=0)
    standings = {0: waits(call(WORLD, 1), sent, call(WORLD, 3)), 1: waits(call(WORLD, 1), got, call(DP, 1))}
    assert last_common_call(standings) is sent
    assert last_common_call(dict(reversed(standings.items()))) is got
    not_taken = standings | {1: waits(call(WORLD, 1), got._replace(number=3), call(DP, 1))}
    assert last_common_call(not_taken) is standings[0].calls[0]


def test_a_new_turn_counts_from_the_last_common_call_on() -> None:
    common = call(WORLD, 6, is_new=True)
    astray = waits(common, call(DP, 1, is_new=True), call(DP, 2))
    usual = waits(common, call(WORLD, 7))
    assert who_left({0: usual, 1: astray}, common) == "Rank 1 left the path: a new turn for it alone."
    assert who_left({0: usual, 1: waits(common, call(DP, 2))}, common) == ""


def test_a_report_has_five_lines_at_most_and_all_places_that_can_be_told() -> None:
    before = call(WORLD, 1, "barrier", "b.py:2")
    standings = {rank: waits(before, call(1000 + 2 * rank, 1)) for rank in range(6)}
    places = [(rank, ("waits", "wait", f" in {chr(97 + rank)}")) for rank in range(6)]
    lines = deadlock_report("Head.", standings, places)
    assert lines == [
        "Head.",
        "  rank 0 waits in a",
        "  rank 1 waits in b",
        "  rank 2 waits in c; rank 3 waits in d; and 2 more places",
        "  Last common call: barrier on x, call 1, (2,) f4, at b.py:2",
    ]
    assert places_told(places[:3], 3) == [*lines[1:3], "  rank 2 waits in c"]
    assert places_told([(0, places[0][1]), (2, places[0][1])], 3) == ["  ranks 0,2 wait in a"]


@pytest.mark.parametrize("ranks", [(0,), (5,), (0, 1, 2), (1, 3, 5, 7), (2, 1, 0), (0, 8)])
def test_members_at_equal_distances_fit_in_a_word(ranks: tuple[int, ...]) -> None:
    from mpitrain.comm.page import _members

    assert [*_members(members_word(ranks))] == sorted(ranks)
    assert members_word(ranks) < 1 << 47


@pytest.mark.parametrize("ranks", [(0, 1, 3), (), (0, 40000), (0, 0)])
def test_others_do_not(ranks: tuple[int, ...]) -> None:
    assert members_word(ranks) == 0

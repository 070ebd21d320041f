"""Clocks of a trace: the error that is stated bounds the true one, whatever the clocks and the messages do."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the made-up traces are
from traces import ranks_of, send, together, trace_of

from mpitrain.debug.trace.clocks import DRIFT, WINDOW, aligned
from mpitrain.debug.trace.matches import matched
from mpitrain.debug.trace.records import Trace

US, MS, S = 10**3, 10**6, 10**9
SLACK = 2 * DRIFT * WINDOW  # between two knots


def runs_at(ahead, rate=0.0, swing=0.0, period=3 * S):
    """A clock that is ahead, and runs away by `rate`, to and fro by `swing`; both are of the time that passes."""

    def reads(true):
        return int(true + ahead + rate * true + swing * period / (2 * np.pi) * np.sin(2 * np.pi * true / period))

    return reads


def exchanged(rng, reads, hosts, per_host=1, seconds=1.0, delays=(20 * US, 400 * US), both_ways=True, every=5 * MS):
    """Ranks that talk: all-reduces of all, and messages around the ring of ranks."""
    size = hosts * per_host
    names = [f"host{rank // per_host}" for rank in range(size)]
    ranks = ranks_of(size, names, dict(zip(dict.fromkeys(names), reads, strict=True)), pp=[tuple(range(size))])
    low, high = delays

    def delay():
        return int(low + rng.exponential(high - low))

    for true in range(10 * MS, int(seconds * S), every):
        if both_ways:
            enter = [true + int(rng.uniform(0, 2 * MS)) for _ in ranks]
            leave = [max(enter) + delay() for _ in ranks]
            together(ranks, "world", enter, leave)
        for rank in ranks[:-1] if both_ways else ranks:
            after = ranks[(rank.rank + 1) % size]
            if not both_ways and after.rank == 0:
                continue
            sent = true + 2 * MS + int(rng.uniform(0, MS))
            send(rank, after, "pp", sent, sent + delay(), tag=3, blocks=bool(rng.integers(2)))
    return ranks


def worst(trace, ranks, found):
    """For each rank the largest error of the start of a span, against what the first rank's clock would have read."""
    errors = {}
    for rank, of in zip(ranks, trace.ranks, strict=True):
        true = np.array(sorted(span["start"] for span in rank.spans))
        wanted = np.array([ranks[0].reads(at) for at in true])
        errors[rank.rank] = np.abs(found.shared(rank.rank, of.spans["start"]) - wanted).max()
    return errors


def test_the_error_bounds_what_ways_of_different_length_hide():
    """Forth at once, back in 900 us: the clock seems to be 450 us ahead, and no trace can tell."""
    ranks = ranks_of(3, "abc", dict.fromkeys("abc", runs_at(0)), pp=[(0, 1, 2)])
    for true in range(1 * MS, 50 * MS, 5 * MS):
        send(ranks[0], ranks[1], "pp", true, true + 1)
        send(ranks[1], ranks[0], "pp", true, true + 900 * US)
        send(ranks[0], ranks[2], "pp", true, true + 900 * US)
        send(ranks[2], ranks[0], "pp", true, true + 1)
    found = aligned(trace_of(ranks))
    for rank, sign in ((1, 1), (2, -1)):
        assert 420 * US < -sign * found.offset[rank] <= found.error[rank] < 480 * US
    assert abs(found.offset[1] - found.offset[2]) <= found.apart


def test_the_error_holds_between_the_moments_of_messages():
    """Messages that take no time, at knots alone; between them the clock runs away and comes back."""

    def reads(true):
        far = (true - WINDOW / 2) % WINDOW
        return round(true + 0.99 * DRIFT * min(far, WINDOW - far))

    ranks = ranks_of(2, "ab", {"a": runs_at(0), "b": reads}, pp=[(0, 1)])
    for rank in ranks:
        rank.span("op", "first", 0, 1)
        rank.span("op", "last", int(20 * WINDOW) - 1, int(20 * WINDOW))
        for at in range(int(WINDOW), int(20 * WINDOW), int(WINDOW)):
            rank.span("op", "between", at, at + 1)
    for true in range(int(WINDOW / 2), int(20 * WINDOW), int(WINDOW)):
        for source, dest in (ranks, ranks[::-1]):
            send(source, dest, "pp", true, true + 1)
    trace = trace_of(ranks)
    found = aligned(trace)
    error = worst(trace, ranks, found)[1]
    assert found.of[1].error.max() < error <= found.error[1] < 6 * US


def test_one_clock_is_exact():
    ranks = exchanged(np.random.default_rng(1), [runs_at(12345)], hosts=1, per_host=4)
    trace = trace_of(ranks)
    found = aligned(trace)
    assert found.exact
    assert set(found.offset.values()) == {0}
    assert set(found.error.values()) == {0.0}
    assert np.array_equal(found.shared(3, trace.ranks[3].spans["start"]), trace.ranks[3].spans["start"])
    assert found.said == "one clock for all 4 ranks: times are compared without an error"


@pytest.mark.parametrize("seed", range(12))
def test_the_stated_error_bounds_the_true_one(seed):
    """Skew of hours, drift up to what is allowed, clocks that swing, delays that differ from way to way."""
    rng = np.random.default_rng(seed)
    hosts, per_host = int(rng.integers(2, 5)), int(rng.integers(1, 3))
    half = DRIFT / 2 * 0.98  # of each clock, so that two of them are apart by DRIFT at most
    reads = [runs_at(int(rng.uniform(-1e13, 1e13)), rng.uniform(-half / 2, half / 2), rng.uniform(0, half / 2))
             for _ in range(hosts)]  # fmt: skip
    ranks = exchanged(rng, reads, hosts, per_host, seconds=float(rng.uniform(0.05, 2.5)))
    trace = trace_of(ranks)
    found = aligned(trace)
    errors = worst(trace, ranks, found)
    assert not found.exact
    assert found.error[0] == 0
    for rank, error in errors.items():
        assert error <= found.error[rank] < 1 * MS, (rank, error, found.error[rank])


def test_the_error_is_of_the_order_of_the_fastest_messages():
    rng = np.random.default_rng(3)
    ranks = exchanged(rng, [runs_at(0), runs_at(7 * S)], 2, seconds=2.0, delays=(20 * US, 200 * US))
    found = aligned(trace_of(ranks))
    assert found.error[1] < 120 * US
    assert abs(found.offset[1] - 7 * S) <= found.error[1]
    assert found.used > 100
    assert found.said.startswith("2 clocks brought together by")


def test_a_drift_is_followed_over_a_long_trace():
    """80 ppm over 8 s are 640 us: one number for the whole trace would be off by half of that."""
    rng = np.random.default_rng(4)
    reads = [runs_at(0), runs_at(5 * S, 80e-6)]
    ranks = exchanged(rng, reads, 2, seconds=8.0, delays=(20 * US, 60 * US), every=20 * MS)
    trace = trace_of(ranks)
    found = aligned(trace)
    errors = worst(trace, ranks, found)
    assert errors[1] <= found.error[1] < 150 * US
    moved = np.ptp(found.of[1].more)
    assert 500 * US < moved < 700 * US


def test_messages_of_one_way_alone_bound_nothing():
    """Who only ever sends may be ahead by anything."""
    rng = np.random.default_rng(5)
    ranks = exchanged(rng, [runs_at(0), runs_at(S)], 2, both_ways=False)
    found = aligned(trace_of(ranks))
    assert found.error == {0: 0.0, 1: np.inf}
    assert "nothing bounds the clock of rank 1" in found.said
    sends = matched(trace_of(ranks)).pairs
    came = found.shared(1, np.array([trace_of(ranks).ranks[1].spans["stop"][at] for at in sends["got"]]))
    sent = trace_of(ranks).ranks[0].spans["start"][sends["sent"]]
    assert (came >= sent - SLACK).all(), "arrows do not go back in time"


def test_arrows_do_not_go_back_in_time_between_any_two_hosts():
    rng = np.random.default_rng(6)
    reads = [runs_at(0), runs_at(S, 40e-6), runs_at(-2 * S, -40e-6), runs_at(9 * S)]
    trace = trace_of(exchanged(rng, reads, 4, seconds=1.0))
    found = aligned(trace)
    pairs = matched(trace).pairs
    assert len(pairs) > 300
    for pair in pairs:
        left = found.shared(pair["source"], trace.ranks[pair["source"]].spans["start"][[pair["sent"]]])[0]
        came = found.shared(pair["dest"], trace.ranks[pair["dest"]].spans["stop"][[pair["got"]]])[0]
        assert came >= left - SLACK


def test_a_third_host_brings_two_together_that_never_talk():
    ranks = ranks_of(3, "abc", dict(zip("abc", [runs_at(0), runs_at(S), runs_at(-S)], strict=True)), pp=[(0, 1, 2)])
    for true in range(1 * MS, 50 * MS, 5 * MS):
        for source, dest in ((0, 1), (1, 0), (1, 2), (2, 1)):
            send(ranks[source], ranks[dest], "pp", true, true + 30 * US)
    found = aligned(trace_of(ranks))
    assert abs(found.offset[2] + S) <= found.error[2] < 80 * US
    assert found.error[2] > found.error[1] > 0


def test_clocks_that_run_apart_more_than_crystals_do_are_still_bounded():
    """A clock that is being set: 600 ppm."""
    rng = np.random.default_rng(7)
    ranks = exchanged(rng, [runs_at(0), runs_at(S, 600e-6)], 2, seconds=3.0, delays=(20 * US, 60 * US))
    trace = trace_of(ranks)
    found = aligned(trace)
    assert found.drift == 10 * DRIFT
    assert worst(trace, ranks, found)[1] <= found.error[1] < 500 * US


def test_a_clock_that_jumps_is_told():
    rng = np.random.default_rng(8)
    ranks = exchanged(rng, [runs_at(0), lambda true: true + (S if true > 500 * MS else 0)], 2)
    found = aligned(trace_of(ranks))
    assert found.error[1] == np.inf
    assert "cannot be true of clocks that run evenly" in found.said


def test_ranks_that_claim_one_clock_and_have_two_are_told():
    ranks = ranks_of(3, ["a", "a", "b"], {"a": runs_at(0), "b": runs_at(S)}, pp=[(0, 1, 2)])
    ranks[1].reads = runs_at(-S)
    send(ranks[0], ranks[1], "pp", 1 * MS, 2 * MS)
    send(ranks[0], ranks[2], "pp", 1 * MS, 2 * MS)
    found = aligned(trace_of(ranks))
    assert "came before they were sent" in found.said
    assert found.error[2] == np.inf


def test_what_does_not_bind_is_not_believed():
    """A rank of a broadcast leaves before others come, and so may all with an empty array."""
    for verb, shape in (("broadcast", "(8,) float32"), ("all_reduce", "(0,) float32"), ("reduce_scatter", "(8,) int8")):
        ranks = ranks_of(2, "ab", {"a": runs_at(0), "b": runs_at(S)})
        together(ranks, "world", [1 * MS, 9 * MS], [2 * MS, 10 * MS], verb, shape)
        assert aligned(trace_of(ranks)).used == 0
    for nbytes, used in ((32, 2), (16, 0)):  # 32 bytes to the one other rank; or half of 32 that are uneven parts
        ranks = ranks_of(2, "ab", {"a": runs_at(0), "b": runs_at(S)})
        together(ranks, "world", [1 * MS, 9 * MS], [10 * MS, 10 * MS], "all_gather")
        for rank in ranks:
            rank.spans[0]["bytes"] = nbytes
        assert aligned(trace_of(ranks)).used == used
    ranks = ranks_of(2, "ab", {"a": runs_at(0), "b": runs_at(S)})
    together(ranks, "world", [1 * MS, 9 * MS], [10 * MS, 10 * MS], "barrier", "(0,) uint8")
    assert aligned(trace_of(ranks)).used == 2


def test_what_was_counted_twice_is_not_matched():
    """Two meshes of the same ranks: call 1 of the one is not call 1 of the other."""
    ranks = ranks_of(2, "ab", {"a": runs_at(0), "b": runs_at(S)}, pp=[(0, 1)])
    for true in (1 * MS, 5 * MS):
        for rank in ranks:
            rank.numbers.clear()
        together(ranks, "world", [true, true], [true + MS, true + MS])
        send(ranks[0], ranks[1], "pp", true, true + MS)
    found = matched(trace_of(ranks))
    assert found.pairs.size == found.meetings.size == 0
    ranks[0].spans = ranks[0].spans[:2]  # one send, which may be that of either receive
    assert matched(trace_of(ranks)).pairs.size == 0


def test_calls_that_do_not_block_are_complete_at_their_waits():
    ranks = ranks_of(2)
    for rank in ranks:
        for number in (1, 2):
            at = rank.span("message", "iall_reduce", number * 10, number * 10 + 1, axis="world", number=number)
            assert at == number - 1
        for number in (2, 1):
            rank.span("wait", "iall_reduce", 100 - number, 100 - number, axis="world", number=number)
        rank.span("arrival", "iall_reduce", 120, 120, axis="world", number=1)
    found = matched(trace_of(ranks)).meetings
    assert found["span"].tolist() == [0, 0, 1, 1]
    assert found["done"].tolist() == [3, 3, 2, 2]


def test_files_of_nonsense_are_survived():
    """A trace is data: any numbers may stand in it."""
    rng = np.random.default_rng(9)
    for _ in range(20):
        ranks = exchanged(rng, [runs_at(0), runs_at(S)], 2, seconds=0.1)
        trace = trace_of(ranks)
        for rank in trace.ranks:
            for name in ("start", "stop", "peer", "tag", "number", "kind", "bytes"):
                hit = rng.random(rank.spans.size) < 0.2
                rank.spans[name][hit] = rng.integers(-(2**62), 2**62, hit.sum()).astype(rank.spans[name].dtype)
            rank.axes = {**rank.axes, "world": (1, 0, 5)}
        with np.errstate(all="raise"):
            found = aligned(trace)
        assert found.said


def test_an_empty_trace_and_ranks_without_spans():
    assert aligned(Trace([])).said == "one clock"
    ranks = ranks_of(2, "ab", {"a": runs_at(0), "b": runs_at(S)})
    assert aligned(trace_of(ranks)).error[1] == np.inf

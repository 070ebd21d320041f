"""Slices of a sequence: the dynamic programmes against all slicings there are (T15.2, T15.3)."""

from __future__ import annotations

import itertools
import random

import pytest

from mpitrain.errors import ConfigError, ShapeError
from mpitrain.pipeline.slicing import best_slicing, equal_cost_slices


def all_slicings(length: int) -> list[list[int]]:
    """Every way to write a length as a sum of lengths from 1 on, in order."""
    if length == 0:
        return [[]]
    return [[first, *rest] for first in range(1, length + 1) for rest in all_slicings(length - first)]


def with_contexts(lengths: list[int]) -> list[tuple[int, int]]:
    """(tokens, tokens before) of each slice."""
    return list(zip(lengths, itertools.accumulate(lengths[:-1], initial=0), strict=True))


def time(lengths, stages, cost, microbatches=1):
    times = [cost(*slice) for slice in with_contexts(lengths)]
    return microbatches * sum(times) + (stages - 1) * max(times)


def test_the_best_slicing_is_the_best_of_all():
    """T15.2: t(l, ctx) = l + l ctx / s, s = 16, p = 4."""

    def cost(tokens, before):
        return tokens + tokens * before / 16

    least = min(time(lengths, 4, cost) for lengths in all_slicings(16))
    assert time(best_slicing(16, 4, cost), 4, cost) == least


@pytest.mark.parametrize("seed", range(40))
def test_the_best_slicing_of_any_cost_is_the_best_of_all(seed):
    """Whole-number costs of no pattern at all, so that no property of a sensible cost is relied on."""
    chance = random.Random(seed)
    length, stages, microbatches = chance.randint(1, 9), chance.randint(1, 8), chance.randint(1, 3)
    table = {(k, x): chance.randint(0, 30) + 3 * k for x in range(length) for k in range(1, length - x + 1)}

    def cost(tokens, before):
        return table[tokens, before]

    lengths = best_slicing(length, stages, cost, microbatches=microbatches)
    assert sum(lengths) == length
    least = min(time(each, stages, cost, microbatches) for each in all_slicings(length))
    assert time(lengths, stages, cost, microbatches) == least


def test_overhead_makes_slices_coarser_and_stages_make_them_finer():
    """T15.3: without overhead a slice is one token."""
    assert best_slicing(24, 4, lambda tokens, before: tokens) == [1] * 24
    numbers = [len(best_slicing(24, 4, lambda tokens, before, o=o: tokens + o)) for o in (0, 1, 4, 50)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] == 24
    assert numbers[1] < 24
    assert numbers[-1] == 1
    numbers = [len(best_slicing(24, stages, lambda tokens, before: tokens + 1)) for stages in (1, 2, 8, 64)]
    assert numbers == sorted(numbers)
    assert numbers[0] == 1  # nobody waits
    numbers = [len(best_slicing(24, 8, lambda tokens, before: tokens + 1, microbatches=m)) for m in (1, 4, 64)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] < numbers[0]


def test_later_slices_are_shorter_where_context_costs():
    lengths = best_slicing(64, 8, lambda tokens, before: 4 + tokens + tokens * (before + tokens / 2) / 16)
    assert lengths[0] > 2 * lengths[-1]


def test_lengths_are_multiples_of_a_unit():
    def cost(tokens, before):
        return 5 + tokens + tokens * before / 32

    lengths = best_slicing(96, 4, cost, unit=8)
    assert all(each % 8 == 0 for each in lengths)
    multiples = ([8 * each for each in lengths] for lengths in all_slicings(12))
    assert time(lengths, 4, cost) == min(time(each, 4, cost) for each in multiples)


def squares(lengths, linear, quadratic):
    costs = [
        tokens * linear + quadratic * (tokens * before + tokens**2 / 2) for tokens, before in with_contexts(lengths)
    ]
    return sum(cost**2 for cost in costs)


@pytest.mark.parametrize(("linear", "quadratic"), [(1, 0), (0, 1), (1, 0.25), (8, 1), (0.5, 4), (0, 0)])
def test_equal_slices_are_the_most_even_of_all(linear, quadratic):
    for length in (1, 2, 5, 9, 12):
        for n in range(1, length + 1):
            lengths = equal_cost_slices(length, n, linear, quadratic)
            assert (len(lengths), sum(lengths)) == (n, length)
            assert lengths == sorted(lengths, reverse=True)
            ways = [each for each in all_slicings(length) if len(each) == n]
            assert squares(lengths, linear, quadratic) == min(squares(each, linear, quadratic) for each in ways)


def test_equal_slices_of_long_sequences_cost_about_the_same():
    lengths = equal_cost_slices(512, 8, 1.0, 0.05)
    costs = [tokens + 0.05 * (tokens * before + tokens**2 / 2) for tokens, before in with_contexts(lengths)]
    assert max(costs) / min(costs) < 1.05
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 3 * lengths[-1]
    for linear in (0.1, 1.0, 7.3):  # without attention: as even as whole numbers can be, longer ones first
        assert equal_cost_slices(100, 7, linear, 0.0) == [15, 15, 14, 14, 14, 14, 14]


def test_what_cannot_be_cut_is_refused():
    for n in (0, 4):
        with pytest.raises(ShapeError, match=f"{n} slices of a sequence of 3 tokens: wanted are 1 to 3"):
            equal_cost_slices(3, n, 1.0, 1.0)
    with pytest.raises(ConfigError, match="the quadratic cost of a slice is -1"):
        equal_cost_slices(3, 2, 1.0, -1.0)
    with pytest.raises(ShapeError, match=r"10 tokens .* multiples of 4"):
        best_slicing(10, 2, lambda tokens, before: 1.0, unit=4)
    with pytest.raises(ConfigError, match="stages is 0"):
        best_slicing(10, 0, lambda tokens, before: 1.0)
    with pytest.raises(ConfigError, match="slice of 1 tokens after 1 is nan"):
        best_slicing(2, 2, lambda tokens, before: float("nan") if before else 1.0)

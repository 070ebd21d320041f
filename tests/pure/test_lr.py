"""Learning rates: where they start, peak and end."""

import math
from itertools import pairwise

import pytest

from mpitrain.optim.lr import constant, warmup_cosine, warmup_updates


def test_the_rate_rises_in_a_straight_line_and_falls_along_a_cosine_to_zero():
    rates = [warmup_cosine(update, 110, 10, peak=2.0) for update in range(110)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == 2.0
    assert rates[60] == pytest.approx(1.0)
    assert rates[35] == pytest.approx(1 + math.cos(math.pi / 4))
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert 0 < rates[-1] < 1e-3
    assert warmup_cosine(110, 110, 10, peak=2.0) == warmup_cosine(500, 110, 10, peak=2.0) == 0.0


def test_the_cosine_may_end_above_zero():
    assert warmup_cosine(100, 100, 0, peak=1.0, final=0.1) == 0.1
    assert warmup_cosine(50, 100, 0, peak=1.0, final=0.1) == pytest.approx(0.55)
    assert warmup_cosine(0, 100, 0, peak=1.0, final=0.1) == 1.0


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (5, 5), (2, 1)])
def test_the_shortest_runs_have_a_rate_above_zero_in_every_update(total, warmup):
    assert all(0 < warmup_cosine(update, total, warmup, peak=1.0) <= 1.0 for update in range(total))


def test_a_warm_up_is_a_fraction_or_a_number_of_updates():
    assert warmup_updates(0.03, 1000) == 30
    assert warmup_updates(0.03, 10) == 0
    assert warmup_updates(0, 1000) == 0
    assert warmup_updates(1, 1000) == 1
    assert warmup_updates(200, 1000) == 200
    assert warmup_updates(2000, 1000) == 1000


def test_the_constant_rate_warms_up_too():
    assert [constant(update, 3.0, warmup=3) for update in range(5)] == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert constant(0, 3.0) == 3.0

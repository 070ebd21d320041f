"""Learning rates: where they start, peak and end."""

import math
from itertools import pairwise

import pytest

from mpitrain.config import LR_SCHEDULES
from mpitrain.optim.lr import ENDING, SCHEDULES, constant, cosine, inverse_sqrt, linear, warmup_updates


def test_the_rate_rises_in_a_straight_line_and_falls_along_a_cosine_to_zero():
    rates = [cosine(update, 110, 10, peak=2.0) for update in range(110)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == 2.0
    assert rates[60] == pytest.approx(1.0)
    assert rates[35] == pytest.approx(1 + math.cos(math.pi / 4))
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert 0 < rates[-1] < 1e-3
    assert cosine(110, 110, 10, peak=2.0) == cosine(500, 110, 10, peak=2.0) == 0.0


def test_the_straight_line_falls_by_the_same_amount_in_every_update():
    rates = [linear(update, 110, 10, peak=2.0) for update in range(112)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10:111] == pytest.approx([2.0 - 0.02 * i for i in range(101)])
    assert rates[110] == rates[111] == 0.0


def test_the_inverse_root_is_that_of_the_paper():
    """Vaswani et al. 2017, eq. 3: d^-0.5 min(t^-0.5, t warmup^-1.5), whose largest value is at t = warmup."""
    d, warmup = 512, 40
    peak = d**-0.5 * warmup**-0.5
    for t in range(1, 400):
        wanted = d**-0.5 * min(t**-0.5, t * warmup**-1.5)
        assert inverse_sqrt(t - 1, 100, warmup, peak) == pytest.approx(wanted, rel=1e-12), t
    assert [inverse_sqrt(update, 9, 0, 3.0) for update in (0, 3, 8)] == pytest.approx([3.0, 1.5, 1.0])


def test_those_that_end_may_end_above_zero():
    for schedule in (cosine, linear):
        assert schedule(100, 100, 0, peak=1.0, final=0.1) == 0.1
        assert schedule(50, 100, 0, peak=1.0, final=0.1) == pytest.approx(0.55)
        assert schedule(0, 100, 0, peak=1.0, final=0.1) == 1.0
        assert all(a > b for a, b in pairwise(schedule(u, 100, 20, 1.0, 0.3) for u in range(20, 101)))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (5, 5), (2, 1), (50, 7)])
def test_every_update_of_every_run_has_a_rate_above_zero_and_none_above_the_peak(name, total, warmup):
    rates = [SCHEDULES[name](update, total, warmup, 1.5, 0.0) for update in range(total)]
    assert all(0 < rate <= 1.5 for rate in rates)
    assert max(rates) == 1.5
    assert rates[:warmup] == pytest.approx([1.5 * (i + 1) / warmup for i in range(warmup)])


def test_a_warm_up_is_a_fraction_or_a_number_of_updates():
    assert warmup_updates(0.03, 1000) == 30
    assert warmup_updates(0.03, 10) == 0
    assert warmup_updates(0, 1000) == 0
    assert warmup_updates(1, 1000) == 1
    assert warmup_updates(200, 1000) == 200
    assert warmup_updates(2000, 1000) == 1000


def test_the_constant_rate_warms_up_too():
    assert [constant(update, 9, 3, peak=3.0) for update in (0, 1, 2, 3, 8, 100)] == [1.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    assert constant(0, 9, 0, peak=3.0) == 3.0


def test_the_command_line_knows_every_schedule():
    assert set(LR_SCHEDULES) == set(SCHEDULES) >= set(ENDING)

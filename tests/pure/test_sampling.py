"""How the next token is chosen: which tokens can be, how often each is, and that nothing else decides."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpitrain.errors import ConfigError, NumericsError
from mpitrain.models.sampling import Sampling

SCORES = np.array([[2.0, -1.0, 0.5, 2.0, 0.0, 1.5, -3.0]])
P_VALUE = 1e-3


def softmax(scores, temperature=1.0):
    e = np.exp((scores - scores.max()) / temperature)
    return e / e.sum()


def p_value(counts, expected):
    """Of Pearson's chi-square, by Wilson and Hilferty's normal approximation (1931)."""
    drawn = expected > 0
    assert counts[~drawn].sum() == 0, "a token that cannot be drawn was"
    total = counts.sum()
    rare = drawn & (total * expected < 5)  # which the formula is not for: together they are one
    counts, expected = (np.append(x[drawn & ~rare], x[rare].sum()) for x in (counts, expected))
    k = np.count_nonzero(expected) - 1
    if k == 0:
        return 1.0
    chi = ((counts - total * expected) ** 2 / np.maximum(total * expected, 1e-300)).sum()
    z = ((chi / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_temperature_0_takes_the_likeliest_and_of_equals_the_first():
    assert Sampling(0).choose(SCORES, 5).tolist() == [0]
    assert Sampling(0, top_k=1, top_p=0.1, seed=9).choose(-SCORES, 0).tolist() == [6]


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5, 6]),
        ({"temperature": 3.0, "top_k": 3}, [0, 3, 5]),
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 3]),
        ({"top_k": 3}, [0, 3, 5]),
        ({"top_k": 99}, [0, 1, 2, 3, 4, 5, 6]),
        ({"top_p": 1e-9}, [0]),
        ({"top_p": 0.4}, [0, 3]),
        ({"top_p": 0.85}, [0, 3, 5]),
        ({"top_p": 0.9}, [0, 2, 3, 5]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4, 5, 6]),
        ({"top_k": 3, "top_p": 0.7}, [0, 3]),  # of the three that are left 0.77 are the first two
        ({"top_k": 2, "top_p": 0.99}, [0, 3]),
        ({"top_p": 0.85, "temperature": 0.25}, [0, 3]),
    ],
)
def test_which_tokens_are_left(how, left):
    weights = Sampling(**{"temperature": 1.0, **how}).weights(SCORES)
    assert np.flatnonzero(weights[0]).tolist() == left
    t = how.get("temperature", 1.0)
    np.testing.assert_allclose(weights[0, left], np.exp((SCORES[0, left] - 2.0) / t), rtol=1e-14)


def test_the_fewest_come_to_p_for_any_scores():
    draws = np.random.default_rng(0)
    for _ in range(50):
        scores, p = draws.normal(size=(3, 40)) * draws.choice([0.1, 1, 10]), float(draws.uniform(0.01, 1))
        for row, weights in zip(scores, Sampling(1.0, top_p=p).weights(scores), strict=True):
            chances, left = softmax(row), weights > 0
            assert chances[left].min() >= chances[~left].max(initial=0)
            assert chances[left].sum() >= p - 1e-12
            assert chances[left].sum() - chances[left].min() < p


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "seed": 3},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.8, "seed": 1},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.9},
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_should_be(how):
    sampling = Sampling(**how)
    weights = sampling.weights(SCORES)[0]
    along_a_text = np.concatenate([sampling.choose(SCORES, place) for place in range(500)])
    over_texts = sampling.choose(np.repeat(SCORES, 500, axis=0), 7)
    for drawn in (along_a_text, over_texts):
        counts = np.bincount(drawn, minlength=SCORES.shape[1])
        assert p_value(counts, weights / weights.sum()) > P_VALUE, counts
    pairs = np.bincount(along_a_text[:-1] * 7 + along_a_text[1:], minlength=49)
    both = np.outer(weights, weights).ravel() / weights.sum() ** 2
    assert p_value(pairs, both) > P_VALUE, "a token depends on the one before"


def test_a_draw_depends_on_seed_text_and_place_alone():
    scores = np.random.default_rng(1).normal(size=(6, 50))
    together = Sampling(1.0, seed=4).choose(scores, 11)
    assert Sampling(1.0, seed=4).choose(scores, 11).tolist() == together.tolist()
    others = scores.copy()
    others[[0, 1, 3, 4, 5]] += 1.0 + np.arange(50)
    assert Sampling(1.0, seed=4).choose(others, 11)[2] == together[2]
    assert Sampling(1.0, seed=5).choose(scores, 11).tolist() != together.tolist()
    assert Sampling(1.0, seed=4).choose(scores, 12).tolist() != together.tolist()
    same = Sampling(1.0).choose(np.repeat(scores[:1], 6, axis=0), 0)
    assert len(set(same.tolist())) > 1, "two texts from one prompt are not the same"


def test_extreme_scores_are_taken():
    scores = np.array([[1e300, -1e300, 0.0]])
    assert Sampling(1e-300).choose(scores, 0).tolist() == [0]
    assert Sampling(1e-300, top_p=0.5).choose(scores, 0).tolist() == [0]
    assert set(np.concatenate([Sampling(1e308).choose(SCORES, place) for place in range(100)])) == set(range(7))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_scores_that_are_not_finite_are_refused(bad, temperature):
    scores = SCORES.copy()
    scores[0, 3] = bad
    with pytest.raises(NumericsError, match=r"the scores of token 8 are not finite .*\n.*checkpoint"):
        Sampling(temperature).choose(scores, 8)


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ({"temperature": -0.1}, "temperature -0.1: must be 0 or more"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"top_k": 0}, "top_k 0: must be 1 or more"),
        ({"top_p": 0.0}, "top_p 0.0: must be above 0"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"top_p": float("nan")}, "top_p nan"),
    ],
)
def test_numbers_outside_their_range_are_refused(how, wrong):
    with pytest.raises(ConfigError, match=wrong):
        Sampling(**how)

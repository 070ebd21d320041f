"""Initial values of experts and routers: each expert a matrix of its own, and no router entry far out."""

import math

import numpy as np
import pytest

from mpitrain import rng
from mpitrain.nn import init
from mpitrain.spec import Shard, Spec, slab

EXPERTS = (4, 30, 120)  # (E, a, b)
MAKERS = {
    "up": init.fan_in(dim=1),
    "down": init.residual(6, dim=1),
    "router": init.truncated(math.sqrt(0.1 / 30)),
}


def full(shape):
    return tuple(slice(0, length) for length in shape)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("sizes", "states"),
    [
        ({"ep": 4}, {"ep": Shard(0)}),
        ({"ep": 2, "tp": 4}, {"ep": Shard(0), "tp": Shard(2)}),
        ({"ep": 2, "tp": 2}, {"ep": Shard(0), "tp": Shard(1)}),
        ({"ep": 3, "tp": 7}, {"ep": Shard(0), "tp": Shard(1)}),  # uneven: ep 2 holds nothing
    ],
    ids=str,
)
def test_a_rank_draws_its_experts_and_columns_as_they_are_in_the_whole(name, sizes, states):
    whole = MAKERS[name]("w", EXPERTS, full(EXPERTS), 3)
    seen = np.zeros(EXPERTS, int)
    for ep in range(sizes["ep"]):
        for tp in range(sizes.get("tp", 1)):
            here = slab(EXPERTS, Spec(states), {"ep": ep, "tp": tp}, sizes)
            part = MAKERS[name]("w", EXPERTS, here, 3)
            assert part.dtype == np.float64
            assert part.tobytes() == whole[here].tobytes()
            seen[here] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(("name", "std"), [("up", 1 / math.sqrt(30)), ("down", 1 / math.sqrt(30 * 12))])
def test_each_expert_has_the_size_of_a_matrix_of_its_own_and_no_other_experts_values(name, std):
    values = MAKERS[name]("w", EXPERTS, full(EXPERTS), 0)
    for expert in values:
        assert expert.std() == pytest.approx(std, rel=4 / math.sqrt(2 * expert.size))
        assert abs(expert.mean()) < 4 * std / math.sqrt(expert.size)
    correlation = np.corrcoef(values.reshape(len(values), -1)) - np.eye(len(values))
    assert np.abs(correlation).max() < 4 / math.sqrt(values[0].size)


def test_the_first_expert_is_the_matrix_of_that_name():
    """Experts lie in the stream one after the other, so their number changes none of those that were there."""
    several, one = (init.fan_in(1)("w", (count, 30, 120), full((count, 30, 120)), 5) for count in (4, 1))
    dense = init.fan_in(0)("w", (30, 120), full((30, 120)), 5)
    assert np.array_equal(several[0], dense)
    assert np.array_equal(one[0], dense)


def test_a_truncated_normal_is_the_normal_with_what_is_far_out_drawn_again():
    shape = (200, 150)
    plain, near = rng.normal(1, "r", shape, full(shape)), init.truncated(1.0)("r", shape, full(shape), 1)
    far = np.abs(plain) > 2
    assert 0.03 < far.mean() < 0.06  # 4.55 %
    assert np.array_equal(near[~far], plain[~far])
    assert np.abs(near).max() <= 2.0
    assert not np.isclose(near[far], plain[far]).any()


def test_a_truncated_normal_follows_its_density():
    """Mean 0, variance 1 - 2 a phi(a) / P(|z| < a), and deciles of the law itself, within 4 deviations."""
    count = 200_000
    values = np.sort(init.truncated(1.0)("r", (400, 500), full((400, 500)), 7).reshape(-1))
    inside = math.erf(2 / math.sqrt(2))
    variance = 1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / inside
    assert abs(values.mean()) < 4 * math.sqrt(variance / count)
    assert values.var() == pytest.approx(variance, rel=4 * math.sqrt(2 / count))
    law = np.array([0.5 + math.erf(x / math.sqrt(2)) / 2 / inside for x in values[::2000]])
    gap = np.abs(law - np.arange(0, count, 2000) / count).max()
    assert gap < 2.0 / math.sqrt(count)  # Kolmogorov's distance: above it once in 1500 laws


def test_the_size_of_a_truncated_normal_is_that_of_the_normal_before():
    std = math.sqrt(0.1 / 64)
    assert np.allclose(
        init.truncated(std)("r", (64, 8), full((64, 8)), 0), std * init.truncated(1.0)("r", (64, 8), full((64, 8)), 0)
    )

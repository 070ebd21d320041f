"""The numbers of a mixture of experts: capacity as it is written, and settings that do not go together."""

from __future__ import annotations

import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import ConfigError
from mpitrain.routing import DEFAULT_BALANCE, Routing, usual_balance, usual_router


def routing(experts: int, top_k: int = 1, factor: float | None = 1.25) -> Routing:
    return Routing(experts, top_k, "topk", factor)


@pytest.mark.parametrize(
    ("experts", "top_k", "factor", "tokens", "places"),
    [
        (4, 1, 1.0, 100, 25),  # Switch: T/E
        (4, 2, 1.0, 100, 50),  # GShard: 2S/E
        (8, 1, 1.25, 64, 10),
        (3, 1, 1.0, 64, 22),  # 21.3 upward
        (10, 1, 1.1, 100, 11),  # in binary 11.000000000000002
        (10, 1, 1.15, 200, 23),
        (100, 3, 0.7, 1000, 21),
        (7, 1, 0.07, 100, 1),  # exactly 1
        (64, 1, 1.25, 8, 1),  # at least 1
        (8, 1, 0.001, 10, 1),
        (2, 1, 8.0, 10, 10),  # at most T
        (4, 2, 1e300, 10, 10),
        (2, 1, 1.0, 0, 0),  # a row of padding
    ],
)
def test_capacity_is_that_of_the_decimal_number(
    experts: int, top_k: int, factor: float, tokens: int, places: int
) -> None:
    assert routing(experts, top_k, factor).capacity(tokens) == places
    assert routing(experts, top_k, np.float64(factor)).capacity(tokens) == places


@given(
    st.integers(1, 2048),
    st.integers(1, 8),
    st.floats(1e-6, 1e6),
    st.lists(st.integers(0, 2**20), min_size=1, max_size=5),
)
def test_capacities_of_rows_are_exact(experts: int, top_k: int, factor: float, lengths: list[int]) -> None:
    them = routing(experts, min(top_k, experts), factor)
    found = them.capacities(np.array(lengths))
    assert found.dtype == np.int64
    for tokens, places in zip(lengths, found.tolist(), strict=True):
        assert places == them.capacity(tokens)
        exact = Fraction(str(factor)) * them.top_k * tokens / experts
        assert places == min(tokens, max(1, math.ceil(exact)))


def test_without_a_capacity_factor_there_is_room_for_all() -> None:
    assert routing(8, 2, None).capacity(77) == 77
    assert routing(8, 2, None).capacities(np.array([5, 0, 9])).tolist() == [5, 0, 9]


def test_a_capacity_factor_of_all_experts_over_k_has_room_for_all() -> None:
    """T16.6, as far as it is a number: E/k in decimals that may be a little short is rounded up."""
    for experts in range(1, 70):
        for top_k in range(1, min(experts, 9)):
            for tokens in (1, 7, 64, 1023):
                assert routing(experts, top_k, experts / top_k).capacity(tokens) == tokens


def test_numbers_that_were_used_are_still_the_same_numbers() -> None:
    used, fresh = routing(8, 2), routing(8, 2)
    used.capacity(100)
    assert used == fresh
    assert hash(used) == hash(fresh)
    assert dataclasses.asdict(used) == dataclasses.asdict(fresh)
    assert pickle.loads(pickle.dumps(used)) == fresh
    assert dataclasses.replace(used, capacity_factor=2.0).capacity(100) == 50


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"experts": 0}, "--experts 0"),
        ({"experts": 4, "top_k": 5, "router": "topk"}, "--top-k 5 of --experts 4"),
        ({"experts": 4, "top_k": 0}, "--top-k 0"),
        ({"experts": 4, "router": "hash"}, "switch, gshard, topk"),
        ({"experts": 4, "top_k": 2, "router": "switch"}, "its tokens have --top-k 1"),
        ({"experts": 4, "top_k": 1, "router": "gshard"}, "its tokens have --top-k 2"),
        ({"experts": 4, "top_k": 2, "router": "gshard", "renormalize": True}, "sum to 1 anyway"),
        ({"experts": 4, "top_k": 1, "router": "topk", "renormalize": True}, "would learn nothing"),
        ({"experts": 4, "capacity_factor": 0.0}, "--capacity-factor 0.0"),
        ({"experts": 4, "capacity_factor": math.inf}, "--capacity-factor inf"),
        ({"experts": 4, "capacity_factor": math.nan}, "--capacity-factor nan"),
        ({"experts": 4, "jitter": 1.0}, "jitter"),
        ({"experts": 4, "every": 0}, "every"),
        ({"experts": 4, "balance_loss": -0.1}, "balance_loss -0.1"),
        ({"experts": 4, "z_loss": -0.1}, "z_loss -0.1"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Routing(**settings)  # type: ignore[arg-type]


def test_routers_differ_in_what_they_count_and_in_their_weights() -> None:
    switch, gshard = Routing(8), Routing(8, 2, "gshard")
    assert (switch.counted_choices, gshard.counted_choices, routing(8, 3).counted_choices) == (1, 1, 3)
    assert (switch.normalizes, gshard.normalizes, routing(8, 3).normalizes) == (False, True, False)
    assert Routing(8, 3, "topk", renormalize=True).normalizes
    assert [usual_router(k) for k in (1, 2, 3)] == ["switch", "gshard", "topk"]


def test_the_usual_coefficient_presses_alike_with_every_router() -> None:
    """Where tokens are spread evenly switch's loss is 1, gshard's 1/E^2."""
    assert (
        usual_balance("gshard", 8) / 8**2 == usual_balance("switch", 8) == usual_balance("topk", 8) == DEFAULT_BALANCE
    )


def test_every_other_block_has_experts_the_second_first() -> None:
    assert Routing(8, every=1).layers(4) == [0, 1, 2, 3]
    assert Routing(8, every=2).layers(5) == [1, 3]
    assert Routing(8, every=4).layers(3) == []

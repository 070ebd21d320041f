"""Blocks on stages: the slowest stage is as fast as can be, against all partitions there are."""

from __future__ import annotations

import itertools
import random

import pytest

from mpitrain.errors import ConfigError, ShapeError
from mpitrain.events import listen
from mpitrain.models.gpt import GPTConfig
from mpitrain.models.profile import measured_costs
from mpitrain.pipeline.partition import Partition, balance, describe


def all_partitions(blocks: int, stages: int) -> list[tuple[int, ...]]:
    """Every way to cut so many blocks into so many runs."""
    cuts = itertools.combinations_with_replacement(range(blocks + 1), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, blocks))) for cut in cuts]


def stage_costs(layers: tuple[int, ...], costs: list[int], first: int = 0, last: int = 0) -> list[int]:
    """The cost of each stage."""
    cost = [sum(costs[block] for block in Partition(layers).range(stage)) for stage in range(len(layers))]
    cost[0] += first
    cost[-1] += last
    return cost


def rank(layers: tuple[int, ...], costs: list[int], first: int, last: int) -> tuple:
    """The order in which `balance` prefers partitions, as its docstring tells it."""
    cost = stage_costs(layers, costs, first, last)
    ties = layers[-1], layers[0], tuple(-size for size in layers[1:])
    return max(cost), sum(c**2 for c in cost), sum(size**2 for size in layers), ties


def test_balance_finds_the_best_of_all_partitions():
    chance = random.Random(0)
    for _ in range(300):
        blocks, stages = chance.randint(0, 7), chance.randint(1, 5)
        largest = chance.choice([0, 1, 3, 20])
        costs = [chance.randint(0, largest) for _ in range(blocks)]
        first, last = chance.choice([(0, 0), (0, 3), (2, 5), (30, 0)])
        best = min(all_partitions(blocks, stages), key=lambda layers: rank(layers, costs, first, last))
        assert balance(costs, stages, first, last).layers == best, (costs, stages, first, last)


def test_equal_costs_give_sizes_that_differ_by_at_most_one():
    for blocks, stages in itertools.product(range(20), range(1, 9)):
        for cost in (0.0, 1.0, 0.1):  # 0.1 + 0.1 + 0.1 is no float's 0.3: sums are exact
            layers = balance([cost] * blocks, stages).layers
            assert sum(layers) == blocks
            assert max(layers) - min(layers) <= 1


def test_extras_stand_in_the_middle_and_empty_stages_at_the_ends():
    cases = {(7, 3): (2, 3, 2), (8, 3): (3, 3, 2), (5, 4): (1, 2, 1, 1), (1, 3): (0, 1, 0), (2, 4): (0, 1, 1, 0)}
    cases |= {(1, 2): (1, 0), (0, 2): (0, 0), (8, 4): (2, 2, 2, 2), (3, 1): (3,)}
    for (blocks, stages), layers in cases.items():
        assert balance([1] * blocks, stages).layers == layers


def test_embedding_and_head_weigh_on_the_ends():
    assert balance([1] * 7, 3, last=2).layers == (3, 3, 1)
    assert balance([1] * 7, 3, first=2, last=2).layers == (2, 3, 2)
    assert balance([1] * 8, 3, first=1, last=2).layers == (3, 3, 2)
    assert balance([1] * 4, 3, last=9).layers == (2, 2, 0)  # the head alone is the most expensive stage
    assert balance([5, 1, 1, 1], 2).layers == (1, 3)


def test_a_hundred_layers_on_as_many_stages_take_no_time():
    chance = random.Random(1)
    costs = [chance.random() for _ in range(100)]
    assert sum(balance(costs, 64, 3.0, 5.0).layers) == 100
    assert balance([1.0 + 2**-50, 1.0, 1.0], 2).layers == (1, 2)  # no sum is rounded away
    assert balance([1e-300, 1e300, 1e-300], 2).layers == (2, 1)


def test_what_is_no_cost_is_refused_by_name():
    with pytest.raises(ConfigError, match="at least 1"):
        balance([1.0], 0)
    with pytest.raises(ConfigError, match="block 1 is nan"):
        balance([1.0, float("nan")], 2)
    with pytest.raises(ConfigError, match="the head is -1"):
        balance([1.0], 2, last=-1.0)


def test_a_partition_knows_its_blocks_and_its_ends():
    partition = Partition((3, 0, 2))
    assert (partition.stages, partition.blocks) == (3, 5)
    assert [list(partition.range(stage)) for stage in range(3)] == [[0, 1, 2], [], [3, 4]]
    assert [partition.is_first(stage) for stage in range(3)] == [True, False, False]
    assert [partition.is_last(stage) for stage in range(3)] == [False, False, True]


def test_partitions_that_do_not_fit_are_refused_with_the_way_out():
    for layers in ((), (2, -1)):
        with pytest.raises(ConfigError, match="3,2,3"):
            Partition(layers)
    with pytest.raises(ShapeError, match=r"(?s)8 blocks on 3 stages.*12 blocks.*4 stages.*Give 4 numbers"):
        Partition((3, 2, 3)).check_fits(12, 4)
    Partition((3, 2, 3)).check_fits(8, 3)


def test_one_line_describes_a_partition():
    assert describe(Partition((2, 3, 2))) == "embedding + 2 | 3 | 2 + head"
    assert describe(Partition((0, 1, 0))) == "embedding | 1 | head"
    assert describe(Partition((3,))) == "embedding + 3 + head"
    assert describe(Partition((0,))) == "embedding + head"
    assert describe(Partition((1,) + (2,) * 30 + (1,))) == "embedding + 1 | 2 (x30) | 1 + head"


def test_measured_costs_tell_a_large_head_and_are_nobodys_business():
    sizes = {vocab: GPTConfig(vocab=vocab, width=16, heads=2, seq_len=8, dropout=0.1) for vocab in (16, 16_384)}
    told = []
    with listen(told.append):
        small, large = (measured_costs(each, rows=2) for each in sizes.values())
    assert min(small.embedding, *small.blocks, small.head) > 0
    assert len(large.blocks) == 2
    assert large.head > 4 * small.head
    assert told == []

"""The order of the samples: every one once an epoch, the same for every layout, and found again after a resume."""

import math
from collections import Counter

import numpy as np
import pytest

from mpitrain.data.order import Order, permutation
from mpitrain.errors import ConfigError


def epoch_order(seed, epoch, n):
    return permutation(seed, epoch, n, np.arange(n))


def read(order, steps, size=1):
    """The sample ids of the real rows, step by step, the ranks' shares put together in order of place."""
    ids = []
    for step in steps:
        shares = [order.share(step, rank, size) for rank in range(size)]
        rows = sorted((int(p), int(i)) for share in shares for p, i in zip(share.places, share.samples, strict=True))
        ids.append([sample for _, sample in rows if sample >= 0])
    return ids


@pytest.mark.parametrize("n", [*range(1, 40), 97, 128, 1000, 4096, 65_537])
def test_an_epoch_holds_every_sample_once(n):
    for seed, epoch in ((0, 0), (0, 1), (9, 0)):
        assert np.array_equal(np.sort(epoch_order(seed, epoch, n)), np.arange(n))


def test_the_order_is_the_same_in_any_portion():
    whole = epoch_order(3, 2, 1000)
    for indices in ([0], [999], [5, 5, 7], list(range(100, 200)), []):
        assert permutation(3, 2, 1000, np.array(indices, np.int64)).tolist() == whole[indices].tolist()
    assert np.array_equal(permutation(3, 2, 1000, np.arange(1000).reshape(10, 100)), whole.reshape(10, 100))


def test_a_huge_epoch_costs_no_memory_and_starts_anywhere():
    n = 10**12
    indices = np.array([0, 1, 2, n // 2, n - 1])
    samples = permutation(0, 0, n, indices)
    assert np.unique(samples).size == 5
    assert samples.min() >= 0
    assert samples.max() < n


def test_orders_of_few_samples_are_equally_likely():
    for n in (2, 3, 4):
        counts = Counter(tuple(epoch_order(seed, 0, n).tolist()) for seed in range(1200))
        kinds = math.factorial(n)
        expected = 1200 / kinds
        chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
        chi_square += (kinds - len(counts)) * expected
        assert chi_square < kinds - 1 + 5 * math.sqrt(2 * kinds)


def test_the_shuffle_leaves_no_trace_of_the_old_order():
    n = 20_000
    for epoch in range(3):
        order = epoch_order(1, epoch, n).astype(float)
        for lag in (1, 2, 141, 142, 143):  # 142 is the width of the grid
            correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
            assert abs(correlation) < 5 / math.sqrt(n), lag
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 5 / math.sqrt(n)
        steps = np.diff(order) % n
        assert np.unique(steps).size > 0.6 * n  # 1 - 1/e of random steps are different
        assert np.count_nonzero(order == np.arange(n)) < 10  # one fixed point on average


def test_epochs_and_seeds_are_shuffled_independently():
    n = 20_000
    base = epoch_order(1, 0, n)
    for other in (epoch_order(1, 1, n), epoch_order(2, 0, n)):
        assert np.count_nonzero(base == other) < 10
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / math.sqrt(n)


@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_ranks_together_read_every_sample_once_an_epoch(size):
    """C26: 1000 samples over 3 epochs; the union is everything, no index twice, the orders differ."""
    order = Order(1000, 24, seed=5)
    epochs = []
    for epoch in range(3):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        ids = [i for batch in read(order, steps, size) for i in batch]
        assert sorted(ids) == list(range(1000))
        assert all(order.share(step).epoch == epoch for step in steps)
        epochs.append(ids)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_layout_reads_the_same_batches(size):
    order = Order(100, 10, seed=0)
    assert read(order, range(25), size) == read(order, range(25))


def test_a_rank_takes_every_d_th_place():
    order = Order(1000, 16, seed=0)
    whole = order.share(7)
    for rank in range(4):
        share = order.share(7, rank, 4)
        assert share.places.tolist() == [rank, rank + 4, rank + 8, rank + 12]
        assert share.samples.tolist() == whole.samples[rank::4].tolist()


@pytest.mark.parametrize("size", [1, 4])
def test_an_uneven_last_batch_is_padded_alike_on_all_ranks(size):
    """C22: 866 samples, 4 ranks with 8 rows each: all make 28 steps; 866 used + 30 padded = 28 x 32."""
    order = Order(866, 32, seed=1)
    assert order.steps_per_epoch == 28
    assert order.padded_per_epoch == 30
    assert "866 samples" in str(order)
    assert "padded by 30 rows" in str(order)
    shares = [[order.share(step, rank, size) for step in range(28)] for rank in range(size)]
    assert {len(s.samples) for ranks in shares for s in ranks} == {32 // size}
    used = sum(int((s.samples >= 0).sum()) for ranks in shares for s in ranks)
    padded = sum(int((s.samples < 0).sum()) for ranks in shares for s in ranks)
    assert (used, padded) == (866, 30)
    assert "padded" not in str(Order(64, 32, seed=1))


def test_a_batch_that_does_not_divide_over_the_ranks_is_padded():
    order = Order(1000, 10, seed=0)
    shares = [order.share(2, rank, 4) for rank in range(4)]
    assert [len(s.samples) for s in shares] == [3, 3, 3, 3]
    assert [int((s.samples >= 0).sum()) for s in shares] == [3, 3, 2, 2]
    assert read(order, [2], 4) == read(order, [2])


@pytest.mark.parametrize("size", [1, 5])
def test_a_resumed_run_reads_on_where_it_stopped(size):
    """C71: 3 epochs of 40 batches, stopped at batch 57, resumed with another number of ranks."""
    uninterrupted = read(Order(400, 10, seed=2), range(120))
    resumed = read(Order(400, 10, seed=2), range(57)) + read(Order(400, 10, seed=2), range(57, 120), size)
    assert resumed == uninterrupted
    assert Order(400, 10, seed=2).locate(57) == (1, 170)
    assert read(Order(400, 10, seed=2), [57]) != read(Order(400, 10, seed=2), [17])


def test_a_batch_larger_than_the_epoch_is_one_padded_step():
    order = Order(5, 8, seed=0)
    assert order.steps_per_epoch == 1
    assert sorted(read(order, [3])[0]) == [0, 1, 2, 3, 4]


def test_an_empty_batch_is_refused():
    with pytest.raises(ConfigError, match="--batch 0: the global batch needs at least one sequence"):
        Order(10, 0, seed=0)

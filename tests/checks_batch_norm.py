"""Batch norm over the ranks of an axis is that of one rank with the whole batch: checks that any world can run."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.autograd import Tape, Tensor
from mpitrain.comm.world import World
from mpitrain.parallel.batch_norm import BatchNorm, BatchStatistics

CHANNELS, ROWS = 3, 10
DRAWS = np.random.default_rng(4)
X = DRAWS.standard_normal((ROWS, 2, 3, CHANNELS)) * [1.0, 3.0, 0.2] + [0.0, 5.0, -1.0]
GRAD = DRAWS.standard_normal(X.shape)
COUNTS = np.arange(ROWS) != 6  # one row is padding
WEIGHT, BIAS = DRAWS.standard_normal((2, CHANNELS))


class Here:
    """A layout of one rank, for a module that is no model."""

    coords = dict.fromkeys(("pp", "edp", "ep", "cp", "tp"), 0)
    sizes = dict.fromkeys(coords, 1)


def layer(axis: Any, dtype: Any = np.float64, **how: Any) -> BatchNorm:
    """One with the weights above."""
    norm = BatchNorm("norm", CHANNELS, axis, **how)
    norm.materialize(Here, dtype=dtype)
    norm.weight.data[...], norm.bias.data[...] = WEIGHT, BIAS
    norm.start_step()
    return norm


def by_hand(x: np.ndarray, counts: np.ndarray, grad: np.ndarray, eps: float = 1e-5) -> dict[str, np.ndarray]:
    """Everything by the formulas of the paper, of the rows that count."""
    seen = x[counts].reshape(-1, CHANNELS)
    mean, n = seen.mean(0), len(seen)
    variance = ((seen - mean) ** 2).mean(0)
    rstd = 1 / np.sqrt(variance + eps)
    normal = (x - mean) * rstd
    g = np.where(counts[:, None, None, None], grad, 0.0)
    total, along = g.sum((0, 1, 2)), (g * normal).sum((0, 1, 2))
    back = WEIGHT * rstd * (g - (total + normal * along) / n)
    return {
        "y": normal * WEIGHT + BIAS,
        "dx": np.where(counts[:, None, None, None], back, 0.0),
        "weight": along,
        "bias": total,
        "mean": 0.1 * mean,
        "variance": 0.9 + 0.1 * variance * n / (n - 1),
    }


def is_the_whole_batchs(world: World) -> None:
    """Forward, backward, running statistics; with a row of padding, more of which ranks may have, and ranks of none."""
    for dealt in (np.arange(ROWS) % world.size, np.minimum(np.arange(ROWS) // 4, world.size - 1)):
        mine = dealt == world.rank
        for counts in (np.ones(ROWS, bool), COUNTS):
            norm, x = layer(world), Tensor(X[mine], requires_grad=True)
            grad = np.where(counts[:, None, None, None], GRAD, 0.0)
            with Tape() as tape:
                y = norm(x, None if counts.all() else counts[mine])
            tape.run_backward([(y, grad[mine])])
            wanted = by_hand(X, counts, GRAD)
            found = {
                "y": y.data,
                "dx": tape.grads[x],
                "weight": world.all_reduce(norm.weight.grad),
                "bias": world.all_reduce(norm.bias.grad),
                "mean": norm.mean.array,
                "variance": norm.variance.array,
            }
            for name, array in found.items():
                expected = wanted[name][mine] if name in ("y", "dx") else wanted[name]
                np.testing.assert_allclose(array, expected, rtol=1e-11, atol=1e-12, err_msg=name)
            for kept in (norm.mean.array, norm.variance.array):  # to the last bit, though sums are of any order
                assert len({each.tobytes() for each in world.all_gather(kept.reshape(1, -1))}) == 1


def backward_is_the_jacobian_of_forward(world: World) -> None:
    """sum over ranks of <g, J v> and of <J* g, v>: J v by differences, for the statistics of rows on all ranks."""
    draws = np.random.default_rng(world.rank)
    x, v = draws.standard_normal((2, 4, 3, CHANNELS))
    g = np.random.default_rng(99).standard_normal((world.size, 2, CHANNELS))[world.rank]  # each uses its own copy
    rows = None if world.rank % 2 else np.array([True, False, True, True])

    def forward(x: np.ndarray) -> np.ndarray:
        return BatchStatistics.forward(x, rows, axis=world)[0][0]

    step = 1e-5
    jv = (forward(x + step * v) - forward(x - step * v)) / (2 * step)
    _, saved = BatchStatistics.forward(x, rows, axis=world)
    back, _ = BatchStatistics.backward((g, None), *saved, wanted=(True, False), axis=world)
    left, right = world.all_reduce(np.array([(g * jv).sum(), (back * v).sum()]))
    assert abs(left - right) <= 1e-8 * max(1.0, abs(left)), (left, right)


CHECKS = [is_the_whole_batchs, backward_is_the_jacobian_of_forward]

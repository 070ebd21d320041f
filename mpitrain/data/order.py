"""Which sample stands where: an order that is a function, not a list.

    step  ->  (epoch, first index in the epoch)        batches of a run, uneven last batch padded
    index ->  sample = permutation(seed, epoch)[index] the shuffled order of that epoch
    rank i of d takes the places i, i + d, i + 2d, ... of the step's global batch

All three are pure, so every rank knows every other rank's samples without a message, another layout reads the same
batches, and a resumed run needs nothing but its step.

The shuffle is a keyed bijection of 0 .. n-1 that is evaluated where it is asked: a Feistel network over a grid of a x b
>= n cells, whose two coordinates are in turn shifted by a hash of the other, applied again to the few results that lie
outside 0 .. n-1 (cycle walking; Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9).  With a, b about sqrt(n) fewer
than one index in sqrt(n) walks.  It holds no memory and starts at once on any step; sorting hashes instead would take
80 MB and a second a rank and epoch for 10^7 samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.rng import splitmix64, stream_key

# Of two half-rounds each.  Two hide the structure of a large grid (Luby and Rackoff 1988, doi:10.1137/0217022); with
# six the orders of as few as 3 to 6 samples are about equally likely, too.
_ROUNDS = 6


def permutation(seed: int, epoch: int, n: int, indices: np.ndarray) -> np.ndarray:
    """The samples at `indices` of one epoch's order.

    Args:
        seed: the run's seed.
        epoch: number of the epoch; each has an order of its own.
        n: number of samples.
        indices: int64, any shape, each in [0, n).

    Returns:
        int64 of the same shape; over all indices every sample appears exactly once.

    Cost: about 0.3 ms for a batch of 16, then 0.2 us an index.
    """
    assert n > 0, n
    flat = np.asarray(indices, np.int64).reshape(-1)
    assert flat.size == 0 or (flat.min() >= 0 and flat.max() < n), (flat.min(), flat.max(), n)
    height = math.isqrt(n - 1) + 1
    width = -(-n // height)
    keys = [stream_key(seed, "data.order", epoch, half) for half in range(2 * _ROUNDS)]
    samples = _shuffle_cells(flat, height, width, keys)
    while (outside := np.flatnonzero(samples >= n)).size:
        samples[outside] = _shuffle_cells(samples[outside], height, width, keys)
    return samples.reshape(np.shape(indices))


def _shuffle_cells(cells: np.ndarray, height: int, width: int, keys: list[np.uint64]) -> np.ndarray:
    """A bijection of the cells of a height x width grid: each half-round is undone by subtracting the same hash."""
    one = np.uint64(1)
    row, column = (part.astype(np.uint64) for part in np.divmod(cells, width))
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        row = (row + (splitmix64(even ^ column) >> one)) % np.uint64(height)  # >> 1: the sum must not wrap
        column = (column + (splitmix64(odd ^ row) >> one)) % np.uint64(width)
    samples: np.ndarray = (row * np.uint64(width) + column).astype(np.int64)
    return samples


class Share(NamedTuple):
    """One rank's part of a step's global batch.

    Attributes:
        epoch: the epoch that the whole batch belongs to.
        places: int64 (rows,) places in the global batch.
        samples: int64 (rows,) the samples that stand there; -1 is a padded row, which has no sample and no weight.
    """

    epoch: int
    places: np.ndarray
    samples: np.ndarray


@dataclass(frozen=True)
class Order:
    """The batches of a run.

    A batch never crosses the end of an epoch: the last one of an epoch is padded with rows of weight 0, so all ranks
    make the same number of steps, every sample is used exactly once an epoch, and used + padded fills the batches.

    Attributes:
        num_samples: samples of an epoch.
        batch: rows of the global batch, over all ranks and micro-batches.
        seed: the run's seed.

    Raises:
        ConfigError: the batch holds no row.
    """

    num_samples: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        assert self.num_samples > 0, self.num_samples
        if self.batch < 1:
            raise ConfigError(f"--batch {self.batch}: the global batch needs at least one sequence.")

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, the padded one included."""
        return -(-self.num_samples // self.batch)

    @property
    def padded_per_epoch(self) -> int:
        """Rows of weight 0 in the last batch of an epoch."""
        return self.steps_per_epoch * self.batch - self.num_samples

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch of a step (counted from 0), and the index in the epoch of its first row."""
        epoch, batch_in_epoch = divmod(step, self.steps_per_epoch)
        return epoch, batch_in_epoch * self.batch

    def share(self, step: int, rank: int = 0, size: int = 1) -> Share:
        """What rank `rank` of `size` reads in a step.

        Args:
            step: counted from 0.
            rank: this rank's coordinate along the axis over which the batch is divided.
            size: number of ranks on it.

        Returns:
            ceil(batch / size) rows on every rank; places beyond the batch are padded rows.
        """
        assert 0 <= rank < size, (rank, size)
        epoch, first = self.locate(step)
        places = np.arange(-(-self.batch // size), dtype=np.int64) * size + rank
        index = first + places
        real = (places < self.batch) & (index < self.num_samples)
        samples = np.full(places.shape, -1, np.int64)
        samples[real] = permutation(self.seed, epoch, self.num_samples, index[real])
        return Share(epoch, places, samples)

    def __str__(self) -> str:
        padded = f", the last one padded by {self.padded_per_epoch} rows of weight 0" if self.padded_per_epoch else ""
        return f"{self.num_samples:,} samples an epoch in {self.steps_per_epoch:,} batches of {self.batch}{padded}"

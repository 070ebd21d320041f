"""Batches of labelled images, in an order that every rank can compute.

The test images are those that are never trained on.  A batch is a pure function of (seed, step, rank, size), as with
`mpitrain.data.tokens`: nothing is kept between steps, and another layout reads the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mpitrain.autograd.ops import IGNORE
from mpitrain.backend import Array, array_module, to_device
from mpitrain.data.order import Order
from mpitrain.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class ImageBatch:
    """Some rows of a step's global batch, on the host until `to` brings them to a device.

    Attributes:
        inputs: (b, h, w, c) images; zeros in padded rows.
        targets: int64 (b,) class numbers; IGNORE in padded rows.
        step: the step, counted in attempts (of test images: the number of the batch).
        epoch: the epoch, counted from 0.
        training: False for test images, of which no statistics are taken.
    """

    inputs: Array
    targets: Array
    step: int
    epoch: int = 0
    training: bool = True

    @property
    def count(self) -> int:
        """Number of rows that have weight."""
        return int(array_module(self.targets).count_nonzero(self.targets != IGNORE))

    def to(self, like: Array) -> ImageBatch:
        """The same rows where `like` lives: this batch itself on the host, else a copy of it on the device."""
        if array_module(like) is np:
            return self
        return replace(self, inputs=to_device(self.inputs, like), targets=to_device(self.targets, like))

    def split(self, num_microbatches: int) -> list[ImageBatch]:
        """Micro-batches of equal numbers of consecutive rows (views).

        Raises:
            ConfigError: the rows do not divide.
        """
        rows = len(self.targets)
        if num_microbatches < 1 or rows % num_microbatches:
            raise ConfigError(
                f"--microbatches {num_microbatches}: {rows} images a rank do not divide into as many equal parts."
            )
        size = rows // num_microbatches
        parts = (slice(start, start + size) for start in range(0, rows, size))
        return [replace(self, inputs=self.inputs[part], targets=self.targets[part]) for part in parts]


class Images:
    """Images with their classes: some to learn from, others to test with.

    Args:
        images: (n, h, w, c) to learn from.
        labels: integers (n,), their classes.
        test_images, test_labels: likewise, to test with.
        seed: the run's seed; decides the order.

    Raises:
        ShapeError: images are not (n, h, w, c), as many as labels, or those to test with of another size.
    """

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, test_images: np.ndarray, test_labels: np.ndarray, seed: int = 0
    ) -> None:
        for name, some, classes in (("images", images, labels), ("test_images", test_images, test_labels)):
            if some.ndim != 4:
                raise ShapeError(
                    f"{name} of shape {some.shape}: wanted are images (n, h, w, c), number, height, width, channels.\n"
                    "Gray ones have c = 1; rows of d numbers are images (n, 1, 1, d): reshape(-1, 1, 1, d)"
                )
            if classes.shape != (len(some),):
                raise ShapeError(f"{len(some)} {name} with labels of shape {classes.shape}: one number an image, (n,)")
        if not len(images):
            raise ShapeError("no images to learn from: images (n, h, w, c) has n = 0")
        if images.shape[1:] != test_images.shape[1:]:
            raise ShapeError(
                f"images of shape {images.shape} and test_images of shape {test_images.shape}: height, width and"
                " channels must be the same"
            )
        self.images, self.labels = images, labels
        self.test_images, self.test_labels = test_images, test_labels
        self.seed = seed

    @property
    def shape(self) -> tuple[int, int, int]:
        """(h, w, c) of an image."""
        height, width, channels = self.images.shape[1:]
        return height, width, channels

    def order(self, batch: int) -> Order:
        """The order in which batches of so many rows, over all ranks and micro-batches, are read."""
        return Order(len(self.images), batch, self.seed)

    def batch_at(self, step: int, batch: int, rank: int = 0, size: int = 1) -> ImageBatch:
        """What rank `rank` of `size` reads in a step: ceil(batch / size) rows.

        Args:
            step: counted from 0.
            batch: rows of the global batch.
            rank: coordinate along the axis over which the batch is divided.
            size: number of ranks on it.
        """
        share = self.order(batch).share(step, rank, size)
        return _batch(self.images, self.labels, share.samples, step, share.epoch)

    def batches(
        self, batch: int, rank: int = 0, size: int = 1, start_step: int = 0, stop_step: int | None = None
    ) -> Iterator[ImageBatch]:
        """`batch_at` for the steps from `start_step` on, up to but not including `stop_step` (None: without end)."""
        step = start_step
        while stop_step is None or step < stop_step:
            yield self.batch_at(step, batch, rank, size)
            step += 1

    def test(self, batch: int, rank: int = 0, size: int = 1) -> Iterator[ImageBatch]:
        """This rank's part of all test images, once, in their order; every rank gets as many batches and rows."""
        for number, first in enumerate(range(0, len(self.test_images), batch)):
            places = np.arange(-(-batch // size), dtype=np.int64) * size + rank
            real = (places < batch) & (first + places < len(self.test_images))
            test = _batch(self.test_images, self.test_labels, np.where(real, first + places, -1), number)
            yield replace(test, training=False)


def _batch(images: np.ndarray, labels: np.ndarray, samples: np.ndarray, step: int, epoch: int = 0) -> ImageBatch:
    """Rows by number; padded ones where it is negative."""
    padded = samples < 0
    inputs, targets = images[samples], labels[samples].astype(np.int64)
    inputs[padded], targets[padded] = 0, IGNORE
    return ImageBatch(inputs, targets, step, epoch)

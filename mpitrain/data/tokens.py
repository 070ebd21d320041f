"""Batches of next-token prediction: windows of a corpus, one after the other, in an order that every rank can compute.

    tokens   t0 t1 t2 t3 t4 t5 t6 t7 ...        seq_len 3, shift 1
    sample 0    [t1 t2 t3]                      targets [t2 t3 t4]
    sample 1             [t4 t5 t6]             targets [t5 t6 t7]

Samples of one epoch do not overlap.  Each epoch shifts all windows by an offset of its own, so later epochs cut the
text elsewhere; the few tokens that an epoch leaves at both ends are others each time.  A batch is a pure function of
(seed, step, rank, size): nothing is kept between steps, and a resumed run goes on from its step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from mpitrain.autograd.ops import IGNORE
from mpitrain.backend import Array, array_module, to_device, to_host
from mpitrain.data.corpus import Corpus
from mpitrain.data.order import Order
from mpitrain.errors import ConfigError, DataError, ShapeError
from mpitrain.rng import Draw, splitmix64, stream_key

VALIDATION_TARGETS = 131_072


@dataclass(frozen=True)
class Batch:
    """Some rows of a step's global batch, on the host until `to` brings them to a device.

    Attributes:
        inputs: int64 (b, s) token ids; zeros in padded rows.
        targets: int64 (b, s) the next token of each input; IGNORE where there is none.
        places: int64 (b,) the rows' places in the global batch.
        positions: int64 (s,) global positions in the sequence.
        step: the step, counted in attempts (for validation: the number of the batch).
        epoch: the epoch, counted from 0.
        training: False for validation, which draws no noise.
        documents: int (b, whole sequence) number of each token's document, -1 for padding, where several share a row:
            a token attends to its own document only.  Whole also where the rest is a part of the sequence.
        lengths: int64 (b,) how many tokens of each whole sequence are no padding, on the host; None, which only a batch
            of whole sequences may leave it: as `row_lengths` finds them.
    """

    inputs: Array
    targets: Array
    places: Array
    positions: Array
    step: int
    epoch: int = 0
    training: bool = True
    documents: Array | None = None
    lengths: Array | None = None

    @property
    def row_lengths(self) -> Array:
        """`lengths`, or where they are not given those of the documents, or else all where there is any target."""
        if self.lengths is not None:
            return self.lengths
        if self.documents is not None:
            return (to_host(self.documents) >= 0).sum(axis=1).astype(np.int64)
        return np.where((to_host(self.targets) != IGNORE).any(axis=1), self.targets.shape[1], 0).astype(np.int64)

    @property
    def rows(self) -> int:
        """Number of sequences that are no padding."""
        return int(np.count_nonzero(self.row_lengths))

    @property
    def real(self) -> Array | None:
        """Bool (b, s), on the host: which of the tokens here are no padding; None: all."""
        positions = to_host(self.positions)
        if self.documents is not None:
            inside = to_host(self.documents)[:, positions] >= 0
        else:
            inside = positions[None, :] < self.row_lengths[:, None]
        return None if bool(inside.all()) else inside

    @property
    def count(self) -> int:
        """Number of targets that have weight."""
        return int(array_module(self.targets).count_nonzero(self.targets != IGNORE))

    def to(self, like: Array) -> Batch:
        """The same rows where `like` lives: this batch itself on the host, else a copy of it on the device."""
        if array_module(like) is np:
            return self
        arrays = {name: to_device(getattr(self, name), like) for name in ("inputs", "targets", "places", "positions")}
        documents = None if self.documents is None else to_device(self.documents, like)
        return replace(self, **arrays, documents=documents)

    def part(self, positions: Array | None) -> Batch:
        """The tokens at these positions of every row: what one rank of a context-parallel axis holds.

        Targets stay with their inputs, since they were shifted before.

        Args:
            positions: int64 (n,), ascending; None: all, this batch itself.

        Raises:
            ShapeError: they are not ascending places of this batch, as those of a batch that was cut before.
        """
        if positions is None:
            return self
        places = np.asarray(positions)
        _check_places(places, self.inputs.shape[1])
        inputs, targets = (np.ascontiguousarray(tokens[:, places]) for tokens in (self.inputs, self.targets))
        positions = self.positions[places]
        return replace(self, inputs=inputs, targets=targets, positions=positions, lengths=self.row_lengths)

    def slices(self, lengths: Sequence[int]) -> list[Batch]:
        """Consecutive slices of every sequence, which go through a pipeline one after the other.

        Targets stay with their inputs, and positions are those in the whole sequence.

        Args:
            lengths: tokens of each, at least 1, together all of them.

        Raises:
            ShapeError: they are not.
        """
        length = self.inputs.shape[1]
        if sum(lengths) != length or min(lengths, default=0) < 1:
            raise ShapeError(
                f"slices of {', '.join(map(str, lengths)) or 'no'} tokens, together {sum(lengths)}: wanted are slices"
                f" of at least 1 token whose sum is the sequence, {length}."
            )
        if len(lengths) == 1:
            return [self]
        return [
            replace(
                self,
                inputs=np.ascontiguousarray(self.inputs[:, start:stop]),
                targets=np.ascontiguousarray(self.targets[:, start:stop]),
                positions=self.positions[start:stop],
                lengths=self.row_lengths,
            )
            for start, stop in pairwise(accumulate(lengths, initial=0))
        ]

    def draw(self, seed: int) -> Draw | None:
        """What this batch's random numbers depend on; None for validation: no dropout, no jitter."""
        return Draw(seed, self.step, self.places, self.positions) if self.training else None

    def split(self, num_microbatches: int) -> list[Batch]:
        """Micro-batches of equal numbers of consecutive rows (views).

        Raises:
            ConfigError: the rows do not divide.
        """
        rows = len(self.places)
        if num_microbatches < 1 or rows % num_microbatches:
            raise ConfigError(
                f"--microbatches {num_microbatches}: {rows} sequences a rank do not divide into as many equal parts."
            )
        size = rows // num_microbatches
        parts = (slice(start, start + size) for start in range(0, rows, size))
        return [
            replace(
                self,
                inputs=self.inputs[part],
                targets=self.targets[part],
                places=self.places[part],
                documents=None if self.documents is None else self.documents[part],
                lengths=None if self.lengths is None else self.lengths[part],
            )
            for part in parts
        ]


class Tokens:
    """The samples of a corpus at one sequence length.

    Args:
        corpus: training and validation tokens.
        seq_len: inputs of a sample, s; its window holds one token more.
        seed: the run's seed; decides order and shifts.

    Attributes:
        num_samples: samples of an epoch, the same in every epoch.

    Raises:
        ConfigError: seq_len is below 1.
        DataError: the corpus is too short for one sample and one validation window.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int = 0) -> None:
        if seq_len < 1:
            raise ConfigError(f"--seq-len {seq_len}: a sequence has at least one token.")
        for part, name in ((corpus.train, "training"), (corpus.val, "validation")):
            if len(part) <= seq_len:
                raise DataError(
                    f"{corpus.source} is too short: {len(corpus.train):,} {corpus.kind} for training and "
                    f"{len(corpus.val):,} for validation, but --seq-len {seq_len} needs {seq_len + 1:,} for {name}.  "
                    f"Give a longer text or a shorter --seq-len."
                )
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed
        # One window is given up for the freedom to shift, where there is more than one.
        self.num_samples = max(1, len(corpus.train) // seq_len - 1)

    @property
    def vocab_size(self) -> int:
        """Number of different token ids."""
        return self.corpus.vocab_size

    def order(self, batch: int) -> Order:
        """Order, epochs and padding for a global batch of so many rows."""
        return Order(self.num_samples, batch, self.seed)

    def shift(self, epoch: int) -> int:
        """Where the first window of an epoch begins."""
        slack = len(self.corpus.train) - self.num_samples * self.seq_len  # one is needed by the last target
        return int(splitmix64(int(stream_key(self.seed, "data.shift", epoch)))) % slack

    def batch_at(self, step: int, batch: int, rank: int = 0, size: int = 1) -> Batch:
        """Rank `rank`'s rows of a step's global batch.

        Args:
            step: counted from 0.
            batch: rows of the global batch.
            rank: coordinate along the axis over which the batch is divided.
            size: number of ranks on it; each gets ceil(batch / size) rows, padded rows where there are no more.

        Raises:
            DataError: a token is not below the vocabulary that was declared.
        """
        share = self.order(batch).share(step, rank, size)
        starts = np.where(share.samples < 0, -1, share.samples * self.seq_len + self.shift(share.epoch))
        inputs, targets = self._windows(self.corpus.train, starts)
        return Batch(inputs, targets, share.places, self._positions(), step, share.epoch)

    def batches(
        self,
        batch: int,
        rank: int = 0,
        size: int = 1,
        start_step: int = 0,
        stop_step: int | None = None,
        positions: Array | None = None,
    ) -> Iterator[Batch]:
        """`batch_at` for the steps from `start_step` on, up to but not including `stop_step` (None: without end).

        Args:
            positions: the part of each sequence that this rank holds (`GPT.positions_here`); None: all of it.
        """
        step = start_step
        while stop_step is None or step < stop_step:
            yield self.batch_at(step, batch, rank, size).part(positions)
            step += 1

    def num_validation_targets(self) -> int:
        """Targets over which the validation loss is the mean: 131,072, fewer where the text is shorter."""
        return min(VALIDATION_TARGETS, (len(self.corpus.val) - 1) // self.seq_len * self.seq_len)

    def num_validation_batches(self, batch: int) -> int:
        """Global batches of so many rows that `validation` gives."""
        return -(-self.num_validation_targets() // (self.seq_len * batch))

    def validation(self, batch: int, rank: int = 0, size: int = 1, positions: Array | None = None) -> Iterator[Batch]:
        """This rank's batches of the validation windows; every rank gets the same number of batches and rows.

        The windows do not overlap and are spread evenly over the validation text.  Summed over ranks and batches, the
        targets with weight are `num_validation_targets()`; the last window is cut where the sequence length does not
        divide them.

        Args:
            batch: rows of a global batch.
            rank: coordinate along the axis over which the batch is divided.
            size: number of ranks on it.
            positions: the part of each sequence that this rank holds; None: all of it.
        """
        s = self.seq_len
        slots = (len(self.corpus.val) - 1) // s
        num_targets = self.num_validation_targets()
        num_windows = -(-num_targets // s)
        rows = -(-batch // size)
        for number in range(self.num_validation_batches(batch)):
            places = np.arange(rows, dtype=np.int64) * size + rank
            window = number * batch + places
            real = (places < batch) & (window < num_windows)
            starts = np.where(real, window * slots // num_windows * s, -1)
            inputs, targets = self._windows(self.corpus.val, starts)
            targets[window[:, None] * s + np.arange(s) >= num_targets] = IGNORE
            yield Batch(inputs, targets, places, self._positions(), number, training=False).part(positions)

    def check_words(self, tokens: np.ndarray) -> None:
        """Refuse tokens, int64, that are not below the declared vocabulary.

        Raises:
            DataError: there is one.
        """
        if self.corpus.kind == "tokens" and (largest := int(tokens.max(initial=0))) >= self.vocab_size:
            raise DataError(
                f"{self.corpus.source}: token {largest:,} is not below the declared vocabulary of {self.vocab_size:,}."
            )

    def _positions(self) -> np.ndarray:
        return np.arange(self.seq_len, dtype=np.int64)

    def _windows(self, text: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the windows that begin at `starts`; padded rows where a start is negative."""
        padded = starts < 0
        offsets = np.arange(self.seq_len + 1, dtype=np.int64)
        window = text[np.where(padded, 0, starts)[:, None] + offsets].astype(np.int64)
        self.check_words(window)
        inputs, targets = window[:, :-1].copy(), window[:, 1:].copy()  # of one row both would be the same memory
        inputs[padded], targets[padded] = 0, IGNORE
        return inputs, targets


def _check_places(places: np.ndarray, length: int) -> None:
    """Refuse what names no part of a batch whose rows have so many tokens."""
    whole_numbers = places.ndim == 1 and places.dtype.kind in "iu"
    if whole_numbers and np.diff(places.astype(np.int64), prepend=-1, append=length).min() > 0:
        return
    reach = f" from {places.min()} to {places.max()}" if whole_numbers else ""
    raise ShapeError(
        f"a batch of {length} positions has no such part: wanted are ascending whole numbers from 0 to {length - 1},"
        f" given are {places.dtype} {places.shape}{reach}.\n"
        "Was it cut before?  The positions of a part are of the whole sequence, so it is cut once."
    )

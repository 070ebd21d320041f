"""Packed sequences: whole documents side by side in a row, none of which sees another.

    document 0  a b c d e f          row 0     a b c d e|p q|x x      documents  0 0 0 0 0 1 1 -1 -1
    document 1  p q r                targets   b c d e f|q r|. .
    document 2  u v w                row 1     u v|...

A document of n tokens gives n - 1 inputs, each with the next token as its target, so none has a target in another
document.  One that is longer than a row is cut into pieces of a row, which are documents of their own.  A token attends
to its own piece only (`Batch.documents`), and learned positions count from its first token, so the loss of a packed
batch is that of each piece alone.  What is left of a row is padding, which has no weight.

Pieces go into rows by best fit, longest first: the fullest row that has room left for it.  Rows are made once, the same
on every rank, and read in the order of `Tokens`: a batch is a pure function of (seed, step, rank, size).

Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027; best fit: Ding et
al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpitrain.autograd.ops import IGNORE
from mpitrain.backend import Array
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import VALIDATION_TARGETS, Batch, Tokens
from mpitrain.errors import DataError

PADDING = -1
"""The document of what is none."""


@dataclass(frozen=True)
class Packing:
    """Which pieces of a text stand in which row.

    Attributes:
        seq_len: places of a row.
        first: int64 (rows + 1,) the first piece of each row, and how many pieces there are.
        starts: int64 (pieces,) the place in the text where each begins.
        lengths: int64 (pieces,) its inputs, so one less than its tokens.
    """

    seq_len: int
    first: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.first) - 1

    @property
    def targets(self) -> int:
        """Inputs that have a target, of all rows."""
        return int(self.lengths.sum())

    @property
    def filled(self) -> float:
        """Share of the places that are no padding."""
        return self.targets / max(1, self.rows * self.seq_len)

    def targets_of(self, rows: np.ndarray) -> int:
        """Targets of some rows together."""
        sums = np.concatenate([[0], np.cumsum(self.lengths)])[self.first]
        return int((sums[rows + 1] - sums[rows]).sum())

    def read(self, text: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(inputs, targets, documents), each int64 (n, seq_len), of some rows; a negative row is all padding."""
        shape = len(rows), self.seq_len
        inputs, targets, documents = (np.full(shape, empty, np.int64) for empty in (0, IGNORE, PADDING))
        for at, row in enumerate(rows.tolist()):
            place = 0
            for number, piece in enumerate(range(self.first[row], self.first[row + 1]) if row >= 0 else ()):
                start, length = int(self.starts[piece]), int(self.lengths[piece])
                here = slice(place, place + length)
                inputs[at, here] = text[start : start + length]
                targets[at, here] = text[start + 1 : start + length + 1]
                documents[at, here] = number
                place += length
        return inputs, targets, documents


def places_in_documents(documents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """How far each token is from the first one of its document.

    Args:
        documents: int (b, whole sequence), as in `Batch`; the tokens of one lie together.
        positions: int64 (s,), those that are meant.

    Returns:
        int64 (b, s).
    """
    here = np.arange(documents.shape[1])
    begins = np.zeros(documents.shape, np.int64)
    begins[:, 1:] = np.where(documents[:, 1:] != documents[:, :-1], here[1:], 0)
    places: np.ndarray = (here - np.maximum.accumulate(begins, axis=1))[:, positions]
    return places


def pack(ends: Sequence[int] | np.ndarray, seq_len: int) -> Packing:
    """Put the documents of a text into rows.

    Args:
        ends: where each ends in the text, ascending; the first begins at 0, each other where the one before ends.
        seq_len: places of a row.

    Returns:
        Rows with as little padding as best fit leaves; those that a document begins with, in the text's order, first.
        A document of one token has no target, and is left out.

    Cost: some microseconds a document; 24 bytes a piece.
    """
    assert seq_len > 0, seq_len
    ends = np.asarray(ends, np.int64)
    starts, lengths = _pieces(ends, seq_len)
    order = np.argsort(-lengths, kind="stable")
    rows = np.empty(len(order), np.int64)
    count = int(np.count_nonzero(lengths == seq_len))  # the longest fill a row each
    rows[order[:count]] = np.arange(count)
    order = order[count:]
    waiting: list[list[int]] = [[] for _ in range(seq_len + 1)]  # rows, by how many places they have left
    open_rooms = 0  # bit n: some row has n places left
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fits = open_rooms >> length
        if fits:
            room = length + (fits & -fits).bit_length() - 1  # the fullest row that takes it
            row = waiting[room].pop()
            if not waiting[room]:
                open_rooms ^= 1 << room
        else:
            room, row, count = seq_len, count, count + 1
        rows[piece] = row
        left = room - length
        if left:
            waiting[left].append(row)
            open_rooms |= 1 << left
    number = _in_order_of_text(rows, count)
    rows = number[rows]
    by_row = np.argsort(rows, kind="stable")
    first = np.searchsorted(rows[by_row], np.arange(count + 1))
    return Packing(seq_len, first.astype(np.int64), starts[by_row], lengths[by_row])


def _pieces(ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and inputs of each piece, in the order of the text."""
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    inputs = np.maximum(ends - begins - 1, 0)
    counts = -(-inputs // seq_len)
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
    offset = number * seq_len
    return begins[document] + offset, np.minimum(inputs[document] - offset, seq_len)


def _in_order_of_text(rows: np.ndarray, count: int) -> np.ndarray:
    """The number that each row gets: by its first piece in the text."""
    earliest = np.full(count, len(rows), np.int64)
    np.minimum.at(earliest, rows, np.arange(len(rows)))
    number = np.empty(count, np.int64)
    number[np.argsort(earliest, kind="stable")] = np.arange(count)
    return number


class PackedTokens(Tokens):
    """The samples of a corpus whose documents are packed; as `Tokens`, which cuts the text without looking at them.

    Args:
        corpus: training and validation tokens, with the ends of its documents.
        seq_len: places of a row.
        seed: the run's seed; decides the order.

    Attributes:
        num_samples: rows of an epoch, the same in every epoch.
        documents: to learn from.
        train, val: which pieces stand in which row.

    Raises:
        ConfigError: seq_len is below 1.
        DataError: the corpus is one document, or too short.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int = 0) -> None:
        if corpus.ends is None or len(corpus.ends) < 2:
            raise DataError(
                f"--pack: {corpus.source} is one document, so there is nothing to pack.\n"
                "Give a folder of text files, each a document: --data FOLDER; or leave --pack out."
            )
        super().__init__(corpus, seq_len, seed)
        cut, ends = len(corpus.train), corpus.ends
        of_train = np.unique(np.append(ends[ends < cut], cut))
        self.train = pack(of_train, seq_len)
        self.val = pack(np.unique(np.append(ends[ends > cut], cut + len(corpus.val))) - cut, seq_len)
        if not self.train.rows or not self.val.rows:
            raise DataError(f"--pack: {corpus.source} has no document of two tokens for training, or for validation.")
        self.num_samples = self.train.rows
        self.documents = len(of_train)

    def __str__(self) -> str:
        pieces, rows = len(self.train.lengths), self.train.rows
        return f"{self.documents:,} documents, {pieces:,} pieces in {rows:,} sequences, {self.train.filled:.2%} filled"

    def batch_at(self, step: int, batch: int, rank: int = 0, size: int = 1) -> Batch:
        share = self.order(batch).share(step, rank, size)
        inputs, targets, documents = self.train.read(self.corpus.train, share.samples)
        self.check_words(inputs)
        return Batch(inputs, targets, share.places, self._positions(), step, share.epoch, documents=documents)

    @cached_property
    def _validated(self) -> np.ndarray:
        """The rows of validation: evenly spread, about as many as have `VALIDATION_TARGETS` places."""
        count = min(self.val.rows, -(-VALIDATION_TARGETS // self.seq_len))
        return np.arange(count) * self.val.rows // count

    def num_validation_targets(self) -> int:
        return self.val.targets_of(self._validated)

    def num_validation_batches(self, batch: int) -> int:
        return -(-len(self._validated) // batch)

    def validation(self, batch: int, rank: int = 0, size: int = 1, positions: Array | None = None) -> Iterator[Batch]:
        chosen = self._validated
        for number in range(self.num_validation_batches(batch)):
            places = np.arange(-(-batch // size), dtype=np.int64) * size + rank
            row = number * batch + places
            real = (places < batch) & (row < len(chosen))
            rows = np.where(real, chosen[np.where(real, row, 0)], -1)
            inputs, targets, documents = self.val.read(self.corpus.val, rows)
            self.check_words(inputs)
            whole = Batch(inputs, targets, places, self._positions(), number, training=False, documents=documents)
            yield whole.part(positions)

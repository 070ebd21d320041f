"""Random numbers that do not know the layout: every one is a pure function of what it is for.

No generator has a state.  A number is a hash of (seed, stream name, step, place of the sample in the global batch,
position in the sequence, column), so a rank that holds a slice of a tensor draws exactly that slice of what one rank
would draw for the whole, a recomputed forward draws its masks again, and a checkpoint saves no generator.

    row  = splitmix64 chain over (seed, stream, step, place, position)       64 bits, once a row
    word = lowbias32(fold(row) ^ lowbias32(column + 1))                      32 bits, once an element

The row is folded to 32 bits by the xor of its halves; the column goes through its hash first, since bare indices would
make the words of neighbouring rows permutations of each other.  Initial weights, of which there are few and which stay,
use 64 bits throughout: splitmix64(row ^ splitmix64(column + 1)).

The number of the micro-batch is in no key, so another split of the batch changes nothing.

Sources: splitmix64, Steele, Lea and Flood 2014 (doi:10.1145/2660193.2660195); lowbias32, C. Wellons' hash-prospector;
counter-based generators, Salmon et al. 2011 (doi:10.1145/2063384.2063405).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, array_module

_BITS64 = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64
_LOW1, _LOW2 = 0x7FEB352D, 0x846CA68B  # lowbias32

# Words are made in blocks that stay in the core's cache: a block and its scratch are 2 x 64 KiB.
_BLOCK = 16_384


# ---------------------------------------------------------------------------------------------------------- the hashes


def splitmix64(x: int | Array) -> Any:
    """A bijection of 64-bit numbers in which every input bit moves every output bit.

    Args:
        x: a Python int (taken modulo 2**64) or an array of integers.

    Returns:
        A Python int for an int, else a fresh uint64 array of the same shape.
    """
    if isinstance(x, int):
        z = (x + _GOLDEN) & _BITS64
        z = ((z ^ (z >> 30)) * _MIX1) & _BITS64
        z = ((z ^ (z >> 27)) * _MIX2) & _BITS64
        return z ^ (z >> 31)
    xp = array_module(x)
    z = xp.array(x, dtype=np.uint64, ndmin=1)  # at least one dim: NumPy's scalars would warn of the wrap-around
    t = xp.empty_like(z)
    xp.add(z, np.uint64(_GOLDEN), out=z)
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        xp.right_shift(z, np.uint64(shift), out=t)
        xp.bitwise_xor(z, t, out=z)
        xp.multiply(z, np.uint64(factor), out=z)
    xp.right_shift(z, np.uint64(31), out=t)
    xp.bitwise_xor(z, t, out=z)
    return z.reshape(x.shape)


def lowbias32(x: Array) -> Array:
    """A bijection of 32-bit numbers with almost no bias; 0 stays 0.  Returns a fresh uint32 array."""
    xp = array_module(x)
    word = xp.array(x, dtype=np.uint32, ndmin=1)
    _lowbias32_in_place(xp, word, xp.empty_like(word))
    return word.reshape(x.shape)


def _lowbias32_in_place(xp: Any, word: Array, scratch: Array) -> None:
    for shift, factor in ((16, _LOW1), (15, _LOW2)):
        xp.right_shift(word, np.uint32(shift), out=scratch)
        xp.bitwise_xor(word, scratch, out=word)
        xp.multiply(word, np.uint32(factor), out=word)
    xp.right_shift(word, np.uint32(16), out=scratch)
    xp.bitwise_xor(word, scratch, out=word)


def fold32(row: Array) -> Array:
    """A 64-bit hash as 32 bits: the xor of its halves.  Returns a uint32 array of the same shape."""
    xp = array_module(row)
    return xp.bitwise_xor(row, xp.right_shift(row, np.uint64(32))).astype(np.uint32)  # astype keeps the low half


# ------------------------------------------------------------------------------------------------------- keys and rows


def stream_key(seed: int, stream: str, *numbers: int) -> np.uint64:
    """The 64-bit key of a stream: a hash of the seed, its name and further numbers (the step, a layer, ...).

    Args:
        seed: the run's seed, any integer; taken modulo 2**64.
        stream: what the numbers are for: a parameter's name, or `module path.op`.
        numbers: any integers; (1,) and (1, 0) are different keys.

    Cost: about 3 us.
    """
    name = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")
    key = splitmix64(splitmix64(int(seed)) ^ name)
    for number in numbers:
        key = splitmix64(key ^ (int(number) & _BITS64))
    word: np.uint64 = np.uint64(key)
    return word


def absorb(key: Array, numbers: int | Array) -> Array:
    """One more link of the chain: a new key for each pair of key and number; the two broadcast.

        rows = absorb(absorb(stream_key(seed, "blocks.3.drop", step), places[:, None]), positions[None, :])

    Args:
        key: uint64, a scalar or an array.
        numbers: an int or an array of integers (negative ones wrap).

    Returns:
        uint64 of the broadcast shape.
    """
    if isinstance(numbers, (int, np.integer)):
        return splitmix64(key ^ np.uint64(int(numbers) & _BITS64))
    return splitmix64(key ^ numbers.astype(np.uint64))


# ---------------------------------------------------------------------------------------------- words, masks, uniforms


def _column_hashes(xp: Any, columns: int | Array, first: int) -> Array:
    """lowbias32(index + 1) of the global columns: `first`, first + 1, ... for a count, columns + first for an array."""
    if isinstance(columns, (int, np.integer)):
        columns = xp.arange(int(columns), dtype=np.int64)
    return lowbias32(columns.astype(np.int64) + (first + 1))


def _word_blocks(rows: Array, columns: Array) -> Iterator[tuple[slice, Array]]:
    """The words of flat `rows` in blocks of whole rows: (which rows, uint32 (rows of the block, columns)).

    The blocks share one buffer, so each is used up before the next is asked for.  A device takes one block.
    """
    xp = array_module(rows)
    folded = fold32(rows)[:, None]
    num_rows, num_columns = folded.shape[0], columns.shape[0]
    if num_rows == 0 or num_columns == 0:
        return
    height = min(num_rows, max(1, _BLOCK // num_columns)) if xp is np else num_rows
    word, scratch = xp.empty((2, height, num_columns), np.uint32)
    for start in range(0, num_rows, height):
        which = slice(start, min(start + height, num_rows))
        block, spare = word[: which.stop - start], scratch[: which.stop - start]
        xp.bitwise_xor(folded[which], columns, out=block)
        _lowbias32_in_place(xp, block, spare)
        yield which, block


def words32(rows: Array, columns: int | Array, first: int = 0) -> Array:
    """Uniform 32-bit words, one for each row and column.

    Args:
        rows: uint64 (...), one hash a row, from `absorb` or `Draw.rows`.
        columns: how many columns, or their indices as an integer array (c,).
        first: global index of the first column (added to `columns` where that is an array).

    Returns:
        uint32 (..., c).
    """
    xp = array_module(rows)
    hashes = _column_hashes(xp, columns, first)
    out = xp.empty((rows.size, hashes.size), np.uint32)
    for which, words in _word_blocks(rows.reshape(-1), hashes):
        out[which] = words
    return out.reshape(*rows.shape, hashes.size)


def keep_mask(rows: Array, columns: int | Array, drop_probability: float, first: int = 0) -> Array:
    """The mask of a dropout: True (keep) where word >= round(p * 2**32).

    Args:
        rows: uint64 (...), one hash a row.
        columns: how many columns this rank holds, or their indices as an integer array (c,).
        drop_probability: p in [0, 1]; 0 keeps all and 1 keeps none.
        first: global index of this rank's first column, as in `words32`.

    Returns:
        bool (..., c).

    Cost: about 1.5 ns an element on one core.
    """
    assert 0.0 <= drop_probability <= 1.0, drop_probability
    xp = array_module(rows)
    threshold = round(drop_probability * 2**32)
    hashes = _column_hashes(xp, columns, first)
    mask = xp.zeros((rows.size, hashes.size), np.bool_)
    if threshold < 2**32:  # else no word reaches it
        for which, words in _word_blocks(rows.reshape(-1), hashes):
            xp.greater_equal(words, np.uint32(threshold), out=mask[which])
    return mask.reshape(*rows.shape, hashes.size)


def uniform(rows: Array, columns: int | Array, first: int = 0) -> Array:
    """Uniform numbers strictly between 0 and 1: (word + 1/2) / 2**32, exact in float64.

    Args:
        rows: uint64 (...), one hash a row.
        columns: how many columns this rank holds, or their indices as an integer array (c,).
        first: global index of this rank's first column, as in `words32`.

    Returns:
        float64 (..., c).
    """
    xp = array_module(rows)
    hashes = _column_hashes(xp, columns, first)
    out = xp.empty((rows.size, hashes.size), np.float64)
    for which, words in _word_blocks(rows.reshape(-1), hashes):
        xp.add(words, 0.5, out=out[which])
    xp.multiply(out, 2.0**-32, out=out)
    return out.reshape(*rows.shape, hashes.size)


# ----------------------------------------------------------------------------------------------------- initial weights


def normal(seed: int, stream: str, full_shape: tuple[int, ...], slab: tuple[slice, ...]) -> np.ndarray:
    """Standard normal numbers: this rank's slab of one full tensor.

    The row of an element is its index over all dims but the last, its column that in the last dim (a vector is one
    row).  Each element takes one 64-bit word: Box and Muller 1958 with u1 from its high half and u2 from its low half.
    The largest possible value is 6.8 standard deviations.

    Args:
        seed: the run's seed.
        stream: the parameter's name.
        full_shape: shape of the full tensor.
        slab: one slice (of step 1) a dim: what this rank holds.

    Returns:
        float64 of the slab's shape, on the host.

    Cost: about 25 ns an element.
    """
    assert len(slab) == len(full_shape), (slab, full_shape)
    ranges = [range(length)[part] for length, part in zip(full_shape, slab, strict=True)]
    assert all(r.step == 1 for r in ranges), slab
    shape = tuple(len(r) for r in ranges)
    row = np.zeros((1,) * max(0, len(shape) - 1), np.int64)
    for dim, (length, part) in enumerate(zip(full_shape[:-1], ranges[:-1], strict=True)):
        along = [1] * (len(shape) - 1)
        along[dim] = -1
        row = row * length + np.arange(part.start, part.stop).reshape(along)
    column = np.arange(ranges[-1].start, ranges[-1].stop) if shape else np.zeros(1, np.int64)
    row_hash = absorb(stream_key(seed, stream), row).reshape(-1)
    column_hash = splitmix64(column + 1)

    out = np.empty((row_hash.size, column_hash.size), np.float64)
    height = max(1, _BLOCK // max(1, column_hash.size))
    for start in range(0, out.shape[0], height):
        block = out[start : start + height]
        word = splitmix64(row_hash[start : start + height, None] ^ column_hash)
        angle = (word & np.uint64(0xFFFFFFFF)).astype(np.float64)
        np.add(angle, 0.5, out=angle)
        np.multiply(angle, 2.0 * math.pi * 2.0**-32, out=angle)
        np.cos(angle, out=angle)
        np.add(np.right_shift(word, np.uint64(32)), 0.5, out=block)
        np.multiply(block, 2.0**-32, out=block)
        np.log(block, out=block)
        np.multiply(block, -2.0, out=block)
        np.sqrt(block, out=block)
        np.multiply(block, angle, out=block)
    return out.reshape(shape)


# ----------------------------------------------------------------------------------------------- one micro-batch's draw


class Draw(NamedTuple):
    """Which samples and positions a micro-batch holds: all that its random numbers depend on besides their stream.

    Attributes:
        seed: the run's seed.
        step: the step, counted in attempts.
        places: int64 (b,) the samples' places in the global batch.
        positions: int64 (s,) global positions in the sequence.
    """

    seed: int
    step: int
    places: Array
    positions: Array

    def rows(self, stream: str) -> Array:
        """One hash for each sample and position: uint64 (b, s), for `keep_mask`, `uniform` or `words32`.

        A stream serves one op: two ops with the same stream draw the same numbers.
        """
        return self._hashes(stream, self.positions)

    def attention_rows(self, stream: str, heads: int | Array, positions: Array | None = None) -> Array:
        """One hash for each sample, head and query; the columns are the keys.

        Args:
            stream: name of the op.
            heads: how many heads from 0 on, or their global numbers as an integer array (n,).
            positions: int64 (s,) global positions of the queries; the draw's own where left out.

        Returns:
            uint64 (b, n, s).
        """
        if isinstance(heads, int):
            heads = array_module(self.places).arange(heads)
        queries = self.positions if positions is None else positions
        return self._hashes(stream, heads, queries)

    def select(self, samples: slice) -> Draw:
        """The draw of some of the samples: the same numbers as theirs in the whole."""
        return self._replace(places=self.places[samples])

    def at(self, positions: slice) -> Draw:
        """The draw of some of the positions: the same numbers as theirs in the whole."""
        return self._replace(positions=self.positions[positions])

    def _hashes(self, stream: str, *numbers: Array) -> Array:
        from mpitrain.kernels import hash_rows  # here: kernels are made of this module

        return hash_rows(self.places, stream_key(self.seed, stream, self.step), *numbers)

"""Vocabulary parallelism: the token table, the output layer and the loss, cut over the words of the vocabulary.

Rank i of n holds the words i V' ... (i+1) V' - 1 with V' = ceil(V / n); the last ranks hold fewer, or none.  Nothing is
padded, so V may be any number and files hold exactly V rows.

    ids     --own rows, zeros for others' words-->  Partial    --all_reduce-->  x        (b, s, d)    Invariant
    x       --copy-->  Replicate                               --x W_i-->       logits   (b, s, V_i)  Shard(2)
    logits  --three numbers a row-->                                            loss     ()           Invariant

Logits are never gathered.  With l_i the logarithm of the sum of exponentials over rank i's words, a row's loss is

    M = max_i l_i        Z = sum_i exp(l_i - M)        y = sum_i (the target's logit if i holds it, else 0)
    loss = log Z + M - y

The sums share a message.  In backward each rank makes softmax minus one-hot of its own words, and nothing travels.

On an axis of one rank these are the serial ops.  Sequence parallelism changes where the stream ends and begins
(sequence.py), nothing else here.

Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3; there the maximum is taken of the logits.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from mpitrain import kernels
from mpitrain.autograd import ops
from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import RowSum
from mpitrain.autograd.ops import IGNORE
from mpitrain.autograd.ops.fused import SoftmaxCrossEntropy, check_targets
from mpitrain.autograd.ops.index import Take, beyond, integers
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, at_hand, wide
from mpitrain.collectives import Arrow
from mpitrain.comm.communicator import Communicator
from mpitrain.errors import ShapeError
from mpitrain.kernels.blocks import rows_of
from mpitrain.nn import init as initial
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Initializer, Parameter
from mpitrain.parallel.sequence import enter, leave
from mpitrain.spec import INVARIANT, PARTIAL, REPLICATE, Shard, cut

ELSEWHERE = -1
"""The kernels' word for a target that counts, but whose logit another rank holds."""


class VocabularyEmbedding(Module):
    """A row of a table for each id, the rows of the table cut over `axis`.

    ids (b, s)     integers, the same on all ranks of axis
    y (b, s, d)    Invariant on axis

    Each rank looks up the words that it holds and puts zeros for the others; their sum is the row.  Forward all-reduces
    y, backward sends nothing.  With sequence parallelism y is (b, s/n, d), Shard(1): forward reduce-scatters, backward
    all-gathers.

    Args:
        name: path in the model.
        vocab: number of rows, any number.
        dim: their length.
        axis: the tp axis.
        init: initial values of the table (vocab, dim); standard deviation 0.02 where left out.
        sequence_parallel: whether y is cut along the sequence.
        tied: whether the head of the last stage of a pipeline uses the table too: then it is Replicate on `ends`.

    Raises:
        ShapeError: in forward: an id is not in [-vocab, vocab), the same on all ranks; or s is not divisible by
            axis.size, with sequence parallelism.
    """

    def __init__(
        self,
        name: str,
        vocab: int,
        dim: int,
        axis: Communicator,
        *,
        init: Initializer | None = None,
        sequence_parallel: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__(name)
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        spec = {axis.name: Shard(0), **({"ends": REPLICATE} if tied else {})}
        self.weight = Parameter(f"{name}.weight", (vocab, dim), spec, init=init or initial.normal(0.02), decay=True)

    def forward(self, ids: Array) -> Tensor:
        if self.axis.size == 1:
            return ops.take(self.weight, ids)
        ids, shape = integers(ids), self.weight.full_shape
        if at_hand(ids) and ids.size and not -shape[0] <= ids.min() <= ids.max() < shape[0]:
            raise beyond(ids, 0, shape)  # no rank would look it up: its row would be zeros
        rows = TakeOwnRows.apply(self.weight, ids, axis=self.axis, vocab=shape[0])
        return leave(rows, self.axis, self.sequence_parallel)


class VocabularyHead(Module):
    """The scores of all words, x W, with the columns of W cut over `axis`.

    x (b, s, width)       Invariant on axis
    logits (b, s, V_i)    Shard(2) on axis, in at least float32

    Forward sends nothing, backward all-reduces the gradient of x.  With sequence parallelism x is (b, s/n, width),
    Shard(1): forward all-gathers it, backward reduce-scatters its gradient.

    Args:
        name: path in the model.
        width: length of x's last dim.
        vocab: number of words, any number.
        axis: the tp axis.
        table: the weight (vocab, width) of a VocabularyEmbedding, for a tied head: W is its transpose, and its gradient
            the sum of both uses; None: a weight (width, vocab) of the head's own.
        init: initial values of that; variance 1 / width where left out.
        sequence_parallel: whether x is cut along the sequence.

    Raises:
        ShapeError: the table is not (vocab, width).
    """

    def __init__(
        self,
        name: str,
        width: int,
        vocab: int,
        axis: Communicator,
        table: Parameter | None = None,
        *,
        init: Initializer | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(name)
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.table = table
        self.weight = None
        if table is None:
            spec = {axis.name: Shard(1)}
            self.weight = Parameter(f"{name}.weight", (width, vocab), spec, init=init or initial.fan_in(), decay=True)
        elif table.full_shape != (vocab, width):
            raise ShapeError(f"{name} (VocabularyHead): the table is {table.full_shape}, wanted is ({vocab}, {width})")

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size > 1:
            x = enter(x, self.axis, self.sequence_parallel)
        scores = wide(x.dtype)  # those of halves are not rounded: the loss is float32
        return ops.linear(
            x, self.table.T if self.weight is None else self.weight, dtype=None if scores == x.dtype else scores
        )


def cross_entropy(logits: Tensor, targets: Array, axis: Communicator, *, vocab: int, ignore: int = IGNORE) -> Tensor:
    """The sum over targets that count of -log softmax(logits)[target].   Shard(-1) -> Invariant.

    Args:
        logits: (..., V_i), this rank's words.
        targets: integers (...), the same on all ranks of the axis: numbers of the whole vocabulary; `ignore` does not
            count.
        axis: the axis over which the words are cut.
        vocab: number of all words.
        ignore: the target that does not count.

    Returns:
        () in at least float32, the same on all ranks; 0 if no target counts, and then all gradients are 0.

    Raises:
        ShapeError: the shapes do not go together.
        DataError: a target is no word; the same on all ranks, before the first message.

    Cost: forward two messages, in all 3 numbers a row, of which each rank sends 3 * 2(n-1)/n; backward none.
    """
    first, stop = cut(vocab, axis.size, axis.rank)
    if logits.shape[-1:] != (stop - first,):
        raise ShapeError(
            f"cross_entropy: logits {logits.shape} on rank {axis.rank} of axis {axis.name}, which holds {stop - first}"
            f" of {vocab} words"
        )
    if axis.size == 1:
        return ops.softmax_cross_entropy(logits, targets, ignore)
    return VocabularyCrossEntropy.apply(logits, targets, axis=axis, vocab=vocab, ignore=ignore)


class TakeOwnRows(Arrow):
    """Rows of a table by number, zeros for those that other ranks hold.   Shard(0) -> Partial.  Sends nothing.

    Backward picks from a gradient that all ranks have the rows of this rank's words: a `RowSum`, as that of `Take`.
    """

    arrow = (Shard(0), PARTIAL)
    like: ClassVar[type[Function]] = Take
    """The op whose rules hold on all other axes."""

    @staticmethod
    def forward(table: Array, ids: Array, *, axis: Communicator, vocab: int) -> tuple[Array, tuple[Any, ...]]:
        xp = array_module(table)
        length, dim = table.shape
        if not length:
            return xp.zeros((*ids.shape, dim), table.dtype), (ids, table.shape)
        place, is_own = _own(ids % vocab, axis, vocab)  # -1 is the last word
        rows = xp.take(table, xp.where(is_own, place, 0), axis=0)
        # A choice, not an assignment to where the mask holds: for that CuPy counts on the host, which waits.
        return xp.where(is_own[..., None], rows, rows.dtype.type(0)), (ids, table.shape)

    @staticmethod
    def backward(
        grad: Array, ids: Array, shape: tuple[int, int], *, wanted: tuple[bool, ...], axis: Communicator, vocab: int
    ) -> tuple[Any, ...]:
        place, is_own = _own(ids % vocab, axis, vocab)
        mine = array_module(grad).where(is_own, place, -1)
        return RowSum(mine.reshape(-1), grad.reshape(-1, shape[1]), shape), None


class VocabularyCrossEntropy(Arrow):
    """Sum of the cross-entropies of the rows that count, of logits cut over the words.   Shard(-1) -> Invariant.

    Sends three numbers a row forward, nothing backward; saves the logits, and for each row its target and the logarithm
    of the sum of exponentials over all words.
    """

    arrow = (Shard(-1), INVARIANT)
    like: ClassVar[type[Function]] = SoftmaxCrossEntropy
    """The op whose rules hold on all other axes."""
    linear = ()

    @staticmethod
    def forward(
        logits: Array, targets: Array, *, axis: Communicator, vocab: int, ignore: int
    ) -> tuple[Array, tuple[Any, ...]]:
        if logits.shape[:-1] != targets.shape:
            raise ShapeError(f"softmax_cross_entropy: logits {logits.shape} and targets {targets.shape}")
        xp = array_module(logits)
        flat = targets.reshape(-1).astype(np.int64, copy=False)
        check_targets(flat, vocab, ignore)
        counts = flat != ignore
        place, is_own = _own(flat, axis, vocab)
        is_own &= counts
        # `ignore` may be any number, also that of a word: from here on it is the one that no place can be.
        place = xp.where(is_own, place, xp.where(counts, ELSEWHERE, IGNORE))

        matrix = logits.reshape(rows_of(logits))
        _, lse = kernels.cross_entropy(matrix, xp.full(flat.size, IGNORE), IGNORE)  # no target: the logarithms alone
        sums = xp.zeros((2, flat.size), wide(logits.dtype))
        if matrix.shape[1]:
            picked = matrix[xp.arange(flat.size), xp.where(is_own, place, 0)]
            sums[1] = xp.where(is_own, picked, 0)
        highest = axis.all_reduce(lse, "max")
        sums[0] = xp.exp(lse - highest)
        axis.all_reduce(sums, out=sums)
        lse = xp.log(sums[0]) + highest
        losses = xp.where(counts, lse - sums[1], 0)
        return xp.asarray(losses.sum(dtype=np.float64), dtype=lse.dtype), (logits, place, lse)

    @staticmethod
    def backward(
        grad: Array, logits: Array, place: Array, lse: Array, *, wanted: tuple[bool, ...], **static: Any
    ) -> tuple[Any, ...]:
        d_logits = kernels.cross_entropy_backward(grad, logits.reshape(rows_of(logits)), place, lse, IGNORE)
        return d_logits.reshape(logits.shape), None


def _own(words: Array, axis: Communicator, vocab: int) -> tuple[Array, Array]:
    """(place of each word in this rank's slab, whether it is there)."""
    first, stop = cut(vocab, axis.size, axis.rank)
    return words - first, (words >= first) & (words < stop)

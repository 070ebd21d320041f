"""Differentiable messages: what happens between the ranks of an axis, and what happens to the gradient then.

Across one axis a value is in one of four states (spec.py).  A collective takes it from one state to another; its
backward takes the gradient back, from the dual of the second to the dual of the first.  So the table writes itself:

    function              arrow                     forward           backward
    copy                  Invariant -> Replicate    nothing           all-reduce          Megatron's f
    all_reduce            Partial -> Invariant      all-reduce        nothing             Megatron's g
    sum_everywhere        Partial -> Replicate      all-reduce        all-reduce
    all_gather(dim)       Shard -> Replicate        all-gather        reduce-scatter
    reduce_scatter(dim)   Partial -> Shard          reduce-scatter    all-gather
    gather(dim)           Shard -> Invariant        all-gather        own slice
    split(dim)            Invariant -> Shard        own slice         all-gather
    pick(dim)             Replicate -> Shard        any slice         zeros around it
    all_to_all(i, j)      Shard(i) -> Shard(j)      all-to-all        all-to-all, i and j and counts swapped
    shift(k)              Shard -> Shard            pass on by k      pass on by -k       the ring of ring attention
    max_over              -                         maximum           none                statistics only

The three that gather differ in who uses the result: Replicate is *my copy, for my part of the work* (our gradients
differ and must be added), Invariant is *one value that we all hold* (our gradients agree already).  Taking the one for
the other multiplies gradients by the size of the axis and does not show in the forward pass.

Papers: f and g: Shoeybi et al. 2019, arXiv:1909.08053, section 3.  Gather and scatter along the sequence: Korthikanti
et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from mpitrain.autograd.function import Function
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.wire import dim_of
from mpitrain.errors import ShapeError
from mpitrain.spec import INVARIANT, PARTIAL, REPLICATE, Shard, State

Saved = tuple[()]
Counts = tuple[Sequence[int], Sequence[int]] | None


class Along(NamedTuple):
    """Shard along the dim that the op's keyword argument `argument` names."""

    argument: str


class Arrow(Function):
    """An op that sends over the axis in its keyword argument `axis`: a state on each side.

    A collective is linear.  An op that sends in the course of a computation (a lookup in a table that is cut,
    attention over cut sequences) is an Arrow too: it says what becomes of input 0 on that axis, its other inputs being
    the same on all ranks of it; its `like` is the op whose rules hold on all other axes, and `linear = ()` if it is not
    linear.

    Class attributes:
        arrow: (state the input must be in, state of the output); `Along("dim")` is Shard(dim), Shard(-1) the last dim.
        alike: True if all inputs are in that state, parts of what is sent.
        any_rows: True if the input may be cut along any dim but the last: what is sent goes over all rows of numbers.
    """

    linear = (0,)
    alike: ClassVar[bool] = False
    any_rows: ClassVar[bool] = False
    arrow: ClassVar[tuple[State | Along, State | Along]]

    @classmethod
    def states(cls, **static: Any) -> tuple[State, State]:
        """The arrow with its dims filled in.

        Args:
            static: the op's keyword arguments.
        """
        start, end = (Shard(static[side.argument]) if isinstance(side, Along) else side for side in cls.arrow)
        return start, end

    @classmethod
    def arrow_text(cls, **static: Any) -> str:
        """The arrow as a tape prints it: `Shard(0) -> Replicate`."""
        return " -> ".join(map(str, cls.states(**static)))


class Copy(Arrow):
    """Invariant -> Replicate.  Backward: all-reduce."""

    arrow = (INVARIANT, REPLICATE)
    weight_side = True

    @staticmethod
    def forward(x: Array, *, axis: Communicator) -> tuple[Array, Saved]:
        return x, ()

    @staticmethod
    def backward(grad: Array, *, wanted: Any, axis: Communicator) -> tuple[Array]:
        return (axis.all_reduce(grad),)


class AllReduce(Arrow):
    """Partial -> Invariant.  Backward: nothing."""

    arrow = (PARTIAL, INVARIANT)

    @staticmethod
    def forward(x: Array, *, axis: Communicator) -> tuple[Array, Saved]:
        return axis.all_reduce(x), ()

    @staticmethod
    def backward(grad: Array, *, wanted: Any, axis: Communicator) -> tuple[Array]:
        return (grad,)


class SumEverywhere(Arrow):
    """Partial -> Replicate.  Its own adjoint."""

    arrow = (PARTIAL, REPLICATE)

    @staticmethod
    def forward(x: Array, *, axis: Communicator) -> tuple[Array, Saved]:
        return axis.all_reduce(x), ()

    @staticmethod
    def backward(grad: Array, *, wanted: Any, axis: Communicator) -> tuple[Array]:
        return (axis.all_reduce(grad),)


class AllGather(Arrow):
    """Shard(dim) -> Replicate.  Backward: reduce-scatter along the same dim."""

    arrow = (Along("dim"), REPLICATE)
    weight_side = True

    @staticmethod
    def forward(x: Array, *, axis: Communicator, dim: int) -> tuple[Array, Saved]:
        return axis.all_gather(x, dim), ()

    @staticmethod
    def backward(grad: Array, *, wanted: Any, axis: Communicator, dim: int) -> tuple[Array]:
        return (axis.reduce_scatter(grad, dim),)


class ReduceScatter(Arrow):
    """Partial -> Shard(dim).  Backward: all-gather along the same dim."""

    arrow = (PARTIAL, Along("dim"))

    @staticmethod
    def forward(x: Array, *, axis: Communicator, dim: int) -> tuple[Array, Saved]:
        return axis.reduce_scatter(x, dim), ()

    @staticmethod
    def backward(grad: Array, *, wanted: Any, axis: Communicator, dim: int) -> tuple[Array]:
        return (axis.all_gather(grad, dim),)


class Gather(Arrow):
    """Shard(dim) -> Invariant.  Backward: this rank's slice."""

    arrow = (Along("dim"), INVARIANT)

    @staticmethod
    def forward(x: Array, *, axis: Communicator, dim: int) -> tuple[Array, Saved]:
        return axis.all_gather(x, dim), ()

    @staticmethod
    def backward(grad: Array, *, wanted: Any, axis: Communicator, dim: int) -> tuple[Array]:
        return (_own_slice(grad, axis, dim),)


class Split(Arrow):
    """Invariant -> Shard(dim).  Backward: all-gather."""

    arrow = (INVARIANT, Along("dim"))

    @staticmethod
    def forward(x: Array, *, axis: Communicator, dim: int) -> tuple[Array, Saved]:
        return _own_slice(x, axis, dim), ()

    @staticmethod
    def backward(grad: Array, *, wanted: Any, axis: Communicator, dim: int) -> tuple[Array]:
        return (axis.all_gather(grad, dim),)


class Pick(Arrow):
    """Replicate -> Shard(dim), by slices that each rank chooses and that may overlap.  Backward: zeros around it."""

    arrow = (REPLICATE, Along("dim"))
    weight_side = True

    @staticmethod
    def forward(x: Array, *, axis: Communicator, dim: int, start: int, stop: int) -> tuple[Array, tuple[int]]:
        return x[_slices(x, dim, start, stop)], (x.shape[dim],)

    @staticmethod
    def backward(
        grad: Array, length: int, *, wanted: Any, axis: Communicator, dim: int, start: int, stop: int
    ) -> tuple[Array]:
        whole = array_module(grad).zeros((*grad.shape[:dim], length, *grad.shape[dim + 1 :]), grad.dtype)
        whole[_slices(whole, dim, start, stop)] = grad
        return (whole,)


def _slices(x: Array, dim: int, start: int, stop: int) -> tuple[slice, ...]:
    return tuple(slice(start, stop) if i == dim else slice(None) for i in range(x.ndim))


class AllToAll(Arrow):
    """Shard(i) -> Shard(j).  Backward: the same with i and j, and sent and received, swapped."""

    arrow = (Along("i"), Along("j"))

    @staticmethod
    def forward(x: Array, *, axis: Communicator, i: int, j: int, counts: Counts = None) -> tuple[Array, Saved]:
        return axis.all_to_all(x, i, j, counts), ()

    @staticmethod
    def backward(
        grad: Array, *, wanted: Any, axis: Communicator, i: int, j: int, counts: Counts = None
    ) -> tuple[Array]:
        return (axis.all_to_all(grad, j, i, None if counts is None else (counts[1], counts[0])),)


class Shift(Arrow):
    """Shard -> Shard, passed on around the ring.  Backward: passed back."""

    arrow = (Along("dim"), Along("dim"))

    @staticmethod
    def forward(x: Array, *, axis: Communicator, k: int, dim: int) -> tuple[Array, Saved]:
        return axis.shift(x, k), ()

    @staticmethod
    def backward(grad: Array, *, wanted: Any, axis: Communicator, k: int, dim: int) -> tuple[Array]:
        return (axis.shift(grad, -k),)


class MaxOver(Function):
    """The maximum over the axis: a statistic without gradient."""

    @staticmethod
    def forward(x: Array, *, axis: Communicator) -> tuple[Array, Saved]:
        return axis.all_reduce(x, "max"), ()

    @staticmethod
    def backward(grad: Array, *, wanted: Any, axis: Communicator) -> tuple[None]:
        return (None,)


ARROWS: tuple[type[Arrow], ...] = (
    Copy,
    AllReduce,
    SumEverywhere,
    AllGather,
    ReduceScatter,
    Gather,
    Split,
    Pick,
    AllToAll,
    Shift,
)
"""All arrows; the adjoint test is generated from it."""


def copy(x: Tensor, axis: Communicator) -> Tensor:
    """Take a value that all ranks hold into this rank's own part of the work.   Invariant -> Replicate.

    Backward: all-reduce.  Also the way to use a replicated weight: data parallelism is the backward of `copy`.

    Cost: nothing forward; 2(n-1)/n of x's bytes sent by each rank backward.
    Paper: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (there: f).
    """
    return Copy.apply(x, axis=axis)


def all_reduce(x: Tensor, axis: Communicator) -> Tensor:
    """Sum the ranks' summands into one value that all hold.   Partial -> Invariant.

    Backward: nothing.

    Args:
        x: the summand of this rank; same shape on all ranks.
        axis: the mesh axis to sum over.

    Cost: 2(n-1)/n of x's bytes sent by each rank.
    Paper: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (there: g).
    """
    return AllReduce.apply(x, axis=axis)


def sum_everywhere(x: Tensor, axis: Communicator) -> Tensor:
    """Sum the ranks' summands into a value of which each rank uses its own copy.   Partial -> Replicate.

    Backward: all-reduce.

    Cost: 2(n-1)/n of x's bytes sent by each rank, both ways.
    """
    return SumEverywhere.apply(x, axis=axis)


def all_gather(x: Tensor, axis: Communicator, dim: int = 0) -> Tensor:
    """Join the ranks' slices into a value of which each rank uses its own copy.   Shard(dim) -> Replicate.

    Backward: reduce-scatter along the same dim.

    Args:
        x: (..., m, ...) this rank's slice; same shape on all n ranks.
        axis: the mesh axis over which the value is cut.
        dim: tensor dim to join along.

    Returns:
        (..., n*m, ...) the whole.

    Cost: (n-1)/n of the result's bytes sent by each rank, both ways.
    Paper: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (there: g).
    """
    return AllGather.apply(x, axis=axis, dim=dim)


def reduce_scatter(x: Tensor, axis: Communicator, dim: int = 0) -> Tensor:
    """Sum over the axis, keep this rank's slice along `dim`.   Partial -> Shard(dim).

    Backward: all-gather along the same dim.

    Args:
        x: (..., n*m, ...) the summand of this rank; same shape on all n ranks.
        axis: the mesh axis to sum over.
        dim: tensor dim to cut; x.shape[dim] is divisible by axis.size.

    Returns:
        (..., m, ...) slice `axis.rank` of the sum.

    Raises:
        ShapeError: x.shape[dim] is not divisible by axis.size.

    Cost: (n-1)/n of x's bytes sent by each rank, both ways.
    Paper: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (there: g-bar).
    """
    return ReduceScatter.apply(x, axis=axis, dim=dim)


def gather(x: Tensor, axis: Communicator, dim: int = 0) -> Tensor:
    """Join the ranks' slices into one value that all hold.   Shard(dim) -> Invariant.

    Backward: this rank's slice.

    Cost: (n-1)/n of the result's bytes sent by each rank forward, nothing backward.
    """
    return Gather.apply(x, axis=axis, dim=dim)


def split(x: Tensor, axis: Communicator, dim: int = 0) -> Tensor:
    """Keep this rank's slice of a value that all hold.   Invariant -> Shard(dim).

    Backward: all-gather.

    Raises:
        ShapeError: x.shape[dim] is not divisible by axis.size.

    Cost: nothing forward; (n-1)/n of x's bytes sent by each rank backward.
    """
    return Split.apply(x, axis=axis, dim=dim)


def pick(x: Tensor, axis: Communicator, dim: int, start: int, stop: int) -> Tensor:
    """Use a slice of a value of which this rank has its own copy.   Replicate -> Shard(dim).

    Unlike those of `split`, slices may overlap (ranks that share a head of keys) and need not cover x.

    Backward: zeros around the gradient.

    Args:
        x: the same on all ranks.
        axis: the mesh axis.
        dim: tensor dim to cut.
        start: where this rank's slice begins.
        stop: where it ends.

    Raises:
        ShapeError: the slice is not within x.

    Cost: nothing is sent, neither way; backward writes an array as large as x.
    """
    dim = dim_of(x.data, dim, "pick")
    if not 0 <= start <= stop <= x.shape[dim]:
        raise ShapeError(f"pick: {start}:{stop} is not within dim {dim} of shape {x.shape}")
    return Pick.apply(x, axis=axis, dim=dim, start=start, stop=stop)


def all_to_all(x: Tensor, axis: Communicator, i: int = 0, j: int = 0, counts: Counts = None) -> Tensor:
    """Every rank sends a slice to every rank.   Shard(i) -> Shard(j).

    Backward: the same with i and j, and sent and received, swapped.

    Args:
        x: this rank's part, cut along `j` for sending.
        axis: the mesh axis.
        i: dim along which what arrives is joined (x was cut along it).
        j: dim along which x is cut (the result is cut along it).  i = j: slices change places (experts); i != j: the
            sharded dim changes (Ulysses).
        counts: (lengths sent, lengths received), one a rank; None: even.  See `Communicator.all_to_all`.

    Raises:
        ShapeError: a dim that does not divide, or counts that do not fit.

    Cost: (n-1)/n of x's bytes sent by each rank, both ways.
    Paper: Jacobs et al. 2023, arXiv:2309.14509 (Ulysses); Lepikhin et al. 2020, arXiv:2006.16668 (experts).
    """
    return AllToAll.apply(x, axis=axis, i=i, j=j, counts=counts)


def shift(x: Tensor, axis: Communicator, k: int = 1, dim: int = 0) -> Tensor:
    """Pass x on to rank + k around the ring.   Shard(dim) -> Shard(dim).

    Backward: pass the gradient on by -k.

    Args:
        x: this rank's slice; same shape on all ranks.
        axis: the ring.
        k: how far.
        dim: along which the value is cut; it moves as a whole, so this only says its state.

    Cost: x's bytes sent by each rank, both ways.
    """
    return Shift.apply(x, axis=axis, k=k, dim=dim)


def max_over(x: Tensor, axis: Communicator) -> Tensor:
    """The maximum over the axis, as a constant: for the statistics of a softmax, which does not depend on it.

    Cost: 2(n-1)/n of x's bytes sent by each rank.
    """
    return MaxOver.apply(x.data if isinstance(x, Tensor) else x, axis=axis)


def _own_slice(x: Array, axis: Communicator, dim: int) -> Array:
    """Slice `axis.rank` of `axis.size` along `dim`, contiguous."""
    length, rest = divmod(x.shape[dim], axis.size)
    if rest:
        raise ShapeError(
            f"split: dim {dim} of shape {x.shape} is not divisible by axis {axis.name} of size {axis.size}"
        )
    start = axis.rank * length
    where = (slice(None),) * (dim % x.ndim) + (slice(start, start + length),)
    return array_module(x).ascontiguousarray(x[where])

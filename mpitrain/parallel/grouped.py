"""Queries, keys and values where a group of query heads shares one head of keys and values.

The projection of queries is cut over tp by heads.  So is that of keys and values, as long as there is a head for every
rank.  Where there are more ranks than such heads, several ranks need the same one: each holds the whole (small) matrix
and uses the columns of its head.  The matrix is then Replicate on tp, so by the one rule its gradient is the sum over
the ranks; no groups of ranks are needed for that.

    kv heads 2, tp 2:   rank 0 holds head 0                     rank 1 holds head 1
    kv heads 2, tp 4:   ranks 0, 1 pick head 0 of the whole     ranks 2, 3 pick head 1 of the whole

Names and full shapes of the parameters are the same on every layout.

Source: Ainslie et al. 2023, "GQA", arXiv:2305.13245; sharing over ranks: Shoeybi et al. 2019, arXiv:1909.08053.
"""

from __future__ import annotations

from mpitrain import collectives
from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.comm.communicator import Communicator
from mpitrain.errors import ShapeError
from mpitrain.nn import init as initial
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel.sequence import enter
from mpitrain.spec import REPLICATE, Shard


class GroupedColumns(Module):
    """The packed array that `ops.attention` takes, from projections that are cut by heads.

    x (b, s, width)                  Invariant on axis; or (b, s/n, width) Shard(1) with sequence parallelism
    y (b, s, kv * (g + 2) * d)       this rank's heads, as (kv head, [g queries | key | value], d)

    Args:
        name: path in the model; the parameters are `name.q.*` and `name.kv.*`.
        width: length of x's last dim; heads * d.
        heads: of queries.
        kv_heads: of keys and values; divides heads.
        axis: tp.
        bias: whether projections have one.
        sequence_parallel: whether x is cut along the sequence.

    Raises:
        ShapeError: heads do not divide: heads by kv_heads and by axis.size, and of kv_heads and axis.size one by the
            other.
    """

    def __init__(
        self,
        name: str,
        width: int,
        heads: int,
        kv_heads: int,
        axis: Communicator,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(name)
        n = axis.size
        if kv_heads < 1 or heads % kv_heads or heads % n or (kv_heads % n and n % kv_heads):
            raise ShapeError(
                f"{name}: {heads} heads in {kv_heads} groups cannot be cut over axis {axis.name} of size {n}:"
                " groups and ranks must each divide the heads, and one of the two the other."
            )
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.head_width = d = width // heads
        self.kv_heads = max(1, kv_heads // n)  # on this rank
        self.shared = n > kv_heads
        spec = {axis.name: REPLICATE if self.shared else Shard(1)}
        bias_spec = {axis.name: REPLICATE if self.shared else Shard(0)}
        self.q_weight = Parameter(
            f"{name}.q.weight", (width, width), {axis.name: Shard(1)}, init=initial.fan_in(), decay=True
        )
        self.q_bias: Parameter | None = None
        if bias:
            self.q_bias = Parameter(f"{name}.q.bias", (width,), {axis.name: Shard(0)}, init=initial.zeros)
        self.kv_weight = Parameter(
            f"{name}.kv.weight", (width, 2 * kv_heads * d), spec, init=initial.fan_in(), decay=True
        )
        self.kv_bias: Parameter | None = None
        if bias:
            self.kv_bias = Parameter(f"{name}.kv.bias", (2 * kv_heads * d,), bias_spec, init=initial.zeros)
        first = axis.rank * kv_heads // n
        self._columns = 2 * d * first, 2 * d * (first + self.kv_heads)

    def forward(self, x: Tensor, turns: tuple[Array, Array] | None = None) -> Tensor:
        """y of x; with `turns`, cosines and sines as `ops.rotary` takes them, queries and keys are turned."""
        x = enter(x, self.axis, self.sequence_parallel)
        weight: Tensor = self.kv_weight
        bias: Tensor | None = self.kv_bias
        if self.shared:
            weight = collectives.pick(weight, self.axis, 1, *self._columns)
            if bias is not None:
                bias = collectives.pick(bias, self.axis, 0, *self._columns)
        q = ops.linear(x, self.q_weight, self.q_bias)
        kv = ops.linear(x, weight, bias)
        if turns is not None:
            heads = q.shape[2] // self.head_width
            return ops.pack_rotary(q, kv, heads, self.kv_heads, *turns)
        b, s, _ = q.shape
        packed = ops.concat(
            [q.reshape(b, s, self.kv_heads, -1), kv.reshape(b, s, self.kv_heads, 2 * self.head_width)], 3
        )
        return packed.reshape(b, s, -1)

"""Tensor parallelism: a matrix cut over the ranks of an axis, and the message that makes the product whole again.

A column-parallel layer followed by a row-parallel one needs one all-reduce forward and one backward:

    x  --copy-->  x W_i  -- gelu -->  h_i V_i  --all_reduce-->  y        W = [W_0 | W_1],  V = [V_0 ; V_1]

Models are built from these layers from the start; on an axis of one rank they *are* the serial layers.  With sequence
parallelism the stream outside is cut along the sequence, and other messages stand at the two ends (sequence.py).

Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3 (there: f and g).
"""

from __future__ import annotations

from mpitrain.autograd.ops import linear
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.communicator import Communicator
from mpitrain.errors import ShapeError
from mpitrain.nn import init as initial
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Initializer, Parameter
from mpitrain.nn.tying import is_transposed
from mpitrain.parallel.sequence import between, enter, leave
from mpitrain.spec import Shard


class ColumnLinear(Module):
    """y = x W + b with the columns of W cut over `axis`:  W = [W_0 | W_1 | ...].

    x (..., in)      Invariant on axis    every rank has the same input
    y (..., out/n)   Shard(-1) on axis    rank i holds columns [i out/n, (i+1) out/n)

    Forward sends nothing.  Backward all-reduces the gradient of x, the dual of `copy`.
    With sequence parallelism x is (b, s/n, in), Shard(1): forward all-gathers it, backward reduce-scatters its
    gradient.  Where several such layers share an x, who calls them sends it once (`sequence.enter`) and they do not
    (`enters=False`): x is then (..., in), Replicate.

    With `tied` it uses the weight of another layer, or its transpose, in the place of its own (mpitrain.nn.tying): of a
    RowLinear the transpose, of a ColumnLinear the weight itself.

    Raises:
        ShapeError: out_features is not divisible by axis.size; or the weight of the other layer does not fit.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        axis: Communicator,
        *,
        bias: bool = True,
        init: Initializer | None = None,
        sequence_parallel: bool = False,
        enters: bool = True,
        tied: Parameter | None = None,
        transposed: bool | None = None,
    ) -> None:
        super().__init__(name)
        _check_divides(self, "out_features", out_features, axis)
        self.axis = axis
        self.enters = enters
        self.sequence_parallel = sequence_parallel
        self.weight, self.transposed = _weight(self, (in_features, out_features), 1, axis, init, tied, transposed)
        self.bias = (
            Parameter(f"{name}.bias", (out_features,), {axis.name: Shard(0)}, init=initial.zeros) if bias else None
        )

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        """x W + b, or x W for a caller that adds the bias in an op of its own."""
        if self.enters:
            x = enter(x, self.axis, self.sequence_parallel)
        return linear(x, self.weight.T if self.transposed else self.weight, self.bias if add_bias else None)


class RowLinear(Module):
    """y = x W + b with the rows of W cut over `axis`, for an x that is cut by columns already.

    x (..., in/n)    Shard(-1) on axis
    y (..., out)     Invariant on axis

    Forward all-reduces the product; backward sends nothing.  The bias is added once, after the sum.
    With sequence parallelism y is (b, s/n, out), Shard(1): forward reduce-scatters the product, backward all-gathers.

    `tied` as in a ColumnLinear, the other way round.

    Raises:
        ShapeError: in_features is not divisible by axis.size; or the weight of the other layer does not fit.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        axis: Communicator,
        *,
        bias: bool = True,
        init: Initializer | None = None,
        sequence_parallel: bool = False,
        tied: Parameter | None = None,
        transposed: bool | None = None,
    ) -> None:
        super().__init__(name)
        _check_divides(self, "in_features", in_features, axis)
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.weight, self.transposed = _weight(self, (in_features, out_features), 0, axis, init, tied, transposed)
        spec = between(sequence_parallel)
        self.bias = Parameter(f"{name}.bias", (out_features,), spec, init=initial.zeros) if bias else None

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        """x W + b, or x W for a caller that adds the bias in an op of its own."""
        weight = self.weight.T if self.transposed else self.weight
        y = leave(linear(x, weight, None), self.axis, self.sequence_parallel)
        return y if self.bias is None or not add_bias else y + self.bias


def _weight(
    layer: Module,
    shape: tuple[int, int],
    dim: int,
    axis: Communicator,
    init: Initializer | None,
    tied: Parameter | None,
    transposed: bool | None,
) -> tuple[Parameter, bool]:
    """The weight of a layer, which is cut along a dim, and whether the layer uses its transpose."""
    cuts = {axis.name: Shard(dim)}
    if tied is None:
        return Parameter(f"{layer.name}.weight", shape, cuts, init=init or initial.fan_in(), decay=True), False
    return tied, is_transposed(f"{layer.name} ({type(layer).__name__})", shape, tied, transposed, cuts)


def _check_divides(layer: Module, what: str, length: int, axis: Communicator) -> None:
    if length % axis.size:
        kind = type(layer).__name__
        raise ShapeError(
            f"{layer.name} ({kind}): {what} {length} is not divisible by axis {axis.name} of size {axis.size}."
        )

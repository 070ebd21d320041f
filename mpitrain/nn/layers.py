"""Layers that never send: each owns its parameters and calls one op."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ConfigError
from mpitrain.nn import init as initial
from mpitrain.nn.module import Module
from mpitrain.nn.norm import RMSNorm
from mpitrain.nn.parameter import Initializer, Parameter
from mpitrain.nn.tying import is_transposed
from mpitrain.rng import Draw
from mpitrain.spec import Spec


class Linear(Module):
    """y = x W + b over the last dim.

    Args:
        name: path in the model.
        in_features: length of x's last dim.
        out_features: length of y's.
        bias: whether there is a b, which starts at 0.
        init: initial values of W (in_features, out_features); variance 1 / in_features where left out.
        tied: the weight of another layer, which this one uses in the place of its own (mpitrain.nn.tying).
        transposed: whether it uses the transpose of that; None: what the shapes say.

    Raises:
        ShapeError: the weight of the other layer does not fit.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool = True,
        init: Initializer | None = None,
        *,
        tied: Parameter | None = None,
        transposed: bool | None = None,
    ) -> None:
        super().__init__(name)
        shape = (in_features, out_features)
        self.transposed = tied is not None and is_transposed(f"{name} (Linear)", shape, tied, transposed)
        own = Parameter(f"{name}.weight", shape, init=init or initial.fan_in(), decay=True)
        self.weight = own if tied is None else tied
        self.bias = Parameter(f"{name}.bias", (out_features,), init=initial.zeros) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return ops.linear(x, self.weight.T if self.transposed else self.weight, self.bias)


class Embedding(Module):
    """A row of a table for each id.

    Args:
        name: path in the model.
        vocab: number of rows.
        dim: their length.
        init: initial values of the table (vocab, dim); standard deviation 0.02 where left out.
        tied: the weight (vocab, dim) of another layer, which is the table (mpitrain.nn.tying).

    Raises:
        ShapeError: that has another shape.
    """

    def __init__(
        self, name: str, vocab: int, dim: int, init: Initializer | None = None, *, tied: Parameter | None = None
    ) -> None:
        super().__init__(name)
        if tied is not None:
            is_transposed(f"{name} (Embedding)", (vocab, dim), tied, transposed=False)
        own = Parameter(f"{name}.weight", (vocab, dim), init=init or initial.normal(0.02), decay=True)
        self.weight = own if tied is None else tied

    def forward(self, ids: Array) -> Tensor:
        """Integers (...) -> (..., dim)."""
        return ops.take(self.weight, ids)


class LayerNorm(Module):
    """Normalise the last dim to mean 0 and variance 1, then scale and shift.

    Args:
        name: path in the model.
        dim: length of the last dim.
        eps: added to the variance.
        spec: how weight and bias lie across ranks, where not by default.
    """

    def __init__(self, name: str, dim: int, eps: float = 1e-5, spec: Spec | None = None) -> None:
        super().__init__(name)
        self.eps = eps
        self.weight = Parameter(f"{name}.weight", (dim,), spec, init=initial.ones)
        self.bias = Parameter(f"{name}.bias", (dim,), spec, init=initial.zeros)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def of_sum(self, x: Tensor, y: Tensor, bias: Tensor | None, **dropout: Any) -> tuple[Tensor, Tensor]:
        """(x + dropout(y + bias), its norm) in one pass; `dropout` as `ops.residual_norm` takes it."""
        return ops.residual_norm(x, y, bias, self.weight, self.bias, eps=self.eps, **dropout)


class Dropout(Module):
    """Zero elements with probability p, scale the others by 1 / (1 - p).

    The layer's name is the name of its random stream, so no two dropouts may share one.

    Args:
        name: path in the model.
        p: probability of zero, in [0, 1).

    Raises:
        ConfigError: p is not in [0, 1).
    """

    def __init__(self, name: str, p: float) -> None:
        super().__init__(name)
        self.p = _probability(name, p)

    def forward(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """(b, s, d) -> (b, s, d); without a draw (evaluation) x itself: give it batch.draw(seed) in training."""
        if draw is None or self.p == 0.0:
            return x
        return ops.dropout(x, draw.rows(self.name), self.p)

    def about(self) -> str:
        return f"p={self.p:g}" if self.p else ""


class Residual(Module):
    """The end of a residual branch, x + dropout(y + bias), in one pass.

    Its name is that of the dropout's random stream.

    Args:
        name: path in the model.
        p: probability of zero, in [0, 1).

    Raises:
        ConfigError: p is not in [0, 1).
    """

    def __init__(self, name: str, p: float) -> None:
        super().__init__(name)
        self.p = _probability(name, p)

    def forward(self, x: Tensor, y: Tensor, bias: Tensor | None, draw: Draw | None = None) -> Tensor:
        """Stream x (b, s, d), branch y (b, s, d), bias (d,) of the branch's last layer -> (b, s, d)."""
        return ops.residual(x, y, bias, **self._dropout(draw))

    def then(
        self, norm: LayerNorm | RMSNorm, x: Tensor, y: Tensor, bias: Tensor | None, draw: Draw | None = None
    ) -> tuple[Tensor, Tensor]:
        """(sum, norm(sum)) in one pass: where the next branch begins with a norm."""
        return norm.of_sum(x, y, bias, **self._dropout(draw))

    def _dropout(self, draw: Draw | None) -> dict[str, Any]:
        if draw is None or self.p == 0.0:
            return {}
        return {"rows": draw.rows(self.name), "p": self.p}

    def about(self) -> str:
        return f"dropout p={self.p:g}" if self.p else ""


class Gelu(Module):
    """The activation x Phi(x).

    Args:
        kind: `tanh`, the approximation of GPT-2, or `erf`, exact.
        name: path in the model.

    Raises:
        ConfigError: another kind.
    """

    def __init__(self, kind: str = "tanh", name: str = "") -> None:
        super().__init__(name)
        if kind not in ("tanh", "erf"):
            raise ConfigError(f"gelu kind {kind!r}; there are tanh and erf")
        self.kind = kind

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., d) -> (..., d) of x, or of x + bias with the bias (d,) of the layer before."""
        return ops.gelu_tanh(x, bias) if self.kind == "tanh" else ops.gelu_erf(x, bias)

    def about(self) -> str:
        return self.kind


class SiLU(Module):
    """The activation x / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return ops.silu(x)


class SwiGLU(Module):
    """The gated activation silu(gate) up, with silu(z) = z / (1 + exp(-z))."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Two of one shape -> one of it."""
        return ops.swiglu(gate, up)


class Relu(Module):
    """The activation max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return ops.relu(x)


def _probability(name: str, p: float) -> float:
    if not 0.0 <= p < 1.0:
        raise ConfigError(f"{name}: a dropout probability of {p}; it is in [0, 1)")
    return p

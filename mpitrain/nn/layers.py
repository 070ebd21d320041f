"""Layers that never send: each owns its parameters and calls one op."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ConfigError
from mpitrain.nn import init as initial
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Initializer, Parameter
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
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool = True,
        init: Initializer | None = None,
    ) -> None:
        super().__init__(name)
        shape = (in_features, out_features)
        self.weight = Parameter(f"{name}.weight", shape, init=init or initial.fan_in(), decay=True)
        self.bias = Parameter(f"{name}.bias", (out_features,), init=initial.zeros) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return ops.linear(x, self.weight, self.bias)


class Embedding(Module):
    """A row of a table for each id.

    Args:
        name: path in the model.
        vocab: number of rows.
        dim: their length.
        init: initial values of the table (vocab, dim); standard deviation 0.02 where left out.
    """

    def __init__(self, name: str, vocab: int, dim: int, init: Initializer | None = None) -> None:
        super().__init__(name)
        self.weight = Parameter(f"{name}.weight", (vocab, dim), init=init or initial.normal(0.02), decay=True)

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
        """(b, s, d) -> (b, s, d); without a draw (evaluation) x itself."""
        if draw is None or self.p == 0.0:
            return x
        return ops.dropout(x, draw.rows(self.name), self.p)


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
        self, norm: LayerNorm, x: Tensor, y: Tensor, bias: Tensor | None, draw: Draw | None = None
    ) -> tuple[Tensor, Tensor]:
        """(sum, norm(sum)) in one pass: where the next branch begins with a norm."""
        return ops.residual_norm(x, y, bias, norm.weight, norm.bias, eps=norm.eps, **self._dropout(draw))

    def _dropout(self, draw: Draw | None) -> dict[str, Any]:
        if draw is None or self.p == 0.0:
            return {}
        return {"rows": draw.rows(self.name), "p": self.p}


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


class Relu(Module):
    """The activation max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return ops.relu(x)


def _probability(name: str, p: float) -> float:
    if not 0.0 <= p < 1.0:
        raise ConfigError(f"{name}: a dropout probability of {p}; it is in [0, 1)")
    return p

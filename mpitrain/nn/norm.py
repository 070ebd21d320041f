"""RMSNorm: a norm that only scales."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.nn import init as initial
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.spec import Spec


class RMSNorm(Module):
    """Divide the last dim by the root of its mean square, then scale.

    Args:
        name: path in the model.
        dim: length of the last dim.
        eps: added to the mean square.
        spec: how the weight lies across ranks, where not by default.
    """

    def __init__(self, name: str, dim: int, eps: float = 1e-5, spec: Spec | None = None) -> None:
        super().__init__(name)
        self.eps = eps
        self.weight = Parameter(f"{name}.weight", (dim,), spec, init=initial.ones)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return ops.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, y: Tensor, bias: Tensor | None, **dropout: Any) -> tuple[Tensor, Tensor]:
        """(x + dropout(y + bias), its norm) in one pass; `dropout` as `ops.residual_rms_norm` takes it."""
        return ops.residual_rms_norm(x, y, bias, self.weight, eps=self.eps, **dropout)

"""SwiGLU: a branch of hidden units gated by another, in one pass."""

from __future__ import annotations

from typing import Any

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.needs import NEAR
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError


class Swiglu(Function):
    """silu(gate) up; saves both."""

    undivided = True
    needs = (NEAR, NEAR)

    @staticmethod
    def forward(gate: Array, up: Array) -> tuple[Array, tuple[Any, ...]]:
        if gate.shape != up.shape or gate.dtype != up.dtype:
            raise ShapeError(f"swiglu: gate {gate.shape} {gate.dtype} and up {up.shape} {up.dtype} differ")
        return kernels.swiglu(gate, up), (gate, up)

    @staticmethod
    def backward(grad: Array, gate: Array, up: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return kernels.swiglu_backward(grad, gate, up)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up, with silu(z) = z / (1 + exp(-z)): the hidden units of Llama's MLP.

    Args:
        gate, up: (..., d), the two projections.

    Raises:
        ShapeError: shapes or dtypes differ.

    Cost: one pass; saves both inputs, and works out the gate again in backward, which is one pass as well.

    Source: Shazeer 2020, arXiv:2002.05202, equation 6.
    """
    return Swiglu.apply(gate, up)

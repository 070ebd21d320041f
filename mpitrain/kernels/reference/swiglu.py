"""SwiGLU, the gated activation: the formulas in NumPy (or CuPy), over blocks that stay in cache."""

from __future__ import annotations

from typing import Any

from mpitrain.backend import Array, array_module
from mpitrain.kernels.blocks import row_blocks
from mpitrain.kernels.reference.halves import in_single


@in_single(0, 0)
def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) up, with silu(z) = z / (1 + exp(-z)).

    Args:
        gate, up: of one shape.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202, equation 6.
    """
    xp = array_module(gate)
    y = xp.empty(gate.shape, gate.dtype)
    gates, ups, flat = gate.reshape(-1), up.reshape(-1), y.reshape(-1)
    for block in row_blocks(xp, gate.size, 1):
        s = _sigmoid(xp, gates[block])
        s *= gates[block]
        xp.multiply(s, ups[block], out=flat[block])
    return y


@in_single(1, 0, 1)
def swiglu_backward(grad: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Gradients of gate and up.

    With s = 1 / (1 + exp(-gate)):  d_gate = grad up s (1 + gate (1 - s)),  d_up = grad gate s.
    """
    xp = array_module(gate)
    d_gate, d_up = xp.empty(gate.shape, gate.dtype), xp.empty(gate.shape, gate.dtype)
    gates, ups, grads = gate.reshape(-1), up.reshape(-1), grad.reshape(-1)
    flat_gate, flat_up = d_gate.reshape(-1), d_up.reshape(-1)
    for block in row_blocks(xp, gate.size, 1):
        z, g = gates[block], grads[block]
        s = _sigmoid(xp, z)
        slope = 1.0 - s
        slope *= z
        slope += 1.0
        slope *= s
        slope *= ups[block]
        xp.multiply(slope, g, out=flat_gate[block])
        s *= z
        xp.multiply(s, g, out=flat_up[block])
    return d_gate, d_up


def _sigmoid(xp: Any, z: Array) -> Array:
    """1 / (1 + exp(-z)), a new array, without overflow and with all digits of small values."""
    e = xp.abs(z)
    xp.negative(e, out=e)
    xp.exp(e, out=e)
    s = xp.where(z >= 0, 1, e)
    e += 1.0
    s /= e
    return s

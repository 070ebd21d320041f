"""SwiGLU, the gated activation: `csrc/swiglu.cu`."""

from __future__ import annotations

from mpitrain.backend import Array, array_module
from mpitrain.kernels import reference
from mpitrain.kernels.cuda.arrays import precision, solid
from mpitrain.kernels.cuda.launch import THREADS, launch
from mpitrain.kernels.cuda.rows import quads


def swiglu(gate: Array, up: Array) -> Array:
    if precision(gate, up) is None or gate.shape != up.shape:
        return reference.swiglu(gate, up)
    gate, up = solid(gate), solid(up)
    y = array_module(gate).empty(gate.shape, gate.dtype)
    launch("swiglu", "swiglu", gate.dtype, quads(y.size), THREADS, gate, up, y, y.size)
    return y


def swiglu_backward(grad: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    if precision(gate, up, grad) is None or not gate.shape == up.shape == grad.shape:
        return reference.swiglu_backward(grad, gate, up)
    xp, grad, gate, up = array_module(gate), solid(grad), solid(gate), solid(up)
    d_gate, d_up = xp.empty(gate.shape, gate.dtype), xp.empty(gate.shape, gate.dtype)
    size = gate.size
    launch("swiglu", "swiglu_backward", gate.dtype, quads(size), THREADS, grad, gate, up, d_gate, d_up, size)
    return d_gate, d_up

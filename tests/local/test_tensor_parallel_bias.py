"""A layer that leaves its bias to the next op computes, together with that op, what it would have computed itself."""

import numpy as np
import pytest

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.nn import init
from mpitrain.nn.module import Module
from mpitrain.parallel.tensor import ColumnLinear, RowLinear


class Branch(Module):
    """x + down(gelu(up(x))), the biases added by the layers or by the fused ops."""

    def __init__(self, mesh, bias):
        super().__init__("branch")
        self.up = ColumnLinear("branch.up", 4, 8, mesh.tp, bias=bias)
        self.down = RowLinear("branch.down", 8, 4, mesh.tp, bias=bias)
        for layer in (self.up, self.down):
            if bias:
                layer.bias.init = init.normal(1.0)

    def forward(self, x, fused):
        if not fused:
            return x + self.down(ops.gelu_tanh(self.up(x)))
        hidden = ops.gelu_tanh(self.up(x, add_bias=False), self.up.bias)
        return ops.residual(x, self.down(hidden, add_bias=False), self.down.bias)


def run(tp, fused, bias):
    """(result, gradient of x, gradients of this rank's parameters)."""
    mesh = Mesh(world(), tp=tp)
    branch = Branch(mesh, bias)
    branch.materialize(mesh, seed=3, dtype=np.float64)
    assert not bias or (branch.up.bias.data.any() and branch.down.bias.data.any())
    x = Tensor(np.random.default_rng(0).standard_normal((5, 4)), requires_grad=True)
    branch.start_step()
    with Tape() as tape:
        y = branch(x, fused)
    grads = tape.run_backward([(y, np.random.default_rng(1).standard_normal((5, 4)))])
    parameters = list(branch.parameters())
    for p in parameters:
        p.settle()
    return [y.data, grads[x], *(p.grad.copy() for p in parameters)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_bias_may_be_added_by_the_next_op(tp, bias):
    plain, fused = (LocalWorld(tp).run(run, tp, way, bias) for way in (False, True))
    for expected, got in zip(plain, fused, strict=True):
        assert len(expected) == 2 + (4 if bias else 2)
        for a, b in zip(expected, got, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-13)
    ((whole, *_),) = LocalWorld(1).run(run, 1, False, bias)
    np.testing.assert_allclose(fused[0][0], whole, rtol=1e-12, atol=1e-13)
    assert not bias or np.abs(fused[0][3]).max() > 0

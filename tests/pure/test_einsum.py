"""Products by letters: what NumPy gives, in the cheapest order, with gradients that need no temporary."""

import math

import numpy as np
import pytest
from half_calls import BFLOAT16, HALVES, values
from op_calls import run

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.autograd.lazy import Product
from mpitrain.autograd.ops.letters import plan
from mpitrain.debug.flops import AGAIN, BACKWARD, FORWARD, Flops
from mpitrain.errors import ShapeError
from mpitrain.events import listen
from mpitrain.nn import init
from mpitrain.nn.materialize import materialize
from mpitrain.nn.parameter import Parameter

RNG = np.random.default_rng(3)
EQUATIONS = {
    "ij,jk->ik": ((3, 4), (4, 5)),
    "ij,jk->ki": ((3, 4), (4, 5)),
    "ij,kj->ik": ((3, 4), (5, 4)),
    "bij,bjk->kib": ((2, 3, 4), (2, 4, 5)),
    "bshd,bthd->bhst": ((2, 3, 2, 4), (2, 5, 2, 4)),
    "ij,ij->": ((3, 4), (3, 4)),
    "bi,bi->b": ((3, 4), (3, 4)),
    "bi,bi->bi": ((3, 4), (3, 4)),
    "i,j->ji": ((3,), (4,)),
    "ij,j": ((3, 4), (4,)),
    "ba,cb": ((3, 4), (5, 3)),
    "ij,kl->": ((2, 3), (4, 5)),
    "ij->ji": ((3, 4),),
    "cab": ((2, 3, 4),),
    "ij->": ((3, 4),),
    "ii->i": ((3, 3),),
    "ii": ((3, 3),),
    "iij->j": ((3, 3, 2),),
    "iiik->ki": ((2, 2, 2, 3),),
    "ii,i->i": ((3, 3), (3,)),
    "...ij->...ji": ((2, 3, 4),),
    "...ij,...jk": ((5, 1, 3, 4), (2, 4, 2)),
    "b...i,...ij->b...j": ((2, 3, 4), (3, 4, 5)),
    "...,...->...": ((2, 1, 3), (4, 1)),
    "i...,i...": ((2, 3), (2, 1)),
    "ij,ij->i": ((3, 1), (3, 4)),
    "ij,jk,kl->il": ((3, 4), (4, 2), (2, 5)),
    "i,i,i->": ((3,), (3,), (3,)),
    "a,ab,abc->abc": ((2,), (2, 3), (2, 3, 4)),
    "ij,jk,kl,lm->im": ((2, 3), (3, 4), (4, 3), (3, 2)),
    "ij,ji,i,j->": ((3, 4), (4, 3), (3,), (4,)),
    ",i->i": ((), (3,)),
    "->": ((),),
    " i j , j -> i ": ((3, 4), (4,)),
    "ij,jk->ik ": ((3, 0), (0, 2)),
    "ij,jk -> ik": ((0, 3), (3, 2)),
}


def normal(*shape):
    return RNG.standard_normal(shape)


@pytest.mark.parametrize("letters", EQUATIONS)
def test_values_are_those_of_numpy_and_gradients_their_slopes(letters):
    arrays = [normal(*shape) for shape in EQUATIONS[letters]]
    np.testing.assert_allclose(
        ops.einsum(letters, *map(Tensor, arrays)).data, np.einsum(letters, *arrays), rtol=1e-12, atol=1e-12
    )
    check(lambda *x: ops.einsum(letters, *x), *arrays, directions=2)


def test_operands_of_any_strides_and_arrays_without_gradient():
    a, b = normal(8, 6)[::2, ::-1].T, normal(5, 4)
    z, (da, db) = run(lambda a, b: ops.einsum("ij,kj->ik", a, b), a, b)
    np.testing.assert_allclose(z, a @ b.T, rtol=1e-12)
    assert (da.shape, db.shape) == (a.shape, b.shape)
    y, (da,) = run(lambda a: ops.einsum("ij,kj->ik", a, b), a)
    np.testing.assert_allclose(y, a @ b.T, rtol=1e-12)
    assert da.shape == a.shape


def test_two_are_multiplied_at_a_time_in_the_cheapest_order():
    shapes = {"chain": ((2, 50), (50, 50), (50, 1)), "late": ((1, 50), (50, 50), (50, 50))}
    assert plan("ij,jk,kl->il", shapes["chain"]).tree == (0, (1, 2))
    assert plan("ij,jk,kl->il", shapes["late"]).tree == ((0, 1), 2)
    with Tape() as tape:
        ops.einsum("ij,jk,kl->il", *(Tensor(normal(*shape), requires_grad=True) for shape in shapes["chain"]))
    assert [node.function.title() for node in tape.nodes] == ["contract", "contract"]


def test_operations_are_counted_as_those_of_matmul():
    def flops(function, *shapes):
        counted = Flops()
        with listen(counted):
            run(function, *(normal(*shape) for shape in shapes))
        return [counted.total(why) for why in (FORWARD, AGAIN, BACKWARD)]

    expected = flops(ops.matmul, (2, 3, 4), (2, 4, 5))
    assert flops(lambda a, b: ops.einsum("bij,bjk->bik", a, b), (2, 3, 4), (2, 4, 5)) == expected == [240, 0, 480]
    assert flops(lambda a, b: ops.einsum("bsh,hd->bsd", a, b), (2, 3, 4), (4, 5)) == [240, 0, 480]


@pytest.mark.parametrize("letters", ["bsh,hd->bsd", "bsh,dh->bsd"])
def test_the_gradient_of_a_weight_is_a_recipe_that_is_written_into_its_buffer(letters, monkeypatch):
    class Here:
        coords = dict.fromkeys(("pp", "edp", "ep", "cp", "tp"), 0)
        sizes = dict.fromkeys(coords, 1)

    shape = (4, 5) if letters.startswith("bsh,hd") else (5, 4)
    weight = Parameter("w", shape, init=init.normal(1.0))
    materialize([weight], Here.coords, Here.sizes, 0, np.float64)
    x, v = normal(2, 3, 4), normal(2, 3, 5)
    written = []
    before = Product.write
    monkeypatch.setattr(Product, "write", lambda self, out, add: written.append(add) or before(self, out, add))
    for times in (1, 2):
        with Tape() as tape:
            y = ops.einsum(letters, Tensor(x, requires_grad=True), weight)
        tape.run_backward([(y, v)])
        expected = np.einsum("bsh,bsd->hd", x, v) * times
        np.testing.assert_allclose(weight.grad, expected if shape == (4, 5) else expected.T, rtol=1e-12)
    assert written == [False, True]


def test_what_a_frozen_factor_alone_needs_does_not_wait():
    a, b = Tensor(normal(3, 4), requires_grad=True), Tensor(normal(4, 5))
    with Tape() as tape:
        ops.einsum("ij,jk->ik", a, b)
    saved = tape.saved_of(tape.nodes[0])
    assert saved[0] is None
    assert saved[1] is b.data


@HALVES
def test_halves_are_multiplied_in_float32_and_rounded_once(half):
    a, b = normal(3, 300).astype(half), normal(300, 4).astype(half)
    for letters, x, y in (("ij,jk->ik", a, b), ("ij,ji->i", a, np.ascontiguousarray(b.T[:3].T)), ("ij,ij->ij", a, a)):
        exact = np.einsum(letters, values(x, np.float64), values(y, np.float64))
        found = ops.einsum(letters, Tensor(x), Tensor(y))
        assert found.dtype == half
        np.testing.assert_allclose(values(found.data, np.float64), exact, rtol=2 * np.finfo(half).eps
                                   if half != BFLOAT16 else 2.0**-7, atol=1e-4)  # fmt: skip
    with pytest.raises(ShapeError, match="do not go together"):
        ops.einsum("ij,jk->ik", Tensor(np.ones((2, 2), np.float16)), Tensor(np.ones((2, 2), BFLOAT16)))


def test_large_products_do_not_go_element_by_element(monkeypatch):
    """A batch of dot products is no batch of matrices of one element, which would be a call each."""
    monkeypatch.setattr(kernels, "matmul", None)
    x = normal(20_000, 8)
    y = ops.einsum("bi,bi->b", Tensor(x), Tensor(x))
    np.testing.assert_allclose(y.data, (x * x).sum(1))
    z = ops.einsum("bi,bi->bi", Tensor(x), Tensor(x))
    assert math.isclose(z.data.sum(), y.data.sum())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.einsum("ij,jk->ik", x, x), r"letter j is 3 in one operand and 2 in another; shapes \(2, 3\),"),
        (lambda x: ops.einsum("ij,jk->ik", x), "letters of 2 operands, but 1 were given"),
        (lambda x: ops.einsum("ij,j1->i", x, x), "'j1' is not made of letters"),
        (lambda x: ops.einsum("i......->i", x), "is not made of letters, and ... once"),
        (lambda x: ops.einsum("ijk->i", x), r"'ijk' for a tensor of shape \(2, 3\), which has 2 dims"),
        (lambda x: ops.einsum("ijk...->i", x), r"'ijk...' for a tensor of shape \(2, 3\)"),
        (lambda x: ops.einsum("ij->iji", x), "letter i stands twice in the result"),
        (lambda x: ops.einsum("ij->ik", x), "letter k of the result is in no operand"),
        (lambda x: ops.einsum("...i->i", x), "the result needs ..."),
        (lambda x: ops.einsum("...j,...j->...", x, Tensor(np.zeros((5, 3)))), "->...': ... is 2 in one operand"),
        (lambda x: ops.einsum("ij"), "0 operands"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_their_letters(call, message):
    with pytest.raises(ShapeError, match=message):
        call(Tensor(np.zeros((2, 3))))

"""Layers of experts on the tape: what waits, how it is walked, where the gradients of their weights are written."""

import numpy as np
import pytest
from expert_calls import layer, normal, numbers, routed
from half_calls import HALVES, values
from kernel_calls import hashes

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.lazy import GroupedProduct
from mpitrain.autograd.recompute import recompute
from mpitrain.debug.flops import Flops
from mpitrain.errors import GraphError
from mpitrain.events import listen
from mpitrain.nn.parameter import Parameter

PLACES = np.array([[0, 3], [-1, 2], [4, -1]])


def parameter(name, array):
    """A weight with a buffer for its gradient, in which something else lies."""
    p = Parameter(name, array.shape, init=lambda *_: array)
    p.bind(array, None, np.full(array.shape, 7.0, np.float32 if array.itemsize == 2 else array.dtype))
    return p


class Spilling:
    """A policy that keeps copies elsewhere."""

    def __init__(self):
        self.kept = {}

    def pack(self, node, place, array):
        self.kept[len(self.kept)] = array.copy()
        return len(self.kept) - 1

    def share(self, node, place, array, handle):
        return handle

    def unpack(self, node, place, handle):
        return self.kept[handle]


def test_a_tape_prints_them_like_an_assembly_listing():
    arrays = numbers((2, 3), 4, 2)
    ids, rows, counts, places = routed((2, 3), 4, 2, 0.0)
    with Tape() as tape:
        layer(*(Tensor(a, requires_grad=True) for a in arrays), ids, rows, counts, places, True)
    counted = f"counts={tuple(counts.tolist())}"
    assert [line.split(" = ")[1] for line in str(tape).splitlines()[4:]] == [
        "take_rows(%0, const)  (12, 2) float64",
        f"grouped_matmul(%1, %2; {counted})  (12, 8) float64",
        "gelu_tanh(%3)  (12, 8) float64",
        f"grouped_matmul(%4, %5; {counted})  (12, 2) float64",
        "normalized_gates(%7, const)  (2, 3, 2) float64",
        "combine(%6, %8, const)  (2, 3, 2) float64",
    ]


@pytest.fixture
def sample():
    """(x, p, up, down, where they go) of a layer of 4 experts, the last of which nobody chose."""
    x, p, up, down = numbers((2, 7), 4, 3)
    ids, rows, counts, places = routed((2, 7), 3, 2)
    return x, p, up, down, (ids, rows, (*counts.tolist(), 0), places, True)


def walked(sample, walk, policy=None, wrap=None):
    """The gradients of a layer, those of its weights as they lie in their buffers."""
    x, p, *arrays, way = sample
    inputs, weights = [Tensor(a, requires_grad=True) for a in (x, p)], [parameter("w", a) for a in arrays]
    with Tape(policy) as tape:
        y = layer(*inputs, *weights, *way) if wrap is None else wrap(layer, *inputs, *weights, *way)
    walk(tape, [(y, np.cos(np.arange(y.size)).reshape(y.shape))], weights)
    assert all(w.touched for w in weights)
    return [y.data, *(tape.grads[t] for t in inputs), *(w.grad for w in weights)]


def whole(tape, seeds, weights):
    tape.run_backward(seeds)


def halves(tape, seeds, weights):
    tape.backward_inputs(seeds)
    assert not any(w.touched for w in weights)
    finals = [p for found in tape.backward_weights() for p in found]
    assert finals == weights[::-1]


def test_a_split_backward_a_policy_and_recomputation_give_the_same_bits(sample):
    right = walked(sample, whole)
    assert not right[3][3].any()  # of an expert without tokens, where 7 lay
    for others in (
        walked(sample, halves),
        walked(sample, whole, Spilling()),
        walked(sample, whole, wrap=recompute),
        walked(sample, halves, wrap=recompute),
    ):
        for mine, theirs in zip(others, right, strict=True):
            assert (mine == theirs).all()


def test_the_gradient_of_experts_goes_straight_into_the_buffer_and_adds_up_there(sample, monkeypatch):
    x, _, up, *_ = sample
    made = []
    matmul = kernels.matmul
    monkeypatch.setattr(
        kernels, "matmul", lambda a, b, out=None, **how: made.append(out) or matmul(a, b, out=out, **how)
    )
    w = parameter("w", up)
    for times in (1, 2, 3):
        with Tape() as tape:
            y = ops.grouped_matmul(Tensor(x.reshape(14, 3)), w, (5, 0, 8, 1))
        made.clear()
        tape.run_backward([(y, np.ones(y.shape))])
        # Each is written, or added, there, and no group without rows has one.
        assert len(made) == 3
        assert all(np.shares_memory(out, w.grad) for out in made)
        np.testing.assert_allclose(w.grad[2], times * x.reshape(14, 3)[5:13].sum(0)[:, None] * np.ones(12), rtol=1e-12)
        assert not w.grad[1].any()


@HALVES
def test_the_gradient_of_halves_reaches_its_buffer_unrounded(half):
    """The first one, and what is added to it."""
    x, w, seed = normal(6, 5).astype(half), parameter("w", normal(2, 5, 3).astype(half)), normal(6, 3).astype(half)
    exact = np.stack([values(x[i], np.float64).T @ values(seed[i], np.float64) for i in (slice(4), slice(4, 6))])
    for times in (1, 2):
        with Tape() as tape:
            y = ops.grouped_matmul(Tensor(x), w, (4, 2))
        tape.run_backward([(y, seed)])
        np.testing.assert_allclose(w.grad, times * exact, rtol=1e-5, atol=1e-6)
    lazy = GroupedProduct(x, seed, (4, 2), w.dtype)
    assert lazy.unrounded().dtype == np.float32
    assert (lazy.array() == lazy.unrounded().astype(half)).all()


def test_a_weight_that_was_written_meanwhile_is_refused(sample):
    x, _, up, *_ = sample
    w = parameter("experts.up", up)
    with Tape() as tape:
        y = ops.grouped_matmul(Tensor(x.reshape(14, 3)), w, (14, 0, 0, 0))
    w.version += 1
    with pytest.raises(GraphError, match=r"experts\.up was written"):
        tape.run_backward([(y, np.ones(y.shape))])


def test_only_what_backward_needs_waits():
    """Numbers of rows and experts (8 bytes each), and the arrays of which a product needs the other factor."""
    x, p, up, down = (a.astype(np.float32) for a in numbers((2, 8), 4, 16))
    ids, rows, counts, places = routed((2, 8), 4, 2, 0.0)
    inputs = [Tensor(a, requires_grad=True) for a in (x, p)]
    with Tape() as tape:
        layer(*inputs, parameter("up", up), parameter("down", down), ids, rows, counts, places, False)
    taken, hidden, out = 32 * 16 * 4, 32 * 64 * 4, 32 * 16 * 4
    gates, of_rows, of_gates, of_places = 32 * 4, 32 * 8, 32 * 8, 32 * 8
    assert tape.nbytes == taken + 2 * hidden + out + gates + of_rows + of_gates + of_places
    with Tape() as tape:
        ops.jitter(inputs[0], hashes(2, 8), 0.1)
        ops.permute_rows(Tensor(x[0], requires_grad=True), np.arange(8))
    assert tape.nbytes == 16 * 8 + 8 * 8


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_gradients_are_made_where_they_are_asked_for(wanted):
    for function, shapes in (
        (lambda x, w: ops.grouped_matmul(x, w, (2, 0, 1)), ((3, 4), (3, 4, 2))),
        (lambda out, gates: ops.combine(out, gates, PLACES), ((5, 4), (3, 2))),
    ):
        inputs = [Tensor(normal(*shape), requires_grad=w) for shape, w in zip(shapes, wanted, strict=True)]
        with Tape() as tape:
            y = function(*inputs)
        tape.run_backward([(y, np.ones(y.shape))])
        assert [t in tape.grads for t in inputs] == list(wanted)


def test_their_products_are_counted():
    counted = Flops()
    x, up = Tensor(normal(8, 5), requires_grad=True), Tensor(normal(4, 5, 6), requires_grad=True)
    with listen(counted), Tape() as tape:
        y = ops.grouped_matmul(x, up, (3, 0, 4, 1))
        tape.run_backward([(y, np.ones(y.shape))])
    assert counted.total("forward") == 2 * 8 * 5 * 6
    assert counted.total("backward") == 2 * counted.total("forward")

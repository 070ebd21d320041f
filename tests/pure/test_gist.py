"""Gist on tapes: lossless encodings change no bit of any gradient, and lossy ones no bit of the loss."""

import gc
import weakref

import numpy as np
import pytest

from mpitrain.autograd import ops
from mpitrain.autograd.function import Function
from mpitrain.autograd.needs import EXACT, NEAR, SIGN, count_of, need_of
from mpitrain.autograd.ops.attention import Attention
from mpitrain.autograd.ops.elementwise import Relu
from mpitrain.autograd.ops.fused import LayerNorm, Linear, SoftmaxCrossEntropy
from mpitrain.autograd.ops.pooling import MaxPool2d
from mpitrain.autograd.ops.residual import ResidualNorm
from mpitrain.autograd.recompute import recompute
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import dtype_of
from mpitrain.memory.gist import Gist, Narrow
from mpitrain.memory.policy import ByFunction, Keep, Policy
from mpitrain.nn.parameter import Parameter

LOSSY = (16, 10, 8)
TARGETS = np.array([3, 0, 1, 3, 2, 2])


def weight(name, *shape, dtype=np.float32, seed=0):
    values = np.random.default_rng([seed, *name.encode()]).standard_normal(shape) * 0.3
    p = Parameter(name, shape, init=lambda *_: values)
    p.bind(values.astype(dtype), None, np.empty(shape, np.float32 if np.dtype(dtype).itemsize == 2 else dtype))
    return p


def leaf(*shape, dtype=np.float32, seed=0):
    return Tensor(np.random.default_rng(seed).standard_normal(shape).astype(dtype), requires_grad=True)


class Net:
    """Weights by name, made on first use; the same of each net."""

    def __init__(self, dtype):
        self.dtype, self.weights = dtype, {}

    def __call__(self, name, *shape):
        return self.weights.setdefault(name, weight(name, *shape, dtype=self.dtype))


def pools(net, x):
    h = ops.relu(ops.conv2d(x, net("a", 8, 3, 3, 2), net("b", 8), padding=1))
    return ops.max_pool2d(h).reshape(6, -1) @ net("c", 128, 4)


def convolves(net, x):
    h = ops.relu(ops.conv2d(x, net("a", 8, 3, 3, 2), padding=1))
    h = ops.relu(ops.conv2d(h, net("d", 8, 3, 3, 8), padding=1))
    return ops.max_pool2d(ops.max_pool2d(h, 3, 2), 2, 1).reshape(6, -1) @ net("c2", 32, 4)


def branches(net, x):
    """One array for ops that want signs, maxima, values, and nothing."""
    h = ops.relu(x * net("e", 8, 8, 2))
    parts = [ops.max_pool2d(h), ops.conv2d(h, net("f", 2, 2, 2, 2), stride=2), ops.max_pool2d(ops.relu(h))]
    z = parts[0] + parts[1] * parts[2] + ops.tanh(ops.max_pool2d(h + h))
    return ops.maximum(z, 0.1).reshape(6, -1) @ net("c3", 32, 4)


def perceives(net, x):
    h = x.reshape(6, -1)
    for number in range(3):
        h = ops.relu(ops.linear(h, net(f"w{number}", 128, 128), net(f"b{number}", 128)))
    return ops.linear(ops.layer_norm(h, net("n", 128), net("m", 128)), net("c4", 128, 4))


def attends(net, x):
    h = x.reshape(6, 8, 16) @ net("p", 16, 24)
    h = ops.attention(h, 2) + ops.attention(h, 2, keep_scores=True)
    h = ops.gelu_tanh(ops.linear(h, net("u", 8, 16)))
    return ops.softmax((h * ops.sigmoid(h) @ net("v", 16, 4)).sum(1), 1) @ net("q", 4, 4)


def again(net, x):
    return recompute(lambda a: convolves(net, a), x)


PROGRAMS = (pools, convolves, branches, perceives, attends, again)


def trained(program, policy, dtype=np.float32, walk="whole"):
    """(loss, gradients, bytes on the tape)."""
    net, x = Net(dtype), leaf(6, 8, 8, 2, dtype=dtype)
    with Tape(policy) as tape:
        loss = ops.softmax_cross_entropy(program(net, x), TARGETS)
    nbytes = tape.nbytes
    seeds = [(loss, np.ones((), loss.dtype))]
    if walk == "whole":
        tape.run_backward(seeds)
    else:
        tape.backward_inputs(seeds)
        for _ in tape.backward_weights():
            pass
    grads = {name: p.grad for name, p in net.weights.items()}
    return loss.data, {**grads, "x": tape.grads[x]}, nbytes


def equal(one, other):
    same = [one[1][name].tobytes() == grad.tobytes() for name, grad in other[1].items()]
    return one[0].tobytes() == other[0].tobytes() and all(same)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_lossless_encodings_change_no_bit(program, dtype):
    """T27.1."""
    dtype = dtype_of(dtype)
    plain = trained(program, None, dtype)
    for policy, walk in ((Gist(), "whole"), (Gist(), "halves"), (Keep(), "whole"), (Keep(), "halves")):
        assert equal(trained(program, policy, dtype, walk), plain)
    if program in (pools, convolves):
        assert trained(program, Gist(), dtype)[2] < 0.65 * plain[2]


@pytest.mark.parametrize("bits", LOSSY)
@pytest.mark.parametrize("program", PROGRAMS)
def test_lossy_ones_change_no_bit_of_the_loss_and_gradients_by_what_is_rounded(program, bits):
    """T27.4."""
    plain, lossy = trained(program, None), trained(program, Gist(bits))
    assert lossy[0].tobytes() == plain[0].tobytes()
    assert lossy[2] <= plain[2]
    worst = max(float(np.abs(g - plain[1][n]).max() / np.abs(g).max()) for n, g in lossy[1].items())
    assert worst < {16: 5e-3, 10: 0.2, 8: 0.4}[bits]
    if program is not again:  # which keeps what it runs again on exactly, but rounds inside
        assert worst > 0
    assert equal(trained(program, Gist(bits), walk="halves"), lossy)


@pytest.mark.parametrize("bits", LOSSY)
def test_a_recomputed_function_is_the_function_with_the_same_encodings_inside(bits):
    assert equal(trained(again, Gist(bits)), trained(convolves, Gist(bits)))


@pytest.mark.parametrize("bits", LOSSY)
def test_the_gradient_of_a_weight_is_off_by_at_most_the_errors_of_its_factor(bits):
    x, w, g = leaf(50, 30), weight("w", 30, 20), np.random.default_rng(5).standard_normal((50, 20)).astype(np.float32)
    grads = []
    for policy in (None, Gist(bits)):
        with Tape(policy) as tape:
            y = ops.linear(x, w)
        tape.run_backward([(y, g)])
        grads.append((w.grad.copy(), tape.grads[x]))
        w.touched = False
    (exact, dx), (lossy, also_dx) = grads
    assert dx.tobytes() == also_dx.tobytes()  # the weight is what it is
    bound = Narrow(bits).error(x.data).T @ np.abs(g)
    assert (np.abs(lossy - exact) <= bound + 1e-5).all()
    assert np.abs(lossy - exact).max() > 0.02 * bound.max()


@pytest.mark.parametrize("bits", LOSSY)
def test_relu_loses_no_sign_where_its_value_is_rounded_to_zero(bits):
    """A value that is not 0 passes its gradient, however small it is."""
    x = leaf(300, 40)
    x.data *= np.float32(1e-8)
    for zeros in (0.0, 0.5):  # of few and of many zeros
        x.data[...] = np.abs(x.data)
        x.data[: round(300 * zeros)] *= -1
        with Tape(Gist(bits)) as tape:
            y = ops.linear(ops.relu(x), weight("w", 40, 3))
        stash = tape.nodes[0].saved[0][1]
        assert (repr(stash.encoding).startswith("sparse")) == (zeros > 0)
        dx = tape.run_backward([(y, np.ones((300, 3), np.float32))])[x]
        assert (dx.any(axis=1) == (x.data[:, 0] > 0)).all()


# -- who holds what


def held(tape):
    """Function -> the stashes of its nodes."""
    return {node.function.title(): [item for packed, item in node.saved if packed] for node in tape.nodes}


def test_of_relu_before_a_pool_a_bit_an_element_waits_and_of_the_pool_two():
    """T27.2."""
    x = leaf(4, 64, 64, 64)
    with Tape(Gist()) as tape:
        ops.max_pool2d(ops.relu(x))
    found = held(tape)
    assert found["relu"][0].nbytes == 2**20 // 8 == 131_072
    assert found["max_pool2d"][0].nbytes == 2**18 * 2 // 8 == 65_536
    assert tape.nbytes == 131_072 + 65_536


def test_what_two_nodes_save_waits_once_and_serves_both():
    x, w = leaf(4, 8, 8, 16), weight("w", 8, 3, 3, 16)
    for policy in (Gist(), Gist(16)):
        with Tape(policy) as tape:
            ops.conv2d(ops.relu(x), w)
        found = held(tape)
        (of_relu,), (of_conv,) = found["relu"], found["conv2d"]
        assert of_relu is of_conv
        assert of_relu.needs == {SIGN, NEAR}
        assert repr(of_relu.encoding).startswith("sparse")
        count = int((x.data > 0).sum())
        values = 4 * count if policy.bits is None else 4 * -(-count // 2)
        assert tape.nbytes == values + count + 4 * (4096 // 256 + 1)


def test_an_array_that_is_saved_later_for_more_is_encoded_again_from_what_it_is():
    """Not from the bits that the first node was content with."""
    x = leaf(64, 32)
    with Tape(Gist()) as tape:
        y = ops.relu(x)
        assert tape.nbytes == 64 * 32 // 8
        z = y.sum() + (y * y).sum()
        assert tape.nbytes > 64 * 32 // 8
    dx = tape.run_backward([(z, np.ones((), np.float32))])[x]
    np.testing.assert_array_equal(dx, np.where(x.data > 0, 1 + 2 * x.data, 0).astype(np.float32))


def test_the_array_itself_is_free_between_forward_and_backward():
    """T27.5."""
    x, w = leaf(4, 16, 16, 8), weight("w", 8, 3, 3, 8)
    ghosts = {}
    for name, policy in (("none", None), ("gist", Gist()), ("16", Gist(16))):
        with Tape(policy) as tape:
            y = ops.relu(x)
            ghost = weakref.ref(y.data)
            z = ops.conv2d(y, w)
            del y
            ghosts[name] = ghost() is not None
        del tape, z
    gc.collect()
    assert ghosts == {"none": True, "gist": False, "16": False}


def test_an_array_on_the_place_of_one_that_died_is_another_one():
    with Tape(Gist()) as tape:
        total, addresses = None, set()
        x = leaf(300)
        for number in range(40):
            y = ops.relu(x * float(number - 20))
            addresses.add(id(y.data))
            part = (y * y).sum()
            del y
            total = part if total is None else total + part
    assert len(addresses) < 40
    with Tape() as plain:
        parts = [ops.relu(x * float(number - 20)) for number in range(40)]
        again = None
        for y in parts:
            again = (y * y).sum() if again is None else again + (y * y).sum()
    seed = np.ones((), np.float32)
    assert tape.run_backward([(total, seed)])[x].tobytes() == plain.run_backward([(again, seed)])[x].tobytes()


def test_backward_lets_go_of_each_encoding_as_it_passes():
    x = leaf(20, 30)
    with Tape(Gist(16)) as tape:
        made = [x]  # all alive, so that no array lies where one was before
        for _ in range(4):
            made.append(ops.tanh(made[-1]))
    stashes = [weakref.ref(node.saved[0][1]) for node in tape.nodes]
    alive = []
    for _ in tape.backward([(made[-1], np.ones((20, 30), np.float32))]):
        alive.append(sum(stash() is not None for stash in stashes))
    assert alive == [3, 2, 1, 0]


def test_weights_and_constants_wait_as_they_are_and_masks_do_not():
    w, data = weight("w", 40, 30), Tensor(np.eye(50, 40, dtype=np.float32))
    qkv, mask = leaf(2, 8, 24), np.tril(np.ones((8, 8), bool))[None].repeat(2, 0)
    with Tape(Gist(8)) as tape:
        ops.linear(data, w)
        ops.attention(qkv, 2, mask=mask, causal=False)
    linear, attention = tape.nodes
    assert not any(packed for packed, _ in linear.saved)
    stash = attention.saved[1][1]
    assert stash.nbytes == 2 * 8 * 8 // 8
    np.testing.assert_array_equal(tape.saved_of(attention)[1], mask[:, None])


def test_statistics_and_logits_are_never_rounded():
    x, n, m = leaf(6, 2, 16), weight("n", 16), weight("m", 16)
    with Tape(Gist(8)) as tape:
        y = ops.layer_norm(x, n, m)
        _, y = ops.residual_norm(x, y, None, n, m)
        y = ops.attention(y @ weight("p", 16, 12), 2, keep_scores=True)
        ops.softmax_cross_entropy(y.sum(1), TARGETS)
    exact = {LayerNorm: (1, 2), ResidualNorm: (2, 3), Attention: (4, 5), SoftmaxCrossEntropy: (0, 2)}
    near = {LayerNorm: (0,), ResidualNorm: (1,), Attention: (0, 3), Linear: (0,)}
    for node in tape.nodes:
        for place in exact.get(node.function, ()):
            assert repr(node.saved[place][1].encoding) in ("as it is", "sparse")  # scores have zeros
        for place in near.get(node.function, ()):
            assert repr(node.saved[place][1].encoding) == "8 bits an element"


def test_halves_are_16_bits_already():
    for name in ("float16", "bfloat16"):
        x, w = leaf(20, 40, dtype=dtype_of(name)), weight("w", 40, 30, dtype=dtype_of(name))
        bytes_of = {}
        for bits in (None, *LOSSY):
            with Tape(Gist(bits)) as tape:
                y = ops.linear(x, w)
            bytes_of[bits] = tape.nbytes
            tape.run_backward([(y, np.ones((20, 30), y.dtype))])
        assert bytes_of == {None: 1600, 16: 1600, 10: 1068, 8: 800}


def test_an_array_in_another_order_keeps_its_order():
    """Products round by it."""
    x = leaf(40, 64)
    with Tape(Gist()) as tape:
        y = ops.matmul(ops.relu(x.transpose(1, 0)), leaf(40, 8))
    order = tape.saved_of(tape.nodes[2])[0]
    assert order.flags.f_contiguous == tape.nodes[2].saved[0][1].parts[0].flags.f_contiguous
    assert y.shape == (64, 8)


# -- needs


class Third(Function):
    """Says nothing of its needs."""

    @staticmethod
    def forward(x):
        return x * 3, (x,)

    @staticmethod
    def backward(grad, x, *, wanted):
        return (grad * 3,)


def test_what_an_op_does_not_say_is_needed_exactly():
    assert need_of(Third, 0) == need_of(Linear, 1) == need_of(Linear, 7) == EXACT
    assert need_of(Relu, 0) == SIGN
    assert need_of(Linear, 0) == NEAR
    assert count_of(need_of(MaxPool2d, 0), {"window": (3, 2), "stride": (1, 1)}) == 6
    x = leaf(10, 10)
    with Tape(Gist(8)) as tape:
        Third.apply(x)
    assert tape.nodes[0].saved[0][1].parts[0] is x.data


def test_where_one_node_needs_it_exactly_it_waits_so_and_others_get_what_they_would_without():
    """Else recomputing a part, whose input waits exactly, would change gradients of others that save it."""
    x, w, g = leaf(30, 20), weight("w", 20, 10), np.random.default_rng(1).standard_normal((30, 10)).astype(np.float32)
    found = []
    for others in ("none", "before", "after", "recompute"):
        with Tape(Gist(8)) as tape:
            Third.apply(x) if others == "before" else None
            y = ops.linear(x, w)
            Third.apply(x) if others == "after" else None
            recompute(lambda a: a * a, x) if others == "recompute" else None
        tape.run_backward([(y, g)])
        found.append(w.grad.tobytes())
        w.touched = False
        assert tape.nbytes == 0
    assert len(set(found)) == 1
    assert found[0] != (x.data.T @ g).tobytes()


# -- policies


def test_a_policy_for_each_function_gives_each_what_its_own_makes():
    x, w = leaf(30, 20), weight("w", 20, 10)
    policy = ByFunction({Linear: Gist(16), Relu: Gist()}, Keep())
    with Tape(policy) as tape:
        y = ops.relu(x)
        z = ops.tanh(ops.linear(y, w))
    relu, linear, tanh = (node.saved[0][1] for node in tape.nodes)
    assert [stash.nbytes for stash in (relu, tanh)] == [75, 30 * 10 * 4]
    assert linear is not relu
    assert (repr(linear.encoding), repr(tanh.encoding)) == ("sparse, values in 16 bits an element", "as it is")
    assert policy.of(tape.nodes[2]) is policy.others
    dx = tape.run_backward([(z, np.ones((30, 10), np.float32))])[x]
    assert ((dx != 0).any(1) == (x.data > 0).any(1)).all()


class Offloaded(Policy):
    """Parts lie in a list, from which they are taken when they are wanted."""

    def __init__(self, inner):
        self.inner, self.away, self.moves = inner, {}, 0

    def pack(self, node, place, array):
        return self._move(self.inner.pack(node, place, array))

    def share(self, node, place, array, stash):
        away = self.away.pop(stash)
        stash.parts = away
        return self._move(self.inner.share(node, place, array, stash))

    def unpack(self, node, place, stash):
        stash.parts = self.away[stash]
        array = self.inner.unpack(node, place, stash)
        stash.parts = ()
        return array

    def _move(self, stash):
        self.away[stash] = tuple(part.copy() for part in stash.parts)
        stash.parts = ()
        self.moves += 1
        return stash


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_policy_that_moves_arrays_moves_what_another_one_has_encoded(program):
    for inner in (Keep(), Gist(), Gist(10)):
        policy = Offloaded(inner)
        moved = trained(program, policy)
        assert policy.moves
        assert equal(moved, trained(program, inner))
    away = trained(program, Offloaded(Gist()))[2]
    assert away < 0.5 * trained(program, None)[2]  # numbers, and constants

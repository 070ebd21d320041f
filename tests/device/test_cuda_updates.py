"""CUDA kernels of single elements, and of all parameters at once: launches, and what no comparison of values shows."""

import numpy as np
import pytest
from kernel_case import normal
from strict_array import crossings
from strict_stream import launches

from mpitrain import kernels
from mpitrain.backend import dtype_of, floats, to_host
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.kernels.several import Several
from mpitrain.models.mlp import MLP
from mpitrain.optim import AdamW, Sgd
from mpitrain.optim.clip import found_squares
from mpitrain.rng import Draw, absorb, stream_key


def model_of(xp, dtype="float32", layers=5):
    """Weights and biases in turn, of which only the former decay."""
    model = MLP([7] * (layers + 1), Mesh(world()), seed=1, dtype=dtype_of(dtype), xp=xp)
    rng = np.random.default_rng(2)
    for p in model.parameters():
        p.accumulate(xp.asarray(normal(rng, *p.data.shape).astype(p.grad.dtype)))
    return model


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_one_launch_updates_all_parameters_and_their_halves(cuda_kernels, dtype):
    found = []
    for xp in (cuda_kernels, np):
        model = model_of(xp, dtype)
        optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
        optimizer.step()
        assert len(optimizer.joined.runs) == 18
        with launches() as counted, crossings() as crossed:
            optimizer.step(0.02)
        if xp is not np:
            assert counted == {"adamw_parts": 1}
            assert not crossed
        arrays = [array for p in model.parameters() for array in (p.master, p.data)]
        arrays += [array for kind in optimizer.state_dict().values() for array in kind.values()]
        found.append([to_host(array).astype(np.float64) for array in arrays])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol={"float64": 1e-13, "float32": 1e-6}.get(dtype, 2e-3))


@pytest.mark.parametrize("method", [AdamW, Sgd])
@pytest.mark.parametrize("device", [True, False])
def test_gradients_that_were_exchanged_are_the_ones_that_count(cuda_kernels, method, device):
    """What is kept of a list of arrays, and on a device of where they lie, must not outlive them."""
    model = model_of(cuda_kernels if device else np)
    how = {"betas": (0.0, 0.0), "eps": 1e-12} if method is AdamW else {}
    optimizer = method(model.parameters(), lr=0.25, weight_decay=0.0, **how)  # AdamW's step is the sign then
    p, grads = list(model.parameters())[3], Several()
    for value in (2.0, -3.0):
        p.grad = p.grad * 0 + value
        grads = grads.renewed([p.grad for p in model.parameters()])
        before = to_host(p.data).copy()
        optimizer.step()
        assert floats(found_squares(grads))[3] == p.grad.size * value**2
        step = np.sign(value) if method is AdamW else value
        np.testing.assert_allclose(to_host(p.data), before - 0.25 * step, rtol=0, atol=1e-6)


def test_two_launches_measure_all_gradients(cuda_kernels):
    grads = Several([p.grad for p in model_of(cuda_kernels).parameters()])
    found_squares(grads)
    with launches() as counted, crossings() as crossed:
        found = found_squares(grads)
    assert counted == {"squares_of_parts": 1, "sums_of_parts": 1}
    assert not crossed
    with crossings() as crossed:
        mine = floats(found)
    assert crossed == {"get": 1}
    np.testing.assert_allclose(mine, [np.square(to_host(g), dtype=np.float64).sum() for g in grads], rtol=1e-12)


def test_a_list_is_kept_only_as_long_as_it_has_the_same_things():
    one, other = np.zeros(1), np.zeros(1)
    several = Several([one, other])
    assert several.renewed([one, other]) is several
    for items in ([other, one], [one], [one, other, one], [one, other.copy()]):
        fresh = several.renewed(items)
        assert fresh is not several
        assert list(map(id, fresh)) == list(map(id, items))
        assert fresh.prepared is None


def test_the_state_of_an_optimizer_is_looked_at_as_a_whole(cuda_kernels):
    optimizer = AdamW(model_of(cuda_kernels).parameters(), lr=0.01)
    optimizer.step()
    with launches() as counted:
        looks = floats(optimizer.look())
    assert sum(counted.values()) <= 6, counted
    assert optimizer.is_sound(looks)
    for kind, value in (("first_moment", np.nan), ("second_moment", np.inf), ("second_moment", -1.0)):
        array = next(iter(optimizer.state_dict()[kind].values()))
        before = array[1, 1].copy()
        array[1, 1] = value
        assert not optimizer.is_sound(floats(optimizer.look())), (kind, value)
        array[1, 1] = before
    assert optimizer.is_sound(floats(optimizer.look()))


def test_one_launch_makes_the_hashes_of_a_dropout(cuda_kernels):
    places, positions, heads = np.array([5, 0, 2**40]), np.arange(4), np.array([3, 1])
    draw = Draw(7, 11, cuda_kernels.asarray(places), cuda_kernels.asarray(positions))
    on_device = cuda_kernels.asarray(heads)
    with launches() as counted, crossings() as crossed:
        rows, of_heads = draw.rows("here"), draw.attention_rows("there", on_device)
    assert counted == {"hash_rows": 2}
    assert not crossed
    samples = absorb(stream_key(7, "here", 11), places)
    assert np.array_equal(to_host(rows), absorb(samples[:, None], positions[None, :]))
    samples = absorb(stream_key(7, "there", 11), places)
    expected = absorb(absorb(samples[:, None], heads)[:, :, None], positions)
    assert np.array_equal(to_host(of_heads), expected)


def calls(xp, rows=6, width=20):
    """Every kernel of this file's topic, by name: (call, launches)."""
    rng = np.random.default_rng(3)
    x, y, z = (xp.asarray(normal(rng, rows, width).astype(np.float32)) for _ in range(3))
    bias, drop = xp.asarray(normal(rng, width).astype(np.float32)), xp.arange(rows, dtype=np.uint64)
    qkv, table = xp.ones((1, rows, 16), np.float32), xp.ones((rows, 2), np.float32)
    gates, places = xp.ones((2, 2), np.float32), xp.arange(4).reshape(2, 2)
    numbers = {"update": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}
    return {
        "gelu_tanh": (lambda: kernels.gelu_tanh(x, bias), 1),
        "gelu_erf": (lambda: kernels.gelu_erf(x), 1),
        "gelu_backward": (lambda: kernels.gelu_backward(x, y, False), 1),
        "gelu_backward with bias": (lambda: kernels.gelu_backward(x, y, True), 1),
        "dropout": (lambda: kernels.dropout(x, drop, 0.1), 1),
        "residual": (lambda: kernels.residual(x, y, bias, drop, 0.1), 1),
        "swiglu": (lambda: kernels.swiglu(x, y), 1),
        "swiglu_backward": (lambda: kernels.swiglu_backward(x, y, z), 1),
        "rotary": (lambda: kernels.rotary(qkv, 2, 1, table, table), 1),
        "rotary_pack": (lambda: kernels.rotary_pack(qkv[..., :8], qkv[..., 8:], 2, 1, table, table), 3),  # two copies
        "rotary_unpack": (lambda: kernels.rotary_unpack(qkv, 2, 1, table, table), 1),
        "erf": (lambda: kernels.erf(x), 1),
        "jitter": (lambda: kernels.jitter(x, drop, 0.1), 1),
        "combine": (lambda: kernels.combine(x, gates, places), 1),
        "combine_backward": (lambda: kernels.combine_backward(y[:2], x, gates, places), 2),  # one of them zeros
        "narrow": (lambda: kernels.narrow(x, np.float16), 1),
        "widen": (lambda: kernels.widen(xp.zeros(3, np.float16)), 2),  # one of them zeros
        "adamw": (lambda: kernels.adamw(x, y, z, z, **numbers), 1),
        "sum_of_squares": (lambda: kernels.sum_of_squares(x), 2),
    }


def test_each_kernel_is_one_launch_or_two_and_waits_for_nothing(cuda_kernels):
    for name, (call, number) in calls(cuda_kernels).items():
        with launches() as launched, crossings() as crossed:
            call()
        assert sum(launched.values()) == number, (name, launched)
        assert not crossed, name


def test_sums_over_rows_take_a_second_launch_where_rows_are_many(cuda_kernels):
    x = cuda_kernels.ones((9, 4), np.float32)
    with launches() as launched:
        _, db = kernels.gelu_backward(x, x, True)
    assert launched == {"gelu_backward_sums": 1, "fold_rows": 1}
    assert np.array_equal(to_host(db), np.full(4, 9))

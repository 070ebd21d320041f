"""Every operation on device arrays: value, gradients, shapes and dtypes of NumPy's, and no copy to the host inside.

The operations and their inputs are those of tests/op_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from op_cases import CASES, IDS, RNG, normal, rows
from strict_array import crossings, ndarray

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.autograd.ops.attention import attend, attend_backward
from mpitrain.backend import to_host
from mpitrain.rng import keep_mask, uniform, words32


def run(xp: Any, function: Callable[..., Any], arrays: tuple[np.ndarray, ...]) -> tuple[Any, list[Any]]:
    """The value and the gradients; both for a fixed gradient of the value."""
    inputs = [Tensor(xp.asarray(array), requires_grad=True) for array in arrays]
    with crossings() as counted, Tape() as tape:
        y = function(xp, *inputs)
    assert counted.keys() <= {"asarray", "array"}, counted  # of masks and ids by the case itself; nothing waits
    v = xp.asarray(np.random.default_rng(5).standard_normal(y.shape).astype(y.dtype))
    with crossings() as counted:
        grads = tape.run_backward([(y, v)])
    assert not counted, counted
    return y.data, [grads[t] for t in inputs]


def test_every_operation_is_tried_here():
    missing = set(ops.__all__) - {"IGNORE"} - set(CASES)
    assert not missing, f"add a line to CASES in tests/op_cases.py for: {', '.join(sorted(missing))}"
    assert set(CASES) <= set(ops.__all__)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_those_of_numpy(cupy, name, dtype):
    tolerance = {np.float64: 1e-12, np.float32: 1e-5, np.float16: 1e-2}[dtype]
    for function, arrays in CASES[name]:
        arrays = tuple(array.astype(dtype) for array in arrays)
        y, grads = run(cupy, function, arrays)
        z, others = run(np, function, arrays)
        for mine, theirs in zip([y, *grads], [z, *others], strict=True):
            assert isinstance(mine, ndarray)
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
            np.testing.assert_allclose(mine.get(), theirs, rtol=tolerance, atol=tolerance)


def test_forward_does_not_wait_for_the_device_either(cupy):
    x, ids, drop = cupy.asarray(normal(2, 5, 18)), cupy.asarray(IDS), rows(cupy, 2, 2, 5)
    with crossings() as counted:
        hidden = ops.attention(Tensor(x), 2, rows=drop, drop=0.3)
        logits = ops.softmax(ops.linear(hidden, Tensor(cupy.ones((6, 4)))))
        loss = ops.softmax_cross_entropy(logits[:, :3], ops.take(Tensor(ids), ids % 2).data[:, 0] % 4)
    assert not counted
    assert np.isfinite(loss.item())


@pytest.mark.parametrize("keys", [7, 0])
def test_attention_on_keys_from_elsewhere_and_back(cupy, keys):
    """Other many keys than queries, with numbers of their own; also none."""
    queries = [normal(2, 1, 2, 5, 3) for _ in range(3)]
    theirs, numbers = [normal(2, 1, keys, 3) for _ in range(2)], 3 * np.arange(keys)
    seen = RNG.random((1, 2, 5, keys)) > 0.3

    def both_ways(xp):
        grad, q, y = (xp.asarray(x) for x in queries)
        k, v = (xp.asarray(x) for x in theirs)
        into = [xp.empty_like(x) for x in (q, k, v)]
        how = {"mask": xp.asarray(seen), "rows": rows(xp, 2, 2, 5), "drop": 0.3, "keys": xp.asarray(numbers)}
        with crossings() as counted:
            lse = attend(q, k, v, y, causal=False, **how)
            attend_backward(grad, q, k, v, y, lse, *into, causal=False, **how)
        assert not counted, counted
        return [y, lse, *into]

    for mine, expected in zip(both_ways(cupy), both_ways(np), strict=True):
        np.testing.assert_allclose(mine.get(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("columns", [4, 0])
def test_a_loss_of_which_other_ranks_hold_columns(cupy, columns):
    logits, targets, whole = normal(5, columns), np.array([-1, ops.IGNORE, 3 if columns else -2, -1, -7]), normal(5)

    def both_ways(xp):
        x, t, lse, grad = (xp.asarray(a) for a in (logits, targets, whole, np.array(0.5)))
        with crossings() as counted:
            results = (
                *kernels.cross_entropy(x, t, ops.IGNORE),
                kernels.cross_entropy_backward(grad, x, t, lse, ops.IGNORE),
            )
        assert not counted, counted
        return results

    for mine, expected in zip(both_ways(cupy), both_ways(np), strict=True):
        np.testing.assert_allclose(mine.get(), expected, rtol=1e-12)


@pytest.mark.parametrize("out", [False, True])
def test_halves_are_widened_and_narrowed(cupy, out):
    x = (normal(3, 4) * 1e5).astype(np.float32)
    half = kernels.narrow(x, np.float16)
    mine = kernels.narrow(cupy.asarray(x), np.float16, cupy.empty((3, 4), np.float16) if out else None)
    back = kernels.widen(mine, cupy.empty((3, 4), np.float32) if out else None)
    np.testing.assert_array_equal(mine.get(), half)
    np.testing.assert_array_equal(back.get(), half.astype(np.float32))


def test_gradcheck_takes_device_arrays(cupy):
    check(lambda x, w: ops.gelu_erf(ops.linear(x, w)), cupy.asarray(normal(2, 3)), cupy.asarray(normal(3, 2)))


def test_random_words_and_masks_are_those_of_the_host(cupy):
    mine, theirs = rows(cupy, 4, 6), rows(np, 4, 6)
    np.testing.assert_array_equal(mine.get(), theirs)
    np.testing.assert_array_equal(rows(cupy, 3, 2, 6).get(), rows(np, 3, 2, 6))
    for function in (words32, uniform, lambda r, c: keep_mask(r, c, 0.3), lambda r, c: keep_mask(r, c, 1.0)):
        np.testing.assert_array_equal(to_host(function(mine, 9)), function(theirs, 9))
        np.testing.assert_array_equal(to_host(function(mine, cupy.arange(2, 5))), function(theirs, np.arange(2, 5)))


def test_python_and_numpy_numbers_mix_and_do_not_promote(cupy):
    x = Tensor(cupy.ones((2, 2), np.float32), requires_grad=True)
    scale = np.float64(0.5)
    for y in (x * scale, scale * x, x + scale, scale - x, x / scale, scale / x, x**scale, ops.maximum(x, scale)):
        assert isinstance(y.data, ndarray)
        assert y.dtype == np.float32


def test_arrays_on_the_left_ask_the_tensor(cupy):
    x = Tensor(cupy.ones(3), requires_grad=True)
    for y in (cupy.ones(3) + x, cupy.ones(3) - x, cupy.ones(3) * x, cupy.ones(3) / x, cupy.ones((2, 3)) @ x):
        assert isinstance(y, Tensor)


def test_host_ids_for_a_table_on_the_device_are_refused(cupy):
    with pytest.raises(TypeError, match="host array"):
        ops.take(Tensor(cupy.zeros((4, 2))), IDS)


def test_an_id_beyond_the_table_wraps_around_instead_of_raising(cupy):
    """No op may wait for the device to look, so ids are checked where they are made: on the host."""
    table = Tensor(cupy.asarray(np.arange(4.0).reshape(4, 1)))
    assert ops.take(table, cupy.asarray([5])).data.tolist() == [[1.0]]

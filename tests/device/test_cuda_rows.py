"""CUDA kernels of whole rows: norms, softmax, loss and sums.  What no comparison with the reference shows."""

import re

import numpy as np
import pytest
from kernel_case import normal
from strict_array import crossings
from strict_kernel import order_of_threads
from strict_stream import launches

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.lazy import unrounded
from mpitrain.backend import dtype_of, to_host
from mpitrain.kernels.cuda import norm, sums
from mpitrain.kernels.cuda.launch import THREADS, text
from mpitrain.kernels.cuda.rows import QUAD
from mpitrain.rng import keep_mask

IGNORE = -100
DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])


def arrays(cupy, dtype="float32", **shapes):
    rng = np.random.default_rng(3)
    return {name: cupy.array(normal(rng, *shape).astype(dtype_of(dtype))) for name, shape in shapes.items()}


def hashes(cupy, rows):
    return cupy.array(np.random.default_rng(4).integers(0, 2**64, rows, dtype=np.uint64))


def same(one, other):
    return all(to_host(a).tobytes() == to_host(b).tobytes() for a, b in zip(one, other, strict=True))


def calls(cupy, rows=24, width=40, dtype="float32"):
    """Every kernel of rows, by name: (call, launches)."""
    a = arrays(cupy, dtype, x=(rows, width), y=(rows, width), w=(width,), b=(width,))
    x, y, w, b = a.values()
    drop, wide = hashes(cupy, rows), np.float64 if dtype == "float64" else np.float32
    number = cupy.ones((rows, 1), wide)
    targets = cupy.array(np.random.default_rng(5).integers(0, width, rows))
    ids = cupy.array(np.random.default_rng(6).integers(0, 9, rows))

    def row_sum():
        out = cupy.zeros((9, width), wide)
        kernels.row_sum(ids, x, out)
        return (out,)

    return {
        "layer_norm": (lambda: kernels.layer_norm(x, w, b, 1e-5), 1),
        "residual_norm": (lambda: kernels.residual_norm(x, y, b, drop, 0.1, w, b, 1e-5), 1),
        "layer_norm_backward": (lambda: kernels.layer_norm_backward(y, x, number, number, w, x), 3),
        "rms_norm": (lambda: kernels.rms_norm(x, w, 1e-5), 1),
        "residual_rms_norm": (lambda: kernels.residual_rms_norm(x, y, b, drop, 0.1, w, 1e-5), 1),
        "rms_norm_backward": (lambda: kernels.rms_norm_backward(y, x, number, w, x), 3),
        "softmax": (lambda: (kernels.softmax(x, -1, None),), 1),
        "softmax masked": (lambda: (kernels.softmax(x, -1, y > 0),), 2),  # one makes the mask
        "softmax_backward": (lambda: (kernels.softmax_backward(y, x, -1),), 1),
        "cross_entropy": (lambda: kernels.cross_entropy(x, targets, IGNORE), 2),
        "cross_entropy_backward": (
            lambda: (kernels.cross_entropy_backward(number[0, 0], x, targets, number[:, 0].copy(), IGNORE),),
            2,  # one copies
        ),
        "sum_rows": (lambda: (kernels.sum_rows(x),), 2),
        "row_sum": (row_sum, 3),  # one clears the table
    }


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_a_kernel_is_one_to_three_launches_and_waits_for_nothing(cuda_kernels, name):
    for kernel, (call, expected) in calls(cuda_kernels, dtype=name).items():
        with crossings(waits=True) as crossed, launches() as launched:
            call()
        assert not crossed, kernel
        assert sum(launched.values()) == expected, (kernel, launched)


def test_launchers_and_sources_agree_on_their_numbers():
    """A launcher with other ones would still be right, but rows would leave the registers."""
    defined = dict(re.findall(r"^#define (\w+) (\d+)", text("norm") + text("embedding"), re.M))
    assert int(defined["NORM_QUADS"]) * QUAD == norm.KEPT
    assert int(defined["NORM_THREADS"]) == norm.MOST_THREADS
    assert int(defined["PART"]) == sums.PART
    assert int(defined["SORT_THREADS"]) == THREADS


def test_a_block_that_has_many_rows_gives_the_bits_of_one_that_has_one(cuda_kernels, monkeypatch):
    """Then its shared memory serves row after row, in whatever order its threads come."""
    whole = {name: call() for name, (call, _) in calls(cuda_kernels, 11, 517).items()}
    monkeypatch.setattr(norm, "MOST_ROWS", 2)
    for name, (call, _) in calls(cuda_kernels, 11, 517).items():
        with order_of_threads("both"):
            assert same(call(), whole[name]), name


@DTYPES
def test_a_branch_and_its_norm_have_the_bits_that_they_have_one_after_the_other(cuda_kernels, dtype):
    """Of halves the norm is that of the rounded sum: so a layer may be recomputed in either form."""
    for width in (33, 132):
        x, y, b, w = arrays(cuda_kernels, dtype, x=(9, width), y=(9, width), b=(width,), w=(width,)).values()
        rows = hashes(cuda_kernels, 9)
        for bias, drop in ((b, rows), (None, rows), (b, None)):
            total = kernels.residual(x, y, bias, drop, 0.3)
            one_by_one = total, *kernels.layer_norm(total, w, b, 1e-5)
            assert same(kernels.residual_norm(x, y, bias, drop, 0.3, w, b, 1e-5), one_by_one)
            one_by_one = total, *kernels.rms_norm(total, w, 1e-5)
            assert same(kernels.residual_rms_norm(x, y, bias, drop, 0.3, w, 1e-5), one_by_one)
        zeros, ones = cuda_kernels.zeros_like(x), cuda_kernels.ones_like(x)
        dropped = to_host(kernels.residual_norm(zeros, ones, None, rows, 0.3, w, w, 1e-5)[0])
        assert np.array_equal(dropped != 0, keep_mask(to_host(rows), width, 0.3))


def test_a_target_that_is_no_column_makes_the_loss_nan_and_reads_nothing_beyond(cuda_kernels):
    x = arrays(cuda_kernels, x=(3, 8))["x"]
    targets = cuda_kernels.array(np.array([1, 8, 2]))
    total, lse = kernels.cross_entropy(x, targets, IGNORE)
    assert np.isnan(to_host(total))
    assert np.isfinite(to_host(lse)).all()
    grad = to_host(kernels.cross_entropy_backward(cuda_kernels.ones((), np.float32), x, targets, lse, IGNORE))
    np.testing.assert_allclose(grad.sum(1), [0, 1, 0], atol=1e-6)
    total, _ = kernels.cross_entropy(x, targets, 8)  # but one that does not count may be any number
    assert np.isfinite(to_host(total))


def test_targets_of_another_number_are_none_of_the_kernel(cuda_kernels):
    """It would read beyond them; the reference says what is wrong."""
    x, targets = arrays(cuda_kernels, x=(3, 8))["x"], cuda_kernels.array(np.array([1, 2]))
    with pytest.raises((ValueError, IndexError)):
        kernels.cross_entropy(x, targets, IGNORE)


def test_a_row_whose_id_the_table_does_not_have_is_left_out(cuda_kernels):
    ids = np.array([5, 1, -1, 1, 2**40] + [7] * 40)
    rows, out = cuda_kernels.ones((ids.size, 3), np.float32), cuda_kernels.zeros((5, 3), np.float32)
    kernels.row_sum(cuda_kernels.array(ids), rows, out)
    assert to_host(out)[:, 0].tolist() == [0, 2, 0, 0, 0]


def test_gradients_of_what_is_picked_twice_add_up(cuda_kernels):
    """As on the host, and the same each time."""
    for _ in range(3):
        table, one = (Tensor(cuda_kernels.ones(s, np.float32), requires_grad=True) for s in ((5, 2), (1,)))
        with Tape() as tape, launches() as launched:
            rows = ops.take(table, cuda_kernels.array(np.array([3, 3, 3, 0])))
            y = ops.sum(ops.take(one, cuda_kernels.array(np.array([0, 0]))))
            grads = tape.run_backward(
                [(rows, cuda_kernels.ones((4, 2), np.float32)), (y, cuda_kernels.ones((), np.float32))]
            )
        assert launched["add_rows"] == 2
        assert to_host(unrounded(grads[table])).tolist() == [[1, 1], [0, 0], [0, 0], [3, 3], [0, 0]]
        assert to_host(unrounded(grads[one])).tolist() == [2]


@DTYPES
def test_many_ids_are_sorted_by_another_way_to_the_same_order(cuda_kernels, monkeypatch, dtype):
    rng = np.random.default_rng(7)
    ids, rows = cuda_kernels.array(rng.integers(0, 9, 90)), arrays(cuda_kernels, dtype, rows=(90, 6))["rows"]

    def summed():
        out = cuda_kernels.zeros((9, 6), np.float64 if dtype == "float64" else np.float32)
        kernels.row_sum(ids, rows, out)
        return out

    counted = summed()
    monkeypatch.setattr(sums, "COUNTED", 89)
    assert same([summed()], [counted])


def test_rows_of_one_id_are_added_in_the_order_in_which_they_stand(cuda_kernels):
    """1e8 + 1 - 1e8 is 0 in float32, 1e8 - 1e8 + 1 is 1."""
    ids = cuda_kernels.array(np.array([2, 0, 2, 2, 0, 0]))
    rows = cuda_kernels.array(np.array([1e8, 1e8, 1, -1e8, -1e8, 1], np.float32)[:, None])
    out = cuda_kernels.zeros((3, 1), np.float32)
    kernels.row_sum(ids, rows, out)
    assert to_host(out)[:, 0].tolist() == [1, 0, 0]

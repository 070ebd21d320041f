"""What products ask cuBLAS for: nothing is copied that it can read as it lies, and halves stay halves."""

from __future__ import annotations

import numpy as np
import pytest
from strict_runtime import devices
from strict_stream import asynchronous, launches

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.backend import dtype_of
from mpitrain.errors import ShapeError
from mpitrain.kernels import reference
from mpitrain.kernels.cuda import cublas, images
from mpitrain.kernels.windows import Windows

HALF, BRAIN, FLOAT = 2, 14, 0  # cudaDataType


def on_device(cupy, *shape, dtype="float32"):
    values = np.random.default_rng(sum(shape)).standard_normal(shape)
    return cupy.asarray(values.astype(dtype_of(dtype)))


def kinds(cupy):
    """Of each product since they were counted from 0: the dtypes of its factors and of what comes out, and how."""
    found = []
    for name, numbers in cupy.cuda.cublas.calls:
        batched = name != "gemmEx"
        second, first, out = numbers[8], numbers[12 if batched else 11], numbers[17 if batched else 15]
        assert second == first
        found.append((first, out, numbers[-2]))
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_product_is_one_call_whichever_way_its_factors_are_turned(cuda_kernels, dtype):
    a, b = on_device(cuda_kernels, 9, 5, dtype=dtype), on_device(cuda_kernels, 7, 9, dtype=dtype)
    wide = "float64" if dtype == "float64" else "float32"
    out = cuda_kernels.empty((5, 7), wide)
    with launches() as counted:
        kernels.matmul(a.T, b.T, out=out)
        kernels.matmul(a.T, b.T, out=out, add=True)
    assert counted == {"gemmEx": 2}
    exact = a.get().astype(float).T @ b.get().astype(float).T
    np.testing.assert_allclose(out.get(), 2 * exact, rtol=1e-5, atol=1e-5)


def test_one_matrix_for_a_stack_is_one_product_of_all_rows(cuda_kernels):
    with launches() as counted:
        kernels.matmul(on_device(cuda_kernels, 2, 3, 5, 4), on_device(cuda_kernels, 4, 6))
    assert counted == {"empty": 1, "gemmEx": 1} or counted == {"gemmEx": 1}
    assert cuda_kernels.cuda.cublas.calls[-1][1][4] == 2 * 3 * 5


def test_a_bias_is_written_once_and_the_product_added_to_it(cuda_kernels):
    for dtype in ("float16", "float32"):
        x, w, b = (on_device(cuda_kernels, *shape, dtype=dtype) for shape in ((5, 3), (3, 7), (7,)))
        with launches() as counted:
            kernels.linear(x, w, b)
        assert counted["gemmEx"] == 1
        assert counted.total() == 2


def test_where_a_product_can_be_written():
    whole, stack = np.empty((6, 8), np.float32), np.empty((3, 4, 5), np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(np.empty(9, np.float32), 4)
    for out in (whole, whole.T, whole[1:3, 2:5], whole[::2], stack, stack.swapaxes(0, 1), stack.swapaxes(1, 2)):
        assert cublas.takes(out), out.strides
    for out in (whole[:, ::2], whole[::-1], windows, np.broadcast_to(whole, (3, 6, 8)), stack[::-1], stack[..., ::2]):
        assert not cublas.takes(out), out.strides


def test_heads_are_walked_by_strides_and_many_stacks_are_copied(cuda_kernels):
    q, k = on_device(cuda_kernels, 3, 7, 2, 4), on_device(cuda_kernels, 3, 5, 2, 4)
    with launches() as counted:
        kernels.matmul(q.transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1))
    assert counted["gemmStridedBatchedEx"] == 3
    assert counted.total() - counted["empty"] == 3
    q, k = on_device(cuda_kernels, 30, 7, 2, 4), on_device(cuda_kernels, 30, 5, 2, 4)
    with launches() as counted:
        kernels.matmul(q.transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1))
    assert counted["gemmStridedBatchedEx"] == 1  # 30 calls would cost more than to copy both


@pytest.mark.parametrize(("dtype", "kind"), [("float16", HALF), ("bfloat16", BRAIN)])
def test_halves_are_multiplied_as_halves_and_added_up_in_float32(cuda_kernels, dtype, kind):
    library = cuda_kernels.cuda.cublas
    a, b = on_device(cuda_kernels, 5, 3, dtype=dtype), on_device(cuda_kernels, 3, 7, dtype=dtype)
    library.calls.clear()
    kernels.matmul(a, b)
    kernels.matmul(a, b, dtype=np.float32)
    assert kinds(cuda_kernels) == [(kind, kind, 68), (kind, FLOAT, 68)]
    assert library.mode == 16  # parts of a long sum are not rounded to halves in between


PRODUCTS = {
    "linear": (lambda x, w, b: ops.linear(x, w, b), [(2, 4, 3), (3, 6), (6,)]),
    "matmul": (lambda x, w: x @ w, [(2, 4, 3), (3, 6)]),
    "einsum": (lambda x, w: ops.einsum("abc,dc->dab", x, w), [(2, 4, 3), (5, 3)]),
    "grouped_matmul": (lambda x, w: ops.grouped_matmul(x, w, [3, 0, 4]), [(7, 3), (3, 3, 5)]),
    "conv2d": (lambda x, w, b: ops.conv2d(x, w, b, padding=1), [(2, 4, 4, 3), (5, 3, 3, 3), (5,)]),
    "conv2d by steps": (lambda x, w: ops.conv2d(x, w, stride=2), [(2, 5, 5, 3), (5, 3, 3, 3)]),
}


@pytest.mark.parametrize(("dtype", "kind"), [("float16", HALF), ("bfloat16", BRAIN)])
@pytest.mark.parametrize("op", PRODUCTS)
def test_neither_way_through_an_op_multiplies_widened_halves(cuda_kernels, op, dtype, kind):
    function, shapes = PRODUCTS[op]
    inputs = [Tensor(on_device(cuda_kernels, *shape, dtype=dtype), requires_grad=True) for shape in shapes]
    cuda_kernels.cuda.cublas.calls.clear()
    with Tape() as tape:
        y = function(*inputs)
    gradients = tape.run_backward([(y, on_device(cuda_kernels, *y.shape, dtype=dtype))])
    assert len(gradients) == len(inputs)
    assert len(cuda_kernels.cuda.cublas.calls) >= 3
    assert {factors for factors, _, _ in kinds(cuda_kernels)} == {kind}


def test_tensor_cores_round_float32_only_when_asked(cuda_kernels, monkeypatch):
    a, b = on_device(cuda_kernels, 5, 3), on_device(cuda_kernels, 3, 7)
    cuda_kernels.cuda.cublas.calls.clear()
    kernels.matmul(a, b)
    monkeypatch.setenv("CUPY_TF32", "1")
    kernels.matmul(a, b)
    assert [call[2] for call in kinds(cuda_kernels)] == [68, 77]


def test_a_device_without_bfloat16_multiplies_it_in_float32(cuda_kernels):
    a, b = (on_device(cuda_kernels, *shape, dtype="bfloat16") for shape in ((5, 3), (3, 7)))
    with devices(1, capability="75"):
        cuda_kernels.cuda.cublas.calls.clear()
        y = kernels.matmul(a, b)
        kernels.matmul(a.astype(np.float16), b.astype(np.float16))
    assert [call[:2] for call in kinds(cuda_kernels)] == [(FLOAT, FLOAT), (HALF, HALF)]
    assert y.dtype == dtype_of("bfloat16")


def test_shapes_that_do_not_go_together_are_refused(cuda_kernels):
    a, b = on_device(cuda_kernels, 5, 3), on_device(cuda_kernels, 4, 7)
    with pytest.raises(ShapeError, match=r"\(5, 3\) and \(4, 7\)"):
        kernels.matmul(a, b)
    with pytest.raises(ShapeError, match="do not go together"):
        kernels.matmul(on_device(cuda_kernels, 2, 5, 4), on_device(cuda_kernels, 3, 4, 7))
    with pytest.raises(ShapeError, match="out"):
        kernels.matmul(on_device(cuda_kernels, 5, 4), b, out=cuda_kernels.empty((7, 5), np.float32))


def test_a_product_waits_for_what_was_started_before_it(cuda_kernels):
    a, b = on_device(cuda_kernels, 5, 3), on_device(cuda_kernels, 3, 7)
    exact = 2 * a.get() @ b.get()
    with asynchronous():
        y = kernels.matmul(a + a, b)
        a.fill(0)
        np.testing.assert_allclose(y.get(), exact, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------- convolutions


@pytest.mark.parametrize("block", [1, 100, 1 << 25])
@pytest.mark.parametrize(
    ("slide", "groups"),
    [
        (Windows((7, 6), (3, 3), (1, 1), (1, 1)), 1),
        (Windows((7, 6), (3, 2), (2, 1), (1, 0)), 2),
        (Windows((5, 9), (2, 3), (1, 2), (2, 1), (2, 1)), 1),
    ],
)
def test_blocks_of_any_size_give_the_same(cuda_kernels, monkeypatch, block, slide, groups):
    """Whole images, some rows of places of one, or a row: pixels that two blocks saw add up."""
    monkeypatch.setattr(images, "BLOCK", block)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, *slide.image, 2 * groups)), rng.standard_normal((4, *slide.window, 2))
    bias, grad = rng.standard_normal(4), rng.standard_normal((3, *slide.places, 4))
    mine = [cuda_kernels.asarray(values) for values in (x, w, bias, grad)]
    out, dw = cuda_kernels.empty(w.shape), np.empty(w.shape)
    kernels.conv2d_filters(mine[0], mine[3], slide, out, groups)
    reference.conv2d_filters(x, grad, slide, dw, groups)
    pairs = [
        (kernels.conv2d(*mine[:3], slide, groups), reference.conv2d(x, w, bias, slide, groups)),
        (kernels.conv2d_images(mine[3], mine[1], slide, groups), reference.conv2d_images(grad, w, slide, groups)),
        (out, dw),
    ]
    for got, exact in pairs:
        np.testing.assert_allclose(got.get(), exact, rtol=1e-12, atol=1e-12)


def test_images_of_single_pixels_are_not_copied(cuda_kernels):
    x, w = on_device(cuda_kernels, 2, 4, 5, 6), on_device(cuda_kernels, 3, 1, 1, 6)
    with launches() as counted:
        kernels.conv2d(x, w, None, Windows((4, 5), (1, 1), (1, 1), (0, 0)))
    assert counted.total() - counted["empty"] == 1


# -------------------------------------------------------------------------------------------- the stand-in itself


def refused(cupy, status, **changed):
    one = np.ones(2, np.float32)
    a, b, c = (cupy.zeros((4, 4), np.float32) for _ in range(3))
    numbers = dict(
        handle=cupy.cuda.get_cublas_handle(), transa=0, transb=0, m=4, n=4, k=4, alpha=one.ctypes.data, A=a.data.ptr,
        Atype=FLOAT, lda=4, strideA=16, B=b.data.ptr, Btype=FLOAT, ldb=4, strideB=16, beta=one.ctypes.data,
        C=c.data.ptr, Ctype=FLOAT, ldc=4, strideC=16, batchCount=1, computeType=68, algo=-1,
    )  # fmt: skip
    with pytest.raises((RuntimeError, TypeError), match=status):
        cupy.cuda.cublas.gemmStridedBatchedEx(**{**numbers, **changed})


def test_the_stand_in_refuses_what_cublas_refuses(cupy):
    refused(cupy, "NOT_INITIALIZED", handle=1)
    refused(cupy, "INVALID_VALUE", lda=3)
    refused(cupy, "INVALID_VALUE", m=-1)
    refused(cupy, "NOT_SUPPORTED", Atype=HALF)
    refused(cupy, "NOT_SUPPORTED", Atype=HALF, Btype=HALF, Ctype=BRAIN)
    refused(cupy, "NOT_SUPPORTED", computeType=70)
    refused(cupy, "one place", batchCount=2, m=2, strideA=0, strideB=0, strideC=0)
    refused(cupy, "IllegalAddress", batchCount=2)  # beyond the end of the arrays
    refused(cupy, "not an integer", k=4.0)

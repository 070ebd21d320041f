"""Convolution and pooling: gradients, PyTorch's opinion, ties, blocks, and what waits for backward."""

import math

import numpy as np
import pytest
from op_calls import assert_same, run

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.debug.flops import BACKWARD, FORWARD, Flops
from mpitrain.errors import UserError
from mpitrain.events import listen
from mpitrain.kernels.reference import convolution
from mpitrain.kernels.windows import Windows
from mpitrain.nn import init
from mpitrain.nn.conv import AvgPool2d, Conv2d, MaxPool2d

RNG = np.random.default_rng(11)


def normal(*shape):
    return RNG.standard_normal(shape)


# images (b, h, w, c), filters (out, kh, kw), stride, padding, dilation, groups
CONVOLUTIONS = [
    ((2, 8, 8, 3), (4, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((3, 7, 6, 2), (5, 2, 3), (2, 1), (0, 2), (1, 1), 1),
    ((1, 5, 5, 1), (1, 5, 5), (3, 3), (3, 3), (1, 1), 1),
    ((2, 4, 6, 2), (3, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((2, 4, 6, 2), (3, 1, 2), (3, 2), (2, 1), (1, 1), 1),  # padding that some elements of the window never leave
    ((2, 1, 1, 2), (3, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((2, 7, 9, 3), (4, 3, 3), (1, 2), (2, 1), (2, 3), 1),
    ((2, 6, 5, 6), (4, 3, 2), (1, 1), (1, 1), (1, 1), 2),
    ((2, 6, 7, 4), (8, 2, 3), (2, 1), (1, 2), (1, 2), 4),
    ((2, 5, 6, 5), (5, 3, 3), (1, 1), (1, 1), (1, 1), 5),  # a filter for each channel
    ((1, 3, 4, 2), (35, 2, 2), (1, 1), (1, 0), (1, 1), 1),  # filters beyond two vectors of any processor
]
# size, window, stride, padding
POOLS = [
    ((8, 8), 2, None, 0),
    ((7, 9), 3, 2, 0),
    ((5, 5), 2, 3, 0),
    ((6, 6), (1, 3), (2, 1), 0),
    ((4, 4), 4, 1, 0),
    ((7, 8), 3, 2, 1),
    ((3, 5), (2, 4), (1, 3), (1, 2)),
]


def convolved(x, w, b=None, *, stride, padding, dilation=(1, 1), groups=1):
    """By the formula, place by place and group by group."""
    x = np.pad(x, [(0, 0), (padding[0],) * 2, (padding[1],) * 2, (0, 0)])
    extent = [(k - 1) * g + 1 for k, g in zip(w.shape[1:3], dilation, strict=True)]
    places = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:3], extent, stride, strict=True)]
    y = np.zeros((x.shape[0], *places, w.shape[0]))
    for i, j in np.ndindex(*places):
        down, right = (slice(i * s, i * s + e, g) for i, s, e, g in zip((i, j), stride, extent, dilation, strict=True))
        seen = x[:, down, right].reshape(len(x), *w.shape[1:3], groups, w.shape[3])
        y[:, i, j] = np.einsum("nyxgc,goyxc->ngo", seen, w.reshape(groups, -1, *w.shape[1:])).reshape(len(x), len(w))
    return y if b is None else y + b


def filters(image, window, groups):
    return normal(*window, image[-1] // groups)


@pytest.mark.parametrize(("image", "window", "stride", "padding", "dilation", "groups"), CONVOLUTIONS)
def test_convolution_is_the_formula_and_its_gradients_are_right(image, window, stride, padding, dilation, groups):
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    x, w, b = normal(*image), filters(image, window, groups), normal(window[0])
    y = ops.conv2d(Tensor(x), Tensor(w), Tensor(b), **how).data
    np.testing.assert_allclose(y, convolved(x, w, b, **how), rtol=1e-12, atol=1e-12)
    check(lambda x, w, b: ops.conv2d(x, w, b, **how), x, w, b)


@pytest.mark.parametrize("block", [1, 40, 300])
@pytest.mark.parametrize(("image", "window", "stride", "padding", "dilation", "groups"), CONVOLUTIONS)
def test_blocks_of_any_size_give_the_same(image, window, stride, padding, dilation, groups, block, monkeypatch):
    """Of some images, of one, and of some rows of one, where the padding is elsewhere in each."""
    kernels.select("numpy")
    arrays = normal(*image), filters(image, window, groups), normal(window[0])
    whole = run(lambda x, w, b: ops.conv2d(x, w, b, stride, padding, dilation, groups), *arrays)
    monkeypatch.setattr(convolution, "BLOCK", block)
    assert_same(run(lambda x, w, b: ops.conv2d(x, w, b, stride, padding, dilation, groups), *arrays), whole, 1e-11)


def test_scratch_is_a_block_not_all_that_is_seen(monkeypatch):
    monkeypatch.setattr(convolution, "BLOCK", 1000)
    slide = Windows((32, 32), (3, 3), (1, 1), (1, 1))
    sizes = [rows.size for _, rows in convolution._unrolled(normal(4, 32, 32, 2), slide, 1, np.float64)]
    assert sum(sizes) == 4 * 32 * 32 * 18
    assert max(sizes) <= 1000


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-11), (np.float32, 1e-5)])
@pytest.mark.parametrize(("image", "window", "stride", "padding", "dilation", "groups"), CONVOLUTIONS)
def test_convolution_agrees_with_pytorch(image, window, stride, padding, dilation, groups, dtype, rtol):
    torch = pytest.importorskip("torch")
    arrays = [a.astype(dtype) for a in (normal(*image), filters(image, window, groups), normal(window[0]))]
    seed = (
        np.random.default_rng(5)
        .standard_normal(convolved(*arrays, stride=stride, padding=padding, dilation=dilation, groups=groups).shape)
        .astype(dtype)
    )
    y, grads = run(lambda x, w, b: ops.conv2d(x, w, b, stride, padding, dilation, groups), *arrays, seed=seed)
    x, w, b = (torch.tensor(a, requires_grad=True) for a in arrays)
    z = torch.nn.functional.conv2d(
        x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), b, stride, padding, dilation, groups
    ).permute(0, 2, 3, 1)
    z.backward(torch.tensor(seed))
    for mine, theirs in zip((y, *grads), (z.detach().numpy(), *(t.grad.numpy() for t in (x, w, b))), strict=True):
        assert mine.dtype == dtype
        assert np.abs(mine - theirs).max() <= rtol * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize("values", ["distinct", "ties"])
@pytest.mark.parametrize(("size", "window", "stride", "padding"), POOLS)
def test_pooling_agrees_with_pytorch_also_in_ties(size, window, stride, padding, values, level):
    torch = pytest.importorskip("torch")
    x = normal(2, *size, 3) if values == "distinct" else RNG.integers(-1, 2, (2, *size, 3)).astype(float)
    y, grads = run(lambda x: ops.max_pool2d(x, window, stride, padding), x)
    t = torch.tensor(x, requires_grad=True)
    z = torch.nn.functional.max_pool2d(t.permute(0, 3, 1, 2), window, stride, padding).permute(0, 2, 3, 1)
    z.backward(torch.tensor(np.random.default_rng(5).standard_normal(y.shape)))
    assert_same((y, grads), (z.detach().numpy(), [t.grad.numpy()]))


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-12), (np.float32, 1e-5)])
@pytest.mark.parametrize(("size", "window", "stride", "padding"), POOLS)
def test_means_agree_with_pytorch_with_and_without_padding(size, window, stride, padding, dtype, rtol, counted):
    torch = pytest.importorskip("torch")
    x = normal(2, *size, 3).astype(dtype)
    t = torch.tensor(x, requires_grad=True)
    pool = torch.nn.functional.avg_pool2d
    z = pool(t.permute(0, 3, 1, 2), window, stride, padding, count_include_pad=counted).permute(0, 2, 3, 1)
    seed = normal(*z.shape).astype(dtype)
    z.backward(torch.tensor(seed))
    y, (dx,) = run(lambda x: ops.avg_pool2d(x, window, stride, padding, counted), x, seed=seed)
    np.testing.assert_allclose(y, z.detach().numpy(), rtol=rtol, atol=rtol)
    np.testing.assert_allclose(dx, t.grad.numpy(), rtol=rtol, atol=rtol)
    assert y.dtype == dx.dtype == dtype


@pytest.mark.parametrize(("size", "window", "stride", "padding"), POOLS)
def test_gradients_of_pools_are_right(size, window, stride, padding):
    x = RNG.permutation(2 * math.prod(size) * 3).reshape(2, *size, 3) * 0.1  # far enough apart for differences
    check(lambda x: ops.max_pool2d(x, window, stride, padding), x)
    check(lambda x: ops.avg_pool2d(x, window, stride, padding, count_padding=False), x)


def test_of_equal_pixels_the_first_has_the_gradient():
    """Row by row; the same in what a policy decodes, since the place itself is what waits."""
    x = np.zeros((1, 2, 4, 1))
    x[0, 1, 0] = x[0, 1, 1] = 5.0
    y, (dx,) = run(ops.max_pool2d, x, seed=np.array([[[[2.0], [3.0]]]]))
    assert y.ravel().tolist() == [5.0, 0.0]
    assert dx[0, :, :, 0].tolist() == [[0, 0, 3, 0], [2, 0, 0, 0]]


def test_pixels_that_fill_no_window_have_no_gradient():
    _, (dx,) = run(ops.max_pool2d, normal(1, 3, 3, 2), seed=np.ones((1, 1, 1, 2)))
    assert not dx[:, 2].any()
    assert not dx[:, :, 2].any()
    assert dx.sum() == 2


def test_what_is_not_a_number_is_not_passed_over():
    x = np.zeros((1, 2, 4, 1))
    x[0, 0, 0] = np.nan
    y = ops.max_pool2d(Tensor(x)).data.ravel()
    assert np.isnan(y[0])
    assert y[1] == 0


# ------------------------------------------------------------------------------------------------ what waits, and where


def test_a_network_keeps_each_map_once_and_of_pools_a_byte_an_output():
    """ReLU's output is the next convolution's input, and the pool keeps neither its input nor its output."""
    shapes = (2, 4, 4, 3), (5, 3, 3, 3), (6, 3, 3, 5)
    x, w, v = (Tensor(normal(*shape), requires_grad=True) for shape in shapes)
    with Tape() as tape:
        y = ops.relu(ops.conv2d(x, w, padding=1))
        z = ops.relu(ops.conv2d(y, v, padding=1))
        p = ops.max_pool2d(z)
    filters = w.data.nbytes + v.data.nbytes  # no parameters here, so they count
    assert tape.nbytes == filters + x.data.nbytes + y.data.nbytes + z.data.nbytes + p.data.size
    assert tape.nodes[2].saved[0] is y.data


@pytest.mark.parametrize(("window", "dtype"), [(16, np.uint8), (17, np.uint16)])
def test_large_windows_count_further_than_a_byte(window, dtype):
    x = Tensor(normal(1, 20, 20, 1), requires_grad=True)
    with Tape() as tape:
        ops.max_pool2d(x, window)
    assert tape.nodes[0].saved[0].dtype == dtype


class Alone:
    coords = dict.fromkeys(("pp", "edp", "ep", "cp", "tp"), 0)
    sizes = dict.fromkeys(coords, 1)


def test_filters_get_their_gradient_in_their_buffer_and_micro_batches_add_up():
    layer = Conv2d("conv", 3, 5, padding=1)
    layer.materialize(Alone, dtype=np.float64)
    x, seed = normal(4, 6, 6, 3), normal(4, 6, 6, 5)
    layer.start_step()
    for rows in (slice(0, 1), slice(1, 4)):
        with Tape() as tape:
            y = layer(Tensor(x[rows]))
        tape.run_backward([(y, seed[rows])])
    _, (_, dw, db) = run(
        lambda x, w, b: ops.conv2d(x, w, b, padding=1), x, layer.weight.data, layer.bias.data, seed=seed
    )
    np.testing.assert_allclose(layer.weight.grad, dw, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(layer.bias.grad, db, rtol=1e-12, atol=1e-12)
    layer.start_step()
    with Tape() as tape:
        y = layer(Tensor(np.zeros((0, 6, 6, 3))))
    tape.run_backward([(y, y.data)])
    assert not layer.weight.grad.any()  # of no images, not those of the step before


def test_the_gradient_of_half_precision_filters_is_summed_in_single():
    layer = Conv2d("conv", 1, 1, kernel=1)
    layer.materialize(Alone, dtype=np.float16)
    layer.start_step()
    with Tape() as tape:
        y = layer(Tensor(np.ones((1, 64, 64, 1), np.float16)))
    tape.run_backward([(y, np.full(y.shape, 1 + 2**-10, np.float16))])
    assert layer.weight.grad.dtype == np.float32
    assert layer.weight.grad.item() == 64 * 64 * (1 + 2**-10)


def test_a_split_backward_gives_the_same_gradients():
    w, v = normal(4, 3, 3, 2), normal(3, 2, 2, 4)

    def network(x, w, v):
        return ops.conv2d(ops.max_pool2d(ops.relu(ops.conv2d(x, w, padding=1))), v)

    x = normal(2, 6, 6, 2)
    expected = run(network, x, w, v)
    layers = [Conv2d("a", 2, 4, padding=1, bias=False), Conv2d("b", 4, 3, kernel=2, bias=False)]
    for layer, values in zip(layers, (w, v), strict=True):
        layer.materialize(Alone, dtype=np.float64)
        layer.weight.data[...] = values
        layer.start_step()
    t = Tensor(x, requires_grad=True)
    with Tape() as tape:
        y = layers[1](ops.max_pool2d(ops.relu(layers[0](t))))
    tape.backward_inputs([(y, np.random.default_rng(5).standard_normal(y.shape))])
    dx = tape.grads[t]
    for _ in tape.backward_weights():
        pass
    assert_same((y.data, [dx, *(layer.weight.grad for layer in layers)]), expected)


def test_operations_are_counted_by_the_formula():
    x, w = Tensor(normal(2, 8, 8, 3), requires_grad=True), Tensor(normal(5, 3, 3, 3), requires_grad=True)
    counted = Flops()
    with listen(counted):
        with Tape() as tape:
            y = ops.conv2d(x, w, padding=1)
        tape.run_backward([(y, y.data)])
    product = 2 * (2 * 8 * 8) * (9 * 3) * 5
    assert (counted.total(FORWARD), counted.total(BACKWARD)) == (product, 2 * product)


# ------------------------------------------------------------------------------------------------------- layers, errors


def test_initial_filters_keep_the_size_of_activations():
    layer = Conv2d("conv", 64, 48)
    layer.materialize(Alone, dtype=np.float64)
    assert layer.weight.full_shape == (48, 3, 3, 64)
    assert layer.weight.decay
    assert layer.weight.data.std() == pytest.approx((9 * 64) ** -0.5, rel=0.02)
    rows = init.fan_in((1, 2, 3))("conv.weight", (48, 3, 3, 64), (slice(7, 9), *[slice(None)] * 3), 0)
    np.testing.assert_array_equal(layer.weight.data[7:9], rows)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.conv2d(Tensor(normal(2, 4, 4)), Tensor(normal(2, 3, 3, 1))), r"\(b, h, w, c\)"),
        (lambda: ops.conv2d(Tensor(normal(2, 4, 4, 3)), Tensor(normal(2, 3, 3, 1))), r"\(2, 4, 4, 3\).*\(2, 3, 3, 1\)"),
        (lambda: ops.conv2d(Tensor(normal(2, 4, 4, 3)), Tensor(normal(3, 2))), "do not go together"),
        (
            lambda: ops.conv2d(Tensor(normal(2, 4, 4, 3)), Tensor(normal(1, 5, 3, 3))),
            "5 x 3 pixels does not fit .*4 x 4",
        ),
        (lambda: ops.conv2d(Tensor(normal(2, 4, 4, 1)), Tensor(normal(1, 3, 3, 1)), stride=0), "stride 0; .*from 1 on"),
        (
            lambda: ops.conv2d(Tensor(normal(2, 4, 4, 1)), Tensor(normal(1, 3, 3, 1)), padding=-1),
            "padding -1; .*from 0",
        ),
        (lambda: ops.conv2d(Tensor(normal(1, 4, 4, 3)), Tensor(normal(2, 2, 2, 1)), groups=2), "in 2 groups"),
        (lambda: ops.conv2d(Tensor(normal(1, 4, 4, 4)), Tensor(normal(3, 2, 2, 2)), groups=2), "in 2 groups"),
        (lambda: ops.conv2d(Tensor(normal(1, 4, 4, 1)), Tensor(normal(2, 1, 1, 1)), groups=0), "groups 0"),
        (
            lambda: ops.conv2d(Tensor(normal(1, 4, 4, 1)), Tensor(normal(2, 2, 3, 1)), dilation=2),
            "dilation 2 x 2, does not fit images of 4 x 4",
        ),
        (lambda: ops.max_pool2d(Tensor(normal(1, 4, 4, 1)), 2, padding=2), "padding 2 x 2 is more than half of the"),
        (lambda: ops.avg_pool2d(Tensor(normal(1, 4, 4, 1)), (3, 1), padding=1), "padding 1 x 1 is more than half"),
        (lambda: Conv2d("conv", 4, 6, groups=4), "conv: 4 channels and 6 filters do not divide into 4"),
        (lambda: ops.max_pool2d(Tensor(normal(2, 4))), r"max_pool2d: x \(2, 4\) is not \(b, h, w, c\)"),
        (lambda: ops.max_pool2d(Tensor(normal(1, 1, 4, 1))), "2 x 2 pixels does not fit images of 1 x 4"),
        (
            lambda: ops.conv2d(Tensor(normal(1, 4, 4, 1)), Tensor(normal(2, 3, 3, 1)), Tensor(normal(3))),
            "bias .*2 filters",
        ),
        (
            lambda: ops.conv2d(Tensor(normal(1, 4, 4, 1)), Tensor(normal(1, 3, 3, 1)), padding=10**9),
            "padding 1000000000 x 1000000000 is more than images of 4 x 4",
        ),
        (lambda: ops.avg_pool2d(Tensor(np.ones((1, 4, 4, 1), int))), "avg_pool2d: x is int64"),
        (lambda: Conv2d("conv", 4, 4, (1, 2, 3)), r"conv: kernel \(1, 2, 3\); it is a number from 1"),
        (lambda: Conv2d("conv", 4, 4, 2.5), "conv: kernel 2.5; it is a number"),
        (lambda: Conv2d("conv", 4, 4, stride=0), "conv: stride 0; .*from 1 on"),
        (lambda: Conv2d("conv", 4, 4, padding=-1), "conv: padding -1; .*from 0 on"),
        (lambda: Conv2d("conv", 4, 4, dilation=0), "conv: dilation 0; .*from 1 on"),
        (lambda: MaxPool2d("2"), "MaxPool2d: window '2'; .*from 1 on"),
        (lambda: AvgPool2d(2, stride=0), "AvgPool2d: stride 0; .*from 1 on"),
        (lambda: ops.max_pool2d(Tensor(normal(1, 4, 4, 1)), (2, 2, 2)), r"window \(2, 2, 2\); it is a number"),
    ],
)
def test_images_that_do_not_fit_are_refused(call, words):
    with pytest.raises(UserError, match=words):
        call()

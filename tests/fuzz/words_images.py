"""Words of images: what slides over them."""

from __future__ import annotations

import numpy as np
from fuzz.vocabulary import Op
from fuzz.words_fused import WEIGHTS, linear_dtype


def draw_images(g):
    """A value of four dims, often made for it."""
    x = g.value(lambda a: a.ndim == 4 and min(a.shape[1:3]) > 0)
    if x is None or g.chance(0.5):
        x = g.leaf((g.choose((0, 1, 2, 2, 3)), g.integer(1, 7), g.integer(1, 6), g.choose((1, 1, 2, 3))))
    return x


def draw_conv2d(g):
    x = draw_images(g)
    _, h, w, c = g.env[x].shape
    padding = (g.choose((0, 0, 1, 2)), g.choose((0, 1, 1, 3)))
    kernel = tuple(g.integer(1, min(4, n + 2 * p) + 1) for n, p in zip((h, w), padding, strict=True))
    filters = g.leaf((g.choose((0, 1, 2, 3)), *kernel, c), roles=WEIGHTS)
    stride = (g.choose((1, 1, 2, 3)), g.choose((1, 1, 2)))
    inputs = [x, filters]
    if g.chance(0.7):
        inputs.append(g.weight((g.env[filters].shape[0],)))
    return inputs, {"stride": stride, "padding": padding}


def conv2d(x, w, b=0.0, *, stride, padding):
    """Place by place, filter by filter."""
    x = np.pad(x, [(0, 0), (padding[0],) * 2, (padding[1],) * 2, (0, 0)])
    kh, kw = w.shape[1:3]
    places = places_of(x.shape[1:3], (kh, kw), stride)
    y = np.zeros((x.shape[0], *places, w.shape[0]))
    for n, i, j, o in np.ndindex(y.shape):
        top, left = i * stride[0], j * stride[1]
        y[n, i, j, o] = (x[n, top : top + kh, left : left + kw] * w[o]).sum()
    return y + b


def places_of(image, window, stride):
    return tuple((n - k) // s + 1 for n, k, s in zip(image, window, stride, strict=True))


def torch_conv2d(t, x, w, b=None, *, stride, padding):
    if not w.shape[0] or not x.numel():
        places = places_of([n + 2 * p for n, p in zip(x.shape[1:3], padding, strict=True)], w.shape[1:3], stride)
        y = t.zeros(x.shape[0], *places, w.shape[0], dtype=x.dtype) + x.sum() * 0 + w.sum() * 0
        return y if b is None else y + b
    y = t.nn.functional.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), b, stride, padding)
    return y.permute(0, 2, 3, 1)


def draw_max_pool2d(g):
    x = draw_images(g)
    _, h, w, _ = g.env[x].shape
    window = (g.integer(1, min(3, h) + 1), g.integer(1, min(3, w) + 1))
    return [x], {"window": window, "stride": g.choose((window, (1, 1), (2, 1), (3, 2)))}


def seen_from(x, window, stride):
    """(b, oh, ow, c, kh kw): what each window sees."""
    places = places_of(x.shape[1:3], window, stride)
    found = np.zeros((x.shape[0], *places, x.shape[3], window[0] * window[1]))
    for n, i, j, c in np.ndindex(found.shape[:4]):
        top, left = i * stride[0], j * stride[1]
        found[n, i, j, c] = x[n, top : top + window[0], left : left + window[1], c].reshape(-1)
    return found


def largest(x, window, stride):
    """Which pixels are the largest of their windows."""
    found = seen_from(x, window, stride)
    return found == found.max(-1, keepdims=True)


def torch_max_pool2d(t, x, window, stride):
    if not x.numel():
        return t.zeros(x.shape[0], *places_of(x.shape[1:3], window, stride), x.shape[3], dtype=x.dtype) + x.sum() * 0
    return t.nn.functional.max_pool2d(x.permute(0, 3, 1, 2), window, stride).permute(0, 2, 3, 1)


WORDS = [
    Op("conv2d", draw_conv2d, ("ops.conv2d({all}, stride={stride}, padding={padding})",), conv2d, torch_conv2d,
       dtype=linear_dtype, weight=1.5),
    Op("max_pool2d", draw_max_pool2d, ("ops.max_pool2d({0}, {window}, {stride})",),
       lambda x, window, stride: seen_from(x, window, stride).max(-1), torch_max_pool2d, choices=largest),
]  # fmt: skip

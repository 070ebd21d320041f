"""Words of images: what slides over them."""

from __future__ import annotations

from functools import partial

import numpy as np
from fuzz.vocabulary import Op, first_dtype
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
    groups = g.choose([n for n in (1, 1, 2, 3) if c % n == 0])
    padding = (g.choose((0, 0, 1, 2)), g.choose((0, 1, 1, 3)))
    dilation = (g.choose((1, 1, 2)), g.choose((1, 1, 1, 3)))
    kernel = tuple(
        g.integer(1, min(4, (n + 2 * p - 1) // d + 1) + 1) for n, p, d in zip((h, w), padding, dilation, strict=True)
    )
    filters = g.leaf((groups * g.choose((0, 1, 2, 3)), *kernel, c // groups), roles=WEIGHTS)
    stride = (g.choose((1, 1, 2, 3)), g.choose((1, 1, 2)))
    inputs = [x, filters]
    if g.chance(0.7):
        inputs.append(g.weight((g.env[filters].shape[0],)))
    return inputs, {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def conv2d(x, w, b=0.0, *, stride, padding, dilation, groups):
    """Place by place, filter by filter."""
    x = np.pad(x, [(0, 0), (padding[0],) * 2, (padding[1],) * 2, (0, 0)])
    (dh, dw), c = dilation, w.shape[3]
    reach = [(k - 1) * d + 1 for k, d in zip(w.shape[1:3], dilation, strict=True)]
    places = places_of(x.shape[1:3], reach, stride)
    y = np.zeros((x.shape[0], *places, w.shape[0]))
    for n, i, j, o in np.ndindex(y.shape):
        top, left, first = i * stride[0], j * stride[1], o // (w.shape[0] // groups) * c
        seen = x[n, top : top + reach[0] : dh, left : left + reach[1] : dw, first : first + c]
        y[n, i, j, o] = (seen * w[o]).sum()
    return y + b


def places_of(image, window, stride, padding=(0, 0)):
    return tuple((n + 2 * p - k) // s + 1 for n, k, s, p in zip(image, window, stride, padding, strict=True))


def torch_conv2d(t, x, w, b=None, *, stride, padding, dilation, groups):
    if not w.shape[0] or not x.numel():
        reach = [(k - 1) * d + 1 for k, d in zip(w.shape[1:3], dilation, strict=True)]
        places = places_of(x.shape[1:3], reach, stride, padding)
        y = t.zeros(x.shape[0], *places, w.shape[0], dtype=x.dtype) + x.sum() * 0 + w.sum() * 0
        return y if b is None else y + b
    y = t.nn.functional.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), b, stride, padding, dilation, groups)
    return y.permute(0, 2, 3, 1)


def draw_pool(g):
    x = draw_images(g)
    _, h, w, _ = g.env[x].shape
    window = (g.integer(1, min(3, h) + 1), g.integer(1, min(3, w) + 1))
    padding = tuple(g.choose((0, 0, k // 2)) for k in window)
    return [x], {"window": window, "stride": g.choose((window, (1, 1), (2, 1), (3, 2))), "padding": padding}


def seen_from(x, window, stride, padding, beyond):
    """(b, oh, ow, c, kh kw): what each window sees, and something else where that lies beyond the image."""
    places = places_of(x.shape[1:3], window, stride, padding)
    x = np.pad(x, [(0, 0), (padding[0],) * 2, (padding[1],) * 2, (0, 0)], constant_values=beyond)
    found = np.zeros((x.shape[0], *places, x.shape[3], window[0] * window[1]))
    for n, i, j, c in np.ndindex(found.shape[:4]):
        top, left = i * stride[0], j * stride[1]
        found[n, i, j, c] = x[n, top : top + window[0], left : left + window[1], c].reshape(-1)
    return found


def largest(x, window, stride, padding):
    """Which pixels are the largest of their windows."""
    found = seen_from(x, window, stride, padding, -np.inf)
    return found == found.max(-1, keepdims=True)


def torch_pool(kind, t, x, window, stride, padding, **more):
    if not x.numel():
        places = places_of(x.shape[1:3], window, stride, padding)
        return t.zeros(x.shape[0], *places, x.shape[3], dtype=x.dtype) + x.sum() * 0
    pool = getattr(t.nn.functional, kind)
    return pool(x.permute(0, 3, 1, 2), window, stride, padding, **more).permute(0, 2, 3, 1)


def draw_avg_pool2d(g):
    inputs, static = draw_pool(g)
    return inputs, {**static, "count": g.chance(0.5)}


def avg_pool2d(x, window, stride, padding, count):
    seen = seen_from(x, window, stride, padding, 0)
    inside = seen_from(np.ones(x.shape), window, stride, padding, 0)
    return seen.sum(-1) / (window[0] * window[1] if count else inside.sum(-1))


def draw_normalize(g):
    x = g.value(lambda a: a.ndim > 0)
    if x is None:
        return None
    shape = g.env[x].shape[-1:]
    dtype = g.kinds[x] if g.kinds[x] != "float16" else "float32"
    statistics = np.stack([g.array(shape), np.abs(g.array(shape)) + 0.25])
    given = g.leaf((2, *shape), ("tensor", "tensor", "constant", "array"), statistics, dtype)
    if g.env[given][1].min(initial=1) < 0.2:
        return None  # laid out so that it repeats the means
    return [x, given, g.weight(shape), g.weight(shape)], {"eps": g.choose((1e-5, 1e-3, 0.1))}


def normalize(x, statistics, weight, bias, eps):
    y = np.zeros(x.shape)
    for c in range(x.shape[-1]):
        mean, variance = statistics[:, c]
        y[..., c] = (x[..., c] - mean) / (variance + eps) ** 0.5 * weight[c] + bias[c]
    return y


WORDS = [
    Op("conv2d", draw_conv2d,
       ("ops.conv2d({all}, stride={stride}, padding={padding}, dilation={dilation}, groups={groups})",), conv2d,
       torch_conv2d, dtype=linear_dtype, weight=1.5),
    Op("max_pool2d", draw_pool, ("ops.max_pool2d({0}, {window}, {stride}, {padding})",),
       lambda x, window, stride, padding: seen_from(x, window, stride, padding, -np.inf).max(-1),
       partial(torch_pool, "max_pool2d"), choices=largest),
    Op("avg_pool2d", draw_avg_pool2d, ("ops.avg_pool2d({0}, {window}, {stride}, {padding}, {count})",), avg_pool2d,
       lambda t, x, window, stride, padding, count: torch_pool(
           "avg_pool2d", t, x, window, stride, padding, count_include_pad=count)),
    Op("normalize", draw_normalize, ("ops.normalize({0}, {1}, {2}, {3}, {eps})",), normalize,
       lambda t, x, statistics, weight, bias, eps: (x - statistics[0]) * t.rsqrt(statistics[1] + eps) * weight + bias,
       dtype=first_dtype, blur="({0} - {1}[0]) * shake({0}) * {2}"),
]  # fmt: skip

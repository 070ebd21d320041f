"""Cases of windows on images: strides, padding, dilation, groups, windows larger than what they see, equal maxima."""

from __future__ import annotations

from typing import Any

import numpy as np
from kernel_case import Case, Wide, normal

from mpitrain.kernels.windows import Windows

_PAIRS = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}


def _slide(image: tuple[int, int], window: tuple[int, int], **pairs: tuple[int, int]) -> Windows:
    return Windows(image, window, **{**_PAIRS, **pairs})


def _conv(
    b: int, slide: Windows, channels: int, out: int, groups: int = 1, with_bias: bool = True, cost: str = "default"
) -> dict[str, Case]:
    """Forward and both gradients; channels are those of a group."""
    kernels = ("conv2d", "conv2d_images", "conv2d_filters")
    x, w, y = (b, *slide.image, groups * channels), (out, *slide.window, channels), (b, *slide.places, out)

    def make(rng: np.random.Generator) -> dict[str, Any]:
        made = {"x": normal(rng, *x), "w": normal(rng, *w), "grad": normal(rng, *y), "total": Wide(normal(rng, *w))}
        return {**made, "bias": 3 * normal(rng, out) if with_bias else None}

    def filters(k: Any, a: Any) -> Any:
        fresh = a.xp.full(a.total.shape, float("nan"), a.total.dtype)
        k.conv2d_filters(a.x, a.grad, slide, fresh, groups)
        k.conv2d_filters(a.x, a.grad, slide, a.total, groups, add=True)
        return fresh, a.total

    calls = (
        lambda k, a: k.conv2d(a.x, a.w, a.bias, slide, groups),
        lambda k, a: k.conv2d_images(a.grad, a.w, slide, groups),
        filters,
    )
    return {
        kernel: Case(
            kernel, make, call, writes=("total",), factor=4.0, cost=cost, by_address=True,
            by_reference=not b,
        )
        for kernel, call in zip(kernels, calls, strict=True)
    }  # fmt: skip


def _pool(x: tuple[int, ...], slide: Windows, values: Any = normal, **about: Any) -> dict[str, Case]:
    def back(rng: np.random.Generator) -> dict[str, Any]:
        return {"grad": normal(rng, len(x) and x[0], *slide.places, x[-1]), "x": values(rng, *x)}

    return {
        "max_pool2d": Case(
            "max_pool2d", lambda rng: {"x": values(rng, *x)}, lambda k, a: k.max_pool2d(a.x, slide), exact=(0, 1),
            **about,
        ),
        "max_pool2d_backward": Case(
            "max_pool2d_backward", back,
            lambda k, a: k.max_pool2d_backward(a.grad, k.max_pool2d(a.x, slide)[1], slide), **about,
        ),
    }  # fmt: skip


def _ties(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 3, shape).astype(float)


def _special(rng: np.random.Generator, *shape: int) -> np.ndarray:
    x = normal(rng, *shape)
    return np.where(rng.random(shape) < 0.2, rng.choice([np.nan, np.inf, -np.inf], shape), x)


def _lowest(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.full(shape, -np.inf)


def _mixed(k: Any, a: Any) -> Any:
    """Half-precision images and filters in float32, and the other way round."""
    slide = _slide((4, 4), (3, 3), padding=(1, 1))
    return k.conv2d(a.x, a.w, None, slide), k.conv2d_images(a.grad, a.x[:1, :3, :3], slide)


_TOPICS: dict[str, dict[str, Case]] = {
    "3x3 on 5x6, same size": _conv(2, _slide((5, 6), (3, 3), padding=(1, 1)), 3, 4),
    "2x3 on 6x5, strides": _conv(2, _slide((6, 5), (2, 3), stride=(2, 1), padding=(1, 0)), 4, 3),
    "3x2 on 9x8, dilation": _conv(1, _slide((9, 8), (3, 2), padding=(0, 2), dilation=(2, 3)), 8, 2, with_bias=False),
    "3x3 on 7x7, all of them": _conv(
        2, _slide((7, 7), (3, 3), stride=(3, 2), padding=(2, 3), dilation=(1, 2)), 2, 6, groups=3
    ),
    "3x3 on 5x5, groups": _conv(2, _slide((5, 5), (3, 3), padding=(1, 1)), 1, 4, groups=4),
    "1x1 on 4x5": _conv(3, _slide((4, 5), (1, 1)), 5, 7),
    "1x1 on 4x5, groups": _conv(2, _slide((4, 5), (1, 1)), 2, 4, groups=2, with_bias=False),
    "2x2 on 1x1, much padding": _conv(1, _slide((1, 1), (2, 2), padding=(3, 3)), 1, 1),
    "3x3 on no images": _conv(0, _slide((5, 5), (3, 3)), 2, 3),
    "3x3 on 28x28, 16 to 32": _conv(2, _slide((28, 28), (3, 3), padding=(1, 1)), 16, 32, cost="slow"),
    "3x3 on 56x56, 64 to 64": _conv(64, _slide((56, 56), (3, 3), padding=(1, 1)), 64, 64, cost="gpu"),
    "3x3 on 56x56, every second": _conv(
        64, _slide((56, 56), (3, 3), stride=(2, 2), padding=(1, 1)), 64, 128, cost="gpu"
    ),
    "2x2 of 4x6": _pool((2, 4, 6, 3), _slide((4, 6), (2, 2), stride=(2, 2))),
    "2x2 of 5x7, some left over": _pool((1, 5, 7, 1), _slide((5, 7), (2, 2), stride=(2, 2))),
    "3x3 of 6x5, overlapping": _pool((2, 6, 5, 2), _slide((6, 5), (3, 3), stride=(2, 1), padding=(1, 1))),
    "3x2 of 5x6, many equal": _pool((3, 5, 6, 4), _slide((5, 6), (3, 2), stride=(1, 1), padding=(1, 0)), _ties),
    "3x3 of 6x6, not numbers": _pool((2, 6, 6, 3), _slide((6, 6), (3, 3), stride=(1, 2), padding=(1, 1)), _special),
    "2x2 of 6x7, dilation": _pool((2, 6, 7, 2), _slide((6, 7), (2, 2), padding=(1, 0), dilation=(2, 3))),
    "3x3 of 4x4, nothing above -inf": _pool((1, 4, 4, 2), _slide((4, 4), (3, 3), padding=(1, 1)), _lowest),
    "2x2 of no images": _pool((0, 4, 4, 3), _slide((4, 4), (2, 2), stride=(2, 2))),
    "17x16 of 20x20, too many": _pool((1, 20, 20, 2), _slide((20, 20), (17, 16)), by_reference=True, cost="slow"),
}  # fmt: skip

CASES = {f"{kernel} {title}": case for title, cases in _TOPICS.items() for kernel, case in cases.items()}
CASES["conv2d of mixed dtypes"] = Case(
    "conv2d",
    lambda rng: {
        "x": normal(rng, 2, 4, 4, 3), "w": Wide(normal(rng, 5, 3, 3, 3)), "grad": Wide(normal(rng, 1, 4, 4, 1))
    },
    _mixed, by_address=True,
)  # fmt: skip

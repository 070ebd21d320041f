"""Layers of convolutional networks, on images (b, h, w, c): channels last, so a pixel is a row as a token is."""

from __future__ import annotations

import math

from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.nn import init as initial
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Initializer, Parameter

Size = int | tuple[int, int]
"""The same down and to the right, or one number each."""

BEFORE_RELU = math.sqrt(2.0)
"""Gain of a layer whose output goes through a ReLU, which halves the mean square.

Source: He et al. 2015, arXiv:1502.01852, eq. 10.
"""


class Conv2d(Module):
    """Filters that slide over images.

    Args:
        name: path in the model.
        in_channels: of the images.
        out_channels: number of filters.
        kernel: pixels that a filter sees.
        stride: from one of its places to the next.
        padding: zeros around the images; (kernel - 1) / 2 keeps their size, with stride 1.
        bias: whether there is one, which starts at 0.
        init: initial values of the filters (out_channels, kh, kw, in_channels); variance 1 / (kh kw in_channels) where
            left out.
    """

    def __init__(
        self,
        name: str,
        in_channels: int,
        out_channels: int,
        kernel: Size = 3,
        stride: Size = 1,
        padding: Size = 0,
        bias: bool = True,
        init: Initializer | None = None,
    ) -> None:
        super().__init__(name)
        self.stride = stride
        self.padding = padding
        window = (kernel, kernel) if isinstance(kernel, int) else kernel
        shape = (out_channels, *window, in_channels)
        self.weight = Parameter(f"{name}.weight", shape, init=init or initial.fan_in((1, 2, 3)), decay=True)
        self.bias = Parameter(f"{name}.bias", (out_channels,), init=initial.zeros) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, in_channels) -> (b, oh, ow, out_channels)."""
        return ops.conv2d(x, self.weight, self.bias, self.stride, self.padding)


class MaxPool2d(Module):
    """The largest pixel of each window, channel by channel.

    Args:
        window: its pixels.
        stride: from a window to the next; as large as the window where left out.
        name: path in the model.
    """

    def __init__(self, window: Size = 2, stride: Size | None = None, name: str = "") -> None:
        super().__init__(name)
        self.window = window
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, oh, ow, c)."""
        return ops.max_pool2d(x, self.window, self.stride)


class Flatten(Module):
    """Each image as one row."""

    def forward(self, x: Tensor) -> Tensor:
        """(b, ...) -> (b, product of the others)."""
        return ops.reshape(x, (len(x), math.prod(x.shape[1:])))

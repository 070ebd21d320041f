"""Layers of convolutional networks, on images (b, h, w, c): channels last, so a pixel is a row as a token is."""

from __future__ import annotations

import math

from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.errors import ConfigError
from mpitrain.kernels.windows import pair
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
        padding: zeros around the images; dilation (kernel - 1) / 2 keeps their size, with stride 1.
        dilation: from a pixel that a filter sees to the next.
        groups: into which channels and filters are divided alike; a filter sees the channels of its group.  As many as
            channels: each channel has filters of its own (depthwise).
        bias: whether there is one, which starts at 0.
        init: initial values of the filters (out_channels, kh, kw, in_channels / groups); variance 1 / (kh kw
            in_channels / groups) where left out.

    Raises:
        ConfigError: the groups divide the channels or the filters not.
        ShapeError: kernel, stride, padding or dilation are no sizes.
    """

    def __init__(
        self,
        name: str,
        in_channels: int,
        out_channels: int,
        kernel: Size = 3,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        init: Initializer | None = None,
    ) -> None:
        super().__init__(name)
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ConfigError(f"{name}: {in_channels} channels and {out_channels} filters do not divide into {groups}")
        self.stride = pair(stride, name, "stride")
        self.padding = pair(padding, name, "padding", least=0)
        self.dilation = pair(dilation, name, "dilation")
        self.groups = groups
        window = pair(kernel, name, "kernel")
        shape = (out_channels, *window, in_channels // groups)
        self.weight = Parameter(f"{name}.weight", shape, init=init or initial.fan_in((1, 2, 3)), decay=True)
        self.bias = Parameter(f"{name}.bias", (out_channels,), init=initial.zeros) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, in_channels) -> (b, oh, ow, out_channels)."""
        return ops.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class MaxPool2d(Module):
    """The largest pixel of each window, channel by channel.

    Args:
        window: its pixels.
        stride: from a window to the next; as large as the window where left out.
        padding: pixels around the images that count in no maximum.
        name: path in the model.
    """

    def __init__(self, window: Size = 2, stride: Size | None = None, padding: Size = 0, name: str = "") -> None:
        super().__init__(name)
        self.window = pair(window, name or type(self).__name__, "window")
        self.stride = None if stride is None else pair(stride, name or type(self).__name__, "stride")
        self.padding = pair(padding, name or type(self).__name__, "padding", least=0)

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, oh, ow, c)."""
        return ops.max_pool2d(x, self.window, self.stride, self.padding)


class AvgPool2d(Module):
    """The mean of each window, channel by channel.

    Args:
        window: its pixels.
        stride: from a window to the next; as large as the window where left out.
        padding: zeros around the images.
        count_padding: whether these zeros count in the mean.
        name: path in the model.
    """

    def __init__(
        self,
        window: Size = 2,
        stride: Size | None = None,
        padding: Size = 0,
        count_padding: bool = True,
        name: str = "",
    ) -> None:
        super().__init__(name)
        self.window = pair(window, name or type(self).__name__, "window")
        self.stride = None if stride is None else pair(stride, name or type(self).__name__, "stride")
        self.padding = pair(padding, name or type(self).__name__, "padding", least=0)
        self.count_padding = count_padding

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, oh, ow, c)."""
        return ops.avg_pool2d(x, self.window, self.stride, self.padding, self.count_padding)


class Flatten(Module):
    """Each image as one row."""

    def forward(self, x: Tensor) -> Tensor:
        """(b, ...) -> (b, product of the others)."""
        return ops.reshape(x, (len(x), math.prod(x.shape[1:])))

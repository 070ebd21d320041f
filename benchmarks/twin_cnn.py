"""The convolutional network in PyTorch, with the weights of one of ours: what benchmark and tests put beside it.

Images are (b, h, w, c) with us and (b, c, h, w) with PyTorch, filters (out, kh, kw, c) and (out, c, kh, kw); so rows of
the head's weight, which belong to pixels and channels, change places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpitrain.models.cnn import CNN


def network(model: CNN) -> torch.nn.Sequential:
    """The same network, of the same precision."""
    layers: list[torch.nn.Module] = []
    for block in model.blocks:
        filters, _, _, channels = block.conv.weight.full_shape
        conv = torch.nn.Conv2d(channels, filters, 3, padding=1, bias=block.conv.bias is not None)
        conv.weight.data = _channels_first(block.conv.weight.data)
        if conv.bias is not None:
            conv.bias.data = torch.tensor(block.conv.bias.data)
        layers.append(conv)
        if block.norm is not None:
            norm = torch.nn.BatchNorm2d(filters, eps=block.norm.eps, momentum=block.norm.momentum)
            norm.weight.data, norm.bias.data = (torch.tensor(p.data) for p in (block.norm.weight, block.norm.bias))
            norm.running_mean, norm.running_var = (
                torch.tensor(each.array) for each in (block.norm.mean, block.norm.variance)
            )
            layers.append(norm)
        layers += [torch.nn.ReLU(), *([] if block.pool is None else [torch.nn.MaxPool2d(2)])]
    height, width, channels = model.shapes[-1]
    rows, classes = model.head.weight.full_shape
    head = torch.nn.Linear(rows, classes)
    by_pixel = model.head.weight.data.reshape(height, width, channels, classes).transpose(3, 2, 0, 1)
    head.weight.data = torch.tensor(by_pixel.reshape(classes, rows).copy())
    head.bias.data = torch.tensor(model.head.bias.data)
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), head)


def images(pixels: np.ndarray) -> torch.Tensor:
    """A batch as PyTorch has it."""
    return _channels_first(pixels)


def as_ours(name: str, array: np.ndarray, model: CNN) -> np.ndarray:
    """A weight of the network, or its gradient, in the shape and order of ours.

    Args:
        name: of the parameter, with us.
        array: as PyTorch has it.
        model: ours.
    """
    if array.ndim == 4:
        return array.transpose(0, 2, 3, 1)
    if name == "head.weight":
        height, width, channels = model.shapes[-1]
        return array.reshape(-1, channels, height, width).transpose(2, 3, 1, 0).reshape(array.shape[::-1])
    return array


def _channels_first(array: np.ndarray) -> Any:
    return torch.tensor(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))

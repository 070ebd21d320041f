"""The twin's model: mpitrain's GPT in PyTorch, and how its initial values come over.

The same architecture as `mpitrain.models.gpt`, written as PyTorch users write it, its parameters under the same names.
What differs is only how they lie: PyTorch keeps a linear weight as (out, in), and the fused projection's outputs as
(q|k|v, head, dim) where mpitrain's are (head, q|k|v, dim).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import IGNORE
from mpitrain.models.gpt import GPT, GPTConfig


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, width) -> (b, s, width)."""
        b, s, width = x.shape
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, width))


class Mlp(nn.Module):
    """Two layers with a GELU between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.gelu = nn.GELU(approximate="tanh" if config.gelu == "tanh" else "none")
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, width) -> (b, s, width)."""
        return self.down(self.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then MLP, each behind a norm and beside a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.drop1 = nn.Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = Mlp(config)
        self.drop2 = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, width) -> (b, s, width)."""
        x = x + self.drop1(self.attention(self.norm1(x)))
        return x + self.drop2(self.mlp(self.norm2(x)))


class Positions(nn.Module):
    """Learned positions, which must be a module to have their name."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.seq_len, config.width))

    def forward(self, length: int) -> torch.Tensor:
        """() -> (length, width)."""
        return self.weight[:length]


class TwinGPT(nn.Module):
    """The whole model.

    `model(inputs, targets)` is the sum over valid targets of the cross-entropy in nats, as there.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab, config.width)
        self.positions = Positions(config)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """(b, s) token ids and targets -> ()."""
        x = self.drop(self.table(inputs) + self.positions(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = functional.linear(x, self.table.weight) if self.head is None else self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


Twin = TwinGPT


def load_initial_values(twin: TwinGPT, config: GPTConfig, seed: int, dtype: Any = np.float32) -> None:
    """Give the twin the initial values of `GPT(config, seed=seed)` in that dtype."""
    twin.to(getattr(torch, np.dtype(dtype).name))
    load_values(twin, config, {p.name: p.data for p in GPT(config, Mesh(world()), seed=seed, dtype=dtype).parameters()})


def load_values(twin: TwinGPT, config: GPTConfig, values: Mapping[str, Any]) -> None:
    """Give the twin the values of mpitrain's parameters, by name."""
    parameters = dict(twin.named_parameters())
    assert parameters.keys() == values.keys(), parameters.keys() ^ values.keys()
    linear = _linear_weights(twin)
    with torch.no_grad():
        for name, parameter in parameters.items():
            value = values[name].T if name in linear else values[name]
            if ".qkv." in name:
                value = _regrouped(value, config.heads, 3)
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))


def mpitrain_order(twin: TwinGPT, config: GPTConfig) -> dict[str, np.ndarray]:
    """The twin's parameters as mpitrain lays them out: the inverse of `load_initial_values`."""
    linear = _linear_weights(twin)
    values = {}
    for name, parameter in twin.named_parameters():
        value = parameter.detach().numpy()
        if ".qkv." in name:
            value = _regrouped(value, 3, config.heads)
        values[name] = value.T if name in linear else value
    return values


def _linear_weights(twin: TwinGPT) -> set[str]:
    return {f"{name}.weight" for name, module in twin.named_modules() if isinstance(module, nn.Linear)}


def _regrouped(value: np.ndarray, outer: int, inner: int) -> np.ndarray:
    """Dim 0 as (outer, inner, rest) -> (inner, outer, rest)."""
    return value.reshape(outer, inner, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)

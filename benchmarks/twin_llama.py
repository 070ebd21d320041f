"""The twin's other model: mpitrain's Llama in PyTorch, and how its initial values come over.

The same architecture as `mpitrain.models.llama`, written as PyTorch users write it, with parameters of the same names.
What differs is only how they lie: PyTorch keeps a linear weight as (out, in), and the outputs of a fused projection as
(q|k|v, head, dim) where mpitrain's are (head, q|k|v, dim).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import IGNORE
from mpitrain.models.llama import Llama, LlamaConfig
from mpitrain.nn.rotary import frequencies


def angles(config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (seq_len, d) in float64: each pair has its two elements half a head apart."""
    speeds = torch.tensor(frequencies(config.head_width, config.rope_theta, config.rope_scaling), dtype=torch.float64)
    halves = torch.outer(torch.arange(config.seq_len, dtype=torch.float64), speeds)
    whole = torch.cat((halves, halves), dim=-1)
    return whole.cos(), whole.sin()


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(b, heads, s, d) queries or keys, turned by their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions, keys and values shared by groups of queries."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.groups, width = config.heads, config.groups, config.width
        self.dropout = config.dropout
        self.sizes = [width, width // self.heads * self.groups, width // self.heads * self.groups]
        if self.groups == self.heads:
            self.qkv = nn.Linear(width, 3 * width, bias=False)
        else:
            self.q = nn.Linear(width, width, bias=False)
            self.kv = nn.Linear(width, 2 * self.sizes[1], bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(b, s, width) -> (b, s, width)."""
        b, s, width = x.shape
        if self.groups == self.heads:
            parts = self.qkv(x).split(self.sizes, dim=2)
        else:
            parts = (self.q(x), *self.kv(x).split(self.sizes[1:], dim=2))
        q, k, v = (part.view(b, s, -1, width // self.heads).transpose(1, 2) for part in parts)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.groups != self.heads,
        )
        return self.proj(y.transpose(1, 2).reshape(b, s, width))


class Mlp(nn.Module):
    """Two matrices up, of which one gates the other, and one down."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.units, bias=False)
        self.up = nn.Linear(config.width, config.units, bias=False)
        self.down = nn.Linear(config.units, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, width) -> (b, s, width)."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=config.eps)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.width, eps=config.eps)
        self.mlp = Mlp(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(b, s, width) -> (b, s, width)."""
        x = x + self.drop(self.attention(self.norm1(x), cos, sin))
        return x + self.drop(self.mlp(self.norm2(x)))


class TwinLlama(nn.Module):
    """(b, s) token ids and targets -> the sum of the cross-entropies of the targets that count."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.width, eps=config.eps)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab, bias=False)
        for name, table in zip(("cos", "sin"), angles(config), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """(b, s) token ids and targets -> ()."""
        cos, sin = (table[: inputs.shape[1]] for table in (self.cos, self.sin))
        x = self.drop(self.table(inputs))
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        logits = functional.linear(x, self.table.weight) if self.head is None else self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


Twin = TwinLlama


def load_initial_values(twin: TwinLlama, config: LlamaConfig, seed: int, dtype: Any = np.float32) -> None:
    """Give the twin the initial values of `Llama(config, seed=seed)` in that dtype."""
    twin.to(getattr(torch, np.dtype(dtype).name))
    values = {p.name: p.data for p in Llama(config, Mesh(world()), seed=seed, dtype=dtype).parameters()}
    parameters = dict(twin.named_parameters())
    assert parameters.keys() == values.keys(), parameters.keys() ^ values.keys()
    linear = _linear_weights(twin)
    with torch.no_grad():
        for name, parameter in parameters.items():
            value = values[name].T if name in linear else values[name]
            if (parts := _parts(name)) is not None:
                value = _regrouped(value, config.groups, parts)
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))


def mpitrain_order(twin: TwinLlama, config: LlamaConfig) -> dict[str, np.ndarray]:
    """The twin's parameters as mpitrain lays them out: the inverse of `load_initial_values`."""
    return {name: laid_out(twin, config, name, p.detach().numpy()) for name, p in twin.named_parameters()}


def laid_out(twin: TwinLlama, config: LlamaConfig, name: str, value: np.ndarray) -> np.ndarray:
    """A parameter of the twin, or its gradient, as mpitrain lays it out."""
    if (parts := _parts(name)) is not None:
        value = _regrouped(value, parts, config.groups)
    return value.T if name in _linear_weights(twin) else value


def _parts(name: str) -> int | None:
    """How many projections are fused in a weight; None: it is no fused one."""
    return 3 if ".qkv." in name else 2 if ".kv." in name else None


def _linear_weights(twin: nn.Module) -> set[str]:
    return {f"{name}.weight" for name, module in twin.named_modules() if isinstance(module, nn.Linear)}


def _regrouped(value: np.ndarray, outer: int, inner: int) -> np.ndarray:
    """Dim 0 as (outer, inner, rest) -> (inner, outer, rest)."""
    return value.reshape(outer, inner, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)

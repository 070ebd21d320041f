"""GPT-2's architecture: pre-LayerNorm blocks, learned positions, tied or untied head.

    x = table[tokens] + positions
    x = x + drop(proj(attention(qkv(norm1(x)))))      for each block
    x = x + drop(down(gelu(up(norm2(x)))))
    loss = sum over targets of cross_entropy(head(norm(x)))

It is built from parallel layers, which on axes of one rank are the serial ones: there is no second, serial model.

Initial values: matrices are normal with standard deviation 1 / sqrt(fan-in), those that end a residual branch are
divided by sqrt(2 L) more; an untied token table is normal with 0.5 and the learned positions start as sinusoids of the
same root mean square, so that both are heard; a tied table is also the head and starts with 1 / sqrt(width), positions
alike.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3; Vaswani et al. 2017,
arXiv:1706.03762, section 3.5 (sinusoids).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, to_device
from mpitrain.comm.mesh import Mesh
from mpitrain.data.tokens import Batch
from mpitrain.errors import ShapeError
from mpitrain.nn import init as initial
from mpitrain.nn.layers import Dropout, Embedding, Gelu, LayerNorm, Linear, Residual
from mpitrain.nn.loss import cross_entropy
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel.tensor import ColumnLinear, RowLinear
from mpitrain.rng import Draw


@dataclass(frozen=True)
class GPTConfig:
    """The numbers that make a GPT.

    width must be divisible by heads; seq_len is the longest sequence that the positions know.
    """

    vocab: int = 256
    layers: int = 2
    width: int = 128
    heads: int = 4
    seq_len: int = 64
    dropout: float = 0.0
    tied: bool = False
    gelu: str = "tanh"

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, counted once."""
        layer = 12 * self.width**2 + 13 * self.width
        head = 0 if self.tied else self.vocab * self.width
        return self.vocab * self.width + head + self.seq_len * self.width + self.layers * layer + 2 * self.width

    @property
    def flops_per_token(self) -> int:
        """Flops of the matrix products, forward and backward: 6 a weight, and 12 s h for attention."""
        weights = 12 * self.layers * self.width**2 + self.vocab * self.width
        return 6 * weights + 12 * self.layers * self.seq_len * self.width


class Attention(Module):
    """Causal self-attention, heads cut over the tp axis.

    x (b, s, width) Invariant -> (b, s, width) Invariant, without the last bias, which the block adds.  The columns of
    the fused projection lie as (head, q|k|v, dim), so that a cut into equal column blocks gives each rank whole heads.
    """

    def __init__(self, name: str, config: GPTConfig, mesh: Mesh) -> None:
        super().__init__(name)
        if config.heads % mesh.tp.size:
            raise ShapeError(f"{name}: {config.heads} heads are not divisible by axis tp of size {mesh.tp.size}.")
        self.heads = config.heads // mesh.tp.size
        self.first_head = mesh.tp.rank * self.heads
        self.dropout = config.dropout
        width = config.width
        self.qkv = ColumnLinear(f"{name}.qkv", width, 3 * width, mesh.tp)
        self.proj = RowLinear(f"{name}.proj", width, width, mesh.tp, init=initial.residual(config.layers))

    def forward(self, x: Tensor, draw: Draw | None, mask: Array | None = None) -> Tensor:
        rows, drop = None, 0.0
        if draw is not None and self.dropout:
            heads = array_module(draw.places).arange(self.first_head, self.first_head + self.heads)
            rows, drop = draw.attention_rows(f"{self.name}.weights", heads), self.dropout
        return self.proj(ops.attention(self.qkv(x), self.heads, mask=mask, rows=rows, drop=drop), add_bias=False)


class Mlp(Module):
    """Two layers with a GELU between, the hidden units cut over the tp axis.

    (b, s, width) -> (b, s, width), without the last bias, which the block adds.
    """

    def __init__(self, name: str, config: GPTConfig, mesh: Mesh) -> None:
        super().__init__(name)
        width = config.width
        self.up = ColumnLinear(f"{name}.up", width, 4 * width, mesh.tp)
        self.gelu = Gelu(config.gelu)
        self.down = RowLinear(f"{name}.down", 4 * width, width, mesh.tp, init=initial.residual(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gelu(self.up(x, add_bias=False), self.up.bias), add_bias=False)


class Block(Module):
    """One layer of the model: attention, then MLP, each behind a norm and beside a residual."""

    def __init__(self, name: str, config: GPTConfig, mesh: Mesh) -> None:
        super().__init__(name)
        self.norm1 = LayerNorm(f"{name}.norm1", config.width)
        self.attention = Attention(f"{name}.attention", config, mesh)
        self.drop1 = Residual(f"{name}.drop1", config.dropout)
        self.norm2 = LayerNorm(f"{name}.norm2", config.width)
        self.mlp = Mlp(f"{name}.mlp", config, mesh)
        self.drop2 = Residual(f"{name}.drop2", config.dropout)

    def forward(self, x: Tensor, draw: Draw | None, mask: Array | None = None) -> Tensor:
        branch = self.attention(self.norm1(x), draw, mask)
        x, normed = self.drop1.then(self.norm2, x, branch, self.attention.proj.bias, draw)
        return self.drop2(x, self.mlp(normed), self.mlp.down.bias, draw)


class GPT(Module):
    """A GPT on a mesh: this rank's slabs, with initial values.

    Args:
        config: the sizes.
        mesh: the layout; the model is the same on every one.
        seed: of the initial values and of dropout.
        dtype: of weights, activations and gradients.
        xp: where they live: numpy, or cupy for this rank's device.

    `model(batch)` is the sum over the batch's valid targets of the cross-entropy in nats: the executor divides by their
    number over all ranks.  A batch from the host goes to where the weights are.
    """

    def __init__(self, config: GPTConfig, mesh: Mesh, *, seed: int = 0, dtype: Any = np.float32, xp: Any = np) -> None:
        super().__init__("gpt")
        self.config = config
        width = config.width
        scale = width**-0.5 if config.tied else 0.5
        self.table = Embedding("table", config.vocab, width, init=initial.normal(scale))
        self.positions = Parameter(
            "positions.weight", (config.seq_len, width), init=initial.sinusoids(scale), decay=True
        )
        self.drop = Dropout("drop", config.dropout)
        self.blocks = [Block(f"blocks.{i}", config, mesh) for i in range(config.layers)]
        self.norm = LayerNorm("norm", width)
        self.head = None if config.tied else Linear("head", width, config.vocab, bias=False)
        self.materialize(mesh, seed, dtype, xp)

    def logits(self, inputs: Array, draw: Draw | None = None, mask: Array | None = None) -> Tensor:
        """Scores of the next token.  inputs (b, s) token ids, s <= seq_len -> (b, s, vocab)."""
        length = inputs.shape[1]
        if length > self.config.seq_len:
            raise ShapeError(
                f"a sequence of {length} tokens is longer than the model's {self.config.seq_len} positions"
            )
        inputs = to_device(inputs, like=self.table.weight.data)
        x = self.table(inputs) + (self.positions if length == self.config.seq_len else self.positions[:length])
        x = self.drop(x, draw)
        for block in self.blocks:
            x = block(x, draw, mask)
        x = self.norm(x)
        return ops.linear(x, self.table.weight.T, None) if self.head is None else self.head(x)

    def forward(self, batch: Batch) -> Tensor:
        batch = batch.to(self.table.weight.data)
        draw = batch.draw(self.seed) if self.config.dropout else None
        return cross_entropy(self.logits(batch.inputs, draw), batch.targets)

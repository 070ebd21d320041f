"""GPT-2's architecture: pre-LayerNorm blocks, learned positions, tied or untied head.

    x = table[tokens] + positions
    x = x + drop(proj(attention(qkv(norm1(x)))))      for each block
    x = x + drop(down(gelu(up(norm2(x)))))
    loss = sum over targets of cross_entropy(head(norm(x)))

It is built from parallel layers, which on axes of one rank are the serial ones: there is no second, serial model.  Heads
and hidden units are cut over tp, the vocabulary too; tokens of a sequence over cp; with sequence parallelism the stream
between the regions over tp as well.

Initial values: matrices are normal with standard deviation 1 / sqrt(fan-in), those that end a residual branch are
divided by sqrt(2 L) more; an untied token table is normal with 0.5 and the learned positions start as sinusoids of the
same root mean square, so that both are heard; a tied table is also the head and starts with 1 / sqrt(width), positions
alike.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3; Vaswani et al. 2017,
arXiv:1706.03762, section 3.5 (sinusoids).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, to_device, to_host
from mpitrain.comm.mesh import Mesh
from mpitrain.data.tokens import Batch
from mpitrain.errors import ShapeError
from mpitrain.nn import init as initial
from mpitrain.nn.layers import Dropout, Gelu, LayerNorm, Residual
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel import context
from mpitrain.parallel.grouped import GroupedColumns
from mpitrain.parallel.sequence import between
from mpitrain.parallel.tensor import ColumnLinear, RowLinear
from mpitrain.parallel.vocabulary import VocabularyEmbedding, VocabularyHead, cross_entropy
from mpitrain.rng import Draw
from mpitrain.spec import cut


@dataclass(frozen=True)
class GPTConfig:
    """The numbers that make a GPT.

    width must be divisible by heads, heads by kv_heads (heads of keys and values, shared by groups of queries; None: as
    many as heads); seq_len is the longest sequence that the positions know.
    """

    vocab: int = 256
    layers: int = 2
    width: int = 128
    heads: int = 4
    seq_len: int = 64
    dropout: float = 0.0
    tied: bool = False
    gelu: str = "tanh"
    kv_heads: int | None = None

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def _qkv_width(self) -> int:
        return self.width + 2 * self.groups * (self.width // self.heads)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, counted once."""
        layer = (self.width + 1) * self._qkv_width + 9 * self.width**2 + 10 * self.width
        head = 0 if self.tied else self.vocab * self.width
        return self.vocab * self.width + head + self.seq_len * self.width + self.layers * layer + 2 * self.width

    @property
    def flops_per_token(self) -> int:
        """Flops of the matrix products, forward and backward: 6 a weight, and 12 s h for attention."""
        weights = self.layers * self.width * (self._qkv_width + 9 * self.width) + self.vocab * self.width
        return 6 * weights + 12 * self.layers * self.seq_len * self.width


@dataclass(frozen=True)
class Cuts:
    """How a model is laid out on a mesh, besides the sizes of its axes.

    Attributes:
        mesh: the ranks.
        sequence_parallel: whether the stream between tensor-parallel regions is cut along the sequence.
        cp_attention: ring, ulysses or rsa: how attention reaches the keys of other ranks.
    """

    mesh: Mesh
    sequence_parallel: bool
    cp_attention: str


class Pass(NamedTuple):
    """What a forward pass carries besides the stream.

    Attributes:
        draw: of the tokens of this rank, for dropout of attention; None: no dropout.
        stream: of the tokens of this rank's slice of the stream.
        positions: int64 (s,) global positions of the tokens, those that this rank holds of each sequence; None: whole
            sequences are here, whatever the mesh.
        documents: (b, whole sequence) as in `Batch`.
    """

    draw: Draw | None = None
    stream: Draw | None = None
    positions: Array | None = None
    documents: Array | None = None


class Attention(Module):
    """Causal self-attention, heads cut over the tp axis, tokens over cp.

    x (b, s, width) Invariant -> (b, s, width) Invariant on tp (with sequence parallelism both (b, s/t, width), Shard(1)),
    without the last bias, which the block adds.  The columns of the fused projection lie as (head, q|k|v, dim), so that a
    cut into equal column blocks gives each rank whole heads.
    """

    def __init__(self, name: str, config: GPTConfig, cuts: Cuts) -> None:
        super().__init__(name)
        tp, width = cuts.mesh.tp, config.width
        if config.heads % tp.size:
            raise ShapeError(f"{name}: {config.heads} heads are not divisible by axis tp of size {tp.size}.")
        self.cp = cuts.mesh.cp
        self.kind = cuts.cp_attention
        self.heads = config.heads // tp.size
        self.kv_heads = max(1, config.groups // tp.size)
        self.first_head = tp.rank * self.heads
        self.dropout = config.dropout
        self.qkv: ColumnLinear | GroupedColumns
        if config.groups == config.heads:
            self.qkv = ColumnLinear(f"{name}.qkv", width, 3 * width, tp, sequence_parallel=cuts.sequence_parallel)
        else:
            self.qkv = GroupedColumns(
                name, width, config.heads, config.groups, tp, sequence_parallel=cuts.sequence_parallel
            )
        self.proj = RowLinear(
            f"{name}.proj",
            width,
            width,
            tp,
            init=initial.residual(config.layers),
            sequence_parallel=cuts.sequence_parallel,
        )

    def forward(self, x: Tensor, this: Pass) -> Tensor:
        qkv = self.qkv(x)
        if this.positions is None:  # whole sequences are here
            y = ops.attention(qkv, self.heads, self.kv_heads)
        else:
            rows = self._rows(this.draw)
            drop = 0.0 if rows is None else self.dropout
            y = context.attention(
                qkv, self.heads, self.kv_heads, self.cp, self.kind, documents=this.documents, rows=rows, drop=drop
            )
        return self.proj(y, add_bias=False)

    def _rows(self, draw: Draw | None) -> Array | None:
        """The random streams of the attention weights' dropout, by global head."""
        if draw is None or not self.dropout:
            return None
        heads = array_module(draw.places).arange(self.first_head, self.first_head + self.heads)
        return context.attention_rows(draw, f"{self.name}.weights", heads, self.cp, self.kind)


class Mlp(Module):
    """Two layers with a GELU between, the hidden units cut over the tp axis.

    (b, s, width) -> (b, s, width), without the last bias, which the block adds.
    """

    def __init__(self, name: str, config: GPTConfig, cuts: Cuts) -> None:
        super().__init__(name)
        width, tp = config.width, cuts.mesh.tp
        self.up = ColumnLinear(f"{name}.up", width, 4 * width, tp, sequence_parallel=cuts.sequence_parallel)
        self.gelu = Gelu(config.gelu)
        self.down = RowLinear(
            f"{name}.down",
            4 * width,
            width,
            tp,
            init=initial.residual(config.layers),
            sequence_parallel=cuts.sequence_parallel,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gelu(self.up(x, add_bias=False), self.up.bias), add_bias=False)


class Block(Module):
    """One layer of the model: attention, then MLP, each behind a norm and beside a residual."""

    def __init__(self, name: str, config: GPTConfig, cuts: Cuts) -> None:
        super().__init__(name)
        spec = between(cuts.sequence_parallel)
        self.norm1 = LayerNorm(f"{name}.norm1", config.width, spec=spec)
        self.attention = Attention(f"{name}.attention", config, cuts)
        self.drop1 = Residual(f"{name}.drop1", config.dropout)
        self.norm2 = LayerNorm(f"{name}.norm2", config.width, spec=spec)
        self.mlp = Mlp(f"{name}.mlp", config, cuts)
        self.drop2 = Residual(f"{name}.drop2", config.dropout)

    def forward(self, x: Tensor, this: Pass) -> Tensor:
        branch = self.attention(self.norm1(x), this)
        x, normed = self.drop1.then(self.norm2, x, branch, self.attention.proj.bias, this.stream)
        return self.drop2(x, self.mlp(normed), self.mlp.down.bias, this.stream)


class GPT(Module):
    """A GPT on a mesh: this rank's slabs, with initial values.

    Args:
        config: the sizes.
        mesh: the layout; the model is the same on every one.
        sequence_parallel: cut the stream between tensor-parallel regions along the sequence, over tp.
        cp_attention: how attention reaches other ranks' keys where mesh.cp is larger than 1: ring, ulysses, rsa.
        seed: of the initial values and of dropout.
        dtype: of weights, activations and gradients.
        xp: where they live: numpy, or cupy for this rank's device.

    Attributes:
        positions_here: the positions of a sequence that this rank holds, for `Tokens.batches`; None: all of them.

    Raises:
        ShapeError: heads or the sequence do not divide; on every rank, before any message.

    `model(batch)` is the sum over the batch's valid targets of the cross-entropy in nats: the executor divides by their
    number over all ranks.  A batch from the host goes to where the weights are.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        *,
        sequence_parallel: bool = False,
        cp_attention: str = "ring",
        seed: int = 0,
        dtype: Any = np.float32,
        xp: Any = np,
    ) -> None:
        super().__init__("gpt")
        self.config = config
        self.tp = mesh.tp
        self.sequence_parallel = sequence_parallel and mesh.tp.size > 1
        cuts = Cuts(mesh, self.sequence_parallel, cp_attention)
        self.positions_here = self._positions_here(config, cuts)
        width = config.width
        scale = width**-0.5 if config.tied else 0.5
        spec = between(self.sequence_parallel)
        self.table = VocabularyEmbedding(
            "table",
            config.vocab,
            width,
            mesh.tp,
            init=initial.normal(scale),
            sequence_parallel=self.sequence_parallel,
        )
        self.positions = Parameter(
            "positions.weight", (config.seq_len, width), spec, init=initial.sinusoids(scale), decay=True
        )
        self.drop = Dropout("drop", config.dropout)
        self.blocks = [Block(f"blocks.{i}", config, cuts) for i in range(config.layers)]
        self.norm = LayerNorm("norm", width, spec=spec)
        self.head = VocabularyHead(
            "head",
            width,
            config.vocab,
            mesh.tp,
            self.table.weight if config.tied else None,
            sequence_parallel=self.sequence_parallel,
        )
        self.materialize(mesh, seed, dtype, xp)

    def logits(self, inputs: Array, this: Pass = Pass()) -> Tensor:
        """Scores of the next token.

        Args:
            inputs: (b, s) token ids of this rank; s is at most seq_len, and with sequence parallelism divisible by tp.
            this: what else the pass needs; as it is, the whole sequence is here and nothing is dropped.

        Returns:
            (b, s, V/t) this rank's columns of the vocabulary: Shard(2) on tp.

        Raises:
            ShapeError: the sequence is too long.
        """
        length = inputs.shape[1]
        if length > self.config.seq_len:
            raise ShapeError(
                f"a sequence of {length} tokens is longer than the model's {self.config.seq_len} positions"
            )
        inputs = to_device(inputs, like=self.table.weight.data)
        mine = self._stream_slice(length)
        if this.draw is not None:
            this = this._replace(stream=this.draw.at(mine))
        x = self.table(inputs) + self._positions(length, mine, this.positions)
        x = self.drop(x, this.stream)
        for block in self.blocks:
            x = block(x, this)
        return self.head(self.norm(x))

    def forward(self, batch: Batch) -> Tensor:
        batch = batch.to(self.table.weight.data)
        draw = batch.draw(self.seed) if self.config.dropout else None
        self._check_part(batch)
        this = Pass(draw, positions=batch.positions, documents=batch.documents)
        return cross_entropy(self.logits(batch.inputs, this), batch.targets, self.tp, vocab=self.config.vocab)

    def next_scores(self, inputs: Array) -> np.ndarray:
        """Scores of the token after the last one, on every rank of tp; collective over that axis.

        Args:
            inputs: (b, s) token ids, the whole sequence, also under context parallelism.

        Returns:
            (b, vocab), on the host.
        """
        length, vocab, tp = inputs.shape[1], self.config.vocab, self.tp
        if self.sequence_parallel:  # later tokens change nothing before them
            inputs = np.pad(inputs, ((0, 0), (0, -length % tp.size)))
        mine = to_host(self.logits(inputs).data[:, length - 1])
        room = -(-vocab // tp.size) - mine.shape[1]  # the last ranks may hold fewer columns, or none
        return tp.all_gather(np.pad(mine, ((0, 0), (0, room))), 1)[:, :vocab]

    def _stream_slice(self, length: int) -> slice:
        """Which of the tokens here this rank holds between tensor-parallel regions."""
        return slice(*cut(length, self.tp.size, self.tp.rank)) if self.sequence_parallel else slice(0, length)

    def _positions(self, length: int, mine: slice, positions: Array | None) -> Tensor:
        """(s, width) rows of the learned positions for this rank's slice of the stream."""
        if length == mine.stop - mine.start == self.config.seq_len:
            return self.positions
        return self.positions[mine] if positions is None else ops.take(self.positions, positions[mine])

    def _check_part(self, batch: Batch) -> None:
        """Refuse a batch that is not the part of its sequences which this rank should hold."""
        expected = self.positions_here
        if expected is not None and len(batch.positions) != len(expected):
            raise ShapeError(
                f"a batch of {len(batch.positions)} positions, but this rank holds {len(expected)} of each sequence.\n"
                "Cut it with batch.part(model.positions_here), or give that to Tokens.batches(..., positions=...)."
            )

    @staticmethod
    def _positions_here(config: GPTConfig, cuts: Cuts) -> Array | None:
        """Which positions this rank holds; refuses sequences that do not divide."""
        cp, tp = cuts.mesh.cp, cuts.mesh.tp
        context.check(config.seq_len, config.heads // tp.size, max(1, config.groups // tp.size), cp, cuts.cp_attention)
        if cuts.sequence_parallel and config.seq_len // cp.size % tp.size:
            raise ShapeError(
                f"sequence parallelism: {config.seq_len // cp.size} tokens of a sequence are not divisible by axis tp of"
                f" size {tp.size}."
            )
        return None if cp.size == 1 else context.positions(config.seq_len, cp, cuts.cp_attention)

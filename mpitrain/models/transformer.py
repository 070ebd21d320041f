"""The blocks of a transformer, built from parallel layers: attention and MLP, each behind a norm and beside a residual.

    x = x + drop(proj(attention(qkv(norm1(x)))))
    x = x + drop(mlp(norm2(x)))

Which norm and which MLP a family of models says (`sizes.DecoderConfig`); where its positions are rotary, queries and
keys are turned before attention, in whatever way that reaches other ranks.

The messages of a block stand in its layers: one into and one out of each branch over tp, and those of attention over
cp.  Source: Radford et al. 2019, section 2.3 (pre-LayerNorm); Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mpitrain.autograd import ops
from mpitrain.autograd.auxiliary import add_loss
from mpitrain.autograd.ops.branch import Scales, enter_branch, leave_branch
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ShapeError
from mpitrain.models.sizes import DecoderConfig
from mpitrain.nn import init as initial
from mpitrain.nn.layers import Residual
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel import context
from mpitrain.parallel.context.layout import same_document
from mpitrain.parallel.expert import Moe
from mpitrain.parallel.expert.moe import OF_EVALUATION, RoutedTokens
from mpitrain.parallel.grouped import GroupedColumns
from mpitrain.parallel.sequence import between
from mpitrain.parallel.tensor import ColumnLinear, RowLinear
from mpitrain.rng import Draw

if TYPE_CHECKING:
    from mpitrain.autograd.carry import Carry
    from mpitrain.models.cache import Cache


@dataclass(frozen=True)
class Cuts:
    """How a model is laid out on a mesh and what it keeps, besides the sizes of its axes.

    Attributes:
        mesh: the ranks.
        sequence_parallel: whether the stream between tensor-parallel regions is cut along the sequence.
        cp_attention: ring, ulysses or rsa: how attention reaches the keys of other ranks.
        keep_scores: whether attention keeps its scores for backward, where whole sequences are here.
        scales: of the gradients of each branch; None: they have none.
        dtype: in which branches compute, if they have scales.
        expert_overlap: whether half of a rank's experts work while the rows of the other half travel.
    """

    mesh: Mesh
    sequence_parallel: bool
    cp_attention: str
    keep_scores: bool = False
    scales: Scales | None = None
    dtype: Any = None
    expert_overlap: bool = False


class Pass(NamedTuple):
    """What a forward pass carries besides the stream.

    Attributes:
        draw: of the tokens of this rank, for dropout of attention; None: no dropout.
        stream: of the tokens of this rank's slice of the stream.
        positions: int64 (s,) global positions of the tokens, those that this rank holds of each sequence; None: whole
            sequences are here, whatever the mesh.
        documents: (b, whole sequence) as in `Batch`.
        carry: what earlier slices of these sequences left; None: there are none.
        places: int64 (b, s) those of the tokens in their documents, for learned positions; None: their positions.
        turns: cosines and sines (s, head_width / 2) by which queries and keys are turned; None: they are not.
        tokens: what experts need to know of them.
        cache: keys and values of earlier tokens, where texts are written; None: no text is.
    """

    draw: Draw | None = None
    stream: Draw | None = None
    positions: Array | None = None
    documents: Array | None = None
    carry: Carry | None = None
    places: Array | None = None
    turns: tuple[Array, Array] | None = None
    tokens: RoutedTokens = OF_EVALUATION
    cache: Cache | None = None


PLAIN = Pass()
"""Whole sequences are here, and nothing is dropped."""


class Attention(Module):
    """Causal self-attention, heads cut over the tp axis, tokens over cp.

    x (b, s, width) Invariant on tp -> (b, s, width) Invariant, without the last bias, which the block adds; with
    sequence parallelism both are (b, s/t, width), Shard(1).  The columns of the fused projection lie as
    (head, q|k|v, dim), so that a cut into equal column blocks gives each rank whole heads.
    """

    def __init__(self, name: str, config: DecoderConfig, cuts: Cuts) -> None:
        super().__init__(name)
        tp, width, cut = cuts.mesh.tp, config.width, cuts.sequence_parallel
        if config.heads < 1 or width % config.heads:
            raise ShapeError(f"{name}: width {width} is not divisible by {config.heads} heads.")
        if config.heads % tp.size:
            raise ShapeError(f"{name}: {config.heads} heads are not divisible by axis tp of size {tp.size}.")
        self.cp = cuts.mesh.cp
        self.kind = cuts.cp_attention
        self.keep_scores = cuts.keep_scores
        self.heads = config.heads // tp.size
        self.kv_heads = max(1, config.groups // tp.size)
        self.first_head = tp.rank * self.heads
        self.dropout = config.dropout
        self.window = config.window
        self.qkv: ColumnLinear | GroupedColumns
        if config.groups == config.heads:
            self.qkv = ColumnLinear(f"{name}.qkv", width, 3 * width, tp, bias=config.has_biases, sequence_parallel=cut)
        else:
            of_heads = name, width, config.heads, config.groups, tp
            self.qkv = GroupedColumns(*of_heads, bias=config.has_biases, sequence_parallel=cut)
        self.proj = RowLinear(
            f"{name}.proj",
            width,
            width,
            tp,
            bias=config.has_biases,
            init=initial.residual(config.layers),
            sequence_parallel=cut,
        )

    def forward(self, x: Tensor, this: Pass) -> Tensor:
        if isinstance(self.qkv, GroupedColumns):
            qkv = self.qkv(x, this.turns)
        else:
            qkv = self.qkv(x)
            qkv = qkv if this.turns is None else ops.rotary(qkv, self.heads, self.kv_heads, *this.turns)
        rows = self._rows(this.draw)
        drop = 0.0 if rows is None else self.dropout
        if this.cache is not None:
            y = this.cache.attention(self.name, qkv, self.heads, self.kv_heads)
        elif this.carry is not None:
            y = self._of_slice(qkv, this.carry, this.documents, rows, drop)
        elif this.positions is None:  # whole sequences are here
            y = ops.attention(qkv, self.heads, self.kv_heads, keep_scores=self.keep_scores, window=self.window)
        else:
            y = context.attention(
                qkv,
                self.heads,
                self.kv_heads,
                self.cp,
                self.kind,
                documents=this.documents,
                rows=rows,
                drop=drop,
                keep_scores=self.keep_scores,
                window=self.window,
            )
        return self.proj(y, add_bias=False)

    def _of_slice(self, qkv: Tensor, carry: Carry, documents: Array | None, rows: Array | None, drop: float) -> Tensor:
        """Attention of a slice of the sequences: on its own keys, and on those that earlier slices left."""
        past = carry.earlier(self.name)
        carry.keep(self.name, qkv)
        mask = None
        if documents is not None:
            start = sum(each.shape[1] for each in past)
            stop = start + qkv.shape[1]
            mask = same_document(documents[:, start:stop], documents[:, :stop])
        how: dict[str, Any] = {"mask": mask, "rows": rows, "drop": drop, "window": self.window}
        return ops.slice_attention(qkv, past, self.heads, self.kv_heads, **how)

    def _rows(self, draw: Draw | None) -> Array | None:
        """The random streams of the attention weights' dropout, by global head."""
        if draw is None or not self.dropout:
            return None
        heads = array_module(draw.places).arange(self.first_head, self.first_head + self.heads)
        return context.attention_rows(draw, f"{self.name}.weights", heads, self.cp, self.kind)


class Block(Module):
    """One layer of the model: attention, then MLP or experts, each behind a norm and beside a residual.

    With scales the stream, norms and the last bias of each branch are float32, and a branch gets and gives half
    precision (`mpitrain.autograd.ops.branch`).
    """

    def __init__(self, number: int, config: DecoderConfig, cuts: Cuts) -> None:
        name = f"blocks.{number}"
        super().__init__(name)
        spec = between(cuts.sequence_parallel)
        self.scales, self.dtype = cuts.scales, cuts.dtype
        self.number = number
        self.norm1 = config.norm(f"{name}.norm1", spec)
        self.attention = Attention(f"{name}.attention", config, cuts)
        self.drop1 = Residual(f"{name}.drop1", config.dropout)
        self.norm2 = config.norm(f"{name}.norm2", spec)
        self.mlp: Any = config.mlp(f"{name}.mlp", number, cuts)
        self.drop2 = Residual(f"{name}.drop2", config.dropout)

        if self.scales is not None:
            ends = (self.attention.proj.bias, self._last_bias)
            for p in (*self.norm1.parameters(), *self.norm2.parameters(), *(p for p in ends if p is not None)):
                p.in_full = p.outside = True

    def forward(self, x: Tensor, this: Pass) -> Tensor:
        branch = self._leave(0, self.attention(self._enter(0, self.norm1(x)), this), x)
        x, normed = self.drop1.then(self.norm2, x, branch, self.attention.proj.bias, this.stream)
        entered = self._enter(1, normed)
        if isinstance(self.mlp, Moe):
            made, losses = self.mlp(entered, this.tokens)
            for loss, coefficient in losses:
                add_loss(self.mlp.name, self._leave(1, loss, x), coefficient)
        else:
            made = self.mlp(entered)
        return self.drop2(x, self._leave(1, made, x), self._last_bias, this.stream)

    @property
    def _last_bias(self) -> Parameter | None:
        """That of the layer which ends the block; experts have none."""
        return None if isinstance(self.mlp, Moe) else self.mlp.down.bias

    def _enter(self, which: int, x: Tensor) -> Tensor:
        """Into attention (0) or MLP (1)."""
        if self.scales is None:
            return x
        return enter_branch(x, self.scales, 2 * self.number + which, self.dtype)

    def _leave(self, which: int, y: Tensor, x: Tensor) -> Tensor:
        """Out of it, to the stream x."""
        return y if self.scales is None else leave_branch(y, self.scales, 2 * self.number + which, x.dtype)


def branches(layers: int) -> list[str]:
    """How the names of the parameters of each branch begin, in the order of their scales."""
    return [f"blocks.{number}.{part}." for number in range(layers) for part in ("attention", "mlp")]

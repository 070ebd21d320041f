"""The blocks of a transformer, built from parallel layers: attention and MLP, each behind a norm and beside a residual.

    x = x + drop(proj(attention(qkv(norm1(x)))))
    x = x + drop(down(gelu(up(norm2(x)))))

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
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn import init as initial
from mpitrain.nn.layers import Gelu, LayerNorm, Residual
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
from mpitrain.routing import Routing

if TYPE_CHECKING:
    from mpitrain.autograd.carry import Carry


@dataclass(frozen=True)
class GPTConfig:
    """The numbers that make a GPT; `routing` those of its mixture of experts, None where every block has an MLP.

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
    routing: Routing | None = None

    def __post_init__(self) -> None:
        if self.routing is not None and not isinstance(self.routing, Routing):
            raise ConfigError(f"GPTConfig: routing {self.routing!r} must be a Routing, as Routing(8).")
        if self.routing is not None and self.routing.every > self.layers:
            raise ConfigError(
                f"GPTConfig: no block of {self.layers} would have experts, with every={self.routing.every}."
            )

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def _qkv_width(self) -> int:
        return self.width + 2 * self.groups * (self.width // self.heads)

    def has_experts(self, block: int) -> bool:
        """Whether a block, by its global number, has experts in the place of its MLP."""
        return self.routing is not None and self.routing.has_experts(block)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, counted once."""
        embedding, blocks, head = self.parameters_of_parts
        return embedding + sum(blocks) + head - (self.vocab * self.width if self.tied else 0)

    @property
    def num_expert_parameters(self) -> int:
        """Those of them that are weights of experts."""
        routing = self.routing
        return 0 if routing is None else len(routing.layers(self.layers)) * routing.experts * 8 * self.width**2

    @property
    def num_active_parameters(self) -> int:
        """Those of them that one token meets: of the experts of a layer its own k."""
        if self.routing is None:
            return self.num_parameters
        idle = self.routing.experts - self.routing.top_k
        return self.num_parameters - self.num_expert_parameters * idle // self.routing.experts

    @property
    def parameters_of_parts(self) -> tuple[int, tuple[int, ...], int]:
        """Parameters of (embedding with positions, each block, last norm with head)."""
        h, table = self.width, self.vocab * self.width
        attention = (h + 1) * self._qkv_width + h * h + 5 * h  # with the two norms
        dense, routed = 8 * h * h + 5 * h, 0
        if self.routing is not None:
            routed = self.routing.experts * (8 * h * h + h)  # experts without biases, and a column of the router each
        blocks = tuple(attention + (routed if self.has_experts(block) else dense) for block in range(self.layers))
        return table + self.seq_len * h, blocks, table + 2 * h

    def flops_of_a_token(self, block: int) -> tuple[int, int]:
        """Flops of a block, forward and backward: (a token's own, a token's for each key that it sees).

        Where it has experts these are those of the router and of the k that a token has.
        """
        h, of_mlp = self.width, 8 * self.width
        if self.routing is not None and self.has_experts(block):
            of_mlp = self.routing.top_k * 8 * h + self.routing.experts
        return 6 * h * (self._qkv_width + h + of_mlp), 12 * h

    @property
    def flops_of_parts(self) -> tuple[int, tuple[int, ...], int]:
        """Flops of a token, forward and backward: (embedding, each block, head)."""
        costs = map(self.flops_of_a_token, range(self.layers))
        blocks = tuple(own + for_each_key * self.seq_len // 2 for own, for_each_key in costs)
        return 0, blocks, 6 * self.vocab * self.width

    @property
    def flops_per_token(self) -> int:
        """Flops of the matrix products, forward and backward: 6 a weight that a token meets, 12 s h for attention."""
        costs = map(self.flops_of_a_token, range(self.layers))
        return sum(own + for_each_key * self.seq_len for own, for_each_key in costs) + 6 * self.vocab * self.width


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
        tokens: what experts need to know of them.
    """

    draw: Draw | None = None
    stream: Draw | None = None
    positions: Array | None = None
    documents: Array | None = None
    carry: Carry | None = None
    tokens: RoutedTokens = OF_EVALUATION


PLAIN = Pass()
"""Whole sequences are here, and nothing is dropped."""


class Attention(Module):
    """Causal self-attention, heads cut over the tp axis, tokens over cp.

    x (b, s, width) Invariant on tp -> (b, s, width) Invariant, without the last bias, which the block adds; with
    sequence parallelism both are (b, s/t, width), Shard(1).  The columns of the fused projection lie as
    (head, q|k|v, dim), so that a cut into equal column blocks gives each rank whole heads.
    """

    def __init__(self, name: str, config: GPTConfig, cuts: Cuts) -> None:
        super().__init__(name)
        tp, width = cuts.mesh.tp, config.width
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
        rows = self._rows(this.draw)
        drop = 0.0 if rows is None else self.dropout
        if this.carry is not None:
            y = self._of_slice(qkv, this.carry, this.documents, rows, drop)
        elif this.positions is None:  # whole sequences are here
            y = ops.attention(qkv, self.heads, self.kv_heads, keep_scores=self.keep_scores)
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
        return ops.slice_attention(qkv, past, self.heads, self.kv_heads, mask=mask, rows=rows, drop=drop)

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
    """One layer of the model: attention, then MLP or experts, each behind a norm and beside a residual.

    With scales the stream, norms and the last bias of each branch are float32, and a branch gets and gives half
    precision (`mpitrain.autograd.ops.branch`).
    """

    def __init__(self, number: int, config: GPTConfig, cuts: Cuts) -> None:
        name = f"blocks.{number}"
        super().__init__(name)
        spec = between(cuts.sequence_parallel)
        self.scales, self.dtype = cuts.scales, cuts.dtype
        self.number = number
        self.norm1 = LayerNorm(f"{name}.norm1", config.width, spec=spec)
        self.attention = Attention(f"{name}.attention", config, cuts)
        self.drop1 = Residual(f"{name}.drop1", config.dropout)
        self.norm2 = LayerNorm(f"{name}.norm2", config.width, spec=spec)
        routing = config.routing
        self.mlp: Mlp | Moe
        if routing is not None and routing.has_experts(number):
            self.mlp = Moe(
                f"{name}.mlp",
                routing,
                config.width,
                4 * config.width,
                cuts.mesh,
                sequence_parallel=cuts.sequence_parallel,
                gelu=config.gelu,
                layers=config.layers,
                overlap=cuts.expert_overlap,
            )
        else:
            self.mlp = Mlp(f"{name}.mlp", config, cuts)
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

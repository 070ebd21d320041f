"""The numbers that make a decoder, and what follows from them: parameters, operations, which parts it is built of.

A family of models (`gpt.py`, `llama.py`) says by a subclass which norm, which MLP and which positions it has; whoever
builds, predicts or saves a model asks here and need not know the family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mpitrain.errors import ConfigError
from mpitrain.nn.module import Module
from mpitrain.routing import Routing
from mpitrain.spec import Spec

if TYPE_CHECKING:
    from mpitrain.nn.rotary import Rotary


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes that all families have.

    Attributes:
        vocab: words.
        layers: blocks.
        width: of the stream; divisible by heads.
        heads: of queries.
        seq_len: the longest sequence.
        dropout: share of activations that are dropped in training.
        tied: whether the token table is the output head, too.
        kv_heads: heads of keys and values, shared by groups of queries; divides heads.  None: as many as heads.
        hidden: units of an MLP; None: as many as the family has for this width.
        window: a query sees its own position and window - 1 before it; None: all before it.
        eps: added in the norms.
        routing: numbers of a mixture of experts; None: every block has an MLP.
        family: the name of the family.
        has_biases: whether linear layers and norms have one.
        is_gated: whether an MLP has two matrices on its way up, one of which gates the other.
        is_rotary: whether positions turn queries and keys, instead of being added to the stream.
    """

    vocab: int = 256
    layers: int = 2
    width: int = 128
    heads: int = 4
    seq_len: int = 64
    dropout: float = 0.0
    tied: bool = False
    kv_heads: int | None = None
    hidden: int | None = None
    window: int | None = None
    eps: float = 1e-5
    routing: Routing | None = None

    family: ClassVar[str] = ""
    has_biases: ClassVar[bool] = True
    is_gated: ClassVar[bool] = False
    is_rotary: ClassVar[bool] = False

    def __post_init__(self) -> None:
        who, routing = type(self).__name__, self.routing
        if routing is not None and not isinstance(routing, Routing):
            raise ConfigError(f"{who}: routing {routing!r} must be a Routing, as Routing(8).")
        if routing is not None and routing.every > self.layers:
            raise ConfigError(f"{who}: no block of {self.layers} would have experts, with every={routing.every}.")
        for name in ("hidden", "window"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{who}: {name} {number} must be at least 1, or None.")

    # What the parts are: of a family.

    def norm(self, name: str, spec: Spec | None = None) -> Any:
        """A norm over the stream."""
        raise NotImplementedError

    def mlp(self, name: str, block: int, cuts: Any) -> Module:
        """The MLP of a block, whose last layer is `down`, or its experts; `cuts` as for the block."""
        raise NotImplementedError

    def positions(self, name: str, tp: Any, scale: float, sequence_parallel: bool) -> Module | None:
        """What adds positions to the stream; None: nothing does."""
        return None

    def rotary(self) -> Rotary | None:
        """What turns queries and keys by their positions; None: nothing does."""
        return None

    # What follows from the numbers.

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Elements of a query, a key or a value."""
        return self.width // self.heads

    @property
    def units(self) -> int:
        """Hidden units of an MLP, or of each expert."""
        return 4 * self.width if self.hidden is None else self.hidden

    @property
    def qkv_width(self) -> int:
        """Elements of the queries, keys and values of a token."""
        return self.width + 2 * self.groups * self.head_width

    @property
    def mlp_weights(self) -> int:
        """Elements of the matrices of an MLP."""
        return (3 if self.is_gated else 2) * self.width * self.units

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
        return 0 if routing is None else len(routing.layers(self.layers)) * routing.experts * self.mlp_weights

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
        biases = int(self.has_biases)
        norm = (1 + biases) * h
        attention = h * (self.qkv_width + h) + biases * (self.qkv_width + h) + 2 * norm  # with the two norms
        dense, routed = self.mlp_weights + biases * (self.units + h), 0
        if self.routing is not None:
            routed = self.routing.experts * (self.mlp_weights + h)  # without biases, and a column of the router each
        blocks = tuple(attention + (routed if self.has_experts(block) else dense) for block in range(self.layers))
        positions = 0 if self.is_rotary else self.seq_len * h
        return table + positions, blocks, table + norm

    def flops_of_a_token(self, block: int) -> tuple[int, int]:
        """Flops of a block, forward and backward: (a token's own, a token's for each key that it sees).

        Where it has experts these are those of the router and of the k that a token has.
        """
        h, of_mlp = self.width, self.mlp_weights
        if self.routing is not None and self.has_experts(block):
            of_mlp = self.routing.top_k * of_mlp + self.routing.experts * h
        return 6 * (h * (self.qkv_width + h) + of_mlp), 12 * h

    @property
    def seen(self) -> int:
        """Keys that a query may see at the most."""
        return self.seq_len if self.window is None else min(self.window, self.seq_len)

    @property
    def flops_of_parts(self) -> tuple[int, tuple[int, ...], int]:
        """Flops of a token, forward and backward: (embedding, each block, head)."""
        costs = map(self.flops_of_a_token, range(self.layers))
        mean = self.seen - self.seen * self.seen // (2 * self.seq_len)  # keys of a query
        blocks = tuple(own + for_each_key * mean for own, for_each_key in costs)
        return 0, blocks, 6 * self.vocab * self.width

    @property
    def flops_per_token(self) -> int:
        """Flops of the matrix products, forward and backward: 6 a weight that a token meets, 12 s h for attention."""
        costs = map(self.flops_of_a_token, range(self.layers))
        return sum(own + for_each_key * self.seen for own, for_each_key in costs) + 6 * self.vocab * self.width

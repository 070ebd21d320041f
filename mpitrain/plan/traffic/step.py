"""A step of training as one rank sees it: the sizes from which its messages follow, by the letters of the papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import wide
from mpitrain.config import RECOMPUTES
from mpitrain.errors import ConfigError
from mpitrain.models.sizes import DecoderConfig
from mpitrain.nn.share import STAGES
from mpitrain.parallel.context import KINDS
from mpitrain.parallel.powersgd import Choice
from mpitrain.parallel.zero.gather import PREFETCH
from mpitrain.parallel.zero.reducer import BUCKET_BYTES
from mpitrain.pipeline.partition import Partition, balance


class Rows(NamedTuple):
    """Tokens on their way to experts, in one layer and one pass, a row each time that one is sent.

    sent: those that this rank brings; arrived: those that its experts get.
    """

    sent: int
    arrived: int


class Workers(NamedTuple):
    """How workers learn.

    steps: H, after which they average their weights; 0: they sum their gradients at every step, late; moments: of the
    optimizer, vectors as long as the weights, that are averaged with them; clips: whether each clips its gradient.
    """

    steps: int = 0
    moments: int = 0
    clips: bool = False


@dataclass(frozen=True)
class Step:
    """A step of training, seen from one rank.

    Attributes:
        sizes: of the model; sequences are as long as it allows.
        batch: sequences of the global batch.
        microbatches: parts in which a rank works on its share of them.
        dtype: of weights, activations and gradients.
        dp: ranks over which the batch is divided.
        tp: ranks over which layers and vocabulary are cut.
        cp: ranks over which each sequence is cut.
        sequence_parallel: the stream between tensor-parallel regions is cut over tp, along the sequence.
        cp_attention: ring, ulysses or rsa.
        tp_rank: which rank of tp; where the vocabulary does not divide, the last ones hold less of it.
        pp: ranks of a pipeline; stage q is on rank q mod pp.
        pp_rank: which of them.
        partition: blocks of each stage, of all of which the pipeline may have several a rank; None: one stage a rank,
            with as many blocks each as that goes.
        slices: lengths into which each sequence is cut (TeraPipe); None: sequences stay whole.
        row: steps of a row at whose end loss and norm of all are agreed on at once, as in a pipeline that never drains
            and does not clip; what is sent is then told of the whole row.  1: each step agrees.
        recompute: what backward makes again instead of keeping it: none, selective (attention scores) or full (blocks).
        recomputed: names of the parts that are made again as a whole: blocks, or their attention or mlp
            (`blocks.3`, `blocks.0.mlp`); None: with full all blocks, else none.
        scaled: residual branches have scales of their own for their gradients; the stream is then in full precision.
        optimizer: rule that updates the weights; only adafactor sends anything.
        ep: ranks of dp over which experts are spread.
        expert_rows: block -> the `Rows` of each pass through its experts, micro-batch by micro-batch and in it slice by
            slice; None: all places are taken, on all ranks alike.
        padded: a micro-batch has tokens that are padding; then routers keep which those are.
        packed: sequences hold several documents, none of which sees another.
        expert_overlap: rows go to half of a rank's experts at a time.
        dp_rank, cp_rank: which ranks of dp and cp; with ZeRO they have different rows of a parameter.
        zero: what is cut over the ranks that a parameter is the same on: nothing, from 1 on masters and optimizer
            state, from 2 on gradients, with 3 weights.
        prefetch: parts of the model whose weights are on their way while another one works; with 3 alone.
        bucket_bytes: of gradients that leave in one message, at least; with ZeRO alone.
        compression: what PowerSGD makes of gradients; None: they travel whole.
        workers: how workers learn that do so apart from each other; None: gradients of all ranks are summed.
        gist: bits in which what need not be exact waits for backward (mpitrain.memory.gist); None: all is exact.
        asks: numbers that ranks are asked at the end of a step (`Executor(ask=)`).
        freeze: patterns of parameters that are not trained (`nn.Module.freeze`).

    Raises:
        ConfigError: sizes do not divide, there is no such attention, recompute or ZeRO, or slices stand with another
            cut of sequences.
    """

    sizes: DecoderConfig
    batch: int
    microbatches: int = 1
    dtype: Any = np.float32
    dp: int = 1
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    cp_attention: str = "ring"
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    partition: Partition | None = None
    slices: tuple[int, ...] | None = None
    row: int = 1
    recompute: str = "selective"
    recomputed: frozenset[str] | None = None
    scaled: bool = False
    optimizer: str = "adamw"
    ep: int = 1
    expert_rows: Mapping[int, Sequence[tuple[int, int]]] | None = None
    padded: bool = False
    packed: bool = False
    expert_overlap: bool = False
    dp_rank: int = 0
    cp_rank: int = 0
    zero: int = 0
    prefetch: int = PREFETCH
    bucket_bytes: int = BUCKET_BYTES
    compression: Choice | None = None
    workers: Workers | None = None
    gist: int | None = None
    asks: int = 0
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes, groups = self.sizes, self.sizes.groups
        fewer, more = sorted((groups, self.tp))
        stages = self.pp if self.partition is None else self.partition.stages
        for what, amount, parts, why in (
            ("batch", self.batch, self.dp * self.microbatches, "dp x micro-batches"),
            ("seq_len", sizes.seq_len, self.cp * (self.tp if self.is_cut else 1), "parts of a sequence"),
            ("width", sizes.width, sizes.heads, "heads"),
            ("heads", sizes.heads, groups, "heads of keys and values"),
            ("heads", sizes.heads, self.tp, "ranks of tp"),
            ("hidden units", sizes.units, self.tp, "ranks of tp"),
            ("tp and heads of keys and values: the larger,", more, fewer, "the smaller"),
            ("stages", stages, self.pp, "ranks of pp"),
            ("dp", self.dp, self.ep, "ranks of ep"),
            ("experts", self.experts or self.ep, self.ep, "ranks of ep"),
        ):
            if parts < 1 or amount < 1 or amount % parts:
                raise ConfigError(f"{what} {amount} is not divisible by {parts} ({why})")
        if self.cp_attention not in KINDS:
            raise ConfigError(f"context attention {self.cp_attention!r} is not known; known: {', '.join(KINDS)}")
        if self.recompute not in RECOMPUTES:
            raise ConfigError(f"recompute {self.recompute!r} is not known; known: {', '.join(RECOMPUTES)}")
        if not 0 <= self.pp_rank < self.pp:
            raise ConfigError(f"there is no rank {self.pp_rank} of pp: it has {self.pp}")
        if self.partition is not None and self.partition.blocks != sizes.layers:
            raise ConfigError(f"a partition of {self.partition.blocks} blocks for a model of {sizes.layers} layers")
        if self.zero not in STAGES:
            raise ConfigError(f"ZeRO {self.zero} is not known; known: {', '.join(map(str, STAGES))}")
        if self.row < 1:
            raise ConfigError(f"a row of {self.row} steps: it has at least 1")
        self._check_slices()

    def _check_slices(self) -> None:
        if self.slices is None:
            return
        if min(self.slices, default=0) < 1 or sum(self.slices) != self.sizes.seq_len:
            shown = " + ".join(map(str, self.slices)) or "no"
            raise ConfigError(f"slices of {shown} tokens are not those of a sequence of {self.sizes.seq_len}")
        if self.cp > 1 or self.is_cut:
            raise ConfigError("slices go together with dp and tp, not with cp or sequence parallelism")

    @property
    def period(self) -> int:
        """Steps that are told of together, since only the last of them has all the messages: H of local SGD."""
        return max(1, self.workers.steps) if self.workers is not None else 1

    # Who has what.

    @property
    def stages(self) -> range:
        """The numbers of this rank's stages."""
        return range(self.pp_rank, self._partition.stages, self.pp)

    @property
    def blocks(self) -> int:
        """Blocks on this rank; L / p where they divide."""
        return sum(self._partition.layers[stage] for stage in self.stages)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the blocks on this rank."""
        return [number for stage in self.stages for number in self.blocks_of(stage)]

    @property
    def is_first(self) -> bool:
        """Whether the embedding is on this rank."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether the head is on this rank."""
        return self.pp_rank == self.pp - 1

    def is_recomputed(self, block: int, branch: str = "") -> bool:
        """Whether a block, or at least its `attention` or `mlp`, runs forward once more in backward."""
        if self.recomputed is None:
            return self.recompute == "full"
        name = f"blocks.{block}"
        return name in self.recomputed or (branch != "" and f"{name}.{branch}" in self.recomputed)

    # Experts.

    @property
    def experts(self) -> int:
        """E, of a layer that has them; 0: none has."""
        return 0 if self.sizes.routing is None else self.sizes.routing.experts

    @property
    def choices(self) -> int:
        """k, experts of a token."""
        return 0 if self.sizes.routing is None else self.sizes.routing.top_k

    @property
    def expert_blocks(self) -> list[int]:
        """Numbers of the blocks on this rank that have experts."""
        return [number for number in self.numbers if self.sizes.has_experts(number)]

    @property
    def halves(self) -> tuple[int, ...]:
        """Experts of this rank that get their rows in one message: all, or each half of them."""
        here = self.experts // self.ep
        return (here // 2, here - here // 2) if self.expert_overlap and self.ep > 1 else (here,)

    @property
    def passes(self) -> int:
        """How often a step goes through each block of a rank."""
        return self.microbatches * len(self.lengths)

    def rows_of(self, block: int, passed: int) -> Rows:
        """The rows of one pass through a block's experts, by its number in the step.

        Without `expert_rows` as many arrive as leave, b min(k s, E C): every token finds place with all its experts, or
        every place is taken.  Over the ranks of ep together there cannot be more.
        """
        if self.expert_rows is not None:
            return Rows(*self.expert_rows[block][passed])
        length = self.lengths[passed % len(self.lengths)]
        here = self.b * min(self.choices * length, self.experts * self._capacity)
        return Rows(here, here)

    def at_most(self) -> Step:
        """The same with the most rows that one rank can get: all tokens of ep that the experts here have room for."""
        if not self.experts:
            return self
        experts = self.experts // self.ep
        rows = [
            Rows(
                self.b * min(self.choices * length, self.experts * self._capacity),
                self.b * self.ep * min(length * min(self.choices, experts), experts * self._capacity),
            )
            for length in self.lengths
        ] * self.microbatches
        return replace(self, expert_rows=dict.fromkeys(self.expert_blocks, rows), padded=True)

    @property
    def _capacity(self) -> int:
        """C: places of an expert for a row of the batch, without padding."""
        return 0 if self.sizes.routing is None else self.sizes.routing.capacity(self.sizes.seq_len)

    @property
    def keeps_scores(self) -> bool:
        """Whether attention keeps its scores: where they are asked for, and all keys of a query are here at once."""
        return self.recompute == "none" and self.cp == 1 and self.slices is None

    @property
    def last_stage(self) -> int:
        """The number of the stage that makes the loss."""
        return self._partition.stages - 1

    def blocks_of(self, stage: int) -> range:
        """Numbers of the blocks of a stage."""
        return self._partition.range(stage)

    @cached_property
    def _partition(self) -> Partition:
        return balance([1.0] * self.sizes.layers, self.pp) if self.partition is None else self.partition

    # The letters of the formulas.

    @property
    def b(self) -> int:
        """Sequences of a micro-batch."""
        return self.batch // (self.dp * self.microbatches)

    @property
    def s(self) -> int:
        """Tokens of a sequence that a rank holds."""
        return self.sizes.seq_len // self.cp

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of a sequence with which a rank works at a time: those of each slice."""
        return (self.s,) if self.slices is None else self.slices

    @property
    def v(self) -> int:
        """Stages of a rank."""
        return len(self.stages)

    @property
    def beta(self) -> int:
        """Bytes of an element of what blocks compute with."""
        return int(np.dtype(self.dtype).itemsize)

    @property
    def beta_stream(self) -> int:
        """Bytes of an element of the stream, of the token table and of the head."""
        return self.beta_wide if self.scaled else self.beta

    @property
    def beta_wide(self) -> int:
        """Bytes of a number in which sums are taken: at least four."""
        return int(np.dtype(wide(np.dtype(self.dtype))).itemsize)

    @property
    def h(self) -> int:
        """Width of the queries of this rank's heads."""
        return self.sizes.width // self.tp

    @property
    def h_kv(self) -> int:
        """Width of the keys that this rank holds, at least one head; of the values, too."""
        return max(1, self.sizes.groups // self.tp) * self.sizes.head_width

    @property
    def is_cut(self) -> bool:
        """Whether the stream is cut over tp, which it is not over one rank."""
        return self.sequence_parallel and self.tp > 1

"""A decoder on a mesh: what all families of language models are, whatever their blocks are made of.

    x = table[tokens] (+ positions)
    x = block(x)                              for each block
    loss = sum over targets of cross_entropy(head(norm(x)))

It is built from parallel layers, which on axes of one rank are the serial ones: there is no second, serial model.
Heads, hidden units and the vocabulary are cut over tp, the tokens of a sequence over cp; with sequence parallelism the
stream between the layers over tp as well.  The blocks are dealt out to the stages of a pipeline: the token table is on
the first, the head on the last, and between two stages passes the stream.

Initial values: matrices are normal with standard deviation 1 / sqrt(fan-in), those that end a residual branch are
divided by sqrt(2 L) more; an untied token table is normal with 0.5; a tied table is also the head and starts with
1 / sqrt(width).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, to_device, to_host, wide
from mpitrain.comm.mesh import Mesh
from mpitrain.data.packing import places_in_documents
from mpitrain.data.tokens import Batch
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.models.sizes import DecoderConfig
from mpitrain.models.transformer import PLAIN, Block, Cuts, Pass, branches
from mpitrain.nn import init as initial
from mpitrain.nn.layers import Dropout
from mpitrain.nn.materialize import Home
from mpitrain.nn.module import PRECISION, Boundary, Module
from mpitrain.optim.scaler import BlockScaler
from mpitrain.parallel import context
from mpitrain.parallel.expert.counted import length
from mpitrain.parallel.expert.experts import check
from mpitrain.parallel.expert.moe import OF_EVALUATION, RoutedTokens
from mpitrain.parallel.sequence import SEQUENCE, between
from mpitrain.parallel.stages import Links, check_whole, pass_through, stages_here
from mpitrain.parallel.vocabulary import VocabularyEmbedding, VocabularyHead, cross_entropy
from mpitrain.parallel.zero import gather_units
from mpitrain.parallel.zero.gather import PREFETCH
from mpitrain.pipeline.partition import Partition, balance
from mpitrain.spec import INVARIANT, Shard, cut

if TYPE_CHECKING:
    from mpitrain.autograd.carry import Carry
    from mpitrain.models.cache import Cache


class Decoder(Module):
    """A decoder on a mesh: this rank's slabs, with initial values.  Families are subclasses.

    Args:
        config: the sizes.
        mesh: the layout; the model is the same on every one.
        sequence_parallel: cut the stream between tensor-parallel regions along the sequence, over tp.
        cp_attention: how attention reaches other ranks' keys where mesh.cp is larger than 1: ring, ulysses, rsa.
        expert_overlap: half of a rank's experts work while the rows of the other half travel, over ep.
        partition: how many blocks each stage of a pipeline has; None: as many each, as far as that goes.  Stage q is
            on rank q mod pp; there may be several a rank.
        seed: of the initial values and of dropout.
        dtype: of weights, activations and gradients; halves have float32 masters, statistics, logits and loss.
        keep_scores: whether attention keeps its scores for backward instead of making them again.
        scales: of the gradients of each branch (`BlockScaler`); the stream, norms, table and head are then float32.
        zero: stage of ZeRO: what ranks deal out that would all hold the same (mpitrain.parallel.zero).
        prefetch: stage 3: parts of the model whose weights are on their way while another one works.
        home: stage 3: where the parameters live, if not here (mpitrain.memory.home).
        freeze: patterns of parameters that nobody trains, as `Module.freeze` takes them.
        xp: where they live: numpy, or cupy for this rank's device.
        start: whether weights have their initial values; else whoever makes it fills them.

    Attributes:
        positions_here: the positions of a sequence that this rank holds, for `Tokens.batches`; None: all of them.
        partition: the one in force.

    Raises:
        ShapeError: heads, the sequence or the stages do not divide; on every rank, before any message.
        ConfigError: the scales are those of other branches.

    `model(batch)`, where all stages are on this rank, is the sum over the batch's valid targets of the cross-entropy in
    nats: the executor divides by their number over all ranks.  A batch from the host goes to where the weights are.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mesh: Mesh,
        *,
        sequence_parallel: bool = False,
        cp_attention: str = "ring",
        expert_overlap: bool = False,
        partition: Partition | None = None,
        seed: int = 0,
        dtype: Any = np.float32,
        keep_scores: bool = False,
        scales: BlockScaler | None = None,
        zero: int = 0,
        prefetch: int = PREFETCH,
        home: Home | None = None,
        freeze: Sequence[str] = (),
        xp: Any = np,
        start: bool = True,
    ) -> None:
        super().__init__(config.family)
        self.config = config
        self.made_of = {"family": config.family, **asdict(config), "seed": seed, "sequence_parallel": sequence_parallel}
        self.tp = mesh.tp
        self.sequence_parallel = sequence_parallel and mesh.tp.size > 1
        self.asked_dtype = np.dtype(dtype)
        dtype = np.dtype(dtype if PRECISION.get() is None else PRECISION.get())
        if scales is not None and list(scales.branches) != branches(config.layers):
            raise ConfigError(
                f"the scales are of {len(scales.branches)} branches, the model has {2 * config.layers}: give"
                " BlockScaler(mpitrain.models.transformer.branches(layers))."
            )
        self.branch_scales = scales
        self.stream_dtype = dtype if scales is None else wide(dtype)
        overlap = expert_overlap and mesh.ep.size > 1
        cuts = Cuts(mesh, self.sequence_parallel, cp_attention, keep_scores, scales, dtype, overlap)
        self.positions_here = self._positions_here(config, cuts)
        routing = config.routing
        if routing is not None:
            check(
                "experts", routing.experts, config.units, mesh.ep, mesh.tp
            )  # also where this rank's stages have no experts
            self.adds_losses = True
            self.counted = {f"blocks.{n}.mlp": length(routing.experts) for n in routing.layers(config.layers)}
        self.rotary = config.rotary()
        self._draws = config.dropout > 0 or (routing is not None and routing.draws)
        self.partition = balance([1.0] * config.layers, mesh.pp.size) if partition is None else partition
        self.num_stages = self.partition.stages
        self.stages = stages_here(self.partition, config.layers, mesh.pp)
        self._check_forward()
        self.pp = mesh.pp
        self.links = Links(mesh.pp, [stage % mesh.pp.size for stage in range(self.num_stages)])
        width = config.width
        scale = width**-0.5 if config.tied else 0.5
        if self._has_first or (self._has_last and config.tied):
            self.table = VocabularyEmbedding(
                "table",
                config.vocab,
                width,
                mesh.tp,
                init=initial.normal(scale),
                sequence_parallel=self.sequence_parallel,
                tied=config.tied,
            )
        if self._has_first:
            self.positions = config.positions("positions", mesh.tp, scale, self.sequence_parallel)
            self.drop = Dropout("drop", config.dropout)
        here = [number for stage in self.stages for number in self.partition.range(stage)]
        self.blocks = [Block(number, config, cuts) for number in here]
        self._block_at = dict(zip(here, self.blocks, strict=True))
        if self._has_last:
            self.norm = config.norm("norm", between(self.sequence_parallel))
            self.head = VocabularyHead(
                "head",
                width,
                config.vocab,
                mesh.tp,
                self.table.weight if config.tied else None,
                sequence_parallel=self.sequence_parallel,
            )
        if scales is not None:
            in_blocks = {p for block in self.blocks for p in block.parameters()}
            for p in self.parameters():
                p.in_full = p.in_full or p not in in_blocks
        if freeze:
            self.freeze(*freeze, exchange=mesh.pp.exchange)
        self.materialize(mesh, seed, dtype, xp, zero, home, start=start)
        gather_units(self, mesh, prefetch)
        if self.rotary is not None:  # before the first step, so that it is known what a rank holds
            places = self.positions_here
            self._turns(config.seq_len if places is None else len(places), places)

    @property
    def _has_first(self) -> bool:
        return 0 in self.stages

    @property
    def _has_last(self) -> bool:
        return self.num_stages - 1 in self.stages

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Tensor:
        check_whole(self)
        inputs: tuple[Tensor, ...] = ()
        for stage in range(self.num_stages):
            inputs = self._forward_stage(stage, batch, inputs, None)
        return inputs[0]

    def forward_stage(
        self, stage: int, batch: Batch, *inputs: Tensor, carry: Carry | None = None
    ) -> tuple[Tensor, ...]:
        if self.num_stages == 1 and carry is None:
            return (self(batch),)
        return self._forward_stage(stage, batch, inputs, carry)

    def _forward_stage(
        self, stage: int, batch: Batch, inputs: tuple[Tensor, ...], carry: Carry | None
    ) -> tuple[Tensor, ...]:
        self._check_part(batch)
        routed = self._tokens(batch)
        turns, places = self._turns(batch.inputs.shape[1], batch.positions), None  # while they are on the host
        if batch.documents is not None and stage == 0 and self.positions is not None:
            where = places_in_documents(to_host(batch.documents), to_host(batch.positions))
            places = to_device(where, self.like)
        batch = batch.to(self.like)
        draw = batch.draw(self.seed) if self._draws else None
        this = Pass(draw, positions=batch.positions, documents=batch.documents, carry=carry, tokens=routed)
        this = this._replace(turns=turns, places=places)
        x = self._stage(stage, batch.inputs, this, *inputs)
        if stage < self.num_stages - 1:
            return (x,)
        return (cross_entropy(self._scores(x), batch.targets, self.tp, vocab=self.config.vocab),)

    def _tokens(self, batch: Batch) -> RoutedTokens:
        """What experts need to know of a batch on the host."""
        if self.config.routing is None:
            return OF_EVALUATION
        real = batch.real
        here = None if real is None else to_device(real, self.like)
        return RoutedTokens(batch.training, None, batch.positions, batch.row_lengths, here)

    def parts(self, stage: int) -> list[Module]:
        first = [part for part in (self.table, self.positions) if part is not None] if stage == 0 else []
        blocks = [self._block_at[number] for number in self.partition.range(stage)]
        return [*first, *blocks, *([self.norm, self.head] if stage == self.num_stages - 1 else [])]

    def boundary(self, stage: int, batch: Batch) -> tuple[Boundary, ...]:
        return self._boundary(*batch.inputs.shape) if stage else ()

    def _boundary(self, rows: int, length: int) -> tuple[Boundary, ...]:
        """The stream, for so many rows of so many tokens here."""
        cut_over = self.tp.size if self.sequence_parallel else 1
        states = {"dp": Shard(0), "cp": Shard(1), "tp": Shard(SEQUENCE) if self.sequence_parallel else INVARIANT}
        return (Boundary((rows, length // cut_over, self.config.width), self.stream_dtype, states),)

    def _stage(self, stage: int, tokens: Array, this: Pass, *inputs: Tensor) -> Tensor:
        """The stream after a stage.

        Args:
            tokens: (b, s) ids, for the first stage.
            inputs: the stream before it, for the others.
        """
        length = tokens.shape[1]
        mine = self._stream_slice(length)
        if this.draw is not None:
            stream = this.draw.at(mine)
            this = this._replace(stream=stream, tokens=this.tokens._replace(draw=stream))
        ordered = this.cache is None and length == self.config.seq_len  # then they are all that there are, one by one
        positions = None if ordered else this.positions
        if this.turns is None:
            this = this._replace(turns=self._turns(length, positions))
        if stage == 0:
            x = self.table(tokens)
            if self.positions is not None:
                x = self.positions(x, length, mine, positions if this.places is None else this.places)
            x = self.drop(x, this.stream)
        else:
            (x,) = inputs
        for number in self.partition.range(stage):
            x = self._block_at[number](x, this)
        return x

    def _turns(self, length: int, positions: Array | None) -> tuple[Array, Array] | None:
        """Cosines and sines of these places, or of the first ones; None where positions are not rotary."""
        return None if self.rotary is None else self.rotary.turns(length, positions, self.like)

    @property
    def constants(self) -> tuple[Array, ...]:
        return () if self.rotary is None else self.rotary.arrays

    def _scores(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def logits(self, inputs: Array, this: Pass = PLAIN) -> Tensor:
        """Scores of the next token.

        Args:
            inputs: (b, s) token ids of this rank; s is at most seq_len, and with sequence parallelism divisible by tp.
            this: what else the pass needs; as it is, the whole sequence is here and nothing is dropped.

        Returns:
            (b, s, V/t) this rank's columns of the vocabulary: Shard(2) on tp.

        Raises:
            ShapeError: the sequence is too long.
        """
        self._check_length(inputs.shape[1])
        tokens = to_device(inputs, like=self.like)
        check_whole(self)
        before: tuple[Tensor, ...] = ()
        for stage in range(self.num_stages):
            before = (self._stage(stage, tokens, this, *before),)
        return self._scores(before[0])

    def next_scores(self, inputs: Array, cache: Cache | None = None, lasts: np.ndarray | None = None) -> np.ndarray:
        """Scores of the token after the last one, on every rank of pp and tp; collective over both, and over ep.

        Args:
            inputs: (b, s) token ids, whole sequences, also under context parallelism.
            cache: what is filled by them; None: nobody goes on from here.
            lasts: int64 (b,) the last token of each; what stands behind it changes nothing.  None: the one at s - 1.

        Returns:
            (b, vocab), on the host.
        """
        rows, length = inputs.shape
        self._check_length(length)
        at = np.arange(rows), np.full(rows, length - 1) if lasts is None else lasts
        inputs, this = self._padded(inputs), PLAIN._replace(cache=cache)
        tokens = to_device(inputs, like=self.like)

        def scores(x: Tensor) -> Array:
            places = tuple(to_device(each, self.like) for each in at)
            if self.sequence_parallel:  # each rank of tp has some of them
                return self._scores(x).data[places]
            return self._scores(Tensor(x.data[places][None])).data[0]

        return self._passed(rows, inputs, lambda stage, *before: self._stage(stage, tokens, this, *before), scores)

    def step_scores(self, newest: np.ndarray, cache: Cache) -> np.ndarray:
        """The same after one more token of each text that a cache holds.

        Args:
            newest: int64 (b,) the tokens.
            cache: which they join.

        Returns:
            (b, vocab), on the host.
        """
        inputs, positions = self._padded(newest[None]), self._padded(cache.lengths[None])[0]
        turns = None if self.rotary is None else self.rotary.turns(len(positions), positions, self.like)
        tokens, positions = (to_device(each, self.like) for each in (inputs, positions))
        this = PLAIN._replace(cache=cache, positions=positions, turns=turns)
        given = tokens, positions, *(turns or ())

        def run(stage: int, *before: Tensor) -> Tensor:
            def make() -> Tensor:
                x = self._stage(stage, tokens, this, *before)
                return self._scores(x) if stage == self.num_stages - 1 else x

            if self.resident is not None:  # weights that come and go
                return make()
            return cache.programs.made(stage, make, (*given, *(each.data for each in before)))

        return self._passed(len(newest), inputs, run, lambda x: x.data[0, : len(newest)])

    def _padded(self, inputs: np.ndarray) -> np.ndarray:
        """So many tokens as the stream can be cut into over tp: later ones change nothing before them."""
        more = -inputs.shape[1] % self.tp.size if self.sequence_parallel else 0
        return np.pad(inputs, ((0, 0), (0, more))) if more else inputs

    def _passed(
        self, rows: int, inputs: np.ndarray, run: Callable[..., Tensor], scores: Callable[[Tensor], Array]
    ) -> np.ndarray:
        """What comes of tokens that pass through all stages without a tape, on every rank of pp and tp.

        Args:
            rows: how many scores are wanted.
            inputs: the tokens.
            run: (stage, *what comes into it) -> the stream.
            scores: this rank's columns of what is wanted, from what the last stage made.
        """
        made, last = dict[int, Any](), self.num_stages - 1
        pass_through(
            self.links,
            self.stages,
            last,
            0,
            lambda stage, *before: (run(stage, *before),),
            lambda stage: self._boundary(*inputs.shape),
            made,
            self.like,
        )
        vocab, tp = self.config.vocab, self.tp
        whole: np.ndarray | None = None
        if self._has_last:
            whole = to_host(scores(made[last][0]))
            if tp.size > 1:
                room = -(-vocab // tp.size) - whole.shape[1]  # the last ranks may hold fewer columns, or none
                whole = np.ascontiguousarray(tp.all_gather(np.pad(whole, ((0, 0), (0, room))), 1)[:, :vocab])
        self.links.finish()
        if whole is None:
            whole = np.empty((rows, vocab), wide(self.like.dtype))
        return self.pp.broadcast(whole, last % self.pp.size)

    # -- what is checked ----------------------------------------------------------------------------------------------

    def _check_length(self, length: int) -> None:
        if length > self.config.seq_len:
            raise ShapeError(
                f"a sequence of {length} tokens is longer than the model's {self.config.seq_len} positions"
            )

    def _check_forward(self) -> None:
        """Refuse a subclass whose forward no stage of a pipeline would run."""
        own = type(self)
        if self.num_stages > 1 and own.forward is not Decoder.forward and own.forward_stage is Decoder.forward_stage:
            raise ConfigError(
                f"{own.__name__} has a forward of its own, which no stage of a pipeline would run.\n"
                "Define forward_stage as well, which is given the stage's number and its inputs; or take one stage."
            )

    def _stream_slice(self, length: int) -> slice:
        """Which of the tokens here this rank holds between tensor-parallel regions."""
        return slice(*cut(length, self.tp.size, self.tp.rank)) if self.sequence_parallel else slice(0, length)

    def _check_part(self, batch: Batch) -> None:
        """Refuse a batch that is not the part of its sequences which this rank should hold."""
        expected = self.positions_here
        self._check_length(batch.inputs.shape[1])
        if expected is not None and not np.array_equal(to_host(batch.positions), expected):
            raise ShapeError(
                f"a batch with {len(batch.positions)} positions of each sequence, which are not the {len(expected)} of"
                f" {self.config.seq_len} that this rank of axis cp holds.\n"
                "Cut it with batch.part(model.positions_here), or give that to Tokens.batches(..., positions=...)."
            )

    @staticmethod
    def _positions_here(config: DecoderConfig, cuts: Cuts) -> Array | None:
        """Which positions this rank holds; refuses sequences that do not divide."""
        cp, tp = cuts.mesh.cp, cuts.mesh.tp
        context.check(config.seq_len, config.heads // tp.size, max(1, config.groups // tp.size), cp, cuts.cp_attention)
        if cuts.sequence_parallel and config.seq_len // cp.size % tp.size:
            raise ShapeError(
                f"sequence parallelism: {config.seq_len // cp.size} tokens of a sequence are not divisible by axis tp"
                f" of size {tp.size}."
            )
        return None if cp.size == 1 else context.positions(config.seq_len, cp, cuts.cp_attention)

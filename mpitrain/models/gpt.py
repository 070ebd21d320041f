"""GPT-2's architecture: pre-LayerNorm blocks, learned positions, tied or untied head.

    x = table[tokens] + positions
    x = x + drop(proj(attention(qkv(norm1(x)))))      for each block
    x = x + drop(down(gelu(up(norm2(x)))))
    loss = sum over targets of cross_entropy(head(norm(x)))

It is built from parallel layers, which on axes of one rank are the serial ones: there is no second, serial model.
Heads, hidden units and the vocabulary are cut over tp, the tokens of a sequence over cp; with sequence parallelism the
stream between the layers over tp as well.

Initial values: matrices are normal with standard deviation 1 / sqrt(fan-in), those that end a residual branch are
divided by sqrt(2 L) more; an untied token table is normal with 0.5 and the learned positions start as sinusoids of the
same root mean square, so that both are heard; a tied table is also the head and starts with 1 / sqrt(width), positions
alike.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3; Vaswani et al. 2017,
arXiv:1706.03762, section 3.5 (sinusoids).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain import collectives
from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, to_device, to_host
from mpitrain.comm.mesh import Mesh
from mpitrain.data.tokens import Batch
from mpitrain.errors import ShapeError
from mpitrain.models.transformer import PLAIN, Block, Cuts, GPTConfig, Pass
from mpitrain.nn import init as initial
from mpitrain.nn.layers import Dropout, LayerNorm
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel import context
from mpitrain.parallel.sequence import between
from mpitrain.parallel.vocabulary import VocabularyEmbedding, VocabularyHead, cross_entropy
from mpitrain.spec import cut

__all__ = ["GPT", "GPTConfig"]


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
        self._check_part(batch)
        batch = batch.to(self.table.weight.data)
        draw = batch.draw(self.seed) if self.config.dropout else None
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
        rows: Tensor = self.positions
        if length < self.config.seq_len:
            rows = rows[:length] if positions is None else ops.take(rows, positions)
        if self.sequence_parallel:
            rows = collectives.pick(rows, self.tp, 0, mine.start, mine.stop)
        return rows

    def _check_part(self, batch: Batch) -> None:
        """Refuse a batch that is not the part of its sequences which this rank should hold."""
        expected = self.positions_here
        if expected is not None and not np.array_equal(to_host(batch.positions), expected):
            raise ShapeError(
                f"a batch with {len(batch.positions)} positions of each sequence, which are not the {len(expected)} of"
                f" {self.config.seq_len} that this rank of axis cp holds.\n"
                "Cut it with batch.part(model.positions_here), or give that to Tokens.batches(..., positions=...)."
            )

    @staticmethod
    def _positions_here(config: GPTConfig, cuts: Cuts) -> Array | None:
        """Which positions this rank holds; refuses sequences that do not divide."""
        cp, tp = cuts.mesh.cp, cuts.mesh.tp
        context.check(config.seq_len, config.heads // tp.size, max(1, config.groups // tp.size), cp, cuts.cp_attention)
        if cuts.sequence_parallel and config.seq_len // cp.size % tp.size:
            raise ShapeError(
                f"sequence parallelism: {config.seq_len // cp.size} tokens of a sequence are not divisible by axis tp"
                f" of size {tp.size}."
            )
        return None if cp.size == 1 else context.positions(config.seq_len, cp, cuts.cp_attention)

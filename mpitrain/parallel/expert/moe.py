"""A layer of experts in the place of an MLP: router, assignment, experts.

    z = router(x),  p = softmax(z),  choices = the k likeliest                   on the stream, each rank its part
    x, weights of the choices, choices   enter the tensor-parallel region        all of this rank's sequences
    y = sum over choices of weight times expert(x)                               back to the stream

On the stream, between two regions, x is what it is for an MLP: the same on all ranks of tp, or with sequence
parallelism cut over them along the sequence.  The router works there, so its losses count each token once.

Sources: Fedus et al. 2021, arXiv:2101.03961; Lepikhin et al. 2020, arXiv:2006.16668.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpitrain.autograd import ops
from mpitrain.autograd.auxiliary import add_counts, counting
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, to_host
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn.module import Module
from mpitrain.parallel.expert.assign import Assignment, assign, choose
from mpitrain.parallel.expert.counted import vector
from mpitrain.parallel.expert.experts import Experts
from mpitrain.parallel.expert.router import Router, balance_loss, z_loss
from mpitrain.parallel.sequence import SEQUENCE, enter, leave
from mpitrain.rng import Draw, uniform
from mpitrain.routing import Routing
from mpitrain.spec import cut


class RoutedTokens(NamedTuple):
    """Which tokens a pass is about; as it is, of evaluation and without padding.

    Attributes:
        training: whether experts have limited room, and losses and noise are wanted.
        draw: of the tokens of this rank's slice of the stream, for noise.
        positions: int64 (s,) global positions of all that this rank holds of each sequence; None: whole sequences.
        lengths: int64 (b,) tokens of the whole sequences that are no padding, on the host; None: all of them.
        real: bool (b, s) which tokens of this rank's sequences are no padding; None: all.
    """

    training: bool = False
    draw: Draw | None = None
    positions: Array | None = None
    lengths: Array | None = None
    real: Array | None = None


OF_EVALUATION = RoutedTokens()


class Moe(Module):
    """A mixture of experts.

    x (b, s, h) Invariant on tp -> (b, s, h) Invariant; with sequence parallelism (b, s/t, h) Shard(1) -> the same.
    Dropped tokens are 0.

    Args:
        name: path in the model; `name.router` and `name.experts` are its parts, `name.second` the random stream of
            GShard's second experts.
        routing: the numbers.
        width: h.
        hidden: units of each expert.
        mesh: experts are cut over ep, hidden units over tp; a sequence over cp.
        sequence_parallel: whether the stream is cut over tp.
        gelu: tanh or erf.
        layers: of the model.
        overlap: whether half of a rank's experts work while the rows of the other half travel.

    Raises:
        ShapeError: experts or hidden units do not divide.
    """

    def __init__(
        self,
        name: str,
        routing: Routing,
        width: int,
        hidden: int,
        mesh: Mesh,
        *,
        sequence_parallel: bool = False,
        gelu: str = "tanh",
        layers: int = 1,
        overlap: bool = False,
    ) -> None:
        super().__init__(name)
        self.routing = routing
        self.tp, self.cp = mesh.tp, mesh.cp
        self.sequence_parallel = sequence_parallel
        self.router = Router(f"{name}.router", width, routing, sequence_parallel=sequence_parallel)
        self.experts = Experts(
            f"{name}.experts",
            routing.experts,
            width,
            hidden,
            mesh.ep,
            mesh.tp,
            gelu=gelu,
            layers=layers,
            overlap=overlap,
        )

    def forward(self, x: Tensor, tokens: RoutedTokens) -> tuple[Tensor, list[tuple[Tensor, float]]]:
        """What experts make of the tokens, and the losses that the router has of them.

        Args:
            x: the stream.
            tokens: which they are, and whether this is training.

        Returns:
            y; in training the losses with their coefficients, for `add_loss`: sums over this rank's rows.

        Raises:
            ShapeError: x is not (b, s, h).
            ConfigError: training draws noise, and there is no draw.
        """
        if x.ndim != 3:
            raise ShapeError(
                f"{self.name}: x {x.shape} must be (sequences, tokens, width): tokens compete by sequence."
            )
        if tokens.training and tokens.draw is None and self.routing.draws:
            raise ConfigError(
                f"{self.name}: the router draws random numbers in training; give RoutedTokens(draw=batch.draw(seed))."
            )
        z = self.router(x, tokens.draw if tokens.training else None)
        p = ops.softmax(z, -1)
        ids = choose(p.data, self.routing.top_k)
        weights = ops.gates(p, ids, self.routing.normalizes)
        codes = self._drawn(ids, weights.data, tokens)
        if self.sequence_parallel:
            codes = self.tp.all_gather(codes.astype(np.int32), SEQUENCE).astype(np.int64)
        to = assign(
            codes,
            self.routing,
            lengths=tokens.lengths,
            real=tokens.real,
            positions=tokens.positions,
            axis=self.cp,
            training=tokens.training,
        )
        weights = enter(weights, self.tp, self.sequence_parallel)
        y = self.experts(enter(x, self.tp, self.sequence_parallel), weights, to)
        y = leave(y, self.tp, self.sequence_parallel)
        return y, self._losses(z, p, to, tokens) if tokens.training else []

    def _drawn(self, ids: Array, weights: Array, tokens: RoutedTokens) -> Array:
        """The choices; GShard's second experts that the draw did not take as ~expert."""
        if self.routing.router != "gshard" or tokens.draw is None or not tokens.training:
            return ids
        chance = uniform(tokens.draw.rows(f"{self.name}.second"), 1)[..., 0]
        codes, second = ids.copy(), ids[..., 1]
        codes[..., 1] = array_module(ids).where(2.0 * weights[..., 1] > chance, second, ~second)
        return codes

    def _losses(self, z: Tensor, p: Tensor, to: Assignment, tokens: RoutedTokens) -> list[tuple[Tensor, float]]:
        """The losses of the tokens on this rank's slice of the stream; what a step tells is counted along."""
        rows, here = p.shape[:2]
        lengths, real, routing = tokens.lengths, tokens.real, self.routing
        if lengths is None:
            slices = self.cp.size * (self.tp.size if self.sequence_parallel else 1)
            lengths = np.full(rows, here * slices, np.int64)
        lengths = array_module(p.data).asarray(lengths)
        if real is not None and self.sequence_parallel:
            real = real[:, slice(*cut(real.shape[1], self.tp.size, self.tp.rank))]
        found: dict[str, tuple[Tensor, float]] = {}
        if routing.balance_loss:
            found["balance"] = balance_loss(p, to.load, lengths, real, routing), routing.balance_loss
        if routing.z_loss:
            found["z"] = z_loss(z, lengths, real), routing.z_loss
        self._count(p.data, to, real, {name: float(to_host(loss.data)) for name, (loss, _) in found.items()})
        return list(found.values())

    def _count(self, p: Array, to: Assignment, real: Array | None, losses: dict[str, float]) -> None:
        """Count what this rank has seen and no other one has: on plain tp all see the same."""
        if not counting():
            return
        first, asked = self.tp.rank == 0, to_host(to.asked)
        numbers: dict[str, float] = {}
        if first or self.sequence_parallel:
            tokens = p.shape[0] * p.shape[1] if real is None else int(real.sum())
            numbers.update(losses, entropy=_entropy(p, real), tokens=float(tokens))
        if first:  # every rank of tp knows of all the choices of a sequence
            numbers.update(dropped=float(to.dropped), held_back=float(to.held_back))
        add_counts(self.name, vector(asked if first else np.zeros_like(asked), **numbers))


def _entropy(p: Array, real: Array | None) -> float:
    """Sum over tokens of the entropy of their probabilities, in nats."""
    xp = array_module(p)
    terms = p * xp.log(xp.maximum(p, np.finfo(p.dtype).tiny))
    if real is not None:
        terms = terms * real[:, :, None]
    return -float(to_host(terms.sum(dtype=np.float64)))

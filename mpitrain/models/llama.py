"""Llama's architecture: root-mean-square norms, rotary positions, gated MLPs, grouped queries, no biases.

    x = table[tokens]
    x = x + proj(attention(turn(qkv(norm1(x)))))               for each block
    x = x + down(silu(gate(norm2(x))) * up(norm2(x)))
    loss = sum over targets of cross_entropy(head(norm(x)))

Positions stand in no table: queries and keys are turned by angles that grow with them, so that a score depends on how
far a key is away.  Everything else is as in every `Decoder`.

Source: Touvron et al. 2023, arXiv:2302.13971, section 2.2; rotary positions: Su et al. 2021, arXiv:2104.09864; gated
MLPs: Shazeer 2020, arXiv:2002.05202; norms: Zhang and Sennrich 2019, arXiv:1910.07467; groups: Ainslie et al. 2023,
arXiv:2305.13245.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.errors import ConfigError
from mpitrain.models.decoder import Decoder
from mpitrain.models.sizes import DecoderConfig
from mpitrain.models.transformer import Cuts
from mpitrain.nn import init as initial
from mpitrain.nn.module import Module
from mpitrain.nn.norm import RMSNorm
from mpitrain.nn.rotary import Rotary, Scaling
from mpitrain.parallel.sequence import enter
from mpitrain.parallel.tensor import ColumnLinear, RowLinear
from mpitrain.spec import Spec

UNITS = 64
"""Hidden units of an MLP are a multiple of so many, where none are asked for."""


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """The numbers that make a Llama.

    An MLP has 8/3 widths of hidden units where nothing is said, rounded up to a multiple of 64: with its three matrices
    it has about as many weights as one of two matrices and 4 widths.

    Attributes:
        rope_theta: base of the angles: pair i of a head's d elements turns by theta^(-2i/d) a position.
        rope_scaling: how the angles are stretched for longer sequences; None: not at all.
    """

    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None

    family: ClassVar[str] = "llama"
    has_biases: ClassVar[bool] = False
    is_gated: ClassVar[bool] = True
    is_rotary: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.routing is not None:
            raise ConfigError("LlamaConfig: experts are MLPs with a GELU and stand in the blocks of a GPT only.")
        if self.heads < 1 or self.width % (2 * self.heads):
            raise ConfigError(
                f"LlamaConfig: width {self.width} in {self.heads} heads: rotary positions turn pairs of elements, so"
                " each head needs an even number of them."
            )
        self.rotary()  # refuses angles that there are not

    @property
    def units(self) -> int:
        return -(-8 * self.width // (3 * UNITS)) * UNITS if self.hidden is None else self.hidden

    def norm(self, name: str, spec: Spec | None = None) -> RMSNorm:
        return RMSNorm(name, self.width, eps=self.eps, spec=spec)

    def mlp(self, name: str, block: int, cuts: Cuts) -> GatedMlp:
        return GatedMlp(name, self, cuts)

    def rotary(self) -> Rotary:
        return Rotary(self.head_width, self.seq_len, self.rope_theta, self.rope_scaling)


class Llama(Decoder):
    """A Llama on a mesh; see `Decoder`."""


class GatedMlp(Module):
    """Two matrices up, of which one gates the other, and one down; the hidden units cut over the tp axis.

    (b, s, width) -> (b, s, width).  Both matrices up share one entry into the tensor-parallel region.
    """

    def __init__(self, name: str, config: LlamaConfig, cuts: Cuts) -> None:
        super().__init__(name)
        self.axis, self.sequence_parallel = cuts.mesh.tp, cuts.sequence_parallel
        sizes = config.width, config.units, cuts.mesh.tp
        self.gate = ColumnLinear(f"{name}.gate", *sizes, bias=False, enters=False)
        self.up = ColumnLinear(f"{name}.up", *sizes, bias=False, enters=False)
        self.down = RowLinear(
            f"{name}.down",
            config.units,
            config.width,
            cuts.mesh.tp,
            bias=False,
            init=initial.residual(config.layers),
            sequence_parallel=cuts.sequence_parallel,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.axis, self.sequence_parallel)
        return self.down(ops.swiglu(self.gate(x), self.up(x)))

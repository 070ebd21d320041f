"""GPT-2's architecture: layer norms, learned positions, MLPs with a GELU, biases everywhere.

    x = table[tokens] + positions
    x = x + drop(proj(attention(qkv(norm1(x)))))      for each block
    x = x + drop(down(gelu(up(norm2(x)))))
    loss = sum over targets of cross_entropy(head(norm(x)))

Learned positions start as sinusoids of the same root mean square as the token table, so that both are heard.  Blocks
may have a mixture of experts in the place of their MLPs.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3; Vaswani et al. 2017,
arXiv:1706.03762, section 3.5 (sinusoids).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpitrain import collectives
from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.comm.communicator import Communicator
from mpitrain.models.decoder import Decoder
from mpitrain.models.sizes import DecoderConfig
from mpitrain.models.transformer import Cuts
from mpitrain.nn import init as initial
from mpitrain.nn.layers import Gelu, LayerNorm
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel.expert import Moe
from mpitrain.parallel.sequence import between
from mpitrain.parallel.tensor import ColumnLinear, RowLinear
from mpitrain.spec import Spec


@dataclass(frozen=True)
class GPTConfig(DecoderConfig):
    """The numbers that make a GPT.

    Attributes:
        gelu: of the MLPs: `tanh`, GPT-2's approximation, or `erf`, exact.
    """

    gelu: str = "tanh"

    family: ClassVar[str] = "gpt"

    def norm(self, name: str, spec: Spec | None = None) -> LayerNorm:
        return LayerNorm(name, self.width, eps=self.eps, spec=spec)

    def mlp(self, name: str, block: int, cuts: Cuts) -> Module:
        if self.routing is None or not self.has_experts(block):
            return Mlp(name, self, cuts)
        return Moe(
            name,
            self.routing,
            self.width,
            self.units,
            cuts.mesh,
            sequence_parallel=cuts.sequence_parallel,
            gelu=self.gelu,
            layers=self.layers,
            overlap=cuts.expert_overlap,
        )

    def positions(self, name: str, tp: Communicator, scale: float, sequence_parallel: bool) -> Positions:
        return Positions(name, self.seq_len, self.width, tp, scale, sequence_parallel)


class GPT(Decoder):
    """A GPT on a mesh; see `Decoder`."""


class Mlp(Module):
    """Two layers with a GELU between, the hidden units cut over the tp axis.

    (b, s, width) -> (b, s, width), without the last bias, which the block adds.
    """

    def __init__(self, name: str, config: GPTConfig, cuts: Cuts) -> None:
        super().__init__(name)
        width, units, tp = config.width, config.units, cuts.mesh.tp
        self.up = ColumnLinear(f"{name}.up", width, units, tp, sequence_parallel=cuts.sequence_parallel)
        self.gelu = Gelu(config.gelu)
        self.down = RowLinear(
            f"{name}.down",
            units,
            width,
            tp,
            init=initial.residual(config.layers),
            sequence_parallel=cuts.sequence_parallel,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gelu(self.up(x, add_bias=False), self.up.bias), add_bias=False)


class Positions(Module):
    """Learned positions: a vector for each place of a sequence.

    Args:
        name: of the part.
        seq_len, width: places, and elements of each vector.
        tp: the tensor-parallel axis.
        scale: root mean square of the initial values.
        sequence_parallel: each rank of tp uses those of its slice of the stream.
    """

    def __init__(
        self, name: str, seq_len: int, width: int, tp: Communicator, scale: float, sequence_parallel: bool
    ) -> None:
        super().__init__(name)
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.weight = Parameter(
            f"{name}.weight",
            (seq_len, width),
            between(sequence_parallel),
            init=initial.sinusoids(scale),
            decay=True,
        )

    def forward(self, x: Tensor, length: int, mine: slice, positions: Array | None) -> Tensor:
        """Add them to the stream.

        Args:
            x: (b, s, width) this rank's slice of the stream.
            length: of the sequence here.
            mine: this rank's slice of it.
            positions: places of its tokens, (s,) or (b, s), where they are not those from the first on.
        """
        rows: Tensor = self.weight
        if positions is not None:
            rows = ops.take(rows, positions)
        elif length < self.weight.full_shape[0]:
            rows = rows[:length]
        if self.sequence_parallel:
            rows = collectives.pick(rows, self.tp, rows.ndim - 2, mine.start, mine.stop)
        return x + rows

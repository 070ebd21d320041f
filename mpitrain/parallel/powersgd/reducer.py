"""The reducer: when steps are compressed, and when what they leave out begins to count."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from mpitrain.backend import Array
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ConfigError
from mpitrain.nn.parameter import Flat, Parameter
from mpitrain.optim.optimizer import StateTensor
from mpitrain.parallel.data import FlatReducer, Reducer, settle
from mpitrain.parallel.powersgd.matrices import TABLES, WORTH, Choice
from mpitrain.parallel.powersgd.state import ERROR, Memory, Q, is_in
from mpitrain.parallel.powersgd.sums import Sums


class PowerSgd(Reducer):
    """Gradients of matrices as two thin factors, with what they leave out added to the next gradient.

    A step that is skipped, because gradients of halves overflowed, changes nothing here: what it would have left out
    is kept apart until the update was made.  Errors are of gradients without their scale, which may change from step to
    step.

    Args:
        flats: the model's flat buffers.
        mesh: where the axes to sum over come from.
        rank: r, columns of a factor; of a smaller matrix as many as its shorter side has.
        start: updates for which gradients are summed exactly, since early ones change direction most; then e = 0.
        warm_start: each step begins with the Q of the one before; else with the random Q of the start, as DALL-E does.
        feedback: what is left out is kept and added to the next gradient.  Without it training is harmed: for
            comparison.
        exact: patterns of names of parameters that are not compressed, besides vectors and small matrices.
        worth: a matrix of n x m is compressed where n m > worth r (n + m).
        seed: of the first Q, which is the same on every rank that holds the same slab.

    Attributes:
        updates: made so far, exact ones included.

    Raises:
        ConfigError: a rank below 1, or a start below 0.

    Cost: of a matrix r (n + m) numbers are sent in the place of n m, in two messages one after the other; 4 n m r
        multiplications and 2 r passes over the gradient.  Memory: twice the gradients of what is compressed, the error
        and what is to be the next one.
    Source: Vogels et al. 2019, arXiv:1905.13727.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        mesh: Mesh,
        rank: int = 4,
        *,
        start: int = 0,
        warm_start: bool = True,
        feedback: bool = True,
        exact: Sequence[str] = TABLES,
        worth: float = WORTH,
        seed: int = 0,
    ) -> None:
        if rank < 1 or start < 0:
            raise ConfigError(f"PowerSGD: rank {rank} must be 1 or more, start {start} (in updates) 0 or more.")
        self.updates = 0
        self._start = start
        self._warm = warm_start
        self._exactly = FlatReducer(flats, mesh)
        of_axes: dict[tuple[str, ...], list[Flat]] = {}
        for flat in flats:
            of_axes.setdefault(flat.axes, []).append(flat)
        self._of_one_rank = [p for flat in of_axes.pop((), []) for p in flat.parameters]  # nobody else adds to them
        choice = Choice(rank, tuple(exact), worth)
        self._sums = [
            Sums(members, mesh.merged(axes), mesh.ends, choice, mesh.sizes, feedback, seed)
            for axes, members in of_axes.items()
        ]
        self._compressed = [c for sums in self._sums for c in sums.compressed]
        others = [p.name for sums in self._sums for p in sums.exact]
        self._memory = Memory(self._compressed, others, mesh, warm_start)
        self.made_of = {
            "rank": rank,
            "start": start,
            "warm_start": int(warm_start),
            "feedback": int(feedback),
            "seed": seed,
            "checksum of exact and worth": zlib.crc32(repr((sorted(exact), worth)).encode()),
        }
        self._waits = False  # what a step left out, for its update
        self._begun = False  # something was compressed, here or in the run before

    @property
    def compressed(self) -> tuple[Parameter, ...]:
        """The parameters of this rank that are compressed."""
        return tuple(c.parameter for c in self._compressed)

    @property
    def pending_gradients(self) -> list[Array]:
        """What is kept between steps, and the buffers of the messages."""
        return [array for sums in self._sums for array in sums.arrays]

    def finish(self) -> None:
        self._waits = self.updates >= self._start
        self.over_ends = [c.parameter for sums in self._sums for c in sums.tied] if self._waits else ()
        if not self._waits:
            self._exactly.finish()
            return
        settle(self._of_one_rank)
        for sums in self._sums:
            sums.run(self._inverse)

    def updated(self) -> None:
        self.updates += 1
        if self._waits:
            for c in self._compressed:
                c.keep(self._warm)
            self._begun = True
        self._waits = False

    def _inverse(self, p: Parameter) -> float:
        return 1.0 if self.scaler is None else self.scaler.inverse(self.scaler.group(p))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, dict[str, StateTensor]]:
        """Nothing before the first compressed step."""
        return self._memory.tensors() if self._begun else {Q: {}, ERROR: {}}

    def state_to_fill(self, saved: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, StateTensor]]:
        self._begun = is_in(saved)
        return self._memory.to_fill(saved)

    def resumed(self, updates: int) -> str:
        self.updates = updates
        self._waits = False
        return self._memory.filled(updates > self._start)

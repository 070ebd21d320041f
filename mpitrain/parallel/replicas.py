"""Do the replicas agree?  Ranks that share a parameter must hold the same bits of it, at the start and ever after.

Ranks build their initial weights themselves from the same numbers; another NumPy, another processor or a broken memory
would let them drift apart without an error.  So they agree on how to compute, and compare checksums of what they hold,
at the start and every hundred steps or so, and in the first steps digests of the batches that their script gives them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import platform
import warnings
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from mpitrain import kernels
from mpitrain.backend import Array, to_host
from mpitrain.blas import NUMPY_WAS_LOADED, library
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.tokens import Batch
from mpitrain.errors import ConfigError, DataError, ReplicaError, StateError
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.nn.share import Share
from mpitrain.optim.optimizer import Optimizer, StateTensor
from mpitrain.parallel.data import Reducer
from mpitrain.parallel.differences import Held, difference

_DOCTOR = "`mpitrain doctor` on each tells."


def agree_on_arithmetic(world: World) -> None:
    """Use the same kernels on all ranks: the highest level that every one of them has.  Collective over the world.

    Products of matrices are the BLAS library's: where processors differ and it chose other code for them, the ranks'
    results differ in the last digits.

    Raises:
        ConfigError: MPITRAIN_KERNELS names a level that a rank does not have; on every rank.
        StateError: in deterministic mode, the ranks' BLAS libraries compute differently.

    Cost: two small messages, and where processors differ one more.
    """
    mine, mistake = kernels.levels()[-1], None
    try:
        mine = kernels.wanted()
    except ConfigError as error:
        mistake = error
    world.agree(mistake)
    found = world.exchange([mine, _processor()])
    kernels.use(kernels.common(level for level, _ in found))
    if len({processor for _, processor in found}) == 1:
        return
    libraries = world.exchange(library())
    odd = next((rank for rank, library in enumerate(libraries) if library != libraries[0]), None)
    if odd is None:
        return
    text = (
        f"The BLAS of rank {odd} ({libraries[odd]}) computes products of matrices otherwise than that of rank 0 "
        f"({libraries[0]}): replicas differ in the last digits.\n"
        "Way out: the same NumPy on all hosts, and one OPENBLAS_CORETYPE that all processors know, such as Haswell."
    )
    if world.deterministic:
        raise StateError(text)
    if world.rank == 0:
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _processor() -> str:
    """What decides which code a BLAS takes, cheap to find: model and flags of the processor, and what was asked for."""
    words = [platform.machine(), np.__version__, os.environ.get("OPENBLAS_CORETYPE", ""), str(NUMPY_WAS_LOADED)]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        words += [line for line in itertools.islice(lines, 30) if line.startswith(("model name", "flags", "Features"))]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def check_replicas(parameters: Iterable[Parameter], mesh: Mesh, when: str) -> None:
    """Compare weights that ranks hold alike: those Replicate or Invariant on an axis, and those of two tied stages.

    Collective over the world.

    Args:
        parameters: this rank's, and its shares of them.
        mesh: the layout.
        when: for the message: "at the start", "after step 100".

    Raises:
        StateError: naming the first tensor that differs and the ranks, on every rank.

    Cost: one CRC-32 over the weights, one small message.
    """
    trouble = difference(_weights(parameters, ()), mesh, when)
    if trouble is not None:
        raise StateError(f"{trouble}\nDo all hosts have the same processor type and the same NumPy?  {_DOCTOR}")


class ReplicaCheck:
    """Compares weights, masters, moments and buffers of replicas every so many steps, and before they are saved.

    What ZeRO deals out is nobody's replica: then whole weights are compared, in stages 1 and 2, and of the rest what
    ranks of other axes hold alike, such as moments of norms along tp.  Workers that learn apart are compared where they
    have met; their moments, and gradients on their way, are their own.

    Args:
        model: whose parameters are meant.
        optimizer: whose state.
        reducer: knows the axes along which workers learn apart.
        mesh: the layout.
        every: steps from check to check; 0: never.

    Cost: one CRC-32 over all that is compared, 12 bytes a float32 weight with AdamW, and one small message.
    """

    def __init__(self, model: Module, optimizer: Optimizer, reducer: Reducer, mesh: Mesh, every: int) -> None:
        self.every = every if mesh.world.size > 1 else 0
        self._model, self._optimizer, self._reducer, self._mesh = model, optimizer, reducer, mesh

    def __call__(self, step: int, steps: int = 1, *, saves: bool = False) -> bool:
        """Check if it is time; collective over the world.

        Args:
            step: that was made last.
            steps: made since the last call: where they overlap nothing can be compared in between.
            saves: whether the state is about to be saved, which is a reason to check, too.

        Returns:
            Whether there was a check.

        Raises:
            ReplicaError: naming the first tensor that differs and the ranks, on every rank.
        """
        if not self.every or not (saves or step % self.every < steps):
            return False
        reducer, model = self._reducer, self._model
        weights = _weights([*model.parameters(), *model.kept()], () if reducer.at_rest else reducer.apart)
        moments = _moments(self._optimizer.state_tensors(), reducer.apart)
        kept = [Held(buffer.name, buffer.spec.shared_axes(), False, buffer.array) for buffer in model.buffers()]
        trouble = difference([*weights, *moments, *kept], self._mesh, f"after step {step}")
        if trouble is not None:
            raise ReplicaError(
                f"{trouble}\n"
                "A bit may have flipped in the memory of a host, or the script changes weights on some ranks only.\n"
                f"Hosts with other processors or libraries may drift apart, too: {_DOCTOR}\n"
                "Checkpoints were compared before they were saved: --resume latest goes on from the newest one."
            )
        return True


def _weights(parameters: Iterable[Parameter], apart: Collection[str]) -> list[Held]:
    """The arrays of weights and of masters, each once; not those that come and go."""
    found = []
    for p in dict.fromkeys(parameters):
        axes = tuple(axis for axis in p.spec.shared_axes() if axis not in apart)
        is_part = isinstance(p, Share) and not p.whole.visits  # of a whole weight, which is among the parameters
        if not p.visits and not is_part:
            found.append(Held(p.name, axes, p.spec.tied, p.data))
        if not p.visits and not p.frozen and p.master is not p.data:
            found.append(Held(f"the master of {p.name}", axes, p.spec.tied, p.master))
    return found


def _moments(states: Mapping[str, Mapping[str, StateTensor]], apart: Collection[str]) -> list[Held]:
    """The arrays of an optimizer's state."""
    return [
        Held(f"{kind} of {name}", tuple(a for a in t.spec.shared_axes() if a not in apart), t.spec.tied, t.array)
        for kind, of in states.items()
        for name, t in of.items()
    ]


SAME_ON_CP = ("places", "documents", "lengths", "step", "epoch", "training")
SAME_ON_TP = (*SAME_ON_CP, "positions", "inputs", "targets")
"""Fields of a batch that ranks of these axes must be given alike."""


def check_batch(batch: Batch, mesh: Mesh) -> None:
    """Compare what ranks were given that work on the same rows: those of tp, cp and pp.  Collective over the world.

    A script that divides its rows over all ranks, as is right for data parallelism alone, would train on nonsense.

    Raises:
        DataError: naming the field and the ranks, on every rank.

    Cost: one SHA-256 over the batch and one small message; nothing where tp, cp and pp have one rank.
    """
    tp, cp, pp = mesh.tp.size, mesh.cp.size, mesh.pp.size
    if tp * cp * pp == 1:
        return
    values = {name: getattr(batch, name) for name in SAME_ON_TP}
    mine = {name: _digest([x])[:16] + str(x.shape) if hasattr(x, "shape") else str(x) for name, x in values.items()}
    found = mesh.world.exchange(mine)
    stage = mesh.world.size // pp  # pp is the slowest axis, cp and tp are the fastest: their ranks are neighbours
    for rank, told in enumerate(found):
        for axis, first, names in (
            ("tp", rank // tp * tp, SAME_ON_TP),
            ("cp", rank // (tp * cp) * tp * cp, SAME_ON_CP),
            ("pp", rank % stage, SAME_ON_TP),
        ):
            odd = [name for name in names if told[name] != found[first][name]]
            if odd:
                raise DataError(
                    f"rank {rank} was given another batch than rank {first} ({', '.join(odd)} differ), but the ranks"
                    f" of axis {axis} work on the same rows.\n"
                    "Rows are divided over the data axis alone: batches(batch, mesh.dp.rank, mesh.dp.size, ...)."
                )


def other_number(batches: int, axis: Communicator, why: str) -> DataError | None:
    """What is wrong if ranks that work together on every pass come to another number of batches.

    Collective over the axis: of ranks that hold experts for each other's tokens, or rows of each other's weights.

    Args:
        batches: that this rank was given up to now.
        axis: of these ranks.
        why: they work together: `hold experts for each other`.

    Returns:
        The error, the same on the ranks of the axis, which have not begun the pass; others know nothing of it yet.

    Cost: one small message; nothing where the axis has one rank.
    """
    found = axis.exchange(batches)
    fewest, most = (found.index(number) for number in (min(found), max(found)))
    if fewest == most:
        return None
    return DataError(
        f"rank {axis.ranks[fewest]} ran out of batches, after {found[fewest]}, while rank {axis.ranks[most]} has"
        f" more: ranks of axis {axis.name} {why}, and all take part in every pass.\n"
        "Give each as many, filled up with batches of padding (targets -100), as Tokens.validation does."
    )


def _digest(arrays: Iterable[Array]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(to_host(array)).view(np.uint8))
    return digest.hexdigest()

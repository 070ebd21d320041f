"""Do the replicas agree?  Ranks that share a parameter must hold the same bits of it, at the start and ever after.

Ranks build their initial weights themselves from the same numbers; another NumPy, another processor or a broken memory
would let them drift apart without an error.  So they agree on how to compute, and compare digests of what they hold
and, in the first steps, of the batches that their script gives them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import platform
import warnings
from collections.abc import Iterable, Sequence

import numpy as np

from mpitrain import kernels
from mpitrain.backend import Array, to_host
from mpitrain.blas import NUMPY_WAS_LOADED, library
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.tokens import Batch
from mpitrain.errors import ConfigError, DataError, StateError
from mpitrain.nn.parameter import Parameter


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


def check_replicas(parameters: Sequence[Parameter], mesh: Mesh, when: str) -> None:
    """Compare weights that ranks hold alike: those Replicate or Invariant on an axis, and those of two tied stages.

    Collective over the world.

    Args:
        parameters: this rank's.
        mesh: the layout.
        when: for the message: "at the start", "after step 100".

    Raises:
        StateError: naming the first parameter that differs and the ranks, on every rank that shares it.

    Cost: one SHA-256 over the weights, one small message for each set of axes.
    """
    groups: dict[tuple[str, ...], list[Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.spec.shared_axes(), []).append(p)
    for axes, members in groups.items():
        _compare(members, mesh.merged(axes), when)
    tied = [p for p in parameters if p.spec.tied]
    if tied:
        _compare(tied, mesh.ends, when)


def _compare(members: Sequence[Parameter], axis: Communicator, when: str) -> None:
    """Compare what the ranks of an axis hold of these parameters."""
    if len(set(axis.exchange(_digest(p.master for p in members)))) == 1:
        return
    for p in members:
        found = axis.exchange(_digest([p.master]))
        odd = [rank for rank, digest in zip(axis.ranks, found, strict=True) if digest != found[0]]
        if odd:
            raise StateError(
                f"{p.name} differs between ranks that share it, {when}: rank {odd[0]} against rank"
                f" {axis.ranks[0]} ({len(odd)} of {axis.size} differ).\n"
                "Do all hosts have the same processor type and the same NumPy?  `mpitrain doctor` on each tells."
            )


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

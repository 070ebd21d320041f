"""Messages between the stages of a pipeline: activations go to the next stage, their gradients come back.

    stage q  --F: what its forward made-->  stage q + 1
    stage q  <--B: the gradient of that--   stage q + 1

Sends never block: two neighbours that both send first, as they do all the time in 1F1B, would wait for each other for
ever with blocking ones, and small messages would hide it (ALGORITHMS: MPI buffers those).  A message keeps its array
until it has arrived.  Receives are posted before they are needed, so that on a network data moves while the rank still
computes.

Every message has a tag of its own, made of direction, stage and micro-batch; a long row uses tags again, in the same
order on both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.comm.communicator import Communicator, Request
from mpitrain.errors import ShapeError
from mpitrain.nn.module import Boundary, Module
from mpitrain.pipeline.partition import Partition

TAGS = 15_998  # those below the door's own, an even number


def stages_here(partition: Partition, blocks: int, axis: Communicator) -> tuple[int, ...]:
    """The stages that this rank holds, ascending: stage q is on rank q mod n of an axis of n.

    Args:
        partition: blocks of each stage.
        blocks: of the model.
        axis: the pp axis.

    Raises:
        ShapeError: it is a partition of another number of blocks, or the stages do not divide.
    """
    partition.check_fits(blocks, partition.stages)
    if partition.stages % axis.size:
        raise ShapeError(f"{partition.stages} stages are not divisible by axis pp of size {axis.size}.")
    return tuple(range(axis.rank, partition.stages, axis.size))


def check_whole(model: Module) -> None:
    """Refuse to run a model as a whole on a rank that holds only some of its stages.

    Raises:
        ShapeError: others are elsewhere.
    """
    if len(model.stages) < model.num_stages:
        raise ShapeError(
            f"this rank of axis pp holds the stages {' '.join(map(str, model.stages)) or 'none'} of"
            f" {model.num_stages}, the others are elsewhere.\n"
            "An Executor runs all of them: executor.step(batch), executor.evaluate(batches)."
        )


class Links:
    """The messages of one rank with those that hold the neighbouring stages.

    Args:
        axis: the pp axis.
        placement: the rank of each stage on it.

    Attributes:
        unsent: bytes of sends that were not yet known to be complete when it was last looked.
    """

    def __init__(self, axis: Communicator, placement: Sequence[int]) -> None:
        self._axis = axis
        self._rank_of = tuple(placement)
        self._sends: deque[tuple[Request, int]] = deque()

    @property
    def unsent(self) -> int:
        """Bytes of arrays that are still on their way from here."""
        self.reap()
        return sum(nbytes for _, nbytes in self._sends)

    def is_here(self, stage: int) -> bool:
        """Whether this rank holds a stage."""
        return 0 <= stage < len(self._rank_of) and self._rank_of[stage] == self._axis.rank

    def send(self, kind: str, stage: int, unit: int, arrays: Sequence[Array]) -> None:
        """Send what `stage` made: to the next stage (F), or to the one before (B).  Returns at once.

        Args:
            kind: "F" or "B".
            stage: the sender.
            unit: number of the micro-batch, or of its slice.
            arrays: they belong to the message until it is complete, and are kept alive so long.
        """
        peer = self._rank_of[stage + 1 if kind == "F" else stage - 1]
        for array in arrays:
            request = self._axis.isend(array, peer, self._tag(kind, stage, unit))
            self._sends.append((request, array.nbytes))
        self.reap()

    def expect(self, kind: str, stage: int, unit: int, boundaries: Sequence[Boundary], like: Array) -> list[Request]:
        """Post the receives of what comes to `stage`: from the one before (F), or from the next (B).

        Args:
            boundaries: of the tensors that come.
            like: an array where they shall lie.
        """
        source = stage - 1 if kind == "F" else stage + 1
        tag, peer = self._tag(kind, source, unit), self._rank_of[source]
        return [self._axis.irecv(b.shape, b.dtype, peer, tag, like=like) for b in boundaries]

    def reap(self) -> None:
        """Forget the sends that are complete; asking also moves the others on."""
        while self._sends and self._sends[0][0].test():
            self._sends.popleft()

    def finish(self) -> None:
        """Wait for all sends."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def _tag(self, kind: str, sender: int, unit: int) -> int:
        return 2 * ((unit * len(self._rank_of) + sender) % (TAGS // 2)) + (kind == "B")


def pass_through(
    links: Links,
    stages: Sequence[int],
    last: int,
    unit: int,
    run: Callable[..., Sequence[Tensor]],
    boundary: Callable[[int], Sequence[Boundary]],
    before: dict[int, Sequence[Tensor]],
    like: Array,
) -> None:
    """One stage after the other forward without a tape: what this rank holds of them.

    Args:
        links: the messages.
        stages: that run now, ascending.
        last: number of the last stage.
        unit: number of the batch.
        run: (stage, *inputs) -> outputs.
        boundary: what comes into a stage.
        before: stage -> what it made, where it is still wanted here; those of the last stage stay in it.
        like: an array where the model's are: there goes what arrives.
    """
    for stage in stages:
        if stage == 0:
            inputs: Sequence[Any] = ()
        elif links.is_here(stage - 1):
            inputs = before.pop(stage - 1)
        else:
            arrives = links.expect("F", stage, unit, boundary(stage), like)
            inputs = [Tensor(request.wait()) for request in arrives]
        outputs = run(stage, *inputs)
        if stage == last or links.is_here(stage + 1):
            before[stage] = outputs
        else:
            links.send("F", stage, unit, [t.data for t in outputs])

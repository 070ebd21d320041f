"""Data parallelism: one rule, and ways to carry it out.

The rule: where a parameter is Replicate on an axis, its gradient is Partial there, so it is *summed over the merge of
all axes where the parameter is Replicate*.  Nothing else happens to a gradient anywhere.  Which axes those are stands
in the parameter's spec, and parameters with the same axes lie in one flat buffer (`nn.parameter.Flat`).  A parameter
that the two end stages of a pipeline share needs a second step, once a step of training: `sum_over_ends`.

All reductions are sums, and gradients of halves travel as halves (`as_sent`).  The mean is taken once, in the seed of
backward, which is one over the number of targets of the whole step on all ranks.

    FlatReducer       waits for the last backward, then one all-reduce a flat buffer
    BucketedReducer   starts the all-reduce of a slice as soon as the gradients in it are final, while backward goes on

In deterministic mode the two give the same bits, since each element is added up in rank order either way.

Source: Goyal et al. 2017, arXiv:1706.02677 (synchronous sum); Li et al. 2020, arXiv:2006.15704, section 3.2 (buckets).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType

from mpitrain import kernels
from mpitrain.backend import Array, is_half
from mpitrain.comm.communicator import Communicator, Request
from mpitrain.comm.mesh import Mesh
from mpitrain.nn.parameter import Flat, Parameter
from mpitrain.optim.optimizer import StateTensor
from mpitrain.optim.scaler import Scaler


class Reducer:
    """How gradients leave a rank: each parameter is announced when its gradient is final, then the step is finished.

    Attributes:
        every_walk: whether gradients leave in each walk back, and `add` is told what is final in every one of them;
            else in the last walk of a step only.
        scaler: of the gradients, given by the executor: who keeps gradients from one step to another takes their scale
            off, which changes.
        local: whether only the ranks of a worker sum their gradients (`mpitrain.parallel.workers`): these are then
            means over the worker's own targets, each worker clips by its own norm, and weights may part.
        made_of: the numbers that say what the reducer does, which all ranks must be given alike.
        over_ends: tied parameters whose gradients `finish` has also summed over the two ends of the pipeline.
        apart: axes along which weights may differ between updates, though their parameters are the same there.
        another_run: why a layout is not the same training run with it; "" where it is.
        at_rest: whether `join` would change nothing just now.
    """

    every_walk: bool = False
    scaler: Scaler | None = None
    local: bool = False
    made_of: Mapping[str, int] = MappingProxyType({})
    over_ends: Collection[Parameter] = ()
    apart: tuple[str, ...] = ()
    another_run: str = ""
    at_rest: bool = True

    def counted(self, targets: int, of_all: int) -> None:
        """So many targets has this step on this worker, and on all; told before its gradients."""

    def begin(self) -> None:
        """A step begins; an error may have ended the one before in the middle, on all ranks alike."""

    def add(self, parameter: Parameter) -> None:
        """The gradient of `parameter` is final for this step, or for this walk."""

    def walked(self, stage: int) -> None:
        """A walk back through a stage is over, of a reducer of every walk."""

    def finish(self) -> None:
        """Every gradient is the sum over the ranks that share its parameter when this returns.

        Parameters that were never added take part too, with zeros where this rank did not use them: which messages are
        sent never depends on data.
        """

    def arrive(self) -> bool:
        """Gradients are measured, unscaled and clipped: put in their place what the update is to apply.

        Not called in a step that is skipped.

        Returns:
            Whether there is anything to apply; else no update is made.  The same on every rank.
        """
        return True

    @property
    def pending_gradients(self) -> Sequence[Array]:
        """Those of earlier steps that are on their way to the weights, for whoever counts memory."""
        return ()

    def whole(self) -> AbstractContextManager[None]:
        """A block in which the weights are the model's, for whoever looks at it.  Collective over the world."""
        return contextlib.nullcontext()

    def join(self) -> None:
        """Make the weights the model's for good, for whoever saves it.  Collective over the world."""

    def updated(self) -> None:
        """The optimizer has made an update: what of it concerns other ranks is sent.  Skipped steps make none."""

    def state_tensors(self) -> dict[str, dict[str, StateTensor]]:
        """What is kept between steps, for a checkpoint: kind -> parameter's name -> tensor; views."""
        return {}

    def state_to_fill(self, saved: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, StateTensor]]:
        """What of it is read from a checkpoint, and where to.

        Args:
            saved: KIND/NAME -> full shape, of all tensors in it.
        """
        return {}

    def resumed(self, updates: int) -> str:
        """The checkpoint was read; so many updates were made before.

        Returns:
            What of the state could not go on as it was, for people; "" for nothing.
        """
        return ""


class FlatReducer(Reducer):
    """One all-reduce for each flat buffer, after the last backward.

    Cost: wire bytes a rank 2 (n-1)/n x bytes of the gradients (ALGORITHMS: an all-reduce), whatever the number of
    micro-batches.
    """

    def __init__(self, flats: Sequence[Flat], mesh: Mesh) -> None:
        self._work = [(flat, mesh.merged(flat.axes)) for flat in flats]

    def add(self, parameter: Parameter) -> None:
        """Nothing can be sent before the whole buffer is final."""

    def finish(self) -> None:
        for flat, axis in self._work:
            settle(flat.parameters)
            if flat.axes:
                axis.all_reduce(as_sent(flat.grads, flat.weights, axis), out=flat.grads)


class BucketedReducer(Reducer):
    """All-reduces of slices, started while backward still computes the gradients of earlier layers.

    Buckets are cut from the end of each flat buffer, because backward finishes the last layer first.  They are started
    in the order in which it finishes them, whichever buffer they are of: experts, which are summed over fewer ranks,
    leave between the layers beside them.  That order is fixed here and the same on all ranks, also where data decides
    which weights are used: a bucket that happens to be ready early waits for those before it.

    Args:
        flats: the model's flat buffers.
        mesh: where the axes to sum over come from.
        bucket_bytes: a bucket is closed when it holds at least this many bytes.
    """

    def __init__(self, flats: Sequence[Flat], mesh: Mesh, bucket_bytes: int = 1 << 20) -> None:
        made: list[tuple[int, _Bucket]] = []  # place of its first parameter, which backward finishes last
        for flat in flats:
            if not flat.axes:
                continue
            axis = mesh.merged(flat.axes)
            for first, last in _cut_from_the_end(flat, bucket_bytes):
                made.append((flat.places[first], _Bucket(flat, first, last, axis)))
        self._buckets = [bucket for _, bucket in sorted(made, key=lambda one: one[0], reverse=True)]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._local = [p for flat in flats if not flat.axes for p in flat.parameters]
        self._started = 0

    def begin(self) -> None:
        for bucket in self._buckets:
            if bucket.request is not None:
                bucket.wait()
            bucket.missing = set(bucket.parameters)
        self._started = 0

    def add(self, parameter: Parameter) -> None:
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            return
        bucket.missing.discard(parameter)
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._start_next()

    def finish(self) -> None:
        settle(self._local)
        while self._started < len(self._buckets):
            self._start_next()
        for bucket in self._buckets:
            bucket.wait()
        self._started = 0

    def _start_next(self) -> None:
        self._buckets[self._started].start()
        self._started += 1


class _Bucket:
    """A slice of a flat buffer that is reduced by one message."""

    def __init__(self, flat: Flat, first: int, last: int, axis: Communicator) -> None:
        self.parameters = flat.parameters[first:last]
        part = slice(flat.offsets[first], flat.offsets[last])
        self.grads, self.weights = flat.grads[part], flat.weights[part]
        self.axis = axis
        self.missing = set(self.parameters)
        self.request: Request | None = None

    def start(self) -> None:
        settle(self.parameters)
        self.request = self.axis.iall_reduce(as_sent(self.grads, self.weights, self.axis), out=self.grads)

    def wait(self) -> None:
        assert self.request is not None
        self.request.wait()
        self.request = None
        self.missing = set(self.parameters)


def sum_over_ends(parameters: Iterable[Parameter], mesh: Mesh, done: Collection[Parameter] = ()) -> None:
    """The rule's second step: a parameter that the first and the last stage both use has a gradient on each.

    Collective over `mesh.ends`, the two stages; after the sum over the other axes, of which it is independent.  Those
    that are `done` are left out.

    Cost: each of the two sends the bytes of the gradient, once a step.
    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (tied embeddings of a pipeline).
    """
    for p in parameters:
        if p.spec.tied and p not in done:
            p.settle()
            mesh.ends.all_reduce(as_sent(p.grad, p.data, mesh.ends), out=p.grad)


def as_sent(grads: Array, weights: Array, axis: Communicator) -> Array:
    """Gradients in the dtype in which they travel: that of the weights.

    Those of halves are float32 and are sent as halves; the door adds them up in float32, and the sum stays float32.
    Over an axis of one rank nothing travels, and nothing is rounded.
    """
    return kernels.narrow(grads, weights.dtype) if axis.size > 1 and is_half(weights.dtype) else grads


def settle(parameters: Iterable[Parameter]) -> None:
    """Zeros for the gradients that this rank's step did not produce."""
    for p in parameters:
        p.settle()


def _cut_from_the_end(flat: Flat, bucket_bytes: int) -> list[tuple[int, int]]:
    """Ranges of parameters (first, last + 1), from the last to the first, each of at least `bucket_bytes`."""
    itemsize = flat.weights.dtype.itemsize
    ranges = []
    last = len(flat.parameters)
    for first in range(len(flat.parameters) - 1, -1, -1):
        if first == 0 or (flat.offsets[last] - flat.offsets[first]) * itemsize >= bucket_bytes:
            ranges.append((first, last))
            last = first
    return ranges

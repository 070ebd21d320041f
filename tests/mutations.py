"""Bugs that distributed training is known for, as patches applied at run time, each with a layout in which it shows.

    with mutation.patch(): train on the layout

A mutation is put on in the layout's run only, never in the one rank's that it is compared with: the oracle stays
right.  Each is one line's worth of damage, of the kind that passes small tests elsewhere.  All of them must be caught,
by `mpitrain verify` or by the check of states, and none may be inert: test_mutations.py sees to both.  Those of
pipelines are in mutations_pipeline.py, those of optimizers in mutations_optimizer.py, those of memory and scales in
mutations_memory.py, those of experts in mutations_experts.py, those of compression in mutations_powersgd.py, those of
ZeRO in mutations_zero.py, those of offload in mutations_offload.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np

from mpitrain import collectives, rng
from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm import communicator
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.world import world
from mpitrain.data import order
from mpitrain.data.tokens import Batch, Tokens
from mpitrain.models import decoder, gpt, transformer
from mpitrain.models.gpt import Positions
from mpitrain.nn import layers
from mpitrain.parallel import context, data, grouped, sequence, tensor, vocabulary
from mpitrain.parallel.context import ring
from mpitrain.pipeline import executor, update
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.update import Update
from mpitrain.rng import Draw
from mpitrain.spec import Spec, cut

MUTATIONS: list[Mutation] = []


@dataclass(frozen=True)
class Mutation:
    """One bug.

    Attributes:
        name: what was done, in words.
        layout: where it shows, as `mpitrain verify --layout` takes it.
        patch: makes the context in which the library has it.
        case: the row of the catalogue of known failures that it is, or the statement it breaks.
        seen: whether the check of states sees it too, not only the comparison with one rank.
        by: who must find it: "verify", or "evaluation" if no step of training is touched.
        options: settings of the trainer that it needs.
    """

    name: str
    layout: str
    patch: Callable[[], AbstractContextManager[Any]]
    case: str = ""
    seen: bool = False
    by: str = "verify"
    options: dict[str, Any] = field(default_factory=dict)


def bug(
    name: str, layout: str, case: str = "", *, seen: bool = False, by: str = "verify", **options: Any
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Any]]:
    """Register a generator function as the patch of a mutation."""

    def register(patch: Callable[[], Iterator[None]]) -> Callable[[], Any]:
        MUTATIONS.append(Mutation(name, layout, contextlib.contextmanager(patch), case, seen, by, options))
        return patch

    return register


def put(target: Any, name: str, value: Any) -> Any:
    """Replace an attribute; on a class, plain functions become static methods where the old ones were."""
    if isinstance(target, type) and isinstance(target.__dict__.get(name), staticmethod):
        value = staticmethod(value)
    return mock.patch.object(target, name, value)


def clipped_by_own_norm() -> Any:
    """Every rank clips by the norm of what it counts; what is told is right."""
    rescale = Update._rescale

    def own(self: Update, inverses: Sequence[float], clipped: float) -> None:
        mine = float(np.sqrt(self._measure(inverses)[1]))
        rescale(self, inverses, update.coefficient(mine, self._clip or None))

    return put(Update, "_rescale", own)


# ------------------------------------------------------------------------------------------------------------- tensor


@bug("the bias of a row-parallel layer is added before the sum", "tp2", "C32, T11.6", seen=True)
def _() -> Iterator[None]:
    def forward(self: Any, x: Tensor, add_bias: bool = True) -> Tensor:
        return sequence.leave(ops.linear(x, self.weight, self.bias), self.axis, self.sequence_parallel)

    def without_bias(self: Any, x: Tensor, y: Tensor, bias: Any, draw: Any = None) -> Tensor:
        return ops.residual(x, y, None, **self._dropout(draw))

    def then_without_bias(self: Any, norm: Any, x: Tensor, y: Tensor, bias: Any, draw: Any = None) -> Any:
        return ops.residual_norm(x, y, None, norm.weight, norm.bias, eps=norm.eps, **self._dropout(draw))

    with (
        put(tensor.RowLinear, "forward", forward),
        put(layers.Residual, "forward", without_bias),
        put(layers.Residual, "then", then_without_bias),
    ):
        # Biases start at zero; a wrong one must be seen by its gradient alone.
        yield


@bug("copy has no backward", "tp2", "T3.1", seen=True)
def _() -> Iterator[None]:
    with put(collectives.Copy, "backward", lambda grad, *, wanted, axis: (grad,)):
        yield


@bug("the backward of all_reduce is an all_reduce", "tp2", "T3.3")
def _() -> Iterator[None]:
    with put(collectives.AllReduce, "backward", lambda grad, *, wanted, axis: (axis.all_reduce(grad),)):
        yield


@bug("copy is left out before column-parallel layers", "tp2", seen=True)
def _() -> Iterator[None]:
    with put(tensor, "enter", lambda x, axis, sequence_parallel: x):
        yield


@bug("all_reduce is left out after row-parallel layers", "tp2", seen=True)
def _() -> Iterator[None]:
    with put(tensor, "leave", lambda y, axis, sequence_parallel: y):
        yield


@bug("the sum after row-parallel layers is taken twice", "tp2", seen=True)
def _() -> Iterator[None]:
    def leave(y: Tensor, axis: Communicator, sequence_parallel: bool) -> Tensor:
        return collectives.all_reduce(collectives.all_reduce(y, axis), axis)

    with put(tensor, "leave", leave):
        yield


@bug("the sum after row-parallel layers is a mean", "tp2")
def _() -> Iterator[None]:
    with put(collectives.AllReduce, "forward", lambda x, *, axis: (axis.all_reduce(x) / axis.size, ())):
        yield


@bug("queries, keys and values are cut as one block", "tp2", "T11.1", seen=True)
def _() -> Iterator[None]:
    whole = ops.attention

    def attention(qkv: Tensor, heads: int, *args: Any, **how: Any) -> Tensor:
        b, s, width = qkv.shape  # as if the columns were (q|k|v, head, d)
        by_head = qkv.reshape(b, s, 3, heads, width // (3 * heads)).transpose(0, 1, 3, 2, 4)
        return whole(by_head.reshape(b, s, width), heads, *args, **how)

    with put(ops, "attention", attention):
        yield


@bug("attention dropout has the same masks on all ranks of tp", "tp2", "C36, T11.4", dropout=0.3)
def _() -> Iterator[None]:
    with put(transformer.Attention, "_rows", lambda self, draw: _rows_of_heads(self, draw, first=0)):
        yield


def _rows_of_heads(self: Any, draw: Draw | None, first: int) -> Any:
    if draw is None:
        return None
    heads = np.arange(first, first + self.heads)
    return context.attention_rows(draw, f"{self.name}.weights", heads, self.cp, self.kind)


@bug("dropout after the sum has another mask on each rank of tp", "tp2", "C36", seen=True, dropout=0.3)
def _() -> Iterator[None]:
    rows = Draw.rows
    with put(Draw, "rows", lambda self, stream: rows(self, f"{stream}.{world().rank % 2}")):
        yield


@bug("the norm counts replicated parameters on every rank of tp", "tp2", "C29, T28.2", clip=0.01)
def _() -> Iterator[None]:
    with put(Update, "_counts", lambda self, p: self._mesh.coords["edp"] == 0):
        yield


@bug("every rank clips by the norm of its own slabs", "tp2", "C28", seen=True, clip=0.01)
def _() -> Iterator[None]:
    with clipped_by_own_norm():
        yield


@bug("the loss of every rank of tp is counted", "tp2")
def _() -> Iterator[None]:
    make = Update.make

    def doubled(self: Update, number: int, measured: Any) -> Any:
        return make(self, number, measured._replace(losses=[2 * loss for loss in measured.losses]))

    with put(Update, "make", doubled):
        yield


@bug("initial weights are drawn for each slab as if it were the whole", "tp2")
def _() -> Iterator[None]:
    normal = rng.normal

    def of_slab(seed: int, name: str, full_shape: Any, slab: Any) -> np.ndarray:
        shape = tuple(part.stop - part.start for part in slab)
        return normal(seed, name, shape, tuple(slice(0, n) for n in shape))

    with put(rng, "normal", of_slab):
        yield


@bug("every rank draws its initial weights from a seed of its own", "dp2", "C36", seen=True)
def _() -> Iterator[None]:
    normal = rng.normal
    with put(rng, "normal", lambda seed, *where: normal(seed + world().rank, *where)):
        yield


# ---------------------------------------------------------------------------------------------------------- vocabulary


def _own_with(place: Callable[[Any, int, int], Any]) -> Any:
    """`vocabulary._own` with other places."""

    def own(words: Any, axis: Communicator, vocab: int) -> tuple[Any, Any]:
        first, stop = cut(vocab, axis.size, axis.rank)
        return place(words, first, stop), (words >= first) & (words < stop)

    return own


@bug("words are looked up one row too far", "tp2", "T12.4")
def _() -> Iterator[None]:
    with put(vocabulary, "_own", _own_with(lambda words, first, stop: (words - first + 1) % max(1, stop - first))):
        yield


@bug("words of other ranks are looked up as well", "tp2", "T12.4")
def _() -> Iterator[None]:
    forward = vocabulary.TakeOwnRows.forward

    def every_word(table: Any, ids: Any, *, axis: Communicator, vocab: int) -> Any:
        _, saved = forward(table, ids, axis=axis, vocab=vocab)
        return table[ids % len(table)], saved

    with put(vocabulary.TakeOwnRows, "forward", every_word):
        yield


@bug("the loss normalises over the words of each rank alone", "tp2", "T12.1", seen=True)
def _() -> Iterator[None]:
    class Alone:
        """An axis that sums nothing."""

        def __init__(self, axis: Communicator) -> None:
            self.axis, self.size, self.rank, self.name = axis, axis.size, axis.rank, axis.name

        def all_reduce(self, x: Any, op: str = "sum", out: Any = None) -> Any:
            if op == "max":
                return x
            found = self.axis.all_reduce(x)
            found[0] = x[0]
            out[...] = found
            return out

    forward = vocabulary.VocabularyCrossEntropy.forward
    with put(
        vocabulary.VocabularyCrossEntropy,
        "forward",
        lambda logits, targets, *, axis, **how: forward(logits, targets, axis=Alone(axis), **how),
    ):
        yield


@bug("the tied head's gradient is lost", "tp2", "C44, T12.3", seen=True, tied=True)
def _() -> Iterator[None]:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = sequence.enter(x, self.axis, self.sequence_parallel)
        return ops.linear(x, Tensor(self.table.data.T))

    with put(vocabulary.VocabularyHead, "forward", forward):
        yield


@bug("the tied table is summed over the ranks that hold different words", "tp2", "C44", tied=True)
def _() -> Iterator[None]:
    finish = data.FlatReducer.finish

    def summed(self: Any) -> None:
        finish(self)
        for flat, _ in self._work:
            for p in flat.parameters:
                if p.name == "table.weight" and p.grad.shape[0] * 2 == p.full_shape[0]:
                    p.grad *= 2

    with put(data.FlatReducer, "finish", summed):
        yield


# ------------------------------------------------------------------------------------------------------------ sequence


@bug("gradients of norms are not summed over tp", "tp2,sp", "C39, T13.3", seen=True)
def _() -> Iterator[None]:
    def spec(sequence_parallel: bool) -> Spec:
        return Spec()

    with put(gpt, "between", spec), put(decoder, "between", spec), put(transformer, "between", spec):
        yield


@bug("gradients of row-parallel biases are not summed over tp", "tp2,sp", "C39", seen=True)
def _() -> Iterator[None]:
    with put(tensor, "between", lambda sequence_parallel: Spec()):
        yield


@bug("gradients of norms are a mean over tp", "tp2,sp", "C39")
def _() -> Iterator[None]:
    finish = data.FlatReducer.finish

    def mean(self: Any) -> None:
        finish(self)
        for flat, _ in self._work:
            if "tp" in flat.axes:
                flat.grads /= 2

    with put(data.FlatReducer, "finish", mean):
        yield


@bug("the backward of all_gather keeps the own slice", "tp2,sp")
def _() -> Iterator[None]:
    with put(collectives.AllGather, "backward", collectives.Gather.backward):
        yield


@bug("the backward of reduce_scatter pads the own slice with zeros", "tp2,sp", seen=True)
def _() -> Iterator[None]:
    def backward(grad: Any, *, wanted: Any, axis: Communicator, dim: int) -> Any:
        whole = np.zeros((*grad.shape[:dim], grad.shape[dim] * axis.size, *grad.shape[dim + 1 :]))
        length = grad.shape[dim]
        whole[(slice(None),) * dim + (slice(axis.rank * length, (axis.rank + 1) * length),)] = grad
        return (whole,)

    with put(collectives.ReduceScatter, "backward", backward):
        yield


@bug("all_gather joins the slices in another order", "tp2,sp")
def _() -> Iterator[None]:
    def forward(x: Any, *, axis: Communicator, dim: int) -> Any:
        return np.roll(axis.all_gather(x, dim), x.shape[dim], dim), ()

    with put(collectives.AllGather, "forward", forward):
        yield


@bug("dropout of a slice of the sequence is that of the first one", "tp2,sp", "C36", dropout=0.3)
def _() -> Iterator[None]:
    with put(
        Draw, "at", lambda self, positions: self._replace(positions=self.positions[: positions.stop - positions.start])
    ):
        yield


@bug("a slice of the sequence gets the positions of the first one", "tp2,sp")
def _() -> Iterator[None]:
    whole = Positions.forward

    def first(self: Positions, x: Tensor, length: int, mine: slice, positions: Any) -> Tensor:
        return whole(self, x, length, slice(0, mine.stop - mine.start), positions)

    with put(Positions, "forward", first):
        yield


@bug("the sequence is gathered and then entered by copy as well", "tp2,sp", seen=True)
def _() -> Iterator[None]:
    def enter(x: Tensor, axis: Communicator, sequence_parallel: bool) -> Tensor:
        return collectives.copy(collectives.all_gather(x, axis, 1), axis)

    with put(tensor, "enter", enter):
        yield


# ------------------------------------------------------------------------------------------------------------- context


@bug("ring attention is a hop behind", "cp4", "T14.1")
def _() -> Iterator[None]:
    around = ring.around

    def behind(axis: Communicator, block: Any, what: int) -> Iterator[Any]:
        for source, arrived in around(axis, block, what):
            yield (source if source == axis.rank else (source - axis.rank) % axis.size), arrived

    with put(ring, "around", behind):
        yield


@bug("two blocks of ring attention are added unweighted", "cp2", "T14.1")
def _() -> Iterator[None]:
    def merge(y: Any, lse: Any, more: Any, more_lse: Any) -> None:
        y += more
        y /= 2
        lse[...] = np.logaddexp(lse, more_lse)

    with put(ring, "merge", merge):
        yield


@bug("gradients of keys stay where they were made", "cp2", "T14.4")
def _() -> Iterator[None]:
    backward = ring.RingAttention.backward

    def stay(grad: Any, *saved: Any, axis: Communicator, **how: Any) -> Any:
        d_qkv, *rest = backward(grad, *saved, axis=axis, **how)
        b, s, width = d_qkv.shape
        parts = d_qkv.reshape(b, s, how["kv_heads"], -1)
        d = width // (how["heads"] + 2 * how["kv_heads"])
        parts[..., -2 * d :] = axis.shift(np.ascontiguousarray(parts[..., -2 * d :]), 1)
        return d_qkv, *rest

    with put(ring.RingAttention, "backward", stay):
        yield


@bug("dropout of attention counts the keys of each block from zero", "cp2", "C36", dropout=0.3)
def _() -> Iterator[None]:
    attend, attend_backward = ring.attend, ring.attend_backward

    def local(how: dict[str, Any]) -> dict[str, Any]:
        return {**how, "keys": None}

    with (
        put(ring, "attend", lambda *arrays, **how: attend(*arrays, **local(how))),
        put(ring, "attend_backward", lambda *arrays, **how: attend_backward(*arrays, **local(how))),
    ):
        yield


@bug("positions are counted from zero on every rank of cp", "cp2")
def _() -> Iterator[None]:
    with put(Positions, "forward", lambda self, x, length, mine, positions: x + self.weight[:length]):
        yield


@bug("targets are shifted after the sequence is cut", "cp2")
def _() -> Iterator[None]:
    part = Batch.part

    def shifted(self: Batch, positions: Any) -> Batch:
        found = part(self, positions)
        if positions is None:
            return found
        return replace(found, targets=np.concatenate([found.inputs[:, 1:], found.inputs[:, :1]], 1))

    with put(Batch, "part", shifted):
        yield


@bug("tokens are dealt out in order, though the ring expects zig-zag", "cp2", "T14.3")
def _() -> Iterator[None]:
    def in_order(seq_len: int, axis: Communicator, kind: str) -> np.ndarray:
        share = seq_len // axis.size
        return np.arange(axis.rank * share, (axis.rank + 1) * share)

    with put(context, "positions", in_order):
        yield


@bug("gradients are not summed over cp", "cp2", seen=True)
def _() -> Iterator[None]:
    axes = Spec.replicate_axes
    with put(Spec, "replicate_axes", lambda self: tuple(axis for axis in axes(self) if axis != "cp")):
        yield


@bug("targets are not counted over cp", "cp2", "T2.1")
def _() -> Iterator[None]:
    with put(executor, "DATA_AXES", ("edp", "ep")):
        yield


@bug("all_to_all goes back the way it came", "cp2,ulysses")
def _() -> Iterator[None]:
    def backward(grad: Any, *, wanted: Any, axis: Communicator, i: int, j: int, counts: Any = None) -> Any:
        shape = list(grad.shape)
        shape[i], shape[j] = shape[i] // axis.size, shape[j] * axis.size
        return (axis.all_to_all(grad.reshape(shape), i, j).reshape(shape),)

    with put(collectives.AllToAll, "backward", backward):
        yield


@bug("ulysses drops attention by local heads", "cp2,ulysses", "C36", dropout=0.3)
def _() -> Iterator[None]:
    whole = context.attention_rows

    def local(draw: Draw, stream: str, heads: Any, axis: Communicator, kind: str) -> Any:
        everything = np.arange(axis.size * len(draw.positions))
        return draw.attention_rows(stream, heads[: len(heads) // axis.size], everything)

    with put(context, "attention_rows", local):
        assert whole is not local
        yield


# -------------------------------------------------------------------------------------------------------- grouped heads


@bug("ranks that share a head of keys take turns instead", "tp4", "T11.1", heads=4, kv_heads=2)
def _() -> Iterator[None]:
    init = grouped.GroupedColumns.__init__

    def turns(self: Any, name: str, width: int, heads: int, kv_heads: int, axis: Communicator, **how: Any) -> None:
        init(self, name, width, heads, kv_heads, axis, **how)
        first = axis.rank % kv_heads
        self._columns = 2 * self.head_width * first, 2 * self.head_width * (first + 1)

    with put(grouped.GroupedColumns, "__init__", turns):
        yield


@bug("the gradient of shared keys is not summed", "tp4", "T11.1", seen=True, heads=4, kv_heads=2)
def _() -> Iterator[None]:
    axes = Spec.replicate_axes
    with put(Spec, "replicate_axes", lambda self: tuple(axis for axis in axes(self) if axis != "tp")):
        yield


# ---------------------------------------------------------------------------------------------------------------- data


@bug("gradients are a mean over dp", "dp2", "T2.2")
def _() -> Iterator[None]:
    finish = data.FlatReducer.finish

    def mean(self: Any) -> None:
        finish(self)
        for flat, axis in self._work:
            flat.grads /= axis.size

    with put(data.FlatReducer, "finish", mean):
        yield


@bug("gradients are not summed over dp", "dp2", seen=True)
def _() -> Iterator[None]:
    with put(data.FlatReducer, "finish", lambda self: [data.settle(flat.parameters) for flat, _ in self._work]):
        yield


@bug("buckets leave out the last parameter", "dp2", seen=True, reducer="bucketed", bucket_mib=0.001)
def _() -> Iterator[None]:
    ranges = data._cut_from_the_end
    with put(
        data, "_cut_from_the_end", lambda flat, size: [(max(1, first), last) for first, last in ranges(flat, size)]
    ):
        yield


@bug("every rank takes the mean over its own targets", "dp2", "T2.1, C24", padded=True)
def _() -> Iterator[None]:
    count = Executor._count

    def own(self: Executor, number: int, run: Any) -> None:
        count(self, number, run)
        run.targets[number] = self._axis.size * sum(micro.count for micro in run.micros[number])

    with put(Executor, "_count", own):
        yield


@bug("every micro-batch takes the mean over its own targets", "dp2", "C24", microbatches=2, padded=True)
def _() -> Iterator[None]:
    backward = Executor._backward

    def own(self: Executor, action: Any, run: Any, place: int) -> None:
        whole = run.targets[0]
        run.targets[0] = 2 * self._axis.size * max(1, run.micros[0][action.micro].count)
        backward(self, action, run, place)
        run.targets[0] = whole

    with put(Executor, "_backward", own):
        yield


@bug("every rank shuffles with a seed of its own", "dp2", "C26")
def _() -> Iterator[None]:
    whole = Tokens.order

    def own(self: Tokens, batch: int) -> order.Order:
        found = whole(self, batch)
        return order.Order(self.num_samples, batch, self.seed + world().rank) if world().size > 1 else found

    with put(Tokens, "order", own):
        yield


@bug("dropout has the same masks on all replicas", "dp2", "C36", dropout=0.3)
def _() -> Iterator[None]:
    whole = Batch.draw

    def same(self: Batch, seed: int) -> Draw | None:
        found = whole(self, seed)
        return found._replace(places=np.arange(len(found.places))) if found is not None else None

    with put(Batch, "draw", same):
        yield


# ------------------------------------------------------------------------------------------------------------- messages


@bug("a transposed array travels in the order of memory", "tp2", "C37")
def _() -> Iterator[None]:
    ready = communicator.ready

    def memory_order(x: Any) -> Any:
        if isinstance(x, np.ndarray) and x.flags.f_contiguous and x.ndim == 2 and not x.flags.c_contiguous:
            return x.T.reshape(x.shape)
        return ready(x)

    # Attention's gradient comes as a transposed array here, as a BLAS may return it.
    backward = collectives.Copy.backward

    def transposed(grad: Any, **how: Any) -> Any:
        b, s, d = grad.shape
        return (backward(np.asfortranarray(grad.reshape(b * s, d)), **how)[0].reshape(b, s, d),)

    with put(communicator, "ready", memory_order), put(collectives.Copy, "backward", transposed):
        yield


@bug("a maximum is taken where a sum should be", "tp2", "C73")
def _() -> Iterator[None]:
    with put(collectives.AllReduce, "forward", lambda x, *, axis: (axis.all_reduce(x, "max"), ())):
        yield

"""Bugs of saving, loading and going on: each is found by an oracle in tests/local/test_mutations_checkpoint.py.

A mutation is put on while a run is saved and while another goes on from it, never in the run that they are compared
with.  Each is one line's worth of damage, of the kind that checkpoints of other systems are known for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from mutations import put

from mpitrain import checkpoint
from mpitrain.checkpoint import hdf5, saving
from mpitrain.checkpoint.layout import SlabRef
from mpitrain.data.tokens import Tokens
from mpitrain.keep import Keeper
from mpitrain.memory.stored_array import StoredArray
from mpitrain.nn.parameter import Flat
from mpitrain.optim.scaler import BlockScaler, LossScaler
from mpitrain.parallel.local_sgd import LocalSgd
from mpitrain.parallel.powersgd.state import ERROR, Memory, Q
from mpitrain.parallel.stale import Pending, Stale

OF_CHECKPOINTS: list[OfCheckpoint] = []


class OfCheckpoint(NamedTuple):
    """One bug: what was done, in words; the oracle that must find it; the patch; the case that it is."""

    name: str
    oracle: str
    patch: Callable[[], AbstractContextManager[Any]]
    case: str


def of_checkpoints(
    name: str, oracle: str, case: str = ""
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Any]]:
    """Register a generator function as the patch of such a bug."""

    def register(patch: Callable[[], Iterator[None]]) -> Callable[[], Any]:
        OF_CHECKPOINTS.append(OfCheckpoint(name, oracle, contextlib.contextmanager(patch), case))
        return patch

    return register


# -------------------------------------------------------------------------------------------------------- what is saved


def saved(change: Callable[[SlabRef], SlabRef]) -> Any:
    """Slabs are saved otherwise; they are loaded as they are."""
    begin = saving.begin

    def changed(run: Any, step: int, tensors: Any, *args: Any, **more: Any) -> Any:
        return begin(run, step, [change(slab) for slab in tensors], *args, **more)

    return put(checkpoint, "begin", changed)


def scalars(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The numbers beside the tensors are saved otherwise."""
    whole = Keeper._scalars
    return put(Keeper, "_scalars", lambda self, step: change(whole(self, step)))


@of_checkpoints("halves are saved, not their masters", "float16 to one rank", "C68")
def _() -> Iterator[None]:
    def halves(slab: SlabRef) -> SlabRef:
        rounds = slab.name.startswith("weight/") and "router" not in slab.name
        return slab._replace(array=np.asarray(slab.array).astype(np.float16).astype(np.float32)) if rounds else slab

    with saved(halves):
        yield


@of_checkpoints("moments are saved as halves", "stop of float16")
def _() -> Iterator[None]:
    def halves(slab: SlabRef) -> SlabRef:
        rounds = slab.name.startswith("first_moment/")
        return slab._replace(array=slab.array.astype(np.float16).astype(np.float32)) if rounds else slab

    with saved(halves):
        yield


@of_checkpoints("first and second moments change places", "one rank to dp3")
def _() -> Iterator[None]:
    def swapped(slab: SlabRef) -> SlabRef:
        kind, _, name = slab.name.partition("/")
        other = {"first_moment": "second_moment", "second_moment": "first_moment"}.get(kind, kind)
        return slab._replace(name=f"{other}/{name}")

    with saved(swapped):
        yield


@of_checkpoints("layers have the numbers of their stage", "pp2 to one rank", "T29.4")
def _() -> Iterator[None]:
    def of_stage(slab: SlabRef) -> SlabRef:
        flip = {"blocks.0.": "blocks.1.", "blocks.1.": "blocks.0."}
        part = next((part for part in flip if part in slab.name), None)
        return slab if part is None else slab._replace(name=slab.name.replace(part, flip[part]))

    with saved(of_stage):
        yield


@of_checkpoints("rows are saved with the place that they have on their rank", "tp3 to one rank", "C55")
def _() -> Iterator[None]:
    entry = saving._entry

    def local(slab: SlabRef, part: Any) -> list[Any]:
        told = entry(slab, part)
        if part is not None and slab.name == "weight/table.weight":
            length = told[4][0] - told[3][0]
            told[3][0], told[4][0] = 0, length
        return told

    with put(saving, "_entry", local):
        yield


@of_checkpoints("rows that only pad the last rank are saved", "tp3 to one rank", "C34")
def _() -> Iterator[None]:
    entry = saving._entry

    def padded(slab: SlabRef, part: Any) -> list[Any]:
        told = entry(slab, part)
        if part is not None and told[4][0] == slab.full_shape[0] and "table" in slab.name:
            told[1] = (told[1][0] + 2, *told[1][1:])
            told[4][0] += 2
        return told

    with put(saving, "_entry", padded):
        yield


@of_checkpoints("each holder of a slab writes one row too many", "dp3 to one rank")
def _() -> Iterator[None]:
    whole = SlabRef.written.fget

    def more(self: SlabRef) -> Any:
        part = whole(self)
        if part and part[0].start > 0:
            return slice(part[0].start - 1, part[0].stop), *part[1:]
        return part

    with put(SlabRef, "written", property(more)):
        yield


@of_checkpoints("the first half of a slab's holders write it", "one rank to dp3")
def _() -> Iterator[None]:
    whole = SlabRef.written.fget

    def less(self: SlabRef) -> Any:
        return None if self.holder is not None and 2 * self.holder[0] >= max(2, self.holder[1]) else whole(self)

    with put(SlabRef, "written", property(less)):
        yield


@of_checkpoints("the rows of a replica's part are those of its neighbour", "dp3 to one rank")
def _() -> Iterator[None]:
    take = hdf5._bytes_of

    def neighbour(part: hdf5.Part) -> memoryview:
        rows = part.part[0] if part.part else slice(0, 0)
        if rows.start:
            shifted = slice(0, rows.stop - rows.start)
            return take(part._replace(part=(shifted, *part.part[1:])))
        return take(part)

    with put(hdf5, "_bytes_of", neighbour):
        yield


@of_checkpoints("moments are saved of whichever worker's turn it is", "workers to one rank")
def _() -> Iterator[None]:
    slabs_of = checkpoint.slabs_of

    def together(parameters: Any, states: Any, mesh: Any, apart: Any = ()) -> Any:
        return slabs_of(parameters, states, mesh)

    with put(checkpoint, "slabs_of", together):
        yield


@of_checkpoints("workers are not averaged before they are saved", "workers to one rank")
def _() -> Iterator[None]:
    with put(LocalSgd, "join", lambda self: None), put(LocalSgd, "updated", lambda self: None):
        yield


@of_checkpoints("the background writes what training changes", "background")
def _() -> Iterator[None]:
    write = hdf5.write

    def later(*args: Any) -> Any:
        time.sleep(0.4)  # a disk, against steps of some ms
        return write(*args)

    with put(saving.Snapshot, "take", lambda self, part: part), put(hdf5, "write", later):
        yield


@of_checkpoints("the number of the step that comes is saved", "stop of dropout")
def _() -> Iterator[None]:
    begin = saving.begin

    def next_step(run: Any, step: int, *args: Any, **more: Any) -> Any:
        return begin(run, step + 1, *args, **more)

    with put(checkpoint, "begin", next_step):
        yield


# --------------------------------------------------------------------------------------------------------- what is read


def filled(after: Callable[[Keeper, int], int | None]) -> Any:
    """Something is done when a run was filled; it may say another number of steps."""
    fill = Keeper._fill

    def changed(self: Keeper, found: Any) -> int:
        steps = fill(self, found)
        other = after(self, steps)
        return steps if other is None else other

    return put(Keeper, "_fill", changed)


def loaded(change: Callable[[SlabRef], SlabRef | None]) -> Any:
    """Slabs are loaded otherwise, or not at all (None); they are saved as they are."""
    overlap = checkpoint._overlap

    def changed(slab: SlabRef, *args: Any) -> Any:
        other = change(slab)
        return None if other is None else overlap(other, *args)

    return put(checkpoint, "_overlap", changed)


@of_checkpoints("a run that goes on begins at its first step", "stop of dropout")
def _() -> Iterator[None]:
    with filled(lambda keeper, steps: 0):
        yield


@of_checkpoints("updates are counted from zero", "stop of dropout")
def _() -> Iterator[None]:
    def forget(keeper: Keeper, steps: int) -> None:
        keeper.optimizer.updates = 0

    with filled(forget):
        yield


@of_checkpoints("skipped steps are counted as updates", "stop of float16", "C18")
def _() -> Iterator[None]:
    def all_counted(keeper: Keeper, steps: int) -> None:
        keeper.optimizer.updates = steps

    with filled(all_counted):
        yield


@of_checkpoints("the learning rate begins anew", "stop of dropout")
def _() -> Iterator[None]:
    def anew(keeper: Keeper, steps: int) -> None:
        update, done = keeper.executor._update, keeper.optimizer.updates
        rate = update._lr
        update._lr = lambda updates: rate(updates - done)

    with filled(anew):
        yield


@of_checkpoints("tokens are counted from zero", "stop of dropout")
def _() -> Iterator[None]:
    def forget(keeper: Keeper, steps: int) -> None:
        keeper.seen = 0

    with filled(forget):
        yield


def read_from(place: Callable[[Tokens, int, int], int]) -> Any:
    """The text is read from another place on: place(tokens, batch, first step)."""
    batches = Tokens.batches

    def changed(self: Tokens, batch: int, rank: int, size: int, start: int, *args: Any) -> Any:
        steps = batches(self, batch, rank, size, place(self, batch, start), *args)
        return steps if start else batches(self, batch, rank, size, start, *args)

    return put(Tokens, "batches", changed)


@of_checkpoints("the epoch is forgotten", "stop in the third epoch", "C71")
def _() -> Iterator[None]:
    with read_from(lambda tokens, batch, start: start % tokens.order(batch).steps_per_epoch):
        yield


@of_checkpoints("the batch that was read last is read again", "stop of dropout", "C71")
def _() -> Iterator[None]:
    with read_from(lambda tokens, batch, start: max(0, start - 1)):
        yield


@of_checkpoints("the place in the epoch is forgotten", "stop in the third epoch", "C71")
def _() -> Iterator[None]:
    def at_its_begin(tokens: Tokens, batch: int, start: int) -> int:
        return start - start % tokens.order(batch).steps_per_epoch

    with read_from(at_its_begin):
        yield


@of_checkpoints("halves are not made anew from the masters that were read", "stop of float16", "C68")
def _() -> Iterator[None]:
    with put(Flat, "refresh", lambda self: None):
        yield


@of_checkpoints("a scale begins with what it was, its counts at zero", "stop of float16")
def _() -> Iterator[None]:
    load = LossScaler.load_state
    with put(LossScaler, "load_state", lambda self, state: load(self, {**state, "clean": 0, "left": 2})):
        yield


@of_checkpoints("the scale begins anew", "stop of float16")
def _() -> Iterator[None]:
    with put(Keeper, "_resume_scaler", lambda self, found, saved: None):
        yield


@of_checkpoints("when a branch's scale was lowered is forgotten", "stop of branches")
def _() -> Iterator[None]:
    load = BlockScaler.load_state
    never = {"lowered": [-125] * 4}
    with put(BlockScaler, "load_state", lambda self, state: load(self, {**state, **never})):
        yield


def without(kind: str) -> Any:
    """A kind of tensors that a reducer keeps is not read."""
    to_fill = Memory.to_fill
    return put(Memory, "to_fill", lambda self, saved: {**to_fill(self, saved), kind: {}})


@of_checkpoints("what PowerSGD has left out is lost", "stop of PowerSGD", "C58")
def _() -> Iterator[None]:
    with without(ERROR):
        yield


@of_checkpoints("PowerSGD begins with a new Q", "stop of PowerSGD", "C58")
def _() -> Iterator[None]:
    with without(Q):
        yield


@of_checkpoints("gradients on their way come in another order", "stop of stale")
def _() -> Iterator[None]:
    to_fill = Stale.state_to_fill

    def turned(self: Stale, shapes: Any) -> Any:
        states = to_fill(self, shapes)
        return dict(zip(states, reversed([*states.values()]), strict=True))

    with put(Stale, "state_to_fill", turned):
        yield


@of_checkpoints("late gradients have their start once more", "stop of stale")
def _() -> Iterator[None]:
    resumed = Stale.resumed

    def anew(self: Stale, updates: int) -> str:
        said = resumed(self, updates)
        self._on_time = 0
        return said

    with put(Stale, "resumed", anew):
        yield


@of_checkpoints("workers all go on with the moments of the first", "stop of workers")
def _() -> Iterator[None]:
    resumed = LocalSgd.resumed

    def of_first(self: LocalSgd, updates: int) -> str:
        self._read = []
        return resumed(self, updates)

    with put(LocalSgd, "resumed", of_first):
        yield


@of_checkpoints("ranks read what they would write, and nothing else", "dp3 to one rank and back")
def _() -> Iterator[None]:
    with loaded(lambda slab: slab if slab.written is not None else None):
        yield


@of_checkpoints("the second stage of a tied pair does not read its table", "one rank to pp2")
def _() -> Iterator[None]:
    with loaded(lambda slab: slab if slab.holder is not None else None):
        yield


@of_checkpoints("each rank reads the first experts", "experts to ep2")
def _() -> Iterator[None]:
    def first(slab: SlabRef) -> SlabRef:
        if "experts" not in slab.name:
            return slab
        rows = slab.rectangle[0]
        return slab._replace(rectangle=(slice(0, rows.stop - rows.start), *slab.rectangle[1:]))

    with loaded(first):
        yield


@of_checkpoints("each rank that rows are dealt out to reads the first", "one rank to dp3 ZeRO 3", "C55")
def _() -> Iterator[None]:
    def first(slab: SlabRef) -> SlabRef:
        rows, *rest = slab.rectangle
        return slab._replace(rectangle=(slice(0, rows.stop - rows.start), *rest))

    with loaded(first):
        yield


@of_checkpoints("a slab is put one row too low", "dp3 to one rank")
def _() -> Iterator[None]:
    overlap = checkpoint._overlap

    def low(slab: SlabRef, *args: Any) -> Any:
        piece = overlap(slab, *args)
        if piece is None or not piece.target or piece.target[0].start == 0:
            return piece
        rows = piece.target[0]
        return piece._replace(target=(slice(rows.start - 1, rows.stop - 1), *piece.target[1:]))

    with put(checkpoint, "_overlap", low):
        yield


@of_checkpoints("values are read from the bytes before", "tp3 to one rank", "C55")
def _() -> Iterator[None]:
    fetch = hdf5._Reader._bytes

    def before(self: Any, start: int, stop: int, into: memoryview) -> None:
        shift = min(start, self._dtype.itemsize)
        fetch(self, start - shift, stop - shift, into)

    with put(hdf5._Reader, "_bytes", before):
        yield


@of_checkpoints("what lives elsewhere is not written when it is read", "stop of offload")
def _() -> Iterator[None]:
    with put(StoredArray, "__setitem__", lambda self, index, values: None):
        yield


@of_checkpoints("moments are not read by an optimizer that has some", "one rank to dp3")
def _() -> Iterator[None]:
    with loaded(lambda slab: slab if slab.name.startswith("weight/") else None):
        yield


@of_checkpoints("late gradients of a damaged checkpoint are kept", "damaged, stale workers", "C63")
def _() -> Iterator[None]:
    with put(Pending, "forget", lambda self: None):
        yield


@of_checkpoints("moments of a damaged checkpoint are kept", "damaged, local", "C63")
def _() -> Iterator[None]:
    to_fill = LocalSgd.state_to_fill

    def keeps(self: LocalSgd, shapes: Any) -> Any:
        read = self._read
        states = to_fill(self, shapes)
        self._read = self._read or read
        return states

    with put(LocalSgd, "state_to_fill", keeps):
        yield

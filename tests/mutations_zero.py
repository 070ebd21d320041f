"""Bugs that ZeRO is known for: the part of `mutations.py` about rows that ranks deal out, and what travels for them.

Each stands where it shows: with experts, tied tables or micro-batches only if it needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mutations import bug, put
from mutations_experts import SWITCH
from mutations_optimizer import forgets

from mpitrain.nn import materialize, share, unit
from mpitrain.nn.module import Module
from mpitrain.nn.rows import assign_rows
from mpitrain.nn.share import CutFlat
from mpitrain.parallel.zero import reducer
from mpitrain.parallel.zero.gather import GatheredUnit
from mpitrain.parallel.zero.reducer import RowReducer
from mpitrain.pipeline import executor
from mpitrain.pipeline.update import Update
from mpitrain.spec import Spec

SMALL = {"bucket_mib": 0.002}
"""Buckets of two KiB: several of them."""

ADAFACTOR: dict[str, Any] = {"optimizer": "adafactor", "lr": 0.02}

# ----------------------------------------------------------------------------------------------------------- whose rows


def dealt_out(change: Callable[[Any, Any, int], Any]) -> Any:
    """Rows are dealt out otherwise: change(table, shapes, ranks)."""

    def changed(shapes: Any, ranks: int, **how: Any) -> Any:
        return change(assign_rows(shapes, ranks, **how), shapes, ranks)

    return put(share, "assign_rows", changed)


@bug("rows are rounded down, and those that are left are nobody's", "dp4,zero1", "T23.5")
def _() -> Iterator[None]:
    def floor(table: Any, shapes: Any, ranks: int) -> Any:
        lengths = [shape[0] // ranks for shape in shapes]
        return [[(rank * n, (rank + 1) * n) for n in lengths] for rank in range(ranks)]

    with dealt_out(floor):
        yield


@bug("the last rank has one row less", "dp2,zero2", "T23.5")
def _() -> Iterator[None]:
    def short(table: Any, shapes: Any, ranks: int) -> Any:
        return [*table[:-1], [(start, max(start, stop - 1)) for start, stop in table[-1]]]

    with dealt_out(short):
        yield


@bug("the border between two ranks is one row late on both sides of it", "dp2,zero1", "T23.5")
def _() -> Iterator[None]:
    def overlapping(table: Any, shapes: Any, ranks: int) -> Any:
        return [[(start, min(stop + 1, shape[0])) for (start, stop), shape in zip(table[0], shapes, strict=True)],
                *table[1:]]  # fmt: skip

    with dealt_out(overlapping):
        yield


@bug("what has fewer rows than ranks is everybody's", "dp4,ep2,zero2", "C54", **{**SWITCH, "experts": 2})
def _() -> Iterator[None]:
    def shared(table: Any, shapes: Any, ranks: int) -> Any:
        return [[(0, s[0]) if s[0] < ranks else rows for rows, s in zip(of, shapes, strict=True)] for of in table]

    with dealt_out(shared):
        yield


def placed(place: Callable[[int, int], int]) -> Any:
    """A rank takes itself for another one: place(ranks, rank)."""
    whole = materialize._place

    def other(*how: Any) -> tuple[int, int]:
        ranks, rank = whole(*how)
        return ranks, place(ranks, rank)

    return put(materialize, "_place", other)


@bug("a rank keeps the rows of its neighbour", "dp2,zero2")
def _() -> Iterator[None]:
    with placed(lambda ranks, rank: (rank + 1) % ranks):
        yield


@bug("rows are dealt out in another order of the axes than messages go", "dp2,cp2,zero1")
def _() -> Iterator[None]:
    with placed(lambda ranks, rank: (rank % 2) * 2 + rank // 2 if ranks == 4 else rank):
        yield


@bug("every rank starts from the first rows", "dp2,zero3", "C36")
def _() -> Iterator[None]:
    whole = CutFlat.start

    def first(self: CutFlat, seed: int) -> None:
        whole(self, seed)
        for p, rows in zip(self.parameters, self.shares, strict=True):
            start = rows.rows[0] - p.rectangle[0].start  # type: ignore[attr-defined]
            moved = slice(rows.rectangle[0].start - start, rows.rectangle[0].stop - start)
            rows.data[...] = p.init(p.name, p.full_shape, (moved, *rows.rectangle[1:]), seed)

    with put(CutFlat, "start", first):
        yield


# -------------------------------------------------------------------------------------------- gradients to their owners


@bug("gradients travel one element late", "dp2,zero1", "T23.5")
def _() -> Iterator[None]:
    whole = CutFlat.packed_grads
    with put(CutFlat, "packed_grads", lambda self, first, last: np.roll(whole(self, first, last), 1)):
        yield


@bug("gradients travel in the order of parameters, not of ranks", "dp2,zero2", **SMALL)
def _() -> Iterator[None]:
    def by_parameter(self: CutFlat, first: int, last: int) -> np.ndarray:
        found = [p.grad.reshape(-1) if p.touched else np.zeros(p.data.size) for p in self.parameters[first:last]]
        return np.concatenate(found)

    with put(CutFlat, "packed_grads", by_parameter):
        yield


def brought(change: Callable[[CutFlat, int, int, Any], Any]) -> Any:
    """Sums over ranks are changed as they arrive: change(flat, first, last, summed)."""
    whole = CutFlat.bring

    def changed(self: CutFlat, first: int, last: int, summed: Any) -> None:
        summed[...] = change(self, first, last, summed)
        whole(self, first, last, summed)

    return put(CutFlat, "bring", changed)


@bug("gradients are a mean over ranks", "dp2,zero1", "C48")
def _() -> Iterator[None]:
    with brought(lambda flat, first, last, summed: summed / flat.ranks):
        yield


@bug("gradients of shares are a mean over ranks of dp where cp divides tokens too", "dp2,cp2,zero1", "C48")
def _() -> Iterator[None]:
    with brought(lambda flat, first, last, summed: summed / 2):
        yield


def summed_over(change: Callable[[Spec, tuple[str, ...]], tuple[str, ...]]) -> Any:
    axes = Spec.replicate_axes
    return put(Spec, "replicate_axes", lambda self: change(self, axes(self)))


@bug("shares are those of edp, and cp is not summed over", "dp2,cp2,zero1", "decisions of 23")
def _() -> Iterator[None]:
    with summed_over(lambda spec, axes: tuple(axis for axis in axes if axis != "cp")):
        yield


@bug("shares of dense weights are summed over those who share experts", "dp4,ep2,zero2", "23", **SWITCH)
def _() -> Iterator[None]:
    with summed_over(lambda spec, axes: tuple(axis for axis in axes if axis != "ep")):
        yield


@bug("shares of experts are summed over all of dp", "dp4,ep2,zero2", "23, 16.3", **SWITCH)
def _() -> Iterator[None]:
    with summed_over(lambda spec, axes: ("edp", "ep", *(axis for axis in axes if axis not in ("edp", "ep")))):
        yield


@bug("with sequence parallelism shares are those of dp alone", "dp2,tp2,sp,zero1", "13")
def _() -> Iterator[None]:
    with summed_over(lambda spec, axes: tuple(axis for axis in axes if axis != "tp")):
        yield


@bug("a micro-batch overwrites what others have brought", "dp2,zero2", "23", microbatches=2)
def _() -> Iterator[None]:
    start = reducer._Bucket.start

    def overwriting(self: Any, overlap: bool) -> None:
        for each in self.shares:
            each.touched = False
        start(self, overlap)

    with put(reducer._Bucket, "start", overwriting):
        yield


@bug("a step adds to the gradients of the step before", "dp2,zero2", "23")
def _() -> Iterator[None]:
    def forgetful(self: Module) -> None:
        for flat in self.flats:
            for p in flat.parameters:
                p.touched = False

    with put(Module, "start_step", forgetful):
        yield


@bug("a bucket leaves when its first gradient is final", "dp2,zero2", "23", **SMALL)
def _() -> Iterator[None]:
    add = RowReducer.add

    def early(self: RowReducer, parameter: Any) -> None:
        bucket = self._bucket_of.get(parameter)
        if bucket is not None:
            bucket.missing.clear()
        add(self, parameter)

    with put(RowReducer, "add", early):
        yield


@bug("buckets are those of the other stage", "pp2,dp2,interleaved,zero2", "23", microbatches=2, layers=4, **SMALL)
def _() -> Iterator[None]:
    stages_of = reducer._stages_of

    def other(model: Any) -> dict[Any, tuple[int, ...]]:
        turned = dict(zip(model.stages, reversed(model.stages), strict=True))
        return {p: tuple(turned[stage] for stage in stages) for p, stages in stages_of(model).items()}

    with put(reducer, "_stages_of", other):
        yield


@bug("the first rank brings nothing but zeros for experts", "dp4,ep2,zero2", "C53", **SWITCH)
def _() -> Iterator[None]:
    whole = CutFlat.packed_grads

    def none(self: CutFlat, first: int, last: int) -> Any:
        found = whole(self, first, last)
        return found if self.rank or "ep" in self.axes else np.zeros_like(found)

    with put(CutFlat, "packed_grads", none):
        yield


@bug("tied shares are not summed over the two ends", "pp2,dp2,zero1", "12.4", tied=True)
def _() -> Iterator[None]:
    with put(executor, "sum_over_ends", lambda parameters, mesh, done: None):
        yield


@bug("tied shares are summed over the ends twice", "pp2,dp2,zero1", "12.4", tied=True)
def _() -> Iterator[None]:
    whole = executor.sum_over_ends

    def twice(parameters: Any, mesh: Any, done: Any) -> None:
        whole(parameters, mesh, done)
        whole(parameters, mesh, done)

    with put(executor, "sum_over_ends", twice):
        yield


# -------------------------------------------------------------------------------------------------- norm and the update


@bug("the norm counts the shares of the first rank only", "dp2,zero1", "28", clip=0.01)
def _() -> Iterator[None]:
    counts = Update._counts
    with put(Update, "_counts", lambda self, p: counts(self, p) and self._mesh.coords["edp"] == 0):
        yield


@bug("the norm counts experts of the first rank of those who share them", "dp4,ep2,zero2", "28", clip=0.01, **SWITCH)
def _() -> Iterator[None]:
    counts = Update._counts
    with put(Update, "_counts", lambda self, p: counts(self, p) and ("ep" not in p.spec.shard_dims()
             or self._mesh.coords["edp"] == 0)):  # fmt: skip
        yield


@bug("the norm counts tied shares on both ends", "pp2,dp2,zero1", "C28", tied=True, clip=0.01)
def _() -> Iterator[None]:
    counts = Update._counts
    with put(Update, "_counts", lambda self, p: counts(self, p) or p.spec.tied):
        yield


@bug("clipping leaves out the gradients of shares", "dp2,zero2", "28", clip=0.01)
def _() -> Iterator[None]:
    with put(CutFlat, "updated", property(lambda self: [])):
        yield


for _kind, _what in (
    ("tensor", "a root mean square is of the rows of a rank"),
    ("columns", "column sums are of the rows of a rank"),
    ("matrix", "the sum of all rows is of the rows of a rank"),
):

    @bug(f"Adafactor: {_what}", "dp2,zero1", "T25.6", **ADAFACTOR)
    def _(kind: str = _kind) -> Iterator[None]:
        with forgets(kind):
            yield


# ------------------------------------------------------------------------------------------------- weights to everybody


@bug("nobody gets the weights that others have updated", "dp2,zero1", "23")
def _() -> Iterator[None]:
    with put(RowReducer, "updated", lambda self: None):
        yield


@bug("the last bucket of weights is left out", "dp2,zero2", "23", **SMALL)
def _() -> Iterator[None]:
    def short(self: RowReducer) -> None:
        for bucket in self._buckets[1:]:
            bucket.gather()

    with put(RowReducer, "updated", short):
        yield


@bug("weights are unpacked in the order of parameters, not of ranks", "dp2,zero1", "23", **SMALL)
def _() -> Iterator[None]:
    def by_parameter(self: CutFlat, gathered: Any, first: int, last: int, into: Any) -> None:
        at = 0
        for whole in into:
            whole[...] = gathered[at : at + whole.size].reshape(whole.shape)
            at += whole.size

    with put(CutFlat, "unpack", by_parameter):
        yield


@bug("a part works with the rows of this rank alone, and what was there before", "dp2,zero3", "23")
def _() -> Iterator[None]:
    whole = CutFlat.unpack

    def own(self: CutFlat, gathered: Any, first: int, last: int, into: Any) -> None:
        whole(self, gathered, first, last, into)
        for rank, of_rank in enumerate(self.ranges):
            for (start, stop), vector in zip(of_rank[first:last], into, strict=True):
                vector.reshape(-1)[start:stop] *= rank == self.rank

    with put(CutFlat, "unpack", own):
        yield


@bug("weights that were gathered before the update are used after it", "dp2,zero3", "23")
def _() -> Iterator[None]:
    whole = GatheredUnit.arrived

    def stale(self: GatheredUnit) -> list[Any]:
        arrays = whole(self)
        if not hasattr(self, "kept"):
            self.kept = [array.copy() for array in arrays]  # type: ignore[attr-defined]
        return [array.copy() for array in self.kept]  # type: ignore[attr-defined]

    with put(GatheredUnit, "arrived", stale):
        yield


@bug("what is asked for ahead is the step before's", "dp2,zero3", "23", microbatches=2)
def _() -> Iterator[None]:
    """The head is asked for as soon as the last step's weights are there, and taken in the next one."""
    ask = GatheredUnit.ask

    def early(self: GatheredUnit) -> None:
        ask(self)
        if self.name == "norm":
            before, self.early = getattr(self, "early", None), self._coming  # type: ignore[attr-defined]
            done = [each.wait() if hasattr(each, "wait") else each for each in self.early]  # type: ignore[attr-defined]
            self.early = [array * 1.0 for array in done]  # type: ignore[attr-defined]
            self._coming = before or self.early  # type: ignore[attr-defined]

    with put(GatheredUnit, "ask", early):
        yield


@bug("backward does not bring the weights again, and zeros stand for them", "dp2,zero3", "23")
def _() -> Iterator[None]:
    def nothing(self: Any, tape: Any, grad: Any, half: str) -> Iterator[tuple[Any, ...]]:
        if half != "inputs":
            yield ()

    def zeros(shape: tuple[int, ...], dtype: Any, xp: Any) -> Any:
        return xp.broadcast_to(xp.zeros((), dtype), shape)

    with put(share, "absent", zeros), put(unit.Fetched, "walk", nothing), put(unit.Released, "walk", nothing):
        yield


@bug("evaluation sees the weights of before the last update", "dp2,zero1", "23", by="evaluation", steps=1)
def _() -> Iterator[None]:
    with put(RowReducer, "updated", lambda self: None):
        yield

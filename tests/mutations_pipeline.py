"""Bugs that pipelines are known for: the part of `mutations.py` that is about stages, schedules and slices.

What the checker of schedules refuses before the first step counts as found, as it is in real runs.  A schedule that is
only worse (a warm-up that is off by one, and still ends) is no bug: test_mutations.py shows that it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from mutations import bug, clipped_by_own_norm, put

from mpitrain import collectives
from mpitrain.autograd.carry import Carry
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.models import decoder, gpt, transformer
from mpitrain.models.gpt import GPT
from mpitrain.nn import init as initial
from mpitrain.optim.versions import Versions
from mpitrain.parallel.stages import Links
from mpitrain.pipeline import executor, flight, passes, running, schedules
from mpitrain.pipeline.action import Action, Schedule
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import Partition
from mpitrain.pipeline.update import Update

# ----------------------------------------------------------------------------------------------------------- schedules


def changed_rows(change: Any) -> Any:
    """The compute order of a schedule with something done to it."""
    whole = schedules.compute_rows

    def rows(name: str, *, ranks: int, **how: Any) -> Schedule:
        found = whole(name, ranks=ranks, **how)
        return change(found) if ranks > 1 else found

    return put(passes, "compute_rows", rows)


def _swapped(row: list[Action], one: str, other: str) -> list[Action]:
    """A row in which two actions have changed places."""
    at = {str(action): place for place, action in enumerate(row)}
    row = list(row)
    row[at[one]], row[at[other]] = row[at[other]], row[at[one]]
    return row


@bug("a backward comes before its gradient", "pp2", microbatches=2)
def _() -> Iterator[None]:
    whole = passes.with_messages

    def late(rows: Schedule) -> Schedule:
        first, *others = whole(rows)
        return [_swapped(first, "RECV_B0@0", "B0@0"), *others]

    with put(passes, "with_messages", late):
        yield


@bug("a backward comes before its forward", "pp2", microbatches=2)
def _() -> Iterator[None]:
    with changed_rows(lambda rows: [*rows[:-1], _swapped(rows[-1], "F1@1", "B1@1")]):
        yield


@bug("the warm-up of the first stage is too short for the second's", "pp3", microbatches=4)
def _() -> Iterator[None]:
    alone = schedules.one_f_one_b(1, 4)[0]
    with changed_rows(lambda rows: [alone, *rows[1:]]):
        yield


@bug("the chunks of a rank go back in the order of forward", "pp2,interleaved", microbatches=4, layers=4)
def _() -> Iterator[None]:
    def reversed_chunks(rows: Schedule) -> Schedule:
        stages = [sorted({action.stage for action in row}) for row in rows]
        return [
            [a if a.kind == "F" else a._replace(stage=of[len(of) - 1 - of.index(a.stage)]) for a in row]
            for row, of in zip(rows, stages, strict=True)
        ]

    with changed_rows(reversed_chunks):
        yield


@bug("a rank's chunks are neighbours in place of every p-th", "pp2,interleaved", microbatches=4, layers=4)
def _() -> Iterator[None]:
    def neighbours(partition: Any, layers: int, axis: Any) -> tuple[int, ...]:
        per = partition.stages // axis.size
        return tuple(range(axis.rank * per, (axis.rank + 1) * per))

    with put(decoder, "stages_here", neighbours):
        yield


@bug("W is left out on one stage", "pp2,zb-h1", microbatches=2)
def _() -> Iterator[None]:
    run = Executor._run

    def skipped(self: Executor, action: Action, running: Any, place: int) -> None:
        if action.kind == "W" and self.mesh.pp.rank == 0:
            running.flying.pop(flight.key_of(action))
        else:
            run(self, action, running, place)

    with put(Executor, "_run", skipped):
        yield


@bug("W is done twice", "pp2,zb-h1", microbatches=2)
def _() -> Iterator[None]:
    run = Executor._run

    def twice(self: Executor, action: Action, running: Any, place: int) -> None:
        if action.kind != "W":
            run(self, action, running, place)
            return
        parameters = self.model.parameters()
        before = [p.grad.copy() if p.touched else np.zeros_like(p.grad) for p in parameters]
        run(self, action, running, place)
        for p, grad in zip(parameters, before, strict=True):
            if p.touched:
                p.grad += p.grad - grad

    with put(Executor, "_run", twice):
        yield


@bug("sends block", "pp2", "C41, T7.4", microbatches=4)
def _() -> Iterator[None]:
    send, plan = Links.send, running.RowPlan.__init__

    def blocking(self: Links, *message: Any) -> None:
        send(self, *message)
        self.finish()  # small ones pass under MPI, which buffers them; between threads none does

    def when_needed(self: Any, *args: Any) -> None:
        plan(self, *args)
        self.next_receive = {}

    with put(Links, "send", blocking), put(running.RowPlan, "__init__", when_needed):
        yield


# ------------------------------------------------------------------------------------------------------------ messages


def _sent(change: Any) -> Any:
    """`Links.send` with something done to (kind, unit, arrays)."""
    whole = Links.send

    def send(self: Links, kind: str, stage: int, unit: int, arrays: Sequence[Any]) -> None:
        whole(self, kind, stage, *change(kind, unit, arrays))

    return put(Links, "send", send)


@bug("activations of two micro-batches have each other's tag", "pp2", microbatches=2)
def _() -> Iterator[None]:
    with _sent(lambda kind, unit, arrays: (unit ^ 1 if kind == "F" else unit, arrays)):
        yield


@bug("gradients of two micro-batches have each other's tag", "pp2,gpipe", microbatches=2)
def _() -> Iterator[None]:
    with _sent(lambda kind, unit, arrays: (unit ^ 1 if kind == "B" else unit, arrays)):
        yield


@bug("the gradient of a boundary is dropped", "pp2")
def _() -> Iterator[None]:
    with _sent(lambda kind, unit, arrays: (unit, arrays if kind == "F" else [np.zeros_like(a) for a in arrays])):
        yield


@bug("an array is written again before it has arrived", "pp2,gpipe", "1.4 rule 2", microbatches=4)
def _() -> Iterator[None]:
    whole = Communicator.isend

    def isend(self: Communicator, x: Any, *where: int) -> Any:
        mine = np.array(x)
        request = whole(self, mine, *where)
        mine *= 0.5
        return request

    with put(Communicator, "isend", isend):
        yield


@bug("the gradient of an earlier micro-batch is used again", "pp2", microbatches=2)
def _() -> Iterator[None]:
    whole = Executor._backward
    kept: dict[int, Any] = {}

    def stale(self: Executor, action: Action, run: Any, place: int) -> None:
        key = flight.key_of(action)
        if key in run.gradients:
            run.gradients[key] = kept.setdefault(id(run), run.gradients[key])
        whole(self, action, run, place)

    with put(Executor, "_backward", stale):
        yield


@bug("the last stage takes the tokens of another micro-batch", "pp2", microbatches=2)
def _() -> Iterator[None]:
    split = Batch.split

    def reversed_on_the_last(self: Batch, parts: int) -> list[Batch]:
        found = split(self, parts)
        return found[::-1] if world().rank == 1 else found

    with put(Batch, "split", reversed_on_the_last):
        yield


@bug("a stage hands a copy to every rank of tp", "pp2,tp2", seen=True)
def _() -> Iterator[None]:
    whole = GPT._stage

    def copied(self: GPT, stage: int, *args: Any) -> Tensor:
        y = whole(self, stage, *args)
        return collectives.copy(y, self.tp) if stage < self.num_stages - 1 else y

    with put(GPT, "_stage", copied):
        yield


@bug("one rank of tp sends its micro-batches in another order", "pp2,tp2", seen=True, microbatches=2)
def _() -> Iterator[None]:
    with _sent(lambda kind, unit, arrays: (unit ^ 1 if kind == "F" and world().rank == 1 else unit, arrays)):
        yield


# ---------------------------------------------------------------------------------------------------------------- loss


def _seeded(targets_of: Any) -> Any:
    """`Executor._backward` with another number of targets in the seed; `targets_of(run, batch's, micro's)`."""
    whole = Executor._backward

    def seeded(self: Executor, action: Action, run: Any, place: int) -> None:
        right = run.targets[0]
        run.targets[0] = targets_of(run, right, run.micros[0][action.micro].count)
        whole(self, action, run, place)
        run.targets[0] = right

    return put(Executor, "_backward", seeded)


@bug("the gradient is a mean of the micro-batches' means", "pp2", "C24, T2.1", microbatches=2, padded=True)
def _() -> Iterator[None]:
    with _seeded(lambda run, targets, count: len(run.micros[0]) * count):
        yield


@bug("every backward divides by the targets of its own micro-batch", "pp2", "C24", microbatches=2)
def _() -> Iterator[None]:
    with _seeded(lambda run, targets, count: count):
        yield


@bug("the loss is divided once more by the number of micro-batches", "pp2", microbatches=2)
def _() -> Iterator[None]:
    with _seeded(lambda run, targets, count: targets * len(run.micros[0])):
        yield


@bug("the loss is that of the last micro-batch", "pp2", microbatches=2)
def _() -> Iterator[None]:
    whole = Executor._forward

    def last(self: Executor, action: Action, run: Any) -> None:
        run.losses[0] = []
        whole(self, action, run)

    with put(Executor, "_forward", last):
        yield


@bug("each micro-batch's gradient overwrites that of the one before", "pp2", microbatches=2)
def _() -> Iterator[None]:
    whole = Executor._backward

    def fresh(self: Executor, action: Action, run: Any, place: int) -> None:
        self.model.start_step()
        whole(self, action, run, place)

    with put(Executor, "_backward", fresh):
        yield


@bug("buckets leave after the first micro-batch", "pp2,dp2", reducer="bucketed", microbatches=2)
def _() -> Iterator[None]:
    init = running.RowPlan.__init__

    def early(self: Any, *args: Any) -> None:
        init(self, *args)
        self.last_walks = {place for place, action in enumerate(self.row) if action.kind == "B" and action.micro == 0}

    with put(running.RowPlan, "__init__", early):
        yield


@bug("evaluation counts targets on every stage", "pp2", by="evaluation")
def _() -> Iterator[None]:
    whole = Executor._pass

    def counted(self: Executor, stage: int, batch: Any, unit: int, made: Any) -> None:
        whole(self, stage, batch, unit, made)
        made.setdefault(self.model.num_stages - 1, (Tensor(np.zeros(())),))

    with put(Executor, "_pass", counted):
        yield


@bug("evaluation gives a stage the tokens of the batch before", "pp2", by="evaluation")
def _() -> Iterator[None]:
    whole = Executor._pass
    before: dict[int, Any] = {}

    def late(self: Executor, stage: int, batch: Any, unit: int, made: Any) -> None:
        last = stage == self.model.num_stages - 1
        given, before[id(self)] = before.get(id(self), batch) if last else batch, batch
        whole(self, stage, given, unit, made)

    with put(Executor, "_pass", late):
        yield


# ------------------------------------------------------------------------------------------------------ tied, and norms


@bug("the tied gradient of the other end is lost", "pp2", "C44", tied=True)
def _() -> Iterator[None]:
    with put(executor, "sum_over_ends", lambda parameters, mesh, done: None):
        yield


@bug("the tied gradient is a mean over the ends", "pp3", "C44", tied=True, layers=3)
def _() -> Iterator[None]:
    whole = executor.sum_over_ends

    def mean(parameters: Any, mesh: Any, done: Any) -> None:
        whole(parameters, mesh, done)
        for p in parameters:
            if p.spec.tied:
                p.grad /= mesh.ends.size

    with put(executor, "sum_over_ends", mean):
        yield


@bug("tied gradients are summed over all stages", "pp2,dp2", "C44", tied=True)
def _() -> Iterator[None]:
    whole = executor.sum_over_ends

    def over_all(parameters: Any, mesh: Any, done: Any) -> None:
        whole(parameters, mesh, done)
        for p in parameters:
            if p.spec.tied:
                p.grad[...] = mesh.merged(("pp", "dp")).all_reduce(p.grad)

    with put(executor, "sum_over_ends", over_all):
        yield


@bug("a tied weight counts twice in the norm", "pp2", "C29, C44", tied=True, clip=0.01)
def _() -> Iterator[None]:
    with put(Update, "_counts", lambda self, p: all(i == 0 for axis, i in self._mesh.coords.items() if axis != "pp")):
        yield


@bug("the two copies of a tied weight start from other numbers", "pp2", "C44", tied=True)
def _() -> Iterator[None]:
    whole = GPT.materialize

    def other(self: GPT, mesh: Any, seed: int = 0, *args: Any, **more: Any) -> None:
        whole(self, mesh, seed + mesh.coords["pp"], *args, **more)

    with put(GPT, "materialize", other):
        yield


@bug("every stage clips by its own norm", "pp2", "C28", clip=0.01)
def _() -> Iterator[None]:
    with clipped_by_own_norm():
        yield


@bug("the norm leaves out the stages after the first", "pp2,tp2", "C28", clip=0.01)
def _() -> Iterator[None]:
    whole = Update._counts
    with put(Update, "_counts", lambda self, p: self._mesh.coords["pp"] == 0 and whole(self, p)):
        yield


# --------------------------------------------------------------------------------------------------------------- model


@bug("dropout is drawn by the layer's number on its stage", "pp2", "C36", dropout=0.3)
def _() -> Iterator[None]:
    init = GPT.__init__

    def local(self: GPT, *args: Any, **how: Any) -> None:
        init(self, *args, **how)
        for number, block in enumerate(self.blocks):
            block.drop1.name, block.drop2.name = f"blocks.{number}.drop1", f"blocks.{number}.drop2"

    with put(GPT, "__init__", local):
        yield


@bug("attention drops by the layer's number on its stage", "pp2", "C36", dropout=0.3)
def _() -> Iterator[None]:
    init = GPT.__init__

    def local(self: GPT, *args: Any, **how: Any) -> None:
        init(self, *args, **how)
        for number, block in enumerate(self.blocks):
            block.attention.name = f"blocks.{number}.attention"

    with put(GPT, "__init__", local):
        yield


@bug("dropout is drawn by a row's place in its micro-batch", "pp2", "C36", dropout=0.3, microbatches=2)
def _() -> Iterator[None]:
    whole = Batch.draw

    def local(self: Batch, seed: int) -> Any:
        found = whole(self, seed)
        return found._replace(places=np.arange(len(found.places))) if found is not None else None

    with put(Batch, "draw", local):
        yield


@bug("initial weights are drawn by the layer's number on its stage", "pp2")
def _() -> Iterator[None]:
    block = transformer.Block.__init__

    def local(self: Any, number: int, config: Any, cuts: Any) -> None:
        block(self, number, config, cuts)
        for p in self.parameters():
            init, first = p.init, p.name.replace(f"blocks.{number}.", "blocks.0.")
            p.init = lambda _, *where, init=init, first=first: init(first, *where)

    with put(transformer.Block, "__init__", local):
        yield


def _ranges(change: Any) -> Any:
    """`Partition.range` with something done to a stage's first and last block."""
    whole = Partition.range

    def blocks(self: Partition, stage: int) -> range:
        found = whole(self, stage)
        return change(stage, found) if self.stages > 1 else found

    return put(Partition, "range", blocks)


@bug("the block at a boundary is on both its stages", "pp2", layers=4)
def _() -> Iterator[None]:
    with _ranges(lambda stage, blocks: range(blocks.start - 1, blocks.stop) if stage else blocks):
        yield


@bug("the block at a boundary is on no stage", "pp2", layers=4)
def _() -> Iterator[None]:
    with _ranges(lambda stage, blocks: range(blocks.start + 1, blocks.stop) if stage else blocks):
        yield


def _staged(change: Any) -> Any:
    """`GPT._stage` with something done to its output: change(model, stage, y, pass)."""
    whole = GPT._stage

    def staged(self: GPT, stage: int, tokens: Any, this: Any, *inputs: Tensor) -> Tensor:
        y = whole(self, stage, tokens, this, *inputs)
        return change(self, stage, y, this) if self.num_stages > 1 else y

    return put(GPT, "_stage", staged)


@bug("a stage goes through its last block twice", "pp2")
def _() -> Iterator[None]:
    with _staged(lambda model, stage, y, this: y if stage else model.blocks[-1](y, this)):
        yield


@bug("learned positions are added on every stage", "pp2")
def _() -> Iterator[None]:
    def positions(model: GPT, stage: int, y: Tensor, this: Any) -> Tensor:
        shape = (model.config.seq_len, model.config.width)
        whole = initial.sinusoids(0.5)("positions.weight", shape, (slice(0, shape[0]), slice(0, shape[1])), model.seed)
        return y + Tensor(whole) if stage else y

    with _staged(positions):
        yield


@bug("a stage without a block hands on nothing", "pp3", "C46", layers=2, stage_layers="1,0,1")
def _() -> Iterator[None]:
    with _staged(lambda model, stage, y, this: y * 0.0 if not model.partition.range(stage) else y):
        yield


@bug("every stage puts a norm before what it hands on", "pp2")
def _() -> Iterator[None]:
    def normed(model: GPT, stage: int, y: Tensor, this: Any) -> Tensor:
        return gpt.ops.layer_norm(y, *(Tensor(np.full(model.config.width, value)) for value in (1.0, 0.0)), 1e-5)

    with _staged(normed):
        yield


# -------------------------------------------------------------------------------------------------------------- slices


@bug("gradients of the keys of earlier slices are dropped", "pp2,terapipe", "15.1")
def _() -> Iterator[None]:
    whole = Carry.seeds
    with put(Carry, "seeds", lambda self, part: whole(self, part)[:0]):
        yield


@bug("slices do not see the keys of earlier ones", "pp2,terapipe")
def _() -> Iterator[None]:
    with put(Carry, "earlier", lambda self, name: []):
        yield


@bug("slices see the keys of the first one only", "pp2,terapipe")
def _() -> Iterator[None]:
    whole = Carry.earlier
    with put(Carry, "earlier", lambda self, name: whole(self, name)[:1]):
        yield


@bug("keys of earlier slices stand in the wrong order", "pp2,terapipe", dropout=0.3)
def _() -> Iterator[None]:
    whole = Carry.earlier
    with put(Carry, "earlier", lambda self, name: whole(self, name)[::-1]):
        yield


@bug("the last slice of a sequence goes first", "pp2,terapipe")
def _() -> Iterator[None]:
    whole = Batch.slices
    with put(Batch, "slices", lambda self, lengths: whole(self, lengths)[::-1]):
        yield


@bug("every slice counts its positions from zero", "pp2,terapipe")
def _() -> Iterator[None]:
    whole = Batch.slices

    def local(self: Batch, lengths: Any) -> list[Batch]:
        return [replace(each, positions=np.arange(len(each.positions))) for each in whole(self, lengths)]

    with put(Batch, "slices", local):
        yield


@bug("targets are shifted slice by slice", "pp2,terapipe")
def _() -> Iterator[None]:
    whole = Batch.slices

    def shifted(self: Batch, lengths: Any) -> list[Batch]:
        return [
            replace(each, targets=np.concatenate([each.inputs[:, 1:], each.inputs[:, :1]], 1))
            for each in whole(self, lengths)
        ]

    with put(Batch, "slices", shifted):
        yield


@bug("a step counts the targets of the first slices only", "pp2,terapipe", "T2.1")
def _() -> Iterator[None]:
    whole = Executor._count

    def first(self: Executor, number: int, run: Any) -> None:
        whole(self, number, run)
        run.targets[number] //= 1 + max(part for _, part in run.parts)

    with put(Executor, "_count", first):
        yield


# ------------------------------------------------------------------------------------------------- late weights


@bug("2BW computes with the newest weights", "pp2,pipedream-2bw", "T8.4", microbatches=2)
def _() -> Iterator[None]:
    init = Versions.__init__
    with put(Versions, "__init__", lambda self, flats, optimizer, rule: init(self, flats, optimizer, "newest")):
        yield


def _entered(number_of: Any) -> Any:
    """`Versions.enter` with another version; number_of(versions, batch)."""

    def enter(self: Versions, unit: Any, batch: int) -> int:
        number = self._held[unit] = number_of(self, batch)
        self._bind(self._alive[number])
        return number

    return put(Versions, "enter", enter)


@bug("PipeDream computes with the weights that an earlier micro-batch still holds", "pp2,pipedream", "T8.1", clip=0.0)
def _() -> Iterator[None]:
    with _entered(lambda versions, batch: min(versions._alive)):
        yield


@bug(
    "a pipeline that never drains does not use what the last row has learned",
    "pp2,pipedream-2bw",
    by="evaluation",
    microbatches=2,
)
def _() -> Iterator[None]:
    settle = Versions.settle

    def stay(self: Versions) -> None:
        old = self._bound if self._bound is not self._newest else next(iter(self._alive.values()))
        settle(self)
        self._bind(old)

    with put(Versions, "settle", stay):
        yield


@bug("gradients of an earlier batch are added to those of the next", "pp2,pipedream", clip=0.0)
def _() -> Iterator[None]:
    whole = Update.make

    def added(self: Update, *numbers: Any) -> Any:
        report = whole(self, *numbers)
        if self.versions is not None:
            for p in self._model.parameters():
                p.touched = True
        return report

    with put(Update, "make", added):
        yield


@bug("an update starts from the weights of the last forward", "pp2,pipedream-2bw", microbatches=2)
def _() -> Iterator[None]:
    renew = Versions.renew

    def from_bound(self: Versions) -> None:
        bound = [weights.copy() for weights in self._bound.weights]
        renew(self)
        for mine, last in zip(self._newest.weights, bound, strict=True):
            mine[...] = last

    with put(Versions, "renew", from_bound):
        yield


@bug("the learning rate does not go on within a row", "pp2,pipedream-2bw", microbatches=2)
def _() -> Iterator[None]:
    whole = Executor._run_row

    def same(self: Executor, batches: Any) -> Any:
        rate = self._update._lr(self.optimizer.updates)
        with put(self._update, "_lr", lambda update: rate):
            return whole(self, batches)

    with put(Executor, "_run_row", same):
        yield

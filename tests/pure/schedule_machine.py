"""A machine that runs schedules with real values: the second opinion on the checker's verdicts.

It shares nothing with the checker but the form of an action.  Every rank has dictionaries for what it holds; every
message is a number in a queue of its own.  A stage is y = w x + u (sum of x of the earlier slices) + (targets of the
step), in arithmetic modulo a prime; its backward accumulates the gradients of w and u.  A schedule is right if every
rank can do its row to the end, nothing is left over, and each update applies the very gradients that a plain loop over
the micro-batches computes.

Every rule of the machine is about values: what is taken must be there, what is put must not be there yet.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

from mpitrain.pipeline.action import Action, Schedule

PRIME = 1_000_003


class WrongError(Exception):
    """The schedule computes something else, or cannot go on for another reason than waiting."""


def verdict(rows: Schedule, synchronous: bool = False, seed: int = 0) -> str | None:
    """Run rows; None if they are right.

    Returns:
        "deadlock: rank 0 at ...; ..." where ranks wait for ever, "wrong: ..." for any other fault.
    """
    try:
        return _Machine(rows, random.Random(seed)).run(synchronous)
    except WrongError as error:
        return f"wrong: {error}"


def take(store: dict, key: Any, what: str) -> Any:
    if key not in store:
        raise WrongError(f"no {what} {key}")
    return store.pop(key)


def look(store: dict, key: Any, what: str) -> Any:
    if key not in store:
        raise WrongError(f"no {what} {key}")
    return store[key]


def put(store: dict, key: Any, value: Any, what: str) -> None:
    if key in store:
        raise WrongError(f"{what} {key} is there already")
    store[key] = value


class _Rank:
    """What one rank holds."""

    def __init__(self, first_stage: int) -> None:
        self.first_stage = first_stage
        self.data: dict[int, int] = {}  # micro-batch: its input
        self.targets: dict[int, int] = {}  # batch: how many micro-batches were there when they were counted
        self.inputs: dict[tuple, int] = {}  # (stage, micro, part): what came for F
        self.outputs: dict[tuple, int] = {}  # what F made and must be sent
        self.grads: dict[tuple, int] = {}  # what came for B
        self.input_grads: dict[tuple, int] = {}  # what B made and must be sent
        self.tapes: dict[tuple, tuple[int, int]] = {}  # (x, sum of x of earlier slices)
        self.weight_side: dict[tuple, tuple[int, int, int]] = {}  # what W needs
        self.seen: dict[tuple, int] = {}  # (stage, micro, part): x, while the sequence is under way
        self.later: dict[tuple, int] = {}  # (stage, micro, part): gradient of y of slices whose B is done
        self.summed: dict[int, dict[int, tuple[int, int]]] = {}  # batch: gradients by stage, reduced
        self.accumulated: dict[int, tuple[int, int]] = {}  # stage: gradients so far
        self.done: list[int] = []  # batches by which weights were updated


class _Machine:
    def __init__(self, rows: Schedule, rng: random.Random) -> None:
        self.rows = rows
        self.rng = rng
        forwards = [(rank, action) for rank, row in enumerate(rows) for action in row if action.kind == "F"]
        self.rank_of: dict[int, int] = {}
        for rank, action in forwards:
            if self.rank_of.setdefault(action.stage, rank) != rank:
                raise WrongError(f"stage {action.stage} is on two ranks")
        if set(self.rank_of.values()) != set(range(len(rows))):
            raise WrongError("a rank without a stage")
        self.num_stages = 1 + max(self.rank_of)
        if len(self.rank_of) != self.num_stages:
            raise WrongError("a stage that no rank has")
        self.slices: dict[int, set[int | None]] = defaultdict(set)
        for _, action in forwards:
            if action.micro is None:
                raise WrongError("an F of no micro-batch")
            self.slices[action.micro].add(action.part)
        self.num_micros = 1 + max(self.slices)
        for micro in range(self.num_micros):
            parts = self.slices[micro]
            if parts != {None} and parts != set(range(len(parts))):
                raise WrongError(f"micro-batch {micro} is not cut into slices 0, 1, ...")
        numbers = {action.micro for row in rows for action in row if action.kind in ("COUNT", "REDUCE", "STEP")}
        self.numbered = numbers != {None}
        if self.numbered and None in numbers:
            raise WrongError("batches with and without a number")
        num_batches = 1 + max(numbers) if self.numbered and numbers else 1
        self.batches = range(num_batches)
        if self.num_micros % num_batches:
            raise WrongError("batches of different sizes")
        self.size = self.num_micros // num_batches
        self.split = {action.stage for row in rows for action in row if action.kind == "W"}
        firsts = [min(s for s, on in self.rank_of.items() if on == rank) for rank in range(len(rows))]
        self.ranks = [_Rank(first) for first in firsts]
        self.wire: dict[tuple, int] = {}
        self.w = [rng.randrange(1, PRIME) for _ in range(self.num_stages)]
        self.u = [rng.randrange(1, PRIME) for _ in range(self.num_stages)]
        self.x = [rng.randrange(1, PRIME) for _ in range(self.num_micros)]

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, synchronous: bool) -> str | None:
        place = [0] * len(self.rows)

        def head(rank: int) -> Action | None:
            return self.rows[rank][place[rank]] if place[rank] < len(self.rows[rank]) else None

        moved = True
        while moved:
            moved = False
            for rank in self.rng.sample(range(len(self.rows)), len(self.rows)):
                while (action := head(rank)) is not None:
                    if action.kind.startswith("RECV") and self._message(action) not in self.wire:
                        break
                    if synchronous and action.kind.startswith("SEND"):
                        other = self._receiver(action)
                        meeting = head(other) if other is not None and other != rank else None
                        if meeting is None or not self._meet(action, meeting):
                            break
                        self._do(action, rank)
                        self._do(meeting, other)
                        place[other] += 1
                    else:
                        self._do(action, rank)
                    place[rank] += 1
                    moved = True
        stuck = [f"rank {rank} at {head(rank)}" for rank in range(len(self.rows)) if head(rank) is not None]
        if stuck:
            return "deadlock: " + "; ".join(stuck)
        self._compare()
        return None

    def _message(self, action: Action) -> tuple:
        """A message by direction, sender, micro-batch and slice."""
        kind, micro, stage, part = action
        sender = stage if kind.startswith("SEND") else stage - 1 if kind == "RECV_F" else stage + 1
        return kind[-1], sender, micro, part

    def _receiver(self, action: Action) -> int | None:
        return self.rank_of.get(action.stage + (1 if action.kind == "SEND_F" else -1))

    def _meet(self, send: Action, recv: Action) -> bool:
        return recv.kind.startswith("RECV") and self._message(send) == self._message(recv)

    # -- actions --------------------------------------------------------------------------------------------------

    def _do(self, action: Action, number: int) -> None:
        rank = self.ranks[number]
        kind, micro, stage, part = action
        key = stage, micro, part
        if kind in ("LOAD", "COUNT", "REDUCE", "STEP") and (stage != rank.first_stage or part is not None):
            raise WrongError(f"{action} is not of the rank")
        here = self.rank_of.get(stage) == number
        if not here:
            raise WrongError(f"{action} is of a stage elsewhere")
        if kind in ("COUNT", "REDUCE", "STEP"):
            batch = 0 if micro is None else micro
            return {"COUNT": self._count, "REDUCE": self._reduce, "STEP": self._step}[kind](rank, batch)
        if not (isinstance(micro, int) and 0 <= micro < self.num_micros):
            raise WrongError(f"{action}: no such micro-batch")
        match kind:
            case "LOAD":
                put(rank.data, micro, self.x[micro], "data of micro-batch")
            case "F":
                self._forward(rank, number, key)
            case "B":
                self._backward(rank, number, key)
            case "W":
                x, before, gradient = take(rank.weight_side, key, "gradients for W of")
                self._accumulate(rank, stage, x, before, gradient)
            case "SEND_F":
                if self.rank_of.get(stage + 1) in (None, number):
                    raise WrongError(f"{action} has no receiver")
                put(self.wire, self._message(action), take(rank.outputs, key, "output of"), "message")
            case "SEND_B":
                if self.rank_of.get(stage - 1) in (None, number):
                    raise WrongError(f"{action} has no receiver")
                put(self.wire, self._message(action), take(rank.input_grads, key, "input gradient of"), "message")
            case "RECV_F":
                put(rank.inputs, key, self.wire.pop(self._message(action)), "input of")
            case "RECV_B":
                put(rank.grads, key, self.wire.pop(self._message(action)), "gradient of")
            case _:
                raise WrongError(f"what is {action}?")

    def _count(self, rank: _Rank, batch: int) -> None:
        loaded = sum(micro // self.size == batch for micro in rank.data)
        put(rank.targets, batch, loaded, "count of batch")

    def _forward(self, rank: _Rank, number: int, key: tuple) -> None:
        stage, micro, part = key
        data, targets = look(rank.data, micro, "data of"), look(rank.targets, micro // self.size, "count of batch")
        if part not in self.slices[micro]:
            raise WrongError(f"no such slice {key}")
        x = take(rank.inputs, key, "input of") if stage else data + (part or 0)
        before = sum(look(rank.seen, (stage, micro, i), "keys of") for i in range(part or 0))
        put(rank.seen, key, x, "keys of")
        put(rank.tapes, key, (x, before), "tape of")
        y = (self.w[stage] * x + self.u[stage] * before + targets) % PRIME
        if stage + 1 < self.num_stages:
            where = rank.inputs if self.rank_of[stage + 1] == number else rank.outputs
            put(where, (stage + 1, micro, part) if where is rank.inputs else key, y, "output of")

    def _backward(self, rank: _Rank, number: int, key: tuple) -> None:
        stage, micro, part = key
        x, before = take(rank.tapes, key, "tape of")
        last = stage + 1 == self.num_stages
        gradient = (
            look(rank.targets, micro // self.size, "count of batch") if last else take(rank.grads, key, "grad of")
        )
        later = [] if part is None else range(part + 1, len(self.slices[micro]))
        after = sum(look(rank.later, (stage, micro, i), "gradient of keys by") for i in later)
        put(rank.later, key, gradient, "gradient of keys by")
        if stage in self.split:
            put(rank.weight_side, key, (x, before, gradient), "gradients for W of")
        else:
            self._accumulate(rank, stage, x, before, gradient)
        if stage:
            down = (self.w[stage] * gradient + self.u[stage] * after) % PRIME
            where = rank.grads if self.rank_of[stage - 1] == number else rank.input_grads
            put(where, (stage - 1, micro, part) if where is rank.grads else key, down, "input gradient of")

    def _accumulate(self, rank: _Rank, stage: int, x: int, before: int, gradient: int) -> None:
        w, u = rank.accumulated.get(stage, (0, 0))
        rank.accumulated[stage] = (w + x * gradient) % PRIME, (u + before * gradient) % PRIME

    def _reduce(self, rank: _Rank, batch: int) -> None:
        """Other ranks may wait for this one here, so nothing that they need may be left to do."""
        for held in (rank.inputs, rank.outputs, rank.grads, rank.input_grads, rank.tapes, rank.weight_side):
            if any(micro // self.size == batch for _, micro, _ in held):
                raise WrongError(f"batch {batch} is not done")
        seen = {key for key in rank.later if key[1] // self.size == batch}
        due = [
            (stage, micro, part)
            for stage, on in self.rank_of.items()
            if self.ranks[on] is rank
            for micro in range(batch * self.size, (batch + 1) * self.size)
            for part in self.slices[micro]
        ]
        if seen != set(due):
            raise WrongError(f"batch {batch} is not done")
        put(rank.summed, batch, dict(rank.accumulated), "sum of batch")

    def _step(self, rank: _Rank, batch: int) -> None:
        if batch != len(rank.done):
            raise WrongError(f"update by batch {batch} after {rank.done}")
        if look(rank.summed, batch, "sum of batch") != self._reference(batch, rank):
            raise WrongError(f"the gradients of batch {batch} are not those of a plain loop")
        rank.done.append(batch)
        rank.accumulated = {}

    # -- the plain loop -------------------------------------------------------------------------------------------

    def _reference(self, batch: int, rank: _Rank) -> dict[int, tuple[int, int]]:
        """The gradients of the stages of a rank, by loops over the micro-batches of a batch."""
        sums = {stage: (0, 0) for stage, on in self.rank_of.items() if self.ranks[on] is rank}
        for micro in range(batch * self.size, (batch + 1) * self.size):
            num = len(self.slices[micro])
            xs = [[(self.x[micro] + part) for part in range(num)]]
            for w, u in zip(self.w, self.u, strict=True):
                xs.append([(w * x + u * sum(xs[-1][:i]) + self.size) % PRIME for i, x in enumerate(xs[-1])])
            gradient = [self.size] * num
            for stage in reversed(range(self.num_stages)):
                w, u = self.w[stage], self.u[stage]
                if stage in sums:
                    dw = sum(x * g for x, g in zip(xs[stage], gradient, strict=True))
                    du = sum(sum(xs[stage][:i]) * g for i, g in enumerate(gradient))
                    sums[stage] = (sums[stage][0] + dw) % PRIME, (sums[stage][1] + du) % PRIME
                gradient = [(w * g + u * sum(gradient[i + 1 :])) % PRIME for i, g in enumerate(gradient)]
        return sums

    def _compare(self) -> None:
        if self.wire:
            raise WrongError(f"messages that nobody received: {list(self.wire)}")
        for rank in self.ranks:
            if rank.done != list(self.batches) or set(rank.targets) != set(self.batches):
                raise WrongError(f"updates by {rank.done}")
            if len(rank.data) != self.num_micros:
                raise WrongError("a micro-batch that was not loaded")
            if rank.accumulated or len(rank.summed) != len(self.batches):
                raise WrongError("gradients that no update used")
            if any((rank.inputs, rank.outputs, rank.grads, rank.input_grads, rank.tapes, rank.weight_side)):
                raise WrongError("something is left over")

"""Values that are not finite, put into a step at any place, as checks that any world can run.

A healthy step is looked at once: which ops, sums and messages it has, on every rank.  Places are drawn from these.  At
each a value is spoiled for a step, every time it comes by; the step must be refused on all ranks with the same words,
which name the place, and change nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from checks_layouts import numbers, reducer

from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import Lazy
from mpitrain.autograd.tape import PATH
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.errors import NumericsError
from mpitrain.events import Event, listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.adam import AdamW
from mpitrain.pipeline.action import parse
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.finding import Finding
from mpitrain.pipeline.partition import balance
from mpitrain.pipeline.passes import complete

SIZES = GPTConfig(vocab=17, layers=4, width=16, heads=4, seq_len=8, dropout=0.1)
IN_FLIGHT = ("isend", "iall_reduce", "iall_gather", "ireduce_scatter", "iall_to_all")
"""Verbs that return before anything has come."""
VERBS = (*IN_FLIGHT, "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift")
FEW = 8
"""Elements that are spoiled: dropout may drop one."""
UNUSED = "unused"
IN_ADVANCE = 2
"""Steps that are made before anything is spoiled."""


class Place(NamedTuple):
    """Where to spoil what.

    where: forward, backward, gradient, wire (what a rank gives to a message), landing (what a message brings it),
    weight, first_moment or second_moment; rank: in the world; action: in which; path: of the module, or a parameter's
    name; name: of the op, or verb; nth: of those of this name in this action.
    """

    where: str
    rank: int
    action: str = ""
    path: str = ""
    name: str = ""
    nth: int = 0
    axis: str = ""


class Spoil(NamedTuple):
    """A place, and the value that is put there."""

    place: Place
    value: float = np.nan


SPOIL: ContextVar[Spoil | None] = ContextVar("spoil", default=None)
RANK: ContextVar[int] = ContextVar("rank", default=0)
ACTION: ContextVar[str] = ContextVar("action", default="")
SEEN: ContextVar[dict[Any, int] | None] = ContextVar("seen", default=None)


# -- spoiling ---------------------------------------------------------------------------------------------------------


def _hits(where: str, path: str, name: str) -> float | None:
    """The value to put here and now; None: nothing is spoiled here."""
    seen = SEEN.get()
    if seen is None:
        return None
    seen[where, path, name] = nth = seen.get((where, path, name), -1) + 1
    spoil = SPOIL.get()
    here = Place(where, RANK.get(), ACTION.get(), path, name, nth)
    return spoil.value if spoil is not None and spoil.place._replace(axis="") == here else None


def _spoiled(array: Any, value: float) -> Any:
    copy = (array.array() if isinstance(array, Lazy) else np.asarray(array)).copy()
    copy.reshape(-1)[:FEW] = value
    return copy


def _first(arrays: Any, value: float) -> Any:
    """Arrays of which the first that holds numbers is spoiled."""
    if type(arrays) is not tuple:
        return _spoiled(arrays, value)
    for i, array in enumerate(arrays):
        if isinstance(array, Lazy) or (array is not None and array.dtype.kind == "f" and array.size):
            return (*arrays[:i], _spoiled(array, value), *arrays[i + 1 :])
    return arrays


def _functions(base: type = Function) -> Iterator[type[Function]]:
    for cls in base.__subclasses__():
        yield cls
        yield from _functions(cls)


@contextmanager
def spoiling() -> Iterator[None]:
    """Ops, sums and messages of this process ask whether they are to be spoiled."""
    with ExitStack() as stack:

        def replace(owner: type, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, new))

        for cls in set(_functions()):
            if "forward" in vars(cls):
                replace(cls, "forward", staticmethod(_forward_of(cls.forward, cls.title())))
            if "backward" in vars(cls):
                replace(cls, "backward", staticmethod(_backward_of(cls.backward, cls.title())))
        replace(Parameter, "accumulate", _accumulate_of(Parameter.accumulate))
        for verb in VERBS:
            replace(Communicator, f"_{verb}", _verb_of(getattr(Communicator, f"_{verb}"), verb))
        replace(Executor, "_run", _run_of(Executor._run))
        yield


def _forward_of(forward: Callable[..., Any], title: str) -> Callable[..., Any]:
    def spoiled(*arrays: Any, **static: Any) -> Any:
        y, saved = forward(*arrays, **static)
        value = _hits("forward", PATH.get(), title)
        return (y if value is None else _first(y, value)), saved

    return spoiled


def _backward_of(backward: Callable[..., Any], title: str) -> Callable[..., Any]:
    def spoiled(grad: Any, *saved: Any, wanted: Any, **static: Any) -> Any:
        grads = backward(grad, *saved, wanted=wanted, **static)
        value = _hits("backward", "", title)
        return grads if value is None else _first(tuple(grads), value)

    return spoiled


def _accumulate_of(accumulate: Callable[..., Any]) -> Callable[..., Any]:
    def spoiled(self: Parameter, grad: Any) -> None:
        accumulate(self, grad)
        value = _hits("gradient", self.name, "")
        if value is not None:
            self.grad.reshape(-1)[:FEW] = value

    return spoiled


def _verb_of(move: Callable[..., Any], verb: str) -> Callable[..., Any]:
    def spoiled(self: Communicator, a: Any, *how: Any) -> Any:
        if a.dtype.kind != "f":
            return move(self, a, *how)
        value = _hits("wire", "", verb)
        moved = move(self, a if value is None else _spoiled(a, value), *how)
        value = None if verb in IN_FLIGHT else _hits("landing", "", verb)
        if value is not None:
            moved.reshape(-1)[:FEW] = value
        return moved

    return spoiled


def _run_of(run: Callable[..., Any]) -> Callable[..., Any]:
    def watched(self: Executor, action: Any, *rest: Any) -> None:
        ACTION.set(str(action))
        SEEN.set({} if str(action) != "STEP@0" and action.kind != "STEP" else None)
        try:
            run(self, action, *rest)
        finally:
            SEEN.set(None)

    return watched


# -- places -----------------------------------------------------------------------------------------------------------


class Survey:
    """A listener that notes the places of a healthy step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.places: list[Place] = []
        self._action = ""
        self._seen: dict[Any, int] = {}
        self._adds = True

    def __call__(self, event: Event) -> None:
        info = event.info
        if event.kind == "action":
            self._action = str(info["action"]) if event.phase == "begin" and info["action"].kind != "STEP" else ""
            self._seen = {}
            splits = any(action.kind == "W" for action in info["executor"].row)
            self._adds = info["action"].kind == ("W" if splits else "B")
        elif not self._action:
            return
        elif event.kind == "op" and event.phase == "end":
            title = event.name.removesuffix(".backward")
            if "grads" not in info:
                self._note("forward", info["path"], title)
            elif any(grad is not None for grad in info["grads"]):
                self._note("backward", "", title, info["path"])
                for slot, grad in zip(info["node"].inputs, info["grads"], strict=True):
                    leaf = info["tape"].leaf(slot)
                    if leaf is not None and leaf.is_parameter and grad is not None and self._adds:
                        self._note("gradient", leaf.name, "")
        elif (event.kind, event.phase) == ("message", "begin") and event.name in VERBS:
            if info["array"].dtype.kind != "f":
                return
            self._note("wire", "", event.name, axis=info["axis"])
            if event.name not in IN_FLIGHT:
                self._note("landing", "", event.name, axis=info["axis"])

    def _note(self, where: str, path: str, name: str, shown: str = "", axis: str = "") -> None:
        key = where, path, name
        self._seen[key] = nth = self._seen.get(key, -1) + 1
        self.places.append(Place(where, self.rank, self._action, shown or path, name, nth, axis))


def draw(places: list[Place], count: int, seed: int) -> list[Place]:
    """Places of all kinds, as many of each as goes."""
    number = random.Random(seed)
    of_kind = [[place for place in places if place.where == kind] for kind in sorted({place.where for place in places})]
    for some in of_kind:
        number.shuffle(some)
    return [place for round in zip_longest(*of_kind) for place in round if place is not None][:count]


# -- the checks -------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What became of one spoiled step on one rank.

    unchanged: it was refused, and weights and moments are as before it; unused: it was made, and gave what a healthy
    one gives: what was spoiled is multiplied by nothing, as what dropout drops.
    """

    place: Place
    text: str
    finding: Finding | None
    seconds: float
    unchanged: bool
    unused: bool


class Trial:
    """An executor after two healthy steps, and the batch of the third.

    Args:
        world: all ranks.
        how: the layout and more: sizes, schedule, chunks, slices, micros, sp, bucketed, dtype, overlap, zero.
    """

    def __init__(self, world: World, **how: Any) -> None:
        self.world = world
        axes = {axis: how[axis] for axis in ("pp", "dp", "ep", "tp", "cp") if axis in how}
        chunks = how.get("chunks", 1)
        self.mesh = mesh = Mesh(world, **axes)
        self.micros = how.get("micros", 2)
        sizes = how.get("sizes", SIZES)
        self.model = GPT(
            sizes,
            mesh,
            sequence_parallel=how.get("sp", False),
            partition=balance([1.0] * sizes.layers, mesh.pp.size * chunks),
            seed=3,
            dtype=how.get("dtype", "f4"),
            expert_overlap=how.get("overlap", False),
            zero=how.get("zero", 0),
        )
        self.shares = self.model.shares()
        self.optimizer = AdamW(self.shares, lr=1e-3)
        slices = how.get("slices")
        rows = complete(
            how.get("schedule", "1f1b"),
            ranks=mesh.pp.size,
            microbatches=self.micros,
            chunks=chunks,
            slices=len(slices or (0,)),
        )
        self.executor = Executor(
            self.model,
            self.optimizer,
            mesh,
            rows,
            reducer=reducer(self.model, mesh, 1 << 12 if how.get("bucketed") else 0),
            clip=1.0,
            slices=slices,
        )
        self.batches = numbers(self.model.config).batches(
            4 * mesh.dp.size, mesh.dp.rank, mesh.dp.size, positions=self.model.positions_here
        )
        self.names = {name for names in world.exchange([p.name for p in self.model.parameters()]) for name in names}
        RANK.set(world.rank)
        for _ in range(IN_ADVANCE):
            self.executor.step(next(self.batches))
        self.batch = next(self.batches)

    def places(self) -> list[Place]:
        """Of all ranks, in a healthy step."""
        survey = Survey(self.world.rank)
        kept = self.state()
        with listen(survey):
            self.executor.step(self.batch)
        self.after = self.state()
        self.put_back(kept)
        mine = dict.fromkeys(survey.places)
        held = [p.name for p in self.shares if p.master.size]
        mine.update((Place("weight", self.world.rank, path=name), None) for name in held)
        for kind in self.optimizer.kinds:
            mine.update((Place("state", self.world.rank, path=name, name=kind), None) for name in held)
        return [Place(*place) for rank in self.world.exchange(list(mine)) for place in rank]

    def state(self) -> list[np.ndarray]:
        """Weights and moments of this rank, copied."""
        moments = [array for of in self.optimizer.state_dict().values() for array in of.values()]
        return [array.copy() for array in (*(p.master for p in self.shares), *moments)]

    def put_back(self, kept: list[np.ndarray]) -> None:
        moments = [array for of in self.optimizer.state_dict().values() for array in of.values()]
        for array, old in zip((*(p.master for p in self.shares), *moments), kept, strict=True):
            array[...] = old
        for flat in self.model.flats:
            flat.refresh()
        self.executor.reducer.updated()
        self.optimizer.updates = IN_ADVANCE

    def spoiled(self, place: Place, value: float = np.nan) -> Outcome:
        """The third step with this place spoiled; afterwards all is as before."""
        healthy = self.state()
        if place.rank == self.world.rank:
            if place.where == "weight":
                p = next(p for p in self.shares if p.name == place.path)
                p.master.reshape(-1)[:FEW] = value
                p.refresh()
            elif place.where == "state":
                self.optimizer.state_dict()[place.name][place.path].reshape(-1)[:FEW] = value
        before = self.state()
        # Backward runs outside of modules: there the path is not known to the op, the place in the order is.
        key = place._replace(path="") if place.where == "backward" else place
        token = SPOIL.set(Spoil(key, value))
        began = time.perf_counter()
        text, finding = "", None
        try:
            self.executor.step(self.batch)
        except NumericsError as error:
            text, finding = str(error), error.autopsy.finding
        finally:
            SPOIL.reset(token)
        seconds = time.perf_counter() - began
        same = _are_equal(before, now := self.state())
        if (
            place.where == "weight" and place.rank == self.world.rank
        ):  # what no token of this rank looks up stays spoiled
            number = [p.name for p in self.shares].index(place.path)
            now[number].reshape(-1)[:FEW] = self.after[number].reshape(-1)[:FEW]
        unused = not text and _are_equal(self.after, now)
        self.put_back(healthy)
        return Outcome(place, text, finding, seconds, same and bool(text), unused)

    def trouble(self, outcome: Outcome) -> str:
        """What is wrong with an outcome; '' where it is as it must be.  Collective."""
        place, found = outcome.place, outcome.finding
        texts = self.world.exchange([outcome.text, outcome.unchanged, outcome.seconds])
        if not any(text for text, _, _ in texts) and all(self.world.exchange(outcome.unused)):
            return UNUSED
        if any(text != texts[0][0] for text, _, _ in texts):
            return f"{place}: ranks say different things"
        if not all(unchanged for _, unchanged, _ in texts):
            return f"{place}: not refused, or something was changed"
        if max(seconds for _, _, seconds in texts) > 10:
            return f"{place}: took too long"
        if found is None:
            return f"{place}: nothing was found: {outcome.text}"
        if not 3 <= outcome.text.count("\n") + 1 <= 5 or max(map(len, outcome.text.split("\n"))) > 250:
            return f"{place}: {outcome.text}"
        told = f"{place}: {found}"
        if found.step != IN_ADVANCE + 1:
            return told
        kinds = {"wire": "message", "landing": "message"}
        if found.kind != kinds.get(place.where, place.where):
            return told
        micro = None
        late = place.name == "iall_reduce" or (place.name == "ireduce_scatter" and self.model.zero == 1)  # at REDUCE
        if place.action and place.action[0] in "FBWS" and not late:
            micro = parse(place.action).micro
        if found.micro != micro:
            return told
        if place.where in ("wire", "landing"):
            verb = "irecv" if place.name == "isend" else place.name
            right = (found.verb, found.axis) == (verb, place.axis)
            if place.where == "landing":
                right = right and found.rank == place.rank
            if found.action.startswith("REDUCE"):
                right = right and found.path in self.names
            return "" if right else told
        if found.rank != place.rank or found.path != place.path:
            return told
        op = {"forward": place.name, "backward": f"{place.name}.backward", "state": place.name}.get(place.where)
        return "" if op in (None, found.op) else told


def named(world: World, count: int, seed: int = 0, **how: Any) -> tuple[int, list[str]]:
    """Spoil so many places of a layout: how many, and what was wrong with those that were not named rightly."""
    with spoiling() if world.kind != "local" else ExitStack():
        trial = Trial(world, **how)
        drawn = draw(trial.places(), 2 * count, seed)
        wrong, spoiled = [], 0
        for number, place in enumerate(drawn):
            # An infinite maximum or sum of exponentials makes finite zeros, which only the other replicas know better.
            value = np.nan if number % 2 or place.where in ("wire", "landing") else np.inf
            trouble = trial.trouble(trial.spoiled(place, value))
            spoiled += trouble != UNUSED
            wrong += [trouble] if trouble not in ("", UNUSED) else []
            if spoiled == count:
                break
        assert trial.executor.step(trial.batch) > 0, "after all that the executor still makes steps"
        return spoiled, wrong


def _are_equal(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(some, others, strict=True))


def six_places_are_named(world: World) -> None:
    assert named(world, 6, seed=4, tp=2, pp=2, sizes=replace(SIZES, layers=2, width=8, heads=2)) == (6, [])


CHECKS = [six_places_are_named]
"""For ranks of MPI."""

"""The state of a training run as whole tensors, taken from the parts that train, not from what saves or loads them.

    with Watch() as watch:
        LocalWorld(4).run(main, flags)
    watch.states[7].tensors["weight/table"]        after 7 steps, in full, whatever the layout

Every rank lays the rectangles that it holds into full tensors; what several ranks hold must be the same bits on all of
them, and no element may be missing.  So a checkpoint is judged by something that never looks into one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import numpy as np

from mpitrain import train
from mpitrain.backend import to_host
from mpitrain.checkpoint import hdf5, layout, manifest
from mpitrain.comm.world import world
from mpitrain.pipeline.executor import Executor
from mpitrain.verify.whole import same_bits

TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk; take {n % 7} down.\n" for n in range(400))
SHORT = "The quick brown fox jumps over the lazy dog; 0123456789 times.\n" * 14
"""Some 90 windows of 8 tokens to learn from: a few steps are an epoch."""


@dataclass
class State:
    """A run after some step: full tensors by their name in a checkpoint, and the numbers beside them."""

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    _known: dict[str, np.ndarray] = field(default_factory=dict)
    split: list[str] = field(default_factory=list)

    def lay(self, name: str, lies: Any, array: Any) -> None:
        """Put one rank's part of a tensor into its place."""
        part = np.asarray(to_host(array))
        whole = self.tensors.setdefault(name, np.full(lies.full_shape, np.nan, part.dtype))
        known = self._known.setdefault(name, np.zeros(lies.full_shape, bool))
        place = (..., *lies.rectangle)
        there = known[place]
        if not same_bits(whole[place][there], part[there]):
            self.split.append(name)
        whole[place] = part
        known[place] = True

    def check_against(self, others: Mapping[str, np.ndarray]) -> int:
        """Fail if what is here of a tensor has not the bits of the full one; how many tensors are here in part."""
        for name, known in self._known.items():
            assert same_bits(self.tensors[name][known], others[name][known]), f"{name} was loaded otherwise than saved"
        return sum(bool(known.any()) for known in self._known.values())

    def check(self) -> None:
        """Fail if some element is nobody's, or replicas differ."""
        gaps = [name for name, known in self._known.items() if not known.all()]
        assert not gaps, f"no rank holds some of {gaps}"
        assert not self.split, f"replicas differ: {sorted(set(self.split))}"

    def digest(self) -> str:
        """A number for all of it."""
        found = hashlib.sha256(json.dumps(self.numbers, sort_keys=True).encode())
        for name, tensor in sorted(self.tensors.items()):
            found.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            found.update(np.ascontiguousarray(tensor).tobytes())
        return found.hexdigest()


def tensors_of(executor: Executor) -> Iterator[tuple[str, Any, Any]]:
    """Name, how it lies, array: of all that a rank keeps from step to step.

    Moments that each worker has for itself are those of the reducer, in which they stand side by side.
    """
    for p in executor.model.kept():
        yield f"weight/{p.name}", p, p.master
    others = executor.reducer.state_tensors()
    own = {kind: of for kind, of in executor.optimizer.state_tensors().items() if f"worker_{kind}" not in others}
    for kind, of in {**own, **others}.items():
        for name, tensor in of.items():
            yield f"{kind}/{name}", tensor, tensor.array


class Watch:
    """Keeps the state of the training runs inside a `with`: what each begins with, and what each step leaves.

    Args:
        only: steps (that are done) whose state is kept; None: all.
        before: called with each executor when it was built, before anything is read into it.
        parts: whether some ranks are of other processes: what is missing here is there.

    Attributes:
        states: steps that are done -> state.  Of a row of steps that overlap only the end is known.
        rows: step, counted from 0 -> place in the global batch -> the tokens that stand there.
        executors: rank -> that of the last run.
        first: the first step that was seen: how many were done when the last run began.
    """

    def __init__(
        self,
        only: Sequence[int] | None = None,
        before: Callable[[Executor], None] = lambda executor: None,
        parts: bool = False,
    ) -> None:
        self.states: dict[int, State] = {}
        self.rows: dict[int, dict[int, np.ndarray]] = {}
        self.executors: dict[int, Executor] = {}
        self.first = -1
        self._only = only
        self._before = before
        self._parts = parts
        self._patch = mock.patch.object(train, "build_executor", self._built(train.build_executor))

    def __enter__(self) -> Watch:
        self._patch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patch.stop()
        if error is None and not self._parts:
            for state in self.states.values():
                state.check()

    def _built(self, build: Callable[..., Executor]) -> Callable[..., Executor]:
        def built(*args: Any) -> Executor:
            executor = self.executors[world().rank] = build(*args)
            run, began = executor.run, []

            def watched(batches: Sequence[Any]) -> Any:
                if not began:
                    began.append(True)
                    self.first = batches[0].step
                    self._take(executor, self.first)
                for batch in batches:
                    self._read(batch, executor.model.config.seq_len)
                reports = run(batches)
                self._take(executor, batches[-1].step + 1)
                return reports

            executor.run = watched  # type: ignore[method-assign]
            self._before(executor)
            return executor

        return built

    def _read(self, batch: Any, length: int) -> None:
        of_step = self.rows.setdefault(batch.step, {})
        for place, row in zip(batch.places, batch.inputs, strict=True):
            of_step.setdefault(int(place), np.full(length, -1))[batch.positions] = row

    def data(self) -> dict[int, list[list[int]]]:
        """Step, counted from 0 -> the tokens of the global batch, row after row."""
        return {step: [row.tolist() for _, row in sorted(rows.items())] for step, rows in self.rows.items()}

    def _take(self, executor: Executor, step: int) -> None:
        if self._only is not None and step not in self._only:
            return
        state = self.states.setdefault(step, State())
        for name, lies, array in tensors_of(executor):
            state.lay(name, lies, array)
        scaler = executor.scaler
        numbers = {"updates": executor.optimizer.updates, "scale": None if scaler is None else scaler.state_dict()}
        state.numbers.update(numbers)


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Tensors of some hundred bytes are shared out among the ranks that hold them, and of some KiB have several blocks.

    As those of real models: else a test's would be written whole, and read in one block.
    """
    with (
        mock.patch.object(layout, "SHARED", 512),
        mock.patch.object(hdf5, "BLOCK", 1024),
        mock.patch.object(manifest, "BLOCK", 1024),
    ):
        yield


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run, without what a clock measured."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "tokens_per_s"} for record in records]


def different(mine: State, other: State) -> list[str]:
    """Names of what is not the same bits in both."""
    names = mine.tensors.keys() | other.tensors.keys()
    odd = [
        name
        for name in sorted(names)
        if not (name in mine.tensors and name in other.tensors and same_bits(mine.tensors[name], other.tensors[name]))
    ]
    return odd + [key for key in mine.numbers if mine.numbers[key] != other.numbers.get(key)]


def stored(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint in full, as h5py reads them."""
    import h5py

    whole = {}
    for name, about in written(folder)["tensors"].items():
        whole[name] = np.empty(about["shape"], about["dtype"])
        for slab in about["slabs"]:
            with h5py.File(folder / slab["file"], "r") as file:
                whole[name][(..., *map(slice, slab["start"], slab["stop"]))] = file[name][()]
    return whole


def written(folder: Path) -> Mapping[str, Any]:
    """The manifest of a checkpoint, as it stands."""
    found: Mapping[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found

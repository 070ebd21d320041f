"""What of a training outlives a step on one rank: its sums, and a snapshot from which another process can go on.

Weights, what the optimizer and the reducer keep, the scale of the gradients, and the counts; the same that a checkpoint
holds, but as it lies on this rank, so that nobody has to be asked: also whole weights beside the rows that a rank
keeps of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import array_module, to_host
from mpitrain.errors import RecordingError
from mpitrain.pipeline.executor import Executor
from mpitrain.recording.lines import Kept, Value


def tensors(executor: Executor) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Name, shape of the whole tensor, and array, of all that is kept; each array once."""
    seen: set[int] = set()
    for name, full_shape, array in _named(executor):
        if id(array) not in seen:
            seen.add(id(array))
            yield name, full_shape, array


def _named(executor: Executor) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    model, reducer = executor.model, executor.reducer
    for kind, of in (("own", model.shares()), ("whole", model.parameters())):
        for p in of:
            if not p.visits:  # else it comes and goes, and is nowhere now
                yield f"weight of {kind}/{p.name}", p.full_shape, p.master
                yield f"data of {kind}/{p.name}", p.full_shape, p.data
    for kind, states in executor.optimizer.state_tensors().items():
        for name, tensor in states.items():
            yield f"{kind}/{name}", tensor.full_shape, tensor.array
    for kind, states in reducer.state_tensors().items():
        for name, tensor in states.items():
            yield f"reducer {kind}/{name}", tensor.full_shape, tensor.array


def sums(executor: Executor) -> dict[str, int]:
    """CRC-32 of each tensor.

    Cost: a pass over the state, some 1.5 GB a second.
    """
    return {name: _sum(array) for name, _, array in tensors(executor) if array.size}


def _sum(array: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(on_host(array)).reshape(-1).view(np.uint8).data)


def on_host(array: Any) -> Any:
    """An array in the memory of the host, wherever it lives."""
    return np.asarray(to_host(array))


def numbers(executor: Executor) -> dict[str, Any]:
    """What is kept besides, as JSON has it."""
    scaler = executor.scaler
    return {
        "updates": executor.optimizer.updates,
        "empty_steps": executor.empty_steps,
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def fill(executor: Executor, kept: Sequence[Kept], counts: Mapping[str, Any], read: Callable[[Value], Any]) -> None:
    """Go on from a snapshot.

    Args:
        executor: built as the one that the snapshot is of.
        kept: what `tensors` gave.
        counts: what `numbers` gave.
        read: gives the array of a value; asked when it is known to be of the right size.

    Raises:
        RecordingError: a tensor is missing, or of another shape.
    """
    here = {name: array for name, _, array in tensors(executor)}
    of_reducer = {of.name: of.full_shape for of in kept if of.name.startswith("reducer ")}
    if not of_reducer.keys() <= here.keys() or not of_reducer:
        saved = {name.removeprefix("reducer "): shape for name, shape in of_reducer.items()}
        for kind, states in executor.reducer.state_to_fill(saved).items():
            here |= {f"reducer {kind}/{name}": tensor.array for name, tensor in states.items()}
    for of in kept:
        array = here.pop(of.name, None)
        if array is None or (tuple(array.shape), array.dtype.name) != (of.value.shape, of.value.dtype):
            raise RecordingError(f"the state of the recording has {of.name} {of.value.shape}, this model another one")
        if array.size:
            array[...] = array_module(array).asarray(read(of.value))
    missing = [name for name, array in here.items() if array.size and not name.startswith("reducer ")]
    if missing:
        raise RecordingError(f"the state of the recording lacks {missing[0]}")
    updates, empty = counts.get("updates"), counts.get("empty_steps")
    if type(updates) is not int or type(empty) is not int:
        raise RecordingError("the state of the recording lacks its counts")
    executor.optimizer.updates, executor.empty_steps = updates, empty
    executor.reducer.resumed(updates)
    if executor.scaler is not None:
        scaler = counts.get("scaler")
        if not isinstance(scaler, dict):
            raise RecordingError("the state of the recording lacks the scale of the gradients")
        executor.scaler.load_state(scaler)


def different(now: Mapping[str, int], before: Mapping[str, int]) -> Sequence[str]:
    """Names of tensors whose sums differ, or that only one has."""
    return [name for name in dict.fromkeys([*before, *now]) if now.get(name) != before.get(name)]

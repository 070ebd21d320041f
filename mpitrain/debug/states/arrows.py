"""What a message takes and gives: an arrow from one state to another, and what is wrong if it takes something else."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd.function import Function
from mpitrain.collectives import AllToAll, Arrow
from mpitrain.debug.states.mixing import Call, Mismatch, States, a_state, is_sent, sent
from mpitrain.parallel.expert.overlap import Arrive
from mpitrain.spec import ATOMIC_AXES, INVARIANT, MERGED_AXES, PARTIAL, REPLICATE, Shard, State


def axes_of(function: type[Function], static: dict[str, Any]) -> tuple[str, ...]:
    """The atomic axes over which an op sends; () for one that does not."""
    if not issubclass(function, Arrow):
        return ()
    name = static["axis"].name
    if name == "world":
        return ATOMIC_AXES
    return tuple(atom for part in name.split("+") for atom in MERGED_AXES.get(part, (part,)))


def follow(function: type[Arrow], call: Call, states: States) -> State:
    """The state after an arrow, on an axis over which it sends.

    Raises:
        Mismatch: input 0 is in another state than that in which the arrow starts, or another input is not whole.
    """
    ndim = call.ndim(0)
    start, end = (side if side.dim is None else Shard(side.dim % ndim) for side in function.states(**call.static))
    state = states[0]
    if issubclass(function, (AllToAll, Arrive)) and start == end:
        start, end = (sent(start), start) if is_sent(state) else (start, sent(start))  # slices change places, and back
    if function.any_rows and state is not None and state.dim is not None and state.dim != ndim - 1:
        start = state if not is_sent(state) else start
    if state is not None and state != start:
        way = _way(call.title, start, state) if function.like is None else f"it takes {a_state(start)} one"
        raise Mismatch(f"{call.title} of {a_state(state)} value", way, fits=[(0, start)])
    for i, other in enumerate(states[1:], start=1):
        if function.alike:
            if other is not None and other != start:
                raise Mismatch(
                    f"{call.title} with {a_state(other)} value as input {i}", _way(call.title, start, other), i
                )
        elif other is not None and (other == PARTIAL or other.dim is not None):
            way = "every rank needs the whole of it: an all_gather or all_reduce is missing before it"
            raise Mismatch(f"{call.title} with {a_state(other)} value as input {i}", way, i)
    return end


def _way(title: str, start: State, state: State) -> str:
    """Which message is missing or doubled where an arrow from `start` meets a value in `state`."""
    doubled = f"this {title} is doubled: "
    if is_sent(state) and state.dim == start.dim:
        return "its slices are where an all_to_all has brought them: one back is missing before it"
    if start == PARTIAL:
        if state == INVARIANT:
            return doubled + "the value is summed already"
        if state == REPLICATE:
            return "every rank holds the whole value, and the sum would be a multiple of it"
        return "the ranks hold slices, not summands: an all_gather or gather is meant"
    if start == INVARIANT:
        if state == PARTIAL:
            return "an all_reduce is missing before it"
        if state == REPLICATE:
            return doubled + "each rank has a copy of its own already"
        return "the ranks hold slices of it already: a gather is missing before it, or this one is doubled"
    if start == REPLICATE:
        if state == INVARIANT:
            return "a copy is missing before it, or its spec must say Replicate on {axis}"
        return ("a sum_everywhere" if state == PARTIAL else "an all_gather") + " is missing before it"
    if state == PARTIAL:
        return "a reduce_scatter is meant, or one is missing before it"
    if state.dim is None:
        return doubled + "every rank holds the whole value already"
    return f"it is cut along dim {state.dim}, not along dim {start.dim}"

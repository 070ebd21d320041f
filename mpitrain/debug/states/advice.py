"""What to change where two values meet whose states do not fit: where one got its state, or where they meet.

The op at which states disagree is rarely the line that is wrong.  A message has a twin that ends in another state, and
a parameter is what its spec says: one word there may make both fit, where a message here would only move the error on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from mpitrain.autograd.ops.contraction import Contract
from mpitrain.autograd.ops.convolution import Conv2d
from mpitrain.autograd.ops.experts import GroupedMatmul
from mpitrain.autograd.ops.fused import Linear
from mpitrain.autograd.ops.index import GatherAlong, Take
from mpitrain.autograd.ops.linalg import Matmul
from mpitrain.debug.states.known import Known, Place
from mpitrain.spec import INVARIANT, PARTIAL, REPLICATE, State

if TYPE_CHECKING:
    from mpitrain.debug.states.mixing import Call, Mismatch

TWINS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("sum_everywhere", "Invariant"): "all_reduce",
        ("all_gather", "Invariant"): "gather",
        ("reduce_scatter", "Invariant"): "all_reduce",
        ("all_reduce", "Replicate"): "sum_everywhere",
        ("gather", "Replicate"): "all_gather",
        ("all_reduce", "Shard"): "reduce_scatter",
    }
)
"""(a message, the name of a state) -> the message that takes the same value to that state."""


def in_order(wrong: Mismatch, call: Call, known: Sequence[Known | None], axis: str) -> list[str]:
    """What to change, the likeliest first.

    Args:
        wrong: what the rule said.
        call: the op.
        known: what is known of its inputs.
        axis: on which axis.
    """
    twin = next(_twins(wrong, call, known, axis), None)
    if twin is None:
        return [way for way in (wrong.way, wrong.other_way) if way]
    message, way = twin
    is_usual = _is_product(call) and message in ("copy", "all_gather", "all_reduce")  # right before a cut layer
    return [wrong.way, way] if is_usual or message == call.title else [way, wrong.way]


def _twins(wrong: Mismatch, call: Call, known: Sequence[Known | None], axis: str) -> Iterator[tuple[str, str]]:
    """Messages whose twin would give a value that fits, each with what to say of it."""
    for i, state in wrong.fits:
        x = known[i]
        origin = None if x is None else x.origins.get(axis)
        if x is None or not isinstance(origin, Place) or len(x.states[axis]) != 1:
            continue
        if x.states[axis][0] != REPLICATE and x.made != origin:
            continue  # what lies between is fit for the state that it has
        twin = TWINS.get((origin.op, state.name))
        if twin is not None:
            yield origin.op, f"{twin} in place of {origin.op} gives {state}"
        elif origin.op == "copy" and state == INVARIANT:
            yield origin.op, "the value before that copy is Invariant"


def sources(wrong: Mismatch, call: Call, known: Sequence[Known | None], axis: str) -> str:
    """Where values that meet got their states: ` (Partial from linear at a.py:6, Invariant from the spec of b)`."""
    found = []
    for i in (wrong.at, wrong.meets):
        if i is None:
            continue
        x = known[i]
        origin = None if x is None else x.origins.get(axis)
        if x is not None and origin is not None:
            found.append((x.on(axis), f"{'the spec of ' if call.parameter(i) else ''}{origin}"))
    if len(found) < 2:
        return "".join(f" (from {origin})" for _, origin in found)
    return f" ({', '.join(f'{state} from {origin}' for state, origin in found)})"


def _is_product(call: Call) -> bool:
    return issubclass(call.function, (Linear, Matmul, GroupedMatmul, Conv2d, Contract))


def _is_weight(call: Call, i: int) -> bool:
    if issubclass(call.function, Contract):
        return False  # which of its dims are outputs, its letters say
    ndim = 4 if issubclass(call.function, Conv2d) else 3 if issubclass(call.function, GroupedMatmul) else 2
    return i == 1 and bool(call.parameter(i)) and call.ndim(i) == ndim and _is_product(call)


def _outputs(call: Call, i: int) -> tuple[str, str]:
    """The state of a weight of which each rank has some outputs, and what those of the weight are called."""
    return ("Shard(0)", "filters") if issubclass(call.function, Conv2d) else (f"Shard({call.ndim(i) - 1})", "columns")


def _summed(call: Call) -> str:
    return "channels" if issubclass(call.function, Conv2d) else "rows"


def no_copy(call: Call, i: int, j: int, other: State) -> tuple[str, list[tuple[int, State]]]:
    """Input i is Invariant where ranks do different things with it: the gradients differ, and nobody adds them up.

    Args:
        call: the op.
        i: the Invariant input.
        j: the other one.
        other: its state, the dim of a Shard counted in the result.

    Returns:
        what to change here; inputs and states in which they would fit.
    """
    name, named = call.parameter(i), call.parameter(j)
    fits = [(j, INVARIANT)] if other == REPLICATE or not name else []
    if name:
        if _is_weight(call, i) and other != PARTIAL:
            behind = "" if other == REPLICATE else " behind an all_gather"
            cut, outputs = _outputs(call, i)
            columns = f"{cut}{behind} if each rank shall hold its {outputs}"
            whole = "Replicate if each uses the whole for its own tokens"
            return f"{_spec(call, i, INVARIANT)}: {columns}, {whole}", fits
        dim = -1 if other.dim is None else other.dim - _ndim(call) + call.ndim(i)
        if dim >= 0 and not issubclass(call.function, (Take, GatherAlong, Contract)):
            choice = f"Shard({dim}) if it is cut as the other is, Replicate if each rank uses the whole"
            return f"{_spec(call, i, INVARIANT)}: {choice}", fits
        before = "an all_reduce of the other is missing, or " if other == PARTIAL else ""
        return f"{before}the spec of {name} must say Replicate on {{axis}}, or a copy of it is missing", fits
    fits.append((i, REPLICATE))
    if other == REPLICATE and named:
        return f"the spec of {named} should say Invariant too, or a copy of the Invariant one is missing", fits
    if other == REPLICATE:
        return "a copy of the Invariant one is missing, or the other should be, too", fits
    may_be_cut = other.dim is not None and call.ndim(i) == call.ndim(j) and call.shape(i)[other.dim] != 1
    if may_be_cut and not named and not _is_product(call):
        fits.insert(1, (i, other))
    sum_or_gather = "an all_reduce" if other == PARTIAL else "a gather"
    return f"a copy of the Invariant one is missing, or {sum_or_gather} of the other", fits


def _ndim(call: Call) -> int:
    return max(call.ndim(k) for k in range(len(call.inputs)))


def half_product(call: Call, i: int, state: State, other: State, needed: State) -> tuple[str, str]:
    """A product sums over a dim of input i that is cut; the other one is `other`, and would have to be `needed`."""
    if _is_weight(call, i):
        cut, outputs = _outputs(call, i)
        cuts = f"cuts the {_summed(call)} that are summed over: {cut} cuts its {outputs}"
        return (
            f"{_spec(call, i, state)}, which {cuts}",
            f"the other must be {needed}, or an all_gather of it is missing",
        )
    gather = f"an all_gather of the {state} one is missing"
    if _is_weight(call, 1 - i):
        return f"{_spec(call, 1 - i, other)}: {needed} cuts the {_summed(call)} that are summed over", gather
    return f"an all_gather of it is missing, or the other must be {needed}", ""


def other_slices(call: Call, j: int, first: State) -> str:
    """Input j is cut along another dim than the one before it, which is `first`."""
    if _is_weight(call, j):
        return f"an all_gather of the {first} one is missing before it"
    return "an all_to_all or all_gather of one of them is missing"


def _spec(call: Call, i: int, state: State) -> str:
    """`the spec of block.w on tp is Invariant (the default)`; the report puts in the axis, and whether it is."""
    return f"the spec of {call.parameter(i)} on {{axis}} is {state}{'{default}' if state == INVARIANT else ''}"

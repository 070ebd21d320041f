"""The words of the checker: what is wrong, at which line, which message is missing or doubled, whence a value comes."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.debug.states import advice
from mpitrain.debug.states.digests import Odd
from mpitrain.debug.states.known import Known, Place
from mpitrain.debug.states.mixing import Call, Mismatch
from mpitrain.errors import StateError
from mpitrain.spec import DEFAULTS, INVARIANT, PARTIAL, REPLICATE, State


def mismatch_error(
    wrong: Mismatch, call: Call, place: Place, axis: str, name: str, known: Sequence[Known | None]
) -> StateError:
    """An op whose inputs are in states in which it cannot be.

    Args:
        wrong: what the rule said.
        call: the op.
        place: where it was called.
        axis: on which axis.
        name: what people call that axis.
        known: what is known of the inputs.
    """
    default = " (the default)" if DEFAULTS[axis] == INVARIANT else ""
    ways = [
        way.replace("{axis}", name).replace("{default}", default) for way in advice.in_order(wrong, call, known, axis)
    ]
    others = "".join(f"  or {way}\n" for way in ways[1:])
    values = [
        f"constant {call.shape(i)}" if x is None else f"{x.on(axis)} {x.shape(call.shape(i))}"
        for i, x in enumerate(known)
        if call.is_given(i)
    ]
    within = f"in {place.path}: " if place.path else ""
    return StateError(
        f"at {place.site}: {wrong.what} over {name}; {ways[0]}{advice.sources(wrong, call, known, axis)}\n"
        f"{others}  {within}{place.op}({', '.join(values)})"
    )


def loss_error(known: Known, axis: str, name: str) -> StateError:
    """A loss that leaves in another state than the one in which the executor takes it."""
    state = known.states[axis][0]
    site = "?" if known.made is None else known.made.site
    wanted = "Invariant" if axis == "tp" else "Partial, the sum over this rank's tokens"
    return StateError(
        f"at {site}: the loss is {state} over {name} where it leaves, but must be {wanted}; "
        f"{_way_of_loss(state, axis)} (from {known.origins[axis]})"
    )


def _way_of_loss(state: State, axis: str) -> str:
    if axis == "tp":
        if state == PARTIAL:
            return "an all_reduce is missing before it"
        if state == REPLICATE:
            return "every rank would count it: all_reduce in place of sum_everywhere, gather in place of all_gather"
        return "a sum and an all_reduce of it are missing"
    if state == INVARIANT:
        return "this all_reduce is doubled: the executor sums over the ranks"
    if state == REPLICATE:
        return "this rank's part of the batch is not in it, or was not recognised: see StateChecker.declare"
    return "the sum over its elements is missing"


def auxiliary_error(name: str, known: Known, axis: str, said: str) -> StateError:
    """A loss besides, in another state than the one in which the executor seeds it.

    Args:
        name: of the part of the model that added it.
        known: what is known of the loss.
        axis: on which axis.
        said: what people call that axis.
    """
    state = known.states[axis][0]
    site = "?" if known.made is None else known.made.site
    wanted = "Partial, the sum over this rank's tokens" + (", or Invariant where all hold them" if axis == "tp" else "")
    return StateError(
        f"at {site}: an auxiliary loss of {name} is {state} over {said} where it leaves, but must be {wanted}; "
        f"{_way_of_auxiliary(state, axis)} (from {known.origins[axis]})"
    )


def _way_of_auxiliary(state: State, axis: str) -> str:
    if state == INVARIANT:
        return "this all_reduce is doubled: each rank adds what its own tokens say"
    if state == REPLICATE:
        before = "copy or all_gather" if axis == "tp" else "sum"
        return f"every rank would add all of it: it is meant of the value before that {before}"
    return "the sum over its elements is missing"


def boundary_error(known: Known, stage: int, wanted: State, axis: str, name: str) -> StateError:
    """What a stage hands on, in another state than that in which the next one takes it."""
    state = known.states[axis][0]
    site = "a stage that does nothing" if known.made is None else known.made.site
    within = f"\n  in {known.made.path}" if known.made is not None and known.made.path else ""
    return StateError(
        f"at {site}: what stage {stage} hands on is {state} over {name}, but stage {stage + 1} takes it as {wanted}; "
        f"{_way_of_boundary(state, wanted)} (from {known.origins[axis]}){within}"
    )


def _way_of_boundary(state: State, wanted: State) -> str:
    if state == PARTIAL:
        message = {"Invariant": "an all_reduce", "Replicate": "a sum_everywhere"}.get(wanted.name, "a reduce_scatter")
        return f"{message} is missing before it"
    if state.dim is not None and wanted.dim is None:
        return (
            f"{'a gather' if wanted == INVARIANT else 'an all_gather'} is missing before it, or the boundary is wrong"
        )
    return "the boundary is wrong, or a message before it"


def odd_error(odd: Odd, name: str) -> StateError:
    """Values that ranks should hold alike, and do not."""
    verb = "hold" if len(odd.odd) > 1 else "holds"
    return StateError(
        f"{odd.what.replace('{axis}', name)}, but {_ranks(odd.odd)} {verb} another one than {_ranks(odd.others)}.\n"
        "  Of all such values it is the first that differs."
    )


def value(known: Known, axis: str) -> str:
    """What an op made."""
    assert known.made is not None
    return f"{_at(known.made)}: the value of {known.made.op} is {known.on(axis)} over {{axis}}"


def arrival(stage: int, known: Known, axis: str) -> str:
    """What came into a stage."""
    return f"the input of stage {stage} is {known.on(axis)} over {{axis}}"


def gradient(result: Known, x: Known, axis: str) -> str:
    """What the backward of the op that made `result` gave to its input `x`."""
    assert result.made is not None
    state = REPLICATE if x.states[axis][0] == PARTIAL else INVARIANT
    of = x.origins[axis] if x.made is None else f"the value of {x.made}"
    return f"{_at(result.made)}: {result.made.op}.backward, the gradient of {of}, is {state} over {{axis}}"


def weight(name: str, known: Known, axis: str) -> str:
    """A parameter."""
    return f"{name} is {known.on(axis)} over {{axis}}"


def _at(place: Place) -> str:
    return f"at {place.site}" + (f" in {place.path}" if place.path else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

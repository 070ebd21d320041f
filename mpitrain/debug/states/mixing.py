"""How the states of several values meet in one op, on one axis of ranks.

    equal states                       pass
    Shard(d) and Replicate             Shard(d): each rank uses its copy for its slice
    Invariant and another              an error: one value that counts once, and values that do not
    Shard(d) and Shard(e)              an error; so is Shard(d) and Sent(d), see `sent`
    Partial                            passes a linear op, and only that; see `_summands`

A value whose state on the axis is not known (a constant that no batch brought: a mask, random numbers) takes that of
the others.  Integers have no gradient: where all ranks hold the same ones, they may meet anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mpitrain.autograd.function import Function
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import to_host
from mpitrain.debug.states import advice
from mpitrain.spec import INVARIANT, PARTIAL, REPLICATE, State

States = Sequence[State | None]
"""The state of each input on one axis; None: not known."""

SUM_IS_MISSING = "an all_reduce or reduce_scatter is missing before it"


class Mismatch(Exception):
    """States that do not go together.

    Args:
        what: is wrong: "gelu of a Partial value".
        way: out of it: which message is missing or doubled; "{axis}" stands for the axis, "{default}" for
            whether that is what a spec says of it by default.
        at: index of the input whose origin the report tells.
        meets: index of another, if it is their states that do not go together.
        fits: inputs, each with a state in which it would fit.
        other_way: out of it, less likely than the first.
    """

    def __init__(
        self,
        what: str,
        way: str,
        at: int = 0,
        meets: int | None = None,
        *,
        fits: Sequence[tuple[int, State]] = (),
        other_way: str = "",
    ) -> None:
        super().__init__(f"{what}; {way}")
        self.what = what
        self.way = way
        self.at = at
        self.meets = meets
        self.fits = fits
        self.other_way = other_way


class Call:
    """One call of an op, as rules look at it.

    Attributes:
        title: its name.
        function: whose rules hold: its own class, or the one that it is `like`.
        inputs: Tensors, arrays, numbers, None.
        static: its keyword arguments.
    """

    __slots__ = ("function", "inputs", "static", "title")

    def __init__(self, function: type[Function], inputs: Sequence[Any], static: dict[str, Any]) -> None:
        self.title = function.title()
        self.function = function.like or function
        self.inputs = inputs
        self.static = static

    def shape(self, i: int) -> tuple[int, ...]:
        """The shape of an input; that of a number is ()."""
        return tuple(getattr(self.inputs[i], "shape", ()))

    def ndim(self, i: int) -> int:
        """How many dims an input has."""
        return len(self.shape(i))

    def is_given(self, i: int) -> bool:
        """Whether there is such an input, and it is not None."""
        return i < len(self.inputs) and self.inputs[i] is not None

    def is_integer(self, i: int) -> bool:
        """Whether an input is of integers or bools, which have no gradient."""
        return getattr(getattr(self.inputs[i], "dtype", None), "kind", "f") in "iub"

    def is_zero(self, i: int) -> bool:
        """Whether an input is a constant that adds nothing."""
        x = self.inputs[i]
        if isinstance(x, Tensor):
            if x.requires_grad:
                return False
            x = x.data
        return not to_host(x).any() if hasattr(x, "shape") else bool(x == 0)

    def parameter(self, i: int) -> str:
        """The name of an input that is a Parameter, else ''."""
        return getattr(self.inputs[i], "name", "") if getattr(self.inputs[i], "is_parameter", False) else ""


def sent(state: State) -> State:
    """Shard(d) behind an all_to_all that makes its slices change places: Sent(d).

    Each rank then has of all ranks what they sent to it: rows of tokens that are with their experts.  It is cut still,
    but no longer as what stayed where it was; the same all_to_all again brings the slices back.
    """
    return State("Sent", state.dim)


def is_sent(state: State | None) -> bool:
    """Whether slices are where an all_to_all has brought them."""
    return state is not None and state.name == "Sent"


def at(state: State, dim: int) -> State:
    """The same state of a value whose dim that is cut is another one."""
    return State(state.name, dim)


def a_state(state: State) -> str:
    """`a Partial`, `an Invariant`."""
    return f"{'an' if state == INVARIANT else 'a'} {state}"


def mix(call: Call, values: Iterable[tuple[int, State | None]]) -> State | None:
    """The state of what an op makes of these values, each element from the same place of each of them.

    Args:
        call: the op.
        values: (index of the input, its state; the dim of a Shard counted in the result).  Inputs that are None do not
            count.

    Raises:
        Mismatch: the states do not go together.
    """
    given = [(i, state) for i, state in values if call.is_given(i)]
    if any(state == PARTIAL for _, state in given):
        return _summands(call, given)
    known = [(i, state) for i, state in given if state is not None]
    if any(not call.is_integer(i) for i, _ in known):
        known = [(i, state) for i, state in known if not (_is_whole(state) and call.is_integer(i))]
    shards = [(i, state) for i, state in known if state.dim is not None]
    invariant = next((i for i, state in known if state == INVARIANT), None)
    other = next((i for i, state in known if state != INVARIANT), None)
    if invariant is not None and other is not None:
        raise _no_copy(call, invariant, other, dict(known)[other])
    for i, state in shards:
        if state != shards[0][1]:
            what = f"{call.title} of a {shards[0][1]} and a {state} value"
            raise Mismatch(what, advice.other_slices(call, i, shards[0][1]), shards[0][0], i)
    if shards:
        return shards[0][1]
    return known[0][1] if known else None


def _is_whole(state: State) -> bool:
    return state in (INVARIANT, REPLICATE)


def _no_copy(call: Call, i: int, j: int, other: State) -> Mismatch:
    way, fits = advice.no_copy(call, i, j, other)
    return Mismatch(f"{call.title} of an Invariant and a {other} value", way, i, j, fits=fits)


def _summands(call: Call, given: Sequence[tuple[int, State | None]]) -> State:
    """What becomes of summands: the sum of the results must be the result of the sum.

    So all values that the op adds up are Partial, or zero; and what it multiplies them with is the same on all ranks,
    each of which uses its copy.
    """
    partial = [i for i, state in given if state == PARTIAL]
    summands = _summand_sets(call, [i for i, _ in given])
    added = next((these for these in summands if these.issuperset(partial)), None)
    if added is None:
        two = len(summands) > 1 and len(partial) > 1
        what = f"{call.title} of {'two Partial values' if two else 'a Partial value'}"
        raise Mismatch(what, SUM_IS_MISSING, partial[0])
    for i, state in given:
        if state == PARTIAL:
            continue
        what = f"{call.title} of a Partial value and {'a constant' if state is None else a_state(state) + ' one'}"
        if i in added:
            if not call.is_zero(i):
                way = (
                    "every rank would add the other one: an all_reduce or reduce_scatter of the Partial one is missing"
                )
                raise Mismatch(what, way, partial[0], i)
        elif state is not None and state.dim is not None:
            raise Mismatch(what, "an all_reduce or reduce_scatter of the Partial one is missing", partial[0], i)
        elif state == INVARIANT and not call.is_integer(i):
            raise _no_copy(call, i, partial[0], PARTIAL)
    return PARTIAL


def _summand_sets(call: Call, given: Sequence[int]) -> list[set[int]]:
    """The sets of inputs in which an op is jointly linear, the others held fast: for a product there are two."""
    linear = call.function.linear
    found = [{i for i in given if i in linear}]
    if call.function.bilinear:
        found.append({i for i in given if (1 - i if i < 2 else i) in linear})
    return found


def aligned(call: Call, values: Iterable[tuple[int, State | None]]) -> list[tuple[int, State | None]]:
    """The values of a broadcasting op, with their dims counted in its result.

    Raises:
        Mismatch: a dim of length 1 is stretched, but other ranks hold more of it.
    """
    values = [(i, state) for i, state in values if call.is_given(i)]
    ndim = max((call.ndim(i) for i, _ in values), default=0)
    found = []
    for i, state in values:
        if state is not None and state.dim is not None:
            dim = state.dim + ndim - call.ndim(i)
            length = max((call.shape(j)[dim - ndim] for j, _ in values if call.ndim(j) >= ndim - dim), default=1)
            if call.shape(i)[state.dim] == 1 < length:
                raise Mismatch(
                    f"{call.title} repeats dim {state.dim} of a {state} value", "an all_gather is missing before it", i
                )
            state = at(state, dim)
        found.append((i, state))
    return found

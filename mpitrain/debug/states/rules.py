"""What ops do to the state of a value, on one axis of ranks.

A rule looks at the states of the inputs and gives that of the outputs, or says what is wrong:

    rule(call, states) -> State | None

Rules are the same on every axis.  Which op has which stands in table.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from mpitrain.autograd.ops import reduce
from mpitrain.debug.states import advice
from mpitrain.debug.states.mixing import Call, Mismatch, States, a_state, aligned, at, mix
from mpitrain.spec import PARTIAL, Shard, State

Outcome = State | None | tuple[State, ...]
"""The state of the outputs; several, where shapes leave open which dim is cut."""

Rule = Callable[[Call, States], Outcome]


def elementwise(call: Call, states: States) -> Outcome:
    """Each element from the same place of all inputs."""
    return mix(call, aligned(call, enumerate(states)))


def first(call: Call, states: States) -> Outcome:
    """Each element from the same place of input 0; the others say only what happens to it (random numbers, masks)."""
    return mix(call, [(0, states[0])])


# ------------------------------------------------------------------------------------------------- products of matrices


def contract(call: Call, states: States, summed: tuple[int, int], place: Callable[[int, int], int]) -> State | None:
    """A product of inputs 0 and 1 that sums over dim `summed[i]` of input i.

    Args:
        call: the op.
        states: of its inputs.
        summed: the dims that are summed over.
        place: (input, dim of it) -> dim of the result, for the others.
    """
    cut = [states[i] == Shard(summed[i]) for i in (0, 1)]
    if any(cut) and all(cut[i] or states[i] is None for i in (0, 1)):
        return PARTIAL
    if any(cut):
        i = cut.index(True)
        other = states[1 - i]
        assert other is not None
        what = f"{call.title} sums over dim {summed[i]} of a {states[i]} value, which is cut, with {a_state(other)} one"
        way, other_way = advice.half_product(call, i, Shard(summed[i]), other, Shard(summed[1 - i]))
        raise Mismatch(what, way, i, 1 - i, other_way=other_way)
    return mix(call, [(i, moved(states[i], partial(place, i))) for i in (0, 1)])


def linear(call: Call, states: States) -> Outcome:
    """x (..., n) w (n, m) + b (m,)."""
    last = call.ndim(0) - 1
    return add_bias(call, states, contract(call, states, (last, 0), lambda i, dim: dim if i == 0 else last), last)


def add_bias(call: Call, states: States, product: State | None, last: int) -> State | None:
    """A product of inputs 0 and 1 plus, if there is one, a bias: input 2, along the last dim of the result."""
    if len(states) < 3 or not call.is_given(2):
        return product
    bias = states[2]
    if product == PARTIAL and bias != PARTIAL and not call.is_zero(2):
        way = "every rank would add it: add the bias after an all_reduce or reduce_scatter"
        raise Mismatch(f"{call.title} adds a bias to a Partial product", way, 2)
    cut_by_weight = product is not None and states[0] != product and states[1] is not None and states[1].dim is not None
    return mix(call, [(int(cut_by_weight), product), (2, Shard(last) if bias == Shard(0) else bias)])


def matmul(call: Call, states: States) -> Outcome:
    """a (..., n, k) b (..., k, m), with vectors standing for matrices."""
    m, n = call.ndim(0), call.ndim(1)
    batch = max(m, n, 2) - 2  # dims of the result before its matrix
    rows = 0 if m == 1 else 1  # how many of the last two dims are left of a

    def place(i: int, dim: int) -> int:
        if i == 0:
            return dim + batch - max(m - 2, 0)
        return batch + rows if dim == n - 1 else dim + batch - (n - 2)

    return contract(call, states, (m - 1, max(n - 2, 0)), place)


def by_letters(call: Call, states: States) -> Outcome:
    """A product of two values of which each dim has a letter; letters that the result has not are summed over."""
    *of, result = call.static["letters"]

    def place(i: int, dim: int) -> int:
        return int(result.index(of[i][dim]))

    cut = [of[i][state.dim] for i, state in enumerate(states) if state is not None and state.dim is not None]
    summed = next((letter for letter in cut if letter not in result), None)
    if summed is None:
        return mix(call, [(i, moved(states[i], partial(place, i))) for i in (0, 1)])
    return contract(call, states, (of[0].index(summed), of[1].index(summed)), place)


# ----------------------------------------------------------------------------------------- ops that mix along some dims


def mixes(call: Call, state: State) -> Mismatch:
    """The error of an op that mixes the elements along a dim that is cut."""
    return Mismatch(f"{call.title} along dim {state.dim} of a {state} value", "an all_gather is missing before it")


def along(dim_of: Callable[[Call], int]) -> Rule:
    """An op that mixes the elements of input 0 along one dim, and may have others that broadcast to it."""

    def rule(call: Call, states: States) -> Outcome:
        if states[0] is not None and states[0].dim == dim_of(call):
            raise mixes(call, states[0])
        return mix(call, aligned(call, enumerate(states)))

    return rule


def last(call: Call) -> int:
    """The last dim of input 0."""
    return call.ndim(0) - 1


def residual_norm(call: Call, states: States) -> Outcome:
    """x + dropout(y + bias), and its norm: inputs x, y, bias, rows, and what scales and shifts the norm."""
    total = mix(call, aligned(call, [(i, states[i]) for i in (0, 1, 2)]))
    if total is not None and total.dim == last(call):
        raise mixes(call, total)
    of_norm = [(i, states[i]) for i in range(4, len(states))]
    return mix(call, [(0, total), *aligned(call, [(0, None), *of_norm])])


def residual(call: Call, states: States) -> Outcome:
    """x + dropout(y + bias): inputs x, y, bias, rows."""
    return mix(call, aligned(call, [(i, states[i]) for i in (0, 1, 2)]))


def attention(call: Call, states: States) -> Outcome:
    """Heads (last dim) and samples (dim 0) are strangers to each other, tokens are not."""
    if states[0] == Shard(1):
        way = "attention over axis {axis} is missing (parallel.context.attention), or an all_gather before it"
        raise Mismatch(f"{call.title} among the tokens of a Shard(1) value, a part of each sequence", way)
    return first(call, states)


def slice_attention(call: Call, states: States) -> Outcome:
    """The same, of a slice and earlier ones: inputs qkv, mask, rows, and each earlier qkv."""
    slices = [(i, state) for i, state in enumerate(states) if i not in (1, 2)]
    for _, state in slices:
        attention(call, (state,))
    return mix(call, slices)


def cross_entropy(call: Call, states: States) -> Outcome:
    """The sum over all rows of logits (..., v) and targets (...)."""
    if states[0] is not None and states[0].dim == last(call):
        way = "the loss over a cut vocabulary is missing (parallel.vocabulary.cross_entropy), or a gather before it"
        raise Mismatch(f"{call.title} over the classes of a {states[0]} value", way)
    return _summed(mix(call, [(0, states[0]), (1, states[1])]))


def _summed(state: State | None) -> State | None:
    return PARTIAL if state is not None and state.dim is not None else state


def reduction(call: Call, states: States) -> Outcome:
    """An op over dims; over the dim that is cut, only a sum has a meaning: it is a summand."""
    state = mix(call, [(0, states[0])])
    if state is None or state.dim is None:
        return state
    dims = call.static["dims"]
    if state.dim not in dims:
        return state if call.static["keepdims"] else at(state, state.dim - sum(dim < state.dim for dim in dims))
    if issubclass(call.function, reduce.Sum):
        return PARTIAL
    if issubclass(call.function, reduce.Mean):
        way = "the mean of a part is not a part of the mean: take the sum, and divide by the length of the whole"
        raise Mismatch(f"{call.title} over dim {state.dim} of a {state} value", way)
    raise mixes(call, state)


# ------------------------------------------------------------------------------------------------------- where dims go


def reshape(call: Call, states: States) -> Outcome:
    """A slice stays a slice where as many elements lie before the new dim as before the old one.

    Dims of length 1 leave it open which of them is cut: then all of those are possible.
    """
    state = mix(call, [(0, states[0])])
    if state is None or state.dim is None:
        return state
    old, new = call.shape(0), call.static["shape"]
    outer = math.prod(old[: state.dim])
    fits = [dim for dim in range(len(new)) if math.prod(new[:dim]) == outer]
    if not fits:
        way = "its slices would not be slices of the result: an all_gather is missing before it, or a transpose"
        raise Mismatch(f"{call.title} of a {state} value to {len(new)} dims", way)
    return tuple(at(state, dim) for dim in fits)


def both(call: Call, states: States) -> Outcome:
    """Inputs 0 and 1, cut alike, beside each other; the others say only what happens to them."""
    return mix(call, [(i, states[i]) for i in (0, 1)])


def concat(call: Call, states: States) -> Outcome:
    """Values one after the other.  Along the dim that is cut, each rank joins its slices."""
    return mix(call, enumerate(states))


def transpose(call: Call, states: States) -> Outcome:
    """Dims in another order."""
    return moved(mix(call, [(0, states[0])]), call.static["dims"].index)


def moved(state: State | None, place: Callable[[int], int]) -> State | None:
    """The state where dims have moved: `place` of an old one is its new one."""
    return state if state is None or state.dim is None else at(state, place(state.dim))


def broadcast_to(call: Call, states: States) -> Outcome:
    """Dims in front, and dims of length 1 repeated."""
    state = mix(call, [(0, states[0])])
    old, new = call.shape(0), call.static["shape"]
    extra = len(new) - len(old)
    if state is not None and state.dim is not None and old[state.dim] != new[state.dim + extra]:
        way = "an all_gather is missing before it"
        raise Mismatch(f"{call.title} repeats dim {state.dim} of a {state} value", way)
    return moved(state, lambda dim: dim + extra)


def pad(call: Call, states: States) -> Outcome:
    """A constant around it: not around slices, and not in summands unless it is 0."""
    state = mix(call, [(0, states[0])])
    widths, value = call.static["widths"], call.static["value"]
    if state == PARTIAL and value != 0:
        way = "every rank would add it: an all_reduce or reduce_scatter is missing before it"
        raise Mismatch(f"{call.title} with {value} of a Partial value", way)
    if state is not None and state.dim is not None and any(widths[state.dim]):
        raise mixes(call, state)
    return state


def getitem(call: Call, states: States) -> Outcome:
    """Basic indexing: the dim that is cut must be taken whole."""
    state = mix(call, [(0, states[0])])
    return state if state is None or state.dim is None else at(state, _indexed(call, state))


def _indexed(call: Call, state: State) -> int:
    """Where the dim that is cut stands in x[index].

    Raises:
        Mismatch: only a part of it is taken, other parts are on other ranks.
    """
    given = call.static["index"]
    items: list[Any] = list(given) if isinstance(given, tuple) else [given]
    taken = sum(item is not None and item is not Ellipsis for item in items)
    rest = [slice(None)] * (call.ndim(0) - taken)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    items = [*items, *rest] if at is None else [*items[:at], *rest, *items[at + 1 :]]
    old = new = 0
    for item in items:
        if item is None:
            new += 1
            continue
        if old == state.dim:
            length = call.shape(0)[old]
            if isinstance(item, slice) and item.indices(length) == (0, length, 1):
                break
            what = f"{call.title} of a part of dim {old} of a {state} value"
            raise Mismatch(what, "the other ranks hold other slices: an all_gather is missing before it")
        old += 1
        new += isinstance(item, slice)
    return new


def take(call: Call, states: States) -> Outcome:
    """Slices of input 0 by the numbers in input 1, along a dim: rows of a table."""
    table, ids = states[0], states[1]
    dim, more = call.static.get("dim", 0), call.ndim(1) - 1
    if table is not None and table.dim == dim:
        way = "a lookup over the axis is missing (parallel.vocabulary.VocabularyEmbedding), or an all_gather before it"
        raise Mismatch(f"{call.title} by number along dim {dim} of a {table} value", way)
    return mix(call, [(0, moved(table, lambda d: d if d < dim else d + more)), (1, moved(ids, lambda d: dim + d))])


def gather_along(call: Call, states: States) -> Outcome:
    """One element of input 0 for each number in input 1, along a dim."""
    if states[0] == Shard(call.static["dim"]):
        raise mixes(call, states[0])
    return mix(call, [(0, states[0]), (1, states[1])])


def statistic(call: Call, states: States) -> Outcome:
    """A constant from messages."""
    return None

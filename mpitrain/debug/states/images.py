"""Rules for images (b, h, w, c): samples and channels may be cut, pixels not, since a window looks at neighbours."""

from __future__ import annotations

from mpitrain.debug.states.mixing import Call, Mismatch, States, a_state, at, mix
from mpitrain.debug.states.rules import Outcome, add_bias, contract
from mpitrain.spec import State

PIXELS = (1, 2)


def conv2d(call: Call, states: States) -> Outcome:
    """x (b, h, w, c) with filters w (out, kh, kw, c), plus a bias (out,)."""
    _check_pixels(call, states[0])
    filters = states[1]
    if filters is not None and filters.dim in PIXELS:
        what = f"{call.title} with filters of which each rank has a part, {a_state(filters)} value"
        raise Mismatch(what, "Shard(0) cuts between filters, Shard(3) between channels", 1)
    if call.static["groups"] > 1:
        return add_bias(call, states, _by_group(call, states), 3)
    product = contract(call, states, (3, 3), lambda i, dim: dim if i == 0 else 3)
    return add_bias(call, states, product, 3)


def _by_group(call: Call, states: States) -> State | None:
    """With groups a cut goes between groups, through images and filters alike, or it does not touch channels."""
    x, w = states[0], states[1]
    for i, state, groups, other in ((0, x, 3, w), (1, w, 0, x)):
        if state is None or state.dim is None or (i == 0 and state.dim == 0):
            continue
        if state.dim != groups or other is None or other.dim != 3 - groups:
            what = f"{call.title} in {call.static['groups']} groups with {a_state(state)} value as input {i}"
            raise Mismatch(what, "images Shard(3) go with filters Shard(0), whole groups of both on each rank", i)
    if x is not None and x.dim == 3:
        return x
    return mix(call, [(0, x), (1, w)])


def pool2d(call: Call, states: States) -> Outcome:
    """Samples and channels are strangers to each other."""
    _check_pixels(call, states[0])
    return mix(call, [(0, states[0])])


def batch_statistics(call: Call, states: States) -> Outcome:
    """Of x (b, ..., c) a mean and a variance (2, c), on an axis over which they are not taken: channels may be cut."""
    state, last = states[0], call.ndim(0) - 1
    if state is not None and state.dim is not None and state.dim != last:
        what = f"{call.title} of {a_state(state)} value, over the rows of this rank alone"
        raise Mismatch(what, "its axis must have all ranks that hold other rows: mesh.merged(DATA_AXES)")
    found = mix(call, [(0, state)])
    return found if found is None or found.dim is None else at(found, 1)


def normalize(call: Call, states: States) -> Outcome:
    """x (..., c) by statistics (2, c), weight and bias (c,): number by number."""
    last = call.ndim(0) - 1

    def placed(i: int, dim: int) -> tuple[int, State | None]:
        state = states[i]
        return i, state if state is None or state.dim != dim else at(state, last)

    return mix(call, [(0, states[0]), placed(1, 1), placed(2, 0), placed(3, 0)])


def _check_pixels(call: Call, state: State | None) -> None:
    if state is not None and state.dim in PIXELS:
        what = f"{call.title} among the pixels of {a_state(state)} value, a part of each image"
        raise Mismatch(what, "an all_gather is missing before it")

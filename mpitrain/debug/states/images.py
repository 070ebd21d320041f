"""Rules for images (b, h, w, c): samples and channels may be cut, pixels not, since a window looks at neighbours."""

from __future__ import annotations

from mpitrain.debug.states.mixing import Call, Mismatch, States, a_state, mix
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
    product = contract(call, states, (3, 3), lambda i, dim: dim if i == 0 else 3)
    return add_bias(call, states, product, 3)


def max_pool2d(call: Call, states: States) -> Outcome:
    """Samples and channels are strangers to each other."""
    _check_pixels(call, states[0])
    return mix(call, [(0, states[0])])


def _check_pixels(call: Call, state: State | None) -> None:
    if state is not None and state.dim in PIXELS:
        what = f"{call.title} among the pixels of {a_state(state)} value, a part of each image"
        raise Mismatch(what, "an all_gather is missing before it")

"""Rules for rows of tokens that go to experts and come back.

On the axes over which tokens are divided a rank's rows are Shard(0), whichever dim of the stream was cut: they are
those of its own tokens.  Behind the all_to_all that brings them to their experts they are Sent(0): cut still, but each
rank has rows of all ranks' tokens.  Only there an expert that no other rank has may work on them, and only what came
back may be given to the tokens again.

Numbers of rows and experts are as the assignment made them on this rank, so their own state says nothing.
"""

from __future__ import annotations

from mpitrain.debug.states.mixing import Call, Mismatch, States, a_state, at, is_sent, mix
from mpitrain.debug.states.rules import Outcome, contract, last
from mpitrain.spec import Shard, State


def take_rows(call: Call, states: States) -> Outcome:
    """Rows of x (..., h) by number: the leading dims become one."""
    state = mix(call, [(0, states[0])])
    if state is None or state.dim is None:
        return state
    return at(state, int(state.dim == last(call)))


def arrive(call: Call, states: States) -> Outcome:
    """Rows that have come, one part after the other."""
    first = states[0]
    for i, state in enumerate(states):
        if first is not None and state is not None and state != first:
            what = f"{call.title} of {a_state(first)} and {a_state(state)} value"
            raise Mismatch(what, "all parts must be in one state", 0, i)
    return mix(call, [(0, first)])


def grouped_matmul(call: Call, states: States) -> Outcome:
    """x (n, a) w (g, a, b): each group of rows times its own matrix."""
    x, w = states[0], states[1]
    if w == Shard(0):  # each rank has experts of its own
        if x is None or is_sent(x):
            return Shard(0) if x is None else x
        what = f"{call.title} of {a_state(x)} value by experts of which each rank has some"
        raise Mismatch(what, "an all_to_all of the rows to their experts is missing before it", 0, 1)
    if x is not None and is_sent(x) and w is not None:
        what = f"{call.title} of a {x} value, rows that were sent to their experts, by {a_state(w)} weight"
        name = call.parameter(1)
        spec = f"the spec of {name} on {{axis}} is {w}: " if name else "the weight must be "
        raise Mismatch(what, f"{spec}Shard(0), each rank has its own experts", 0, 1)
    return contract(call, states, (1, 1), lambda i, dim: dim if i == 0 else dim - 1)


def combine(call: Call, states: States) -> Outcome:
    """out (n, h), gates (..., k): the weighted sum of the rows that belong to a token, (..., h)."""
    out, gates = states[0], states[1]
    columns = call.ndim(1) - 1  # of the result
    if out is not None and is_sent(out):
        what = f"{call.title} of a {out} value, rows that are with their experts"
        raise Mismatch(what, "an all_to_all back to their tokens is missing before it")
    if gates is not None and gates.dim == columns:
        what = f"{call.title} over the choices of {a_state(gates)} value"
        raise Mismatch(what, "an all_gather of the gates is missing before it", 1)
    if out == Shard(0):
        if gates is None:
            return tuple(Shard(dim) for dim in range(columns))
        if gates.dim is None:
            raise Mismatch(*_of_other_tokens(call, out, gates), 0, 1)
        return gates
    if gates is not None and gates.dim is not None and out is not None:
        raise Mismatch(*_of_other_tokens(call, out, gates), 0, 1)
    return mix(call, [(0, Shard(columns) if out == Shard(1) else out), (1, gates)])


def _of_other_tokens(call: Call, out: State, gates: State) -> tuple[str, str]:
    what = f"{call.title} of {a_state(out)} value with {a_state(gates)} one as its gates"
    if gates.dim is None:
        return (
            what,
            "the rows are those of this rank's tokens, the gates those of all: these must be cut as the tokens are",
        )
    return what, "the rows are those of all tokens: an all_gather of the gates is missing before it"

"""`backward`: one step of the way back on a rank: the node, the gradient that came, the gradients it makes.

    B0@0 of step 1 on rank 0: node 31 of 33 (F0@0 of step 1), linear.backward done

    node   %62 = linear(%60, %61)  (2, 8, 8)  dp S(0) tp S(2)  head

           value               states           shape            min       max     norm
    came   %62                 dp S(0) tp S(2)  (2, 8, 8)   -0.01551  0.005111  0.04305
    gives  %60                 dp S(0) tp P     (2, 8, 16)  -0.009461  0.01003  0.04537
    gives  %61    head.weight  dp P tp S(1)     (16, 8)     -0.03092    0.0401   0.1473
    final with this node: head.weight

    next   %60 = copy(%59; tp)  (2, 8, 16)  dp S(0) tp R  head

States stand in letters: Invariant, Replicate, Partial, Shard(dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.autograd.lazy import Lazy
from mpitrain.autograd.node import CONSTANT, Node
from mpitrain.autograd.tape import Tape
from mpitrain.comm.places import listed
from mpitrain.debug.columns import aligned
from mpitrain.debug.console.apart import differences
from mpitrain.debug.console.current import find, pass_text
from mpitrain.debug.console.numbers import cut, short, summary
from mpitrain.debug.console.shown import wrapped
from mpitrain.debug.console.tapes import LONGEST_PATH, listing, place, short_states, view_of
from mpitrain.debug.console.watch import Watch
from mpitrain.errors import ConsoleError

HELP_BACKWARD = """\
backward [RANK]      one step of the way back: the gradient that came, the gradients it gives
  step op goes from node to node; at its begin a node has made nothing yet, at its end it has.
  A gradient has the dual state: of Replicate Partial (to be summed), of Partial Replicate.
  A parameter's gradient is final after the node where it was used first: then it may be sent.
  Where ranks stand at the same node, gradients that should be the same on them are compared."""


def backward(views: Sequence[Watch], words: str, focus: int, width: int = 100) -> str:
    """What the way back does just now.

    Args:
        views: of the ranks.
        words: a rank, or nothing.
        focus: the rank that is meant then.
        width: columns of the terminal.

    Raises:
        ConsoleError: that rank is not on the way back.
    """
    view = view_of(views, words.strip() or str(focus))
    op = view.op
    if op is None or not op.is_backward:
        stands = f", but in {op.name}" if op is not None else ""
        others = [str(each.rank) for each in views if each.op is not None and each.op.is_backward]
        way = f"rank {others[0]} is: backward {others[0]}" if others else "go there: to B0@0, then step op"
        raise ConsoleError(f"rank {view.rank} is not on the way back{stands}; {way}")
    tape: Tape = op.info["tape"]
    node: Node = op.info["node"]
    at, _ = place(view, tape)
    status = "done" if op.ended else "about to run"
    where = f"{op.action} of step {op.step}" if op.action else "the way back"
    head = f"{where} on rank {view.rank}: node {at} of {len(tape)} ({pass_text(view, tape)}), {op.name} {status}"
    lines = [*wrapped(head, width), "", f"node   {listing(view, tape, [node], width - 7)[0]}", ""]
    grads = op.info["grad"] if type(op.info["grad"]) is tuple else (op.info["grad"],)
    rows = [["", "value", "", "states", "shape", "min", "max", "norm", ""]]
    rows += [
        _row(view, tape, "came", slot, grad, "nobody wanted it")
        for slot, grad in zip(node.outputs, grads, strict=False)
    ]
    made = op.info["grads"] if op.ended else (None,) * len(node.inputs)
    missing = "nothing" if op.ended else "not made yet"
    for slot, grad, wanted in zip(node.inputs, made, op.info["wanted"], strict=False):
        if slot != CONSTANT and wanted:
            rows.append(_row(view, tape, "gives", slot, grad, missing))
    lines += [line[:width] for line in aligned(rows, words=(0, 1, 2, 3, 4, 8)).splitlines()]
    if node.firsts:
        lines += wrapped(f"final with this node: {', '.join(p.name for p in node.firsts)}", width)
    following = next((tape.nodes[number] for number in range(at - 1, -1, -1)), None)
    then = listing(view, tape, [following], width - 7)[0] if following is not None else "the end of the tape"
    return "\n".join([*lines, "", f"next   {then}", *_apart(views, view, width)])


def _row(view: Watch, tape: Tape, what: str, slot: int, grad: Any, missing: str) -> list[str]:
    """One gradient: of which value, its states, its numbers."""
    leaf = tape.leaf(slot)
    name = cut(getattr(leaf, "name", ""), LONGEST_PATH, left=True) if leaf is not None and leaf.is_parameter else ""
    row = [what, f"%{slot}", name, short_states(view, tape, slot, of_gradient=True)]
    if grad is None:
        return [*row, missing]
    array = grad.array() if isinstance(grad, Lazy) else grad
    s = summary(array)
    numbers = [short(s.least), short(s.largest), short(s.norm)]
    return [*row, str(tuple(array.shape)), *numbers, f"{s.bad:,} not finite" if s.bad else ""]


def _apart(views: Sequence[Watch], view: Watch, width: int) -> list[str]:
    """Where ranks at the same node differ that should not."""
    assert view.op is not None
    same = [other for other in views if other.op is not None and other.op.moment == view.op.moment]
    lines = []
    for word in ("grad", "input_grad"):
        if word == "input_grad" and not view.op.ended:
            continue
        at_hand = [other for other in same if other.op is not None and other.op.ended == view.op.ended]
        for title, found in find(at_hand, word):
            for text in differences(found):
                lines += wrapped(f"! {title}: {text}", width)
    others = [other.rank for other in views if other not in same]
    note = [f"  rank{'s' * (len(others) > 1)} {listed(others)}: elsewhere"] if others else []
    return [*([""] if lines or note else []), *lines, *note]

"""Values of what ranks are in the middle of: what an op was given and made, its gradients, a message, a micro-batch.

input.0  output  grad  input_grad.1      of the op that runs, or ran last; or of the message, or the action F
%7                                       a value of the tape that records, or is walked
batch.targets                            of the micro-batch
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from mpitrain.autograd.lazy import Lazy
from mpitrain.autograd.tape import Tape
from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.debug.console.found import Found, places, states_text
from mpitrain.debug.console.watch import Watch
from mpitrain.debug.states.known import BatchArrays, Known
from mpitrain.errors import ConsoleError
from mpitrain.nn.share import is_absent
from mpitrain.spec import dual

WORDS = ("input", "output", "grad", "input_grad", "batch")
ALIKE = ("all_reduce", "all_gather", "broadcast", "exchange")
"""Messages that bring the same to all ranks of their axis."""

_SLOT = re.compile(r"%([0-9]{1,9})")


def is_current(word: str) -> bool:
    """Whether a word is one of these."""
    return word.startswith("%") or word.partition(".")[0] in WORDS


def find(views: Sequence[Watch], word: str) -> list[tuple[str, list[Found]]]:
    """What a word names on every rank: (title, what each rank has), several where it stands for several.

    Raises:
        ConsoleError: nothing, on any rank.
    """
    if word.startswith("%"):
        return [_value(views, word)]
    name, _, rest = word.partition(".")
    here = [_batch(view) if name == "batch" else _at_hand(view, name) for view in views]
    known = list(dict.fromkeys(each for of_rank in here for each in of_rank))
    meant = [each for each in known if not rest or each == rest]
    if not meant:
        if name in ("input", "output") and (back := [view for view in views if _walks_back(view)]):
            raise ConsoleError(f"rank {back[0].rank} {_missing(back[0], name)}")
        raise ConsoleError(_nothing(name, rest, known))
    titles = [f"{name}.{each}" if each else name for each in meant]
    missing = [_missing(view, name) for view in views]
    return [
        (
            title,
            [
                of_rank.get(each) or Found(view.rank, None, why)
                for view, of_rank, why in zip(views, here, missing, strict=True)
            ],
        )
        for title, each in zip(titles, meant, strict=True)
    ]


def _walks_back(view: Watch) -> bool:
    is_op = view.event is not None and view.event.kind == "op"
    return is_op and view.op is not None and view.op.is_backward


def _missing(view: Watch, name: str) -> str:
    """Why a rank has none of that name."""
    if name in ("input", "output") and _walks_back(view):
        return "is in an op of the way back: show grad is what came, input_grad what it has made"
    return "has none just now"


def _nothing(name: str, rest: str, known: Sequence[str]) -> str:
    if known and rest:
        return f"there is no {name}.{rest}; there is {', '.join(f'{name}.{each}' if each else name for each in known)}"
    where = {
        "batch": "no rank has a micro-batch yet: they have one in an action such as F0@0",
        "output": "nothing was made yet: the op, message or action that ranks are in has not ended",
        "grad": "no rank is in a backward: only there is a grad",
        "input_grad": "no backward has ended: input_grad is what one has made",
    }
    return where.get(name, "no rank is in an op, a message or an action with inputs")


# -- what an event shows ----------------------------------------------------------------------------------------------


def _at_hand(view: Watch, name: str) -> dict[str, Found]:
    """Number (or "") -> the value of this name at the rank's newest event."""
    event = view.event
    if event is None:
        return {}
    if event.kind in ("message", "arrival"):
        return _of_message(view, name)
    if event.kind == "action":
        return _of_action(view, name)
    return _of_op(view, name) if view.op is not None else {}


def _of_op(view: Watch, name: str) -> dict[str, Found]:
    op = view.op
    assert op is not None
    info, tape = op.info, op.info.get("tape")
    values: list[tuple[Any, Known | None, bool]] = []  # value, what is known of it, whether it is a gradient
    if name == "input" and not op.is_backward:
        values = [(x, _known(view, t), False) for x, t in zip(info["inputs"], info["tensors"], strict=True)]
    elif name == "output" and op.ended and not op.is_backward:
        values = [(t.data, _known(view, t), False) for t in info["outputs"]]
    elif name == "grad" and op.is_backward:
        grads = info["grad"] if type(info["grad"]) is tuple else (info["grad"],)
        values = [(g, _known_at(view, tape, slot), True) for g, slot in zip(grads, info["node"].outputs, strict=False)]
    elif name == "input_grad" and op.is_backward and op.ended:
        slots = info["node"].inputs
        values = [(g, _known_at(view, tape, slot), True) for g, slot in zip(info["grads"], slots, strict=False)]
    of = f"{op.name}{' of ' + info['path'] if info['path'] else ''}"
    moment = (*op.moment, name)
    when = f"{op.action + ', ' if op.action else ''}op {op.number}, {of}"
    found = {}
    for i, (value, known, is_gradient) in enumerate(values):
        key = str(i) if len(values) > 1 else ""
        found[key] = _found(view, value, known, is_gradient, (name, i), moment, when)
    return {key: each for key, each in found.items() if each is not None}


def _of_action(view: Watch, name: str) -> dict[str, Found]:
    event = view.event
    assert event is not None
    tensors = (
        event.info.get("inputs", ()) if name == "input" else event.info.get("outputs", ()) if name == "output" else ()
    )
    found = {}
    for i, t in enumerate(tensors):
        key = str(i) if len(tensors) > 1 else ""
        moment = view.step, event.name, event.phase
        found[key] = _found(view, t.data, _known(view, t), False, (name, i), moment, event.name)
    return {key: each for key, each in found.items() if each is not None}


def _of_message(view: Watch, name: str) -> dict[str, Found]:
    event = view.event
    assert event is not None
    info = event.info
    value = info.get("array") if name == "input" else info.get("result") if name == "output" else None
    verb = event.name.removeprefix("wait ")
    verb = LIKE_BLOCKING.get(verb, verb)
    if not hasattr(value, "dtype") or (name == "input" and verb == "recv"):  # a buffer that is to be filled
        return {}
    group = (info["axis"], info["ranks"]) if name == "output" and verb in ALIKE else None
    when = f"{event.name} on {info['axis']}, call {info['number']}"
    return {"": Found(view.rank, value, group=group, moment=(event.name, info["number"]), when=when)}


def _found(
    view: Watch, value: Any, known: Known | None, is_gradient: bool, key: Any, moment: Any, when: str
) -> Found | None:
    """A value by what is known of it; None for what is no value."""
    if isinstance(value, Lazy):
        value = value.array()
    if not hasattr(value, "dtype"):
        return None
    mesh, note = view.mesh, ""
    if mesh is None or known is None:
        return Found(view.rank, value, when=when, moment=moment, note=note)
    states = {}
    for axis, found in known.states.items():
        states[axis] = " or ".join(str(dual(state) if is_gradient else state) for state in found)
    is_same = known.has_same_gradient if is_gradient else known.is_same
    same = [axis for axis in known.states if is_same(axis)]
    group = (key, places(mesh, same)) if same else None
    return Found(view.rank, value, "", (), "", states_text(mesh, states), group, moment, when, note)


def _known(view: Watch, x: Any) -> Known | None:
    return None if view.onlooker is None else view.onlooker.known(x)


def _known_at(view: Watch, tape: Tape | None, slot: int) -> Known | None:
    return None if view.onlooker is None or tape is None or slot < 0 else view.onlooker.known_at(tape, slot)


# -- a value of the tape ----------------------------------------------------------------------------------------------


def _value(views: Sequence[Watch], word: str) -> tuple[str, list[Found]]:
    match = _SLOT.fullmatch(word)
    if match is None:
        raise ConsoleError(f"{word!r} is no value of a tape: those are %0, %1, ... as tape prints them")
    slot = int(match[1])
    found = [_slot(view, slot) for view in views]
    if all(each.array is None and not each.note for each in found):
        most = max((_slots(view.tape) for view in views if view.tape is not None), default=0)
        if slot >= most:
            has = f"; the tapes go up to %{most - 1}" if most else ": nothing was recorded yet"
            raise ConsoleError(f"there is no {word}{has}")
    return word, found


def _slots(tape: Tape) -> int:
    made = max((slot for node in tape.nodes for slot in node.outputs), default=-1)
    return max(made, max((slot for _, slot in tape.leaves()), default=-1)) + 1


def _slot(view: Watch, slot: int) -> Found:
    tape = view.tape
    if tape is None:
        return Found(view.rank, None, "has no tape yet")
    node = next((node for node in tape.nodes if slot in node.outputs), None)
    leaf = tape.leaf(slot)
    if node is None and leaf is None:
        return Found(view.rank, None, "has no such value on its tape")
    made = f"made by {node.function.title()}{' of ' + node.path if node.path else ''}" if node is not None else ""
    note = made or str(getattr(leaf, "name", "an input"))
    when = pass_text(view, tape)
    array = view.slots.array(tape, slot)
    if array is not None and is_absent(array):
        return Found(view.rank, None, "comes and goes with its part of the model", when=when, note=note)
    if array is None:
        return Found(
            view.rank, None, "gone, since nobody needs it any more; after keep on later ones stay", when=when, note=note
        )
    found = _found(view, array, _known_at(view, tape, slot), False, ("%", slot), view.slots.pass_of(tape), when)
    return Found(view.rank, array, note=note, when=when) if found is None else found._replace(note=note)


def pass_text(view: Watch, tape: Tape) -> str:
    """`F3@1 of step 2`, as the pass in which a tape was recorded."""
    of = view.slots.pass_of(tape)
    if len(of) < 2:
        return f"tape {of[0]}" if of else "a tape"
    step, action, number = of
    again = "" if number == 1 and action.startswith("F") else f", tape {number}"
    return f"{action} of step {step}{again}"


# -- the micro-batch --------------------------------------------------------------------------------------------------


def _batch(view: Watch) -> dict[str, Found]:
    """Field -> its array."""
    batch, mesh = view.batch, view.mesh
    if batch is None or mesh is None:
        return {}
    axes = [axis for axis in ("edp", "ep", "cp", "tp") if mesh.sizes[axis] > 1]
    known = BatchArrays(batch, axes)
    items = {f.name: getattr(batch, f.name) for f in fields(batch)} if is_dataclass(batch) else vars(batch)
    found = {}
    moment = view.step, view.action and view.action.micro, view.action and view.action.part
    when = f"step {view.step}, micro-batch {moment[1]}"
    for name, value in items.items():
        if not getattr(value, "ndim", 0):
            continue
        of = known.find(value)
        states = {} if of is None else {axis: str(state[0]) for axis, state in of.states.items()}
        same = ["pp"] if of is None else ["pp", *(axis for axis in of.states if of.is_same(axis))]
        state = states_text(mesh, states)
        found[name] = Found(view.rank, value, "", (), "", state, (name, places(mesh, same)), moment, when)
    return found

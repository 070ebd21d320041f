"""`tape`: what a rank has recorded, with the place where it stands, and where the tapes of two ranks differ.

    tape of F0@0 of step 1 on rank 0, float64: 33 nodes, 7 walked back; 41.5 KiB wait for backward
            %52 = blocks.1.mlp.down.weight  (32, 16)
       25   %51 = gelu_tanh(%49, %50)  (2, 8, 32)  dp S(0) tp S(2)  blocks.1.mlp
       26 > %53 = linear(%51, %52)     (2, 8, 16)  dp S(0) tp P     blocks.1.mlp.down
       27 - %54 = all_reduce(%53; tp)  (2, 8, 16)  dp S(0) tp I     blocks.1.mlp.down

`>` is where the rank is: at the node that is walked, or behind the one recorded last.  `-` was walked back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from mpitrain.autograd.node import Node
from mpitrain.autograd.tape import Tape
from mpitrain.comm.mesh import Mesh
from mpitrain.debug.console.current import pass_text
from mpitrain.debug.console.numbers import cut, nbytes
from mpitrain.debug.console.shown import wrapped
from mpitrain.debug.console.watch import Watch
from mpitrain.errors import ConsoleError
from mpitrain.spec import dual

HELP_TAPE = """\
tape [RANK] [all | 10:20 | F0@1]      what a rank has recorded, and where it stands on it
tape diff RANK RANK      where the tapes of two ranks differ
  Of a long tape the nodes around that place; all: every node; 10:20: these; F0@1: that pass.
  > is where the rank is: at the node that is walked, or behind the last one.  - was walked back.
  A node is: its values, the op of which inputs, shape, the states on each axis (Invariant,
  Replicate, Partial, Shard), the module.  show %7 shows a value.
  diff compares ops, modules, shapes and arguments; ranks of different stages have other tapes."""

AROUND = 8
"""Nodes before and after the place that are shown."""
MOST_DIFFERENCES = 12
LONGEST_PATH = 30
SHORTEST_OP = 32
"""Columns that an op has before the module's name is cut."""

_RANGE = re.compile(r"([0-9]{1,9})?:([0-9]{1,9})?")


def tape(views: Sequence[Watch], words: str, focus: int, width: int = 100) -> str:
    """The tape of a rank, or the difference of two.

    Args:
        views: of the ranks.
        words: see `HELP_TAPE`.
        focus: the rank that is meant where none is named.
        width: columns of the terminal.

    Raises:
        ConsoleError: there is no such rank, or no such tape.
    """
    asked = words.split()
    if asked[:1] == ["diff"]:
        if len(asked) != 3:
            raise ConsoleError("tape diff takes two ranks: tape diff 0 2")
        return _difference(view_of(views, asked[1]), view_of(views, asked[2]), width)
    view, lines, which = view_of(views, str(focus)), None, None
    whole = False
    for word in asked:
        if word.isdecimal():
            view = view_of(views, word)
        elif word == "all":
            whole = True
        elif match := _RANGE.fullmatch(word):
            lines = int(match[1] or 0), int(match[2]) if match[2] else None
        else:
            which = word
    found = _tape_of(view, which)
    at, walked = place(view, found)
    dtypes = ", ".join(sorted({str(dtype) for node in found.nodes for _, dtype in node.kinds}))
    head = f"tape of {pass_text(view, found)} on rank {view.rank}{', ' * bool(dtypes)}{dtypes}: {_nodes(len(found))}"
    head += f", {walked} walked back" * bool(walked) + f"; {nbytes(found.nbytes)} wait for backward"
    first, last = (0, len(found)) if whole else _window(at, len(found)) if lines is None else _bounds(lines, len(found))
    nodes = [(number, found.nodes[number]) for number in range(first, last)]
    marks = [">" if n == at else "-" if n >= len(found) - walked else " " for n, _ in nodes]
    shown = [*wrapped(head, width), *_leaves(found, [node for _, node in nodes], width)]
    shown += [f"          ... {_nodes(first)} before"] * (first > 0)
    texts = listing(view, found, [node for _, node in nodes], width - 8)
    shown += [f"{n:5d} {mark} {text}" for (n, _), mark, text in zip(nodes, marks, texts, strict=True)]
    shown += [f"          ... {_nodes(len(found) - last)} more"] * (last < len(found))
    op = view.op
    if op is not None and not op.ended and not op.is_backward and found is view.tape and last == len(found):
        shown.append(f"      > {op.name} has begun{' in ' + op.info['path'] if op.info['path'] else ''}"[:width])
    return "\n".join(shown)


def view_of(views: Sequence[Watch], word: str) -> Watch:
    """A rank by its number.

    Raises:
        ConsoleError: there is none.
    """
    found = next((view for view in views if word.isdecimal() and view.rank == int(word)), None)
    if found is None:
        raise ConsoleError(f"there is no rank {word}; ranks are {', '.join(str(view.rank) for view in views)}")
    return found


def _tape_of(view: Watch, which: str | None) -> Tape:
    """The one that the rank is at, or that of a pass by the name of its action."""
    if which is not None:
        named = [tape for tape in view.slots.tapes() if str(view.slots.pass_of(tape)[1:2]).find(f"'{which}'") >= 0]
        if not named:
            alive = ", ".join(dict.fromkeys(pass_text(view, tape) for tape in view.slots.tapes() if tape.nodes))
            raise ConsoleError(f"rank {view.rank} holds no tape of {which}; it holds {alive or 'none'}")
        return named[-1]
    if view.tape is None:
        raise ConsoleError(f"rank {view.rank} has recorded nothing yet: a tape begins with a forward (next action)")
    return view.tape


def place(view: Watch, tape: Tape) -> tuple[int, int]:
    """Where the rank stands on a tape, and how many nodes it has walked back.

    The place is that of a node on the way back, and behind the last node on the way forward.
    """
    walk = view.slots.walked(tape)
    if walk is None:
        return len(tape), 0
    now = (view.step, str(view.action)) if view.acts else ()
    if walk.where != now or (not now and view.tape is not tape):
        return -1, len(tape)  # what began there is over
    return walk.at, len(tape) - 1 - walk.at + walk.ended


def _window(at: int, length: int) -> tuple[int, int]:
    return max(0, min(at, length) - AROUND), min(length, max(at, 0) + AROUND + 1)


def _bounds(lines: tuple[int, int | None], length: int) -> tuple[int, int]:
    first, last = min(lines[0], length), length if lines[1] is None else min(lines[1], length)
    return first, max(first, last)


def _leaves(tape: Tape, nodes: Sequence[Node], width: int) -> list[str]:
    """What these nodes use and none of the tape made; nothing where it would be longer than the nodes are."""
    used = {slot for node in nodes for slot in node.inputs}
    lines = [f"        %{slot} = {getattr(t, 'name', 'input')}  {t.shape}" for t, slot in tape.leaves() if slot in used]
    return [line[:width] for line in lines] if len(lines) <= max(len(nodes), 2 * AROUND) else []


def listing(view: Watch, tape: Tape, nodes: Sequence[Node], width: int) -> list[str]:
    """Nodes, a line each: the op of which inputs, shapes, the states of what it made, the module."""
    rows = [_cells(view, tape, node) for node in nodes]
    sizes = [max(map(len, column), default=0) for column in zip(*rows, strict=True)] if rows else [0] * 4
    room = width - sizes[1] - sizes[2] - 6
    path = min(sizes[3], max(room - min(sizes[0], SHORTEST_OP), 8))
    op = min(sizes[0], max(room - path, 8))
    lines = []
    for row in rows:
        cells = [
            cut(row[0], op).ljust(op),
            row[1].ljust(sizes[1]),
            row[2].ljust(sizes[2]),
            cut(row[3], path, left=True),
        ]
        lines.append("  ".join(cells).rstrip()[:width])
    return lines


def _cells(view: Watch, tape: Tape, node: Node) -> list[str]:
    head = str(node).partition(")  ")[0]
    op = head if head.endswith(")") else f"{head})"
    kinds = [str(tuple(shape)) for shape, _ in node.kinds]
    shapes = f"{kinds[0]} x{len(kinds)}" if len(kinds) > 1 and len(set(kinds)) == 1 else " ".join(kinds)
    states = short_states(view, tape, node.outputs[0]) if node.outputs else ""
    return [op, shapes, states, node.path]


def short_states(view: Watch, tape: Tape, slot: int, of_gradient: bool = False) -> str:
    """The states of a value, or of its gradient, in letters: `dp S(0) tp P`."""
    known = view.onlooker.known_at(tape, slot) if view.onlooker is not None and slot >= 0 else None
    if known is None or view.onlooker is None:
        return ""
    states = {axis: dual(found[0]) if of_gradient else found[0] for axis, found in known.states.items()}
    text = view.onlooker.named(states).replace(",", "")
    return re.sub(r"\b(Invariant|Replicate|Partial|Shard)\b", lambda word: word[0][0], text)


# -- two ranks --------------------------------------------------------------------------------------------------------


def _difference(a: Watch, b: Watch, width: int) -> str:
    """Where their tapes differ, in the order of the program."""
    tapes = _tape_of(a, None), _tape_of(b, None)
    head = f"tapes of rank {a.rank} ({pass_text(a, tapes[0])}) and rank {b.rank} ({pass_text(b, tapes[1])})"
    note = _by_design(a.mesh, a, b)
    keys = [[(node.function.title(), node.path) for node in of.nodes] for of in tapes]
    places: list[tuple[int, int, str]] = []  # which of the two, place, sign
    changes = others = 0
    for kind, i, j, k, m in SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_opcodes():
        if kind != "equal":
            changes += 1
            places += [(0, x, "-") for x in range(i, j)] + [(1, y, "+") for y in range(k, m)]
            continue
        for x, y in zip(range(i, j), range(k, m), strict=True):
            mine, other = tapes[0].nodes[x], tapes[1].nodes[y]
            is_other = _shapes(a, tapes[0], mine) != _shapes(b, tapes[1], other)
            changes += is_other
            others += not is_other and mine.details() != other.details()
            places += [(0, x, "-"), (1, y, "+")] if is_other else []
    arguments = f"{others} with other arguments, as which slice a rank takes" if others else ""
    if not places:
        text = f"{head} are the same: {len(tapes[0])} nodes{', ' * bool(others)}{arguments}"
        return "\n".join(wrapped(text, width))
    counted = f"{changes} place{'s' * (changes != 1)} differ{'s' * (changes == 1)}{', ' * bool(others)}{arguments}"
    mark = "" if note else "! "
    lines = [*wrapped(f"{mark}{head}: {counted}{note}", width), f"      - rank {a.rank} alone, + rank {b.rank} alone"]
    shown = places[:MOST_DIFFERENCES]
    texts = []
    for which, (view, of) in enumerate(zip((a, b), tapes, strict=True)):
        nodes = [of.nodes[number] for each, number, _ in shown if each == which]
        texts.append(iter(listing(view, of, nodes, width - 8)))
    lines += [f"{number:5d} {sign} {next(texts[which])}" for which, number, sign in shown]
    more = len(places) - MOST_DIFFERENCES
    return "\n".join([*lines, *([f"        ... {_nodes(more)} more"] * (more > 0))])


def _nodes(number: int) -> str:
    return f"{number} node{'s' * (number != 1)}"


def _shapes(view: Watch, tape: Tape, node: Node) -> list[str]:
    """The shapes of what a node made, without the lengths of dims that are cut, and their dtypes."""
    texts = []
    for slot, (shape, dtype) in zip(node.outputs, node.kinds, strict=True):
        known = view.onlooker.known_at(tape, slot) if view.onlooker is not None else None
        texts.append(f"{shape if known is None else known.shape(shape)} {dtype}")
    return texts


def _by_design(mesh: Mesh | None, a: Watch, b: Watch) -> str:
    if mesh is None:
        return ""
    stages = [mesh.coords_of(view.rank)["pp"] for view in (a, b)]
    return f"; they are stages {stages[0]} and {stages[1]} of a pipeline" if stages[0] != stages[1] else ""

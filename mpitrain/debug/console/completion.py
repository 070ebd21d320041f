"""What Tab offers: names of commands, and what may stand behind each as things are now."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.debug.console import shown
from mpitrain.debug.console.commands import COMMANDS, Command, named
from mpitrain.debug.console.conditions import WORDS
from mpitrain.debug.console.watch import Watch
from mpitrain.errors import ConsoleError

if TYPE_CHECKING:
    from mpitrain.debug.console.console import Console

MOST = 2000  # words that are offered


def completer(console: Console) -> Callable[[str, int], str | None]:
    """A completer as readline has them."""
    found: list[str] = []

    def complete(text: str, state: int) -> str | None:
        if state == 0:
            import readline

            line = readline.get_line_buffer()[: readline.get_begidx()]
            found[:] = candidates(console, line, text)
        return found[state] if state < len(found) else None

    return complete


def candidates(console: Console, before: str, text: str) -> list[str]:
    """Words that may come next.

    Args:
        console: whose.
        before: what stands left of the word that is being typed.
        text: what there is of that word.
    """
    words = before.rpartition(";")[2].split()
    if not words:
        offered: Iterable[str] = (command.name for command in COMMANDS)
    else:
        try:
            command = named(words[0])
        except ConsoleError:
            return []
        offered = _behind(console, command, words[1:])
    found = sorted({word for word in offered if word.startswith(text)})
    ending = " " if len(found) == 1 else ""
    return [word + ending for word in found[:MOST]]


def _behind(console: Console, command: Command, words: Sequence[str]) -> Iterable[str]:
    """What may stand behind a command and some words."""
    last = words[-1] if words else ""
    match command.name:
        case "break" | "tbreak" | "to":
            return _of_clause(console, last, first=not words, actions=command.name == "to")
        case "step" | "next" | "finish" | "continue":
            if "rank" in words:
                return _ranks(console)
            kinds = ("action", "op", "message", *_kinds(console)) if command.name in ("step", "next") else ()
            return ["rank", *kinds]
        case "rank" | "stack" | "pdb" | "backward":
            return _ranks(console)
        case "where" | "pipeline":
            return ["all"]
        case "tape":
            return ["diff", "all", *_ranks(console)] if last != "diff" else _ranks(console)
        case "keep":
            return ["on", "off"]
        case "show":
            return shown.names(_watches(console))
        case "follow":
            return _parameters(console)
        case "unfollow":
            return list(console.follows)
        case "delete" | "disable" | "enable":
            return [str(point.number) for point in console.breakpoints]
        case "help":
            return [each.name for each in COMMANDS]
    return []


def _of_clause(console: Console, last: str, first: bool, actions: bool) -> Iterable[str]:
    """Behind a word of a condition its values, else more words."""
    match last:
        case "action":
            return _actions(console)
        case "op":
            return _ops(console)
        case "message":
            return ["all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "wait", *LIKE_BLOCKING]
        case "axis":
            return _axes(console)
        case "parameter":
            return _parameters(console)
        case "path":
            return sorted({name.rpartition(".")[0] for name in _parameters(console)} - {""})
        case "rank" | "peer":
            return _ranks(console)
        case "norm" | "largest":
            return [">", "<"]
        case "step" | "micro":
            return []
    return [*WORDS, *(_kinds(console) if first else ()), *(_actions(console) if first and actions else ())]


def _ranks(console: Console) -> list[str]:
    return [str(rank) for rank in range(console.size)]


def _watches(console: Console) -> list[Watch]:
    return [console.watches[rank] for rank in sorted(console.watches)]


def _parameters(console: Console) -> list[str]:
    return [name for name in shown.names(_watches(console)) if "." in name and not name.endswith((".grad", ".master"))]


def _actions(console: Console) -> set[str]:
    rows = [view.executor.row for view in console.stepper.views.values() if view.executor is not None]
    return {str(action) for row in rows for action in row}


def _kinds(console: Console) -> set[str]:
    return {re.split(r"[0-9@]", action, maxsplit=1)[0] for action in _actions(console)}


def _ops(console: Console) -> set[str]:
    """Those on tapes that can be seen, and what has begun."""
    found = set()
    for view in console.stepper.views.values():
        names = [node.function.title() for node in view.tape.nodes] if view.tape is not None else []
        names += [event.name for event in view.open if event.kind == "op"]
        found |= {*names, *(f"{name}.backward" for name in names if not name.endswith(".backward"))}
    return found


def _axes(console: Console) -> set[str]:
    found = {"world"}
    for view in console.stepper.views.values():
        if view.executor is not None:
            sizes = view.executor.mesh.sizes
            found |= {axis for axis, size in sizes.items() if size > 1} | {"dp"}
        found |= {call.axis for call in view.rank.calls}
    return found

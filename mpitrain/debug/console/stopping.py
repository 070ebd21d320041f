"""Commands about breakpoints."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mpitrain.debug.console.asked import near
from mpitrain.debug.console.conditions import WORDS, Clause, Condition, parse
from mpitrain.debug.console.moving import never_of
from mpitrain.debug.console.words import folded, nothing
from mpitrain.errors import ConsoleError

if TYPE_CHECKING:
    from mpitrain.debug.console.console import Console

_CLAUSES = "\n".join(f"    {word:<10} {text}" for word, text in WORDS.items())

HELP_BREAK = f"""\
break CONDITION      stop all ranks as soon as this holds on one of them
  A condition is one or more of these, which must all hold:
{_CLAUSES}
  An action (F3@1) and a line (train.py:31) are understood without their word.  With a condition on
  a value ranks stop after the work, with the value there: show output; with any other before it.
  With a parameter its own weight, or its part of the gradient, is the value; a parameter and
  op *.backward stop at its gradients alone.  Its name may be the end of one.  Where only rank,
  step, micro or path are named, ranks stop when one comes there.
    break op gelu.backward rank 3
    break message all_reduce axis dp step 2-
    break parameter *.up.weight norm > 10"""

HELP_TBREAK = """\
tbreak CONDITION      the same, once: it goes when it is hit"""
HELP_BREAKS = """\
breaks      the breakpoints, with how often each was hit"""
HELP_DELETE = """\
delete [N ...]      remove breakpoints, or all"""
HELP_DISABLE = """\
disable [N ...]      leave breakpoints in the list, and do not stop at them"""
HELP_ENABLE = """\
enable [N ...]      stop at them again"""


def break_(console: Console, words: str) -> None:
    """See `HELP_BREAK`; without words as `breaks`."""
    if words:
        _add(console, words)
    else:
        breaks(console, "")


def tbreak(console: Console, words: str) -> None:
    """See `HELP_TBREAK`."""
    _add(console, words, temporary=True)


def _add(console: Console, words: str, temporary: bool = False) -> None:
    condition = parse(words)
    if never := never_of(console, condition):
        raise ConsoleError(never)
    if names := _names(console):
        condition = _resolved(condition, names)
    point = console.breakpoints.add(condition, temporary)
    console.say(str(point))
    words_ = [word for word, _ in condition.clauses]
    if "at" in words_:
        console.say("stops where an op or message comes from that line; for any line: pdb, then b 18")
    if "parameter" in words_ and not names:
        ends = [Clause(word, f"*.{value}" if word == "parameter" else value) for word, value in condition.clauses]
        point.loose = Condition(tuple(ends))


def settle(console: Console) -> str:
    """Once all parameters are known: give breakpoints the full names, remove those whose name no parameter has.

    Returns:
        Why to stop: one was removed; "" if none was.
    """
    pending = [point for point in console.breakpoints if point.loose is not None]
    names = _names(console) if pending else set()
    if not names:
        return ""
    lost = []
    for point in pending:
        point.loose = None
        try:
            point.condition = _resolved(point.condition, names)
        except ConsoleError as error:
            console.breakpoints.delete(point)
            lost += folded(f"breakpoint {point.number} is removed: {error}", console.terminal.width - 10)
    return "\n".join(lost)


def _names(console: Console) -> set[str]:
    """Of all parameters; empty until every rank has a model that runs."""
    watches = console.watches.values()
    if len(watches) < console.size or any(watch.executor is None for watch in watches):
        return set()
    return {name for watch in watches for name in watch.parameters}


def _resolved(condition: Condition, names: set[str]) -> Condition:
    """With the full name of its parameter, of which the end is enough where only one has it.

    Raises:
        ConsoleError: no parameter has that name, or several have that end.
    """
    clauses = []
    for word, value in condition.clauses:
        if word == "parameter" and not any(fnmatchcase(name, value) for name in names):
            ends = sorted(name for name in names if fnmatchcase(name, f"*.{value}"))
            if not ends:
                like = near(value, sorted(names))
                raise ConsoleError(f"no parameter is called {value}" + (f"; near: {like}" if like else ""))
            if len(ends) > 1 and not set("*?[") & set(value):
                raise ConsoleError(f"{value} is the end of {', '.join(ends[:4])}; *.{value} means all of them")
            value = ends[0] if len(ends) == 1 else f"*.{value}"
        clauses.append(Clause(word, value))
    return Condition(tuple(clauses))


def breaks(console: Console, words: str) -> None:
    """See `HELP_BREAKS`."""
    nothing(words, "breaks")
    console.say("\n".join(map(str, console.breakpoints)) or "no breakpoints; break makes one")


def delete(console: Console, words: str) -> None:
    """See `HELP_DELETE`."""
    for point in console.breakpoints.chosen(words):
        console.breakpoints.delete(point)


def disable(console: Console, words: str) -> None:
    """See `HELP_DISABLE`."""
    for point in console.breakpoints.chosen(words):
        point.enabled = False


def enable(console: Console, words: str) -> None:
    """See `HELP_ENABLE`."""
    for point in console.breakpoints.chosen(words):
        point.enabled = True

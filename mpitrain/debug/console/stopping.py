"""Commands about breakpoints."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mpitrain.debug.console.conditions import WORDS, parse
from mpitrain.debug.console.moving import never_of
from mpitrain.debug.console.words import nothing
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
  With a parameter its own weight, or its part of the gradient, is the value.  Where only rank,
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
    console.say(str(console.breakpoints.add(condition, temporary)))
    pattern = next((value for word, value in condition.clauses if word == "parameter"), None)
    names = {name for watch in console.watches.values() for name in watch.parameters}
    is_known = all(watch.parameters for watch in console.watches.values())
    if pattern is not None and is_known and not any(fnmatchcase(name, pattern) for name in names):
        near = get_close_matches(pattern, names, 2, cutoff=0.4)
        console.terminal.warn(f"no parameter is called {pattern}" + (f"; near: {' '.join(near)}" if near else ""))


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

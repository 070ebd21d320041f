"""When to stop: conditions on what happens, as they are typed behind `break`.

    break op gelu.backward rank 3            both must hold
    break message all_reduce axis dp step 2
    break parameter blocks.0.mlp.* norm > 1e3
    break nonfinite                          the first value that is NaN or infinity, whoever makes it

A condition is a list of clauses, a word and its value each, which all must hold of one event.  Without a clause on a
value it is asked before the work is done, with one after it, when the value is there.  A condition that says only
*where* (`rank step micro path`) holds when a rank comes there, not for all that it does there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.debug.console.clauses import COMPARISONS, Happening, limits, test_of
from mpitrain.errors import ConsoleError
from mpitrain.pipeline.action import PER_MICRO, PER_STEP

MOST_CHARACTERS = 1000  # of a condition

WORDS: Mapping[str, str] = {
    "action": "F3@1, a pattern as F*@1, or a kind as F or STEP",
    "op": "gelu or gelu.backward; * stands for anything",
    "message": "its verb: all_reduce (also iall_reduce, which does not wait), send, wait",
    "axis": "on which a message goes: dp, tp, world",
    "peer": "rank to which, or from which, a message goes",
    "parameter": "an op uses this parameter, or makes its gradient; * stands for anything",
    "path": "module, with all that is in it: blocks.0.mlp; * stands for anything",
    "at": "line of the source from which an op or a message comes: train.py:31",
    "rank": "number, numbers or a range: 3, 0,2 or 4-7",
    "micro": "micro-batch of the action: number, numbers or a range",
    "step": "of the run, counted from 1: number, numbers or a range; 5- is from 5 on",
    "nonfinite": "a value was made, or came in a message, that is NaN or infinity",
    "norm": "as norm > 10: square root of the sum of squares of what was made",
    "largest": "as largest > 10: largest magnitude in what was made",
    "state": "a value is used in a wrong state: a sum over ranks is missing, or one too many",
}
"""The clauses, and what their values are."""

KINDS = {"action": "action", "op": "op", "message": "message", "axis": "message", "peer": "message", "parameter": "op"}
"""Clauses that are about one kind of event, and which."""

VALUES = ("nonfinite", "norm", "largest")
"""Clauses that look at a value."""

PLACES = ("rank", "step", "micro", "path")
"""Clauses that say only where."""

_ALIASES = {"param": "parameter", "weight": "parameter", "module": "path", "nan": "nonfinite"}
_NOISE = ("on", "and", "if", "when")
_TOKEN = re.compile(r"[<>]=?|[^\s<>]+")
_ACTION = re.compile(r"[A-Z_]+[0-9*?]*(\.[0-9*?]+)?@[0-9*?]+")
_LINE = re.compile(r"[^\s:]+\.py:[0-9]{1,9}")
RANGES = re.compile(r"[0-9]{1,9}(-([0-9]{1,9})?)?(,[0-9]{1,9}(-([0-9]{1,9})?)?)*")


class Clause(NamedTuple):
    """One word of a condition, and its value."""

    word: str
    value: str

    def __str__(self) -> str:
        return f"{self.word} {self.value}".rstrip()


@dataclass(frozen=True)
class Condition:
    """Clauses that must all hold of an event."""

    clauses: tuple[Clause, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.clauses))

    @property
    def is_about_values(self) -> bool:
        """Whether it can only be asked when the work is done."""
        return any(word in VALUES for word, _ in self.clauses)

    @property
    def is_about_states(self) -> bool:
        """Whether it asks for what the rules of states have to object, before or after the work."""
        return any(word == "state" for word, _ in self.clauses)

    @property
    def is_a_place(self) -> bool:
        """Whether it says only where: then it holds when a rank comes there."""
        return all(word in PLACES for word, _ in self.clauses)

    @property
    def hears_ops(self) -> bool:
        """Whether an op can be what it is about."""
        return all(KINDS.get(word, "op") == "op" for word, _ in self.clauses)

    @cached_property
    def _tests(self) -> tuple[Callable[[Happening], bool], ...]:
        parameter = next((value for word, value in self.clauses if word == "parameter"), None)
        last = sorted(self.clauses, key=lambda clause: clause.word in ("at", *VALUES))  # what takes time is asked last
        return tuple(test_of(word, value, parameter) for word, value in last)

    def holds(self, happening: Happening) -> bool:
        """Whether it is of this event: of values its end, else its beginning."""
        event = happening.event
        if not self.is_about_states and (event.phase == "end") is not self.is_about_values:
            return False
        return all(test(happening) for test in self._tests)


def parse(text: str) -> Condition:
    """The condition that a line says.

    Raises:
        ConsoleError: a word that is no clause, a clause without its value, or clauses that no event can all be.
    """
    if len(text) > MOST_CHARACTERS:
        raise ConsoleError(f"a condition of {len(text)} characters; the most is {MOST_CHARACTERS}")
    words = _TOKEN.findall(re.sub(r"\s*,\s*", ",", text))
    clauses: list[Clause] = []
    while words:
        word = words.pop(0)
        if word not in _NOISE:
            clauses.append(_clause(word, words))
    if not clauses:
        raise ConsoleError(f"break on what?  One of {' '.join(WORDS)}; help break explains them")
    given = [clause.word for clause in clauses]
    for word in given:
        if given.count(word) > 1:
            raise ConsoleError(f"{word} stands there twice, and all clauses must hold; make two breakpoints")
    kinds = {KINDS[word]: word for word in given if word in KINDS}
    if len(kinds) > 1:
        first, second = list(kinds.values())[:2]
        raise ConsoleError(f"{first} and {second} are never one event, and all clauses must hold; make two breakpoints")
    if "state" in given and any(word in VALUES for word in given):
        raise ConsoleError("state and a value are never asked for together; make two breakpoints")
    if "action" in given and any(word in VALUES for word in given):
        raise ConsoleError("an action makes no one value; break on the op or the message in it")
    return Condition(tuple(clauses))


def _clause(word: str, words: list[str]) -> Clause:
    """The clause that begins with `word`; takes its value from the `words` behind it."""
    name = _ALIASES.get(word, word)
    if name not in WORDS:
        if is_action(word):
            return Clause("action", word)
        if _LINE.fullmatch(word):
            return Clause("at", word)
        raise ConsoleError(f"{word!r} is none of {' '.join(WORDS)}; an action (F3@1) and a line (train.py:31) are, too")
    if name in ("nonfinite", "state"):
        return Clause(name, "")
    if name in VALUES:
        sign, number = [*words, "", ""][:2]
        if sign not in COMPARISONS or not _is_number(number):
            raise ConsoleError(f"{name}: a comparison follows, as {name} > 1e3, not {f'{sign} {number}'.strip()!r}")
        del words[:2]
        return Clause(name, f"{sign} {number}")
    if not words:
        raise ConsoleError(f"{word}: its value is missing: {WORDS[name]}")
    value = words.pop(0)
    if name == "message" and value == "wait" and words and words[0] in LIKE_BLOCKING:
        value = f"wait {words.pop(0)}"
    if name in ("rank", "micro", "step", "peer") and not RANGES.fullmatch(value):
        raise ConsoleError(f"{word} {value}: a number, numbers (0,2) or a range (4-7)")
    if name in ("rank", "micro", "step", "peer") and any(low > high for low, high in limits(value)):
        raise ConsoleError(f"{word} {value}: a range ends with its larger number")
    if name == "at" and not _LINE.fullmatch(value):
        raise ConsoleError(f"at {value}: a file and a line, as train.py:31")
    return Clause(name, value)


def is_action(word: str) -> bool:
    """Whether a word says which action without `action` before it: `F3@1`, `F*@1`, or a kind as `STEP`."""
    return word in (*PER_MICRO, *PER_STEP) or _ACTION.fullmatch(word) is not None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", text) is not None

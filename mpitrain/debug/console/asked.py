"""What a word of `show` means: a name, and maybe a part of the array as in NumPy, `NAME[0:2, -1]`; never evaluated."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple

from mpitrain.backend import Array
from mpitrain.errors import ConsoleError

NEAR = 4
"""Names that an error offers."""

_NUMBER = r"-?[0-9]{1,18}"
_ITEM = re.compile(rf"(?:({_NUMBER})|({_NUMBER})?:({_NUMBER})?(?::({_NUMBER})?)?|(\.\.\.))")

Index = tuple[Any, ...]


class Asked(NamedTuple):
    """A name, and the part of what it stands for; None: all of it."""

    name: str
    part: Index | None
    text: str  # of the part, as it was written

    def of(self, array: Array) -> Array:
        """The part of an array.

        Raises:
            ConsoleError: there is none.
        """
        if self.part is None:
            return array
        try:
            return array[self.part]
        except IndexError:
            shape = tuple(array.shape)
            raise ConsoleError(f"{self.name} has the shape {shape}, which {self.text} does not fit") from None


def parse(words: str) -> Asked:
    """The meaning of what stands behind the command's word.

    Raises:
        ConsoleError: it has none.
    """
    text = words.strip()
    name, bracket, rest = text.partition("[")
    if not name:
        raise ConsoleError("show what?  A parameter, input, output, grad, batch, or a value of the tape: show %7")
    if not bracket:
        return Asked(name.strip(), None, "")
    if not rest.endswith("]"):
        raise ConsoleError(f"{text!r} has no ] at its end; a part is asked for as {name}[0:2, 3]")
    return Asked(name.strip(), tuple(_item(item, text) for item in rest[:-1].split(",")), bracket + rest)


def _item(item: str, text: str) -> Any:
    match = _ITEM.fullmatch(item.strip())
    if match is None:
        raise ConsoleError(
            f"{item.strip()!r} in {text!r} is no number and no slice; a part is asked for as NAME[0:2, 3]"
        )
    number, start, stop, step, dots = match.groups()
    if dots:
        return Ellipsis
    if number:
        return int(number)
    if step and not int(step):
        raise ConsoleError(f"{text!r} has a slice with step 0")
    return slice(*(None if part is None else int(part) for part in (start, stop, step)))


def near(word: str, names: Iterable[str]) -> str:
    """The names most like a word, as text; "" for none."""
    names = list(dict.fromkeys(names))
    points = word.count(".") + 1
    ends: dict[str, list[str]] = {}  # what a name ends in, with as many points as the word has
    for name in names:
        ends.setdefault(".".join(name.split(".")[-points:]), []).append(name)
    close = [name for end in get_close_matches(word, ends, NEAR, 0.6) for name in ends[end]]
    found = dict.fromkeys([*(name for name in names if word in name), *close, *get_close_matches(word, names, NEAR)])
    return ", ".join(list(found)[:NEAR])

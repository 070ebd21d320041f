"""What repeats in a trace: strings, and all of a span that is the same each time the same thing happens.

A step does what the step before did.  So a span is kept as the number of its *kind* (name, module, axis, shape, bytes,
call site ... all together), which is looked up by a tuple, and what is left is two times, a step and the number of a
call.  Whole spans are made of that when they are written.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from mpitrain.debug.trace.records import KIND, SPAN

ROW = 5
"""Numbers of a row: start, stop, number of the kind, step, number of the call."""
MOST = 20_000
"""Strings or kinds after which a file ends and numbers begin anew: tokens of experts have another shape each time."""
LONGEST_STRING = 200  # characters


class Strings:
    """Strings by number, in the order in which they came; the first is ""."""

    def __init__(self) -> None:
        self._numbers = {"": 0}
        self._fresh: list[str] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, text: str) -> int:
        """The number of a string; a long one is cut."""
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self._numbers)
            self._fresh.append(text if len(text) <= LONGEST_STRING else f"{text[: LONGEST_STRING - 3]}...")
        return found

    def fresh(self) -> list[str]:
        """Those that came since it was last asked."""
        found, self._fresh = self._fresh, []
        return found

    def clear(self) -> None:
        """Begin anew."""
        self._numbers = {"": 0}
        self._fresh = []


class Kinds:
    """Spans that are alike but for time, step and number of the call.

    Attributes:
        numbers: what tells kinds apart -> number.
    """

    def __init__(self, strings: Strings) -> None:
        self.numbers: dict[Hashable, int] = {}
        self._strings = strings
        self._added: list[tuple[Any, ...]] = []
        self._spans = np.zeros(0, SPAN)

    def __len__(self) -> int:
        return len(self._added)

    def add(
        self,
        key: Hashable,
        kind: str,
        name: str,
        *,
        depth: int = 0,
        path: str = "",
        action: str = "",
        site: str = "",
        axis: str = "",
        shape: str = "",
        peer: int = -1,
        tag: int = 0,
        nbytes: float = 0.0,
    ) -> int:
        """The number of a key that has none yet."""
        words = [self._strings.number(text) for text in (name, path, action, site, axis, shape)]
        self._added.append((0, 0, KIND[kind], min(depth, 255), 0, *words, 0, peer, tag, nbytes))
        number = self.numbers[key] = len(self._added) - 1
        return number

    def spans(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The spans of rows."""
        if len(self._spans) < len(self._added):
            self._spans = np.array(self._added, SPAN)
        made = self._spans[rows[:, 2]]
        made["start"], made["stop"], made["step"], made["number"] = rows[:, 0], rows[:, 1], rows[:, 3], rows[:, 4]
        return made

    def clear(self) -> None:
        """Begin anew; `numbers` stays the same dict."""
        self.numbers.clear()
        self._added.clear()
        self._spans = np.zeros(0, SPAN)

"""Where in a file stands what an error of its rows speaks of.

The checker counts places in a row that has its messages and updates; whoever wrote the file sees lines and columns, and
only what they wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ACTION = r"[A-Z_]+[0-9]*(?:\.[0-9]+)?@[0-9]+"
_MESSAGES, _UPDATE = "SEND|RECV", "LOAD|COUNT|REDUCE|STEP"  # each added where a file has none of it
_OF_A_ROW = re.compile(rf"row (\d+): ({_ACTION})(?: at place \d+)?")


def words(text: str) -> Iterator[tuple[int, list[tuple[int, str]]]]:
    """The lines that are rows, each with its number and its words with their columns, counted from 1."""
    for number, line in enumerate(text.splitlines(), 1):
        found = [(word.start() + 1, word[0]) for word in re.finditer(r"\S+", line.partition("#")[0])]
        if found:
            yield number, found


def in_the_file(said: str, text: str) -> str:
    """An error of `placement`, `completed` or `check`, with lines and columns of the file instead of rows and places.

    An action that is not in the file, as it was added, is looked for where its F or B stands; of one that is missing
    only the line is known.
    """
    lines = list(words(text))

    def columns(rank: int, action: str) -> list[int]:
        return [column for column, word in lines[rank][1] if word == action]

    def at(rank: int, action: str) -> str:
        """`line 2, column 7`, or as much of it as is known."""
        beside = columns(rank, action) or columns(rank, re.sub("^(RECV|SEND)_", "", action))
        return f"line {lines[rank][0]}" + (f", column {beside[0]}" if beside else "")

    if said.startswith("deadlock"):
        return re.sub(rf"rank (\d+) at ({_ACTION})", lambda stuck: f"{stuck[0]} ({at(int(stuck[1]), stuck[2])})", said)
    if (start := _OF_A_ROW.match(said)) is None:
        said = re.sub(r"^row (\d+)", lambda row: f"line {lines[int(row[1])][0]}", said)
        return re.sub(
            r"on ranks (\d+) and (\d+)",
            lambda two: f"{two[0]} (lines {lines[int(two[1])][0]} and {lines[int(two[2])][0]})",
            said,
        )
    rank, action = int(start[1]), start[2]
    rest = said[start.end() :]
    here = columns(rank, action)
    if rest.startswith(" stands twice") and len(here) > 1:
        return f"line {lines[rank][0]}, column {here[1]}: {action} stands twice, first in column {here[0]}"
    if rest.startswith(" is missing"):
        family = next((kinds for kinds in (_MESSAGES, _UPDATE) if re.match(kinds, action)), "")
        added = f"; leave all {family.replace('|', ', ')} out, and they are added" if family else ""
        return f"line {lines[rank][0]}: {action}{rest}{added}"

    def needed(before: re.Match[str]) -> str:
        there = columns(rank, before[1])
        return f"comes before {before[1]}" + (f" (column {there[0]})" if there else "")

    return f"{at(rank, action)}: {action}{re.sub(rf'comes before ({_ACTION})', needed, rest)}"

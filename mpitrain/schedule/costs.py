"""What `--costs` and `--bytes` say, and what of it falls to one pass.

One number is that of a micro-batch on all layers of a rank: each of the rank's chunks has as many of the layers, and
each slice as many of the tokens, so a pass takes its share.  That is why schedules can be compared as they are: the
work is the same in all of them.  A number for each stage is of that stage, and shared by slices alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from mpitrain.errors import ConfigError
from mpitrain.options import Interval, Option, Value, show
from mpitrain.pipeline.action import Schedule, placement
from mpitrain.pipeline.simulate import Costs, Sizes

_SIZE = re.compile(r"([0-9]{1,15})(|B|KiB|MiB|GiB)")
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

_N = TypeVar("_N")


def costs_from(text: str) -> Costs:
    """What `--costs` says, not yet shared.

    Raises:
        ConfigError: it reads otherwise.
    """
    number = Option("", float, None, "", Interval(0, 10**9))
    found = _pairs("--costs", text, ("f", "b", "w", "message"), lambda word, at: float(number.parse(word, at) or 0))
    message = found.pop("message", [0.0])
    if len(message) > 1:
        raise ConfigError("--costs message: is one number, not one for each stage.")
    # A list of one number is that of every rank.
    return Costs(**{kind: times if len(times) > 1 else times[0] for kind, times in found.items()}, message=message[0])


def costs_of_passes(costs: Costs, rows: Schedule) -> Costs:
    """The costs of one F, B or W of each stage, where `costs` are those of a micro-batch and one number of a rank.

    A message costs what it costs: how it falls with its size is the network's business.

    Raises:
        ScheduleError: a stage is on two ranks or on none.
    """
    shares, slices = shares_of(rows), slices_of(rows)

    def shared(cost: float | Sequence[float]) -> list[float]:
        if isinstance(cost, Sequence):
            return [one / slices for one in cost]
        return [cost / (share * slices) for share in shares]

    return Costs(shared(costs.f), shared(costs.b), shared(costs.w), costs.message)


def sizes_from(text: Value, rows: Schedule) -> Sizes | None:
    """The sizes of one pass of each stage, by what `--bytes` says; None where it says nothing.

    A part of an odd number of bytes is rounded up.

    Raises:
        ConfigError: it reads otherwise.
        ScheduleError: a stage is on two ranks or on none.
    """
    if text is None:
        return None

    def number(word: str, where: str) -> int:
        match = _SIZE.fullmatch(word)
        if match is None:
            raise ConfigError(f"{where}: must be a whole number of bytes, KiB, MiB or GiB, such as 40MiB.")
        return int(match[1]) * _UNITS[match[2]]

    found = _pairs("--bytes", str(text), ("saved", "kept", "boundary"), number)
    shares, slices = shares_of(rows), slices_of(rows)

    def shared(name: str) -> list[int]:
        sizes = found.get(name, [0])
        if len(sizes) == 1:  # a boundary is as large however few layers lie behind it
            return [-(-sizes[0] // (slices * (1 if name == "boundary" else share))) for share in shares]
        return [-(-size // slices) for size in sizes]

    return Sizes(shared("saved"), shared("kept"), shared("boundary"))


def shares_of(rows: Schedule) -> list[int]:
    """Into how many stages the layers of its rank are cut, by stage."""
    place = placement(rows)
    return [place.count(rank) for rank in place]


def slices_of(rows: Schedule) -> int:
    """Into how many slices every micro-batch is cut; 1 where they differ, since costs are by stage."""
    parts: dict[int | None, set[int | None]] = {}
    for row in rows:
        for action in row:
            if action.kind == "F":
                parts.setdefault(action.micro, set()).add(action.part)
    numbers = {len(found) for found in parts.values()}
    return numbers.pop() if len(numbers) == 1 else 1


def _pairs(flag: str, text: str, names: Sequence[str], number: Callable[[str, str], _N]) -> dict[str, list[_N]]:
    """What `name=1:2:3,name=4` says, each name at most once."""
    found: dict[str, list[_N]] = {}
    for pair in text.split(","):
        name, equals, values = (word.strip() for word in pair.partition("="))
        if name not in names or not equals:
            raise ConfigError(f"{flag} {show(pair.strip())}: must read NAME=NUMBER, NAME one of {', '.join(names)}.")
        if name in found:
            raise ConfigError(f"{flag}: {name} stands twice.")
        found[name] = [number(word.strip(), f"{flag} {name}={show(values)}") for word in values.split(":")]
    return found

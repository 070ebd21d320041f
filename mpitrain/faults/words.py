"""How faults are written: words and key=value pairs, joined by `;`.  Whatever is not allowed is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.faults.fault import ERRNOS, FIELDS, HOWS, KINDS, Fault
from mpitrain.options import show, suggest
from mpitrain.rng import stream_key

_COMMON = ("rank", "at", "n", "step", "in")
DRAWN = ("kill", "raise", "exit", "_exit", "segv", "memory", "slow")
"""What `random` draws from unless told otherwise: faults after which a run can be started again at once."""
CODES = range(3, 83)
"""Exit codes that `random` draws: none of those that mean something (0, 2, 85, those of signals)."""


class Draw(NamedTuple):
    """`random`: some faults, each drawn by hashes of the seed."""

    seed: int
    faults: int = 1
    of: tuple[str, ...] = DRAWN
    at: tuple[str, str] | None = None
    steps: int | None = None
    within: int = 100
    seconds: float = 0.5
    source: str = ""

    def drawn(self, size: int) -> Iterator[Fault]:
        """The faults, for a world of `size` ranks."""
        for number in range(self.faults):

            def pick(what: str, count: int, number: int = number) -> int:
                return int(stream_key(self.seed, f"faults.{what}", number)) % count

            how = self.of[pick("how", len(self.of))]
            kind, name = self.at or (("action", "message")[pick("kind", 2)], "")
            if how == "io" and kind != "disk":
                kind, name = "disk", ""
            yield Fault(
                how,
                pick("rank", size),
                kind,
                name,
                n=1 + pick("n", self.within),
                step=None if self.steps is None else (1 + pick("step", self.steps), None),
                code=CODES[pick("code", len(CODES))] if how in ("exit", "_exit") else 1,
                seconds=self.seconds,
                error=list(ERRNOS)[pick("errno", len(ERRNOS))],
                source=self.source,
            )


_DRAW_KEYS = ("seed", "faults", "of", "at", "steps", "within", "seconds")


def parse(text: str, where: str = "--faults") -> tuple[Fault | Draw, ...]:
    """The faults that a text asks for, as they are written.

    Args:
        text: faults joined by `;`, each a word of `HOWS`, or `random`, and key=value pairs.
        where: begins the message if it is refused.

    Raises:
        ConfigError: a word, a key or a value that is not allowed, or one that is missing; says what is allowed.
    """
    parts = [part.strip() for part in text.split(";")]
    found = tuple(_one(part, where) for part in parts if part)
    if not found:
        raise ConfigError(
            f'{where} {show(text)}: no fault; write for example "kill rank=1 at=message:all_reduce n=41".'
        )
    return found


def plan(text: str, size: int, where: str = "--faults") -> tuple[Fault, ...]:
    """The faults that a text asks for in a world of `size` ranks, the drawn ones drawn; the same on every rank.

    Raises:
        ConfigError: see `parse`; or a rank that does not exist.
    """
    faults: list[Fault] = []
    for each in parse(text, where):
        faults += [each] if isinstance(each, Fault) else each.drawn(size)
    for fault in faults:
        if fault.rank >= size:
            raise ConfigError(f"{where} {show(fault.source)}: rank={fault.rank} must be from 0 to {size - 1}.")
    return tuple(faults)


def _one(part: str, where: str) -> Fault | Draw:
    how, *pairs = part.split()
    here = f"{where} {show(part)}"
    if how not in HOWS and how != "random":
        words = [*HOWS, "random"]
        raise ConfigError(f"{here}: {show(how)} must be one of {' '.join(words)}.{suggest(how, words)}")
    allowed = _DRAW_KEYS if how == "random" else _COMMON + HOWS[how].keys
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key not in allowed or not equals:
            raise ConfigError(
                f"{here}: {show(pair)} must be KEY=VALUE, KEY one of {' '.join(allowed)}.{suggest(key, allowed)}"
            )
        if key in given:
            raise ConfigError(f"{here}: {key} stands twice.")
        given[key] = _READ[key](value, f"{here}: {key}={show(value)}")
    needed = "seed" if how == "random" else "rank"
    if needed not in given:
        raise ConfigError(f"{here}: {needed}= is missing.")
    if how == "random":
        return Draw(**given, source=part)
    kind, name = given.pop("at", ("disk" if how == "io" else "action", ""))
    if how == "io" and kind != "disk":
        raise ConfigError(f"{here}: io is the error of a disk: at= must be disk, or disk:NAME.")
    named = {FIELDS.get(key, key): value for key, value in given.items()}
    return Fault(how, kind=kind, name=name, source=part, **named)


def _whole(low: int, high: int) -> Callable[[str, str], int]:
    def read(value: str, where: str) -> int:
        if not re.fullmatch("[0-9]{1,19}", value) or not low <= int(value) <= high:
            raise ConfigError(f"{where} must be a whole number from {low} to {high}.")
        return int(value)

    return read


def _read_seconds(value: str, where: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        raise ConfigError(f"{where} must be a number of seconds from 0, as 0.2.")
    return float(value)


def _read_at(value: str, where: str) -> tuple[str, str]:
    kind, _, name = value.partition(":")
    if kind not in KINDS:
        raise ConfigError(
            f"{where} must be one of {' '.join(KINDS)}, or KIND:NAME, as message:all_reduce.{suggest(kind, KINDS)}"
        )
    return kind, name


def _read_action(value: str, where: str) -> str:
    if not value:
        raise ConfigError(f"{where} must be the beginning of the name of an action, as REDUCE.")
    return value


def _read_step(value: str, where: str) -> tuple[int, int | None]:
    match = re.fullmatch("([0-9]{1,12})(-([0-9]{1,12})?)?", value)
    first, last = (0, 0) if match is None else (int(match[1]), int(match[3]) if match[3] else None)
    if match is not None and match[2] is None:
        last = first
    if first < 1 or (last is not None and last < first):
        raise ConfigError(f"{where} must be a step from 1, or several: 12, 12-20, 12-.")
    return first, last


def _read_errno(value: str, where: str) -> str:
    if value not in ERRNOS:
        raise ConfigError(f"{where} must be one of {' '.join(ERRNOS)}.{suggest(value, ERRNOS)}")
    return value


def _read_hows(value: str, where: str) -> tuple[str, ...]:
    words = tuple(value.split(","))
    if wrong := [word for word in words if word not in HOWS]:
        raise ConfigError(f"{where} must be some of {','.join(HOWS)}.{suggest(wrong[0], HOWS)}")
    return words


_READ: Mapping[str, Callable[[str, str], Any]] = {
    "rank": _whole(0, 2**20),
    "at": _read_at,
    "n": _whole(1, 10**9),
    "step": _read_step,
    "in": _read_action,
    "code": _whole(0, 255),
    "seconds": _read_seconds,
    "errno": _read_errno,
    "seed": _whole(0, 2**63 - 1),
    "faults": _whole(1, 1000),
    "of": _read_hows,
    "steps": _whole(1, 10**9),
    "within": _whole(1, 10**9),
}

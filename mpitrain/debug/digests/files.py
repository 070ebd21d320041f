"""The files of digests, `digests/rank-00003.jsonl` in a run's folder: one JSON object a line.

    {"is": "begin", "rank": 3, "sizes": {...}, "coords": {...}, "parameters": [...], "facts": {...}}
    {"is": "weights", "step": 0, "weights": [[count, sums ..., hash], ...]}
    {"is": "keys", "first": 0, "keys": [[["F", 0, "blocks.0.mlp", "gelu", 0, 0], ["gelu", "transformer.py:231", ...]]]}
    {"is": "step", "step": 1, "values": [[number of the key, [sums ...]], ...], "gradients": [...], ...}

Files come from anywhere.  They are data: a line is read only if it is a JSON object of these kinds, a file up to the
first line that is none, or is cut; a step again only when it is asked for, so memory holds one step at a time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpitrain import disk
from mpitrain.debug.digests.entries import Record
from mpitrain.errors import DataError

FOLDER = "digests"
"""Where a run has its digests, in its own folder."""
MOST_BYTES = 1 << 31
LONGEST_LINE = 1 << 27
MOST_KEYS = 1 << 20
_NAME = re.compile(r"rank-([0-9]{5,7})\.jsonl")
_KIND = re.compile(rb'\{"is": "(begin|weights|keys|step|full)"')
_STEP = re.compile(rb'\{"is": "(?:weights|step)", "executor": ([0-9]{1,9}), "step": ([0-9]{1,18})')


def name_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05}.jsonl"


class RankDigests:
    """The digests of one rank.

    Args:
        path: its file.

    Attributes:
        begins: executor -> what it said when it began.
        steps: (executor, number) of steps that have digests, ascending; number 0 or what a run went on from stands for
            the weights before its first step, told apart by `weights`.
        weights: the same of weights before a first step.

    Raises:
        OSError: the file cannot be read.
        DataError: it is too large.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begins: dict[int, Record] = {}
        self._steps: dict[tuple[int, int], tuple[int, int]] = {}  # -> where its line is, and which keys it uses
        self._weights: dict[tuple[int, int], int] = {}
        self._keys: list[list[Any]] = []  # of each start of the run
        self._index()

    @property
    def steps(self) -> list[tuple[int, int]]:
        return sorted(self._steps)

    @property
    def weights(self) -> list[tuple[int, int]]:
        return sorted(self._weights)

    def step(self, executor: int, number: int) -> Record:
        """What is known of a step; nothing of one that has no digests, or no sound ones."""
        place = self._steps.get((executor, number))
        if place is None:
            return {}
        record = self._at(place[0])
        values = list(_with_keys(record.get("values"), self._keys[place[1]]))
        return {**_sound(record), "values": values}

    def before(self, executor: int, number: int) -> Record:
        """The weights before a first step."""
        place = self._weights.get((executor, number))
        return {} if place is None else _sound(self._at(place))

    def _at(self, offset: int) -> Record:
        with disk.opened(self.path) as file, os.fdopen(os.dup(file), "rb") as lines:
            lines.seek(offset)
            return _object(lines.readline(LONGEST_LINE)) or {}

    def _index(self) -> None:
        with disk.opened(self.path) as file, os.fdopen(os.dup(file), "rb") as lines:
            if os.fstat(file).st_size > MOST_BYTES:
                raise DataError(f"{self.path}: is larger than {MOST_BYTES >> 30} GiB, which no digests are.")
            offset = 0
            while line := lines.readline(LONGEST_LINE):
                kind = _KIND.match(line)
                if not line.endswith(b"\n"):
                    return
                if kind is not None and not self._take(kind[1], line, offset):
                    return
                offset += len(line)

    def _take(self, kind: bytes, line: bytes, offset: int) -> bool:
        """One line; whether it is sound."""
        if kind in (b"step", b"weights"):
            found = _STEP.match(line)
            if found is None or int(found[1]) not in self.begins:
                return False
            where = int(found[1]), int(found[2])
            if kind == b"step":
                self._steps[where] = offset, len(self._keys) - 1
            else:
                self._weights[where] = offset
            return True
        record = _object(line)
        if record is None:
            return False
        if kind == b"begin":
            if not _is_begin(record):
                return False
            if record["executor"] == 0:  # the first of a start of the run
                self._keys.append([])
            self.begins[record["executor"]] = record
        elif kind == b"keys" and self._keys:
            keys = record.get("keys")
            if not isinstance(keys, list) or record.get("first") != len(self._keys[-1]):
                return False
            if len(self._keys[-1]) + len(keys) > MOST_KEYS or not all(map(_is_key, keys)):
                return False
            self._keys[-1] += keys
        return True


def _object(line: bytes) -> Record | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_begin(record: Record) -> bool:
    counts = record.get("sizes"), record.get("coords")
    return (
        type(record.get("executor")) is int
        and isinstance(record.get("dtype"), str)
        and type(record.get("rank")) is int
        and all(isinstance(c, dict) and all(type(n) is int and 0 <= n < 1 << 24 for n in c.values()) for c in counts)
        and isinstance(record.get("parameters"), list)
        and all(map(_is_slab, record["parameters"]))
        and isinstance(record.get("states"), dict)
        and all(isinstance(of, list) and all(map(_is_slab, of)) for of in record["states"].values())
    )


def _sound(record: Record) -> Record:
    """What of a record is of the kind that it must be; whoever reads it still looks at each number."""
    found: Record = {}
    for name in ("data", "boundaries", "numbers"):
        found[name] = record[name] if isinstance(record.get(name), dict) else {}
    for name in ("gradients", "weights", "noise"):
        found[name] = record[name] if isinstance(record.get(name), list) else []
    moments = record.get("moments")
    moments = moments if isinstance(moments, dict) else {}
    found["moments"] = {kind: of for kind, of in moments.items() if isinstance(of, list)}
    found["largest"] = record.get("largest")
    found["updates"] = record["updates"] if type(record.get("updates")) is int else 0
    found["trouble"] = record.get("trouble")
    return found


def _is_slab(slab: Any) -> bool:
    """[name, full shape, [[start, stop], ...]]."""
    return (
        isinstance(slab, list)
        and len(slab) == 3
        and isinstance(slab[0], str)
        and isinstance(slab[1], list)
        and isinstance(slab[2], list)
        and len(slab[1]) == len(slab[2])
        and all(type(length) is int and length >= 0 for length in slab[1])
        and all(isinstance(p, list) and len(p) == 2 and all(type(n) is int for n in p) for p in slab[2])
    )


def _is_key(key: Any) -> bool:
    """[[kind, stage, path, name, count, index], [title, site, place, {axis: word}]]."""
    if not (isinstance(key, list) and len(key) == 2 and all(isinstance(part, list) for part in key)):
        return False
    types = [[str, int, str, str, int, int], [str, str, int, dict]]
    if any([type(x) for x in part] != kinds for part, kinds in zip(key, types, strict=True)):
        return False
    return all(isinstance(word, str) for word in key[1][3].values())


def _with_keys(values: Any, keys: list[Any]) -> Iterator[tuple[list[Any], list[Any], list[Any]]]:
    """Values with what their numbers stand for; those that are not sound are left out."""
    for value in values if isinstance(values, list) else ():
        if isinstance(value, list) and len(value) == 2 and type(value[0]) is int and 0 <= value[0] < len(keys):
            numbers = value[1]
            if isinstance(numbers, list) and len(numbers) == 9 and type(numbers[0]) is int:
                yield *keys[value[0]], numbers


def read(folder: str | os.PathLike[str]) -> dict[int, RankDigests]:
    """The digests of a run, by rank.

    Args:
        folder: of the run, or that with the files.

    Raises:
        DataError: there are none, or they cannot be read.
    """
    path = Path(folder)
    path = path / FOLDER if (path / FOLDER).is_dir() else path
    try:
        names = sorted(name for name in os.listdir(path) if _NAME.fullmatch(name))
        found = [RankDigests(path / name) for name in names]
    except OSError as error:
        raise DataError(f"{error.filename or path}: {error.strerror}.") from None
    ranks = {int(of.begins[first]["rank"]): of for of in found if (first := min(of.begins, default=None)) is not None}
    for rank, of in ranks.items():
        if of.path.name != name_of(rank):
            raise DataError(f"{of.path}: is the file of rank {rank}, by its first line.")
    if not ranks:
        raise DataError(f"{folder}: holds no digests.  Train with --digests, or within digesting().")
    return ranks

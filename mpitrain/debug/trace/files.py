"""Reading a trace.

Files come from anywhere: lengths are compared with the file before memory is taken, numbers with what they number, and
reading ends at the first block that is damaged or cut, with what came before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain import disk
from mpitrain.debug.trace.blocks import FACTS, JSON, MOST_RANKS, Damaged, blocks, segments
from mpitrain.debug.trace.records import KINDS, MEMORY, SPAN, RankTrace, Trace
from mpitrain.errors import DataError

FOLDER = "trace"
"""Where a training run has its trace, in its own folder."""

MOST_BYTES = 1 << 32
"""Of all files that are read at once."""
LONGEST_STRING = 1000
MOST_STRINGS = 1 << 20


def read(folder: str | os.PathLike[str]) -> Trace:
    """The trace in a folder.

    Args:
        folder: that of a run, whose trace is in `trace/`, or the one with the files themselves.

    Returns:
        All ranks of which something can be read.  Of files that are cut or damaged it holds what is whole before that.

    Raises:
        DataError: there is no trace, or more than `MOST_BYTES` of it.
    """
    path = Path(folder)
    if (path / FOLDER).is_dir():
        path = path / FOLDER
    found = segments(path)
    if not found:
        raise DataError(f"{folder}: holds no trace.  Train with --trace, or name the folder that tracing() was given.")
    total = sum(_size(name) for names in found.values() for name in names)
    if total > MOST_BYTES:
        raise DataError(
            f"{path}: {total:,} bytes of traces, at most {MOST_BYTES:,} are read at once.\n"
            "Copy the files of some of the ranks into another folder and read that, or trace with a smaller"
            " --trace-limit."
        )
    parts = {
        rank: [part for name in names if (part := _segment(name, rank)) is not None] for rank, names in found.items()
    }
    newest = max((part.began for of_rank in parts.values() for part in of_rank), default=0.0)
    traces = [_joined([part for part in of_rank if part.began == newest]) for of_rank in parts.values()]
    ranks = [trace for trace in traces if trace is not None]
    if not ranks:
        raise DataError(f"{path}: holds no file of a trace that can be read.")
    size = ranks[0].size
    return Trace([trace for trace in ranks if trace.size == size], path)


class _Part:
    """One file, as far as it can be read."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.head: dict[str, Any] = {}
        self.strings = [""]
        self.axes: dict[str, tuple[int, ...]] = {}
        self.spans: list[np.ndarray[Any, Any]] = []
        self.memory: list[np.ndarray[Any, Any]] = []
        self.steps: list[dict[str, Any]] = []

    @property
    def began(self) -> float:
        """When its trace began; files that an earlier one has left have another number."""
        return float(self.head["began"])

    def take(self, kind: bytes, data: bytes) -> None:
        """One block.

        Raises:
            Damaged: it is none, or the first is not the head.
        """
        if (kind == b"HEAD") == bool(self.head):
            raise Damaged
        if kind == b"HEAD":
            self.head = _head(_parsed(data, FACTS), self.rank)
        elif kind == b"TEXT":
            self._text(_parsed(data))
        elif kind == b"AXES":
            self.axes |= _axes(_parsed(data), self.head["size"])
        elif kind == b"SPAN":
            self.spans.append(_rows(data, SPAN))
        elif kind == b"HELD":
            self.memory.append(_rows(data, MEMORY))
        elif kind == b"STEP":
            self.steps += _steps(_parsed(data))
        # Others are of a later version, and nothing here depends on them.

    def _text(self, texts: Any) -> None:
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise Damaged
        if len(self.strings) + len(texts) > MOST_STRINGS:
            raise Damaged
        self.strings += [text[:LONGEST_STRING] for text in texts]


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _segment(path: Path, rank: int) -> _Part | None:
    """What a file holds; None: nothing."""
    part = _Part(rank)
    try:
        with disk.opened(path) as file:
            for kind, data in blocks(file, path):
                part.take(kind, data)
    except (OSError, Damaged):
        pass
    return part if part.head else None


def _parsed(data: bytes, most: int = JSON) -> Any:
    """JSON of at most so many bytes.

    Raises:
        Damaged: it is none.
    """
    if len(data) > most:
        raise Damaged
    try:
        return _printable(json.loads(data, parse_constant=_no_number))
    except (ValueError, RecursionError):
        raise Damaged from None


def _printable(value: Any) -> Any:
    """The same with text that can be printed: names of files may hold bytes that are no UTF-8."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return value


def _no_number(word: str) -> None:
    raise ValueError(word)  # NaN and infinity are no JSON


def _is_count(value: Any, most: int = 1 << 62) -> bool:
    return type(value) is int and 0 <= value < most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _head(value: Any, rank: int) -> dict[str, Any]:
    """A head whose fields are what they must be."""
    checks: dict[str, Callable[[Any], bool]] = {
        "rank": lambda found: found == rank,
        "size": lambda found: _is_count(found, MOST_RANKS) and found > rank,
        "host": lambda found: isinstance(found, str),
        "clock": lambda found: isinstance(found, str),
        "began": _is_number,
        "dropped": _is_count,
        "facts": lambda found: isinstance(found, dict),
    }
    if not isinstance(value, dict) or not all(key in value and check(value[key]) for key, check in checks.items()):
        raise Damaged
    kept = {key: value[key] for key in checks}
    return kept | {key: kept[key][:LONGEST_STRING] for key in ("host", "clock")}


def _axes(value: Any, size: int) -> dict[str, tuple[int, ...]]:
    """World ranks by axis."""
    if not isinstance(value, dict) or not all(
        isinstance(ranks, list) and 0 < len(ranks) <= size and all(_is_count(rank, size) for rank in ranks)
        for ranks in value.values()
    ):
        raise Damaged
    return {name[:LONGEST_STRING]: tuple(ranks) for name, ranks in value.items()}


def _steps(value: Any) -> list[dict[str, Any]]:
    """Steps, with the fields that are known."""
    if not isinstance(value, list):
        raise Damaged
    found = []
    for step in value:
        if not isinstance(step, dict) or not all(_is_count(step.get(key)) for key in ("step", "start", "stop")):
            raise Damaged
        kept = {"step": step["step"], "start": step["start"], "stop": max(step["start"], step["stop"])}
        kept |= {"loss": float(step["loss"])} if _is_number(step.get("loss")) else {}
        kept |= {"tokens": step["tokens"]} if _is_count(step.get("tokens")) else {}
        found.append(kept | {"ops": step.get("ops") is True})
    return found


def _rows(data: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Rows of an array."""
    if len(data) % dtype.itemsize:
        raise Damaged
    return np.frombuffer(data, dtype)


# -- files joined again ------------------------------------------------------------------------------------------------


def _joined(parts: list[_Part]) -> RankTrace | None:
    """The trace of a rank from its files, with one numbering of strings."""
    if not parts:
        return None
    strings, axes = {"": 0}, {}
    for part in parts:
        axes.update(part.axes)
    spans, memory = [np.zeros(0, SPAN)], [np.zeros(0, MEMORY)]
    for part in parts:
        numbers = np.array([strings.setdefault(text, len(strings)) for text in part.strings], np.uint32)
        lengths = np.array([len(axes.get(text, ())) for text in part.strings])
        spans += [_renumbered(rows, numbers, lengths) for rows in part.spans]
        memory += [_owned(rows, numbers) for rows in part.memory]
    joined, head = np.concatenate(spans), parts[0].head
    return RankTrace(
        rank=head["rank"],
        size=head["size"],
        host=head["host"],
        clock=head["clock"],
        axes=axes,
        strings=list(strings),
        spans=joined[np.lexsort((joined["depth"], joined["start"]))],
        memory=np.concatenate(memory),
        steps=[step for part in parts for step in part.steps],
        dropped=max(part.head["dropped"] for part in parts),
        facts=head["facts"],
    )


def _renumbered(rows: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any], lengths: Any) -> np.ndarray[Any, Any]:
    """Spans that can be, with numbers of all strings in the place of those of one file."""
    words = ("name", "path", "action", "site", "axis", "shape")
    whole = np.logical_and.reduce([rows[word] < len(numbers) for word in words])
    whole &= (rows["kind"] < len(KINDS)) & (rows["start"] >= 0) & (rows["start"] <= rows["stop"])
    whole &= (rows["stop"] < 1 << 62) & (rows["bytes"] >= 0) & (rows["bytes"] < 1e18) & (rows["peer"] >= -1)
    found = rows[whole]
    found = found[found["peer"] < np.maximum(lengths[found["axis"]], 0)]  # a rank of the axis, or -1
    for word in words:
        found[word] = numbers[found[word]]
    return found


def _owned(rows: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What was held, by an owner that has a name."""
    found = rows[(rows["owner"] < len(numbers)) & (rows["bytes"] >= 0) & (rows["time"] >= 0)]
    found["owner"] = numbers[found["owner"]]
    return found

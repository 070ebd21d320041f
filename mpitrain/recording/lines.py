"""The lines of an index: what they hold, their text, and the checks when they are read.

    {"is":"call","n":57,"number":12,"axis":"dp","ranks":[0,4],"verb":"all_reduce", ... ,"crc":"9a3f01c2"}
    {"is":"got","n":57,"value":["float32",[4,512],0,8192,305419896],"crc":"..."}

Every line ends with the CRC-32 of its text before that.  Lines come from a file that anybody may have written: each
field is checked when it is read, and what a field says is never taken for a name of code or of a file.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import dtype_of
from mpitrain.errors import RecordingError

VERSION = 1
LONGEST_LINE = 1 << 20
"""Bytes of a line; what would be longer is parted."""
LONGEST_TEXT = 400
"""Characters of a text that are told."""
DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
    + "float16 bfloat16 float32 float64 complex64 complex128".split()
)
VERBS: Mapping[str, int] = {
    "all_reduce": 1,
    "iall_reduce": 1,
    "all_gather": 2,
    "iall_gather": 2,
    "reduce_scatter": 2,
    "ireduce_scatter": 2,
    "all_to_all": 4,
    "iall_to_all": 4,
    "broadcast": 1,
    "shift": 1,
    "send": 2,
    "isend": 2,
    "recv": 2,
    "irecv": 2,
    "exchange": 0,
    "barrier": 0,
}
"""Verbs of the door, and how many of their further arguments say what is done; the others say where a result goes."""
ENDED = "the program ended"
"""Why a recording ends whose program came to its end by itself."""
_MOST_RANKS = 1 << 20
_LARGEST = 1 << 62


class Value(NamedTuple):
    """An array, or what is known of it.

    segment, offset: where its bytes lie; segment -1: nowhere.  crc: of the bytes.  digest: SHA-256 of the bytes, its
    first half, where they are not kept.
    """

    dtype: str
    shape: tuple[int, ...]
    segment: int = -1
    offset: int = 0
    crc: int = 0
    digest: str = ""

    @property
    def nbytes(self) -> int:
        """Of the array."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def told(self) -> list[Any]:
        """As JSON."""
        if self.digest:
            return [self.dtype, list(self.shape), self.digest]
        return [self.dtype, list(self.shape), self.segment, self.offset, self.crc]


class Call(NamedTuple):
    """A call of the door.

    n: its number among all messages of the rank; number: among those of its axis; how: the arguments that say what is
    done; peer: -1 in a collective; shape, dtype: of the array that the rank brings; step: of the run, 0 outside;
    sent: its values, None where nothing is sent.
    """

    n: int
    number: int
    axis: str
    ranks: tuple[int, ...]
    verb: str
    how: list[Any]
    peer: int
    shape: tuple[int, ...]
    dtype: str
    step: int
    site: str
    sent: Value | None


class Got(NamedTuple):
    """A message is complete; value: what it brought, None: nothing."""

    n: int
    value: Value | None


class Heard(NamedTuple):
    """An answer from outside."""

    what: str
    answer: Any


class Row(NamedTuple):
    """Steps that were made and not recorded, and what they reported."""

    first: int
    reports: list[dict[str, Any]]


class Evaluated(NamedTuple):
    """An evaluation that was made and not recorded."""

    loss: float


class Kept(NamedTuple):
    """A tensor of the state with which the recorded steps begin."""

    name: str
    full_shape: tuple[int, ...]
    value: Value


class Begun(NamedTuple):
    """The recorded steps begin: after all `Kept`; the numbers of the state."""

    first: int
    numbers: dict[str, Any]


class State(NamedTuple):
    """After a step: CRC-32 of the tensors of the state, some of them a line."""

    step: int
    sums: dict[str, int]


class Segment(NamedTuple):
    """A file of values; begins: where its bytes begin; nbytes: how many there is room for."""

    number: int
    begins: int
    nbytes: int


class End(NamedTuple):
    """Nothing more is recorded; messages: made up to here; last: step that was recorded last."""

    why: str
    messages: int
    last: int


Line = Call | Got | Heard | Row | Evaluated | Kept | Begun | State | Segment | End


def text_of(about: Mapping[str, Any]) -> bytes:
    """One line of a file."""
    text = json.dumps(about, separators=(",", ":"))
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def told(line: Line) -> dict[str, Any]:
    """A line as JSON has it."""
    about: dict[str, Any] = {"is": type(line).__name__.lower()}
    for name, field in line._asdict().items():
        about[name] = field.told() if isinstance(field, Value) else field
    return about


def whole(text: bytes) -> dict[str, Any] | None:
    """The object of a line; None where the line is not what was written."""
    body, comma, end = text.rpartition(b',"crc":"')
    if not comma or len(end) != 11 or end[8:] != b'"}\n':
        return None
    try:
        if int(end[:8], 16) != zlib.crc32(body + b"}"):
            return None
        found = json.loads(body + b"}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def parsed(about: Mapping[str, Any]) -> Line | None:
    """A line from its object; None: of a kind that is not known here, of a later version perhaps.

    Raises:
        RecordingError: a field is missing, or not what it may be.
    """
    kind = about.get("is")
    match kind:
        case "call":
            return _call(about)
        case "got":
            return Got(_count(about, "n"), _value(about.get("value"), optional=True))
        case "heard":
            return Heard(_text(about, "what"), about.get("answer"))
        case "row":
            reports = about.get("reports")
            _require(isinstance(reports, list) and all(isinstance(one, dict) for one in reports), "reports")
            assert isinstance(reports, list)
            return Row(_count(about, "first"), reports)
        case "evaluated":
            loss = about.get("loss")
            _require(isinstance(loss, (int, float)), "loss")
            return Evaluated(float(loss))  # type: ignore[arg-type]
        case "kept":
            value = _value(about.get("value"))
            assert value is not None
            return Kept(_text(about, "name"), _shape(about.get("full_shape")), value)
        case "begun":
            numbers = about.get("numbers")
            _require(isinstance(numbers, dict), "numbers")
            assert isinstance(numbers, dict)
            return Begun(_count(about, "first"), numbers)
        case "state":
            sums = about.get("sums")
            _require(isinstance(sums, dict) and all(type(crc) is int for crc in sums.values()), "sums")
            assert isinstance(sums, dict)
            return State(_count(about, "step"), sums)
        case "segment":
            return Segment(_count(about, "number"), _count(about, "begins"), _count(about, "nbytes"))
        case "end":
            return End(_text(about, "why"), _count(about, "messages"), _count(about, "last"))
        case _:
            return None


def _call(about: Mapping[str, Any]) -> Call:
    verb, how, ranks, peer = about.get("verb"), about.get("how"), about.get("ranks"), about.get("peer")
    _require(isinstance(verb, str) and verb in VERBS, "verb")
    _require(isinstance(how, list), "how")
    known = isinstance(ranks, list) and 0 < len(ranks) <= _MOST_RANKS and all(type(rank) is int for rank in ranks)
    _require(known, "ranks")
    _require(type(peer) is int and -1 <= peer < _MOST_RANKS, "peer")
    assert isinstance(how, list)
    assert isinstance(ranks, list)
    assert isinstance(peer, int)
    return Call(
        n=_count(about, "n"),
        number=_count(about, "number"),
        axis=_text(about, "axis"),
        ranks=tuple(ranks),
        verb=str(verb),
        how=how,
        peer=peer,
        shape=_shape(about.get("shape")),
        dtype=_dtype(about.get("dtype")),
        step=_count(about, "step"),
        site=_text(about, "site"),
        sent=_value(about.get("sent"), optional=True),
    )


def told_how(verb: str, how: Sequence[Any]) -> list[Any]:
    """The arguments of a call that say what is done, as JSON gives them back."""
    found: list[Any] = json.loads(json.dumps(how[: VERBS[verb]], default=int))  # NumPy's integers become Python's
    return found


def itemsize(name: str) -> int:
    """Bytes of an element of a dtype by name."""
    return 2 if name == "bfloat16" else np.dtype(name).itemsize


def dtype_named(name: str) -> Any:
    """A dtype by its name, which is one of DTYPES."""
    return dtype_of(name) if name == "bfloat16" else np.dtype(name)


def _value(told: Any, optional: bool = False) -> Value | None:
    if told is None and optional:
        return None
    _require(isinstance(told, list) and len(told) in (3, 5), "value")
    dtype, shape = _dtype(told[0]), _shape(told[1])
    if len(told) == 3:
        _require(isinstance(told[2], str) and len(told[2]) == 32, "digest")
        return Value(dtype, shape, digest=told[2])
    segment, offset, crc = told[2:]
    _require(all(type(number) is int and -1 <= number < _LARGEST for number in (segment, offset, crc)), "value")
    value = Value(dtype, shape, segment, offset, crc)
    _require(value.nbytes == 0 if segment < 0 else offset >= 0, "value")
    return value


def _shape(told: Any) -> tuple[int, ...]:
    known = isinstance(told, list) and len(told) <= 32
    _require(known and all(type(length) is int and 0 <= length < _LARGEST for length in told), "shape")
    return tuple(told)


def _dtype(told: Any) -> str:
    _require(isinstance(told, str) and told in DTYPES, "dtype")
    return str(told)


def _text(about: Mapping[str, Any], key: str) -> str:
    found = about.get(key)
    _require(isinstance(found, str), key)
    return plain(str(found))


def plain(text: str) -> str:
    """A text that may be printed: what would move a cursor, or another line, is a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST_TEXT])


def _count(about: Mapping[str, Any], key: str) -> int:
    found = about.get(key)
    _require(type(found) is int and 0 <= found < _LARGEST, key)
    assert isinstance(found, int)
    return found


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RecordingError(f"its {what} is not what it may be")

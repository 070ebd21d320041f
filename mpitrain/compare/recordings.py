"""Two recordings of one layout, message by message.

Each rank sends and receives the same in both, in the same order, as long as the runs are the same.  The first message
of a rank that differs may differ because another rank has sent something else: so ranks whose own part differs first
are told before those who only received other values.

What ranks tell each other as text (`exchange`) may hold names, times and free space: of these only the order counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mpitrain.comm.script import digest
from mpitrain.errors import DataError
from mpitrain.options import show
from mpitrain.recording.difference import difference, same
from mpitrain.recording.lines import Begun, Call, Kept, State, Value
from mpitrain.recording.reading import RankReader, ranks_in


class Message(NamedTuple):
    """The first message of a rank that is not the same in both.

    n: its number among all of the rank; step: of the run; what: `all_reduce on dp`; sites: in both runs; sent: whether
    what this rank brings to it differs, or the call itself; said: how.  n is 0 where no message differs first, but what
    the rank holds at the end of a step, or where the recorded steps begin.
    """

    rank: int
    n: int
    step: int
    what: str
    sites: tuple[str, str]
    sent: bool
    said: str


class Recorded(NamedTuple):
    """What came of it.

    apart: the first message that differs, of each rank, the likeliest cause first; ranks, messages: how many were
    compared and how many are equal; notes: what could not be compared.
    """

    apart: list[Message]
    ranks: int
    messages: int
    notes: list[str]


def compared(one: Path, other: Path) -> Recorded:
    """Compare the ranks that both recordings hold.

    Raises:
        DataError: they are of runs of other sizes, or have no rank in common.
        RecordingError: one cannot be read, or is damaged.
    """
    there = ranks_in(one), ranks_in(other)
    both = sorted({*there[0]} & {*there[1]})
    if not both:
        raise DataError(f"{show(one)} and {show(other)}: hold recordings of no rank in common.")
    apart, messages = [], 0
    notes = [
        f"rank {rank} is recorded in run {1 if rank in there[0] else 2} only" for rank in {*there[0]} ^ {*there[1]}
    ]
    for rank in both:
        readers = RankReader(one, rank), RankReader(other, rank)
        try:
            sizes = [reader.header["size"] for reader in readers]
            if sizes[0] != sizes[1]:
                raise DataError(
                    f"{show(one)} was recorded on {sizes[0]} ranks, {show(other)} on {sizes[1]}: message by message"
                    " only runs of one layout can be compared.\nFor others train both with --digests."
                )
            steps = [reader.header.get("steps") for reader in readers]
            if steps[0] != steps[1]:
                raise DataError(
                    f"{show(one)} has {_steps(steps[0])}, {show(other)} {_steps(steps[1])}: message by message only"
                    " recordings of the same steps can be compared."
                )
            found, equal = _rank(readers[0], readers[1], rank, notes)
        finally:
            for reader in readers:
                reader.close()
        messages += equal
        apart += [found] if found is not None else []
    return Recorded(sorted(apart, key=lambda m: (not m.sent, m.step, m.n, m.rank)), len(both), messages, notes)


def _rank(one: RankReader, other: RankReader, rank: int, notes: list[str]) -> tuple[Message | None, int]:
    """The first message of a rank that differs, and how many before it do not."""
    equal = 0
    while True:
        held: tuple[_Held, _Held] = {}, {}
        a, b = _next(one, held[0]), _next(other, held[1])
        odd = [name for name in held[0] if name in held[1] and held[0][name] != held[1][name]]
        if odd:
            step = min(held[0][name][0] for name in odd)
            said = "its bytes differ" + (f", and those of {len(odd) - 1:,} other tensors" if len(odd) > 1 else "")
            return Message(rank, 0, step, odd[0], ("", ""), True, said), equal
        if a is None or b is None:
            if a is None and b is None:
                return None, equal
            more, ended, end = (a, 2, other.end) if a is not None else (b, 1, one.end)
            assert more is not None
            if end is None:
                notes.append(f"the recording of rank {rank} of run {ended} was cut after {equal:,} messages")
                return None, equal
            said = f"run {ended} has {equal:,} messages and ends there ({end.why}), the other one goes on"
            return Message(rank, more.n, more.step, _what(more), (more.site, more.site), True, said), equal
        said, sent = _call(one, other, a, b), True
        if not said:
            said, sent = _arrived(one, other, a, b), False
        if said:
            return Message(rank, a.n, a.step, _what(a), (a.site, b.site), sent, said), equal
        equal += 1


_Held = dict[str, tuple[int, int]]
"""What a rank holds at a place -> the step, and a checksum."""


def _next(reader: RankReader, held: _Held) -> Call | None:
    """The next call; what the rank is told to hold before it."""
    kept: dict[str, int] = {}
    while (line := reader.next()) is not None:
        match line:
            case Call():
                return line
            case Kept():
                kept[line.name] = line.value.crc
            case Begun():
                held |= {f"{name} before step {line.first}": (line.first, crc) for name, crc in kept.items()}
            case State():
                held |= {f"{name} after step {line.step}": (line.step, crc) for name, crc in line.sums.items()}
    return None


def _steps(asked: object) -> str:
    known = isinstance(asked, list) and len(asked) == 2 and all(type(step) is int for step in asked)
    return f"steps {asked[0]} to {asked[1]}" if known and isinstance(asked, list) else "all steps"


def _call(one: RankReader, other: RankReader, a: Call, b: Call) -> str:
    """How the calls differ, or what the rank brings to them; "" if they do not."""
    if (a.verb, a.axis, a.peer, a.how) != (b.verb, b.axis, b.peer, b.how):
        return f"run 2 makes another call: {_what(b)}"
    if a.verb == "exchange":
        return ""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{a.shape} {a.dtype} and {b.shape} {b.dtype}"
    return _values(one, other, a.sent, b.sent, "what is sent differs")


def _arrived(one: RankReader, other: RankReader, a: Call, b: Call) -> str:
    of = one.got(a.n), other.got(b.n)
    if of[0] is None or of[1] is None or a.verb == "exchange":  # a recording that was cut has no value here
        return ""
    return _values(one, other, of[0].value, of[1].value, "what arrives differs")


def _values(one: RankReader, other: RankReader, a: Value | None, b: Value | None, what: str) -> str:
    if a is None or b is None:
        return "" if a is b else what
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{what}: {a.shape} {a.dtype} and {b.shape} {b.dtype}"
    if a.digest or b.digest:
        mine, theirs = (v.digest or digest(r.value(v)) for r, v in ((one, a), (other, b)))
        return "" if mine == theirs else f"{what}; its values are not recorded in both"
    if a.crc == b.crc:
        return ""
    mine, theirs = one.value(a), other.value(b)
    return "" if same(mine, theirs) else f"{what}: {difference(theirs, mine)}"


def _what(call: Call) -> str:
    return f"{call.verb} on {call.axis}" + (f" with its rank {call.peer}" if call.peer >= 0 else "")

"""One rank alone, with a recording in the place of the others.

    SURROUNDING.set(ReplayWorld(Script(RankReader(folder, 3))))
    train()                        as rank 3 of the run that was recorded; no MPI, no other rank

A message is answered with what it brought then.  What the rank sends is compared with what it sent: the first call that
is another one, or that brings other values, is a `ReplayDivergence` at its line.  To listeners a replay is a run like
any other: messages begin and end, and bring what they brought.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

from mpitrain.comm.alone import Alone
from mpitrain.comm.communicator import EXCHANGE_LIMIT, Communicator
from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.comm.request import Request
from mpitrain.comm.script import LONGEST_TOLD, RECEIVES, EndOfRecording, Script
from mpitrain.comm.transport import Array
from mpitrain.comm.wire import Empty, target, unmoved
from mpitrain.comm.world import World
from mpitrain.errors import RecordingError, UserError
from mpitrain.events import STEP_LISTENERS, WITNESSES, Event, tell
from mpitrain.options import show
from mpitrain.recording.difference import parted
from mpitrain.recording.lines import Call, plain


class Absent(Alone):
    """The transport of ranks that are not there; the recording answers for them, so it is never asked."""

    kind = "replay"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class _Answered(Communicator):
    """A communicator whose messages a recording answers."""

    script: Script

    def group(self, ranks: Sequence[int], name: str) -> Communicator:
        """As of any communicator; nobody is asked."""
        transport = Absent(list(ranks).index(self.rank), len(ranks))
        axis = _Axis(name, transport, [self.ranks[rank] for rank in ranks], self.board, self.mode)
        axis.script = self.script
        return axis

    def exchange(self, obj: Any) -> list[Any]:
        """As of any communicator; what this rank tells may be longer or shorter than it was, and is compared whole."""
        if self.size == 1:
            return super().exchange(obj)
        text = json.dumps(obj).encode()
        comparing, self.script.comparing = self.script.comparing, False
        try:
            lengths = self._call("exchange", np.array([len(text)]), self._all_gather, 0, None, None)
            if lengths.min() < 0 or lengths.max() > EXCHANGE_LIMIT:
                raise RecordingError(f"{self.script.reader.path}: what ranks told each other is too long.")
            second = self.script.reader.peek()
            padded = np.zeros(int(lengths.max()), np.uint8)
            rows = self._call("exchange", padded, self._all_gather, 0, None, None).reshape(self.size, -1)
        finally:
            self.script.comparing = comparing
        said = [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
        assert isinstance(second, Call)
        if said[self.rank] == text:
            self.script.compared += comparing
        elif comparing:
            now, before = parted(text.decode(), said[self.rank].decode(errors="replace"), LONGEST_TOLD)
            self.script.differs(second, f"this rank tells others\n{show(now)}, in the recording\n{show(before)}")
        try:
            return [json.loads(one) for one in said]
        except (ValueError, RecursionError) as error:
            raise RecordingError(f"{self.script.reader.path}: what ranks told each other is no JSON: {error}") from None

    def agree(self, error: UserError | None) -> None:
        """As of any communicator; an error of this rank that was none then is raised, too."""
        comparing = self.script.comparing
        self.script.comparing = comparing and error is None
        try:
            told = self.exchange(None if error is None else [type(error).__name__, str(error)])
        finally:
            self.script.comparing = comparing
        for said in told:
            if said is not None and error is None:
                raise _error_of(said)
        if error is not None:
            raise error

    def _call(self, verb: str, x: Any, move: Callable[..., Any], *how: Any, out: Any = None, peer: int = -1) -> Any:
        if self.size == 1:
            result = unmoved(x, out, verb)
            return Request.done(result) if verb in LIKE_BLOCKING else result
        (a, empty), script = self._taken_up(x, out), self.script
        call = script.call(self, verb, a, how, peer)
        nbytes = self._payload.bytes(verb, a, how)
        self._bytes[verb] = self._bytes.get(verb, 0) + nbytes
        listeners, witnesses = STEP_LISTENERS.get(), WITNESSES.get()
        began = perf_counter_ns() if witnesses else 0
        info: Mapping[str, Any] = self._info(call.number, verb, a, how, peer) if listeners else {}
        if listeners:
            tell(listeners, Event("message", "begin", verb, info))
        script.compare(call, a)
        recv = self._landing(verb, a, how, out, empty)
        if verb in LIKE_BLOCKING:
            moved: Any = (_Recorded(script, call, recv), recv)
        else:
            moved = recv
            if recv is not None:
                recv[...] = script.brought(call, verb, recv.shape, recv.dtype)
            elif script.reader.got(call.n) is None:
                raise EndOfRecording(script.unanswered(call))
        for witness in witnesses:
            witness.message(self, verb, call.number, began, a, how, peer, nbytes)
        if listeners:
            tell(listeners, Event("message", "end", verb, {**info, "result": moved}))
        if verb in LIKE_BLOCKING:
            return self._in_flight_then(moved, call.number, verb, a, how, peer, x, out)
        return self._delivered(recv, x, out)

    def _in_flight_then(
        self,
        moved: tuple[_Recorded, Array | None],
        number: int,
        verb: str,
        a: Array,
        how: tuple[Any, ...],
        peer: int,
        x: Any,
        out: Any,
    ) -> Request:
        """What a non-blocking verb returns; `_request` without the checks, which have nobody to ask."""
        pending, recv = moved

        def finish() -> Any:
            if recv is not None:
                self._tell_arrival(recv, number, verb, a, how, peer)
            return self._delivered(recv, x, out)

        return Request(pending, finish, lambda pending: pending.wait())

    def _landing(self, verb: str, a: Array, how: Sequence[Any], out: Any, empty: Empty) -> Array | None:
        """Where what the message brings is put; None: it brings nothing."""
        if verb in RECEIVES:
            return a
        shape = _shape_of_result(verb, a, how, self.rank, self.size)
        return None if shape is None else target(a, shape, out, empty, verb)


class _Axis(_Answered):
    """A group of ranks."""


class ReplayWorld(_Answered, World):
    """All ranks of a recorded run, of which one is here.

    Args:
        script: the recording.
    """

    def __init__(self, script: Script) -> None:
        header = script.reader.header
        World.__init__(
            self,
            Absent(header["rank"], header["size"]),
            f"a recording of {header['library']}",
            progress="messages are answered from a recording",
            host=header["host"],
        )
        self.script = script
        if header["deterministic"]:
            self.set_deterministic()


class _Recorded:
    """A message in flight, of which the recording knows when it is complete."""

    def __init__(self, script: Script, call: Call, recv: Array | None) -> None:
        self._script, self._call, self._recv = script, call, recv
        self._filled = recv is None

    def test(self) -> bool:
        """True once it is complete; false where the recording ends before that, until that is asked too often."""
        if not self._filled:
            if self._script.arrived(self._call):
                self.wait()
            else:
                self._script.in_vain(self._call)
        return self._filled

    def wait(self) -> None:
        """Fill in what it brought."""
        if not self._filled:
            assert self._recv is not None
            self._recv[...] = self._script.brought(self._call, self._call.verb, self._recv.shape, self._recv.dtype)
            self._filled = True


def _error_of(said: Any) -> UserError:
    """The error that a rank told the others of."""
    name, text = said if isinstance(said, list) and len(said) == 2 else ("", said)
    kinds, kind = [UserError], UserError
    while kinds:
        found = kinds.pop()
        kinds += found.__subclasses__()
        kind = found if found.__name__ == name else kind
    return kind("\n".join(plain(line) for line in str(text).splitlines()[:5]))


def _shape_of_result(verb: str, a: Array, how: Sequence[Any], rank: int, size: int) -> tuple[int, ...] | None:
    """Of what a call brings; None: it brings nothing."""
    match LIKE_BLOCKING.get(verb, verb):
        case "all_reduce" | "broadcast" | "shift":
            return a.shape
        case "exchange":
            return (a.shape[0] * size,)
        case "all_gather":
            dim, counts = how[:2]
            return _with_length(a, dim, a.shape[dim] * size if counts is None else sum(counts))
        case "reduce_scatter":
            dim, counts = how[:2]
            return _with_length(a, dim, a.shape[dim] // size if counts is None else counts[rank])
        case "all_to_all":
            i, j, sent, received = how[:4]
            shape = list(a.shape)
            if i != j:
                shape[j] = sent[rank]
            shape[i] = sum(received)
            return tuple(shape)
        case _:
            return None


def _with_length(a: Array, dim: int, length: int) -> tuple[int, ...]:
    return (*a.shape[:dim], int(length), *a.shape[dim + 1 :])

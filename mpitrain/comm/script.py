"""What a replay goes by: the recorded calls in their order, and how what is done now compares with them.

The door of `comm.replay` asks it three things of each call: is it the one that was recorded, is what it brings what was
brought, and what did it get.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.site import call_site
from mpitrain.comm.transport import Array
from mpitrain.errors import RecordingError, ReplayDivergence
from mpitrain.recording.difference import difference, same
from mpitrain.recording.lines import ENDED, Call, End, Line, Value, told_how
from mpitrain.recording.reading import RankReader

RECEIVES = ("recv", "irecv")
LONGEST_TOLD = 120  # characters of a text that is told
MOST_TESTS = 1000  # of requests that are never complete, at the end of a recording
WAY_OUT = "Is it the code, the data and the machine of the recording?  --keep-going tells what else differs."


class EndOfRecording(BaseException):
    """The program has come to the end of what was recorded; no error, and nobody's to catch but the replay's.

    Attributes:
        as_asked: the recorded steps are over; else whoever was recorded ended there.
    """

    as_asked = False


class Script:
    """What a replay goes by: the recording, and how strictly it is followed.

    Args:
        reader: of the recording.
        keep_going: other values are noted, and the replay goes on with the answers of then.

    Attributes:
        comparing: whether values are compared; not while steps are skipped, when the rank has others than then.
        differences: what differed, as far as it was told.
        compared, answered: messages whose values were the same, and those that were answered at all.
        before: called with the number of each message before it is made: a breakpoint.
        over: whether the part of the program that was recorded is over.
    """

    def __init__(self, reader: RankReader, keep_going: bool = False) -> None:
        self.reader = reader
        self.keep_going = keep_going
        self.comparing = True
        self.differences: list[str] = []
        self.compared = self.answered = 0
        self.before: Callable[[int], None] | None = None
        self.over = False
        self._tests = 0

    def call(self, axis: Communicator, verb: str, a: Array, how: Sequence[Any], peer: int) -> Call:
        """The recorded call that this one is.

        Raises:
            ReplayDivergence: the recording has another one there.
            EndOfRecording: it ends there.
        """
        line = self.reader.peek()
        here = _called(verb, axis.name, a.shape, a.dtype.name)
        if line is None or isinstance(line, End):
            raise self.beyond(line, f"before {here} at {call_site()}", f"the program calls {here} at {call_site()}")
        if not isinstance(line, Call):
            raise ReplayDivergence(f"{here} at {call_site()}: there the recording {spoken(line)}.\n{WAY_OUT}")
        if self.before is not None:
            self.before(line.n)
        self.reader.next()
        arguments = told_how(verb, how)
        mine = (verb, axis.name, axis.ranks, peer, a.shape, a.dtype.name, arguments)
        if mine != (line.verb, line.axis, line.ranks, line.peer, line.shape, line.dtype, line.how):
            what = f"the program calls {here} at {call_site()}"
            raise ReplayDivergence(
                f"{self.number(line)}: {what}{_arguments(arguments, peer, axis.ranks)};\n"
                f"the recording has {_called(line.verb, line.axis, line.shape, line.dtype)} at {line.site}"
                f"{_arguments(line.how, line.peer, line.ranks)}.\n{WAY_OUT}"
            )
        return line

    def compare(self, call: Call, a: Array) -> None:
        """Compare what is sent with what was.

        Raises:
            ReplayDivergence: it differs.
        """
        if not self.comparing or call.sent is None:
            return
        if (call.sent.shape, call.sent.dtype) != (call.shape, call.dtype):
            raise RecordingError(f"{self.reader.path} is damaged: {self.number(call)} has sent another array.")
        if call.sent.digest:
            if digest(a) == call.sent.digest:
                self.compared += 1
                return
            what = "what is sent differs from the recording, which does not have the values"
        else:
            before = self.reader.value(call.sent)
            if same(a, before):
                self.compared += 1
                return
            what = f"what is sent differs from the recording, {difference(a, before)}"
        self.differs(call, what)

    def differs(self, call: Call, what: str) -> None:
        """A message that is not what it was.

        Raises:
            ReplayDivergence: unless the replay is to keep going.
        """
        site = call_site()
        moved = "" if site == call.site else f" (then {call.site})"
        step = f", step {call.step}" if call.step else ""
        text = f"{self.number(call)}{step}, {call.verb} on {call.axis} at {site}{moved}: {what}"
        self.different(text)

    def different(self, text: str) -> None:
        """Something that is not what it was.

        Raises:
            ReplayDivergence: unless the replay is to keep going.
        """
        if not self.keep_going:
            raise ReplayDivergence(f"{text}.\n{WAY_OUT}")
        self.differences.append(text)

    def brought(self, call: Call, verb: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """What a message brought, of this shape and dtype.

        Raises:
            RecordingError: it is of another.
            EndOfRecording: that was never known.
        """
        got = self.reader.got(call.n)
        if got is None:
            raise EndOfRecording(self.unanswered(call))
        value: Value | None = got.value
        if value is None or (value.shape, value.dtype) != (tuple(shape), np.dtype(dtype).name):
            had = "nothing" if value is None else f"{value.shape} {value.dtype}"
            raise RecordingError(f"{self.reader.path}: {self.number(call)} brought {had}, not {shape} {dtype}.")
        self.answered += 1
        return self.reader.value(value)

    def arrived(self, call: Call) -> bool:
        """Whether it is known what a message brought."""
        got = self.reader.got(call.n)
        if got is not None:
            self.reader.put_back(got)
        return got is not None

    def in_vain(self, call: Call) -> None:
        """A request was tested that is never complete.

        Raises:
            EndOfRecording: nothing else is recorded either, and it was asked so often that the program waits for it.
        """
        line = self.reader.peek()
        if line is None or isinstance(line, End):
            self._tests += 1
            if self._tests > MOST_TESTS:
                raise EndOfRecording(self.unanswered(call))

    def number(self, call: Call) -> str:
        """`message 57 of 105`."""
        return f"message {call.n} of {self.reader.messages}"

    def unanswered(self, call: Call) -> str:
        """How the recording ends in a message."""
        end = self.reader.end
        why = "its process had ended" if end is None else end.why
        return f"in {self.number(call)}, {call.verb} on {call.axis}, which was not answered any more: {why}"

    def beyond(self, line: End | None, where: str, does: str) -> EndOfRecording | ReplayDivergence:
        """What is raised where the program goes on, and the recording does not.

        Args:
            line: with which the recording ends; None: it was cut.
            where: the replay ends then.
            does: what the program does there, which is a difference if it had ended by itself.
        """
        if line is not None and line.why == ENDED and not self.over:
            return ReplayDivergence(f"{does}; there the recording has the end of the program.\n{WAY_OUT}")
        return EndOfRecording(self.ended(line, where))

    def ended(self, line: Line | None, where: str) -> str:
        """How the recording ends."""
        if isinstance(line, End):
            return f"{where}, as the recording does: {line.why}"
        return f"{where}: the recording was cut there, its process had ended"


def digest(a: Array) -> str:
    """Of the bytes of an array."""
    return sha256(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data).hexdigest()[:32]


def spoken(line: Line) -> str:
    """What a recording has in a place, in words."""
    if isinstance(line, Call):
        return f"has message {line.n}, {_called(line.verb, line.axis, line.shape, line.dtype)} at {line.site}"
    return f"has {type(line).__name__.lower()}"


def _called(verb: str, axis: str, shape: Sequence[int], dtype: str) -> str:
    return f"{verb} {tuple(shape)} {dtype} on {axis}"


def _arguments(how: Sequence[Any], peer: int, ranks: Sequence[int]) -> str:
    """What else a call says."""
    words = [f"peer {peer}"] if peer >= 0 else []
    words += [f"arguments {json.dumps(how)[:LONGEST_TOLD]}"] if how and peer < 0 else []
    return f" ({', '.join([*words, f'ranks {list(ranks)[:16]}'])})"

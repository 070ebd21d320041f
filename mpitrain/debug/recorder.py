"""The recorder: keeps what a rank sends and receives, so that the rank can be run again alone (`comm.replay`).

    with record(world(), "recordings/a"):                     from before the first message on
        train()
    with record(world(), "recordings/a", steps=(100, 103)):   of a long run the setting up, and steps 100 to 103

A listener of the door: for each call a line with what was asked for and where, the values that this rank brought, and
those that it got.  Of the executor it hears when steps begin and end; after each recorded step it notes sums of all
that outlives a step, by which a replay proves itself.

Of steps before the range nothing is kept but what they reported: a replay gives their reports again and computes
nothing.  What the rank holds where the range begins is kept instead.  Where a reducer is in the middle of something
(local SGD between two averages), the range begins where it is at rest.

A disk that has no room ends the recording, with one warning; training goes on.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.backend import to_host
from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.comm.replay import ReplayWorld
from mpitrain.comm.script import RECEIVES, digest
from mpitrain.comm.together import together
from mpitrain.comm.world import World
from mpitrain.debug import outlives
from mpitrain.debug.row_heard import RowHeard
from mpitrain.errors import RecordingError
from mpitrain.events import Event, join, leave
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.stand_in import STAND_IN, standing_in
from mpitrain.pipeline.update import StepReport
from mpitrain.recording.lines import (
    DTYPES,
    ENDED,
    Begun,
    Call,
    End,
    Evaluated,
    Got,
    Heard,
    Kept,
    Row,
    State,
    Value,
    told_how,
)
from mpitrain.recording.outside import OUTSIDE
from mpitrain.recording.writing import RankWriter, claim

SENT = ("values", "digest")
"""What is kept of what a rank sends: the values, or enough to tell that they differ."""
TENSORS_A_LINE = 1000


class Recorder:
    """Records one rank; a listener, and who stands in for executors, though it lets them work.

    Args:
        world: all ranks.
        writer: of the recording.
        steps: the first and the last step whose messages are kept; None: all.
        sent: "values" or "digest".

    Attributes:
        steps: how many were recorded.
        done: whether nothing more will be recorded.
    """

    hears_all = True  # also of messages that are for another listener alone: a replay needs every one

    def __init__(
        self, world: World, writer: RankWriter, steps: tuple[int, int] | None = None, sent: str = SENT[0]
    ) -> None:
        self.steps = 0
        self.done = False
        self._world, self._writer, self._range, self._sent = world, writer, steps, sent
        self._messages = 0
        self._calls: list[int] = []  # numbers of blocking calls that have begun and not ended; -1: not kept
        self._flying: dict[int, tuple[int, Any]] = {}  # id of a call's arguments -> its number, the arguments
        self._begun = steps is None  # whether the range has begun
        self._skipped = False  # some steps were
        self._inside = False  # a step that is not kept, or an evaluation
        self._row: RowHeard | None = None
        self._last = 0
        self._asked = steps

    # -- messages -----------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """One event of this rank."""
        if self.done or event.kind not in ("message", "arrival", "action"):
            return
        try:
            if event.kind == "action":
                self._action(event)
            elif event.kind == "arrival":
                self._arrival(event)
            elif not event.name.startswith("wait "):
                if event.phase == "begin":
                    self._begin(event.name, event.info)
                else:
                    self._end(event.name, event.info)
        except OSError as error:
            self._stop(error)

    def _begin(self, verb: str, info: Mapping[str, Any]) -> None:
        self._messages += 1
        n = self._messages
        if self._inside:
            n = -1
        else:
            self._writer.line(self._call(n, verb, info))
        if verb not in LIKE_BLOCKING:
            self._calls.append(n)
        elif verb != "isend":  # that brings nothing
            self._flying[id(info["how"])] = n, info["how"]

    def _call(self, n: int, verb: str, info: Mapping[str, Any]) -> Call:
        a, how = info["array"], info["how"]
        sends = verb not in RECEIVES and a.size and (verb != "broadcast" or info["ranks"][how[0]] == self._world.rank)
        return Call(
            n=n,
            number=info["number"],
            axis=info["axis"],
            ranks=info["ranks"],
            verb=verb,
            how=told_how(verb, how),
            peer=info["peer"],
            shape=a.shape,
            dtype=a.dtype.name,
            step=0 if self._row is None else self._row.steps[0],
            site=info["site"](),
            sent=self._brings(a) if sends else None,
        )

    def _brings(self, a: Any) -> Value:
        if self._sent == "digest":
            return Value(_known(a), a.shape, digest=digest(to_host(a)))
        return self._keep(a)

    def _keep(self, a: Any) -> Value:
        _known(a)
        return self._writer.value(to_host(a))

    def _end(self, verb: str, info: Mapping[str, Any]) -> None:
        if verb in LIKE_BLOCKING:
            return
        n = self._calls.pop() if self._calls else -1
        if n >= 0:
            result = info["result"]
            self._writer.line(Got(n, None if result is None else self._keep(result)))

    def _arrival(self, event: Event) -> None:
        n, _ = self._flying.pop(id(event.info["how"]), (-1, None))
        if n >= 0:
            self._writer.line(Got(n, self._keep(event.info["result"])))

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self, executor: Executor, batches: Sequence[Any]) -> list[StepReport] | None:
        """A row of steps begins; the executor makes it."""
        if not self.done:
            try:
                self._row_begins(executor, batches)
            except OSError as error:
                self._stop(error)
        return None

    def _row_begins(self, executor: Executor, batches: Sequence[Any]) -> None:
        row = RowHeard(executor, batches)
        late = self._range is not None and row.steps[-1] >= self._range[0]
        if not self._begun and late and executor.reducer.at_rest:
            self._begin_range(executor, row.steps[0])
        self._row = row
        self._inside = not self._begun
        self._skipped = self._skipped or self._inside

    def _begin_range(self, executor: Executor, first: int) -> None:
        """The recorded steps begin here, as many as were asked for."""
        assert self._range is not None
        late = max(0, first - self._range[0])
        self._range = first, self._range[1] + late
        self._begun = True
        if not self._skipped:
            return
        for name, full_shape, array in outlives.tensors(executor):
            self._writer.line(Kept(name, full_shape, self._keep(outlives.on_host(array))))
        self._writer.line(Begun(first, outlives.numbers(executor)))

    def _action(self, event: Event) -> None:
        """After the last action of a row its steps are over."""
        if self._row is None or not self._row.is_over(event):
            return
        executor, numbers, reports = self._row.executor, self._row.steps, self._row.reports
        self._row, self._inside = None, False
        if not self._begun:
            self._writer.line(Row(numbers[0], [asdict(report) for report in reports]))
            return
        self.steps += len(numbers)
        self._last = numbers[-1]
        found = list(outlives.sums(executor).items())
        for start in range(0, len(found), TENSORS_A_LINE):
            self._writer.line(State(self._last, dict(found[start : start + TENSORS_A_LINE])))
        if self._range is not None and self._last >= self._range[1]:
            self._end_of_recording(self._all_of_range(self._range[0], self._last))

    def _all_of_range(self, first: int, last: int) -> str:
        """Why the recording ends behind its steps."""
        assert self._asked is not None
        if (first, last) == self._asked:
            return f"steps {first} to {last} were asked for"
        return f"it has steps {first} to {last}, since {self._asked[0]} to {self._asked[1]} were asked for"

    def evaluate(self, executor: Executor, batches: Iterable[Any]) -> float | None:
        """An evaluation; the executor makes it, and if it is not kept its result is."""
        if self.done or self._begun:
            return None
        token = STAND_IN.set(None)
        self._inside = True
        try:
            loss = executor.evaluate(batches)
        finally:
            self._inside = False
            STAND_IN.reset(token)
        self._skipped = True
        try:
            self._writer.line(Evaluated(loss))
        except OSError as error:
            self._stop(error)
        return loss

    # -- from outside -------------------------------------------------------------------------------------------------

    def heard(self, what: str, ask: Callable[[], Any]) -> Any:
        """The answer, which is kept."""
        answer = ask()
        if not self.done and not self._inside:
            try:
                self._writer.line(Heard(what, answer))
            except OSError as error:
                self._stop(error)
        return answer

    def place(self, path: Path) -> Path:
        """There."""
        return path

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, why: str) -> None:
        """The run is over, or was ended."""
        if not self.done:
            with contextlib.suppress(OSError):
                self._end_of_recording(why)

    def discard(self) -> None:
        """Remove what was recorded."""
        self.close("")
        self._writer.remove()

    def _end_of_recording(self, why: str) -> None:
        self.done = True
        try:
            self._writer.line(End(why, self._messages, self._last))
        finally:
            self._writer.close()

    def _stop(self, error: OSError) -> None:
        """Nothing more is recorded; what is there stays of use."""
        why = f"{self._writer.path.parent} cannot be written: {error.strerror or error}"
        print(
            f"rank {self._world.rank}: the recording ends here, training goes on: {why}",
            file=sys.stderr,
            flush=True,
        )
        self.done = True
        with contextlib.suppress(OSError):
            self._writer.line(End(why, self._messages, self._last))
        with contextlib.suppress(OSError):
            self._writer.close()


@contextlib.contextmanager
def record(
    world: World,
    folder: str | os.PathLike[str],
    *,
    ranks: Collection[int] | None = None,
    steps: tuple[int, int] | None = None,
    sent: str = SENT[0],
    program: str = "script",
    words: Sequence[str] = (),
    settings: str | None = None,
) -> Iterator[Recorder | None]:
    """Record this rank while the block runs.  Collective over the world; before its first message.

    Sums are taken in rank order from here on (`World.set_deterministic`).  In a replay nothing is done.

    Args:
        world: all ranks.
        folder: of the recording; it is made, and must not hold one.
        ranks: those that are recorded; None: all.
        steps: the first and the last step that is kept, counted from 1; None: all.
        sent: "values", or "digest": a replay then tells that a value differs, but not by how much.
        program: "train" for a run of the trainer, which a replay can start by itself.
        words: its command line.
        settings: the text of the file of settings that it names.

    Returns:
        The recorder; None on a rank that is not recorded.

    Raises:
        RecordingError: there is a recording in the folder, or a rank or a step that does not exist; on every rank.
    """
    if world.kind == "replay":
        yield None
        if isinstance(world, ReplayWorld):
            world.script.over = True
        return
    _check(world, ranks, steps, sent)
    world.set_deterministic()
    path = Path(folder)

    def refused(error: Exception) -> RecordingError:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return RecordingError(f"{path}: a recording cannot be made there: {why}.")

    together(world, lambda: claim(path), here=world.rank == 0, refused=refused)
    here = ranks is None or world.rank in ranks
    header = _header(world, steps, sent, program, words, settings)
    writer = together(world, lambda: RankWriter(path, world.rank, header), here=here, refused=refused)
    if writer is None:
        yield None
        return
    recorder = Recorder(world, writer, steps, sent)
    token = OUTSIDE.set(recorder)
    join(recorder, ops=False)
    why = ENDED
    try:
        with standing_in(recorder):
            yield recorder
    except BaseException as error:
        why = f"{type(error).__name__} ended the program"
        raise
    finally:
        leave(recorder)
        OUTSIDE.reset(token)
        recorder.close(why)


def _header(
    world: World,
    steps: tuple[int, int] | None,
    sent: str,
    program: str,
    words: Sequence[str],
    settings: str | None,
) -> dict[str, Any]:
    from mpitrain import __version__

    return {
        "size": world.size,
        "kind": world.kind,
        "library": world.library[:400],
        "host": world.host[:256],
        "deterministic": world.deterministic,
        "sent": sent,
        "steps": None if steps is None else list(steps),
        "program": program,
        "words": list(words),
        "settings": settings,
        "versions": {"mpitrain": __version__, "python": platform.python_version(), "numpy": np.__version__},
    }


def _check(world: World, ranks: Collection[int] | None, steps: tuple[int, int] | None, sent: str) -> None:
    for rank in ranks or ():
        if not 0 <= rank < world.size:
            raise RecordingError(f"rank {rank} is to be recorded, but ranks are 0 to {world.size - 1}.")
    if steps is not None and not 1 <= steps[0] <= steps[1]:
        raise RecordingError(f"steps {steps[0]}:{steps[1]}: the first is 1 or more, and the last not before it.")
    if sent not in SENT:
        raise RecordingError(f"what is sent is kept as {' or '.join(SENT)}, not as {sent!r}.")
    if sum(world.sent_bytes.values()):
        raise RecordingError(
            "the world has sent messages already: a replay needs all of them.  Begin to record right after world()."
        )


def _known(a: Any) -> str:
    """The name of a dtype that can be kept."""
    name: str = a.dtype.name
    if name not in DTYPES:
        raise OSError(f"an array of {name} cannot be recorded")
    return name

"""What a replay does at steps: those before the recorded ones are skipped, and after each of these the state is proven.

A skipped step reports what it reported then; nothing is computed.  Where the recorded steps begin, what the rank held
there is filled in.  After each recorded step all that outlives it has the sums of then, or the replay says what does
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mpitrain.comm.script import WAY_OUT, EndOfRecording, Script, spoken
from mpitrain.debug import outlives
from mpitrain.debug.row_heard import RowHeard
from mpitrain.errors import RecordingError, ReplayDivergence, UserError
from mpitrain.events import Event
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.update import StepReport
from mpitrain.recording.lines import Begun, End, Evaluated, Heard, Kept, Row, State


class Forward:
    """Stands in for executors, answers for what is outside, and listens for the ends of steps.

    Args:
        script: the recording.
        folder: where the replayed program writes.

    Attributes:
        steps: that were made again.
        skipped: that were not.
        breakpoint: called before the first recorded step.
    """

    def __init__(self, script: Script, folder: Path) -> None:
        self.steps = self.skipped = 0
        self.breakpoint: Callable[[], None] | None = None
        self._script, self._folder = script, folder
        self._row: RowHeard | None = None

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self, executor: Executor, batches: Sequence[Any]) -> list[StepReport] | None:
        """The reports of a row that was not recorded; None: it was, and is made again."""
        line = self._script.reader.peek()
        if isinstance(line, Row):
            self._script.reader.next()
            self._script.comparing = False
            row = RowHeard(executor, batches)
            if row.steps[0] != line.first or len(batches) != len(line.reports):
                raise ReplayDivergence(
                    f"the program makes steps {row.steps[0]} to {row.steps[-1]}, the recording"
                    f" {len(line.reports)} from step {line.first} on.\n{WAY_OUT}"
                )
            self.skipped += len(batches)
            return [self._report(fields) for fields in line.reports]
        if isinstance(line, (Kept, Begun)):
            self._fill(executor)
        if self.breakpoint is not None and not self.steps:
            self.breakpoint()
        self._row = RowHeard(executor, batches)
        return None

    def evaluate(self, executor: Executor, batches: Iterable[Any]) -> float | None:
        """The loss of an evaluation that was not recorded."""
        line = self._script.reader.peek()
        if not isinstance(line, Evaluated):
            return None
        self._script.reader.next()
        self._script.comparing = False
        return line.loss

    def __call__(self, event: Event) -> None:
        """One event: the end of a row proves the state; a file finds the folder that another rank made."""
        if event.kind == "disk" and (event.phase, event.name) == ("begin", "create"):
            folder = Path(event.info["path"]).parent
            if self._folder in folder.parents:
                folder.mkdir(parents=True, exist_ok=True)
            return
        if self._row is None or not self._row.is_over(event):
            return
        row, self._row = self._row, None
        self.steps += len(row.steps)
        self._prove(row)
        if isinstance(line := self._script.reader.peek(), End) and line.why.endswith("were asked for"):
            end = EndOfRecording(self._script.ended(line, f"after step {row.steps[-1]}"))
            end.as_asked = True
            raise end

    def _prove(self, row: RowHeard) -> None:
        before: dict[str, int] = {}
        step = row.steps[-1]
        while isinstance(line := self._script.reader.peek(), State):
            self._script.reader.next()
            before |= line.sums
            step = line.step
        if not before and line is None:
            raise EndOfRecording(f"at the end of step {step}: the recording was cut there, its process had ended")
        if step != row.steps[-1]:
            raise ReplayDivergence(f"the program has made step {row.steps[-1]}, the recording step {step}.\n{WAY_OUT}")
        odd = outlives.different(outlives.sums(row.executor), before)
        if odd:
            more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
            self._script.different(
                f"after step {step} of the run the state differs from the recording: {', '.join(odd[:3])}{more}"
            )

    def _fill(self, executor: Executor) -> None:
        kept: list[Kept] = []
        reader = self._script.reader
        while isinstance(line := reader.next(), Kept):
            kept.append(line)
        if not isinstance(line, Begun):
            raise RecordingError(f"{reader.path}: what the rank held where the recorded steps begin is not whole.")
        try:
            outlives.fill(executor, kept, line.numbers, reader.value)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise RecordingError(f"{reader.path}: what the rank held is not what it may be: {error!r}.") from error
        self._script.comparing = True

    def _report(self, fields: dict[str, Any]) -> StepReport:
        try:
            counted = {str(name): tuple(map(float, of)) for name, of in fields["counted"].items()}
            asked = tuple(map(float, fields["asked"]))
            floats = {name: float(fields[name]) for name in ("loss", "grad_norm", "lr", "scale", "next_scale")}
            whole = {name: int(fields[name]) for name in ("targets", "rows")}
            told: dict[str, Any] = {**floats, **whole, "skipped": bool(fields["skipped"])}
            return StepReport(**told, counted=counted, asked=asked)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            path = self._script.reader.path
            raise RecordingError(f"{path}: a report of a step is not what it may be: {error}.") from None

    # -- from outside -------------------------------------------------------------------------------------------------

    def heard(self, what: str, ask: Callable[[], Any]) -> Any:
        """The answer that was heard then."""
        line = self._script.reader.peek()
        if line is None or isinstance(line, End):
            raise self._script.beyond(line, f"where it asked for {what}", f"the program asks for {what}")
        if not isinstance(line, Heard) or line.what != what:
            there = f"asks for {line.what}" if isinstance(line, Heard) else spoken(line)
            raise ReplayDivergence(f"the program asks for {what}; there the recording {there}.\n{WAY_OUT}")
        self._script.reader.next()
        return line.answer

    def place(self, path: Path) -> Path:
        """A folder of the replay's own: the recorded run is left alone."""
        own = self._folder / "run"
        own.mkdir(mode=0o700, parents=True, exist_ok=True)  # another rank may have made it
        return own

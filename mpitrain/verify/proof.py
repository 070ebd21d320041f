"""A script, one rank, layouts: run it in each, and judge each by the one rank.

The run of one rank is made once, and once more with experts where a layout spreads them and the script has none by
itself; a pipeline that never drains is judged by a replay of its own.  A layout that differs is taken apart: each of
its axes alone, as threads, until it is known which of them differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpitrain.debug.capture import Record
from mpitrain.errors import ConfigError
from mpitrain.options import show
from mpitrain.verify.judge import Verdict, judge
from mpitrain.verify.launch import Run, run_all
from mpitrain.verify.layouts import Layout
from mpitrain.verify.obeyed import disobeyed
from mpitrain.verify.stale import courses_of
from mpitrain.verify.suspect import Hint, hints

FRESH = "{run}"
"""Stands in a script's arguments for a folder of each run's own."""


@dataclass
class Outcome:
    """What came of one layout.

    Attributes:
        layout: which.
        word: "equal", "differs", "failed" (did not run to its end) or "refused" (by the script, before its first step).
        seconds: that the run took.
        verdict: the comparison, where there was something to compare.
        message: why it was refused or how it failed.
        state_error: what the check of states said, if that is how it failed.
        flags: what the script got besides its own.
        hints: where to look, if it differs.
    """

    layout: Layout
    word: str
    seconds: float
    verdict: Verdict | None = None
    message: str = ""
    state_error: str = ""
    flags: tuple[str, ...] = ()
    hints: list[Hint] = field(default_factory=list)


@dataclass
class Proof:
    """How the runs are made.

    Args:
        command: the script and its arguments, without flags of a layout; FRESH in them is a new folder for each run.
        folder: where runs may write; exists.
        steps: after which every run is ended.
        transport: "local" or "mpi", for layouts.
        at_once: runs at the same time, as threads.
        timeout: seconds that a run may take.
        echo: print what the scripts print.
        states: check the states of values in every run.
        experts: what gives the model experts, for layouts that spread them and for the one rank that these are held
            against; empty where the command does.
    """

    command: list[str]
    folder: Path
    steps: int
    transport: str = "local"
    at_once: int = 1
    timeout: float = 300.0
    echo: bool = False
    states: bool = False
    experts: Sequence[str] = ()
    _number: int = 0
    _references: dict[bool, Run] = field(default_factory=dict)  # by whether experts were added
    _known: dict[tuple[Layout, bool], Outcome] = field(default_factory=dict)

    def adds_experts(self, layout: Layout) -> bool:
        """Whether the model is given experts for a layout."""
        return bool(self.experts) and layout.spreads_experts

    def one_rank(self, experts: bool = False) -> list[Record]:
        """Run the script in a world of one.

        Args:
            experts: added to its model.

        Returns:
            Its records, without the numbers in their arrays.

        Raises:
            ConfigError: it fails there already, or never trains.
        """
        run = self._new(None, experts)
        (_,) = run_all([run], self.steps, "local", 1, self.timeout)
        self._say(run)
        script = show(self.command[0])
        records = [Record(record.facts, dict.fromkeys(record.arrays, np.empty(0))) for record in run.records()[0]]
        if run.code != 0:
            if not self.echo:
                print(_quoted(run.tail()), file=sys.stderr)
            raise ConfigError(
                f"{script} {_end_of(run, self.timeout)} already on one rank, without any flag of a layout: there is\n"
                "nothing to compare with.  What it printed last stands above."
            )
        if not any(record.facts["is"] == "step" for record in records):
            raise ConfigError(
                f"{script} made no step on one rank: there is nothing to compare.  verify records scripts that train\n"
                "with an Executor on their world()."
            )
        self._references[experts] = run
        return records

    def outcomes(
        self, layouts: Sequence[Layout], transport: str | None = None, experts: bool = False
    ) -> Iterator[Outcome]:
        """Run and judge each layout, in order; each once, however often it is asked for.

        Args:
            layouts: which.
            transport: other than the proof's.
            experts: also where they would not be added.
        """
        way = transport or self.transport
        wanted = [(layout, experts or self.adds_experts(layout)) for layout in layouts]
        new = [each for each in dict.fromkeys(wanted) if each not in self._known]
        runs = [self._new(*each) for each in new]
        at_once = self.at_once if way == "local" else 1
        ended = zip(new, run_all(runs, self.steps, way, at_once, self.timeout), strict=True)
        for each in wanted:
            while each not in self._known:
                ran, run = next(ended)
                self._say(run)
                self._known[ran] = self._judged(*ran, run)
                run.forget()
            yield self._known[each]

    def _new(self, layout: Layout | None, experts: bool) -> Run:
        self._number += 1
        folder = self.folder / f"{self._number:03d}"
        words = [*self.command, *(self.experts if experts else ())]
        command = [word.replace(FRESH, str(folder / "run")) for word in words]
        if layout is None:
            return Run(folder, 0, command)
        return Run(folder, layout.ranks, [*command, *layout.flags], states=self.states)

    def _judged(self, layout: Layout, experts: bool, run: Run) -> Outcome:
        outcome = self._judgement(layout, experts, run)
        outcome.flags = (*(self.experts if experts else ()), *layout.flags)
        return outcome

    def _judgement(self, layout: Layout, experts: bool, run: Run) -> Outcome:
        refusal = run.refusal()
        if refusal is not None:
            return Outcome(layout, "refused", run.seconds, message=refusal)
        otherwise = disobeyed(layout, run)
        if otherwise:
            return Outcome(layout, "refused", run.seconds, message=otherwise)
        silent = run.silent()
        if run.code == 0 and silent:
            message = (
                f"rank {silent[0]} left no record in {run.folder} ({len(silent)} of {layout.ranks} ranks did not).\n"
                "Ranks on several hosts need a folder for temporary files that all of them see: TMPDIR=DIR."
            )
            return Outcome(layout, "failed", run.seconds, message=message)
        kept = reference = self._references[experts]
        if layout.is_stale:
            reference = self._replay(layout, run)
            if reference.code != 0:
                message = f"its replay on one rank {_end_of(reference, self.timeout)}: {reference.reason()}"
                return Outcome(layout, "failed", run.seconds, message=f"{message}\n{_quoted(reference.tail())}")
        verdict = judge(reference.records()[0], run.records())
        if reference is not kept:
            reference.forget()
        if run.code != 0:
            error = run.state_error()
            reason = "a rule of states is broken" if error else run.reason()
            message = f"{_end_of(run, self.timeout)}: {reason}\n{_quoted(run.tail())}"
            return Outcome(layout, "failed", run.seconds, verdict, message, error)
        return Outcome(layout, "equal" if verdict.ok else "differs", run.seconds, verdict)

    def _replay(self, layout: Layout, run: Run) -> Run:
        """Run the script on one rank with the weights that a pipeline which never drains has used."""
        ranks = [[Record(record.facts, {}) for record in records] for records in run.records()]
        steps = sum(record.facts["is"] == "step" for record in ranks[0])
        reference = self._new(None, experts=False)
        reference.courses = courses_of(layout.schedule, ranks)
        (_,) = run_all([reference], max(1, steps), "local", 1, self.timeout)
        self._say(reference)
        return reference

    def explain(self, outcome: Outcome) -> None:
        """Find hints for a layout that is not equal: by its axes alone, and by itself with a check of states."""
        first = outcome.verdict.first if outcome.verdict is not None else None
        if first is None:
            outcome.hints = [Hint("states", outcome.state_error)] if outcome.state_error else []
            return
        parts, experts = outcome.layout.parts(), self.adds_experts(outcome.layout)
        alone = [(o.layout, o.word) for o in self.outcomes(parts, "local", experts)]
        error = outcome.state_error or self._state_error(outcome.layout, experts)
        outcome.hints = hints(first, outcome.layout, alone, error)

    def _state_error(self, layout: Layout, experts: bool) -> str:
        """What a check of states says of a layout, as threads; empty if nothing."""
        run = self._new(layout, experts)
        run.states = True
        (_,) = run_all([run], self.steps, "local", 1, self.timeout)
        self._say(run)
        error = run.state_error()
        run.forget()
        return error

    def _say(self, run: Run) -> None:
        if self.echo:
            print(f"$ {' '.join(map(show, run.command))}\n{_quoted(run.output().rstrip())}", flush=True)


def _end_of(run: Run, timeout: float) -> str:
    if run.code is None:
        return f"did not end within {timeout:g} s"
    return f"ended with exit code {run.code}" if run.code >= 0 else f"was killed by signal {-run.code}"


def _quoted(text: str) -> str:
    return "\n".join(f"  | {line}".rstrip() for line in (text or "(it printed nothing)").splitlines())

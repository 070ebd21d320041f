"""Every way to die in every phase of a step: whatever one rank does, all ranks end.

    python tests/mpi/kill_matrix.py [RANKS]        all 160 cases, as a table: 96 of data parallelism, 64 of a pipeline

A case passes if within 10 s of the fault no process of the job is left, the launcher's exit code is not 0, and an
exception's traceback was printed exactly once, with its rank.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kill_script import FAULTS, PHASES, PIPELINE_PHASES
from mpi_launch import Launch, find_mpirun, vendor

LIMIT = 10.0
SCRIPT = str(Path(__file__).with_name("kill_script.py"))
PIPELINE = ("--pp", "2", "--microbatches", "2")
"""Flags of a pipeline of two stages, with the ranks that are left for data parallelism."""
RAISING = {"raise": "RuntimeError: one rank comes to grief", "MemoryError": "Unable to allocate"}


@dataclass
class Outcome:
    """A case and what became of it; `trouble` is empty if it passed."""

    code: int | None
    seconds: float
    trouble: str
    output: str


def cases(ranks: int) -> list[tuple[str, str, int]]:
    """All (how, phase, rank)."""
    return [(how, phase, rank) for how in FAULTS for phase in PHASES for rank in (0, ranks - 1)]


def few_cases(ranks: int) -> list[tuple[str, str, int]]:
    """Twelve of them: every way to die, every phase twice, both ranks equally often."""
    hows, phases, ends = list(FAULTS), list(PHASES), (0, ranks - 1)
    return [(hows[i % 8], phases[(i + i // 6) % 6], ends[i // 6 % 2 ^ i % 2]) for i in range(12)]


def pipeline_cases(ranks: int) -> list[tuple[str, str, int]]:
    """All (how, phase, rank) with the flags of `PIPELINE`, on the first stage and on the last."""
    return [(how, phase, rank) for how in FAULTS for phase in PIPELINE_PHASES for rank in (0, ranks - 1)]


def few_pipeline_cases(ranks: int) -> list[tuple[str, str, int]]:
    """One for every phase, on either stage twice."""
    return [
        ("SIGKILL", "forward", 0),
        ("raise", "receive", ranks - 1),
        ("SIGKILL", "backward", ranks - 1),
        ("raise", "step", 0),
    ]


def run_case(how: str, phase: str, rank: int, ranks: int, folder: Path, flags: tuple[str, ...] = ()) -> Outcome:
    """Run one case."""
    folder = Path(tempfile.mkdtemp(dir=folder))  # the run's
    mark = folder / "mark"
    with Launch(ranks, sys.executable, SCRIPT, how, phase, str(rank), str(mark), *flags, timeout=45) as job:
        run = job.wait(grace=LIMIT)
        ended = time.time()
    if not mark.exists():
        return Outcome(run.code, run.seconds, "the fault was never reached", run.output)
    seconds = ended - float(mark.read_text())
    trouble = []
    if run.code is None:
        trouble.append("hangs")
    if run.code == 0:
        trouble.append("exit code 0")
    if seconds > LIMIT or run.left_behind:
        trouble.append(f"{len(run.left_behind)} processes left after {seconds:.1f} s")
    printed, wanted = run.output.count("Traceback (most recent call last)"), how in RAISING
    if printed != wanted:
        trouble.append(f"{printed} tracebacks")
    if wanted and (f"[rank {rank}] Traceback" not in run.output or RAISING[how] not in run.output):
        trouble.append("its traceback is missing")
    return Outcome(run.code, seconds, ", ".join(trouble), run.output)


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    mpirun = find_mpirun()
    if mpirun is None:
        sys.exit("no mpirun beside this python nor on PATH")
    failed, worst = 0, 0.0
    all_ = [((), case) for case in cases(ranks)] + [(PIPELINE, case) for case in pipeline_cases(ranks)]
    print(f"{len(all_)} cases at {ranks} ranks, {vendor(mpirun)}\n")
    print(f"{'layout':8}{'how':18}{'phase':12}{'rank':6}{'code':6}{'seconds':9}")
    with tempfile.TemporaryDirectory() as folder:
        for flags, (how, phase, rank) in all_:
            outcome = run_case(how, phase, rank, ranks, Path(folder), flags)
            print(
                f"{'pp' if flags else 'dp':8}{how:18}{phase:12}{rank:<6}{outcome.code!s:6}{outcome.seconds:<9.1f}"
                f"{outcome.trouble or 'ok'}",
                flush=True,
            )
            if outcome.trouble:
                failed += 1
                print(outcome.output)
            worst = max(worst, outcome.seconds)
    print(f"\n{len(all_) - failed} passed, {failed} failed; the slowest was gone {worst:.1f} s after its fault")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

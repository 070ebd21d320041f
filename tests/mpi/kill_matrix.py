"""Every way to die in every phase of a run: whatever one rank does, all ranks end, and nothing is spoilt.

    python tests/mpi/kill_matrix.py                            all 324 cases: 9 ways x 12 phases x 3 ranks, as a table
    python tests/mpi/kill_matrix.py -j 2 --part 1/4            two at a time, the first quarter
    python tests/mpi/kill_matrix.py --how SIGKILL --phase save --rank 3

Four ranks are two pipelines of two stages, so that all phases exist.  A case passes if

    within 10 s of the fault no process of the job is left, and the launcher's exit code is not 0;
    an exception's traceback was printed exactly once, headed with its rank and, once there is one, its step;
    nothing is left in shared memory and in the folder for temporary files but what the launcher itself leaves there;
    the run's folder holds what a run holds, perhaps one unfinished checkpoint (`checkpoints/.tmp-step-*`), and every
    checkpoint that has a name can be read.

One case is none: sys.exit(0) at the very end.  While mpitrain is imported there is no guard yet: there Python's own
traceback is expected, and the others end when the time to start (8 s) is over, which begins as they arrive.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kill_script import ARRIVED
from mpi_launch import Launch, find_mpirun, launch, vendor

from mpitrain import faults
from mpitrain.checkpoint.tools.verifying import verify

RANKS = 4
LIMIT = 10.0
START_LIMIT = 8
SCRIPT = str(Path(__file__).with_name("kill_script.py"))
LAYOUT = ("--pp", "2", "--microbatches", "2")

HOWS = {  # as the table names it -> as the injector does
    "raise": "raise",
    "sys.exit(0)": "exit code=0",
    "sys.exit(3)": "exit code=3",
    "os._exit": "_exit code=5",
    "SIGKILL": "kill",
    "SIGSEGV": "segv",
    "SIGTERM": "term",
    "MemoryError": "memory",
    "KeyboardInterrupt": "interrupt",
}
RAISED = {"raise": "InjectedFault", "MemoryError": "MemoryError", "KeyboardInterrupt": "KeyboardInterrupt"}
"""Ways that leave a traceback, and what its last line begins with."""

PHASES = {  # which event is the first of a phase; steps are of the run, whose second one is hit
    "import": "at=action:import",
    "init": "at=message n=1",
    "data": "at=action:LOAD step=2",
    "forward": "at=action:F step=2",
    "send": "at=action:SEND step=2",
    "recv": "at=action:RECV step=2",
    "backward": "at=action:B step=2",
    "all-reduce": "at=message:all_reduce in=REDUCE step=2",
    "step": "at=action:STEP step=2",
    "save": "at=disk:write step=2",
    "load": "at=disk:read",
    "finalise": "at=action:finalise",
}
OF_A_JOB = ("mpitrain-board-", "mpitrain-start-", "mpich_shm_")  # names in shared memory
BEFORE_STEPS = ("import", "init", "load")
NORMAL_END = ("sys.exit(0)", "finalise")
OF_A_RUN = re.compile(
    r"config\.toml|metrics\.jsonl|loss\.svg|\.lock|board/.*|\.faults-done/[^/]+"
    r"|checkpoints/(\.tmp-)?step-[0-9]{8}/(manifest\.json|rank-[0-9]{5}\.h5)"
)
"""Files that a run's folder may hold, with its one folder of unfinished ones."""

Case = tuple[str, str, int]


@dataclass
class Outcome:
    """A case and what became of it; `trouble` is empty if it passed."""

    code: int | None
    seconds: float
    trouble: str
    output: str


def cases() -> list[Case]:
    """All (how, phase, rank): the first rank, one in the middle, the last."""
    return [(how, phase, rank) for phase in PHASES for how in HOWS for rank in (0, RANKS // 2 - 1, RANKS - 1)]


def few_cases() -> list[Case]:
    """Twelve of them: every phase once, every way to die, all three ranks equally often."""
    hows, ranks = list(HOWS), (0, RANKS // 2 - 1, RANKS - 1)
    return [(hows[(2 + 5 * i) % 9], phase, ranks[i % 3]) for i, phase in enumerate(PHASES)]


def start_from(folder: Path) -> Path:
    """A run with a checkpoint, for those that die as they load it."""
    run = folder / "base"
    launch(RANKS, sys.executable, SCRIPT, str(run), *LAYOUT, "--stop-after", "1", timeout=60).check()
    return run


def run_case(how: str, phase: str, rank: int, folder: Path, base: Path | None = None) -> Outcome:
    """Run one case in a new folder inside `folder`; `base`: what `start_from` made, for the phase of loading."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    flags = list(LAYOUT)
    if phase == "load":
        shutil.copytree(base or start_from(run.parent), run)
        flags += ["--resume", "latest"]
    where = f"rank={rank} {PHASES[phase]}"
    word, *keys = HOWS[how].split()
    # The others wait already when it strikes.
    text = f"slow {where} seconds=0.2; {word} {where} {' '.join(keys)}"
    env = {faults.VARIABLE: text}
    if phase == "import":
        env["MPITRAIN_START_TIMEOUT"] = str(START_LIMIT)
    before = _shared()
    with Launch(RANKS, sys.executable, SCRIPT, str(run), *flags, timeout=45, env=env) as job:
        ended = job.wait(grace=LIMIT)
        gone = time.time()
        left = job.left_files()
    output = ended.output
    note = next((note for note in (run / faults.DONE).glob("001-*")), None)
    if note is None:
        return Outcome(ended.code, ended.seconds, "the fault was never reached", output)
    seconds = gone - max(path.stat().st_mtime for path in (note, run.with_name(ARRIVED)) if path.exists())
    trouble = list(_ends(how, phase, rank, output))
    if ended.code is None:
        trouble.append("hangs")
    if (ended.code == 0) != ((how, phase) == NORMAL_END):
        trouble.append(f"exit code {ended.code}")
    if seconds > LIMIT or ended.left_behind:
        trouble.append(f"{len(ended.left_behind)} processes left after {seconds:.1f} s")
    trouble += [f"left in shared memory: {name}" for name in sorted(_shared(before))]
    trouble += [f"left in the folder for temporary files: {name}" for name in left]
    trouble += _spoilt(run)
    shutil.rmtree(run.parent, ignore_errors=True)
    return Outcome(ended.code, seconds, ", ".join(trouble), output)


def _ends(how: str, phase: str, rank: int, output: str) -> Iterator[str]:
    """What is wrong with what was said."""
    printed, wanted = output.count("Traceback (most recent call last)"), how in RAISED
    if printed != wanted:
        yield f"{printed} tracebacks"
    if not wanted:
        return
    step = "" if phase in BEFORE_STEPS else f", step {3 if phase == 'finalise' else 2}"
    head = "" if phase == "import" else f"[rank {rank}{step}] "
    if f"{head}Traceback" not in output or not re.search(rf"^([a-z_.]+\.)?{RAISED[how]}\b", output, re.MULTILINE):
        yield "its traceback is missing"


def _spoilt(run: Path) -> Iterator[str]:
    """What a run's folder holds that it should not, or that cannot be read."""
    for path in run.rglob("*"):
        name = path.relative_to(run).as_posix()
        if not path.is_dir() and not OF_A_RUN.fullmatch(name):
            yield f"left in the run's folder: {name}"
    unfinished = list((run / "checkpoints").glob(".tmp-step-*"))
    if len(unfinished) > 1:
        yield f"{len(unfinished)} unfinished checkpoints"
    for folder in (run / "checkpoints").glob("step-*"):
        verdict = verify(folder)
        if not verdict.whole or verdict.strangers:
            yield f"{folder.name} is damaged: {[*verdict.damages, *verdict.strangers][0]}"


def _shared(before: set[str] | None = None) -> set[str]:
    """What has a name in shared memory, of any job; what is new since `before` gets two seconds to lose it.

    Jobs that start just now, of which there may be others on this machine, have names there for a moment.
    """
    deadline = time.monotonic() + 2.0
    while True:
        found = {name for name in os.listdir("/dev/shm") if name.startswith(OF_A_JOB)}
        if before is None or not found - before or time.monotonic() > deadline:
            return found - (before or set())
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-j", type=int, default=1, metavar="N", help="cases that run at the same time")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th case, from the K-th on")
    parser.add_argument("--how", choices=HOWS)
    parser.add_argument("--phase", choices=PHASES)
    parser.add_argument("--rank", type=int)
    asked = parser.parse_args()
    mpirun = find_mpirun()
    if mpirun is None:
        sys.exit("no mpirun beside this python nor on PATH")
    part, parts = map(int, asked.part.split("/"))
    chosen = [
        case
        for case in cases()
        if asked.how in (None, case[0]) and asked.phase in (None, case[1]) and asked.rank in (None, case[2])
    ][part - 1 :: parts]
    print(f"{len(chosen)} cases at {RANKS} ranks, {vendor(mpirun)}\n")
    print(f"{'phase':12}{'how':19}{'rank':6}{'code':6}{'seconds':9}")
    lock, outcomes = threading.Lock(), []

    def one(case: Case) -> None:
        how, phase, rank = case
        outcome = run_case(how, phase, rank, folder, base)
        with lock:
            outcomes.append(outcome)
            said = f"{phase:12}{how:19}{rank:<6}{outcome.code!s:6}{outcome.seconds:<9.1f}{outcome.trouble or 'ok'}"
            print(said if not outcome.trouble else f"{said}\n{outcome.output}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = start_from(folder) if any(phase == "load" for _, phase, _ in chosen) else None
        with ThreadPoolExecutor(asked.j) as pool:
            list(pool.map(one, chosen))
    failed = sum(bool(outcome.trouble) for outcome in outcomes)
    worst = max(outcome.seconds for outcome in outcomes)
    print(f"\n{len(chosen) - failed} passed, {failed} failed; the slowest was gone {worst:.1f} s after its fault")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

"""Strike a training at points of its saves, under MPI: what Local tries at every point, here at forty.

    PYTHONPATH=.:tests python tests/mpi/kill_saves.py       40 kills, 12 refusals of a disk, 2 of long files: a table

One rank is killed with SIGKILL; all processes must be gone within 10 s, and a complete checkpoint of the undisturbed
run must load, bit for bit, not older than before.  Or a disk operation of one rank is refused; then all ranks must end
with one message of at most five lines and exit code 2, or go on, within 10 s, and the checkpoints of before must load.
Either way the run, started again, comes to the same end.

Exit code: 0 if all of that holds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from crash.child import in_child
from crash.training import RANKS, SCENES, Reference, Scene
from mpi_launch import Launch, find_mpirun, launch, vendor

from mpitrain import blas

LIMIT = 10.0
SCRIPT = str(Path(__file__).with_name("save_script.py"))
CODES = ("ENOSPC", "EIO", "EDQUOT", "EACCES", "EROFS", "ESTALE")
KILLS, REFUSALS = 40, 12


@dataclass(frozen=True)
class Case:
    """Where a training is struck, and how; as save_script.py has it."""

    scene: Scene
    how: str
    rank: int
    number: int


@dataclass
class Outcome:
    """What became of a case; `trouble` is empty if it passed."""

    code: int | None
    seconds: float
    newest: int | None
    trouble: str
    output: str


def count(reference: Reference, scene: Scene) -> list[tuple[int, int]]:
    """Of each rank, the number of its points, and how many of them are disk operations."""
    with tempfile.TemporaryDirectory(dir=reference.folder) as folder:
        run, mark = Path(folder) / "run", Path(folder) / "mark"
        flags = reference.command(run, *reference.prepare(scene, run))
        launch(RANKS, sys.executable, SCRIPT, "count", "0", "0", str(mark), *flags, env=same_blas()).check()
        found = (Path(f"{mark}.{rank}").read_text().split() for rank in range(RANKS))
        return [(int(points), int(disk)) for points, disk in found]


def same_blas() -> dict[str, str]:
    """What makes ranks multiply matrices with the code that this process has loaded, as the reference did."""
    return {blas.VARIABLE: blas.library().split()[-1]}


def cases(reference: Reference) -> list[Case]:
    """All of them, over scenes, ranks and points; rank 0's last operations publish, so it has more."""
    found: list[Case] = []
    # Where a run goes back to save over a later step, the trainer gives the old checkpoint another name.
    scenes = [scene for scene in SCENES.values() if scene.resume != "elsewhere"]
    counts = {scene.name: count(reference, scene) for scene in scenes}
    for index in range(KILLS):
        scene, rank = scenes[index % len(scenes)], (0, 1, 0, 2, 0, 3)[index // len(scenes) % 6]
        points = counts[scene.name][rank][0]
        sure = points * 4 // 5 if "--async-save" in scene.flags else points  # how they mix differs from run to run
        back = sure - 1 - (index // len(scenes)) * 3 if rank == 0 else (index * 37) % sure
        found.append(Case(scene, "kill", rank, back % points + 1))
    for index in range(REFUSALS):
        scene, rank = scenes[index % len(scenes)], (0, 1, 0, 2, 0, 3)[index // len(scenes) % 6]
        operations = counts[scene.name][rank][1]  # their number does not change
        back = operations - 1 - 3 * index if rank == 0 else (index * 37) % operations
        found.append(Case(scene, CODES[index % len(CODES)], rank, back % operations + 1))
    return found


def run_case(reference: Reference, case: Case) -> Outcome:
    """Run one case."""
    with tempfile.TemporaryDirectory(dir=reference.folder) as folder:
        run, mark = Path(folder) / "run", Path(folder) / "mark"
        flags = reference.command(run, *reference.prepare(case.scene, run))
        command = [sys.executable, SCRIPT, case.how, str(case.rank), str(case.number), str(mark), *flags]
        if case.how == "limit":
            _lengthen(run / "metrics.jsonl", case.number - 40)
        with Launch(RANKS, *command, timeout=60, env=same_blas()) as job:
            ended = job.wait(grace=LIMIT)
            now = time.time()
        seconds = now - float(mark.read_text()) if mark.exists() else 0.0
        trouble = [] if mark.exists() or case.how == "limit" else ["the point was never reached"]
        if seconds > LIMIT or ended.left_behind or ended.code is None:
            trouble.append(f"{len(ended.left_behind)} processes left after {seconds:.1f} s")
        if case.how == "kill" and ended.code == 0:
            trouble.append("exit code 0")
        if case.how != "kill":
            trouble += refusal(ended.code, ended.output)
        verdict = reference.judge(run, case.scene, case.scene.stop if ended.code == 0 else None)
        if verdict.lost or verdict.damaged:
            trouble.append(str(verdict))
        went_on = in_child(lambda: reference.go_on(run, case.scene))
        if went_on.code != 0:
            trouble.append(f"it did not go on: {went_on.last_words}")
        return Outcome(ended.code, seconds, verdict.step, ", ".join(trouble), ended.output)


def refusal(code: int | None, output: str) -> list[str]:
    """What is wrong with how a training ended whose disk was refused."""
    if code == 0:
        return []
    trouble = [] if code == 2 else [f"exit code {code}"]
    lines = output.splitlines()
    first = [index for index, line in enumerate(lines) if "Error: " in line]
    if len(first) != 1 or "Traceback" in output:
        trouble.append(f"{len(first)} messages, {output.count('Traceback')} tracebacks")
    return trouble


def _lengthen(metrics: Path, size: int) -> None:
    """Give a file of metrics so many bytes, by a longer first line."""
    first, rest = metrics.read_text().split("\n", 1)
    metrics.write_text(f"{first}{' ' * (size - len(first) - 1 - len(rest))}\n{rest}")


def main() -> None:
    mpirun = find_mpirun()
    if mpirun is None:
        sys.exit("no mpirun beside this python nor on PATH")
    failed, worst = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        reference = Reference(Path(folder))
        all_ = cases(reference)
        all_ += [Case(SCENES[name], "limit", 0, 8000) for name in ("a save beside others", "saves in the background")]
        print(f"{len(all_)} cases at {RANKS} ranks, {vendor(mpirun)}\n")
        print(f"{'scene':34}{'how':8}{'rank':>5}{'point':>7}{'code':>6}{'seconds':>9}{'newest':>8}")
        for case in all_:
            outcome = run_case(reference, case)
            print(
                f"{case.scene.name:34}{case.how:8}{case.rank:5}{case.number:7}{outcome.code!s:>6}{outcome.seconds:9.1f}"
                f"{outcome.newest!s:>8}  {outcome.trouble or 'ok'}",
                flush=True,
            )
            if outcome.trouble:
                failed += 1
                print(outcome.output)
            worst = max(worst, outcome.seconds)
    print(f"\n{len(all_) - failed} passed, {failed} failed; the slowest was gone {worst:.1f} s after it was struck")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

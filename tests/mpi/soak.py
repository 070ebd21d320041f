"""A long training: what a rank holds must not grow.

    PYTHONPATH=. python tests/mpi/soak.py                        10,000 steps on 8 ranks, saving in the background
    PYTHONPATH=. python tests/mpi/soak.py 4000 4 --tp 2 --zero 1

Every second the resident memory and the open files of each rank are read.  From step 2,000 on, when buffers, pools and
the allocator's arenas have had their turn, memory may grow by 1 % and the number of open files not at all (a save
that is under way has one more, so the least of some seconds counts).  At the end no file may be left in the folders for
temporary files and shared memory, and no unfinished checkpoint in the run's.

Messages need no look of their own: tags stand for places in the code, none is counted up.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from mpi_launch import ROOT, Launch

MODEL = "--model gpt-tiny --layers 2 --width 16 --heads 2 --seq-len 8 --batch 8 --dropout 0.1 --sample-length 0".split()
GROWTH = 0.01
SETTLED = 2000  # steps
AROUND = 10  # readings whose least counts


def look(pid: int) -> tuple[int, int]:
    """Resident bytes of a process that are its own, and its open files."""
    resident, shared = (int(word) for word in Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))


def steps_in(run: Path) -> int:
    """Steps that the run has done."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(run / "metrics.jsonl", "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
        return int(json.loads(file.read().splitlines()[-1])["step"])
    return 0


def main(steps: int, ranks: int, flags: list[str]) -> int:
    """The run, and what became of its ranks; the number of things that are wrong."""
    readings: list[tuple[int, dict[int, tuple[int, int]]]] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        saving = ["--save-every", str(max(1, steps // 20)), "--async-save", "--keep", "2", "--eval-every", "0"]
        command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *MODEL, *saving]
        command += ["--steps", str(steps), "--run", str(run), "--data", str(ROOT / "README.md"), *flags]
        with Launch(ranks, *command, timeout=3600) as job:
            pids: list[int] = []
            while job.process.poll() is None:
                time.sleep(1.0)
                done = steps_in(run)
                pids = pids if len(pids) == ranks else job.ranks()
                with contextlib.suppress(OSError, ValueError):  # a rank has just ended
                    readings.append((done, {pid: look(pid) for pid in pids}))
            ended = job.wait()
            wrong = [f"exit code {ended.code}:\n{ended.output[-2000:]}"] if ended.code else []
            wrong += [f"left over: {name}" for name in job.left_files()]
        kept = sorted(path.name for path in (run / "checkpoints").iterdir())
        wrong += [f"left over: {name}" for name in kept if not name.startswith("step-")]
        if len(kept) != 2:
            wrong.append(f"{len(kept)} checkpoints are kept")
    settled = [found for done, found in readings if done >= SETTLED and len(found) == ranks]
    print(f"{steps} steps on {ranks} ranks, {len(settled)} readings, {ended.seconds:.0f} s")
    if len(settled) < 2 * AROUND:
        wrong.append("too few readings: more steps are needed")
    for pid in settled[0] if not wrong else ():
        (before, files), (after, files_after) = (
            tuple(min(found[pid][of] for found in some) for of in (0, 1))
            for some in (settled[:AROUND], settled[-AROUND - 1 : -1])
        )
        grown = after / before - 1
        print(f"  {before / 2**20:7.1f} MiB -> {after / 2**20:7.1f} MiB  {grown:+.2%}   files {files} -> {files_after}")
        if grown > GROWTH:
            wrong.append(f"a rank grew by {grown:.2%}")
        if files_after > files:
            wrong.append(f"a rank has {files_after} open files, had {files}")
    print(*wrong or ["nothing grew, nothing is left over"], sep="\n")
    return len(wrong)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3] if word.isdigit()]
    total, size = [*numbers, *(10_000, 8)[len(numbers) :]]
    sys.exit(main(total, size, sys.argv[1 + len(numbers) :]) > 0)

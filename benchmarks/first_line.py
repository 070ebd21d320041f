"""From the command to the first line with a loss: what a person waits for.

    python benchmarks/first_line.py --rounds 5

Both sides train the default model on the same text with 8 ranks, one step a line; files are in the page cache, since a
round that does not count comes first.  The clock runs from the launch of the command to the line.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
from processes import children_cpu

ROOT = Path(__file__).resolve().parents[1]
RANKS = 8
FLAGS = "--steps 2 --log-every 1 --eval-every 0"
LINE = re.compile(r"^step\s+1\b.*\bloss\b")


def commands(run: str) -> dict[str, list[str]]:
    """What a person types: `run_mpi.sh` where this Python is its environment's, else this environment's mpirun."""
    here = Path(sys.prefix)
    start = [str(ROOT / "run_mpi.sh")] if here.parent == ROOT else [machine.mpirun()]
    python = [] if here.parent == ROOT else [sys.executable]
    flags = FLAGS.split()
    script, twin = str(ROOT / "examples/train_gpt.py"), str(Path(__file__).with_name("twin.py"))
    return {
        "mpitrain": [*start, "-n", str(RANKS), *python, script, *flags, "--sample-length", "0", "--run", run],
        "torch": [sys.executable, twin, "--ranks", str(RANKS), *flags],
    }


def seconds_to_first_line(command: list[str]) -> float:
    """Run a command to its end; seconds from its start to its first line with a loss.

    Raises:
        SystemExit: it fails, or prints no such line.
    """
    environment = machine.rank_environment(RANKS, tuned_malloc=False)
    start, found = time.perf_counter(), None
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found is None and LINE.search(line):
                found = time.perf_counter() - start
    if process.returncode or found is None:
        raise SystemExit(f"{shlex.join(command)}\nended with exit code {process.returncode}, first line: {found}")
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Seconds: side -> one a round; the first round, which warms the caches, is left out."""
    seconds: dict[str, list[float]] = {"mpitrain": [], "torch": []}
    typed: dict[str, str] = {}
    load, before = machine.Load(), children_cpu()
    for number in range(rounds + 1):
        for side in list(seconds) if number % 2 == 0 else list(reversed(seconds)):
            with tempfile.TemporaryDirectory(prefix="mpitrain-bench-") as folder:
                command = commands(f"{folder}/run")[side]
                taken = seconds_to_first_line(command)
            typed[side] = shlex.join(Path(part).name if part.startswith("/") else part for part in command)
            if number:
                seconds[side].append(taken)
    return {"seconds": seconds, "commands": typed, "load": [load.report(own=children_cpu() - before)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(json.dumps(measure(options.rounds)))


if __name__ == "__main__":
    main()

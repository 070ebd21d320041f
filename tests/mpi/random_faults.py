"""Random faults and restarts: a training that was broken off ends as one that was not, bit for bit.

    python tests/mpi/random_faults.py                    200 trainings of 50 steps, seeds 0 ... 199, as a table
    python tests/mpi/random_faults.py --seeds 40-59 -j 2
    python tests/mpi/random_faults.py --seeds 7 --keep runs/look

Each seed draws one to three faults (`--faults "random seed=..."`) for one of the layouts and features in FEATURES.
Whoever is hit starts again with `--resume auto`, until the training is done.  It passes if

    it needs at most one start more than there are faults;
    every step stands once in metrics.jsonl, with the numbers of the training without faults, to the last digit;
    the last checkpoint holds the same bits: weights, moments, scales, counters;
    no start loses more steps than lie between two saves (with saves in the background: than a save takes, besides);
    every checkpoint that is left is whole.

Nine of ten run as threads of a forked process, of which there are hundreds in a few minutes; the tenth as processes
under mpirun, by `run_mpi.sh --restarts`.  In one process a rank that is stopped stops all, so there the part of
--timeout is played by whoever waits for the process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from mpi_launch import ROOT, find_mpirun
from this_python import shell_of_this_python

import mpitrain.train  # noqa: F401  (loaded here, and not by each of the forked processes)
from mpitrain import faults
from mpitrain.checkpoint.tools.comparing import compare
from mpitrain.checkpoint.tools.source import Source
from mpitrain.checkpoint.tools.verifying import verify
from mpitrain.comm.local import run_script

SCRIPT = str(ROOT / "examples" / "train_gpt.py")
STEPS, SAVE_EVERY = 50, 5  # the steps unless told otherwise
PATIENCE = 60.0  # seconds that a start may take
STOPPED_FOR = 0.2  # seconds until a stopped process is given up
WORDS = "kill,raise,exit,_exit,segv,memory,slow,stop,io"
OF_MPI = "kill,raise,exit,_exit,segv,memory,slow,stop"  # after an error of the disk run_mpi.sh does not start again

SMALL = "--layers 2 --width 16 --heads 2 --seq-len 16 --batch 4 --sample-length 0 --eval-every 20 --deterministic"
FEATURES: dict[str, tuple[int, str]] = {  # name -> ranks, flags
    "dp2": (2, "--dropout 0.1"),
    "dp2 zero1": (2, "--zero 1"),
    "dp2 float16": (2, "--dtype float16 --loss-scale-window 8"),
    "dp2 async": (2, "--async-save"),
    "dp2 offload": (2, "--offload optimizer"),
    "pp2": (2, "--pp 2 --microbatches 2"),
    "tp2": (2, "--tp 2 --sequence-parallel --dropout 0.1"),
    "dp2 ep2": (2, "--ep 2 --experts 4 --top-k 2"),
    "cp2": (2, "--cp 2 --optimizer adafactor"),
    "pp2 dp2 zero1 async": (4, "--pp 2 --microbatches 2 --zero 1 --async-save"),
    "dp2 zero3 bfloat16": (2, "--zero 3 --dtype bfloat16"),
    "dp2 powersgd": (2, "--reducer powersgd --powersgd-rank 2 --powersgd-start 10"),
    "pp2 2bw": (2, "--pp 2 --microbatches 2 --schedule pipedream-2bw"),
}


class Part(NamedTuple):
    """One seed's training: what it is, and how it is hit."""

    seed: int
    feature: str
    ranks: int
    flags: list[str]
    text: str
    is_mpi: bool
    steps: int

    @property
    def num_faults(self) -> int:
        return len(faults.plan(self.text, self.ranks))


def part_of(seed: int, steps: int = STEPS) -> Part:
    """Every fourth seed counts events from the start of the process, so that starts and loads are hit, too."""
    feature = list(FEATURES)[seed % len(FEATURES)]
    ranks, flags = FEATURES[feature]
    is_mpi = seed % 10 == 9
    where = "within=150" if seed % 4 == 3 else f"steps={steps} within=30"
    words = OF_MPI if is_mpi else WORDS
    text = f"random seed={seed} faults={1 + seed // 2 % 3} of={words} {where} seconds=0.05"
    more = ["--steps", str(steps), "--save-every", str(SAVE_EVERY), "--keep", "3", "--data", __file__]
    return Part(seed, feature, ranks, [*SMALL.split(), *flags.split(), *more], text, is_mpi, steps)


@dataclass
class Outcome:
    """What became of a training; `trouble` is empty if it passed.

    starts: that it took; struck: faults that happened; lost: steps that each start made again.
    """

    starts: int = 0
    struck: int = 0
    lost: list[int] = field(default_factory=list)
    trouble: str = ""
    output: str = ""


# -- one start


def start(ranks: int, flags: list[str], log: Path) -> int:
    """Run the script on threads of a forked process; its exit code, below 0 if a signal ended it."""
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os._exit(run_script(ranks, SCRIPT, flags))
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if pid and not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
        if pid:
            deadline = time.monotonic() + STOPPED_FOR
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def newest(run: Path) -> int:
    """The step of the newest checkpoint that has a name, 0 if there is none."""
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)


def metrics(run: Path) -> list[dict[str, object]]:
    """What every step measured, without times."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in lines]


# -- one training


def run_local(part: Part, run: Path) -> Outcome:
    outcome, log = Outcome(), run.with_suffix(".log")
    while True:
        outcome.starts += 1
        flags = [*part.flags, "--run", str(run), "--resume", "auto", "--faults", part.text]
        code = start(part.ranks, flags, log)
        if code == 0 or outcome.starts > part.num_faults:
            break
        outcome.lost.append(len(metrics(run)) - newest(run))
    outcome.output = log.read_text(errors="replace")
    outcome.trouble = "" if code == 0 else f"ends with exit code {code}"
    return outcome


def run_mpi(part: Part, run: Path) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="shell-") as place:
        env = shell_of_this_python(Path(place))
        flags = [*part.flags, "--timeout", "5", "--run", str(run), "--faults", part.text]
        command = [str(ROOT / "run_mpi.sh"), "--restarts", str(part.num_faults), "-n", str(part.ranks), SCRIPT]
        done = subprocess.run(
            [*command, *flags],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PATIENCE * (1 + part.num_faults),
            check=False,
        )
    said = re.split(r"run_mpi\.sh: attempt \d+ of \d+ ended", done.stdout)
    outcome = Outcome(starts=len(said), output=done.stdout)
    for before, after in pairwise(said):
        reached = [int(step) for step in re.findall(rf"^step +(\d+)/{part.steps} ", before, re.MULTILINE)]
        back = re.search(r"^go on after step (\d+) ", after, re.MULTILINE)  # who found no checkpoint does not say it
        outcome.lost.append(max([0, *reached]) - (int(back[1]) if back else 0))
    outcome.trouble = "" if done.returncode == 0 else f"ends with exit code {done.returncode}"
    return outcome


def judge(part: Part, run: Path, reference: Path, outcome: Outcome) -> None:
    """Compare with the training without faults."""
    outcome.struck = len(list((run / faults.DONE).glob("*")))
    if outcome.trouble:
        return
    trouble = []
    if metrics(run) != metrics(reference):
        trouble.append("metrics.jsonl differs")
    pair = [Source.of(str(of / "checkpoints" / f"step-{part.steps:08}")) for of in (run, reference)]
    found = compare(*pair)
    if found.differing() or found.only_a or found.only_b or found.shapes:
        trouble.append(f"weights or states differ: {[each.name for each in found.differing()][:3]}")
    if counts := [other.name for other in found.others if not other.name.startswith("config.")]:
        trouble.append(f"counters differ: {counts[:3]}")
    for folder in (run / "checkpoints").glob("step-*"):
        if not verify(folder).whole:
            trouble.append(f"{folder.name} is damaged")
    bound = SAVE_EVERY if "--async-save" not in part.flags else 2 * SAVE_EVERY
    if max(outcome.lost, default=0) > bound:
        trouble.append(f"{max(outcome.lost)} steps lost")
    outcome.trouble = ", ".join(trouble)


def run_one(job: tuple[Part, Path]) -> tuple[Part, Outcome]:
    part, folder = job
    run = folder / f"seed-{part.seed:03}"
    try:
        outcome = (run_mpi if part.is_mpi else run_local)(part, run)
        judge(part, run, folder / part.feature.replace(" ", "-"), outcome)
    except Exception as error:  # of this seed: the others go on
        outcome = Outcome(trouble=f"{type(error).__name__}: {error}")
    return part, outcome


def train_without_faults(job: tuple[Part, Path]) -> None:
    """The run that trainings like this one are compared with."""
    part, folder = job
    run = folder / part.feature.replace(" ", "-")
    code = start(part.ranks, [*part.flags, "--run", str(run)], run.with_suffix(".log"))
    assert code == 0, run.with_suffix(".log").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-199", metavar="A-B")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="of each training")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="trainings at the same time")
    parser.add_argument("--keep", metavar="DIR", help="leave the runs there, to look at")
    asked = parser.parse_args()
    if asked.steps % SAVE_EVERY or asked.steps < SAVE_EVERY:
        parser.error(f"--steps {asked.steps}: must be a multiple of {SAVE_EVERY}, so that the last one is saved")
    first, _, last = asked.seeds.partition("-")
    parts = [part_of(seed, asked.steps) for seed in range(int(first), int(last or first) + 1)]
    if find_mpirun() is None and any(part.is_mpi for part in parts):
        sys.exit("no mpirun beside this python nor on PATH")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(asked.keep or name)
        folder.mkdir(parents=True, exist_ok=True)
        with multiprocessing.get_context("fork").Pool(asked.j) as pool:
            different = {part.feature: part for part in parts}.values()
            pool.map(train_without_faults, [(part, folder) for part in different], chunksize=1)
            print(f"{'seed':6}{'feature':22}{'ranks':9}{'faults':8}{'starts':8}lost")
            outcomes = []
            for part, outcome in pool.imap(run_one, [(part, folder) for part in parts]):
                outcomes.append((part, outcome))
                ranks = f"{part.ranks} {'mpi' if part.is_mpi else 'local'}"
                struck = f"{outcome.struck}/{part.num_faults}"
                lost = " ".join(map(str, outcome.lost)) or "-"
                print(f"{part.seed:<6}{part.feature:22}{ranks:9}{struck:8}{outcome.starts:<8}{lost:12}", end="")
                print(outcome.trouble or "ok", flush=True)
                if outcome.trouble:
                    print(f'--faults "{part.text}"\n{outcome.output}', flush=True)
    failed = sum(bool(outcome.trouble) for _, outcome in outcomes)
    struck = sum(outcome.struck for _, outcome in outcomes)
    drawn = sum(part.num_faults for part, _ in outcomes)
    worst = max((steps for _, outcome in outcomes for steps in outcome.lost), default=0)
    print(f"\n{len(outcomes) - failed} passed, {failed} failed; {struck} of {drawn} faults struck,", end=" ")
    print(f"{sum(outcome.starts for _, outcome in outcomes)} starts, at most {worst} steps lost at once,", end=" ")
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

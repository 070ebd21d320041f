"""What asynchronous schemes do to learning: late gradients and workers that learn apart, at equal samples.

    python benchmarks/asynchronous.py                     every run: about ten minutes of one idle core
    python benchmarks/asynchronous.py --only "adamw, K=3, seed 1"
    python benchmarks/asynchronous.py --missing           what the result file lacks
    python benchmarks/asynchronous.py --show              measure nothing, print what is kept
    python benchmarks/asynchronous.py --write-docs        figures and plots of docs/explanation/asynchronous.md

A run is `examples/train_gpt.py` on the default text; all have the same batches, steps and first weights of their seed.
Gradients that all come equally late are the same run on every layout, so one rank computes them; where workers differ
there are four, threads of one process, each with a fourth of the batch.  Besides, the largest rate at which descent
into a bowl converges is searched for, with the same reducer.

Nothing here is a time: runs may share the machine with others.  What is measured is kept in
benchmarks/results/asynchronous.json, each run in place of an older one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asynchronous_page as page
import machine
import numpy as np

from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.errors import NumericsError
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import Sgd
from mpitrain.parallel.stale import Stale
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

ROOT = Path(__file__).resolve().parents[1]
RESULT = machine.RESULTS / "asynchronous.json"
WORKERS = 4
WINDOW = 20  # steps whose mean loss is a point of a curve
MODEL = "--model gpt-tiny --steps 500 --eval-every 0 --sample-length 0"
SEEDS = (1, 2, 3)
METHODS = {"adamw": "", "sgd": "--optimizer sgd --lr 0.3 --weight-decay 0"}
SCHEMES = {
    "synchronous": "",
    **{f"K={k}": f"--reducer stale --staleness {k}" for k in (1, 3, 7, 15)},
    "K=3, workers": "--reducer stale --staleness 3 --stale-workers",
    **{f"H={h}": f"--reducer local --local-steps {h}" for h in (4, 16, 64)},
    "H=16, moments": "--reducer local --local-steps 16 --average-moments",
}
RATES = {"momentum 0.9": ("0.01", "0.03", "0.1", "0.3", "1"), "momentum 0": ("0.1", "0.3", "1", "3", "10")}
LATE = (0, 3, 15)

RUNS = {
    **{f"adamw, H=1, seed {seed}": f"{MODEL} --reducer local --local-steps 1 --seed {seed}" for seed in SEEDS},
    **{
        f"{method}, {scheme}, seed {seed}": f"{MODEL} {METHODS[method]} {SCHEMES[scheme]} --seed {seed}"
        for method in METHODS
        for scheme in SCHEMES
        for seed in SEEDS
    },
    **{
        f"sgd, {momentum}, lr {rate}, K={k}": f"{MODEL} --optimizer sgd --weight-decay 0 --{momentum}"
        f" --lr {rate} --reducer stale --staleness {k} --seed 1"
        for momentum, rates in RATES.items()
        for rate in rates
        for k in LATE
    },
}
"""By name, the flags of a run."""

SMALL = "--steps 8 --layers 1 --width 16 --heads 2 --seq-len 16 --batch 4"
"""Flags that make a run small enough for a test of this script."""

MOMENTA = (0.0, 0.9)
DELAYS = (0, 1, 2, 3, 5, 7, 10, 15)

Result = dict[str, Any]


def ranks_of(flags: str) -> int:
    """How many ranks a run has."""
    return WORKERS if "--stale-workers" in flags or "--reducer local" in flags else 1


def run(name: str, more: Sequence[str] = ()) -> dict[str, Any]:
    """Train, and read what the run wrote of itself.

    Returns:
        command; steps; loss: means of so many training losses each; val: the validation loss at the end, None of a run
        that had to stop because a number was not finite.
    """
    flags = [*shlex.split(RUNS[name]), *more]
    ranks, script = ranks_of(RUNS[name]), str(ROOT / "examples/train_gpt.py")
    start = (
        [sys.executable, script]
        if ranks == 1
        else [sys.executable, "-m", "mpitrain", "local", "-n", str(ranks), script]
    )
    with tempfile.TemporaryDirectory(prefix="mpitrain-asynchronous-") as folder:
        done = subprocess.run(
            [*start, *flags, "--run", f"{folder}/run"],
            env=machine.rank_environment(1, tuned_malloc=False) | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = Path(folder, "run/metrics.jsonl")
        records = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    if done.returncode and "NumericsError" not in done.stdout:
        raise SystemExit(f"{done.stdout}\n{name} ended with exit code {done.returncode}; its own words stand above")
    losses = [record["loss"] for record in records]
    shown = f"mpitrain local -n {ranks} " if ranks > 1 else "python "
    return {
        "command": f"{shown}examples/train_gpt.py {shlex.join(flags)}",
        "steps": len(losses),
        "loss": [round(statistics.fmean(losses[i : i + WINDOW]), 5) for i in range(0, len(losses), WINDOW)],
        "val": None if done.returncode else records[-1]["val_loss"],
    }


# ------------------------------------------------------------------------------------------------------------- a bowl


class Bowl(Module):
    """One weight, 1 at the start; the loss is half its square."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__("bowl")
        self.weight = Parameter("bowl.weight", (1,), init=lambda *_: np.ones(1))
        self.materialize(mesh, 0, np.float64)

    def forward(self, batch: Any) -> Any:
        return (self.weight * self.weight).sum() * 0.5


class Once:
    """A batch of one target."""

    count = 1

    def split(self, parts: int) -> list[Once]:
        return [self]


def converges(delay: int, momentum: float, rate: float, steps: int) -> bool:
    """Whether the weight is smaller at the end than half-way, over as many steps as an oscillation takes."""
    mesh = Mesh(World(Alone(), "none"))
    model = Bowl(mesh)
    optimizer = Sgd(model.parameters(), lr=rate, momentum=momentum)
    rows = complete("1f1b", ranks=1, microbatches=1)
    executor = Executor(model, optimizer, mesh, rows, reducer=Stale(model.flats, mesh, delay))
    weights = []
    try:
        for _ in range(steps):
            executor.step(Once())
            weights.append(abs(float(model.weight.data[0])))
    except NumericsError:
        return False
    span = min(steps // 4, 200)
    end = max(weights[-span:])
    return end < 1e-12 or end < max(weights[steps // 2 : steps // 2 + span])


def limit(delay: int, momentum: float, steps: int = 1200, halvings: int = 12) -> float:
    """The largest rate that converges, times the bowl's curvature, which is 1."""
    low, high = 0.0, 4.0 / (1 + delay)
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if converges(delay, momentum, middle, steps) else (low, middle)
    return (low + high) / 2


def limits(steps: int = 1200, halvings: int = 12) -> dict[str, Any]:
    """Of each momentum, [delay, largest rate]."""
    found = {f"{m:g}": [[d, round(limit(d, m, steps, halvings), 5)] for d in DELAYS] for m in MOMENTA}
    return {"limits": found, "resolution": f"4 / (1 + K) / {2**halvings}"}


# --------------------------------------------------------------------------------------------------------------- files


def load(path: Path) -> Result:
    """What is kept, or nothing yet."""
    return json.loads(path.read_text()) if path.exists() else {"runs": {}, "bowl": {}}


def keep(path: Path, found: Result) -> None:
    """Replace the file at once; runs in the order of RUNS."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {**found, "runs": {name: found["runs"][name] for name in RUNS if name in found["runs"]}}
    draft = path.with_suffix(".unfinished")
    draft.write_text(page.text_of(ordered))
    draft.replace(path)


def main() -> int:
    """Measure, keep, print; the exit code is 1 if some scheme ends as low as synchronous training with some seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*RUNS, "bowl"], metavar="RUN", help="names as --show prints them")
    parser.add_argument("--missing", action="store_true", help="measure what the result file lacks")
    parser.add_argument("--small", action="store_true", help="runs of eight steps of a tiny model, to try this script")
    parser.add_argument("--result", type=Path, default=RESULT, help=f"where figures are kept (default {RESULT})")
    parser.add_argument("--show", action="store_true", help="print what is kept and measure nothing")
    parser.add_argument("--write-docs", action="store_true", help="write the page's figures and plots")
    options = parser.parse_args()
    result = load(options.result)
    if options.show or options.write_docs:
        result = result if result["runs"] else load(page.KEPT)
        print("\n".join(page.lines(result)))
        for path in page.write(result) if options.write_docs else ():
            print(f"written {path}")
        return 0
    about = machine.describe()
    print(machine.headline(about), flush=True)
    for name in options.only or [*RUNS, "bowl"]:
        if options.missing and (name in result["runs"] or (name == "bowl" and result["bowl"])):
            continue
        if name == "bowl":
            result["bowl"] = {"about": about, **(limits(60, 3) if options.small else limits())}
        else:
            result["runs"][name] = {"about": about, **run(name, shlex.split(SMALL) if options.small else [])}
            print(f"{name}: validation loss {result['runs'][name]['val']}", flush=True)
        keep(options.result, result)
    print("\n".join(page.lines(result)), f"kept in {options.result}", sep="\n")
    harmless = [name for name, gap in page.worst_gaps(result).items() if gap <= 0]
    return int(not options.small and bool(harmless))


if __name__ == "__main__":
    sys.exit(main())

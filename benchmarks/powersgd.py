"""What PowerSGD does to a training run: bytes that it saves, and the loss that it costs.

    python benchmarks/powersgd.py --jobs 2        every run: a few minutes on two idle cores
    python benchmarks/powersgd.py --only "adamw, rank 8"
    python benchmarks/powersgd.py --missing       what the result file lacks
    python benchmarks/powersgd.py --show          measure nothing, print what is kept
    python benchmarks/powersgd.py --write-docs    figures and plot of docs/explanation/powersgd.md

A run is `examples/train_gpt.py` with the default model and text, 300 steps.  Seeds, batches, steps and learning rates
are the same; runs differ in how gradients are summed.  They are made on one rank, since a compressed run is the same on
any number of data-parallel ranks.  Bytes are those that each of two ranks sends of gradients in a step, by the formula
(mpitrain.plan.traffic), with which the message ledger agrees to the byte.

Nothing here is a time: runs may share the machine with others.  What is measured is kept in
benchmarks/results/powersgd.json, each run in place of an older one.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machine
import powersgd_page

from mpitrain.assemble import compression, sizes_of
from mpitrain.config import parse
from mpitrain.plan.traffic import Step, traffic

ROOT = Path(__file__).resolve().parents[1]
RESULT = machine.RESULTS / "powersgd.json"
RANKS, VOCAB = 2, 256
WINDOW = 10  # steps of a mean of the training loss
STEPS = "--steps 300"
SEEDS = (1, 2, 3)
POWERSGD = "--reducer powersgd"
OPTIMIZERS = ("adafactor", "adamw")

RUNS = {
    **{
        f"{optimizer}, {kind}, seed {seed}": f"{STEPS} --optimizer {optimizer}{flags} --seed {seed}"
        for optimizer, seeds in (("adafactor", SEEDS), ("adamw", SEEDS[:1]))
        for seed in seeds
        for kind, flags in (("exact", ""), ("rank 4", f" {POWERSGD}"))
    },
    **{
        f"{optimizer}, {kind}": f"{STEPS} --optimizer {optimizer} {POWERSGD} {flags} --seed 1"
        for optimizer in OPTIMIZERS
        for kind, flags in (
            ("rank 1", "--powersgd-rank 1"),
            ("rank 2", "--powersgd-rank 2"),
            ("rank 8", "--powersgd-rank 8"),
            ("rank 16", "--powersgd-rank 16"),
            ("rank 4, tables too", "--powersgd-tables"),
            ("rank 4, Q fixed", "--powersgd-fixed"),
            ("rank 4, no feedback", "--no-powersgd-feedback"),
        )
    },
}
"""By name, the flags of a run."""

SMALL = "--steps 20 --layers 1 --width 16 --heads 2 --seq-len 16 --batch 4"
"""Flags that make a run small enough for a test of this script."""

Result = dict[str, Any]


def run(name: str, more: Sequence[str] = ()) -> dict[str, Any]:
    """Train, and read what the run wrote of itself.

    Returns:
        command; sent: bytes of gradients that a rank sends in a compressed step; val: the validation loss at the end;
        loss: the training loss, means of so many steps.
    """
    flags = [*shlex.split(RUNS[name]), "--eval-every", "0", "--sample-length", "0", *more]
    command = [sys.executable, str(ROOT / "examples/train_gpt.py"), *flags]
    with tempfile.TemporaryDirectory(prefix="mpitrain-powersgd-") as folder:
        done = subprocess.run(
            [*command, "--run", f"{folder}/run"],
            env=machine.rank_environment(1, tuned_malloc=False) | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        lines = Path(folder, "run/metrics.jsonl")
        records = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    if done.returncode:
        raise SystemExit(f"{name} ended with exit code {done.returncode}; its own words stand above")
    return {
        "command": f"python examples/train_gpt.py {shlex.join(flags)}",
        "sent": sent(flags),
        "val": records[-1]["val_loss"],
        "loss": means([record["loss"] for record in records]),
    }


def means(losses: Sequence[float]) -> list[float]:
    """Of every ten of them."""
    ends = range(WINDOW, len(losses) + 1, WINDOW)
    return [round(statistics.fmean(losses[end - WINDOW : end]), 5) for end in ends]


def sent(flags: Sequence[str]) -> int:
    """Bytes of gradients that a rank of a run sends in a compressed step."""
    config = parse(list(flags))
    step = Step(sizes_of(config, VOCAB), config.batch, dp=RANKS, compression=compression(config))
    return traffic(step).total(cause="gradients")


def load(path: Path) -> Result:
    """What is kept, or nothing yet."""
    return json.loads(path.read_text()) if path.exists() else {"runs": {}}


def keep(path: Path, name: str, found: dict[str, Any]) -> None:
    """Put a run in its place among those of the file, which is replaced at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = load(path)["runs"] | {name: found}
    draft = path.with_suffix(".unfinished")
    draft.write_text(powersgd_page.text_of({"runs": {known: runs[known] for known in RUNS if known in runs}}))
    draft.replace(path)


def main() -> int:
    """Measure, keep, print; the exit code is 1 if rank 4 with Adafactor ends more than 2 % above exact sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNS, metavar="RUN", help=f"of {'; '.join(RUNS)}")
    parser.add_argument("--missing", action="store_true", help="measure what the result file lacks")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default 1)")
    parser.add_argument("--small", action="store_true", help="runs of twenty steps of a tiny model, to try this script")
    parser.add_argument("--result", type=Path, default=RESULT, help=f"where figures are kept (default {RESULT})")
    parser.add_argument("--show", action="store_true", help="print what is kept and measure nothing")
    parser.add_argument("--write-docs", action="store_true", help="write the page's figures and plot")
    options = parser.parse_args()
    result = load(options.result)
    if options.show or options.write_docs:
        result = result if result["runs"] else load(powersgd_page.KEPT)
        print("\n".join(powersgd_page.lines(result)))
        for path in powersgd_page.write(result) if options.write_docs else ():
            print(f"written {path}")
        return 0
    about = machine.describe()
    print(machine.headline(about), flush=True)
    names = [name for name in options.only or RUNS if not (options.missing and name in result["runs"])]
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {name: pool.submit(run, name, shlex.split(SMALL) if options.small else []) for name in names}
        for name, found in waiting.items():
            keep(options.result, name, {"about": about, **found.result()})
            print(f"{name}: validation loss {found.result()['val']:.4f}", flush=True)
    result = load(options.result)
    print("\n".join(powersgd_page.lines(result)), f"kept in {options.result}", sep="\n")
    return int(not options.small and powersgd_page.mean_above(result, "adafactor") > powersgd_page.BOUND)


if __name__ == "__main__":
    sys.exit(main())

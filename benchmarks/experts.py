"""What a mixture of experts does to a training run: its loss beside the dense twin's, and which tokens it drops.

    python benchmarks/experts.py --jobs 2                 every run: about half an hour on two idle cores
    python benchmarks/experts.py --only "dropless"        these
    python benchmarks/experts.py --missing                what the result file lacks
    python benchmarks/experts.py --show                   measure nothing, print what is kept
    python benchmarks/experts.py --write-docs             figures and plots of docs/explanation/mixture-of-experts.md

A run is `examples/train_gpt.py` on one rank and the default text.  The dense twin has an MLP where the other has eight
experts of the same size; a token meets one of them, so both do the same operations for a token, but for the router's.
Seeds, batches, steps and learning rate are the same.  Validation is dropless.

Nothing here is a time: runs may share the machine with others.  What is measured is kept in
benchmarks/results/experts.json, each run in place of an older one.
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

import experts_page
import machine

from mpitrain.assemble import sizes_of
from mpitrain.config import parse

ROOT = Path(__file__).resolve().parents[1]
RESULT = machine.RESULTS / "experts.json"
EVERY = 100  # steps between two validations, and in a window of routing
VOCAB = 256

NARROW = "--steps 3000 --width 64 --heads 4"
LONG = f"{NARROW} --seq-len 256 --batch 4"
SWITCH = "--experts 8"
SEEDS = (1, 2, 3)
RATES = ("5e-3", "1e-2")

RUNS = {
    **{f"dense, seed {seed}": f"{NARROW} --seed {seed}" for seed in SEEDS},
    **{f"switch, seed {seed}": f"{NARROW} {SWITCH} --seed {seed}" for seed in SEEDS},
    **{f"dense, lr {rate}": f"{NARROW} --lr {rate} --seed 1" for rate in RATES},
    **{f"switch, lr {rate}": f"{NARROW} {SWITCH} --lr {rate} --seed 1" for rate in RATES},
    "capacity 1": f"{NARROW} {SWITCH} --capacity-factor 1 --seed 1",
    "capacity 2": f"{NARROW} {SWITCH} --capacity-factor 2 --seed 1",
    "dropless": f"{NARROW} {SWITCH} --dropless --seed 1",
    "no balance loss": f"{NARROW} {SWITCH} --balance-loss 0 --seed 1",
    "no balance loss, dropless": f"{NARROW} {SWITCH} --balance-loss 0 --dropless --seed 1",
    "every other block": f"{NARROW} {SWITCH} --moe-every 2 --seed 1",
    "top 2, gshard": f"{NARROW} {SWITCH} --top-k 2 --seed 1",
    "dense, rows of 256": f"{LONG} --seed 1",
    "switch, rows of 256": f"{LONG} {SWITCH} --seed 1",
    "dense, gpt-mini, seed 1": "--steps 4000 --seed 1",
    "switch, gpt-mini, seed 1": f"--steps 4000 --seed 1 {SWITCH}",
}
"""By name, the flags of a run.  Rows of 256 are a quarter as many, so that a step has the same number of tokens."""

SMALL = "--steps 4 --eval-every 2 --layers 1 --width 16 --heads 2 --seq-len 16 --batch 4"
"""Flags that make a run small enough for a test of this script."""

Result = dict[str, Any]


def run(name: str, more: Sequence[str] = ()) -> dict[str, Any]:
    """Train, and read what the run wrote of itself.

    Returns:
        command; parameters, active: all of them, and those that a token meets; flops: of a token, forward and
        backward; and what `of_records` finds.
    """
    flags = [*shlex.split(RUNS[name]), "--eval-every", str(EVERY), "--sample-length", "0", *more]
    command = [sys.executable, str(ROOT / "examples/train_gpt.py"), *flags]
    with tempfile.TemporaryDirectory(prefix="mpitrain-experts-") as folder:
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
    model = sizes_of(parse(flags), VOCAB)
    return {
        "command": f"python examples/train_gpt.py {shlex.join(flags)}",
        "parameters": model.num_parameters,
        "active": model.num_active_parameters,
        "flops": model.flops_per_token,
        **of_records(records),
    }


def of_records(records: list[dict[str, Any]], window: int = EVERY) -> dict[str, Any]:
    """What counts of a run's metrics.

    Returns:
        steps; val: [step, validation loss] wherever it was measured; loss: the mean of the last 20 training losses;
        routing: for each so many steps their last one and the means over steps and layers of dropped: the share of
        choices that found no place, busiest: choices of the most wanted expert as a multiple of an even share, least:
        of the least wanted one, entropy in nats, balance: the balance loss without its coefficient, 0 for a run without
        one.
    """
    routed = [record for record in records if "routing" in record]
    return {
        "steps": len(records),
        "val": [[record["step"], record["val_loss"]] for record in records if record.get("val_loss") is not None],
        "loss": statistics.fmean(record["loss"] for record in records[-20:]),
        "routing": [_means(routed[start : start + window]) for start in range(0, len(routed), window)],
    }


def _means(records: list[dict[str, Any]]) -> dict[str, Any]:
    layers = [layer for record in records for layer in record["routing"].values()]
    even = [sum(layer["load"]) / len(layer["load"]) for layer in layers]
    return {
        "step": records[-1]["step"],
        "dropped": round(statistics.fmean(layer["dropped"] / sum(layer["load"]) for layer in layers), 6),
        "busiest": round(statistics.fmean(max(layer["load"]) / e for layer, e in zip(layers, even, strict=True)), 6),
        "least": round(statistics.fmean(min(layer["load"]) / e for layer, e in zip(layers, even, strict=True)), 6),
        "entropy": round(statistics.fmean(layer["entropy"] for layer in layers), 6),
        "balance": round(statistics.fmean(record.get("balance_loss", 0.0) for record in records), 6),
    }


def load(path: Path) -> Result:
    """What is kept, or nothing yet."""
    return json.loads(path.read_text()) if path.exists() else {"runs": {}}


def keep(path: Path, name: str, found: dict[str, Any]) -> None:
    """Put a run in its place among those of the file, which is replaced at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = load(path)["runs"] | {name: found}
    ordered = {"runs": {known: runs[known] for known in RUNS if known in runs}}
    draft = path.with_suffix(".unfinished")
    draft.write_text(experts_page.text_of(ordered))
    draft.replace(path)


def main() -> int:
    """Measure, keep, print; the exit code is 1 if the mixture does not end below its dense twin with each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNS, metavar="RUN", help=f"of {'; '.join(RUNS)}")
    parser.add_argument("--missing", action="store_true", help="measure what the result file lacks")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default 1)")
    parser.add_argument("--small", action="store_true", help="runs of four steps of a tiny model, to try this script")
    parser.add_argument("--result", type=Path, default=RESULT, help=f"where figures are kept (default {RESULT})")
    parser.add_argument("--show", action="store_true", help="print what is kept and measure nothing")
    parser.add_argument("--write-docs", action="store_true", help="write the page's figures and plots")
    options = parser.parse_args()
    result = load(options.result)
    if options.show or options.write_docs:
        result = result if result["runs"] else load(experts_page.KEPT)
        print("\n".join(experts_page.lines(result)))
        for path in experts_page.write(result) if options.write_docs else ():
            print(f"written {path}")
        return 0
    about = machine.describe()
    print(machine.headline(about), flush=True)
    names = [name for name in options.only or RUNS if not (options.missing and name in result["runs"])]
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {name: pool.submit(run, name, shlex.split(SMALL) if options.small else []) for name in names}
        for name, found in waiting.items():
            keep(options.result, name, {"about": about, **found.result()})
            print(f"{name}: validation loss {found.result()['val'][-1][1]:.4f}", flush=True)
    result = load(options.result)
    print("\n".join(experts_page.lines(result)), f"kept in {options.result}", sep="\n")
    return int(not options.small and any(gap <= 0 for gap in experts_page.gaps(result).values()))


if __name__ == "__main__":
    sys.exit(main())

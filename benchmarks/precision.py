"""What half precision does to a training run: its loss, and the gradients that halves cannot hold.

    python benchmarks/precision.py                            every run and every look, three to four minutes
    python benchmarks/precision.py --only float32 underflow   these
    python benchmarks/precision.py --show                     measure nothing, print what is kept
    python benchmarks/precision.py --write-docs               figures and plot of docs/explanation/mixed-precision.md

A run is `examples/train_gpt.py`, one rank, 300 steps of the default model on the default text; its validation loss is
compared with that of float32.  `underflow` looks at every gradient of three steps of the same run (underflow.py).

Nothing here is a time: runs may share the machine with others.  What is measured is kept in
benchmarks/results/precision.json, each part in place of an older one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import precision_page
from processes import result_of

ROOT = Path(__file__).resolve().parents[1]
RESULT = machine.RESULTS / "precision.json"
STEPS = 300

RUNS = {
    "float32": "--dtype float32",
    "float32, other seed": "--dtype float32 --seed 1",
    "float16": "--dtype float16",
    "float16, scale from 2^32": f"--dtype float16 --loss-scale {2**32}",
    "float16, scales of branches": "--dtype float16 --loss-scaling blocks",
    "float16, no scale": "--dtype float16 --loss-scaling none",
    "float16, scale 2^-11": f"--dtype float16 --loss-scaling static --loss-scale {2.0**-11}",
    "bfloat16": "--dtype bfloat16",
    "float32, Adafactor": "--optimizer adafactor",
    "float16, Adafactor": "--dtype float16 --optimizer adafactor",
}
"""By name, the flags of a run; the first is what all others are compared with.

With a scale of 2^-11 the gradients of activations are as small as with 2^11 times as many targets a step, two million.
"""

SMALL = "--steps 3 --layers 1 --width 16 --heads 2 --seq-len 16 --batch 4"
"""Flags that make a run small enough for a test of this script."""

Result = dict[str, Any]


def run(name: str, more: list[str]) -> dict[str, Any]:
    """Train, and read what the run wrote of itself.

    Returns:
        command; val_loss; skipped: the steps that were skipped; scales: [step, loss scale] where it changed; loss: the
        mean of the last 20 training losses.
    """
    flags = ["--steps", str(STEPS), "--eval-every", "0", "--sample-length", "0", *shlex.split(RUNS[name]), *more]
    command = [sys.executable, str(ROOT / "examples/train_gpt.py"), *flags]
    with tempfile.TemporaryDirectory(prefix="mpitrain-precision-") as folder:
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
    return {"command": f"python examples/train_gpt.py {shlex.join(flags)}", **of_records(records)}


def of_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What counts of a run's metrics; see `run`."""
    scales: list[list[float]] = []
    for record in records:
        scale = record.get("loss_scale")
        if scale is not None and (not scales or scales[-1][1] != scale):
            scales.append([record["step"], scale])
    return {
        "val_loss": records[-1]["val_loss"],
        "loss": statistics.fmean(record["loss"] for record in records[-20:] if record["loss"] is not None),
        "steps": len(records),
        "skipped": [record["step"] for record in records if record.get("skipped")],
        "scales": _thinned(scales),
    }


def _thinned(scales: list[list[float]], most: int = 12) -> list[list[float]]:
    """Scales of branches change in every step: the first, the last, and some between."""
    if len(scales) <= most:
        return scales
    return [scales[round(place * (len(scales) - 1) / (most - 1))] for place in range(most)]


def load(path: Path) -> Result:
    """What is kept, or nothing yet."""
    return json.loads(path.read_text()) if path.exists() else {"runs": {}}


def keep(path: Path, result: Result) -> None:
    """Replace the file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {**result, "runs": {name: result["runs"][name] for name in RUNS if name in result["runs"]}}
    draft = path.with_suffix(".unfinished")
    draft.write_text(precision_page.text_of(ordered))
    draft.replace(path)


def lines(result: Result) -> list[str]:
    """What is kept, for a terminal."""
    texts = [f"{'run':<30}{'val loss':>10}{'ratio':>9}{'skipped':>9}{'  scale at the start':>22}{'at the end':>12}"]
    for name, found in result["runs"].items():
        scales = [f"{scale:g}" for _, scale in (found["scales"][:1] + found["scales"][-1:])] or ["-", "-"]
        texts.append(
            f"{name:<30}{found['val_loss']:>10.4f}{precision_page.ratio(result, name):>9.4f}{len(found['skipped']):>9}"
            f"{scales[0]:>22}{scales[1]:>12}"
        )
    return texts + (precision_page.underflow_lines(result["underflow"]) if "underflow" in result else [])


def main() -> int:
    """Measure, keep, print; the exit code is 1 if a run ends more than 1 % from float32."""
    parts = [*RUNS, "underflow"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART", help=f"of {', '.join(parts)}")
    parser.add_argument("--missing", action="store_true", help="measure what the result file lacks")
    parser.add_argument("--small", action="store_true", help="runs of three steps of a tiny model, to try this script")
    parser.add_argument("--result", type=Path, default=RESULT, help=f"where figures are kept (default {RESULT})")
    parser.add_argument("--show", action="store_true", help="print what is kept and measure nothing")
    parser.add_argument("--write-docs", action="store_true", help="write the page's figures and plot from what is kept")
    options = parser.parse_args()
    result = load(options.result)
    if options.show or options.write_docs:
        result = result if result["runs"] else load(precision_page.KEPT)
        print("\n".join(lines(result)))
        for path in precision_page.write(result) if options.write_docs else ():
            print(f"written {path}")
        return 0
    about = machine.describe()
    print(machine.headline(about), flush=True)
    for name in options.only or parts:
        if options.missing and name in (*result["runs"], *result):
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        if name == "underflow":
            result[name] = {"about": about, **result_of("underflow.py", *(["--small"] if options.small else []))}
        else:
            result["runs"][name] = {"about": about, **run(name, shlex.split(SMALL) if options.small else [])}
        keep(options.result, result)
    print("\n".join(lines(result)), f"kept in {options.result}", sep="\n")
    promised = precision_page.PROMISED & set(result["runs"])
    return int(any(abs(precision_page.ratio(result, name) - 1) > 0.01 for name in promised))


if __name__ == "__main__":
    sys.exit(main())

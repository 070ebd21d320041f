"""Quality beside PyTorch: the default run against its twin, in pairs of equal time, data and seed.

    python benchmarks/quality.py --pairs 3 --budget 255
    python benchmarks/quality.py --pairs 3 --steps 3563 --dropout 0.1         other flags go to both

A pair is one run of mpitrain (`./run_mpi.sh -n 8 examples/train_gpt.py`) and one of `benchmarks/twin.py` under DDP with
as many processes, one after the other, the order changing from pair to pair.  The pair's number is the seed of both.
What is compared is the validation loss at the end, over the same windows; where the difference is positive mpitrain's
is the higher one.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).resolve().parents[1]


def run_mpitrain(options: argparse.Namespace, flags: list[str], folder: Path) -> dict[str, Any]:
    """One run of mpitrain; its validation loss and steps from the last line of metrics.jsonl."""
    run = folder / "mpitrain"
    start = options.start or f"{shlex.quote(str(ROOT / 'run_mpi.sh'))} -n {options.ranks}"
    load = _timed([*shlex.split(start), str(ROOT / "examples/train_gpt.py"), "--run", str(run), *flags])
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {"val_loss": last["val_loss"], "steps": last["step"], **load}


def run_twin(options: argparse.Namespace, flags: list[str], folder: Path) -> dict[str, Any]:
    """One run of the twin."""
    kept = folder / "twin.json"
    twin = str(Path(__file__).with_name("twin.py"))
    load = _timed([sys.executable, twin, "--ranks", str(options.ranks), "--json", str(kept), *flags])
    result = json.loads(kept.read_text())
    return {"val_loss": result["val_loss"], "steps": result["steps"], **load}


SIDES = {"mpitrain": run_mpitrain, "twin": run_twin}


def _timed(command: list[str]) -> dict[str, float]:
    """Run a command, its output going to the terminal; wall time and foreign load."""
    print("$", shlex.join(command), flush=True)
    load, before = machine.Load(), _children_cpu()
    code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        raise SystemExit(f"the command above ended with exit code {code}")
    return load.report(own=_children_cpu() - before)


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run the pairs, print the table, keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--start", help="what starts mpitrain's ranks (default: ./run_mpi.sh -n RANKS)")
    options, flags = parser.parse_known_args()
    about = machine.describe()
    pairs = []
    for number in range(options.pairs):
        order = list(SIDES) if number % 2 == 0 else list(reversed(SIDES))
        with tempfile.TemporaryDirectory(prefix="mpitrain-quality-") as folder:
            pairs.append({side: SIDES[side](options, [*flags, "--seed", str(number)], Path(folder)) for side in order})
        print(table(pairs), flush=True)
    print(machine.headline(about))
    print(f"kept in {machine.keep('quality', {'machine': about, 'flags': flags, 'pairs': pairs})}")


def table(pairs: list[dict[str, dict[str, Any]]]) -> str:
    """The pairs and the mean difference, for a terminal."""
    head = f"{'seed':<6}{'mpitrain':>10}{'twin':>10}{'difference':>12}{'steps':>10}{'':>8}{'seconds':>10}{'':>8}"
    lines = [head + f"{'foreign':>9}"]
    for number, pair in enumerate(pairs):
        mine, theirs = pair["mpitrain"], pair["twin"]
        foreign = max(side["foreign"] + side["steal"] for side in pair.values())
        lines.append(
            f"{number:<6}{mine['val_loss']:>10.4f}{theirs['val_loss']:>10.4f}{_difference(pair):>+12.4f}"
            f"{mine['steps']:>10}{theirs['steps']:>8}{mine['seconds']:>10.0f}{theirs['seconds']:>8.0f}"
            f"{100 * foreign:>7.0f} %"
        )
    mean = statistics.mean(map(_difference, pairs))
    return "\n".join([*lines, f"mean difference {mean:+.4f} nats (above 0: mpitrain's loss is higher)"])


def _difference(pair: dict[str, dict[str, Any]]) -> float:
    return pair["mpitrain"]["val_loss"] - pair["twin"]["val_loss"]


if __name__ == "__main__":
    main()

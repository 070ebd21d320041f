"""Speed beside PyTorch: the same training in mpitrain and in its PyTorch twin, in interleaved rounds.

    python benchmarks/throughput.py                               rows S:1 S:2 mini:8
    python benchmarks/throughput.py --rows S:1 M:1 --rounds 9     one rank against one thread, two sizes

A row is SIZE:RANKS.  With one rank PyTorch runs on one thread; with more, mpirun's ranks stand against as many DDP
processes with gloo, one thread each; more ranks than cores are allowed.  All processes of both sides live through the
whole row, so no start-up is measured, and one side sleeps while the other runs.  Both train the same model from the
same initial values on the same batches, and their losses are compared before anything is timed.

The ratio is the median over the rounds of mpitrain's tokens/s over PyTorch's in the same round: above 1 mpitrain is the
faster one.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import machine
from sides import SIZES, Task
from training import Turn, alive, take_turns

STRETCH_S = 2.0  # of a timed stretch, where --steps is not given


def measure(task: Task, *, rounds: int, steps: int | None, tuned_malloc: bool) -> dict[str, Any]:
    """One row.

    Returns:
        task; for each side its steps a round, the rounds and their medians; ratios by round and their median.
    """
    with alive(("torch", task, {}), ("mpitrain", task, {}), tuned_malloc=tuned_malloc) as (torch, mine):
        turns = {"torch": Turn(torch), "mpitrain": Turn(mine)}
        measured = take_turns(turns, rounds=rounds, stretch=STRETCH_S, steps=steps, same=[("mpitrain", "torch")])
    runs = measured["rounds"]
    pairs = list(zip(runs["mpitrain"], runs["torch"], strict=True))
    ratios = [mine["tokens_per_s"] / theirs["tokens_per_s"] for mine, theirs in pairs]
    cpu_ratios = [theirs["cpu_ms_per_step"] / mine["cpu_ms_per_step"] for mine, theirs in pairs]
    medians = {
        name: {key: statistics.median(run[key] for run in side) for key in side[0]} for name, side in runs.items()
    }
    return {
        "task": task._asdict(),
        "steps": measured["steps"],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cpu_ratio": statistics.median(cpu_ratios),
        "medians": medians,
        "rounds": runs,
    }


def _row(text: str) -> tuple[str, int]:
    size, _, ranks = text.partition(":")
    if size not in SIZES or not ranks.isdigit() or int(ranks) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no SIZE:RANKS with a size of {', '.join(SIZES)}, as in S:2")
    return size, int(ranks)


def line(label: str, row: dict[str, Any]) -> str:
    """A row as a line for a terminal."""
    mine, theirs = row["medians"]["mpitrain"], row["medians"]["torch"]
    foreign = max(run["foreign"] + run["steal"] for side in row["rounds"].values() for run in side)
    return (
        f"{label:<10}{mine['tokens_per_s']:>12,.0f}{theirs['tokens_per_s']:>12,.0f}{row['ratio']:>8.3f}"
        f"   {min(row['ratios']):.3f}-{max(row['ratios']):.3f}{row['cpu_ratio']:>9.3f}"
        f"{mine['ms_per_step']:>10.1f}{theirs['ms_per_step']:>8.1f}"
        f"{mine['faults_per_step']:>9.0f}{theirs['faults_per_step']:>7.0f}"
        f"{mine['peak_bytes'] / 1e6:>8.0f}{theirs['peak_bytes'] / 1e6:>7.0f}{100 * foreign:>8.0f} %"
    )


HEADER = (
    f"{'row':<10}{'mpitrain':>12}{'PyTorch':>12}{'ratio':>8}   {'min-max':<11}{'of CPU':>9}"
    f"{'ms/step':>10}{'':>8}{'faults':>9}{'':>7}{'MB':>8}{'':>7}{'foreign':>10}"
)


def main() -> None:
    """Parse, measure row after row, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=_row, default=[("S", 1), ("S", 2), ("mini", 8)], metavar="SIZE:RANKS")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--steps", type=int, help="timed steps a round (default: 2 s)")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--per-rank", action="store_true", help="the size's batch is each rank's, not all ranks'")
    parser.add_argument(
        "--malloc",
        choices=("tuned", "system"),
        default="tuned",
        help="glibc's malloc on both sides: told to keep freed memory (default), or as it is",
    )
    options = parser.parse_args()
    about = machine.describe()
    print(machine.headline(about), HEADER, sep="\n", flush=True)
    rows = {}
    for size, ranks in options.rows:
        sizes = dict(SIZES[size])
        sizes["batch"] *= ranks if options.per_rank else 1
        task = Task(**sizes, ranks=ranks, dropout=options.dropout, dtype=options.dtype)
        row = measure(task, rounds=options.rounds, steps=options.steps, tuned_malloc=options.malloc == "tuned")
        rows[f"{size}:{ranks}"] = row
        print(line(f"{size}:{ranks}", row), flush=True)
    print(f"kept in {machine.keep('throughput', {'machine': about, 'options': vars(options), 'rows': rows})}")


if __name__ == "__main__":
    main()

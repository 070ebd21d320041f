"""Random programs of ops: is every value and every gradient right?

    python tests/fuzz_graphs.py                             2,000 graphs from seed 0
    python tests/fuzz_graphs.py --graphs 20000 --seed 40000
    python tests/fuzz_graphs.py --seconds 3600              as many as an hour allows
    python tests/fuzz_graphs.py --one 4711                  print the graph of one seed, and judge it

A graph has leaves of all shapes, strides and dtypes, up to some twenty ops, and seeds at several values.  Its values
are compared with a naive implementation, its gradients with PyTorch (where it is installed) and with finite
differences, other ways to walk the tape (split, encoded, over two tapes) with the plain one, and half and
single precision with double.  What is not equal but for rounding is made small and printed as a program that shows it.

Exit code: 0 if nothing is wrong, 1 if something is, or if a public op never occurred.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Any

from fuzz.grow import grow
from fuzz.judge import Judge, Wrong
from fuzz.program import OPS, Program, source
from fuzz.shrink import reproduction, shrink
from threadpoolctl import threadpool_limits

from mpitrain import kernels
from mpitrain.autograd import ops

PUBLIC = set(ops.__all__) - {"IGNORE"}
MOST_WRONG = 20  # so many are shown; then something is wrong with everything
ENOUGH = 100  # graphs in which every op must have occurred


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, help="how many (default 2000, or any number with --seconds)")
    parser.add_argument("--seed", type=int, default=0, help="of the first graph; the next ones count up")
    parser.add_argument("--seconds", type=float, default=None, help="stop after so long")
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=None, help="compare with PyTorch")
    parser.add_argument("--differences", action=argparse.BooleanOptionalAction, default=True, help="finite differences")
    parser.add_argument("--kernels", choices=kernels.levels(), help="which kernels (default: the best of this machine)")
    parser.add_argument("--one", type=int, metavar="SEED", help="print and judge one graph")
    return parser.parse_args(arguments)


def find_torch(wanted: bool | None) -> Any:
    """The module; None if it is not wanted, or neither installed nor asked for."""
    if wanted is False:
        return None
    try:
        import torch
    except ImportError:
        if wanted:
            raise SystemExit("--torch: PyTorch is not installed") from None
        return None
    torch.set_num_threads(1)
    return torch


def judged(judge: Judge, program: Program) -> Wrong | None:
    try:
        judge.check(program)
    except Wrong as wrong:
        return wrong
    return None


def one(judge: Judge, seed: int) -> int:
    program = grow(seed)
    print(source(program))
    wrong = judged(judge, program)
    if wrong is None:
        print(f"# right: {sum(judge.checks.values())} comparisons")
        return 0
    tell(judge, seed, program, wrong)
    return 1


def tell(judge: Judge, seed: int, program: Program, wrong: Wrong) -> None:
    """Print a failure, and the smallest program that was found to show it."""
    print(f"\n# WRONG, seed {seed}, {len(program.steps)} ops: {wrong}")
    silent = Judge(judge.torch, judge.differences)
    small, wrong = shrink(program, wrong, lambda candidate: judged(silent, candidate))
    print(f"# made smaller, {len(small.steps)} ops: {wrong}\n{reproduction(small, wrong)}", flush=True)


def fuzz(judge: Judge, first: int, graphs: int | None, seconds: float | None) -> int:
    occurred: Counter[str] = Counter()
    start, last = time.monotonic(), time.monotonic()
    number = wrongs = 0
    while (graphs is None or number < graphs) and (seconds is None or time.monotonic() - start < seconds):
        program = grow(first + number)
        occurred.update(step.op for step in program.steps)
        wrong = judged(judge, program)
        if wrong is not None:
            wrongs += 1
            tell(judge, first + number, program, wrong)
            if wrongs == MOST_WRONG:
                number += 1
                print(f"# {MOST_WRONG} graphs are wrong: stopped here")
                break
        number += 1
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{number} graphs, {wrongs} wrong, {1e3 * (last - start) / number:.1f} ms each", flush=True)
    took = time.monotonic() - start
    never = sorted(PUBLIC - {name for name, n in occurred.items() if n})

    print(f"\nseeds {first} to {first + number - 1}, kernels {kernels.level()}")
    print(f"ops: {occurred.total()} of {len(OPS)} kinds; how often:")
    words = [f"{name} {n}" for name, n in sorted(occurred.items(), key=lambda item: (-item[1], item[0]))]
    for i in range(0, len(words), 8):
        print("  " + ", ".join(words[i : i + 8]))
    print("comparisons:")
    for what, n in sorted(judge.checks.items()):
        print(f"  {n:8d}  {what}")
    for what, n in sorted(judge.undecided.items()):
        print(f"  {n:8d}  left out: {what}")
    against = f"{'PyTorch' if judge.torch else 'no PyTorch'}, {'' if judge.differences else 'no '}differences"
    print(f"{number} graphs, {sum(judge.checks.values())} comparisons ({against}): {wrongs} wrong, {took:.0f} s")
    if number >= ENOUGH and never:
        print(f"never occurred: {', '.join(never)}")
        return 1
    return 1 if wrongs else 0


def main(arguments: list[str] | None = None) -> int:
    given = options(arguments)
    unknown = sorted(PUBLIC ^ set(OPS))
    if unknown:
        raise SystemExit(f"ops.__all__ and the words of tests/fuzz differ in {', '.join(unknown)}")
    if given.kernels:
        kernels.select(given.kernels)
    judge = Judge(find_torch(given.torch), given.differences)
    with threadpool_limits(1):  # arrays are small
        if given.one is not None:
            return one(judge, given.one)
        graphs = given.graphs if given.graphs is not None or given.seconds is not None else 2000
        return fuzz(judge, given.seed, graphs, given.seconds)


if __name__ == "__main__":
    sys.exit(main())

"""Runs with digests of a small model in any layout, and mistakes that can be seeded into them.

    PYTHONPATH=.:tests python tests/compared_runs.py --first 0 --count 200 [--dtype float32] [--minutes 10]
    PYTHONPATH=.:tests python tests/compared_runs.py --all 8 [--first 100] [--stride 5]

trains random cases (those of `mpitrain verify --sweep`), or one in every layout of so many ranks (those of `mpitrain
verify --all`), on one rank and in their layout, compares the two by their digests, and prints each that is said to
part, of which there must be none.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.autograd.function import Function
from mpitrain.autograd.tape import PATH
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.compare.findings import Walk
from mpitrain.compare.sides import Side
from mpitrain.compare.walk import walk
from mpitrain.debug.digests import digesting
from mpitrain.debug.digests.files import read
from mpitrain.errors import UserError
from mpitrain.nn.module import PRECISION
from mpitrain.verify.cases import Case, case_of
from mpitrain.verify.every import all_layouts
from mpitrain.verify.layouts import Layout, parse
from mpitrain.verify.sweep import train

ALONE = Layout(())
OPTIONS: dict[str, Any] = {
    "layers": 2,
    "width": 24,
    "heads": 4,
    "seq_len": 8,
    "gelu": "tanh",
    "dropout": 0.1,
    "seed": 7,
    "batch": 8,
    "microbatches": 2,
    "optimizer": "adamw",
    "lr": 1e-3,
    "weight_decay": 0.1,
    "clip": 0.5,
    "reducer": "flat",
    "warmup": 0.03,
}


def case(layout: str = "", **options: Any) -> Case:
    """The small model in a layout."""
    return Case(1, parse(layout) if layout else ALONE, 17, OPTIONS | options)


def run(folder: Path | str, of: Case, layout: Layout, dtype: Any = np.float64, every: int = 1) -> None:
    """Train a case in a layout, in this process, and keep its digests in a folder."""

    def body() -> None:
        me = world()
        me.set_deterministic()
        token = PRECISION.set(dtype)
        try:
            with digesting(me, folder, every):
                train(of, layout)
        finally:
            PRECISION.reset(token)

    LocalWorld(max(1, layout.ranks)).run(body)


def compared(one: Path | str, other: Path | str) -> Walk:
    """Compare two folders."""
    return walk(Side(read(one), 1), Side(read(other), 2))


# ------------------------------------------------------------------------------------------------------------ mistakes


@contextmanager
def other_values(function: type[Function], path: str, change: Callable[[Any], Any], nth: int = 0) -> Iterator[None]:
    """The forward of an op gives something else in one part of the model: its first output, changed."""
    before = function.forward

    def forward(*inputs: Any, **static: Any) -> Any:
        y, saved = before(*inputs, **static)
        if PATH.get() != path:
            return y, saved
        return ((change(y[0]), *y[1:]) if type(y) is tuple else change(y)), saved

    function.forward = staticmethod(forward)  # type: ignore[assignment]
    try:
        yield
    finally:
        function.forward = staticmethod(before)  # type: ignore[assignment]


@contextmanager
def other_gradients(function: type[Function], path: str, which: int, change: Callable[[Any], Any]) -> Iterator[None]:
    """The backward of an op gives another gradient of an input, if it is of a weight of this shape's part."""
    backward, forward = function.backward, function.forward
    marked: set[int] = set()

    def noting(*inputs: Any, **static: Any) -> Any:
        y, saved = forward(*inputs, **static)
        if PATH.get() == path:
            marked.update(id(array) for array in saved if hasattr(array, "shape"))
            kept.append(saved)
        return y, saved

    kept: list[Any] = []

    def changed(grad: Any, *saved: Any, **static: Any) -> Any:
        found = backward(grad, *saved, **static)
        if not all(id(array) in marked for array in saved if hasattr(array, "shape")):
            return found
        if found[which] is None:
            return found
        of = found[which].array() if hasattr(found[which], "array") else found[which]
        return (*found[:which], change(of), *found[which + 1 :])

    function.forward, function.backward = staticmethod(noting), staticmethod(changed)  # type: ignore[assignment]
    try:
        yield
    finally:
        function.forward, function.backward = staticmethod(forward), staticmethod(backward)  # type: ignore[assignment]


# ----------------------------------------------------------------------------------------------------------- the sweep


def every_layout(ranks: int) -> Iterator[tuple[str, Case]]:
    """A small model in each layout of so many ranks; with experts where a layout spreads them."""
    sizes = {"heads": 8, "width": 48, "seq_len": 16, "batch": 64, "microbatches": 8}
    experts = {"experts": 16, "top_k": 2, "router": "topk", "capacity_factor": 1.0, "z_loss": 1e-3}
    for layout in all_layouts(ranks):
        recompute = {"recompute": "full" if "full" in layout.ways else "none" if "none" in layout.ways else "selective"}
        more = experts if layout.spreads_experts else {}
        yield str(layout), replace(case(**sizes, **recompute, **more), layout=layout)


def random_cases(first: int, count: int) -> Iterator[tuple[str, Case]]:
    """Those of so many seeds."""
    return ((f"seed {seed}", case_of(seed)) for seed in range(first, first + count))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", type=int, metavar="RANKS")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--stride", type=int, default=1, help="of --all: each so many-th")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--minutes", type=float, default=10.0)
    given = parser.parse_args()
    began, done, late, wrong, refused = time.monotonic(), 0, 0, 0, 0
    cases = random_cases(given.first, given.count) if given.all is None else every_layout(given.all)
    if given.all is not None:
        cases = islice(cases, given.first, given.first + given.count, given.stride)
    largest: dict[str, float] = {}
    layouts = set()
    for name, of in cases:
        if time.monotonic() - began > 60 * given.minutes:
            break
        if of.layout.is_stale:
            late += 1
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(f"{folder}/many", of, of.layout, np.dtype(given.dtype))
            except UserError as error:
                refused += 1
                print(f"{name}: refused: {str(error).splitlines()[0]}", flush=True)
                continue
            run(f"{folder}/one", of, ALONE, np.dtype(given.dtype))
            found = compared(f"{folder}/one", f"{folder}/many")
        done += 1
        layouts.add(str(of.layout))
        for phase, share in found.largest.items():
            largest[phase] = max(largest.get(phase, 0.0), share)
        if found.first is not None or not found.steps:
            wrong += 1
            print(f"{name}: {of}\n  {found.first}", flush=True)
    worst = ", ".join(f"{phase} {share:.2g}" for phase, share in largest.items())
    print(f"{done} cases in {len(layouts)} layouts ({given.dtype}), {refused} refused,", end=" ")
    print(f"{late} of pipelines that never drain left out:")
    print(f"{wrong} said to part; largest error in units of its bound: {worst}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

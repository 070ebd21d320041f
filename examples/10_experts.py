"""Lesson 10: a mixture of experts, and which expert takes which kind of token.

    python examples/10_experts.py --svg experts.svg
    mpitrain local -n 2 examples/10_experts.py
    mpirun -n 2 python examples/10_experts.py --steps 300

Trains a small GPT on the source of Python's standard library, byte by byte.  In the place of each MLP it has eight
experts; a router sends each byte to one of them.  Ranks share the experts, as many of them as divide eight.  Nobody
tells a router what a digit is: a listener looks on while unseen text goes through, and counts what it has come up with.

Prints, layer by layer, which share of the tokens of each kind goes to which expert, and draws it.  Ends with the
difference to the same training on one rank, in its first steps and in float64.
"""

from __future__ import annotations

import argparse
import keyword
import math
import re
from pathlib import Path

import mpitrain  # noqa: F401 - before NumPy

# isort: split
import numpy as np

from mpitrain.autograd.ops import IGNORE
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data import corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.routes import Routes, heat_map, table
from mpitrain.errors import ConfigError
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW
from mpitrain.parallel.expert.counted import of_model
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage
from mpitrain.routing import Routing

EXPERTS, ROWS, SEED = 8, 16, 1
SIZES = GPTConfig(layers=2, width=64, heads=4, seq_len=64, routing=Routing(EXPERTS))
KINDS = {  # of the bytes of a text; the first that fits counts
    "keyword": rf"\b(?:{'|'.join(keyword.kwlist)})\b",
    "start of a word": r"\b[A-Za-z_]",
    "rest of a word": r"[A-Za-z_]\w*",
    "digit": r"\d",
    "indentation": r"(?<=\n) +",
    "other space": r"[ \t]+",
    "line end": r"\n",
    "bracket": r"[][(){}]",
    "quote": r"[\"'`]",
    "point, comma, colon": r"[.,:;]",
    "operator": r"[-+*/%=<>!&|^~@\\]",
    "all else": r"[\s\S]",
}
PATTERN = re.compile("|".join(f"({pattern})" for pattern in KINDS.values()))


def kinds_of(row: np.ndarray) -> list[int]:
    """The number of the kind of each byte of a text."""
    found = PATTERN.finditer(row.astype(np.uint8).tobytes().decode("latin-1"))
    return [match.lastindex - 1 for match in found for _ in match[0]]


def train(steps: int, dtype: type) -> tuple[list[float], Executor, Tokens]:
    """Train on the surrounding ranks; the losses, and what can be looked at."""
    mesh = Mesh(world(), ep=math.gcd(world().size, EXPERTS))
    model = GPT(SIZES, mesh, seed=SEED, dtype=dtype)
    executor = Executor(model, AdamW(model.parameters(), lr=3e-3), mesh, with_update(one_stage(1)), clip=1.0)
    tokens, losses = Tokens(corpus.load(), SIZES.seq_len, SEED), []
    for step in range(steps):
        losses.append(executor.step(tokens.batch_at(step, ROWS, mesh.dp.rank, mesh.dp.size)))
        if mesh.is_reporter and step + 1 in (10, 100, steps) and dtype is np.float32:
            loads = of_model(executor.report.counted, executor.report.rows)
            dropped = "  ".join(f"{path} {load.dropped_share:.0%}" for path, load in loads.items())
            print(f"step {step + 1:>5}  loss {losses[-1]:.3f}  dropped for want of room: {dropped}")
    return losses, executor, tokens


def main() -> float:
    """Print the lesson; return the largest difference of a loss to that of one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="of the training")
    parser.add_argument("--svg", type=Path, help="file for the picture")
    options = parser.parse_args()
    ranks = world()
    if options.svg is not None and not options.svg.parent.is_dir():  # said now, not after the training
        raise ConfigError(f"--svg {options.svg}: there is no folder {options.svg.parent}.")
    _, executor, tokens = train(options.steps, np.float32)

    routes, dp = Routes(tuple(KINDS), EXPERTS), executor.mesh.dp
    for batch in tokens.validation(8 * ROWS, dp.rank, dp.size):
        kinds = np.array([kinds_of(row) for row in batch.inputs])
        with routes.watch(np.where(batch.targets == IGNORE, -1, kinds)):
            executor.evaluate([batch])  # without capacity: each token goes to the expert of its choice
    routes.sum_over(ranks)

    mine, *_ = train(3, np.float64)
    [(serial, *_)] = LocalWorld(1).run(train, 3, np.float64)  # the same, in a world of one rank
    worst = max(abs(a - b) / abs(b) for a, b in zip(mine, serial, strict=True))
    assert worst < 1e-12, worst
    if ranks.rank == 0:
        for path in routes.counts:
            print(f"\n{path}: percent of each kind's tokens, by expert\n\n{table(routes, path)}")
        if options.svg is not None:
            title = f"Which expert takes which kind of token, in percent, after {options.steps} steps"
            options.svg.write_text(heat_map(routes, title), encoding="utf-8")
            print(f"\npicture in {options.svg}")
        print(f"\nlargest difference of a loss to the serial run: {worst:.1e}")
    return worst


if __name__ == "__main__":
    main()

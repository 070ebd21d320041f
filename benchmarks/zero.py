"""What ZeRO keeps, sends and costs: bytes of state and messages by stage and number of ranks, and the time of a step.

    python benchmarks/zero.py                         bytes and times: about five minutes on two idle cores
    python benchmarks/zero.py --only bytes            bytes alone, which may be measured on a busy machine
    python benchmarks/zero.py --show                  measure nothing, print what is kept
    python benchmarks/zero.py --write-docs            figures and picture of docs/explanation/zero.md

Bytes are those of the default model with AdamW, as the ledgers of memory and messages count them on ranks that are
threads of one process.  Times are of two MPI ranks: trainings with each stage live at once and take turns, and a round
gives the ratio of each to stage 0.  What is measured is kept in benchmarks/results/zero.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mpitrain  # noqa: F401 - before NumPy, as a training script that follows the documents has it (mpitrain/blas.py)

# isort: split
import machine
import zero_page as page
from measurements import on_cores, task
from training import Turn, alive, take_turns

from mpitrain.assemble import sizes_of
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config import parse
from mpitrain.data import corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug import owners
from mpitrain.debug.ledger import Ledger, in_step
from mpitrain.debug.memory import SETTLED, MemoryLedger
from mpitrain.events import listen
from mpitrain.models.gpt import GPT
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

RESULT = machine.RESULTS / "zero.json"
STAGES = (0, 1, 2, 3)
STATE = (owners.WEIGHTS, owners.MASTERS, owners.GRADIENTS, owners.STATE)
VOCAB = 256
BATCH = 48  # sequences, which every number of ranks here divides, also in four micro-batches
SIZES = {"gpt-mini": "mini", "width 256": "S"}
"""What is timed: a name, and that of `sides.SIZES`."""

Result = dict[str, Any]


def bytes_of(ranks: int, zero: int, microbatches: int = 1, text: corpus.Corpus | None = None) -> dict[str, Any]:
    """What the rank that keeps most keeps of the default model, and what it sends in a step.

    Returns:
        state: bytes between steps by owner; gathered, whole: the most whole weights and whole gradients at once; peak:
        the most of all; sent: in a step.
    """
    sizes = sizes_of(parse([]), VOCAB)
    text = corpus.load() if text is None else text
    rows = complete("1f1b", ranks=1, microbatches=microbatches)

    def main() -> dict[str, Any]:
        mesh = Mesh(world())
        model = GPT(sizes, mesh, seed=1, zero=zero)
        executor = Executor(model, AdamW(model.shares()), mesh, rows)
        memory, messages = MemoryLedger(), Ledger()
        batches = Tokens(text, sizes.seq_len).batches(BATCH, mesh.dp.rank, mesh.dp.size, stop_step=SETTLED)
        with listen(memory), listen(messages):
            for batch in batches:
                executor.step(batch)
        sent = sum(amount.bytes for amount in messages.by(lambda place: place.axis, in_step).values())
        return {
            "state": {owner: memory.now[owner] for owner in STATE if memory.now.get(owner)},
            "gathered": memory.largest.get(owners.GATHERED, 0),
            "whole": memory.largest.get(owners.WHOLE, 0),
            "peak": memory.peak,
            "sent": round(sent / SETTLED),
        }

    return max(LocalWorld(ranks).run(main), key=lambda found: sum(found["state"].values()))


def all_bytes() -> dict[str, Any]:
    """By name, `dp 4, zero 3` and `dp 4, zero 3, 4 micro-batches`."""
    text, found = corpus.load(), {}
    for ranks in page.RANKS:
        for zero in STAGES:
            found[page.name(ranks, zero)] = bytes_of(ranks, zero, text=text)
    for zero in STAGES:
        found[page.name(page.SENT_ON, zero, 4)] = bytes_of(page.SENT_ON, zero, 4, text)
    return found


def times_of(size: str, rounds: int, stretch: float) -> dict[str, Any]:
    """Two ranks with each stage, by turns: what `take_turns` gives."""
    tasks = {f"zero {zero}": task(SIZES[size], ranks=2)._replace(zero=zero) for zero in STAGES}
    with on_cores(2), alive(*(("mpitrain", work, {}) for work in tasks.values())) as started:
        turns = {name: Turn(processes) for name, processes in zip(tasks, started, strict=True)}
        same = [(name, "zero 0") for name in tasks if name != "zero 0"]
        return take_turns(turns, rounds=rounds, stretch=stretch, same=same, watch=True)


def load(path: Path) -> Result:
    """What is kept, or nothing yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, found: Mapping[str, Any]) -> Result:
    """Put what was found in its place beside what is kept; the whole of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result = load(path)
    for part, of in found.items():
        result[part] = {**result.get(part, {}), **of}
    draft = path.with_suffix(".unfinished")
    draft.write_text(page.text_of(result))
    draft.replace(path)
    return result


def main() -> int:
    """Measure, keep, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("bytes", "times"), help="one of the two")
    parser.add_argument("--rounds", type=int, default=7, help="of times (default 7)")
    parser.add_argument("--stretch", type=float, default=3.0, help="seconds of a turn (default 3)")
    parser.add_argument("--result", type=Path, default=RESULT, help=f"where figures are kept (default {RESULT})")
    parser.add_argument("--show", action="store_true", help="print what is kept and measure nothing")
    parser.add_argument("--write-docs", action="store_true", help="write the page's figures and picture")
    options = parser.parse_args()
    if options.show or options.write_docs:
        result = load(options.result) or load(page.KEPT)
        print("\n".join(page.lines(result)))
        for path in page.write(result) if options.write_docs else ():
            print(f"written {path}")
        return 0
    about = machine.describe()
    print(machine.headline(about), flush=True)
    if options.only != "times":
        keep(options.result, {"about": {"bytes": about}, "bytes": all_bytes()})
    for size in SIZES if options.only != "bytes" else ():
        times = times_of(size, options.rounds, options.stretch)
        keep(options.result, {"about": {"times": about}, "times": {size: times}})
    print("\n".join(page.lines(load(options.result))), f"kept in {options.result}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

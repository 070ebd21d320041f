"""What encoding saved activations does to a training run: bytes that wait, accuracy, loss, time.

    python benchmarks/gist.py                             all of it: about a quarter of an hour on an idle machine
    python benchmarks/gist.py --only digits bytes         these parts: digits, gpt, bytes, time
    python benchmarks/gist.py --show                      measure nothing, print what is kept
    python benchmarks/gist.py --write-docs                figures and picture of docs/explanation/gist.md

digits: the network of `examples/11_digits_cnn.py` learns scikit-learn's digits, once for each encoding and seed.  gpt:
the default model of `examples/train_gpt.py`.  bytes: what waits for the backward of one batch of either, by what
keeps it.  time: processor time of a step with an encoding, as a ratio to that without; steps of all kinds take turns,
and the least time of each counts, so that what else runs on the machine matters little.

What is measured is kept in benchmarks/results/gist.json.
"""

from __future__ import annotations

import mpitrain  # noqa: F401 - before NumPy

# isort: split
import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gist_page
import machine
import numpy as np

from mpitrain.autograd.ops.convolution import Conv2d
from mpitrain.autograd.ops.elementwise import Relu
from mpitrain.autograd.ops.fused import Linear
from mpitrain.autograd.ops.pooling import MaxPool2d
from mpitrain.autograd.tape import Tape
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data import corpus
from mpitrain.data.digits import digits
from mpitrain.data.images import Images
from mpitrain.data.tokens import Tokens
from mpitrain.memory.gist import Gist
from mpitrain.models.cnn import CNN, accuracy
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW, Optimizer, Sgd
from mpitrain.optim.lr import cosine
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

RESULT = machine.RESULTS / "gist.json"
KINDS: dict[str, Gist | None] = {
    "none": None,
    "lossless": Gist(),
    "16 bits": Gist(16),
    "10 bits": Gist(10),
    "8 bits": Gist(8),
}
PARTS = ("digits", "gpt", "bytes", "time")
BATCH, PEAK, EPOCHS, SEEDS = 64, 0.1, 16, 5  # of the digits, as in the example
GPT_SIZES = GPTConfig(vocab=256, layers=2, width=128, heads=4, seq_len=64)
GPT_BATCH, GPT_STEPS, GPT_SEEDS, GPT_PEAK = 16, 500, 2, 2.5e-3

Found = dict[str, Any]


def executor_of(model: Any, kind: str, lr: Callable[[int], float]) -> Executor:
    """What trains a model on one rank, with an encoding."""
    optimizer: Optimizer = AdamW(model.parameters(), lr=1e-3)
    if isinstance(model, CNN):
        optimizer = Sgd(model.parameters(), lr=PEAK, momentum=0.9, weight_decay=1e-3)
    rows = complete("1f1b", ranks=1, microbatches=1)
    return Executor(model, optimizer, model_mesh(), rows, lr=lr, policy=KINDS[kind])


def rates(steps: int, warmup: int, peak: float) -> Callable[[int], float]:
    """Learning rates by number of updates."""
    return lambda update: cosine(update, steps, warmup, peak)


def model_mesh() -> Mesh:
    return Mesh(world())


def cnn(seed: int) -> CNN:
    return CNN(model_mesh(), (8, 8, 1), ((16, 32), (64,)), 10, seed=seed)


def gpt(seed: int) -> GPT:
    return GPT(GPT_SIZES, model_mesh(), seed=seed)


def of_digits(small: bool) -> Found:
    """kind -> accuracy and loss of the test images, and loss of the first step, seed by seed."""
    found: Found = {}
    for seed in range(1 if small else SEEDS):
        images = digits(seed)
        per_epoch = images.order(BATCH).steps_per_epoch
        total = 2 if small else EPOCHS * per_epoch
        for kind in KINDS:
            model = cnn(seed)
            executor = executor_of(model, kind, rates(total, per_epoch, PEAK))
            first, *_ = [executor.step(batch) for batch in images.batches(BATCH, stop_step=total)]
            loss, right = accuracy(executor, images.test(256))
            of = found.setdefault(kind, {"accuracy": [], "loss": [], "first": []})
            for name, value in (("accuracy", right), ("loss", loss), ("first", first)):
                of[name].append(value)
            print(f"digits, seed {seed}, {kind}: {right:.2%}", flush=True)
    return found


def of_gpt(small: bool) -> Found:
    """kind -> mean of the last 50 training losses, validation loss, and loss of the first step, seed by seed."""
    found: Found = {}
    steps = 2 if small else GPT_STEPS
    for seed in range(1, 2 if small else 1 + GPT_SEEDS):
        tokens = Tokens(corpus.load(None), GPT_SIZES.seq_len, seed=seed)
        for kind in KINDS:
            executor = executor_of(gpt(seed), kind, rates(steps, 15, GPT_PEAK))
            losses = [executor.step(batch) for batch in tokens.batches(GPT_BATCH, stop_step=steps)]
            validation = executor.evaluate(list(tokens.validation(32))[: 4 if small else 32])
            of = found.setdefault(kind, {"training": [], "validation": [], "first": []})
            for name, value in (("training", statistics.fmean(losses[-50:])), ("validation", validation)):
                of[name].append(value)
            of["first"].append(losses[0])
            print(f"gpt, seed {seed}, {kind}: validation loss {validation:.4f}", flush=True)
    return found


def of_bytes(small: bool) -> Found:
    """model -> kind -> what keeps it -> bytes that wait, of one batch of a model that has learned for some steps."""
    found: Found = {}
    images = digits(0)
    tokens = Tokens(corpus.load(None), GPT_SIZES.seq_len, seed=1)
    steps = 1 if small else 100
    for name, model, batches, peak in (
        ("digits", cnn(0), images.batches(BATCH), 1e-2),
        ("gpt", gpt(1), tokens.batches(GPT_BATCH), 1e-3),
    ):
        executor = executor_of(model, "none", rates(steps, 1, peak))
        for _ in range(steps):
            executor.step(next(batches))
        batch = next(batches)
        for kind, policy in KINDS.items():
            with Tape(policy) as tape:
                model(batch)
            found.setdefault(name, {})[kind] = by_keeper(tape)
            assert sum(found[name][kind].values()) == tape.nbytes
    return found


PRODUCTS = "inputs of products"
KEEPERS = {Conv2d: PRODUCTS, Linear: PRODUCTS, Relu: "relu before a pool", MaxPool2d: "maxima of pools"}


def by_keeper(tape: Tape) -> dict[str, int]:
    """Bytes by the op that keeps them; an array of several under the first of `KEEPERS` that holds it."""
    names = list(dict.fromkeys(KEEPERS.values()))
    owner: dict[int, tuple[str, int]] = {}
    weights = {id(base(p.data)) for p, *_ in tape._weights}
    for node in tape.nodes:
        name = KEEPERS.get(node.function, node.function.title())
        for array in node.held(tape.policy is not None):
            whole = base(array)
            if not hasattr(whole, "nbytes") or id(whole) in weights:
                continue
            known = owner.get(id(whole))
            if known is None or rank(names, name) < rank(names, known[0]):
                owner[id(whole)] = name, whole.nbytes
    found: dict[str, int] = {}
    for name, nbytes in owner.values():
        found[name] = found.get(name, 0) + nbytes
    return found


def rank(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


def base(array: Any) -> Any:
    """The array that owns the memory of a view."""
    while hasattr(getattr(array, "base", None), "nbytes"):
        array = array.base
    return array


def of_time(small: bool) -> Found:
    """model -> kind -> least processor time of a step over that without encoding."""
    found: Found = {}
    wide = Images(*_drawn((16, 32, 32, 3)), *_drawn((1, 32, 32, 3)))
    models: dict[str, tuple[Callable[[], Any], Any]] = {
        "digits": (lambda: cnn(0), digits(0).batch_at(0, BATCH)),
        "images of 32 x 32": (
            lambda: CNN(model_mesh(), (32, 32, 3), ((32, 32), (64, 64)), 10),
            wide.batch_at(0, 16),
        ),
        "gpt": (lambda: gpt(1), Tokens(corpus.load(None), GPT_SIZES.seq_len, seed=1).batch_at(0, GPT_BATCH)),
    }
    rounds = 2 if small else 25
    for name, (made, batch) in models.items():
        executors = {kind: executor_of(made(), kind, lambda _: 1e-3) for kind in KINDS}
        least = dict.fromkeys(KINDS, float("inf"))
        for number in range(rounds):
            for kind, executor in executors.items():
                start = time.process_time()
                executor.step(batch)
                if number:
                    least[kind] = min(least[kind], time.process_time() - start)
        found[name] = {kind: least[kind] / least["none"] for kind in KINDS}
        print(f"time, {name}: {', '.join(f'{kind} {ratio:.2f}' for kind, ratio in found[name].items())}", flush=True)
    return found


def _drawn(shape: tuple[int, ...]) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.standard_normal(shape).astype(np.float32), random.integers(10, size=shape[0])


MEASURED: dict[str, Callable[[bool], Found]] = {
    "digits": of_digits,
    "gpt": of_gpt,
    "bytes": of_bytes,
    "time": of_time,
}


def main() -> int:
    """Measure, keep, print; the exit code is 1 if a promise of the page does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="some steps of each, to try this script")
    parser.add_argument("--result", type=Path, default=RESULT, help=f"where figures are kept (default {RESULT})")
    parser.add_argument("--show", action="store_true", help="print what is kept and measure nothing")
    parser.add_argument("--write-docs", action="store_true", help="write the page's figures and picture")
    options = parser.parse_args()
    result = json.loads(options.result.read_text()) if options.result.exists() else {}
    if options.show or options.write_docs:
        result = result or json.loads(gist_page.KEPT.read_text())
        print("\n".join(gist_page.lines(result)))
        for path in gist_page.write(result) if options.write_docs else ():
            print(f"written {path}")
        return 0
    about = machine.describe()
    print(machine.headline(about), flush=True)
    for part in options.only or PARTS:
        result[part] = MEASURED[part](options.small)
        result["about"] = about
        options.result.parent.mkdir(parents=True, exist_ok=True)
        options.result.write_text(gist_page.text_of(result))
    print("\n".join(gist_page.lines(result)), f"kept in {options.result}", sep="\n")
    return int(not options.small and not gist_page.holds(result))


if __name__ == "__main__":
    sys.exit(main())

"""Where the time of a training step goes, by kind of work.

    python benchmarks/step_split.py --rounds 5 --size S

A listener to the events of ops and actions, and wrappers around what sends none (NumPy's matrix product, the writing of
gradients, clipping, the optimizer), keep a stack of what has begun: each moment belongs to the innermost of them.
Watched and unwatched steps take turns, so that what watching costs is known: the share outside products is that of an
unwatched step.

Products inside attention go through NumPy in its readable version and are seen; a compiled attention hides its own.
They are then credited at the speed that the step's other products reach, which is as fast as they can be: so the share
outside products is never made too small.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from sides import BETAS, CLIP, LR, SEED, SIZES, WEIGHT_DECAY, Task

# isort: split
import numpy as np

from mpitrain import kernels
from mpitrain.autograd.lazy import Lazy
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data import corpus
from mpitrain.data.tokens import Batch, Tokens
from mpitrain.events import Event, listen
from mpitrain.models.families import build
from mpitrain.models.sizes import DecoderConfig
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import AdamW
from mpitrain.pipeline import executor as executors
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

STRETCH_S = 1.5

FORWARD, BACKWARD, WEIGHTS = "products forward", "products backward", "products for weights"
ATTENTION_PRODUCTS = "products in attention"
OPS = {
    "attention": "attention",
    "gelu": "GELU",
    "swiglu": "SwiGLU",
    "rotary": "rotary positions",
    "norm": "norms",
    "entropy": "loss",
    "dropout": "dropout",
    "take": "embedding",
    "residual": "residual and bias",
    "add": "residual and bias",
    "linear": "residual and bias",
    "copy": "messages",
    "reduce": "messages",
    "gather": "messages",
}
"""Part of an op's name -> kind; the first that fits."""

ACTIONS = {"F": "tape, Python", "B": "tape, Python", "REDUCE": "messages", "STEP": "clipping"}


class Watch:
    """Seconds by kind; a moment belongs to the innermost thing that has begun and not ended."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self._stack = ["rest"]
        self._op = ""  # the last that began
        self._since = time.perf_counter()

    def begin(self, kind: str) -> None:
        self._charge()
        self._stack.append(kind)

    def end(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def listener(self, event: Event) -> None:
        """Ops, actions and messages."""
        if event.phase == "end":
            self.end()
        elif event.kind == "op":
            self.begin(kind_of_op(event.name))
            self._op = event.name
        elif event.kind == "action":
            self.begin(ACTIONS.get(event.info["action"].kind, "rest"))
        else:
            self.begin("messages")

    def product(self, matmul: Callable[..., Any]) -> Callable[..., Any]:
        """NumPy's product of matrices; one with a vector is a sum of rows, and no product here."""

        def watched(a: Any, b: Any, **how: Any) -> Any:
            if min(a.ndim, b.ndim) < 2:
                return matmul(a, b, **how)
            kind = BACKWARD if self._op.endswith(".backward") else FORWARD
            self.begin({"attention": ATTENTION_PRODUCTS, "gradients": WEIGHTS}.get(self._stack[-1], kind))
            try:
                return matmul(a, b, **how)
            finally:
                self.flops[self._stack[-1]] += 2 * a.size * b.shape[-1]
                self.end()

        return watched

    def around(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """A function whose own time is of this kind."""

        def watched(*args: Any, **how: Any) -> Any:
            self.begin(kind)
            try:
                return function(*args, **how)
            finally:
                self.end()

        return watched


def kind_of_op(name: str) -> str:
    """`layer_norm.backward` is one of the norms."""
    return next((kind for part, kind in OPS.items() if part in name), "other ops")


@contextlib.contextmanager
def watching(executor: executors.Executor) -> Iterator[Watch]:
    """Watch all that this process computes."""
    watch = Watch()
    accumulate = Parameter.accumulate

    def write(parameter: Parameter, grad: Any) -> None:
        watch.begin("gradients" if isinstance(grad, Lazy) else "tape, Python")
        try:
            accumulate(parameter, grad)
        finally:
            watch.end()

    with (
        mock.patch.object(np, "matmul", watch.product(np.matmul)),
        mock.patch.object(Parameter, "accumulate", write),
        mock.patch.object(executor.optimizer, "step", watch.around(executor.optimizer.step, "AdamW")),
        listen(watch.listener),
    ):
        yield watch


class Training:
    """The training of a size on one rank, as `sides.py` has it."""

    def __init__(self, size: str) -> None:
        task = Task(**SIZES[size], ranks=1, dropout=0.0, dtype="float32")
        self.batch, self.config = task.batch, task.config
        self.tokens = Tokens(corpus.load(), self.config.seq_len, SEED)
        mesh = Mesh(world())
        model = build(self.config, mesh, seed=SEED)
        optimizer = AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
        self.executor = executors.Executor(model, optimizer, mesh, with_update(one_stage(1)), clip=CLIP)
        self.done = 0

    def batches(self, steps: int) -> list[Batch]:
        self.done += steps
        return [self.tokens.batch_at(self.done + i, self.batch) for i in range(steps)]

    def plain(self, steps: int) -> float:
        """Seconds of a step that nobody watches."""
        batches = self.batches(steps)
        start = time.perf_counter()
        for batch in batches:
            self.executor.step(batch)
        return (time.perf_counter() - start) / steps

    def watched(self, steps: int) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds and flops of products of a step, by kind."""
        batches = self.batches(steps)
        with watching(self.executor) as watch:
            for batch in batches:
                self.executor.step(batch)
            watch.begin("")  # charges what came after the last event
        seconds, flops = ({kind: x / steps for kind, x in found.items()} for found in (watch.seconds, watch.flops))
        return seconds, flops


BLOCKS = {"baseline": 16, "x86-64-v3": 24, "x86-64-v4": 32}
"""Queries that a compiled attention takes at a time (csrc/attention.h); all of them see the keys of the last."""


def attention_flops(config: DecoderConfig, batch: int) -> float:
    """Of the products inside a compiled attention in one step: two forward, five backward.

    As with the products of NumPy's version, which are timed, those count that a block computes in vain.
    """
    s, d = config.seq_len, config.width
    ends = [min(start + BLOCKS[kernels.level()], s) for start in range(0, s, BLOCKS[kernels.level()])]
    seen = sum((end - start) * end for start, end in zip([0, *ends], ends, strict=False))
    return 7 * 2 * batch * config.layers * d * seen


def split(training: Training, steps: int) -> dict[str, Any]:
    """One round: milliseconds by kind, and the share of an unwatched step that lies outside products."""
    total, seconds, flops = 0.0, Counter[str](), Counter[str]()
    for _ in range(steps):  # in turn step by step, since a machine's speed drifts within seconds
        total += training.plain(1) / steps
        of_step, products = training.watched(1)
        seconds.update({kind: s / steps for kind, s in of_step.items()})
        flops.update({kind: n / steps for kind, n in products.items()})
    seen = sum(s for kind, s in seconds.items() if kind.startswith("products"))
    hidden = 0.0
    if ATTENTION_PRODUCTS not in seconds:
        hidden = attention_flops(training.config, training.batch) * seen / sum(flops.values())
        hidden = min(hidden, seconds["attention"])
        seconds["attention"] -= hidden
        seconds[ATTENTION_PRODUCTS] = hidden
    products = seen + hidden
    attention = seconds["attention"] + seconds[ATTENTION_PRODUCTS]
    return {
        "ms": {kind: 1e3 * s for kind, s in sorted(seconds.items(), key=lambda item: -item[1])},
        "outside": 1 - products / total,
        "outside_with_attention": 1 - (products - seconds[ATTENTION_PRODUCTS]) / total,
        "attention": attention / total,
        "products_gflops": 1e-9 * sum(flops.values()) / seen,
        "credited": hidden > 0,
        "plain_ms": 1e3 * total,
    }


def measure(size: str, rounds: int) -> dict[str, Any]:
    """Rounds of watched and unwatched steps."""
    training = Training(size)
    training.plain(3)
    steps = max(2, round(STRETCH_S / training.plain(2)))
    return {"size": size, "steps": steps, "rounds": [split(training, steps) for _ in range(rounds)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=SIZES, default="S")
    options = parser.parse_args()
    print(json.dumps(measure(options.size, options.rounds)))


if __name__ == "__main__":
    main()

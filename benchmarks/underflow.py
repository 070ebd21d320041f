"""Gradients that a half cannot hold: every gradient of three steps of a training run, by its exponent.

    python benchmarks/underflow.py

Three trainings with the same settings on the same batches: in float32, in float16 without a scale, and in float16 with
the scale of the loss that is usual.  In some of their steps a listener looks at each gradient element by element:

    of activations    what backward of each op is given, in the dtype in which it is stored (but for collectives, which
                      on one rank hand on what they get)
    of weights        what the optimizer finds

Of float32 a histogram of the exponents says which share float16 would lose; of float16 the zeros say what is lost.

Source: Micikevicius et al. 2017, arXiv:1710.03740, figure 3 (there of SSD, activation gradients of all layers).
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import mpitrain  # noqa: F401 - before NumPy (mpitrain/blas.py)

# isort: split
import numpy as np

from mpitrain.assemble import build_executor, build_model, build_optimizer, read_corpus
from mpitrain.autograd.lazy import Lazy
from mpitrain.collectives import ARROWS
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config import Config
from mpitrain.data.tokens import Tokens
from mpitrain.events import Event, listen

RUNS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float16, no scale": {"dtype": "float16", "loss_scaling": "none"},
    "float16": {"dtype": "float16"},
}
STEPS = (1, 100, 300)
SMALL: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "seq_len": 16, "batch": 4}
SMALL_STEPS = (1, 3)
LEAST, MOST = -60, 15
"""Exponents outside are counted with the last one inside."""


class Gradients:
    """A listener that counts the gradients of one step.

    Args:
        parameters: of the model.

    Attributes:
        exponents: "activations" | "weights" -> floor(log2 |g|) of what is not 0 -> how many.
        counts: the same two -> elements, zeros among them.
        ops: op, module without the number of its layer, dtype -> elements, zeros: of what its backward is given.
    """

    def __init__(self, parameters: list[Any]) -> None:
        self.exponents: dict[str, Counter[int]] = {"activations": Counter(), "weights": Counter()}
        self.counts = {kind: [0, 0] for kind in self.exponents}
        self.ops: dict[str, list[int]] = {}
        self._parameters = parameters

    def __call__(self, event: Event) -> None:
        if event.phase != "begin":
            return
        if event.kind == "op" and "grad" in event.info and event.info["function"] not in ARROWS:
            module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", event.info["path"])
            for grad in _arrays(event.info["grad"]):
                of_op = self.ops.setdefault(f"{event.name.removesuffix('.backward')} {module} {grad.dtype}", [0, 0])
                self._count("activations", grad, of_op)
        elif event.kind == "action" and event.info["action"].kind == "STEP":
            for p in self._parameters:
                self._count("weights", p.grad)

    def _count(self, kind: str, grad: np.ndarray, *also: list[int]) -> None:
        values = np.abs(grad[grad != 0].astype(np.float64))
        exponents = np.clip(np.frexp(values)[1] - 1, LEAST, MOST)
        for exponent, number in zip(*np.unique(exponents, return_counts=True), strict=True):
            self.exponents[kind][int(exponent)] += int(number)
        for counts in (self.counts[kind], *also):
            counts[0] += grad.size
            counts[1] += grad.size - values.size

    def found(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            **{kind: {"elements": n, "zeros": zeros} for kind, (n, zeros) in self.counts.items()},
            "exponents": {kind: {str(e): of[e] for e in sorted(of)} for kind, of in self.exponents.items()},
            "ops": dict(sorted(self.ops.items(), key=lambda item: -item[1][0])),
        }


def _arrays(grad: Any) -> Iterator[np.ndarray]:
    for part in grad if type(grad) is tuple else (grad,):
        if part is not None:
            yield part.array() if isinstance(part, Lazy) else part


def train(settings: dict[str, Any], steps: tuple[int, ...]) -> dict[str, Any]:
    """One training; step -> what its gradients were."""
    config = Config(steps=steps[-1], **settings)
    mesh = Mesh(world())
    corpus = read_corpus(config, mesh.world)
    model = build_model(config, corpus, mesh)
    executor = build_executor(config, model, build_optimizer(config, model, mesh), mesh, steps[-1])
    found = {}
    batches = Tokens(corpus, config.seq_len, config.seed).batches(config.batch, 0, 1, 0, steps[-1])
    for step, batch in enumerate(batches, start=1):
        if step not in steps:
            executor.step(batch)
            continue
        gradients = Gradients(model.parameters())
        with listen(gradients):
            loss = executor.step(batch)
        found[str(step)] = {"loss": loss, **gradients.found()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="three steps of a tiny model, to try this script")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="these alone")
    options = parser.parse_args()
    more, steps = (SMALL, SMALL_STEPS) if options.small else ({}, STEPS)
    print(json.dumps({"steps": steps, "runs": {name: train({**RUNS[name], **more}, steps) for name in options.runs}}))


if __name__ == "__main__":
    main()

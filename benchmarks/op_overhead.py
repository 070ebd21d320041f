"""What an operation costs that has next to nothing to compute: forward and backward of a chain of 1000 on (8, 8).

    python benchmarks/op_overhead.py --rounds 5

mpitrain's tape beside PyTorch's eager mode, float32, one thread, in this process and by turns.  The second operand is a
constant.  The values stay what they are (x + 0, x * 1, x I, gelu of large x), so nothing overflows or turns denormal.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from mpitrain.autograd import ops
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor

LENGTH = 1000
REPEATS = 5  # chains a round and side, of which the fastest counts: what is asked for is the cost without interruption

START = np.full((8, 8), 10, np.float32)
CONSTANTS = {
    "add": np.zeros((8, 8), np.float32),
    "mul": np.ones((8, 8), np.float32),
    "matmul": np.eye(8, dtype=np.float32),
    "gelu": np.empty((0, 0), np.float32),
}


def mine(op: str) -> Callable[[], np.ndarray]:
    """A chain under mpitrain; returns the gradient of its start."""
    constant = Tensor(CONSTANTS[op])
    x = Tensor(START, requires_grad=True)
    seed = np.ones_like(START)
    step: Callable[[Tensor], Tensor] = {
        "add": lambda y: y + constant,
        "mul": lambda y: y * constant,
        "matmul": lambda y: y @ constant,
        "gelu": ops.gelu_tanh,
    }[op]

    def run() -> np.ndarray:
        with Tape() as tape:
            y = x
            for _ in range(LENGTH):
                y = step(y)
        return tape.run_backward([(y, seed)])[x]

    return run


def peers(op: str) -> Callable[[], np.ndarray]:
    """The same chain under PyTorch."""
    constant = torch.from_numpy(CONSTANTS[op])
    x = torch.tensor(START, requires_grad=True)
    seed = torch.ones(8, 8)
    step: Callable[[torch.Tensor], torch.Tensor] = {
        "add": lambda y: y + constant,
        "mul": lambda y: y * constant,
        "matmul": lambda y: y @ constant,
        "gelu": lambda y: functional.gelu(y, approximate="tanh"),
    }[op]

    def run() -> np.ndarray:
        x.grad = None
        y = x
        for _ in range(LENGTH):
            y = step(y)
        y.backward(seed)
        assert x.grad is not None
        return x.grad.numpy()

    return run


def fastest(run: Callable[[], Any]) -> float:
    """Microseconds an operation, forward and backward."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times) / LENGTH


def measure(rounds: int) -> dict[str, Any]:
    """Microseconds an operation: op -> side -> one a round."""
    chains = {op: {"mpitrain": mine(op), "torch": peers(op)} for op in CONSTANTS}
    for op, sides in chains.items():
        np.testing.assert_allclose(sides["mpitrain"](), sides["torch"](), rtol=1e-3, err_msg=op)
    found: dict[str, dict[str, list[float]]] = {op: {side: [] for side in sides} for op, sides in chains.items()}
    for number in range(rounds):
        for op, sides in chains.items():
            for side in list(sides) if number % 2 == 0 else list(reversed(sides)):
                found[op][side].append(fastest(sides[side]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"ops": measure(options.rounds)}))


if __name__ == "__main__":
    main()

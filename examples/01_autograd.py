"""Lesson 1: the tape is a list, and backward reads it in reverse.

    python examples/01_autograd.py

A curve is fitted by hand, with nothing but a tape: forward is recorded, the tape is printed like a program, and
backward walks it node by node.  At the end the gradients are compared with central differences.  No rank, no message.
"""

from __future__ import annotations

import numpy as np

from mpitrain.autograd import Function, Tape, Tensor, ops
from mpitrain.events import Event, listen


class Sine(Function):
    """An op is two pure functions: forward returns a value and what backward needs, backward a gradient an input."""

    @staticmethod
    def forward(x):
        return np.sin(x), (x,)

    @staticmethod
    def backward(grad, x, *, wanted):
        return (grad * np.cos(x),)


def loss_of(weights: list[Tensor], x: np.ndarray, y: np.ndarray) -> Tensor:
    """Sum of squares of w2 . sin(w1 x + b1) - y."""
    w1, b1, w2 = weights
    error = Sine.apply(Tensor(x) @ w1 + b1) @ w2 - y
    return (error * error).sum()


def gradients(weights: list[Tensor], x: np.ndarray, y: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """The loss and its gradient: record forward on a tape, then walk the tape back from d loss / d loss = 1."""
    with Tape() as tape:
        loss = loss_of(weights, x, y)
    grads = tape.run_backward([(loss, np.ones(()))])
    return loss.item(), [grads[w] for w in weights]


def main() -> float:
    """Print the lesson; return the largest relative difference to central differences."""
    random = np.random.default_rng(1)
    x = np.linspace(-2, 2, 64)[:, None]
    y = np.abs(x)
    weights = [Tensor(random.normal(size=shape), requires_grad=True) for shape in ((1, 8), (8,), (8, 1))]

    with Tape() as tape:
        loss = loss_of(weights, x, y)
    print("The tape of one forward pass:\n")
    print(tape)
    print(f"\nIt keeps {tape.nbytes:,} bytes for backward.  Backward visits:\n")

    def show(event: Event) -> None:
        if event.phase == "end":
            print("   ", event.name)

    with listen(show):
        tape.run_backward([(loss, np.ones(()))])

    print("\nGradient descent:\n")
    for step in range(301):
        value, grads = gradients(weights, x, y)
        for w, g in zip(weights, grads, strict=True):
            w.data -= 0.002 * g
        if step % 100 == 0:
            print(f"    step {step:3d}  loss {value:8.4f}")

    # A derivative is a limit: compare with two nearby values of the loss, for every single weight.
    _, grads = gradients(weights, x, y)
    largest = max(float(np.abs(g).max()) for g in grads)
    difference = 0.0
    for w, g in zip(weights, grads, strict=True):
        for index in np.ndindex(w.shape):
            at, near = w.data[index], 1e-6
            w.data[index] = at + near
            above = loss_of(weights, x, y).item()
            w.data[index] = at - near
            below = loss_of(weights, x, y).item()
            w.data[index] = at
            difference = max(difference, abs((above - below) / (2 * near) - g[index]) / largest)
    print(f"\nlargest difference to central differences: {difference:.1e} of the largest gradient")

    gelu = ops.gelu_tanh(Tensor(np.array([-1.0, 0.0, 1.0])))
    print(f"without a tape nothing is recorded: gelu_tanh = {gelu.data.round(4)}, requires_grad {gelu.requires_grad}")
    assert difference < 1e-6, difference
    return difference


if __name__ == "__main__":
    main()

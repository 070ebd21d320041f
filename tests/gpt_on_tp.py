"""A small GPT on dp x tp ranks, and what happens while one micro-batch goes through it: messages, masks, memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from layers_on_tp import Message, messages, sent, whole

from mpitrain.autograd import Tape
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.events import Event, listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.parallel.data import FlatReducer
from mpitrain.rng import keep_mask

SIZES = GPTConfig(vocab=13, layers=2, width=24, heads=4, seq_len=12)
ROWS = 4  # of a global batch


class Found(NamedTuple):
    """What one pass gives on one rank."""

    loss: float
    grads: dict[str, np.ndarray]  # full tensors, after the one rule
    masks: dict[str, np.ndarray]  # by the path of the layer: True where dropout kept
    forward: Counter[Message]
    backward: Counter[Message]
    sent: int  # bytes, over tp
    kept: int  # bytes, for backward


def batch(mesh: Mesh, step: int = 0) -> Batch:
    """This rank's rows of a global batch: what stands in a row follows from the step and the row's place."""
    places = np.arange(mesh.dp.rank, ROWS, mesh.dp.size)
    rows = [np.random.default_rng((step, place)).integers(SIZES.vocab, size=SIZES.seq_len + 1) for place in places]
    windows = np.array(rows, np.int64)
    return Batch(windows[:, :-1], windows[:, 1:], places, np.arange(SIZES.seq_len), step)


def run(
    *, dp: int = 1, tp: int = 1, sp: bool = False, step: int = 0, dtype: Any = np.float64, **sizes: Any
) -> list[Found]:
    """One forward and backward pass of a fresh model, on dp x tp ranks: what each finds."""

    def main() -> Found:
        mesh = Mesh(world(), dp=dp, tp=tp)
        model = GPT(replace(SIZES, **sizes), mesh, sequence_parallel=sp, seed=3, dtype=dtype)
        return pass_of(model, mesh, batch(mesh, step))

    return LocalWorld(dp * tp).run(main)


def pass_of(model: GPT, mesh: Mesh, rows: Batch) -> Found:
    """Forward and backward of one micro-batch, on this rank."""
    model.start_step()
    before = sent(mesh.tp)
    forward: list[Message] = []
    backward: list[Message] = []
    masks: dict[str, np.ndarray] = {}
    with listen(messages(forward)), listen(_masks(masks)), Tape() as tape:
        loss = model(rows)
    kept = tape.nbytes
    with listen(messages(backward)):
        tape.run_backward([(loss, np.ones_like(loss.data))])
    bytes_sent = sent(mesh.tp) - before
    FlatReducer(model.flats, mesh).finish()
    grads = whole(mesh, model.parameters(), [p.grad for p in model.parameters()])
    return Found(loss.item(), grads, masks, Counter(forward), Counter(backward), bytes_sent, kept)


def _masks(into: dict[str, np.ndarray]) -> Any:
    """A listener that sees in the values which elements dropout kept; of attention, in the rows that it was given."""

    def hear(event: Event) -> None:
        if (event.kind, event.phase) != ("op", "end"):
            return
        info = event.info
        inputs, output = info["inputs"], info["output"]
        name = f"{info['path']} {event.name}"
        if event.name == "dropout":
            into[name] = output != 0
        elif event.name in ("residual", "residual_norm"):
            stream = output if event.name == "residual" else output[0]
            into[name] = stream != inputs[0]  # where the branch was dropped, the sum is the stream itself
        elif event.name == "attention" and info["static"]["drop"]:
            into[name] = keep_mask(inputs[2], inputs[0].shape[1], info["static"]["drop"])

    return hear

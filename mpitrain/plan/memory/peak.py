"""How much of it is alive at once: the micro-batches in flight of a schedule, and what a block is worth.

F of a stage adds what its nodes keep.  B frees all of it, or where a schedule parts the two halves what gradients of
inputs need; W frees the inputs of products.  So the peak follows from the row of a rank, without running it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpitrain.memory.recompute import Segment
from mpitrain.models.sizes import DecoderConfig
from mpitrain.pipeline.action import Action, Row
from mpitrain.plan.memory import paper
from mpitrain.plan.memory.activations import block, embedding, freed, head, inputs, inside, of_stage, total
from mpitrain.plan.memory.experts import entry_of_mlp
from mpitrain.plan.memory.saved import Saved, W
from mpitrain.plan.traffic.step import Step
from mpitrain.plan.traffic.way_back import way_back

QKV = "input of qkv"


class BlockBytes(NamedTuple):
    """What one block and one micro-batch keep for backward.

    kept: by all its nodes; input: where the block is made again as a whole; again: what exists besides while it is, the
    nodes of its second forward.
    """

    kept: int
    input: int
    again: int


def predicted_block_bytes(
    config: DecoderConfig,
    *,
    rows: int,
    dtype: Any = np.float32,
    tp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
    cp_attention: str = "ring",
    recompute: str = "selective",
) -> BlockBytes:
    """What one block is worth to whoever chooses which blocks run twice; no mesh and no message is needed.

    Args:
        config: sizes of the model.
        rows: sequences of a micro-batch.
        dtype: of the activations.
        tp, cp, sequence_parallel, cp_attention: the layout.
        recompute: whether a block that is kept keeps its attention scores (none) or not (selective; also for full).

    Raises:
        ConfigError: sizes do not divide.
    """
    keeping = "none" if recompute == "none" else "selective"
    step = Step(
        config, rows, 1, dtype, tp=tp, cp=cp, sequence_parallel=sequence_parallel, cp_attention=cp_attention,
        recompute=keeping,
    )  # fmt: skip
    kept, entry = total(inside(step, 0, 0)), total(inputs(step, 0, 0))
    return BlockBytes(kept, entry, kept - entry)


def block_table(step: Step, number: int | None = None) -> list[tuple[str, int, int]]:
    """The tensors of one block and micro-batch: (name, our bytes, the paper's at as many bytes a number).

    Args:
        step: the sizes and the layout.
        number: of the block; the first one on this rank that keeps anything unless given.
    """
    if number is None:
        here = sorted(step.numbers, key=lambda number: not way_back(step).blocks[number].leaves)
        number = here[0] if here else 0
    ours: dict[str, int] = {}
    for saved in block(step, number, 0):
        ours[saved.name] = ours.get(saved.name, 0) + saved.nbytes
    recompute = "full" if step.is_recomputed(number) else step.recompute
    theirs = paper.tensors(step, step.beta, recompute)
    return [(name, ours.get(name, 0), theirs.get(name, 0)) for name in [*ours, *(n for n in theirs if n not in ours)]]


def peak(step: Step, row: Row) -> int:
    """The largest number of bytes that this rank's tapes hold at the end of an action.

    Args:
        step: the sizes and the layout.
        row: this rank's actions (`pipeline.passes.complete`).
    """
    split = {action.stage for action in row if action.kind == "W"}
    saved = _Books(step)
    now = most = 0
    for action in row:
        if action.kind == "F":
            now += total(saved.of(action))
            most = max(most, now)
        elif action.kind in ("B", "W"):
            now -= total(freed(action.kind, saved.of(action), saved.after(action), action.stage in split))
    assert now == 0, now
    return most


class _Books:
    """What each pass of a row keeps, made once for those that are alike.

    Args:
        step: the sizes and the layout.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._kept: dict[tuple[int, int, int], list[Saved]] = {}

    def of(self, action: Action, later: int = 0) -> list[Saved]:
        """What the pass of an action keeps, or that of a slice which comes so much later."""
        key = action.stage, (action.part or 0) + later, micro_of(self._step, action)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = of_stage(self._step, *key)
        return found

    def after(self, action: Action) -> list[Saved]:
        """What the next slice of the same micro-batch keeps; nothing after the last one."""
        return self.of(action, 1) if (action.part or 0) + 1 < len(self._step.lengths) else []


def micro_of(step: Step, action: Action) -> int:
    """The micro-batch of an action, where it matters: 0 for all, unless it is known what each sends to experts."""
    return 0 if step.expert_rows is None else action.micro or 0


def scratch(step: Step, row: Row) -> int:
    """The most bytes that the tapes of second forwards hold, beside the inputs that were kept.

    They are made one after the other, as backward comes to them.  Where a schedule parts backward, each leaves behind
    what W needs of it.

    Args:
        step: the sizes and the layout.
        row: this rank's actions.
    """
    split = {action.stage for action in row if action.kind == "W"}
    now = most = 0
    for action in row:
        part = action.part or 0
        if action.kind not in ("B", "W"):
            continue
        for number in reversed(step.blocks_of(action.stage)):
            for whole, late in _again(step, number, part, micro_of(step, action)):
                if action.kind == "W":
                    now -= late
                    continue
                most = max(most, now + whole)
                now += late if action.stage in split else 0
    return most


def peak_with_scratch(step: Step, row: Row) -> int:
    """The most bytes that this rank's tapes hold at once, those of second forwards among them.

    While backward is at a block that is made again, what it has passed is free.  Where a schedule parts backward it is
    counted as if it were not, for W still needs some of it.

    Args:
        step: the sizes and the layout.
        row: this rank's actions.
    """
    split = {action.stage for action in row if action.kind == "W"}
    saved = _Books(step)
    now = most = left = 0
    for action in row:
        stage, part, micro = action.stage, action.part or 0, micro_of(step, action)
        if action.kind == "F":
            now += total(saved.of(action))
            most = max(most, now + left)
        if action.kind not in ("B", "W"):
            continue
        behind = total(head(step, part)) if stage == step.last_stage and stage not in split else 0
        for number in reversed(step.blocks_of(stage)):
            for whole, late in _again(step, number, part, micro):
                if action.kind == "W":
                    left -= late
                    continue
                most = max(most, now - behind + left + whole)
                left += late if stage in split else 0
            if stage not in split:
                behind += total(block(step, number, part, micro))
        now -= total(freed(action.kind, saved.of(action), saved.after(action), stage in split))
    return most


def _again(step: Step, number: int, part: int, micro: int) -> list[tuple[int, int]]:
    """Of each part of a block that runs twice: (bytes that its second forward keeps, those of them that W frees)."""
    nodes = [*inside(step, number, part, micro)]
    if step.is_recomputed(number):
        again = [(nodes, "input of norm1")]
    else:
        whole = [*inside(replace(step, recomputed=frozenset()), number, part, micro)]
        again = [
            ([s for s in whole if s.path.startswith(f"blocks.{number}.{branch}")], entry)
            for branch, entry in (("mlp", _mlp_entry(step, number)), ("attention", "" if step.is_cut else QKV))
            if step.is_recomputed(number, branch)
        ]  # as backward meets them
    # What is there already is not made again; but where it waits rounded, that is made of it.
    news = [[s for s in of if s.name != entry or s.bits is not None] for of, entry in again]
    return [(total(new), total(new, W)) for new in news]


def _mlp_entry(step: Step, number: int) -> str:
    """The array of a second branch that is there before it is made again; '' where it is made of another one first."""
    routing = step.sizes.routing
    if routing is not None and step.sizes.has_experts(number):
        return "" if routing.jitter else "input of router"
    return "" if step.is_cut else f"input of {entry_of_mlp(step, number)}"


def segments_of(step: Step, stage: int) -> list[Segment]:
    """A stage as `memory.recompute.choose` takes it: its blocks, whole or made again, and what is not made again.

    Args:
        step: the sizes and the layout; which parts it says are made again does not count.
        stage: one of `step.stages`.
    """
    step = replace(step, recomputed=frozenset())
    found = [
        Segment(f"blocks.{number}", total(inside(step, number, 0)), total(inputs(step, number, 0)))
        for number in step.blocks_of(stage)
    ]
    if stage == 0:
        found.insert(0, Segment("embedding", total(embedding(step, 0))))
    if stage == step.last_stage:
        found.append(Segment("head", total(head(step, 0))))
    return found

"""What ZeRO sends instead of one sum of gradients: they go to the ranks that keep their rows, and weights come back.

    stage 1      (n-1)/n (beta + beta) Psi       gradients once a step, weights once after the update
    stage 2      (n-1)/n (m beta + beta) Psi     gradients in each of m micro-batches
    stage 3      (n-1)/n 3 m beta Psi            weights as well, once forwards and once backwards

An all-reduce sends 2 (n-1)/n beta Psi, so stage 1 is as much, and stage 2 where m is 1.  n are the ranks over which a
parameter's gradient is summed (slabs.py), m counts walks: micro-batches, and slices of each.  What two parts of a model
use, as a tied table on one stage, comes for each.  Halves travel as halves.  Frozen weights have no gradients and come
back from no update; where nothing goes backward through a part, its weights come once, forwards.

Gradients leave in buckets of at least `Step.bucket_bytes`, from the last parameter to the first; weights that come for
a part of the model (the table, positions, a block, the last norm, the head) in a message for each run of neighbours in
a flat buffer, which holds the parameters of the same axes and dtype.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpitrain.plan.traffic.lines import Line
from mpitrain.plan.traffic.slabs import ATOMS, Slab, all_buffers, all_slabs, beta_of, buffers, merged
from mpitrain.plan.traffic.step import Step
from mpitrain.plan.traffic.way_back import way_back


def dealt_out(step: Step) -> Iterator[Line]:
    """The messages of gradients and weights that are cut."""
    walks = step.passes if step.zero >= 2 else 1
    for of in buffers(step):
        n, _ = merged(step, ATOMS[of[0].axes])
        for bucket in _buckets(step, of):
            nbytes = beta_of(step, of[0]) * sum(slab.size for slab in bucket)
            times = len(_walks_of(step, bucket[0])) if step.zero >= 2 else 1
            yield Line(of[0].axes, "gradients", "reduce_scatter", n, times * walks, nbytes)
            if step.zero < 3:
                yield Line(of[0].axes, "weights", "all_gather", n, 1, nbytes)
    for name, part in (each for parts in named_units(step).values() for each in parts) if step.zero == 3 else ():
        times = 1 + way_back(step).parts[name]
        for of in part:
            n, _ = merged(step, ATOMS[of[0].axes])
            nbytes = beta_of(step, of[0]) * sum(slab.size for slab in of)
            yield Line(of[0].axes, "weights", "all_gather", n, times * step.passes, nbytes)


def units(step: Step) -> dict[int, list[list[list[Slab]]]]:
    """stage -> of each part that works for itself, in their order, the parameters that come in each message.

    Those that one rank has for itself do not come.
    """
    return {stage: [part for _, part in parts] for stage, parts in named_units(step).items()}


def named_units(step: Step) -> dict[int, list[tuple[str, list[list[Slab]]]]]:
    """The same with the name of each part."""
    found: dict[int, list[tuple[str, list[list[Slab]]]]] = {}
    cut = [buffer for buffer in all_buffers(step) if merged(step, ATOMS[buffer[0].axes])[0] > 1]
    for stage in step.stages:
        parts: dict[str, set[str]] = {}
        for slab in all_slabs(step):
            if _stage_of(step, part_of(slab)) == stage:
                parts.setdefault(part_of(slab), set()).add(slab.name)
        if stage == step.last_stage and step.sizes.tied:
            parts["head"] = {"table.weight"}
        come = [
            (part, [message for message in ([s for s in buffer if s.name in names] for buffer in cut) if message])
            for part, names in parts.items()
        ]
        found[stage] = [(part, of) for part, of in come if of]
    return found


def part_of(slab: Slab) -> str:
    """The part of the model that a parameter is in: `table`, `positions`, `blocks.3`, `norm`, `head`."""
    words = slab.name.split(".")
    return ".".join(words[:2]) if words[0] == "blocks" else words[0]


def _stage_of(step: Step, part: str) -> int:
    if part.startswith("blocks."):
        number = int(part.partition(".")[2])
        return next(stage for stage in step.stages if number in step.blocks_of(stage))
    ends = {"table": 0 if step.is_first else -1, "positions": 0}
    return ends.get(part, step.last_stage)


def _buckets(step: Step, of: Sequence[Slab]) -> Iterator[list[Slab]]:
    """The parameters of each message of a buffer's gradients."""
    bucket: list[Slab] = []
    for slab in reversed(of):
        if bucket and step.zero >= 2 and _walks_of(step, slab) != _walks_of(step, bucket[0]):
            yield bucket
            bucket = []
        bucket.append(slab)
        if sum(each.size for each in bucket) * beta_of(step, slab) >= step.bucket_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _walks_of(step: Step, slab: Slab) -> tuple[int, ...]:
    """The stages of this rank whose walks back end in a gradient of it."""
    if slab.name == "table.weight":
        return tuple(stage for stage in step.stages if stage == 0 or (step.sizes.tied and stage == step.last_stage))
    return (_stage_of(step, part_of(slab)),)

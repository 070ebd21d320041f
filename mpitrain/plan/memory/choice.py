"""Which blocks are recomputed so that a budget is kept: chosen before the first step, from the settings alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mpitrain.errors import ConfigError
from mpitrain.memory.recompute import MIB, choose
from mpitrain.pipeline.action import Row
from mpitrain.pipeline.check import Checked
from mpitrain.plan.memory.peak import peak_with_scratch, segments_of
from mpitrain.plan.traffic import Step


def recomputed_blocks(step: Step, row: Row, checked: Checked, budget: int) -> frozenset[str]:
    """The fewest blocks of this rank that must be made again for its activations to fit.

    The choice is made as if the stages of the rank were one (`memory.recompute.choose`), and then held against the
    peak of the row; where stages, slices or the halves of backward make that higher, more blocks follow.

    Args:
        step: sizes and layout; parts that it says are made again are so besides.
        row: this rank's actions.
        checked: of the rows of all ranks.
        budget: bytes that tapes may hold at once.

    Experts are counted with the most tokens that they have room for.

    Returns:
        Names of blocks.

    Raises:
        ConfigError: they do not fit whatever is recomputed.
    """
    step = step.at_most()
    segments = [segment for stage in step.stages for segment in segments_of(step, stage)]
    blocks = [segment.name for segment in segments if segment.recomputed is not None]
    units = len(step.stages) * len(step.lengths)  # of which a micro-batch is made here
    in_flight = max(1, checked.peaks[step.pp_rank] // units)  # at the least: more blocks may follow, none need go
    try:
        chosen = {segments[number].name for number in choose(segments, budget, in_flight)}
    except ConfigError:
        chosen = set(blocks)  # what is exact decides
    others = (name for name in blocks if name not in chosen)
    while (needed := _bytes(step, row, chosen)) > budget:
        following = next(others, None)
        if following is None:
            raise ConfigError(
                f"--recompute-budget {_asked(budget)}: rank {step.pp_rank} of pp needs {needed / MIB:,.2f} MiB for its"
                f" activations with all of its {len(blocks)} blocks made again, {_bytes(step, row, ()) / MIB:,.2f} MiB"
                " with none.\nTake more --microbatches, more ranks of --tp, --cp or --pp, or a larger budget."
            )
        chosen.add(following)
    return frozenset(chosen)


def _asked(budget: int) -> str:
    """The shortest number of MiB that is so many bytes: what was asked for."""
    texts = (f"{budget / MIB:.{digits}g}" for digits in range(1, 18))
    return next(f"{float(text):.15g}" for text in texts if round(float(text) * MIB) == budget)


def _bytes(step: Step, row: Row, recomputed: Iterable[str]) -> int:
    """The most that tapes hold, those of second forwards among them, with parts that are made again anyway."""
    return peak_with_scratch(replace(step, recomputed=frozenset(recomputed) | (step.recomputed or frozenset())), row)

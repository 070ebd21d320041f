"""Which blocks are recomputed so that a budget is kept: chosen before the first step, from the settings alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mpitrain.errors import ConfigError
from mpitrain.memory.recompute import MIB, choose
from mpitrain.pipeline.action import Row
from mpitrain.pipeline.check import Checked
from mpitrain.plan.memory.peak import peak, scratch, segments_of
from mpitrain.plan.traffic import Step


def recomputed_blocks(step: Step, row: Row, checked: Checked, budget: int) -> frozenset[str]:
    """The fewest blocks of this rank that must be made again for its activations to fit.

    The choice is made as if the stages of the rank were one (`memory.recompute.choose`), and then held against the
    exact peak of the row; where stages, slices or the halves of backward make that higher, more blocks follow.

    Args:
        step: sizes and layout; which parts it says are made again does not count.
        row: this rank's actions.
        checked: of the rows of all ranks.
        budget: bytes that tapes may hold at once.

    Returns:
        Names of blocks.

    Raises:
        ConfigError: they do not fit whatever is recomputed.
    """
    segments = [segment for stage in step.stages for segment in segments_of(step, stage)]
    units = len(step.stages) * len(step.lengths)  # of which a micro-batch is made here
    in_flight = max(1, -(-checked.peaks[step.pp_rank] // units))
    chosen = {segments[number].name for number in choose(segments, budget, in_flight)}
    others = (segment.name for segment in segments if segment.recomputed is not None and segment.name not in chosen)
    while _bytes(step, row, chosen) > budget:
        following = next(others, None)
        if following is None:
            raise ConfigError(
                f"with every block recomputed the activations of rank {step.pp_rank} of pp take"
                f" {_bytes(step, row, chosen) / MIB:,.2f} MiB, more than the budget of {budget / MIB:,.2f} MiB.\n"
                "Take more --microbatches, more ranks of --tp, --cp or --pp, or a larger --recompute-budget."
            )
        chosen.add(following)
    return frozenset(chosen)


def _bytes(step: Step, row: Row, recomputed: Iterable[str]) -> int:
    """The most that tapes hold, those of second forwards among them."""
    trial = replace(step, recomputed=frozenset(recomputed))
    return peak(trial, row) + scratch(trial, row)

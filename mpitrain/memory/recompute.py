"""Which segments of a model are recomputed, so that what waits for backward fits into a budget.

A stage is a row of segments.  Each keeps so many bytes for backward if it is whole, and fewer, those of its inputs, if
it is recomputed (mpitrain.autograd.recompute).  Backward walks them from the last to the first; what it has passed is
free, and a recomputed segment is whole again while the walk is in it:

    waits  |        __                      three whole segments: the peak is where forward ends
           |     __|  |__
           |  __|        |__
           |_|______________|___ time

           |           _                    all recomputed: the last one, whole again, beside the inputs of the others
           |    ___ __| |
           |___|        |_|_|___

So an early segment is cheaper to recompute than a late one of the same size: less waits beside it by then.  The choice
is exact, and a function of the sizes alone: every rank that knows them comes to the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from mpitrain.errors import ConfigError

MIB = 2**20


class Segment(NamedTuple):
    """A part of a stage.

    Attributes:
        name: for errors.
        whole: bytes that wait for backward if it is not recomputed, its inputs among them.
        recomputed: bytes that wait if it is; None: it cannot be.
    """

    name: str
    whole: int
    recomputed: int | None = None


def peak(segments: Sequence[Segment], chosen: Collection[int], in_flight: int = 1) -> int:
    """The most bytes that wait at once.

    Args:
        segments: of the stage, in the order of forward.
        chosen: numbers of those that are recomputed.
        in_flight: micro-batches that are between forward and backward when the stage goes back.
    """
    waiting = [_waits(segment, number in chosen) for number, segment in enumerate(segments)]
    others = (in_flight - 1) * sum(waiting)
    within = [sum(waiting[:number]) + segments[number].whole for number in chosen]
    return others + max(sum(waiting), *within, 0)


def choose(segments: Sequence[Segment], budget: int, in_flight: int = 1) -> tuple[int, ...]:
    """The fewest segments that must be recomputed for a stage to fit.

    Args:
        segments: of the stage, in the order of forward.
        budget: bytes that may wait at once.
        in_flight: as for `peak`.

    Returns:
        Their numbers, ascending.  Of several choices that are as few, the one with the lowest peak; of those the first.

    Raises:
        ConfigError: it does not fit whatever is recomputed.
    """
    total = sum(segment.whole for segment in segments)
    for states in _choices(segments):
        lowest, chosen = min((state.peak(total, in_flight), state.chosen) for state in states)
        if lowest <= budget:
            return chosen
    everything = [number for number, segment in enumerate(segments) if segment.recomputed is not None]
    least, largest = peak(segments, everything, in_flight), max(segments, key=lambda segment: segment.whole)
    raise ConfigError(
        f"{in_flight} micro-batch{'es' * (in_flight != 1)} in flight need {least / MIB:,.2f} MiB for activations with"
        f" {len(everything)} of {len(segments)} segments recomputed, more than the budget of {budget / MIB:,.2f} MiB"
        f" ({peak(segments, (), in_flight) / MIB:,.2f} MiB with none).\n"
        f"The largest segment, {largest.name}, takes {largest.whole / MIB:,.2f} MiB alone."
        "  Take smaller micro-batches, more ranks of tp, cp or pp, or a larger budget."
    )


class _State(NamedTuple):
    """A choice among the first segments: bytes that it saves, the most that wait in a recomputed one, its numbers."""

    saved: int
    within: int
    chosen: tuple[int, ...]

    def peak(self, total: int, in_flight: int) -> int:
        """As the function, given what waits with nothing recomputed."""
        waiting = total - self.saved
        return (in_flight - 1) * waiting + max(waiting, self.within)


def _choices(segments: Sequence[Segment]) -> list[list[_State]]:
    """For each number of segments the choices that no other one of that many beats in both: saving more, peaking lower.

    Among segments of one size a single choice is left of each number.
    """
    best: list[list[_State]] = [[_State(0, 0, ())]]
    before = 0
    for number, segment in enumerate(segments):
        if segment.recomputed is not None:
            best.append([])
            for count in range(len(best) - 1, 0, -1):
                taking = [
                    _State(
                        state.saved + segment.whole - segment.recomputed,
                        max(state.within, before - state.saved + segment.whole),
                        (*state.chosen, number),
                    )
                    for state in best[count - 1]
                ]
                best[count] = _unbeaten([*best[count], *taking])
        before += segment.whole
    return best


def _unbeaten(states: list[_State]) -> list[_State]:
    """Without those that save no more than another one and peak no lower."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: (-state.saved, state.within, state.chosen)):
        if not kept or state.within < kept[-1].within:
            kept.append(state)
    return kept


def _waits(segment: Segment, recomputed: bool) -> int:
    if not recomputed:
        return segment.whole
    assert segment.recomputed is not None, f"{segment.name} cannot be recomputed"
    return segment.recomputed


def best_checkpoints(layers: int, inner: float, inputs: float) -> tuple[int, float]:
    """Into how many segments to part equal layers that are all recomputed, for the least memory.

    Args:
        layers: N of them.
        inner: A_int, what a layer keeps inside.
        inputs: A_in, what a segment keeps of its inputs; in the unit of `inner`.

    Returns:
        c, and the memory c A_in + ceil(N / c) A_int: the inputs of all segments, and the layers of one.  Over real
        numbers it is least at c = sqrt(N A_int / A_in), where it grows with the square root of N.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.2.
    """
    if layers < 1:
        raise ConfigError(f"{layers} layers cannot be parted into segments")
    found = [(c, c * inputs + -(-layers // c) * inner) for c in range(1, layers + 1)]
    return min(found, key=lambda each: (each[1], each[0]))

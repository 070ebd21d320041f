"""In which order the work of a step is done: pure generators of compute order.

A schedule says only F, B and W; messages, gradient sums and the update come from `mpitrain.pipeline.passes`.  Stage q
is on rank q mod p.  Every generator works for one rank, and for fewer micro-batches than ranks.

The order is all that the schedules differ in: `simulate` says what it costs in idle time and in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import Action, Schedule


def one_stage(num_microbatches: int) -> Schedule:
    """Gradient accumulation: the pipeline of one stage.

        F0 B0 F1 B1 F2 B2 ...

    At most one micro-batch is in flight, so activation memory does not grow with their number.
    """
    return one_f_one_b(1, num_microbatches)


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, last micro-batch first.

        s0| F0 F1 F2  .  .  .  . B2 B1 B0
        s1|  . F0 F1 F2  .  . B2 B1 B0  .
        s2|  .  . F0 F1 F2 B2 B1 B0  .  .      (drawn as if a B took no longer than an F)

    Idle (p-1)(T_F + T_B) on every rank; all m micro-batches are in flight at once.

    Paper: Huang et al. 2018, arXiv:1811.06965.
    """
    _at_least_one(num_ranks, num_microbatches)
    micros = range(num_microbatches)
    return [
        [Action("F", micro, rank) for micro in micros] + [Action("B", micro, rank) for micro in reversed(micros)]
        for rank in range(num_ranks)
    ]


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm up with F, then alternate F and B, then drain with B.

        s0| F0 F1 F2  .  . B0 F3 B1  . B2  . B3
        s1|  . F0 F1  . B0 F2 B1 F3 B2  . B3  .
        s2|  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .

    As long as `gpipe`; but rank i holds at most p - i micro-batches, however many there are.

    Paper: Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (there: PipeDream-Flush).
    """
    _at_least_one(num_ranks, num_microbatches)
    rows = []
    for rank in range(num_ranks):
        warm = min(num_ranks - 1 - rank, num_microbatches)
        row = [Action("F", micro, rank) for micro in range(warm)]
        for micro in range(num_microbatches - warm):
            row += Action("F", warm + micro, rank), Action("B", micro, rank)
        rows.append(row + [Action("B", micro, rank) for micro in range(num_microbatches - warm, num_microbatches)])
    return rows


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B over `num_chunks` thinner stages a rank: rank i has the stages i, p + i, 2p + i, ...

    Every rank takes p micro-batches through its first chunk, the same p through its second, and so on, then the next p;
    backward in the same order with the chunks reversed.  Idle time is that of 1F1B divided by the number of chunks, and
    there are as many times more messages.  One chunk is 1F1B.

    Raises:
        ScheduleError: the micro-batches do not divide into groups of p.

    Paper: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    _at_least_one(num_ranks, num_microbatches)
    if num_chunks < 1:
        raise ScheduleError(f"a rank needs at least 1 chunk, not {num_chunks}")
    if num_chunks == 1:
        return one_f_one_b(num_ranks, num_microbatches)
    p, m, v = num_ranks, num_microbatches, num_chunks
    if m % p:
        fitting = f"{m - m % p} or {m - m % p + p}" if m > p else f"{p}"
        raise ScheduleError(
            f"interleaved takes micro-batches in groups of as many as there are ranks: {m} do not divide by {p}.\n"
            f"Way out: {fitting} micro-batches, 1 chunk, or schedule 1f1b."
        )
    total = m * v

    def action(kind: str, k: int, rank: int) -> Action:
        """The k-th F, or the k-th B, of a rank."""
        group, rest = divmod(k, p * v)
        chunk = rest // p
        if kind == "B":
            chunk = v - 1 - chunk
        return Action(kind, group * p + rest % p, chunk * p + rank)

    rows = []
    for rank in range(p):
        warm = min(2 * (p - rank - 1) + (v - 1) * p, total)
        row = [action("F", k, rank) for k in range(warm)]
        for k in range(total - warm):
            row += action("F", warm + k, rank), action("B", k, rank)
        rows.append(row + [action("B", k, rank) for k in range(total - warm, total)])
    return rows


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B whose backward is split: B makes gradients of inputs, W those of weights, later.

        s0| F0 F1 F2  .  . B0 W0 F3 B1 W1 B2 W2 B3 W3
        s1|  . F0 F1  . B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        s2|  .  . F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    Only B makes other ranks wait, so W fills what would be idle: (p-1)(T_F + T_B - T_W) is left of 1F1B's
    (p-1)(T_F + T_B + T_W).  As many micro-batches are in flight; rank i keeps what W needs of i more.

    Paper: Qi et al. 2023, arXiv:2401.10241, section 2.
    """
    _at_least_one(num_ranks, num_microbatches)
    rows = []
    for rank in range(num_ranks):
        warm = min(num_ranks - 1 - rank, num_microbatches)
        order = "F" * warm
        pairs = min(rank, num_microbatches - warm)
        order += "FB" * pairs
        order += "FBW" * (num_microbatches - warm - pairs)
        order += "BW" * (num_microbatches - order.count("B"))
        order += "W" * (num_microbatches - order.count("W"))
        micros = {kind: iter(range(num_microbatches)) for kind in "FBW"}
        rows.append([Action(kind, next(micros[kind]), rank) for kind in order])
    return rows


def pipedream(num_ranks: int, num_batches: int) -> Schedule:
    """1F1B that goes on over all batches: it fills once and drains once, and no rank waits for an update.

    Every stage updates its own weights after each backward, so F uses newer weights than the F of an earlier stage
    did: this changes the mathematics.  `mpitrain.pipeline.versions` says which version is used where.

    Paper: Harlap et al. 2018, arXiv:1806.03377.
    """
    return one_f_one_b(num_ranks, num_batches)


def pipedream_2bw(num_ranks: int, num_microbatches: int, num_batches: int) -> Schedule:
    """PipeDream with two versions of the weights: all stages use, for a batch, the version before the newest.

    Micro-batches are numbered through: batch k has those from k m to k m + m - 1.  All gradients are those of weights
    that are one update old: this changes the mathematics, but alike on every stage.

    Raises:
        ScheduleError: fewer micro-batches a batch than ranks: the version would not be there when it is needed.

    Paper: Narayanan et al. 2020, arXiv:2006.09503, section 3.1.
    """
    _at_least_one(num_ranks, num_microbatches, num_batches)
    if num_microbatches < num_ranks:
        raise ScheduleError(
            f"pipedream-2bw needs at least as many micro-batches as ranks: {num_microbatches} for {num_ranks} ranks.\n"
            f"Way out: {num_ranks} micro-batches or more, fewer ranks, or schedule 1f1b."
        )
    return one_f_one_b(num_ranks, num_microbatches * num_batches)


def terapipe(num_ranks: int, num_microbatches: int, num_slices: int) -> Schedule:
    """GPipe over slices of the sequences: ranks work on different tokens of the same sequence.

        s0| F0.0 F0.1 F1.0 F1.1   .    .  B1.1 B1.0 B0.1 B0.0
        s1|   .  F0.0 F0.1 F1.0 F1.1 B1.1 B1.0 B0.1 B0.0   .

    A slice attends to the keys and values of the slices before it, so these go first, and backward is exactly the
    reverse.  Idle (p-1)(T_F + T_B) with the times of one slice.  One slice is GPipe.

    Paper: Li et al. 2021, arXiv:2102.07988, section 3.
    """
    if num_slices < 1:
        raise ScheduleError(f"a sequence has at least 1 slice, not {num_slices}")
    if num_slices == 1:
        return gpipe(num_ranks, num_microbatches)
    _at_least_one(num_ranks, num_microbatches)
    units = [(micro, part) for micro in range(num_microbatches) for part in range(num_slices)]
    return [
        [Action("F", micro, rank, part) for micro, part in units]
        + [Action("B", micro, rank, part) for micro, part in reversed(units)]
        for rank in range(num_ranks)
    ]


@dataclass(frozen=True)
class Kind:
    """What there is to know of a schedule by name.

    name: as it is asked for; meaning: half a line; paper: its source; versions: which version of its weights the F of
    a micro-batch uses: "newest" of its stage, "previous" (one update old on every stage), or None where all
    micro-batches of a step use the same; chunked, sliced: whether it takes several chunks a rank, or slices.
    """

    name: str
    meaning: str
    paper: str
    versions: str | None = None
    chunked: bool = False
    sliced: bool = False


DEFAULT_CHUNKS = 2
"""Stages of a rank, where a schedule has several."""

SCHEDULES: Mapping[str, Kind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind("gpipe", "all forwards, then all backwards", "arXiv:1811.06965"),
            Kind("1f1b", "forwards and backwards in turn: no longer, but less in memory", "arXiv:2104.04473"),
            Kind(
                "interleaved", "1f1b with several chunks of layers a rank: less idle", "arXiv:2104.04473", chunked=True
            ),
            Kind("zb-h1", "1f1b with gradients of weights put off: less idle", "arXiv:2401.10241"),
            Kind("pipedream", "never drains, each stage updates by itself", "arXiv:1806.03377", versions="newest"),
            Kind("pipedream-2bw", "never drains, weights one update old", "arXiv:2006.09503", versions="previous"),
            Kind("terapipe", "gpipe over slices of the sequences", "arXiv:2102.07988", sliced=True),
        )
    }
)
"""The schedules by name."""


def compute_rows(
    name: str, *, ranks: int, microbatches: int, chunks: int | None = None, slices: int = 1, batches: int = 1
) -> Schedule:
    """The compute order of the schedule with a name.

    Args:
        name: one of `SCHEDULES`.
        ranks: of the pipeline.
        microbatches: of one batch.
        chunks: stages of a rank; None: 2 where a schedule has several, else 1.
        slices: of a sequence.
        batches: how many the row covers; more than one only where the schedule does not drain after each.

    Raises:
        ScheduleError: no such schedule, or one that does not take what it was given.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule is named {name!r}; there are {', '.join(SCHEDULES)}")
    kind = SCHEDULES[name]
    _at_least_one(ranks, microbatches, batches)
    if chunks is None:
        chunks = DEFAULT_CHUNKS if kind.chunked and ranks > 1 else 1
    if chunks != 1 and not kind.chunked:
        raise ScheduleError(f"{name} has one chunk of layers a rank, not {chunks}; several are for interleaved")
    if slices != 1 and not kind.sliced:
        raise ScheduleError(f"{name} does not cut sequences into {slices} slices; that is for terapipe")
    if batches != 1 and kind.versions is None:
        raise ScheduleError(f"{name} drains for every update: its rows are of 1 batch, not {batches}")
    match name:
        case "gpipe":
            return gpipe(ranks, microbatches)
        case "interleaved":
            return interleaved(ranks, microbatches, chunks)
        case "zb-h1":
            return zb_h1(ranks, microbatches)
        case "pipedream":
            return pipedream(ranks, microbatches * batches)
        case "pipedream-2bw":
            return pipedream_2bw(ranks, microbatches, batches)
        case "terapipe":
            return terapipe(ranks, microbatches, slices)
        case _:
            return one_f_one_b(ranks, microbatches)


def _at_least_one(ranks: int, microbatches: int, batches: int = 1) -> None:
    for number, what in (
        (ranks, "pipeline needs at least 1 rank"),
        (microbatches, "step needs at least 1 micro-batch"),
    ):
        if number < 1:
            raise ScheduleError(f"a {what}, not {number}")
    if batches < 1:
        raise ScheduleError(f"a schedule needs at least 1 batch, not {batches}")

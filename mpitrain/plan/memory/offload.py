"""What a rank still holds where some of its memory is offloaded, what moves, and the plan that keeps a budget.

                   here, at most                                         moved in a step (read and written)
    optimizer      three windows of what an update needs                 2 K psi, K bytes of state a weight
    activations    of each pass that is here distance + 2 groups         twice what tapes keep, without what is small
    parameters     1 + distance parts of the model, gradients of one     (2 m + 2) beta psi of weights,
                   bucket and of as many parts                           2 m beta' psi of gradients

psi are the weights of which a rank keeps the rows (state.py), m counts micro-batches and slices.

Source: Ren et al. 2021, ZeRO-Offload, arXiv:2101.06840, section 4; Rajbhandari et al. 2021, ZeRO-Infinity,
arXiv:2104.07857, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mpitrain.backend import is_half
from mpitrain.errors import ConfigError
from mpitrain.memory.offload import ALIGNED, LEAST
from mpitrain.models.sizes import DecoderConfig
from mpitrain.pipeline.action import Row, Schedule
from mpitrain.pipeline.check import check
from mpitrain.pipeline.passes import with_offload, without_backward
from mpitrain.plan.memory.activations import of_stage, total
from mpitrain.plan.memory.peak import peak, scratch
from mpitrain.plan.memory.saved import Saved
from mpitrain.plan.memory.state import model_state
from mpitrain.plan.traffic.slabs import Slab, all_slabs, beta_of, kept, shares, slabs
from mpitrain.plan.traffic.step import Step
from mpitrain.plan.traffic.way_back import trains_from, way_back
from mpitrain.plan.traffic.zero import part_of

OPTIMIZER, ACTIVATIONS, PARAMETERS = "optimizer", "activations", "parameters"
CHOICES: Sequence[frozenset[str]] = tuple(
    map(
        frozenset,
        (
            (),
            (OPTIMIZER,),
            (ACTIVATIONS,),
            (OPTIMIZER, ACTIVATIONS),
            (OPTIMIZER, PARAMETERS),
            (OPTIMIZER, ACTIVATIONS, PARAMETERS),
        ),
    )
)
"""What may be offloaded where only a budget is given: what moves less comes first."""

MOST_WINDOW, MOST_GROUP, MOST_PENDING = 2**20, 2**22, 2**24
"""Elements of a window, bytes of a group, bytes that wait to be written; halved until a budget is met."""
HALVINGS = 9
LEAST_GROUPS = LEAST_WINDOWS = 8
"""Into which what a pass keeps is parted at least, or nothing would leave before all is there; and an update."""
MIB = 2**20


class Plan(NamedTuple):
    """What is offloaded, in which pieces.

    what: some of optimizer, activations, parameters; window: elements of an update; group: bytes of saved arrays that
    leave together; distance: windows, groups, parts of the model, and actions that are fetched ahead; slots,
    slot_bytes: room for tapes; pending: bytes that may wait to be written; here: what -> bytes that are here at most.
    """

    what: frozenset[str]
    window: int
    group: int
    distance: int
    slots: int
    slot_bytes: int
    pending: int
    here: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes that are here at most."""
        return sum(self.here.values())


def plan(
    step: Step,
    rows: Schedule,
    what: Collection[str],
    distance: int = 1,
    halvings: int = 0,
    besides: Callable[[Step], int] = lambda step: 0,
) -> Plan:
    """What is here at most if some memory is offloaded.

    Args:
        step: the sizes and the layout, as this rank sees it.
        rows: the schedule, nothing of it offloaded.
        what: is offloaded.
        distance: how far ahead things are fetched.
        halvings: of the sizes of pieces.
        besides: bytes of gradients that a rank keeps from one step to the next.
    """
    what = frozenset(what)
    if PARAMETERS in what:
        step = replace(step, zero=3)
    window, group, pending = (most >> halvings for most in (MOST_WINDOW, MOST_GROUP, MOST_PENDING))
    lowest = trains_from(step)
    rows = without_backward(rows, lowest)
    state, row = model_state(step), rows[step.pp_rank]
    moved = check(with_offload(rows, distance), lowest)
    slots = max(1, moved.peaks[step.pp_rank]) if ACTIVATIONS in what else 0
    slot_bytes = max(_slot_bytes(kept) for kept in _passes(step)) if ACTIVATIONS in what else 0
    if ACTIVATIONS in what:
        group = min(group, max(LEAST, slot_bytes // LEAST_GROUPS))
    if what & {OPTIMIZER, PARAMETERS}:
        window = max(1, min(window, -(-sum(slab.size for slab in shares(step)) // LEAST_WINDOWS)))
    here = {"weights": state.weights, "masters": state.masters, "gradients": state.gradients}
    here["optimizer state"] = state.optimizer
    here["constants"] = state.constants
    here["pending gradients"] = besides(step)
    if OPTIMIZER in what or PARAMETERS in what:
        here["masters"] = 0
    if OPTIMIZER in what:
        here["optimizer state"] = 0
    if PARAMETERS in what:
        parts = [*parts_of(step)]
        here["weights"] = _most_of(step, parts, distance, is_wide=False)
        here["gradients"] = _gradients_here(step, parts, distance)
    passes = max(1, moved.here[step.pp_rank])
    here["activations"] = peak(step, row) + scratch(step, row)
    if ACTIVATIONS in what:
        here["activations"] = min(here["activations"], _activations_here(step, row, passes, group, distance, slots))
    if what:
        update = (2 + distance) * window * _bytes_of_update(step, what) if what - {ACTIVATIONS} else 0
        pending = min(pending, slots * slot_bytes + update)
        here["on their way"] = pending + update
    named = {name: nbytes for name, nbytes in here.items() if nbytes}
    return Plan(what, window, group, distance, slots, slot_bytes, pending, named)


def within(
    step: Step,
    rows: Schedule,
    budget: int,
    choices: Sequence[Collection[str]] = CHOICES,
    distance: int = 1,
    most: Callable[[int], int] = int,
    besides: Callable[[Step], int] = lambda step: 0,
    allowed: Sequence[str] = (OPTIMIZER, ACTIVATIONS, PARAMETERS),
) -> Plan:
    """The first plan that keeps a budget, in the largest pieces; the worst rank's decides for all.

    Args:
        step, rows, distance, besides: as for `plan`.
        budget: bytes that a rank may hold of weights, gradients, optimizer state and activations.
        choices: of what may be offloaded, in the order in which they are tried.
        most: of the bytes here, what they are on the rank that has most.  Ranks of a pipeline are known from the
            settings; those that keep rows of the same weights may keep a row more or less, and ask each other.
        allowed: what the settings go together with, for the way out that an error says.

    Raises:
        ConfigError: the budget cannot be kept.
    """
    found: list[tuple[int, Plan]] = []
    for choice in choices:
        for halvings in range(HALVINGS if choice else 1):
            of_stages = [replace(step, pp_rank=rank) for rank in range(step.pp)]
            plans = [plan(each, rows, choice, distance, halvings, besides) for each in of_stages]
            worst = max(plans, key=lambda each: each.total)
            total = most(worst.total)
            if total <= budget:
                return _of_all(plans, worst)
            found.append((total, worst))
    needed, best = min(found, key=lambda each: each[0])
    held = ", ".join(f"{name} {nbytes / MIB:,.1f}" for name, nbytes in best.here.items())
    others = [name for name in allowed if name not in frozenset[str]().union(*choices)]
    more = f"Offload {' and '.join(others)} too, take" if others else "Take"
    raise ConfigError(
        f"--memory-budget {budget / MIB:,.1f}MiB cannot be kept: a rank needs {needed / MIB:,.1f} MiB with"
        f" {', '.join(sorted(best.what)) or 'nothing'} offloaded\n({held}).\n"
        f"{more} --recompute full, more --microbatches, more ranks of --tp or --pp (of --dp with --zero 3), or a larger"
        f" budget.{_of_words(step.sizes)}"
    )


def _of_words(sizes: DecoderConfig) -> str:
    """What to say where most weights are those of words."""
    tables = sizes.vocab * sizes.width * (1 if sizes.tied else 2)
    if 2 * tables <= sizes.num_parameters:
        return ""
    share = tables / sizes.num_parameters
    return f"\n{share:.0%} of the weights belong to the {sizes.vocab:,} words: give fewer, with --vocab or --tokenizer."


def _of_all(plans: Sequence[Plan], worst: Plan) -> Plan:
    """One plan for all ranks of a pipeline: sizes of pieces are those of the worst, room is enough for each."""
    return worst._replace(slots=max(each.slots for each in plans), slot_bytes=max(each.slot_bytes for each in plans))


def of_ranks(
    step: Step,
    rows: Schedule,
    what: Collection[str],
    distance: int = 1,
    besides: Callable[[Step], int] = lambda step: 0,
) -> Plan:
    """`plan` for all ranks of a pipeline: the worst one's."""
    plans = [plan(replace(step, pp_rank=rank), rows, what, distance, besides=besides) for rank in range(step.pp)]
    return _of_all(plans, max(plans, key=lambda each: each.total))


# -- parts of the model -----------------------------------------------------------------------------------------------


def parts_of(step: Step) -> Iterator[list[Slab]]:
    """The parameters of each part of the model here, in the order of forward; what two parts use is in both."""
    yield from named_parts(step).values()


def named_parts(step: Step) -> dict[str, list[Slab]]:
    """The same by the names of the parts."""
    parts: dict[str, list[Slab]] = {}
    for slab in all_slabs(step):
        parts.setdefault(part_of(slab), []).append(slab)
    if step.is_last and step.sizes.tied:
        table = parts["table"] if step.is_first else parts.pop("table")
        parts["head"] = [*parts.get("head", []), *table]
    return parts


def _most_of(step: Step, parts: Sequence[Sequence[Slab]], distance: int, is_wide: bool) -> int:
    """The most bytes of a part as a whole and of those that are fetched ahead of it, forwards or backwards."""
    sizes = [
        sum(step.beta_wide * s.size * (not s.frozen) if is_wide else beta_of(step, s) * s.size for s in part)
        for part in parts
    ]
    return max((sum(sizes[at : at + 1 + distance]) for at in range(len(sizes))), default=0)


def _gradients_here(step: Step, parts: Sequence[Sequence[Slab]], distance: int) -> int:
    """A bucket as it fills and as it leaves, and what parts take from the store to add to."""
    largest = max((step.beta_wide * slab.size for slab in slabs(step)), default=0)
    whole = sum(step.beta_wide * slab.size for slab in slabs(step))
    bucket = min(whole, step.bucket_bytes * step.beta_wide // step.beta + largest)
    return 2 * bucket + _most_of(step, parts, distance, is_wide=True)


# -- what waits for backward ------------------------------------------------------------------------------------------


def _passes(step: Step) -> Iterator[list[Saved]]:
    """What each kind of pass of this rank keeps."""
    for stage in step.stages:
        for part in range(len(step.lengths)):
            yield of_stage(step.at_most() if step.sizes.routing is not None else step, stage, part)


def _slot_bytes(kept: Sequence[Saved]) -> int:
    return sum(-(-saved.nbytes // ALIGNED) * ALIGNED for saved in kept if saved.nbytes >= LEAST)


def _activations_here(step: Step, row: Row, passes: int, group: int, distance: int, slots: int) -> int:
    """Groups of passes that are here, of all passes what is too small, and what passes between B and W hold for W.

    That are inputs of products and gradients of their outputs, together no more than a pass keeps in all.
    """
    kept = [*_passes(step)]
    largest = max((saved.nbytes for of_pass in kept for saved in of_pass), default=0)
    small = max(sum(saved.nbytes for saved in of_pass if saved.nbytes < LEAST) for of_pass in kept)
    late = max(total(of_pass) for of_pass in kept)
    between = most = 0
    for action in row:
        between += (action.kind == "B") - (action.kind == "W")
        most = max(most, between)
    split = any(action.kind == "W" for action in row)
    return passes * ((distance + 2) * (group + largest)) + slots * small + (most * late if split else 0)


def _bytes_of_update(step: Step, what: Collection[str]) -> int:
    """What an update fetches and writes of a weight."""
    half = is_half(step.dtype)
    state = _numbers_of_state(step) * step.beta_wide if OPTIMIZER in what else 0
    masters = step.beta_wide if half else 0
    whole = step.beta + masters + step.beta_wide if PARAMETERS in what else masters
    return state + whole


def _numbers_of_state(step: Step) -> int:
    return {"adamw": 2, "sgd": 1}.get(step.optimizer, 0)


# -- what moves -------------------------------------------------------------------------------------------------------


class Moves(NamedTuple):
    """Bytes of a step of this rank, from and to its store."""

    read: int
    written: int


def moves(step: Step, row: Row, what: Collection[str]) -> Moves:
    """What a step reads and writes of the optimizer's state and of parameters.

    Args:
        step: the sizes and the layout.
        row: this rank's actions.
        what: is offloaded.
    """
    if PARAMETERS in what:
        step = replace(step, zero=3)
    own = shares(step)
    psi, half = sum(slab.size for slab in own), is_half(step.dtype)
    weights = sum(beta_of(step, slab) * slab.size for slab in own)
    wide_bytes = step.beta_wide * psi
    halves = sum(slab.size for slab in own if not slab.is_wide) if half else 0
    read = written = 0
    if OPTIMIZER in what:
        read += _numbers_of_state(step) * wide_bytes
        written += _numbers_of_state(step) * wide_bytes
    if PARAMETERS in what:
        passes = sum(action.kind == "F" for action in row) // len(step.stages)
        sizes = {slab.name: beta_of(step, slab) * slab.size for slab in kept(step)}
        back = way_back(step).parts  # where nothing goes backward, weights are read forwards only
        of_parts = sum(sizes[s.name] * (1 + back[name]) for name, part in named_parts(step).items() for s in part)
        read += passes * of_parts + passes * wide_bytes + wide_bytes
        written += passes * wide_bytes + weights + (step.beta_wide * halves if half else 0)
    elif OPTIMIZER in what:
        read += step.beta_wide * halves
        written += step.beta_wide * halves
    return Moves(read, written)


def elsewhere(step: Step, found: Plan) -> int:
    """Bytes that a rank has in its store."""
    state = model_state(replace(step, zero=3) if PARAMETERS in found.what else step)
    parameters = state.weights + state.masters + state.gradients if PARAMETERS in found.what else 0
    masters = 0 if PARAMETERS in found.what else state.masters
    optimizer = state.optimizer + masters if OPTIMIZER in found.what else 0
    return parameters + optimizer + found.slots * found.slot_bytes

"""What `--memory` prints: who holds how many bytes on which rank, beside what the formula says, and beside the paper.

    memory after step 1, MiB        now   at peak   largest   predicted   least ... most
      weights                      1.79      1.79      1.79        1.79   1.79 rank 0 ... 1.79 rank 3
      activations                  0.00      4.20      4.20        4.20   ...

A block table follows: each tensor that a block keeps for backward, ours and the paper's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpitrain.assemble import build_rows
from mpitrain.config import Config
from mpitrain.debug import owners
from mpitrain.debug.columns import aligned
from mpitrain.debug.memory import MemoryLedger
from mpitrain.offloading import Elsewhere
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.pipeline.versions import live_versions
from mpitrain.plan.memory import block_table, gathered, model_state, paper, peak, scratch
from mpitrain.plan.memory.offload import ACTIVATIONS, OPTIMIZER, PARAMETERS
from mpitrain.plan.memory.offload import elsewhere as in_store
from mpitrain.plan.memory.pending import pending_gradients
from mpitrain.plan.traffic import Step

CORPUS = "corpus"
KEPT, AGAIN = "kept", "made again"
SUMS = ("total", "now"), ("peak", "at_peak")  # the sum over the owners of a column

OFFLOADED = {
    OPTIMIZER: (owners.MASTERS, owners.STATE),
    ACTIVATIONS: (owners.ACTIVATIONS, owners.SCRATCH),
    PARAMETERS: (owners.WEIGHTS, owners.MASTERS, owners.GRADIENTS, owners.GATHERED),
}
"""Whose bytes are in a store where this is offloaded, but for what is on its way."""

Found = Mapping[str, Any]
"""What one rank tells the others: now, at_peak, largest and predicted by owner, total, peak, inside, note, stored."""


def found_here(ledger: MemoryLedger, step: Step, config: Config, elsewhere: Elsewhere | None = None) -> Found:
    """What this rank holds, and what was predicted for it.

    Args:
        ledger: has heard it train.
        step: as the rank sees it.
        config: the settings.
        elsewhere: what it has in a store instead.
    """
    ledger.settle()
    offloaded = elsewhere is not None and bool(elsewhere.plan.what)
    return {
        "now": ledger.now,
        "at_peak": ledger.at_peak,
        "largest": ledger.largest,
        "predicted": predicted(step, config, elsewhere.plan.what if elsewhere is not None else ()),
        "total": ledger.total,
        "peak": ledger.peak,
        "inside": list(ledger.inside),
        "note": _of_experts(step),
        "stored": _stored(elsewhere) if elsewhere is not None and offloaded else None,
    }


def _stored(elsewhere: Elsewhere) -> tuple[int, int]:
    """Bytes of this rank's store, and what was predicted for it."""
    found = sum(region.nbytes for region in elsewhere.home.store.regions.values())
    return found, in_store(elsewhere.step, elsewhere.plan)


def predicted(step: Step, config: Config, offloaded: Collection[str] = ()) -> dict[str, int]:
    """By owner, for those of which a formula says something; nothing of those that are `offloaded`.

    What experts keep depends on the tokens that come to them.  With a capacity it is predicted for as many as there is
    room for: a bound.  Without one for as many as everywhere, which says nothing of a rank that is asked more.
    """
    step = _full(step)
    state = model_state(step, config.optimizer, config.momentum)
    rule = SCHEDULES[config.schedule_name].versions
    rows = build_rows(config, step.row)
    others = live_versions(rows, rule)[step.pp_rank] - 1 if rule else 0
    known = {
        owners.WEIGHTS: state.weights,
        owners.MASTERS: state.masters,
        owners.GRADIENTS: state.gradients,
        owners.STATE: state.optimizer,
        owners.CONSTANTS: state.constants,
        owners.VERSIONS: others * (state.weights - state.frozen),
        owners.ACTIVATIONS: peak(step, rows[step.pp_rank]),
        owners.SCRATCH: scratch(step, rows[step.pp_rank]),
        owners.GATHERED: gathered(step),
        owners.PENDING: pending_gradients(step, config),
    }
    gone = [owner for what in offloaded for owner in OFFLOADED[what]]
    return {owner: nbytes for owner, nbytes in known.items() if owner not in gone}


def _full(step: Step) -> Step:
    """With every place of experts taken, where they have so many and no more."""
    return step.at_most() if _is_bounded(step) else step


def _is_bounded(step: Step) -> bool:
    routing = step.sizes.routing
    return routing is not None and routing.capacity_factor is not None


def _of_experts(step: Step) -> str:
    """For how many tokens of experts activations are predicted; '' where there are no experts."""
    if step.sizes.routing is None:
        return ""
    return "with every place of its experts taken" if _is_bounded(step) else "for tokens spread evenly over experts"


def largest_of_ranks(found: Sequence[Found]) -> dict[str, int]:
    """owner -> the most that a rank had at its peak, and `all`: the largest peak."""
    names = [owner for owner in _owners(found) if any(each["at_peak"].get(owner) for each in found)]
    return {owner: max(each["at_peak"].get(owner, 0) for each in found) for owner in names} | {
        "all": max(each["peak"] for each in found)
    }


def table(found: Sequence[Found], when: str) -> str:
    """Owners of the rank that holds most, and where there are several ranks, least and most of all.

    Args:
        found: of all ranks, in their order.
        when: "after step 1".
    """
    most = max(range(len(found)), key=lambda rank: found[rank]["peak"])
    of = found[most]
    unit, name = (2**20, "MiB") if of["peak"] >= 2**20 else (2**10, "KiB")
    title = f"memory {when}, {name}" + (f", of rank {most}" if len(found) > 1 else "")
    heads = [title, "now", "at peak", "largest", "predicted"] + (["at peak, all ranks"] if len(found) > 1 else [])
    lines = [heads]
    for owner in _owners(found):
        cells = [_amount(of[column].get(owner, 0), unit) for column in ("now", "at_peak", "largest")]
        known = of["predicted"].get(owner)
        cells.append("" if known is None else _amount(known, unit))
        lines.append([f"  {owner}", *cells, *_span([each["at_peak"].get(owner, 0) for each in found], unit)])
    sums = [_amount(of["total"], unit), _amount(of["peak"], unit), "", ""]
    lines.append(["  all", *sums, *_span([each["peak"] for each in found], unit)])
    if of["at_peak"].get(CORPUS):
        sums[:2] = (_amount(of[sum_of] - of[column].get(CORPUS, 0), unit) for sum_of, column in SUMS)
        rest = [each["peak"] - each["at_peak"].get(CORPUS, 0) for each in found]
        lines.append(["  all without the corpus", *sums, *_span(rest, unit)])
    nbytes, op, path, total = of["inside"]
    if total:
        lines.append([f"  and inside of {op} {path}".rstrip(), "", _amount(nbytes, unit)])
    if of.get("stored"):
        here, foretold = of["stored"]
        lines.append(["  in the store", _amount(here, unit), "", "", _amount(foretold, unit)])
    note = f"\n  activations are predicted {of['note']}" if of["note"] else ""
    return aligned(lines, words=(0, 5)) + note


def of_blocks(step: Step) -> str:
    """What one block of each kind on this rank keeps of a micro-batch, in bytes: kept ones, and ones made again."""
    kinds: dict[str, list[int]] = {}
    step = _full(step)
    for number in step.numbers or [0]:
        kinds.setdefault(_kind(step, number), []).append(number)
    here = sum(map(len, kinds.values()))
    tables = []
    for kind, numbers in kinds.items():
        others = f", as {len(numbers) - 1} more of {here}" if len(numbers) > 1 else ""
        which = f"block {numbers[0]}, {kind}{others}," if len(kinds) > 1 else "a block"
        parts = f", {kind}" if len(kinds) == 1 and kind not in (KEPT, AGAIN) else ""
        tables.append(_of_a_block(step, numbers[0], which, parts))
    return "\n\n".join(tables)


def _kind(step: Step, number: int) -> str:
    made = _made_again(step, number)
    return f"{made}, with experts" if step.sizes.has_experts(number) else made


def _made_again(step: Step, number: int) -> str:
    if step.is_recomputed(number):
        return AGAIN
    parts = [part for part in ("attention", "mlp") if step.is_recomputed(number, part)]
    return f"its {' and '.join(parts)} {AGAIN}" if parts else KEPT


def _of_a_block(step: Step, number: int, which: str, parts: str) -> str:
    """The tensors of one block and micro-batch, ours and the paper's, in bytes."""
    way = "full" if step.is_recomputed(number) else step.recompute
    lines = [[f"{which} keeps of a micro-batch, bytes, {way}{parts}", "here", "paper", "more here"]]
    rows = block_table(step, number)
    for name, ours, theirs in rows:
        lines.append([f"  {name}", f"{ours:,}", f"{theirs:,}", f"{ours - theirs:+,}" if ours != theirs else "0"])
    here, there = sum(ours for _, ours, _ in rows), sum(theirs for _, _, theirs in rows)
    lines.append(["  all", f"{here:,}", f"{there:,}", f"{here - there:+,}" if here != there else "0"])
    like_it = replace(step, recompute=way)
    formula = "counted by its rule, as its block is a GPT's:" if step.sizes.is_gated else f"{paper.formula(like_it)} ="
    note = f"paper: {formula} {sum(paper.tensors(like_it).values()):,} bytes in 16 bits"
    note += f", {there:,} with the {step.beta} bytes a number of the column" if step.beta != 2 else ""
    masks = sum(theirs for name, _, theirs in rows if name.startswith("mask of "))
    note += "; masks of a byte" if masks else ""
    if step.sizes.has_experts(number):
        note += f"\n  here {_of_experts(step)}; the paper's block has an MLP instead"
    if masks and not step.sizes.dropout:
        note += f"\n  dropout is 0, so no mask is kept here; the paper's are {masks:,} bytes of its sum"
    return f"{aligned(lines, words=(0, 5))}\n  {note}"


def _owners(found: Sequence[Found]) -> list[str]:
    known = [owner for owner in owners.OWNERS if any(each["largest"].get(owner) for each in found)]
    return known + sorted({owner for each in found for owner in each["largest"]} - {*owners.OWNERS})


def _span(amounts: Sequence[int], unit: int) -> list[str]:
    """`1.20 rank 0 ... 3.40 rank 3`: the ranks with the least and the most; nothing where there is one rank."""
    if len(amounts) == 1:
        return []
    low, high = amounts.index(min(amounts)), amounts.index(max(amounts))
    if amounts[low] == amounts[high]:
        return ["the same"]
    return [f"{_amount(amounts[low], unit)} rank {low} ... {_amount(amounts[high], unit)} rank {high}"]


def _amount(nbytes: int, unit: int) -> str:
    return f"{nbytes / unit:,.2f}"

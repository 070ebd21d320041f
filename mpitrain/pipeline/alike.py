"""What ranks must be given alike, and a model and its executor: compared before the first step.

Ranks with other rows, or other parts that are made again, would wait for messages that nobody sends.  Ranks that update
in other ways, or whose model computes something else, would not wait: their weights would part, or their sums would mix
two models, and no message would tell.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.autograd.function import plain
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.nn.module import Module
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.scaler import BlockScaler, LossScaler, Scaler
from mpitrain.parallel.data import FlatReducer, Reducer
from mpitrain.parallel.zero import RowReducer


def scaler_of(model: Module, scaler: Scaler | None) -> Scaler | None:
    """The scaler that is asked for, that of the model's branches, or for float16 one of the loss.

    Raises:
        ConfigError: the model's branches have other scales than the executor would take off, or some are frozen.
    """
    if model.branch_scales is not None and any(p.frozen for p in model.parameters()):
        raise ConfigError(
            "the branches of the model have scales (BlockScaler), but some of its weights are frozen: a branch without"
            " gradients has nothing to find its scale by.\nTake LossScaler, or freeze nothing."
        )
    if scaler is None:
        scaler = model.branch_scales
    elif scaler is not model.branch_scales and (model.branch_scales is not None or isinstance(scaler, BlockScaler)):
        raise ConfigError(
            "the branches of the model and the executor must have one scaler: what the one puts on, the other takes"
            " off.\nMake one BlockScaler, give it to GPT(..., scales=...), and leave the executor's out."
        )
    return LossScaler() if scaler is None and model.like.dtype == np.float16 else scaler


def check_updates(model: Module, optimizer: Optimizer, versions: str | None) -> None:
    """Refuse an optimizer of something else than what this rank updates, and ZeRO where steps overlap.

    Raises:
        ConfigError: either, or a parameter was frozen too late or by half; the same on every rank.
    """
    odd = next((p for flat in model.flats for p in flat.parameters if p.frozen), None)
    if odd is not None:
        raise ConfigError(
            f"{odd.name}.requires_grad is False, but its place is among what is trained: it would be decayed and summed"
            f" without a gradient.\nSay model.freeze({odd.name!r}) before the optimizer is made."
        )
    late = next((p for p in optimizer.parameters if p.frozen), None)
    if late is not None:
        raise ConfigError(
            f"the optimizer was made before {late.name} was frozen, and would go on to update it.\n"
            "Freeze first, then make the optimizer: AdamW(model.parameters(), ...) leaves out what is frozen."
        )
    if model.zero and versions is not None:
        raise ConfigError(
            f"zero {model.zero} keeps one version of the weights, but the schedule computes with older ones while it"
            " updates.\nTake one that drains at each step (gpipe, 1f1b, interleaved, zb-h1, terapipe), or zero 0."
        )
    if model.zero and {*optimizer.parameters} != {*model.shares()}:
        raise ConfigError(
            f"zero {model.zero}: this rank updates its rows of the parameters, but the optimizer was given something"
            " else.\nMake it over the shares: AdamW(model.shares(), ...)."
        )


def reducer_of(model: Module, mesh: Mesh, reducer: Reducer | None) -> Reducer:
    """The reducer that is asked for, or the usual one of the model's stage of ZeRO.

    Raises:
        ConfigError: the one that is asked for sums whole gradients, which the model does not keep, or the reverse.
    """
    if reducer is None:
        return RowReducer(model, mesh) if model.zero else FlatReducer(model.flats, mesh)
    if bool(model.zero) != isinstance(reducer, RowReducer):
        raise ConfigError(
            f"the model has zero {model.zero}, but {type(reducer).__name__} is"
            f" {'not ' if model.zero else ''}made for models whose rows are dealt out.\n"
            "Leave the reducer out, or take RowReducer(model, mesh) for zero 1, 2 and 3."
        )
    return reducer


def compare_what_is_given(
    mesh: Mesh,
    model: Module,
    optimizer: Optimizer,
    scaler: Scaler | None,
    rows: Sequence[Any],
    reducer: Reducer | None = None,
    microbatches: int = 1,
) -> None:
    """Refuse models, rows, recomputation or updates that differ between ranks.  Collective over the world.

    Refuse, too, micro-batches of a model that makes of one row what the others of its batch say.

    Args:
        mesh: the layout.
        model: what it is made of, and which of its parts are made again in backward; ranks of one stage hold the same.
        optimizer, scaler: what updates it.
        rows: all that says in which order ranks work, as JSON holds it.
        reducer: the one that is asked for.
        microbatches: into which a batch is cut.

    Raises:
        ConfigError: a rank has another model, other frozen parameters, or updates in another way; or the micro-batches
            are refused.
        ScheduleError: a rank has other rows, or makes other parts again; either on every rank.

    Cost: one small message.
    """
    schedule = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    again = sorted(module.name for module in model.modules() if module.recompute)
    scaling = None if scaler is None else [type(scaler).__name__, scaler.state_dict()]
    method = type(optimizer).__name__
    updating: list[Any] = [f"{method} (zero {model.zero})" if model.zero else method, scaling]
    updating += [type(reducer).__name__, dict(reducer.made_of)] if reducer is not None and reducer.made_of else []
    mixing = next((f"{part.name} ({type(part).__name__})" for part in model.modules() if part.mixes_rows), None)
    fixed = sorted(p.name for p in model.parameters() if p.frozen)
    marked = [mesh.pp.rank, again, hashlib.sha256(json.dumps(fixed).encode()).hexdigest() if fixed else ""]
    told = mesh.world.exchange([schedule, marked, updating, _flat(model.made_of), mixing])
    schedules, marks, updates, models, mixes = zip(*told, strict=True)
    odd = _first(theirs != models[0] for theirs in models)
    if odd is not None:
        name, here, there = _first_difference(models[0], models[odd])
        raise ConfigError(
            f"rank {odd} has another model than rank 0: {name} is {there}, not {here}.\n"
            "Give every rank the same numbers."
        )
    fixed_in_stage = {pp_rank: of for pp_rank, _, of in reversed(marks)}
    odd = _first(of != fixed_in_stage[pp_rank] for pp_rank, _, of in marks)
    if odd is not None:
        raise ConfigError(
            f"rank {odd} has frozen other parameters than the ranks beside it: their gradients would not meet.\n"
            "Freeze the same patterns on all ranks (model.freeze)."
        )
    of_stage = {pp_rank: names for pp_rank, names, _ in reversed(marks)}
    odd = _first(names != of_stage[pp_rank] for pp_rank, names, _ in marks)
    if odd is not None:
        raise ScheduleError(
            f"rank {odd} makes other parts of the model again in backward than the ranks beside it: their messages"
            " would not meet.\nMark the same modules on all ranks that hold them (mark_recompute)."
        )
    odd = _first(theirs != updates[0] for theirs in updates)
    if odd is not None:
        raise ConfigError(
            f"rank {odd} updates by {_text(updates[odd])}, rank 0 by {_text(updates[0])}: their weights would part.\n"
            "Give every rank the same optimizer, and a scaler with the same scale."
        )
    odd = _first(theirs != schedules[0] for theirs in schedules)
    if odd is not None:
        raise ScheduleError(
            f"rank {odd} was given another schedule than rank 0.\nEvery rank needs the rows of all ranks, made from"
            " the same name, micro-batches, chunks and slices."
        )
    mixing = next((name for name in mixes if name is not None), None)
    if mixing is not None and microbatches > 1:
        raise ConfigError(
            f"{mixing} takes statistics of a whole batch, but each batch goes through in {microbatches} parts: what is"
            " learned would depend on their number.\nTake one micro-batch, or ask for it by name:"
            " BatchNorm(..., per_microbatch=True), CNN(..., per_microbatch=True)."
        )


def _flat(numbers: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """{"routing": {"top_k": 2}} as {"routing.top_k": 2}."""
    found: dict[str, Any] = {}
    for name, value in numbers.items():
        found.update(
            _flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": plain(value)}
        )
    return found


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """A name, and what the two say of it; None where one does not know it."""
    names = [*one, *(name for name in other if name not in one)]
    name = next(name for name in names if one.get(name) != other.get(name))
    return name, one.get(name), other.get(name)


def _first(differs: Any) -> int | None:
    """The first rank of which it is true."""
    return next((rank for rank, different in enumerate(differs) if different), None)


def _text(updating: Sequence[Any]) -> str:
    """`AdamW with LossScaler {'scale': 65536.0, ...}`"""
    optimizer, scaling, *reducer = updating
    scaler = "no scaler" if scaling is None else f"{scaling[0]} {scaling[1]}"
    return f"{optimizer} with {scaler}" + (f" and {reducer[0]} {reducer[1]}" if reducer else "")

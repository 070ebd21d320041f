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
        ConfigError: the model's branches have other scales than the executor would take off.
    """
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
        ConfigError: either; the same on every rank.
    """
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
) -> None:
    """Refuse models, rows, recomputation or updates that differ between ranks.  Collective over the world.

    Args:
        mesh: the layout.
        model: what it is made of, and which of its parts are made again in backward; ranks of one stage hold the same.
        optimizer, scaler: what updates it.
        rows: all that says in which order ranks work, as JSON holds it.
        reducer: the one that is asked for.

    Raises:
        ConfigError: a rank has another model, or updates in another way.
        ScheduleError: a rank has other rows, or makes other parts again; either on every rank.

    Cost: one small message.
    """
    schedule = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    again = sorted(module.name for module in model.modules() if module.recompute)
    scaling = None if scaler is None else [type(scaler).__name__, scaler.state_dict()]
    method = type(optimizer).__name__
    updating: list[Any] = [f"{method} (zero {model.zero})" if model.zero else method, scaling]
    updating += [type(reducer).__name__, dict(reducer.made_of)] if reducer is not None and reducer.made_of else []
    told = mesh.world.exchange([schedule, [mesh.pp.rank, again], updating, _flat(model.made_of)])
    schedules, marks, updates, models = zip(*told, strict=True)
    odd = _first(theirs != models[0] for theirs in models)
    if odd is not None:
        name, here, there = _first_difference(models[0], models[odd])
        raise ConfigError(
            f"rank {odd} has another model than rank 0: {name} is {there}, not {here}.\n"
            "Give every rank the same numbers."
        )
    of_stage = {pp_rank: names for pp_rank, names in reversed(marks)}
    odd = _first(names != of_stage[pp_rank] for pp_rank, names in marks)
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

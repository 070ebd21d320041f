"""What a stage of a pipeline made is what the next one waits for: a model's mistakes, found where they are made.

Without this the next rank receives an array of another shape or waits for one that never comes, and says so about a
line that is not the mistake.  What is sound costs a few comparisons for each stage and micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from mpitrain.autograd.auxiliary import Said
from mpitrain.autograd.tensor import Tensor
from mpitrain.errors import ConfigError, ShapeError


def checked_boundary(model: Any, stage: int, batch: Any) -> Sequence[Any]:
    """`model.boundary` of a stage behind the first, if it is the description of one tensor or more.

    Raises:
        ConfigError: it is something else.
    """
    found = model.boundary(stage, batch)
    if not isinstance(found, (tuple, list)) or not found or not all(hasattr(b, "states") for b in found):
        raise ConfigError(
            f"boundary({stage}, batch) of {type(model).__name__} returned {_text(found)}.\n"
            f"It returns a tuple of Boundary(shape, dtype, states), one for each tensor that stage {stage - 1} hands on"
            " to it: (Boundary(...),)"
        )
    return found


def check_outputs(model: Any, stage: int, batch: Any, outputs: Any) -> tuple[Tensor, ...]:
    """What `forward_stage` returned, if it is the loss or what `boundary` says of the next stage.

    Args:
        model: a `Module`.
        stage: of it, which made the outputs.
        batch: of which.
        outputs: what it returned.

    Raises:
        ConfigError: no tuple of tensors.
        ShapeError: no loss, or other tensors than the next stage waits for.
    """
    last = stage == model.num_stages - 1
    if not isinstance(outputs, (tuple, list)) or not all(isinstance(t, Tensor) for t in outputs):
        way = "a tuple of one tensor, the loss: (loss,)" if last else "a tuple of tensors, even of one: (x,)"
        raise ConfigError(f"{_name(model, stage)} returned {_text(outputs)}.\nReturn {way}")
    if last:
        if len(outputs) != 1 or outputs[0].shape != ():
            raise ShapeError(
                f"{_name(model, stage)}{', the last one,' * (stage > 0)} returned {_made(outputs)}.\n"
                "It returns one number, the sum of the loss over the batch's valid targets: (loss,) with shape ()"
            )
        return tuple(outputs)
    expected = checked_boundary(model, stage + 1, batch)
    if len(outputs) != len(expected) or any(
        t.shape != tuple(b.shape) or t.data.dtype != b.dtype for t, b in zip(outputs, expected, strict=True)
    ):
        told = _list([f"{tuple(b.shape)} {_dtype(b.dtype)}" for b in expected])
        raise ShapeError(
            f"{_name(model, stage)} returned {_made(outputs)},\nbut boundary({stage + 1}, batch) says {told}.\n"
            "One of them is wrong: what a stage hands on is what the next one waits for."
        )
    return tuple(outputs)


def check_said(model: Any, said: Said) -> None:
    """Refuse losses and counts of a forward pass of which the model has not said that there are any.

    Raises:
        ConfigError: it added a loss, but `adds_losses` is not set; it counted what `counted` does not know, or as many
            numbers as it does not say.
    """
    own = type(model).__name__
    if said.losses and not model.adds_losses:
        raise ConfigError(
            f"{said.losses[0].name} adds a loss to the objective, but {own} does not say so: without it nobody counts"
            f" the rows over which the mean goes.\nSet adds_losses = True on {own}."
        )
    for name, vector in said.counts.items():
        if model.counted.get(name) != vector.size:
            known = ", ".join(f"{known!r}: {length}" for known, length in model.counted.items())
            raise ConfigError(
                f"{name!r} counts {vector.size} numbers, of which counted of {own} knows nothing: it is"
                f" {{{known}}}.\nIt names every vector with its length, the same on all ranks."
            )


def check_takes_slices(model: Any) -> None:
    """Refuse a model whose stages cannot be told what earlier slices of a sequence left.

    Raises:
        ConfigError: its forward_stage has no argument `carry`.
    """
    takes = inspect.signature(model.forward_stage).parameters.values()
    if not any(p.name == "carry" or p.kind is p.VAR_KEYWORD for p in takes):
        raise ConfigError(
            f"slices of sequences need forward_stage(stage, batch, *inputs, carry=None), but that of"
            f" {type(model).__name__} takes no carry.\n"
            "Take it, and pass it on to what looks at earlier tokens; or take a schedule without slices."
        )


def _name(model: Any, stage: int) -> str:
    """Which code the user looks at."""
    own = type(model)
    definer = next(base for base in own.__mro__ if "forward_stage" in vars(base))
    if definer.__name__ == "Module":  # which calls forward
        return f"forward of {own.__name__}"
    return f"forward_stage of stage {stage} of {own.__name__}"


def _text(value: Any) -> str:
    """What a value is, in a few words."""
    if type(value) in (tuple, list):
        return f"a {type(value).__name__} of " + (" and ".join(type(item).__name__ for item in value) or "nothing")
    return f"a {type(value).__name__}" if value is not None else "None"


def _made(outputs: Sequence[Tensor]) -> str:
    return _list([f"{t.shape} {t.data.dtype}" for t in outputs])


def _list(parts: Sequence[str]) -> str:
    return f"{len(parts)} tensor{'s' * (len(parts) != 1)}" + (": " if parts else "") + ", ".join(parts)


def _dtype(dtype: Any) -> str:
    return str(getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype))

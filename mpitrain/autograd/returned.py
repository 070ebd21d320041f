"""What forward and backward of an operation must take and return, said where they do not.

An array that is returned in the place of a tuple would be taken apart row by row, and be wrong without a word.  Whoever
runs an operation compares two types and a length; all else happens here, once something is wrong.
"""

from __future__ import annotations

import inspect
from typing import Any

from mpitrain.errors import ConfigError


def check_takes_wanted(name: str, backward: Any) -> None:
    """Refuse a backward that is not told which gradients are wanted.

    Args:
        name: of the operation.
        backward: as its class defines it.

    Raises:
        ConfigError: it has no argument `wanted`.
    """
    backward = getattr(backward, "__func__", backward)
    code = getattr(backward, "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARKEYWORDS:
        return
    if "wanted" not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        raise ConfigError(
            f"{name}.backward{inspect.signature(backward)} takes no wanted.\n"
            "It is given one bool an input by that name, so it is: def backward(grad, x, *, wanted), with what forward"
            " saved in the place of x."
        )


def check_made(name: str, made: Any) -> None:
    """Refuse what is no value together with what backward needs.

    Args:
        name: of the operation.
        made: what forward returned.

    Raises:
        ConfigError: it is not (y, saved), or saved is no tuple.
    """
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], tuple):
        return
    raise ConfigError(
        f"{name}.forward returned {_text(made)}.\n"
        "It returns two things: y, an array or a tuple of arrays, and a tuple of what backward needs, also where that"
        " is one array or none: return y, (x,) or return y, ()"
    )


def check_gradients(name: str, grads: Any, count: int) -> None:
    """Refuse what is not one gradient an input.

    Args:
        name: of the operation.
        grads: what backward returned.
        count: of the inputs.

    Raises:
        ConfigError: it is no tuple, or one of another length.
    """
    if isinstance(grads, (tuple, list)) and len(grads) == count:
        return
    inputs = "1 input" if count == 1 else f"{count} inputs"
    raise ConfigError(
        f"{name}.backward returned {_text(grads)}, but the operation has {inputs}.\n"
        "It returns a tuple with one gradient an input, constants too, and None where none is wanted; also of one"
        " input: return (dx,)"
    )


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        parts = [f"{type(item).__name__} {getattr(item, 'shape', '')}".rstrip() for item in value]
        return f"a {type(value).__name__} of {len(parts)}: ({', '.join(parts[:4])}{', ...' * (len(parts) > 4)})"
    shape = getattr(value, "shape", None)
    return "None" if value is None else f"one {type(value).__name__}" + (f" of shape {shape}" if shape else "")

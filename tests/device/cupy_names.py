"""What CuPy has: the names and signatures of `cupy_names.json`, and the refusal of a call that they do not allow."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

NAMES: dict[str, Any] = json.loads(Path(__file__).with_name("cupy_names.json").read_text())


@functools.cache
def signature(words: str) -> inspect.Signature:
    """The signature that a line of parameters stands for: `a axis= * dtype=` for (a, axis=..., *, dtype=...)."""
    kinds = inspect.Parameter
    parameters: list[inspect.Parameter] = []
    kind = kinds.POSITIONAL_OR_KEYWORD
    for word in words.split():
        if word == "/":
            parameters = [p.replace(kind=kinds.POSITIONAL_ONLY) for p in parameters]
        elif word == "*":
            kind = kinds.KEYWORD_ONLY
        elif word.startswith("**"):
            parameters.append(kinds(word[2:], kinds.VAR_KEYWORD))
        elif word.startswith("*"):
            parameters.append(kinds(word[1:], kinds.VAR_POSITIONAL))
            kind = kinds.KEYWORD_ONLY
        else:
            default = ... if word.endswith("=") else kinds.empty
            parameters.append(kinds(word.removesuffix("="), kind, default=default))
    return inspect.Signature(parameters)


def check_call(name: str, words: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Refuse arguments that CuPy's function of this name does not take.

    Returns:
        The arguments by their names.

    Raises:
        TypeError: with CuPy's parameters.
    """
    try:
        return signature(words).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"cupy.{name}: {error}; CuPy's parameters are ({', '.join(words.split())})") from None

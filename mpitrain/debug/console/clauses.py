"""What the clauses of a condition mean: a test of an event for each.

Values are those that an event has made: what an op returns, the gradients of its backward, what a message brings.
With a `parameter` clause beside it, a value is that parameter's own: the weight in an op that uses it, its part of the
gradient in a backward.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from mpitrain import kernels
from mpitrain.autograd.lazy import Lazy
from mpitrain.autograd.tape import PATH
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, is_half
from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.comm.wire import is_inexact
from mpitrain.events import Event
from mpitrain.pipeline.finding import BAD, FINITE, verdict

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: not a <= b,  # NaN is above every limit
    ">=": lambda a, b: not a < b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
}


class Happening(NamedTuple):
    """An event, and what its rank is at.

    step: counted from 1, 0 outside; micro: of the action, None outside of micro-batches; site: finds its line; trouble:
    whether the rules of states have just had something to object on this rank.
    """

    event: Event
    rank: int
    step: int
    micro: int | None
    site: Callable[[], str]
    trouble: bool = False


Test = Callable[[Happening], bool]


def test_of(word: str, value: str, parameter: str | None) -> Test:
    """The test of one clause.

    Args:
        word, value: of the clause.
        parameter: the pattern of the condition's `parameter` clause, whose values are then meant.
    """
    match word:
        case "action":
            return lambda h: h.event.kind == "action" and _is_action(h.event, value)
        case "op":
            return lambda h: h.event.kind == "op" and fnmatchcase(h.event.name, value)
        case "message":
            return lambda h: h.event.kind in ("message", "arrival") and _is_verb(h.event.name, value)
        case "axis":
            return lambda h: h.event.kind in ("message", "arrival") and fnmatchcase(h.event.info["axis"], value)
        case "peer":
            numbers = ranges(value)
            return lambda h: h.event.kind in ("message", "arrival") and numbers(_peer(h.event))
        case "parameter":
            return lambda h: h.event.kind == "op" and any(True for _ in of_parameter(h.event, value))
        case "path":
            return lambda h: _is_in(_path(h.event), value)
        case "at":
            return lambda h: h.event.kind in ("op", "message") and _is_line(h.site(), value)
        case "rank":
            numbers = ranges(value)
            return lambda h: numbers(h.rank)
        case "micro":
            numbers = ranges(value)
            return lambda h: numbers(h.micro)
        case "step":
            numbers = ranges(value)
            return lambda h: numbers(h.step)
        case "nonfinite":
            return lambda h: _is_bad(h.event, parameter)
        case "state":
            return lambda h: h.trouble
        case "norm" | "largest":
            sign, _, limit = value.partition(" ")
            compare, bound, measure = COMPARISONS[sign], float(limit), norm if word == "norm" else largest
            return lambda h: any(compare(measure(array), bound) for array in values(h.event, parameter))
    raise AssertionError(f"no clause is called {word}")


def ranges(text: str) -> Callable[[int | None], bool]:
    """Whether a number is among `3`, `0,2`, `4-7` or `5-`."""
    pairs = limits(text)
    return lambda number: number is not None and any(low <= number <= high for low, high in pairs)


def limits(text: str) -> list[tuple[int, float]]:
    """The least and the largest number of each part of `3`, `0,2`, `4-7` or `5-`."""
    pairs = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        pairs.append((int(low), math.inf if dash and not high else int(high or low)))
    return pairs


def _is_action(event: Event, pattern: str) -> bool:
    return fnmatchcase(event.name, pattern) or event.info["action"].kind == pattern


def _is_verb(name: str, pattern: str) -> bool:
    """`wait` is any wait, `all_reduce` also the verb that does not wait for it."""
    if name.startswith("wait "):
        return pattern == "wait" or fnmatchcase(name, pattern)
    return fnmatchcase(name, pattern) or fnmatchcase(LIKE_BLOCKING.get(name, name), pattern)


def _peer(event: Event) -> int | None:
    """World rank at the other end; None: all of the axis take part."""
    peer: int = event.info["peer"]
    return None if peer < 0 else event.info["ranks"][peer]


def _path(event: Event) -> str:
    """Of the module in which something happens; ops carry it, also backwards."""
    path: str = event.info["path"] if event.kind == "op" else PATH.get()
    return path


def _is_in(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def _is_line(site: str, line: str) -> bool:
    """`train.py:31` is also what `src/train.py:31` means."""
    return site == re.split(r"[/\\]", line)[-1]


# -- values -----------------------------------------------------------------------------------------------------------


def of_parameter(event: Event, pattern: str) -> Iterator[tuple[Any, Any]]:
    """The parameters of a name that an op uses, each with its value in it: the weight, or its part of the gradient.

    Before a backward has run, the part is None.
    """
    info = event.info
    if "grad" not in info:
        for t in info.get("tensors", ()):
            if isinstance(t, Tensor) and t.is_parameter and fnmatchcase(t.name, pattern):  # type: ignore[attr-defined]
                yield t, t.data
        return
    tape, node = info.get("tape"), info.get("node")
    if tape is None or node is None:
        return
    grads = info.get("grads") or (None,) * len(node.inputs)
    for slot, grad, wanted in zip(node.inputs, grads, info["wanted"], strict=False):
        leaf = tape.leaf(slot) if wanted else None
        if leaf is not None and leaf.is_parameter and fnmatchcase(leaf.name, pattern):
            yield leaf, grad


def values(event: Event, parameter: str | None) -> Iterator[Array]:
    """The arrays of numbers that an event has made, or a parameter's own in it."""
    if parameter is not None:
        found: Iterable[Any] = (value for _, value in of_parameter(event, parameter))
    elif event.kind == "op":
        found = _several(event.info["grads"] if "grads" in event.info else event.info.get("output"))
    elif event.kind in ("message", "arrival"):
        result = event.info.get("result")
        found = () if type(result) is tuple else (result,)  # of what is in flight, the arrival tells
    else:
        found = ()
    for value in found:
        array = value.unrounded() if isinstance(value, Lazy) else value
        if hasattr(array, "dtype") and is_inexact(array.dtype) and array.size:
            yield array


def _is_bad(event: Event, parameter: str | None) -> bool:
    """NaN or infinity; minus infinity counts unless it was given, as masks are made of it."""
    worst = max(map(verdict, values(event, parameter)), default=FINITE)
    if worst in (FINITE, BAD) or event.kind != "op":
        return worst == BAD
    given = event.info.get("inputs") or (*_several(event.info.get("grad")), *(event.info.get("saved") or ()))
    return all(verdict(x) == FINITE for x in given if not isinstance(x, Lazy))


def norm(array: Array) -> float:
    """Square root of the sum of squares, in float64."""
    return math.sqrt(float(kernels.sum_of_squares(array)))


def largest(array: Array) -> float:
    """The largest magnitude; NaN where one is."""
    wide = kernels.widen(array) if is_half(array.dtype) else array
    return float(abs(wide).max())


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)

"""How the stand-in computes: NumPy's functions on what is inside device arrays, at once or later (`asynchronous()`).

`crossings()` counts the copies between host and device that were asked for.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
from strict_memory import account
from strict_stream import current, get_current_stream, launched, machine, timeline

_CROSSINGS: ContextVar[tuple[Counter[str], bool] | None] = ContextVar("crossings", default=None)
_HOST_WAITS = frozenset(
    "argwhere bincount cholesky compress eigh eigvalsh extract flatnonzero histogram intersect1d inv lstsq mask nonzero"
    " pinv qr setdiff1d slogdet solve svd trim_zeros union1d unique".split()
)


@contextlib.contextmanager
def crossings(waits: bool = False) -> Iterator[Counter[str]]:
    """Count what goes between host and device in this block: by `get`, `float`, `bool`, `asarray` ...

    Args:
        waits: count also what makes the host wait because the shape of a result depends on values: `nonzero`, `unique`,
            `mask` (x[x > 0]) ...
    """
    counter: Counter[str] = Counter()
    token = _CROSSINGS.set((counter, waits))
    try:
        yield counter
    finally:
        _CROSSINGS.reset(token)


def crossed(how: str, is_wait: bool = False) -> None:
    """Note one copy between host and device, or a wait for a number."""
    found = _CROSSINGS.get()
    if found is not None and (found[1] or not is_wait):
        found[0][how] += 1


class Held:
    """Memory of a device that an array has: `_values`, NumPy's array, and the array that owns it, unless it is this."""

    __slots__ = ("__weakref__", "_account", "_base", "_device", "_line", "_taken", "_values")

    kind: type[Held]

    def __init_subclass__(cls) -> None:
        Held.kind = cls

    def _adopt(self, values: np.ndarray, base: Held | None) -> None:
        self._taken = 0
        self._values = values
        if base is not None:
            self._base: Held | None = base if base._base is None else base._base
            self._device = base._device
            return
        machine.check(current.device)
        self._base = None
        self._device = current.device
        self._line = get_current_stream()._on() if timeline.is_late else None
        if values.size:
            self._account = account(self._device)
            self._taken = self._account.take(values.nbytes)

    def __del__(self) -> None:
        if self._taken:
            self._account.give(self._taken)
            if timeline.is_late:  # whoever takes the memory next, on the stream that took it first, writes there
                line = self._line or timeline.default(self._device)
                timeline.freed.append((line, partial(poison, self._values, ...)))


def wrap(values: np.ndarray, base: Held | None = None) -> Any:
    """The device array that holds `values`, a view of the memory of `base` if one is given."""
    array = Held.kind.__new__(Held.kind)
    array._adopt(values, base)
    return array


def run(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "", writes: Sequence[Any] = ()
) -> Any:
    """Call a function of NumPy's with what is inside the device arrays.  A device raises no floating-point warnings.

    Args:
        name: of CuPy's function, if it is another one.
        writes: the arrays among the arguments that it writes.
    """
    found: list[Held] = []
    name = name or function.__name__
    args, kwargs = bare(args, found, name), bare(kwargs, found, name)
    last = name.rpartition(".")[2]
    if last in _HOST_WAITS:
        crossed(last, is_wait=True)
        if timeline.is_late:
            get_current_stream().synchronize()
    elif timeline.is_late:
        return _later(partial(_computed, function), args, kwargs, found, last, writes)
    result = dressed(_computed(function, args, kwargs), found)
    if writes or _is_fresh(result, found):
        check_devices(found)
        launched(last)
    return result


def _computed(function: Any, args: Any, kwargs: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*args, **kwargs)


def _later(
    compute: Callable[[Any, Any], Any], args: Any, kwargs: Any, found: list[Held], name: str, writes: Sequence[Held]
) -> Any:
    """Compute on what is there now, for the shapes and the errors; the values come when the stream gets to it."""
    own = {id(array._values): array for array in writes}
    try:
        spare = {key: array._values.copy() for key, array in own.items()}
        trial = compute(_exchanged(args, spare), _exchanged(kwargs, spare))
    except Exception:  # poison may have been among the arguments
        get_current_stream().synchronize()
        spare = {key: array._values.copy() for key, array in own.items()}
        trial = compute(_exchanged(args, spare), _exchanged(kwargs, spare))
    if not writes:
        result = dressed(trial, found)
        if not _is_fresh(result, found):
            return result
        targets = [array._values for array in _arrays(result)]
        for target in targets:
            poison(target, ...)
        timeline.put(get_current_stream(), partial(_fill, targets, partial(compute, args, kwargs)))
    else:
        written = {id(copy): own[key] for key, copy in spare.items()}
        result = _exchanged(trial, written)
        timeline.put(get_current_stream(), partial(compute, args, kwargs))
    check_devices(found)
    launched(name)
    return result


def _fill(targets: list[np.ndarray], compute: Callable[[], Any]) -> None:
    result = compute()
    for target, values in zip(targets, result if isinstance(result, (tuple, list)) else [result], strict=True):
        np.copyto(target, values, casting="unsafe")


def _exchanged(value: Any, others: dict[int, Any]) -> Any:
    """Other objects in the place of some, also inside lists, tuples and dicts."""
    if id(value) in others:
        return others[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_exchanged(item, others) for item in value)
    if type(value) is dict:
        return {key: _exchanged(item, others) for key, item in value.items()}
    return value


def _arrays(result: Any) -> list[Held]:
    return [x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, Held)]


def _is_fresh(result: Any, found: list[Held]) -> bool:
    """Whether it has memory of its own."""
    return any(x._base is None and not any(x is array for array in found) for x in _arrays(result))


def check_devices(found: list[Held]) -> None:
    """What runs on a device takes the arrays of that device.

    Raises:
        ValueError: one is on another device than this thread's.
    """
    if machine.devices > 1:
        for array in found:
            if array._device != current.device:
                raise ValueError(
                    "Array device must be same as the current device: "
                    f"array device = {array._device} while current = {current.device}"
                )


def bare(value: Any, found: list[Held], name: str) -> Any:
    """NumPy's arrays in the place of device arrays, also inside lists, tuples and dicts; `found` collects the latter.

    Raises:
        TypeError: a host array is among them.
    """
    if isinstance(value, Held):
        found.append(value)
        return value._values
    if isinstance(value, np.ndarray):
        raise TypeError(f"cupy.{name}: Unsupported type {type(value)}: a host array; move it by xp.asarray")
    if type(value) in (list, tuple):
        return type(value)(bare(item, found, name) for item in value)
    if type(value) is dict:
        return {key: bare(item, found, name) for key, item in value.items()}
    return value


def dressed(result: Any, found: list[Held]) -> Any:
    """Device arrays in the place of NumPy's; an array that came in comes out as the same object."""
    for array in found:
        if result is array._values:
            return array
    if isinstance(result, (np.ndarray, np.generic)):
        values = np.asarray(result)
        shares = (a for a in found if values.base is not None and np.may_share_memory(values, a._values))
        return wrap(values, next(shares, None))
    if isinstance(result, (list, tuple)):
        return (list if isinstance(result, list) else tuple)(dressed(item, found) for item in result)
    return result


def poison(values: np.ndarray, where: Any) -> None:
    """Bytes of 0xFF: NaN, -1, or True."""
    if values.size:
        values[where] = np.frombuffer(b"\1" if values.dtype == bool else b"\xff" * values.itemsize, values.dtype)[0]

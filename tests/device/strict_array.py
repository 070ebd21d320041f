"""A device array without a device: NumPy inside, and outside only what `cupy.ndarray` allows.

Host and device do not mix: whatever would copy between them without being asked raises, with CuPy's words.  What CuPy
leaves open is made to show:

    memory that nobody wrote          every byte is 0xFF: NaN in floats, -1 in integers
    x[ids] = v with an id twice       such elements become 0xFF too, unless all values for them are equal
    an id beyond the end              wraps around, as on a device
    reductions                        0-d arrays, never NumPy's scalars

Results share memory as NumPy's do, `.base` is the array that owns it.  `crossings()` counts the copies between host and
device that were asked for.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
from cupy_names import NAMES, check_call
from strict_index import is_scatter, places_of

_CROSSINGS: ContextVar[Counter[str] | None] = ContextVar("crossings", default=None)

# Of CuPy's methods those whose NumPy namesakes do the same.
_SAME = frozenset(
    "all any argmax argmin clip conj conjugate copy cumprod cumsum diagonal dot fill flatten max mean min nonzero prod"
    " ravel repeat reshape round searchsorted squeeze std sum swapaxes trace transpose var".split()
)


@contextlib.contextmanager
def crossings() -> Iterator[Counter[str]]:
    """Count what goes between host and device in this block: by `get`, `float`, `bool`, `asarray` ..."""
    counter: Counter[str] = Counter()
    token = _CROSSINGS.set(counter)
    try:
        yield counter
    finally:
        _CROSSINGS.reset(token)


def crossed(how: str) -> None:
    """Note one copy between host and device."""
    counter = _CROSSINGS.get()
    if counter is not None:
        counter[how] += 1


class ndarray:
    """The stand-in for cupy.ndarray; made by `wrap` and by the functions of the module."""

    __slots__ = ("__weakref__", "_base", "_values")
    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 100

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: None = None, strides: None = None, order: str = "C"
    ) -> None:
        assert memptr is None, "the stand-in has no device memory to point to"
        assert strides is None, "the stand-in has no device memory to point to"
        self._values = np.empty(shape, dtype, order)  # type: ignore[call-overload]
        self._base: ndarray | None = None
        poison(self._values, ...)

    # -- what it is ---------------------------------------------------------------------------------------------------

    shape = property(lambda self: self._values.shape)
    dtype = property(lambda self: self._values.dtype)
    ndim = property(lambda self: self._values.ndim)
    size = property(lambda self: self._values.size)
    nbytes = property(lambda self: self._values.nbytes)
    itemsize = property(lambda self: self._values.itemsize)
    strides = property(lambda self: self._values.strides)
    base = property(lambda self: self._base)
    flags = property(lambda self: Flags(self))
    T = property(lambda self: run(np.transpose, (self,), {}))
    mT = property(lambda self: run(np.swapaxes, (self, -1, -2), {}))
    real = property(lambda self: run(np.real, (self,), {}))
    imag = property(lambda self: run(np.imag, (self,), {}))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        about = dict(self._values.__array_interface__)
        return {**about, "strides": None if self.flags.c_contiguous else self.strides, "stream": 1, "version": 3}

    def __getattr__(self, name: str) -> Any:
        # Special names end here, so NumPy does not find __array_interface__ and convert without a word.
        if name in NAMES["attributes"] or name in NAMES["methods"]:
            if name in _SAME:
                return partial(self._same, name)
            raise AttributeError(f"cupy.ndarray has {name}, the stand-in does not play it (tests/device)")
        raise AttributeError(f"'cupy.ndarray' object has no attribute {name!r}")

    def _same(self, name: str, *args: Any, **kwargs: Any) -> Any:
        check_call(f"ndarray.{name}", NAMES["methods"][name], args, kwargs)
        return run(getattr(np.ndarray, name), (self, *args), kwargs, f"ndarray.{name}")

    # -- what NumPy asks: all refused ---------------------------------------------------------------------------------

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # NumPy's scalar on the left of an operator comes this way, too: that one is allowed.
        if method == "__call__" and isinstance(inputs[0], np.generic) and not kwargs:
            return UFUNCS[ufunc.__name__](*inputs)
        if any(isinstance(x, np.ndarray) for x in inputs):
            raise TypeError(f"Unsupported type {np.ndarray}: {ufunc.__name__} of a host and a device array")
        raise TypeError(f"numpy.{ufunc.__name__} of a device array: take the function from array_module(x)")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} of a device array: take the function from array_module(x)")

    # -- to the host, asked for ---------------------------------------------------------------------------------------

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        crossed("get")
        if out is None:
            return np.array(self._values, order=order)  # type: ignore[call-overload]
        if out.dtype != self.dtype or out.shape != self.shape:
            raise TypeError(f"{out.dtype} {out.shape} cannot be obtained from {self.dtype} {self.shape}")
        out[...] = self._values
        return out

    def set(self, arr: Any, stream: Any = None) -> None:
        crossed("set")
        if not isinstance(arr, np.ndarray) or (arr.dtype, arr.shape) != (self.dtype, self.shape):
            raise TypeError(f"only a numpy.ndarray {self.dtype} {self.shape} can be set")
        self._values[...] = arr

    def item(self) -> Any:
        crossed("item")
        return self._values.item()

    def tolist(self) -> Any:
        crossed("tolist")
        return self._values.tolist()

    def tobytes(self, order: str = "C") -> bytes:
        crossed("tobytes")
        return self._values.tobytes(order)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        crossed("bool")
        return bool(self._values)

    def __int__(self) -> int:
        crossed("int")
        return int(self._values)

    def __float__(self) -> float:
        crossed("float")
        return float(self._values)

    def __complex__(self) -> complex:
        crossed("complex")
        return complex(self._values)

    def __format__(self, spec: str) -> str:
        return format(self._values, spec)

    def __repr__(self) -> str:
        return repr(self._values)

    def __str__(self) -> str:
        return str(self._values)

    # -- elements -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[ndarray]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> ndarray:
        picked: ndarray = dressed(self._values[places_of(index, self.shape)], [self])
        return picked

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, ndarray) and not np.isscalar(value):
            raise TypeError(f"Unsupported type {type(value)}: into a device array go device arrays and numbers")
        places = places_of(index, self.shape)
        source = bare(value, [], "ndarray.__setitem__")
        with np.errstate(all="ignore"):
            self._values[places] = source
            if is_scatter(index):
                self._poison_races(places, source)

    def _poison_races(self, places: Any, source: Any) -> None:
        """Which of several values for one element stays is left to the hardware."""
        stored = self._values[places]
        lost = stored != np.broadcast_to(source, stored.shape).astype(self.dtype)
        if lost.any():
            hit = np.zeros(self.shape, bool)
            np.logical_or.at(hit, places, lost)
            poison(self._values, hit)

    # -- methods that differ from NumPy's -----------------------------------------------------------------------------

    def astype(
        self, dtype: Any, order: str = "K", casting: str | None = None, subok: None = None, copy: bool = True
    ) -> ndarray:
        how = {"order": order, "casting": casting or "unsafe", "copy": copy}
        return run(np.ndarray.astype, (self, dtype), how)

    def view(self, dtype: Any = None, type: None = None) -> ndarray:
        assert type is None, "the stand-in has no subclasses"
        return dressed(self._values.view() if dtype is None else self._values.view(dtype), [self])

    def take(self, indices: Any, axis: Any = None, out: Any = None) -> ndarray:
        return run(np.take, (self, indices), {"axis": axis, "out": out, "mode": "wrap"}, "ndarray.take")

    def argsort(self, axis: Any = -1, kind: Any = None) -> ndarray:
        _check_kind(kind)
        return run(np.argsort, (self,), {"axis": axis, "kind": "stable"})

    def sort(self, axis: int = -1, kind: Any = None) -> None:
        _check_kind(kind)
        self._values.sort(axis=axis, kind="stable")

    def __copy__(self) -> ndarray:
        return dressed(self._values.copy(), [])

    def __deepcopy__(self, memo: Any) -> ndarray:
        return dressed(self._values.copy(), [])


class Flags:
    """CuPy's flags: there is no `writeable`."""

    def __init__(self, array: ndarray) -> None:
        flags = array._values.flags
        self.c_contiguous, self.f_contiguous = flags.c_contiguous, flags.f_contiguous
        self.fnc, self.forc = flags.fnc, flags.forc
        self.owndata = array._base is None


UFUNCS: dict[str, Any] = {}
"""By name; filled where they are made."""


def wrap(values: np.ndarray, base: ndarray | None = None) -> ndarray:
    """The device array that holds `values`, a view of the memory of `base` if one is given."""
    array = ndarray.__new__(ndarray)
    array._values = values
    array._base = base if base is None or base._base is None else base._base
    return array


def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "") -> Any:
    """Call a function of NumPy's with what is inside the device arrays.  A device raises no floating-point warnings."""
    found: list[ndarray] = []
    name = name or function.__name__
    with np.errstate(all="ignore"):
        result = function(*bare(args, found, name), **bare(kwargs, found, name))
    return dressed(result, found)


def bare(value: Any, found: list[ndarray], name: str) -> Any:
    """NumPy's arrays in the place of device arrays, also inside lists, tuples and dicts; `found` collects the latter.

    Raises:
        TypeError: a host array is among them.
    """
    if isinstance(value, ndarray):
        found.append(value)
        return value._values
    if isinstance(value, np.ndarray):
        raise TypeError(f"cupy.{name}: Unsupported type {type(value)}: a host array; move it by xp.asarray")
    if type(value) in (list, tuple):
        return type(value)(bare(item, found, name) for item in value)
    if type(value) is dict:
        return {key: bare(item, found, name) for key, item in value.items()}
    return value


def dressed(result: Any, found: list[ndarray]) -> Any:
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


def _check_kind(kind: Any) -> None:
    if kind not in (None, "stable"):
        raise ValueError("kind can only be None or 'stable'")

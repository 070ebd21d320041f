"""A device array without a device: NumPy inside, and outside only what `cupy.ndarray` allows.

Host and device do not mix: whatever would copy between them without being asked raises, with CuPy's words.  What CuPy
leaves open is made to show:

    memory that nobody wrote          every byte is 0xFF: NaN in floats, -1 in integers
    x[ids] = v with an id twice       such elements become 0xFF too, unless all values for them are equal
    an id beyond the end              wraps around, as on a device
    reductions                        0-d arrays, never NumPy's scalars
    a loop of the host over elements  is refused from a few elements on

Results share memory as NumPy's do, `.base` is the array that owns it.  How functions are run, at once or
later, is `strict_work.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from cupy_names import NAMES, check_call
from strict_index import check_index, is_scatter, places_of
from strict_memory import MemoryPointer, pinned
from strict_runtime import Device
from strict_stream import get_current_stream, launched, timeline
from strict_work import Held, crossed, crossings, dressed, poison, run, wrap

__all__ = ["UFUNCS", "crossed", "crossings", "ndarray", "poison", "run", "wrap"]

# Of CuPy's methods those whose NumPy namesakes do the same.
_SAME = frozenset(
    "all any argmax argmin clip conj conjugate copy cumprod cumsum diagonal dot fill flatten max mean min nonzero prod"
    " ravel repeat reshape round searchsorted squeeze std sum swapaxes trace transpose var".split()
)
_NOT_OF_BRAINS = frozenset("all any around clip divmod logical_not logical_xor round".split())


LONGEST_WALK = 8
"""Elements of one array that the host may ask for one by one: CuPy sets no limit, and waits for each."""


class _Walk(threading.local):
    """The elements of one array that this thread has asked for since it asked for another's."""

    def __init__(self) -> None:
        self._base: Any = lambda: None
        self._seen: set[int] = set()

    def step(self, base: Any, address: int) -> None:
        if self._base() is not base:
            self._base, self._seen = weakref.ref(base), set()
        self._seen.add(address)
        if len(self._seen) > LONGEST_WALK:
            self._seen.clear()
            raise TypeError(
                "the host asks for the elements of a device array one by one; CuPy allows it: get() them all"
            )


_walk = _Walk()


class ndarray(Held):
    """The stand-in for cupy.ndarray; made by `wrap` and by the functions of the module."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 100

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: None = None, strides: None = None, order: str = "C"
    ) -> None:
        assert memptr is None, "the stand-in has no device memory to point to"
        assert strides is None, "the stand-in has no device memory to point to"
        self._adopt(np.empty(shape, dtype, order), None)  # type: ignore[call-overload]
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
    device = property(lambda self: Device(self._device))
    data = property(lambda self: MemoryPointer(self if self._base is None else self._base, self._values))
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
        out = check_call(f"ndarray.{name}", NAMES["methods"][name], args, kwargs).get("out")
        writes = (self,) if name == "fill" else () if out is None else (out,)
        check_brain(name, self)
        return run(getattr(np.ndarray, name), (self, *args), kwargs, f"ndarray.{name}", writes)

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
            out = np.empty(self.shape, self.dtype, order)  # type: ignore[call-overload]
            poison(out, ...)
        elif not isinstance(out, np.ndarray):
            raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
        elif out.dtype != self.dtype:
            raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
        elif out.shape != self.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}")
        elif not out.flags.forc:
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        mine, theirs = self.flags, out.flags
        if not (mine.c_contiguous and theirs.c_contiguous) and not (mine.f_contiguous and theirs.f_contiguous):
            launched("copy")
        stream = stream or get_current_stream()
        seen = pinned.seen_by_copies(out) if timeline.is_late else None
        with self.device:  # whose default stream it is, if it is the default one
            timeline.put(stream, partial(np.copyto, out if seen is None else seen, self._values))
            if blocking or seen is None:  # a copy to memory that is not page-locked returns when it is done
                stream.synchronize()
        return out

    def set(self, arr: Any, stream: Any = None) -> None:
        crossed("set")
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        with self.device:
            timeline.put(stream or get_current_stream(), partial(np.copyto, self._values, from_host(arr)))

    def _read(self, how: str) -> np.ndarray:
        """The values, for the host, which has waited for them.

        Raises:
            TypeError: the host walks over elements of an array, and waits for each.
        """
        crossed(how)
        if self._base is not None and self.size == 1:
            _walk.step(self._base, self._values.__array_interface__["data"][0])
        if timeline.is_late:
            with self.device:
                get_current_stream().synchronize()
        return self._values

    def item(self) -> Any:
        return self._read("item").item()

    def tolist(self) -> Any:
        return self._read("tolist").tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self._read("tobytes").tobytes(order)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._read("bool"))

    def __int__(self) -> int:
        return int(self._read("int"))

    def __float__(self) -> float:
        return float(self._read("float"))

    def __complex__(self) -> complex:
        return complex(self._read("complex"))

    def __format__(self, spec: str) -> str:
        return format(self._read("format"), spec)

    def __repr__(self) -> str:
        return repr(self._read("repr"))

    def __str__(self) -> str:
        return str(self._read("str"))

    # -- elements -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[ndarray]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        if self.ndim == 1 and self.size > LONGEST_WALK:
            raise TypeError(f"a loop of the host over {self.size} elements of a device array; CuPy allows it")
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        how = check_index(index, ndarray)
        if how == "view":
            items = index if isinstance(index, tuple) else (index,)
            places = (
                items if any(item is Ellipsis for item in items) else (*items, Ellipsis)
            )  # an element is a view, too
            return dressed(self._values[places], [self])
        return run(_picked, (self, index), {}, "mask" if how == "mask" else "getitem")

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, ndarray) and not np.isscalar(value):
            raise TypeError(f"Unsupported type {type(value)}: into a device array go device arrays and numbers")
        how = check_index(index, ndarray)
        run(_assigned, (self, index, value), {}, "mask" if how == "mask" else "setitem", (self,))

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
        writes = () if out is None else (out,)
        return run(np.take, (self, indices), {"axis": axis, "out": out, "mode": "wrap"}, "ndarray.take", writes)

    def argsort(self, axis: Any = -1, kind: Any = None) -> ndarray:
        _check_kind(kind)
        return run(np.argsort, (self,), {"axis": axis, "kind": "stable"})

    def sort(self, axis: int = -1, kind: Any = None) -> None:
        _check_kind(kind)
        run(np.ndarray.sort, (self,), {"axis": axis, "kind": "stable"}, writes=(self,))

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()


class Flags:
    """CuPy's flags: there is no `writeable`."""

    def __init__(self, array: ndarray) -> None:
        flags = array._values.flags
        self.c_contiguous, self.f_contiguous = flags.c_contiguous, flags.f_contiguous
        self.fnc, self.forc = flags.fnc, flags.forc
        self.owndata = array._base is None


UFUNCS: dict[str, Any] = {}
"""By name; filled where they are made."""


def check_brain(name: str, *arrays: Any) -> None:
    """Refuse bfloat16 where CuPy has no loop for it.

    Raises:
        TypeError: as CuPy.
    """
    if name in _NOT_OF_BRAINS and any(isinstance(x, ndarray) and x.dtype.name == "bfloat16" for x in arrays):
        raise TypeError(f"Wrong type (bfloat16) of arguments for cupy_{name}")


def from_host(array: np.ndarray) -> np.ndarray:
    """What a copy to a device sees: page-locked memory as it is when the copy runs, other as it is now."""
    if not timeline.is_late:
        return array
    seen = pinned.seen_by_copies(array) if array.flags.forc else None
    return array.copy() if seen is None else seen


def _picked(values: np.ndarray, index: Any) -> Any:
    return values[places_of(index, values.shape)]


def _assigned(values: np.ndarray, index: Any, value: Any) -> None:
    places = places_of(index, values.shape)
    values[places] = value
    if not is_scatter(index):
        return
    stored = values[places]  # which of several values for one element stays is left to the hardware
    lost = stored != np.broadcast_to(value, stored.shape).astype(values.dtype)
    if lost.any():
        hit = np.zeros(values.shape, bool)
        np.logical_or.at(hit, places, lost)
        poison(values, hit)


def _check_kind(kind: Any) -> None:
    if kind not in (None, "stable"):
        raise ValueError("kind can only be None or 'stable'")

"""The module that stands in for CuPy, and the way to put it where the library looks: `with installed() as cupy:`.

It has exactly the names of `cupy_names.json`.  A function checks its arguments against CuPy's signature, then NumPy's
namesake computes it.  What CuPy has and nobody needed yet says so and is added here when somebody does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import strict_nccl
import strict_ufunc  # gives the array its operators
from cupy_names import NAMES, check_call
from strict_array import UFUNCS, check_brain, crossed, from_host, ndarray, poison, run, wrap
from strict_kernel import RawKernel, RawModule
from strict_memory import MemoryPool, PinnedMemoryPool, accounts
from strict_runtime import StrictCuda
from strict_stream import get_current_stream, launched, timeline
from strict_work import bare

_FROM_HOST = frozenset(("array", "asarray", "asanyarray"))  # the functions that may be given host arrays
_NUMBERS_ON_DEVICE = frozenset(("allclose", "array_equal", "array_equiv", "count_nonzero"))  # NumPy gives Python's
_UNWRITTEN = frozenset(("empty", "empty_like"))
_WRITES_FIRST = frozenset(("copyto", "put", "putmask", "place", "fill_diagonal"))
_HOST_THINGS = frozenset(("dtype", "finfo", "iinfo", "newaxis", "e", "pi", "inf", "nan", "euler_gamma", "ndindex"))


class StrictCupy(ModuleType):
    """`cupy`, as far as its names go."""

    ndarray = ndarray
    matmul = staticmethod(strict_ufunc.matmul)
    RawKernel = RawKernel
    RawModule = RawModule

    def __init__(self, name: str = "cupy", functions: dict[str, str] | None = None) -> None:
        super().__init__(name)
        self._functions: dict[str, str] = NAMES["functions"] if functions is None else functions
        if name == "cupy":
            self.cuda = StrictCuda()
            self.__version__ = NAMES["cupy"]

    def __getattr__(self, name: str) -> Any:
        whole = f"{self.__name__}.{name}"
        if self.__name__ == "cupy":
            if name in UFUNCS:
                return UFUNCS[name]
            if name == "linalg":
                return StrictCupy("cupy.linalg", NAMES["linalg"])
            if name in NAMES["others"] and (name in _HOST_THINGS or _is_dtype(name)):
                return getattr(np, name)
        numpy = np if self.__name__ == "cupy" else np.linalg
        if name in self._functions and hasattr(numpy, name):
            return _function(whole, self._functions[name], getattr(numpy, name))
        if any(name in NAMES[kind] for kind in ("functions", "ufuncs", "others", "modules")):
            raise AttributeError(f"{whole} exists, the stand-in does not play it: add it in {__file__}")
        raise AttributeError(f"module '{self.__name__}' has no attribute {name!r}")

    @staticmethod
    def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> np.ndarray:
        return a.get(stream, order, out, blocking) if isinstance(a, ndarray) else np.asarray(a, order=order)  # type: ignore[call-overload]

    @staticmethod
    def get_default_memory_pool() -> MemoryPool:
        return MemoryPool()

    @staticmethod
    def get_default_pinned_memory_pool() -> PinnedMemoryPool:
        return PinnedMemoryPool()

    @staticmethod
    def get_array_module(*args: Any) -> Any:
        return sys.modules["cupy"] if any(isinstance(x, ndarray) for x in args) else np

    @staticmethod
    def where(condition: Any, x: Any = None, y: Any = None) -> Any:
        if not isinstance(condition, (ndarray, np.generic)):
            raise AttributeError(f"{type(condition)} has no attribute 'astype': cupy.where asks a device array")
        if x is None and y is None:
            return run(np.where, (condition,), {}, "nonzero")
        return run(np.where, (condition, x, y), {})

    @staticmethod
    def take(a: Any, indices: Any, axis: Any = None, out: Any = None) -> Any:
        return a.take(indices, axis, out)

    @staticmethod
    def take_along_axis(a: Any, indices: Any, axis: Any) -> Any:
        return run(_taken_along_axis, (a, indices, axis), {}, "take_along_axis")

    @staticmethod
    def argsort(a: Any, axis: Any = -1, kind: Any = None) -> Any:
        return a.argsort(axis, kind)


def _function(name: str, words: str, function: Any) -> Any:
    """NumPy's function with CuPy's arguments."""
    last = name.rpartition(".")[2]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = check_call(name.removeprefix("cupy."), words, args, kwargs)
        blocking = kwargs.pop("blocking", False)
        if last in _FROM_HOST and not _has_device(args[0] if args else None):
            kwargs.pop("copy", None)
            return _upload(last, args, kwargs, blocking)
        if last in _UNWRITTEN:
            result = wrap(function(*bare(args, [], last), **bare(kwargs, [], last)))
            poison(result._values, ...)
            return result
        check_brain(last, *args)
        writes = [args[0]] if last in _WRITES_FIRST else [given["out"]] if given.get("out") is not None else []
        result = run(function, args, kwargs, last, writes)
        is_number = last in _NUMBERS_ON_DEVICE and not isinstance(result, ndarray)
        return wrap(np.asarray(result)) if is_number else result

    call.__name__ = last
    return call


def _upload(name: str, args: Any, kwargs: Any, blocking: bool) -> ndarray:
    """A host array, or a list of numbers, on the device."""
    source = np.asarray(*args, **kwargs)
    result: ndarray = wrap(np.array(source, copy=True, order="K"))
    if source.ndim:
        crossed(name)
    else:
        launched("fill")  # the number goes along with a kernel
    if timeline.is_late:
        host = from_host(source)
        poison(result._values, ...)
        timeline.put(get_current_stream(), partial(np.copyto, result._values, host))
        if blocking:
            get_current_stream().synchronize()
    return result


def _taken_along_axis(values: Any, indices: Any, axis: Any) -> Any:
    length = values.size if axis is None else values.shape[axis]
    return np.take_along_axis(values, indices % length if length else indices, axis)


def _has_device(value: Any) -> bool:
    return isinstance(value, ndarray) or (isinstance(value, (list, tuple)) and any(map(_has_device, value)))


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(np, name, None), type) and issubclass(getattr(np, name), np.generic)


def modules(cupy: StrictCupy) -> dict[str, Any]:
    """What `import` finds of it: `cupy.cuda.nccl` is CuPy's only when it has been imported."""
    return {"cupy": cupy, "cupy.cuda": cupy.cuda, "cupy.cuda.nccl": strict_nccl}


@contextlib.contextmanager
def installed() -> Iterator[Any]:
    """Have the library find the stand-in as `sys.modules["cupy"]`, with a device that holds nothing."""
    module = StrictCupy()
    mine = modules(module)
    before = {name: sys.modules[name] for name in mine if name in sys.modules}
    sys.modules.update(mine)
    accounts.clear()
    try:
        yield module
    finally:
        for name in mine:
            del sys.modules[name]
        sys.modules.update(before)

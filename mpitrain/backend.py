"""Arrays: which module they come from, how they move between device and host, and where scratch comes from.

Library code takes its array module from its arrays (`xp = array_module(x)`), so that one line serves NumPy and CuPy.
CuPy is looked up among the loaded modules, never imported: a process that holds no CuPy array pays nothing for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError

Array = Any  # numpy.ndarray or cupy.ndarray: the two share their interface but no base class

DTYPES = ("float32", "float64", "float16", "bfloat16")
"""Names of the precisions in which a model can be held."""


def dtype_of(name: str) -> Any:
    """The dtype of a name of `DTYPES`.

    NumPy has no bfloat16; that of ml_dtypes is loaded when it is first asked for.

    Raises:
        ConfigError: ml_dtypes is not installed.
    """
    assert name in DTYPES, name
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ConfigError(
            "--dtype bfloat16 needs the package ml_dtypes, which brings the type to NumPy: pip install ml_dtypes.\n"
            "Or take --dtype float16, which needs none."
        ) from None
    return np.dtype(ml_dtypes.bfloat16)


def is_half(dtype: Any) -> bool:
    """True for float16 and bfloat16: formats to store and to send, in which nothing is added up."""
    dtype = np.dtype(dtype)
    return dtype.itemsize == 2 and (dtype.kind == "f" or dtype.type.__name__ == "bfloat16")


def wide(dtype: Any) -> Any:
    """The dtype to compute in: float32 for halves, else the dtype itself."""
    return np.dtype(np.float32) if is_half(dtype) else np.dtype(dtype)


def array_module(*arrays: Array) -> Any:
    """The module (numpy or cupy) to which the arrays belong; Python numbers belong to any."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and any(isinstance(array, cupy.ndarray) for array in arrays):
        return cupy
    return np


def to_host(array: Array) -> Any:
    """The same values as a NumPy array: itself where it is one, else a copy from the device (waits for its stream)."""
    return array if isinstance(array, (np.ndarray, np.generic)) else array.get()


def to_device(array: Array, like: Array) -> Array:
    """The same values where `like` lives: itself where it lives there, else a copy on the device."""
    xp = array_module(like)
    return array if xp is np else xp.asarray(array)


def at_hand(array: Array) -> bool:
    """Whether the host may look at the values at no cost; for those on a device it would have to wait.

    For checks of what was given, and for work that may be left out.  What is computed must not depend on it.
    """
    return array_module(array) is np


def address(array: Array) -> int:
    """Where the first element lies in the memory of its device."""
    about = array.__array_interface__ if isinstance(array, np.ndarray) else array.__cuda_array_interface__
    return int(about["data"][0])


def floats(numbers: Sequence[Any]) -> list[float]:
    """Numbers, and lists of them, one after the other; or arrays on a device, which is waited for once."""
    flat = [x for number in numbers for x in (number if isinstance(number, list) else (number,))]
    xp = array_module(*flat)
    if xp is np:
        return [float(x) for x in flat]
    found: list[float] = to_host(xp.concatenate([x.reshape(-1) for x in flat])).tolist()
    return found


class Pool:
    """Buffers that come back: scratch and activations without page faults after the first steps.

    Fresh memory from the operating system costs a page fault each 4 KiB when first written.  `take` hands out a buffer
    that was given back with the same size in bytes, whatever its shape and dtype were.  A pool belongs to one rank.

    Cost: a dict look-up and one view a call, about 1 us.
    """

    __slots__ = ("_free", "_xp", "held")

    def __init__(self, xp: Any = np) -> None:
        self._free: dict[int, list[Array]] = {}
        self._xp = xp
        self.held = 0  # bytes that lie in the pool and are in nobody's use

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised C-contiguous array; its content is whatever the last owner left."""
        dtype = np.dtype(dtype)
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        free = self._free.get(nbytes)
        if free:
            self.held -= nbytes
            raw = free.pop()
        else:
            raw = self._xp.empty(nbytes, np.uint8)
        return raw.view(dtype).reshape(shape) if nbytes else self._xp.empty(shape, dtype)

    def give(self, array: Array) -> None:
        """Take back an array that came from `take`; nobody may read or write it afterwards."""
        base = array.reshape(-1).view(np.uint8)
        if base.nbytes:
            self.held += base.nbytes
            self._free.setdefault(base.nbytes, []).append(base)

    def clear(self) -> None:
        """Let all idle buffers go."""
        self._free.clear()
        self.held = 0


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed memory instead of giving it back to the operating system.

    By default glibc maps every large array anew, so each temporary of a training step costs a page fault each 4 KiB.
    With mapping off and trimming put out of reach, the arrays of one step lie where those of the last step lay.  NumPy
    asks malloc for its arrays, so this reaches all of them.

    Returns:
        Whether the C library knows how (glibc does; others are left as they are).
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # glibc's malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(mmap_max, 0), mallopt(trim_threshold, 2**31 - 1), mallopt(top_pad, 1 << 26)])


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Keep Python's search for reference cycles from starting inside the block.

    Tapes make tens of thousands of small objects and no cycles, and each search would look at all of them: with 10,000
    ops a fifth of the time of a walk.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

"""`cupy.RawModule` and `cupy.RawKernel` on the stand-in: the CUDA source runs on the host (`emulation.py`).

Stricter than CuPy, which hands over whatever it is given: arguments must be what the kernel declares.  An array for a
pointer to elements of another size or kind, an int for a float, or a None, is an error here and garbage there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
from emulation import Argument, EmulationError, Module, Parameter, Region, compiled
from strict_array import ndarray
from strict_memory import bounds_of
from strict_stream import get_current_stream, launched, timeline
from strict_work import check_devices

MOST_SHARED = 48 << 10
"""Bytes of shared memory that a block has unless its kernel asks for more."""
UNBOUND = 256
"""Threads of a block for which there are registers whatever the kernel takes: 65,536 of a multiprocessor by 255."""
MOST_ASKED = 227 << 10  # of an sm_90; an sm_80 has 163 KiB, an sm_70 96
_OPTIONS = ("-std=", "--std=", "-D", "--use_fast_math", "-lineinfo", "--generate-line-info", "--fmad=", "-arch=")
_ORDER: ContextVar[str] = ContextVar("order", default="up")
_KINDS = {"b": "u", "i": "i", "u": "u", "f": "f"}


@contextlib.contextmanager
def order_of_threads(order: str) -> Iterator[None]:
    """Run the kernels of this block with their threads "up", "down", or "both" ways, which must give the same."""
    assert order in ("up", "down", "both"), order
    token = _ORDER.set(order)
    try:
        yield
    finally:
        _ORDER.reset(token)


class RawKernel:
    """A kernel by itself, or one of a module."""

    def __init__(
        self,
        code: str,
        name: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        *,
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        jitify: bool = False,
    ) -> None:
        _check(code, options, backend, (translate_cucomplex, enable_cooperative_groups, jitify))
        self.code, self.name, self.options, self.backend = code, name, options, backend
        self.__name__ = name
        self._module: Module | None = None
        self._dynamic = MOST_SHARED

    def compile(self, log_stream: Any = None) -> None:
        self._module = compiled(self.code, self.options)
        if self.name not in self._module.parameters:
            raise EmulationError(f"CUDA_ERROR_NOT_FOUND: there is no kernel {self.name}")

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._dynamic

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, nbytes: int) -> None:
        if not 0 <= nbytes <= MOST_ASKED:
            raise EmulationError(f"CUDA_ERROR_INVALID_VALUE: {nbytes} bytes of shared memory, a block has {MOST_ASKED}")
        self._dynamic = nbytes

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        if self._module is None:
            self.compile()
        assert self._module is not None
        shape = (*_three(grid, "grid"), *_three(block, "block"))
        self._check_shape(shape, shared_mem)
        declared = self._module.parameters[self.name]
        if len(args) != len(declared):
            raise TypeError(f"{self.name} takes {len(declared)} arguments, {len(args)} are given")
        regions = _Regions()
        given = [
            regions.place(x, p, f"{self.name}, argument {i}")
            for i, (x, p) in enumerate(zip(args, declared, strict=True))
        ]
        whole, arguments = regions.merged(given)
        arrays = [x for x in args if isinstance(x, ndarray)]
        check_devices(arrays)
        held = [x._values for x in arrays]
        work = partial(_run, self._module, (self.name, shape, shared_mem, _ORDER.get(), whole, arguments), held)
        timeline.put(stream or get_current_stream(), work)
        launched(self.name)

    def _check_shape(self, shape: tuple[int, ...], shared: int) -> None:
        blocks, threads = shape[:3], shape[3:]
        if blocks[0] >= 2**31 or max(blocks[1:]) > 65_535:
            raise EmulationError(f"CUDA_ERROR_INVALID_VALUE: {self.name} with a grid of {blocks}")
        if np.prod(threads) > 1024 or threads[2] > 64:
            raise EmulationError(f"CUDA_ERROR_INVALID_VALUE: {self.name} with a block of {threads}")
        assert self._module is not None
        most = self._module.threads[self.name] or UNBOUND
        if np.prod(threads) > most:
            raise EmulationError(
                f"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: {self.name} with a block of {threads}; more than {most} threads"
                " need __launch_bounds__, or there may be no registers for them"
            )
        if shared > self._dynamic:
            raise EmulationError(
                f"CUDA_ERROR_INVALID_VALUE: {self.name} with {shared} bytes of dynamic shared memory, "
                f"max_dynamic_shared_size_bytes is {self._dynamic}"
            )


class RawModule:
    """CUDA source with kernels; compiled when the first of them is asked for."""

    def __init__(
        self,
        *,
        code: str | None = None,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Any = None,
        jitify: bool = False,
    ) -> None:
        if code is None or path is not None:
            raise TypeError("the stand-in plays modules of `code` alone")
        if name_expressions is not None:
            raise NotImplementedError('the stand-in plays no name_expressions: make the kernels extern "C"')
        _check(code, options, backend, (translate_cucomplex, enable_cooperative_groups, jitify))
        self.code, self.options, self.backend = code, options, backend

    def compile(self, log_stream: Any = None) -> None:
        compiled(self.code, self.options)

    def get_function(self, name: str) -> RawKernel:
        kernel = RawKernel(self.code, name, self.options, self.backend)
        kernel.compile()
        return kernel


class _Regions:
    """The arrays of a launch, those that overlap as one stretch of memory."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, bool, int]] = []  # begin, end, is written, where the owner begins

    def place(self, x: Any, declared: Parameter, where: str) -> tuple[int, int]:
        """(-1, the bits of a number) or (the number of a span, an address)."""
        if declared.kind == "p":
            if isinstance(x, ndarray):
                return self._array(x, declared, where)
            if type(x) in (np.uint64, np.intp) and not (x and declared.of == "x"):
                return -1, int(x)  # an address, or null
            raise TypeError(f"{where}: the kernel takes a pointer, not {type(x)}")
        if isinstance(x, ndarray):
            raise TypeError(f"{where}: the kernel takes a number, not an array")
        if isinstance(x, int):
            x = np.int64(x)
        elif isinstance(x, float):
            x = np.float64(x)
        if not isinstance(x, np.generic) or x.dtype.kind not in "?biuf":
            raise TypeError(f"Unsupported type {type(x)} ({where})")
        is_same = _KINDS[x.dtype.kind] == declared.kind or {x.dtype.kind, declared.kind} == {"i", "u"}
        if x.itemsize != declared.size or not is_same:
            raise TypeError(f"{where}: {x.dtype} is given, the kernel takes {declared.kind}{8 * declared.size}")
        return -1, int.from_bytes(x.tobytes(), "little")

    def _array(self, x: ndarray, declared: Parameter, where: str) -> tuple[int, int]:
        values = x._values
        is_known = declared.of not in "sv" and values.dtype.kind in _KINDS and not _is_half(values.dtype)
        kinds = {_KINDS[values.dtype.kind], declared.of} if is_known else {""}
        is_size = declared.size == values.itemsize or declared.of == "v"
        if not is_size or kinds == {"f", "i"} or kinds == {"f", "u"}:
            raise TypeError(
                f"{where}: an array of {values.dtype} is given, the kernel takes {declared.of}{8 * declared.size} *"
            )
        begin, end = bounds_of(values)
        owner = bounds_of((x._base if x._base is not None else x)._values)[0]
        address = values.__array_interface__["data"][0]
        self._spans.append((begin, end, not declared.is_const, owner))
        return len(self._spans) - 1, address

    def merged(self, given: list[tuple[int, int]]) -> tuple[list[Region], list[Argument]]:
        regions: list[Region] = []
        region_of: dict[int, int] = {}
        for i in sorted(range(len(self._spans)), key=self._spans.__getitem__):
            begin, end, is_written, owner = self._spans[i]
            last = regions[-1] if regions else None
            if last is not None and begin < last.memory + last.size:
                last.size = max(last.size, end - last.memory)
                last.is_written |= is_written
            else:
                regions.append(Region(begin, end - begin, is_written, begin - owner))
            region_of[i] = len(regions) - 1
        arguments = []
        for span, value in given:
            at = -1 if span < 0 else region_of[span]
            arguments.append(Argument(at, value if at < 0 else value - regions[at].memory))
        return regions, arguments


def _run(module: Module, what: tuple[Any, ...], held: list[np.ndarray]) -> None:
    """Memory is held until the kernel has run."""
    module.run(*what)


def _is_half(dtype: Any) -> bool:
    return bool(dtype.itemsize == 2 and dtype.kind not in "iu")


def _three(sizes: tuple[int, ...], what: str) -> tuple[int, ...]:
    if not isinstance(sizes, tuple):
        raise TypeError(f"{what} must be a tuple, not {type(sizes)}")
    return tuple(max(1, int(n)) for n in (*sizes, 1, 1)[:3])  # CuPy, too, makes 1 of 0


def _check(code: Any, options: Any, backend: str, flags: tuple[bool, ...]) -> None:
    if not isinstance(code, str) or not isinstance(options, tuple):
        raise TypeError("the code is a str, the options are a tuple of str")
    if backend not in ("nvrtc", "nvcc") or any(flags):
        raise NotImplementedError("the stand-in plays plain kernels of nvrtc")
    for option in options:
        if not option.startswith(_OPTIONS):
            raise ValueError(f"nvrtc: unrecognized option {option}, or one that the stand-in does not know")

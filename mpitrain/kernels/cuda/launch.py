"""From a CUDA source to a kernel that runs: compiled by CuPy when it is first asked for, once for each dtype.

    launch("norm", "layer_norm", x.dtype, rows, 256, x, weight, y, width, eps)

`csrc/norm.cu` is put behind `numerics.h`, which the C compiler reads too, and `common.cuh`; what comes out needs no
header of a toolkit.  CuPy keeps what it has compiled on disk, so a second start of a program compiles nothing.
"""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import Any

import numpy as np

from mpitrain.backend import is_half, wide

THREADS = 256
"""Of a block, where nothing speaks for another number."""
MOST_BLOCKS = 65_535
"""Of kernels that pass over elements: more would only wait for a turn."""

_NULL = np.uint64(0)
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


def blocks_for(elements: int, threads: int = THREADS) -> int:
    """How many blocks a pass over so many elements takes, at least one."""
    return min(max(1, -(-elements // threads)), MOST_BLOCKS)


def launch(
    source: str, name: str, dtype: Any, blocks: int | tuple[int, ...], threads: int, *args: Any, shared: int = 0
) -> None:
    """Put a kernel on the current stream; returns before it has run.

    Args:
        source: a file of `csrc`, without its ending.
        name: the function in it.
        dtype: what its arrays hold (STORE in the source).
        blocks: of the grid; nothing is launched where there are none.
        threads: of a block.
        args: arrays of a device, as pointers to their first element; whole numbers, as `long long`; other numbers, as
            REAL; NumPy's scalars, as what they are; None, as a null pointer.
        shared: bytes of dynamic shared memory.

    Cost: the host does the same little, whatever the kernel does.
    """
    grid = blocks if isinstance(blocks, tuple) else (blocks,)
    if not all(grid):
        return
    kernel, real = _kernel(source, name, np.dtype(dtype))
    kernel(grid, (threads,), tuple(_given(x, real) for x in args), shared_mem=shared)


def _given(x: Any, real: Any) -> Any:
    if x is None:
        return _NULL
    if isinstance(x, bool | int):
        return np.int64(x)
    return real(x) if type(x) is float else x


@functools.cache
def _kernel(source: str, name: str, dtype: Any) -> tuple[Any, Any]:
    """The compiled function, and the type of its REAL numbers."""
    return _module(source, dtype).get_function(name), wide(dtype).type


@functools.cache
def _module(source: str, dtype: Any) -> Any:
    import cupy

    return cupy.RawModule(code=text(source), options=options(dtype), backend="nvrtc")


def forget() -> None:
    """Let go of all that was compiled: the next launch asks CuPy again."""
    _kernel.cache_clear()
    _module.cache_clear()


def text(source: str) -> str:
    """The whole text of a source, with what stands in front of it, and of the `.cuh` files that it includes."""
    package = resources.files("mpitrain.kernels")
    parts = "csrc/numerics.h", "cuda/csrc/common.cuh", f"cuda/csrc/{source}.cu"
    whole = "".join(package.joinpath(part).read_text() for part in parts)
    return _INCLUDE.sub(lambda found: package.joinpath(f"cuda/csrc/{found[1]}").read_text(), whole)


def sources() -> list[str]:
    """The names of all sources."""
    folder = resources.files("mpitrain.kernels") / "cuda" / "csrc"
    return sorted(file.name.removesuffix(".cu") for file in folder.iterdir() if file.name.endswith(".cu"))


def options(dtype: Any) -> tuple[str, ...]:
    """What a compiler is told of the dtype that arrays hold."""
    real = "float" if wide(dtype) == np.float32 else "double"
    store = real
    if is_half(dtype):
        store = "mt_half" if np.dtype(dtype).kind == "f" else "mt_brain"
    return ("--std=c++14", f"-DREAL={real}", f"-DREAL_IS_FLOAT={int(real == 'float')}", f"-DSTORE={store}")

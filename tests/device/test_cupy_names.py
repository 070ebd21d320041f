"""The library uses no name that CuPy lacks, and the file of names is what an installed CuPy says."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import strict_memory
import strict_runtime
import strict_stream
from cupy_names import NAMES, signature
from cupy_scan import complaints, uses
from strict_array import ndarray
from strict_cupy import StrictCupy
from strict_kernel import RawKernel, RawModule

HERE = Path(__file__).parent
LIBRARY = sorted((HERE.parents[1] / "mpitrain").rglob("*.py"))


def installed_cupy() -> str | None:
    """The version of CuPy in this environment."""
    for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def test_the_frozen_names_are_those_of_the_installed_cupy():
    version = installed_cupy()
    if version is None:
        pytest.skip("CuPy is not installed: the frozen names cannot be compared with it")
    if version != NAMES["cupy"]:
        pytest.skip(f"the frozen names are those of CuPy {NAMES['cupy']}, here is {version}")
    # In a process of its own: what is imported stays, and the library looks for it.
    asked = subprocess.run([sys.executable, HERE / "freeze_cupy.py"], capture_output=True, text=True, check=True)
    assert asked.stdout == (HERE / "cupy_names.json").read_text()


def test_the_library_uses_what_cupy_has():
    found = {str(path.relative_to(HERE.parents[1])): complaints(path.read_text()) for path in LIBRARY}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_scan_sees_the_librarys_uses():
    some = [HERE.parents[1] / "mpitrain" / name for name in ("kernels/reference", "autograd/ops", "parallel")]
    files = [path for folder in some for path in folder.rglob("*.py")]
    found = [".".join(names) for path in files for _, names, _ in uses(path.read_text())]
    assert len(found) > 150
    assert {"multiply", "add.reduceat", "where", "einsum", "take_along_axis", "empty"} <= set(found)


@pytest.mark.parametrize(
    "line",
    [
        "xp.block([a, b])",
        "xp.errstate(all='ignore')",
        "array_module(x).longdouble",
        "f = array_module(x, y).nanpercentile",
        "self._xp.frompyfunc",
        "xp.maximum.reduce(x)",
        "xp.linalg.multi_dot(x)",
        "xp.add(a, b, where=m)",
        "xp.sqrt(a, b, c)",
        "xp.exp(a, order='C')",
        "xp.sum(a, initial=0)",
        "xp.argsort(a, stable=True)",
        "xp.einsum_path('ij', a)",
        "xp.cuda.synchronize()",
        "xp.cuda.runtime.getDevices()",
        "cupy.cuda.Stream(blocking=False)",
        "cupy.cuda.Stream.wait(e)",
        "self._xp.cuda.alloc_pinned_memory()",
        "cupy.RawModule.get_kernel",
    ],
)
def test_the_scan_complains_about(line):
    assert len(complaints(f"y = 1\n{line}")) == 1
    assert complaints(line)[0].startswith("line 1: cupy")


def test_the_scan_lets_pass_what_cupy_has():
    source = (
        "xp.add(a, b, out=c)\nxp.add.reduceat(a, i, axis=0)\nxp.sum(*args)\nxp.linalg.norm(a, axis=1)\nother.block(x)"
    )
    source += (
        "\nxp.cuda.Stream(non_blocking=True)\ncupy.cuda.Stream.null.synchronize()\nxp.cuda.runtime.getDeviceCount()"
    )
    assert complaints(source) == []


def test_what_the_stand_in_plays_by_itself_has_cupys_parameters():
    """The others check their arguments by CuPy's signature."""
    own = {name: (NAMES["methods"].get(name), item) for name, item in vars(ndarray).items() if callable(item)}
    own |= {name: (NAMES["functions"].get(name), getattr(StrictCupy, name)) for name in vars(StrictCupy)}
    checked = 0
    for name, (words, function) in own.items():
        if name.startswith("_") or words is None or name == "matmul":
            continue
        mine = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        theirs = list(signature(words).parameters.values())
        assert [(p.name, p.kind) for p in mine] == [(p.name, p.kind) for p in theirs], name
        assert [p.default is p.empty for p in mine] == [p.default is p.empty for p in theirs], name
        checked += 1
    assert checked > 12


PLAYED = {
    "Stream": strict_stream.Stream,
    "Event": strict_stream.Event,
    "get_current_stream": strict_stream.get_current_stream,
    "get_elapsed_time": strict_stream.get_elapsed_time,
    "Device": strict_runtime.Device,
    "MemoryPool": strict_memory.MemoryPool,
    "MemoryPointer": strict_memory.MemoryPointer,
    "PinnedMemory": strict_memory.PinnedMemory,
    "PinnedMemoryPool": strict_memory.PinnedMemoryPool,
    "alloc_pinned_memory": strict_memory.alloc_pinned_memory,
    "RawKernel": RawKernel,
    "RawModule": RawModule,
    "get_cublas_handle": strict_runtime.get_cublas_handle,
    "is_available": strict_runtime.is_available,
}
PLAYED |= {f"runtime.{name}": getattr(strict_runtime, name) for name in strict_runtime._RUNTIME}


def test_what_the_stand_in_plays_of_cuda_has_cupys_parameters_and_no_more():
    frozen, checked = NAMES["cuda"], 0
    for name, item in PLAYED.items():
        assert name in frozen
        members = [member for member in vars(item) if not member.startswith("_")] if inspect.isclass(item) else []
        for inner in (name, *(f"{name}.{member}" for member in members)):
            assert inner in frozen, inner
            words = frozen[inner]
            function = item if inner == name else getattr(item, inner.rpartition(".")[2])
            if words is None or words == "*args **kwargs":
                continue
            mine = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
            theirs = list(signature(words).parameters.values())
            assert [(p.name, p.default is p.empty) for p in mine] == [(p.name, p.default is p.empty) for p in theirs], (
                inner
            )
            checked += 1
    assert checked > 25


def test_the_stand_in_has_no_attribute_that_cupy_lacks():
    public = {name for name in vars(ndarray) if not name.startswith("_")}
    assert public <= {*NAMES["methods"], *NAMES["attributes"]}
    of_any_class = {*dir(object), "__getattr__", "__weakref__", "__module__", "__slots__", "__annotations__"}
    of_any_class |= {"__static_attributes__", "__firstlineno__"}
    special = {name for name in vars(ndarray) if name.startswith("__")}
    assert special <= {*NAMES["special"], *of_any_class}

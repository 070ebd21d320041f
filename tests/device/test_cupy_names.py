"""The library uses no name that CuPy lacks, and the file of names is what an installed CuPy says."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from cupy_names import NAMES, signature
from cupy_scan import complaints, uses
from strict_array import ndarray
from strict_cupy import StrictCupy

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


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(HERE.parents[1])))
def test_the_library_uses_what_cupy_has(path):
    assert complaints(path.read_text()) == []


def test_the_scan_sees_the_librarys_uses():
    found = [".".join(names) for path in LIBRARY for _, names, _ in uses(path.read_text())]
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
    ],
)
def test_the_scan_complains_about(line):
    assert len(complaints(f"y = 1\n{line}")) == 1
    assert complaints(line)[0].startswith("line 1: cupy")


def test_the_scan_lets_pass_what_cupy_has():
    source = (
        "xp.add(a, b, out=c)\nxp.add.reduceat(a, i, axis=0)\nxp.sum(*args)\nxp.linalg.norm(a, axis=1)\nother.block(x)"
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


def test_the_stand_in_has_no_attribute_that_cupy_lacks():
    public = {name for name in vars(ndarray) if not name.startswith("_")}
    assert public <= {*NAMES["methods"], *NAMES["attributes"]}
    of_any_class = {*dir(object), "__getattr__", "__weakref__", "__module__", "__slots__", "__annotations__"}
    of_any_class |= {"__static_attributes__", "__firstlineno__"}
    special = {name for name in vars(ndarray) if name.startswith("__")}
    assert special <= {*NAMES["special"], *of_any_class}

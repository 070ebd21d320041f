"""Reads library code for what it takes from an array module, and says what CuPy does not have.

    xp.NAME   array_module(x).NAME   self._xp.NAME   cupy.NAME      and the methods of ufuncs: xp.add.reduceat
    xp.cuda.NAME   xp.cuda.runtime.NAME

Running the library on the stand-in finds the same, but only on lines that a test runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from cupy_names import NAMES, check_call

_MODULE = re.compile(r"\b_?xp\.|\bcupy\.|\barray_module\(")


def uses(source: str) -> Iterator[tuple[int, list[str], ast.Call | None]]:
    """(line, names after the module, the call of it if there is one) for each use of an array module."""
    if not _MODULE.search(source):  # most files: they need not be read
        return
    nodes = list(ast.walk(ast.parse(source)))
    called = {node.func: node for node in nodes if isinstance(node, ast.Call)}
    inner = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node not in inner and (names := _names(node)):
            yield node.lineno, names, called.get(node)


def complaints(source: str) -> list[str]:
    """One line for each use that CuPy would refuse."""
    found = []
    for line, names, call in uses(source):
        try:
            _check(names, call)
        except (AttributeError, TypeError) as error:
            found.append(f"line {line}: {error}")
    return found


def _names(node: ast.expr) -> list[str]:
    """["add", "reduceat"] of `xp.add.reduceat`; [] where no array module stands in front."""
    names: list[str] = []
    while isinstance(node, ast.Attribute) and node.attr not in ("xp", "_xp"):
        names.insert(0, node.attr)
        node = node.value
    is_module = isinstance(node, ast.Name) and node.id in ("xp", "cupy")
    is_module = is_module or (isinstance(node, ast.Attribute) and node.attr in ("xp", "_xp"))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        is_module = node.func.id == "array_module"
    return names if is_module else []


def _check(names: list[str], call: ast.Call | None) -> None:
    name, *rest = names
    if name in NAMES["ufuncs"]:
        about = NAMES["ufuncs"][name]
        if rest and rest[0] not in (*about.get("methods", ()), "nin", "nout", "nargs", "types", "name"):
            raise AttributeError(f"cupy.{name} has no {rest[0]}")
        words = " ".join(f"x{i}" for i in range(about["nin"])) + " / out= * "
        words += " ".join(f"{keyword}=" for keyword in NAMES["ufunc_keywords"] if keyword != "out")
    elif name == "linalg" and rest:
        if rest[0] not in NAMES["linalg"]:
            raise AttributeError(f"cupy.linalg has no {rest[0]}")
        words = NAMES["linalg"][rest[0]]
    elif name == "cuda" or name in NAMES["cuda"]:
        words = _of_cuda([name, *rest])
        if words is None:
            return
    elif name in NAMES["functions"]:
        words = NAMES["functions"][name]
    elif name in NAMES["others"] or name in NAMES["modules"]:
        return
    else:
        raise AttributeError(f"cupy has no {name}")
    starred = call is None or any(isinstance(x, ast.Starred) for x in call.args)
    if not starred and call is not None and (name in ("linalg", "cuda") or not rest):
        given: dict[str, Any] = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        check_call(".".join(names), words, tuple(call.args), given)


def _of_cuda(names: list[str]) -> str | None:
    """The parameters of `cupy.cuda....`, or of a class of raw kernels; None: nothing is known of them."""
    inner = [name for name in names if name != "cuda"]
    if inner[:1] in (["cublas"], ["nccl"]):
        return None  # bindings of libraries that `freeze_cupy.py` cannot ask without them
    for length in range(1, len(inner) + 1):  # Stream.null.synchronize: the last part that CuPy names
        name = ".".join(inner[:length])
        if name not in ("runtime", "Stream.null") and name not in NAMES["cuda"]:
            raise AttributeError(f"cupy.cuda has no {name}")
        if name == "Stream.null":
            return None
    found: str | None = NAMES["cuda"].get(".".join(inner))
    return found

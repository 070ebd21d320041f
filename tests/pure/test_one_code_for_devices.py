"""One code for every device: who may name CuPy, and that no parallel algorithm asks where its arrays lie.

Both are read off the source.  A test of these tests is below each: what it must find, and what it must let pass.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "mpitrain"
NAMERS = ("backend.py", "device.py", "kernels/", "comm/")
"""Files and folders that know CuPy by its name."""
ALGORITHMS = ("autograd", "collectives.py", "models", "nn", "optim", "parallel", "pipeline")
"""What runs on any device and never asks on which."""
LOOKERS = {
    "autograd/ops/experts.py": "numbers of rows are checked",
    "autograd/ops/fused.py": "targets are checked",
    "autograd/ops/index.py": "places are checked",
    "parallel/vocabulary.py": "words are checked",
    "parallel/context/layout.py": "documents side by side are found, so that attention may leave out keys",
    "parallel/context/ring.py": "a block of keys that nobody sees is left out",
}
"""Who may call `backend.at_hand`, and for what: checks, and work that may be left out."""
OF_PYTHON = {"autograd/tensor.py": 1}
"""Where NumPy's arrays are told from Python's numbers and lists, and how often."""
ASKING = frozenset(("cuda", "cupyx", "__cuda_array_interface__", "get_array_module", "device", "Device"))
"""Attributes and names by which one could ask for the device of an array or of a module."""


def sources(*parts: str, having: str = "") -> Iterator[tuple[str, ast.Module]]:
    """The code of files and folders of the package, if this stands in their text: path, and syntax tree."""
    for part in parts:
        path = ROOT / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text = file.read_text(encoding="utf-8")
            if having in text:
                yield file.relative_to(ROOT).as_posix(), ast.parse(text)


def docstrings(tree: ast.AST) -> set[int]:
    """Strings that stand alone: prose."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def names_cupy(tree: ast.Module) -> list[int]:
    """Lines whose code names CuPy: in an import, a name, an attribute, or a string that is its name or code of it."""
    prose, found = docstrings(tree), []
    for node in ast.walk(tree):
        words: list[str] = []
        match node:
            case ast.Import():
                words = [alias.name for alias in node.names]
            case ast.ImportFrom():
                words = [node.module or ""]
            case ast.Name():
                words = [node.id]
            case ast.Attribute():
                words = [node.attr]
            case ast.Constant(value=str(text)) if id(node) not in prose:
                is_code = "import cupy" in text or text.split(".")[0] in ("cupy", "cupyx")
                words = ["cupy"] if is_code else []
        if any(word.split(".")[0] in ("cupy", "cupyx") for word in words):
            found.append(node.lineno)  # type: ignore[attr-defined]
    return found


def is_host_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("np", "numpy")


def is_host_array(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "ndarray" and is_host_module(node.value)


def is_module_name(node: ast.AST) -> bool:
    """`xp.__name__`, `self._xp.__name__`."""
    if not isinstance(node, ast.Attribute) or node.attr != "__name__":
        return False
    owner = node.value
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return name.lstrip("_") == "xp" or (isinstance(owner, ast.Call) and "array_module" in ast.unparse(owner.func))


def asks(tree: ast.Module) -> list[tuple[int, str]]:
    """Lines that ask where an array lies, and how."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others) if any(map(is_host_module, (left, *others))):
                found.append((node.lineno, "a module is compared with numpy"))
            case ast.Compare(left=left, comparators=others) if any(map(is_host_array, (left, *others))):
                found.append((node.lineno, "numpy.ndarray"))
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=args) if any(
                is_host_array(part) for arg in args for part in ast.walk(arg)
            ):
                found.append((node.lineno, "numpy.ndarray"))
            case ast.Call(func=ast.Name(id="hasattr" | "getattr"), args=[_, ast.Constant(value=str(name)), *_]) if (
                name in ASKING or name in ("get", "__array_interface__")
            ):
                found.append((node.lineno, name))
            case ast.Attribute() if is_module_name(node):
                found.append((node.lineno, "__name__"))
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in ASKING:
                found.append((node.lineno, name))
            case ast.ImportFrom(module="mpitrain.device" | "mpitrain.comm.devices"):
                found.append((node.lineno, "mpitrain.device"))
    return found


def calls_at_hand(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "at_hand" for node in ast.walk(tree))


def test_cupy_is_named_where_arrays_are_made_moved_and_computed_only():
    namers = {path: lines for path, tree in sources(".", having="cupy") if (lines := names_cupy(tree))}
    strangers = {path: lines for path, lines in namers.items() if not path.startswith(NAMERS)}
    assert not strangers, f"these name CuPy; take the array module from the arrays, or ask backend.py: {strangers}"
    assert {"backend.py", "device.py"} <= namers.keys()  # or the search finds nothing


@pytest.mark.parametrize(
    ("code", "is_named"),
    [
        ("import cupy", True),
        ("import cupy.cuda as c", True),
        ("from cupyx import empty_pinned", True),
        ("def f():\n    import cupy as xp", True),
        ("m = sys.modules.get('cupy')", True),
        ("m = import_module('cupy.cuda')", True),
        ("x = cupy.zeros(1)", True),
        ("run('python -c \"import cupy; print(1)\"')", True),
        ("mpitrain.cupy", True),
        ('"""Arrays are CuPy\'s: import cupy first."""', False),
        ("xp: Any = np  # numpy or cupy", False),
        ("raise E('CuPy is missing; pip install cupy-cuda13x')", False),
    ],
)
def test_code_that_names_cupy_is_told_from_prose(code, is_named):
    assert bool(names_cupy(ast.parse(code))) == is_named


def test_no_parallel_algorithm_asks_where_its_arrays_lie():
    found = {path: here for path, tree in sources(*ALGORITHMS) if len(here := asks(tree)) != OF_PYTHON.get(path, 0)}
    assert not found, f"one code serves all devices; these ask on which they are: {found}"


def test_those_who_look_at_values_on_the_host_are_known():
    lookers = {path for path, tree in sources(*ALGORITHMS, having="at_hand") if calls_at_hand(tree)}
    assert lookers == set(LOOKERS), "at_hand is for checks, and for work that may be left out: say in LOOKERS for what"


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("if xp is np: pass", True),
        ("y = a if array_module(x) is not np else b", True),
        ("if np == xp: pass", True),
        ("if isinstance(x, np.ndarray): pass", True),
        ("if isinstance(x, (int, np.ndarray)): pass", True),
        ("if type(x) is np.ndarray: pass", True),
        ("if hasattr(x, 'get'): pass", True),
        ("if hasattr(x, '__cuda_array_interface__'): pass", True),
        ("xp.cuda.get_current_stream().synchronize()", True),
        ("if x.device.id: pass", True),
        ("if xp.__name__ == 'numpy': pass", True),
        ("if self._xp.__name__ == 'numpy': pass", True),
        ("if array_module(x).__name__ == 'numpy': pass", True),
        ("from mpitrain.device import CPU", True),
        ("xp = array_module(x)\ny = xp.zeros(3, np.float32)", False),
        ("if x.dtype == np.float16: pass", False),
        ("if mask is None or x is not y: pass", False),
        ("if isinstance(x, xp.ndarray): pass", False),
        ("if type(model).__name__ == 'Module': pass", False),
    ],
)
def test_code_that_asks_is_found(code, is_found):
    assert bool(asks(ast.parse(code))) == is_found

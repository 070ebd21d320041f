"""What an installed CuPy can do, written down: `python tests/device/freeze_cupy.py > tests/device/cupy_names.json`.

No GPU is needed: `import cupy` works without a driver, and nothing here makes an array.  The stand-in of this folder
refuses whatever the file does not name.

A signature is a line of its parameters: `a axis= out= * dtype=` is (a, axis=..., out=..., *, dtype=...).

    functions   from `inspect.signature`, compiled ones and methods from the first line of their docstring
    ufuncs      operand counts and loops from the object; keywords and methods by asking: a call with a keyword that is
                not known ends in "Wrong arguments", any other gets as far as the operands
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from typing import Any

UFUNC_KEYWORDS = ("out", "where", "dtype", "casting", "order", "subok", "axis", "axes", "keepdims", "initial")


def names() -> dict[str, Any]:
    """Everything that the file holds."""
    import cupy
    from cupy._core.flags import Flags

    public = {name: getattr(cupy, name) for name in dir(cupy) if not name.startswith("_")}
    ufuncs = {name: item for name, item in public.items() if isinstance(item, cupy.ufunc)}
    functions = {name: signature(item) for name, item in public.items() if _is_function(item) and name not in ufuncs}
    modules = {name: item for name, item in public.items() if inspect.ismodule(item)}
    return {
        "cupy": cupy.__version__,
        "functions": functions,
        "linalg": {name: signature(item) for name, item in vars(cupy.linalg).items() if _is_function(item)},
        "ufuncs": {name: _ufunc(item) for name, item in ufuncs.items()},
        "ufunc_keywords": [keyword for keyword in UFUNC_KEYWORDS if _takes(cupy.add, keyword)],
        "modules": sorted(modules),
        "others": sorted(set(public) - set(ufuncs) - set(functions) - set(modules) - {"annotations"}),
        "methods": {
            name: signature(item) for name, item in _members(cupy.ndarray) if callable(item) and not _is_special(name)
        },
        "attributes": [name for name, item in _members(cupy.ndarray) if not callable(item) and not _is_special(name)],
        "special": [name for name, _ in _members(cupy.ndarray) if _is_special(name)],
        "flags": [name for name in dir(Flags) if not name.startswith("_")],
        "cuda": cuda_names(),
    }


def cuda_names() -> dict[str, str | None]:
    """`cupy.cuda` and the classes of raw kernels: the parameters of what can be called, null of what cannot.

    `Stream.record` is of its objects; `Stream` itself has the parameters that make one.  Where CuPy's own words do not
    say the parameters (`RawModule`), the line is `*args **kwargs`.
    """
    import cupy

    found: dict[str, str | None] = {}
    cuda = {name: item for name, item in vars(cupy.cuda).items() if not name.startswith("_")}
    for name, item in {**cuda, "RawModule": cupy.RawModule, "RawKernel": cupy.RawKernel}.items():
        if inspect.isclass(item):
            found[name] = signature(item.__init__)
            members = [(member, getattr(item, member)) for member in dir(item) if not member.startswith("_")]
            found |= {f"{name}.{member}": _parameters(value) for member, value in members}
        elif name == "runtime":
            members = [(member, getattr(item, member)) for member in dir(item) if not member.startswith("_")]
            found |= {f"{name}.{member}": _parameters(value) for member, value in members if callable(value)}
        elif callable(item):
            found[name] = signature(item)
        else:
            found[name] = None
    return found


def _parameters(item: Any) -> str | None:
    return signature(item) if callable(item) and not inspect.isclass(item) else None


def text() -> str:
    """The file: one line a name, so that a new release of CuPy shows as a short difference."""
    sections = []
    for section, content in names().items():
        if isinstance(content, dict):
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(about)}" for name, about in sorted(content.items()))
            sections.append(f' "{section}": {{\n{lines}\n }}')
        else:
            sections.append(f' "{section}": {json.dumps(content)}')
    return "{\n" + ",\n".join(sections) + "\n}\n"


def signature(function: Any) -> str:
    """The parameters of a function or method, without `self`."""
    try:
        return _from_inspect(inspect.signature(function))
    except (TypeError, ValueError):
        first_line = (function.__doc__ or "").strip().partition("\n")[0]
        found = re.search(r"\w\((.*)\)(?: *->.*)?$", first_line)
        if found is None:
            return "*args **kwargs"  # nothing is known, so nothing is refused
        return _from_text(found.group(1))


def _from_inspect(found: inspect.Signature) -> str:
    words: list[str] = []
    kinds = inspect.Parameter
    parameters = [p for p in found.parameters.values() if p.name != "self"]
    for at, p in enumerate(parameters):
        before = parameters[at - 1].kind if at else None
        if before is kinds.POSITIONAL_ONLY is not p.kind:
            words.append("/")
        if p.kind is kinds.KEYWORD_ONLY and before not in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL):
            words.append("*")
        stars = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(p.kind, "")
        words.append(f"{stars}{p.name}{'' if p.default is p.empty else '='}")
    return " ".join(words)


def _from_text(parameters: str) -> str:
    """`_ndarray_base self, int axis=-1, *, dtype=None` as `axis= * dtype=`."""
    words = []
    for part in re.split(r",\s*(?![^()]*\))", parameters):
        left, default, _ = part.partition("=")
        name = left.split(":")[0].split()[-1] if left.strip() else ""
        if name and name != "self":
            words.append(name + default)
    return " ".join(words)


def _ufunc(item: Any) -> dict[str, Any]:
    about: dict[str, Any] = {"nin": item.nin, "nout": item.nout, "types": " ".join(_loops(item))}
    given = {"reduce": (None,), "accumulate": (None,), "reduceat": (None, None)}
    methods = [name for name, operands in given.items() if _is_supported(getattr(item, name), operands)]
    if methods:
        about["methods"] = methods
    return about


def _loops(item: Any) -> list[str]:
    """Without those of bfloat16 (E), which are there where ml_dtypes is installed."""
    return [loop for loop in item.types if "E" not in loop]


def _takes(ufunc: Any, keyword: str) -> bool:
    try:
        ufunc(*[1] * ufunc.nin, **{keyword: None})
    except TypeError as error:
        return "Wrong arguments" not in str(error)
    except Exception:  # it looks for a device before it looks at the operands
        return True
    return True


def _is_supported(method: Any, operands: tuple[None, ...]) -> bool:
    try:
        method(*operands)
    except NotImplementedError:
        return False
    except Exception:  # None is no array
        return True
    return True


def _is_function(item: Any) -> bool:
    return callable(item) and not inspect.isclass(item)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _members(kind: type) -> list[tuple[str, Any]]:
    """What an array has beyond any object, without what is private or shows in some versions of Python only."""
    plain = {*dir(object), "__module__", "__slots__", "__pyx_vtable__", "__static_attributes__", "__firstlineno__"}
    plain |= {"__buffer__", "__release_buffer__"}  # it raises for device memory, under any version
    found = [name for name in dir(kind) if name not in plain and (_is_special(name) or not name.startswith("_"))]
    return [(name, getattr(kind, name)) for name in found]


if __name__ == "__main__":
    sys.stdout.write(text())

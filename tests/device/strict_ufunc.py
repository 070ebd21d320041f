"""CuPy's ufuncs on the stand-in: their operands, keywords and loops, and the operators made of them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from cupy_names import NAMES, check_call
from strict_array import UFUNCS, check_brain, ndarray, run

_OPERATORS = (
    "add sub:subtract mul:multiply truediv:true_divide floordiv:floor_divide mod:remainder pow:power matmul"
    " and:bitwise_and or:bitwise_or xor:bitwise_xor lshift:left_shift rshift:right_shift"
).split()
_COMPARISONS = "eq:equal ne:not_equal lt:less le:less_equal gt:greater ge:greater_equal".split()
_UNARY = "neg:negative pos:positive abs:absolute invert:invert".split()


class Ufunc:
    """One of CuPy's ufuncs.  `reduce`, `accumulate` and `reduceat` exist for the few that CuPy has them for."""

    def __init__(self, name: str, about: dict[str, Any]) -> None:
        self.name = self.__name__ = name
        self.nin, self.nout = about["nin"], about["nout"]
        self.nargs = self.nin + self.nout
        self.types = about["types"].split()
        self._methods = about.get("methods", ())
        self._numpy = getattr(np, name)

    def __repr__(self) -> str:
        return f"<ufunc 'cupy_{self.name}'>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if wrong := {key: value for key, value in kwargs.items() if key not in NAMES["ufunc_keywords"]}:
            raise TypeError(f"cupy.{self.name}: Wrong arguments {wrong}; known: {', '.join(NAMES['ufunc_keywords'])}")
        if not self.nin <= len(args) <= self.nargs:
            raise TypeError(f"Wrong number of arguments for cupy.{self.name}: {len(args)}")
        for x in args:
            if not isinstance(x, (ndarray, np.generic, bool, int, float, complex)):
                raise TypeError(f"cupy.{self.name}: Unsupported type {type(x)}")
        check_brain(self.name, *args)
        if not kwargs.keys() & {"out", "dtype"} and len(args) == self.nin:
            _check_numbers(self.name, args)
        out = kwargs.get("out")
        if out is not None and not isinstance(out, (ndarray, tuple)):
            raise TypeError(f"cupy.{self.name}: output arguments must be cupy.ndarray, not {type(out)}")
        writes = args[self.nin :] if out is None else out if isinstance(out, tuple) else (out,)
        kept = {key: value for key, value in kwargs.items() if value is not None}
        result = run(self._numpy, args, kept, self.name, [x for x in writes if x is not None])
        if len(args) == self.nin:
            self._check_loop(args, None if kwargs.keys() & {"out", "dtype"} else result)
        return result

    def _check_loop(self, args: tuple[Any, ...], result: Any) -> None:
        """The first loop that takes all dtypes must exist, and give what NumPy gives."""
        if not all(isinstance(x, (ndarray, np.generic)) for x in args):
            return  # a Python number takes the dtype of the others
        dtypes = tuple(x.dtype for x in args)
        outputs = _loop(self.name, tuple(self.types), dtypes)
        if result is not None and self.nout == 1 and result.dtype != outputs[0]:
            raise TypeError(f"cupy.{self.name} of {dtypes} gives {outputs[0]}, NumPy gives {result.dtype}")

    def reduce(self, array: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        self._check_method("reduce")
        given = (array, axis, dtype, out, keepdims)
        return run(self._numpy.reduce, given, {}, f"{self.name}.reduce", () if out is None else (out,))

    def accumulate(self, array: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        self._check_method("accumulate")
        given = (array, axis, dtype, out)
        return run(self._numpy.accumulate, given, {}, f"{self.name}.accumulate", () if out is None else (out,))

    def reduceat(self, array: Any, indices: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        self._check_method("reduceat")
        given = (array, indices, axis, dtype, out)
        return run(self._numpy.reduceat, given, {}, f"{self.name}.reduceat", () if out is None else (out,))

    def _check_method(self, method: str) -> None:
        if method not in self._methods:
            raise NotImplementedError(f"`cupy_{self.name}.{method}` is not supported yet")


def _check_numbers(name: str, args: tuple[Any, ...]) -> None:
    """NumPy makes float32 of a bfloat16 and a number of Python's, CuPy bfloat16: nobody should build on either."""
    is_brain = any(isinstance(x, ndarray) and x.dtype.name == "bfloat16" for x in args)
    if is_brain and any(type(x) in (int, float) for x in args):
        raise TypeError(f"cupy.{name} of bfloat16 and a number of Python's: say the dtype, or widen first")


@functools.cache
def _loop(name: str, types: tuple[str, ...], dtypes: tuple[np.dtype, ...]) -> list[np.dtype]:
    """The dtypes that the first fitting loop gives."""
    for loop in types:
        left, _, right = loop.partition("->")
        if all(np.can_cast(dtype, char) for dtype, char in zip(dtypes, left, strict=True)):
            return [np.dtype(char) for char in right]
        brain = next((dtype for dtype in dtypes if dtype.name == "bfloat16"), None)
        if "e" in left and brain is not None and all(dtype == brain or dtype.kind == "b" for dtype in dtypes):
            return [brain if char == "e" else np.dtype(char) for char in right]  # behind each loop of float16 is one
    raise TypeError(f"Wrong type ({', '.join(map(str, dtypes))}) of arguments for cupy_{name}")


def matmul(*args: Any, **kwargs: Any) -> Any:
    """CuPy's one generalised ufunc; its operands are device arrays, never numbers."""
    out = check_call("matmul", NAMES["functions"]["matmul"], args, kwargs).get("out")
    for x in args:
        if not isinstance(x, ndarray):
            raise TypeError(f"cupy.matmul: Argument has incorrect type (expected cupy.ndarray, got {type(x)})")
    return run(np.matmul, args, kwargs, writes=args[2:] if out is None else (out,))


def _install_operators() -> None:
    for word in _OPERATORS:
        name, function = _split(word)
        _set(f"__{name}__", _forward(function))
        _set(f"__r{name}__", lambda x, other, f=function: UFUNCS[f](other, x))
        _set(f"__i{name}__", _in_place(function))
    for word in _COMPARISONS:
        name, function = _split(word)
        setattr(ndarray, f"__{name}__", _forward(function))
    for word in _UNARY:
        name, function = _split(word)
        _set(f"__{name}__", lambda x, f=function: UFUNCS[f](x))


def _split(word: str) -> tuple[str, str]:
    name, _, function = word.partition(":")
    return name, function or name


def _set(special: str, method: Any) -> None:
    """Only what CuPy has: there is no __imatmul__, for one."""
    if special in NAMES["special"]:
        setattr(ndarray, special, method)


def _forward(function: str) -> Any:
    def operate(x: ndarray, other: Any) -> Any:
        if getattr(other, "__array_ufunc__", other) is None:  # it wants to be asked itself: a Tensor does
            return NotImplemented
        return UFUNCS[function](x, other)

    return operate


def _in_place(function: str) -> Any:
    def operate(x: ndarray, other: Any) -> ndarray:
        UFUNCS[function](x, other, out=x)
        return x

    return operate


UFUNCS.update({name: Ufunc(name, about) for name, about in NAMES["ufuncs"].items() if hasattr(np, name)})
UFUNCS["matmul"] = matmul
_install_operators()

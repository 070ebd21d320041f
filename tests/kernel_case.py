"""One call of a kernel, what it must give in every precision, and the comparison: on a GPU, or where one is played.

    CASES = {
        "layer_norm 5x33": Case(
            "layer_norm",
            lambda rng: {"x": normal(rng, 5, 33) + 3, "w": normal(rng, 33), "b": normal(rng, 33)},
            lambda k, a: k.layer_norm(a.x, a.w, a.b, 1e-5),
        ),
    }

Cases stand in tests/kernel_cases_TOPIC.py; tests/kernel_cases.py has them all.  The oracle is the reference, by NumPy
in float64, on the very numbers that the kernel is given.  `measure` runs a case three times:

- what comes out has shape and dtype of the reference's, and is within the bound of its precision;
- it is the same to the last bit when it is done again, and when every array lies one element after where a vector load
  would like to begin (there within the bound, where a library's products are in it);
- what is not to be written keeps its bits, and so does what lies around each array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.backend import dtype_of, is_half, to_host, wide
from mpitrain.kernels import reference

DTYPES = ("float64", "float32", "float16", "bfloat16")
BOUND = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5}
"""Allowed difference, as a share of the largest element of the result; of halves, their last digit comes on top."""
GUARD = 64  # elements before and after each array, in which nobody has business


@dataclass(frozen=True)
class Wide:
    """Numbers that are in at least float32 where others are halves: statistics, gates, gradients of weights."""

    values: np.ndarray


@dataclass(frozen=True)
class Case:
    """One call of a kernel.

    kernel: its name in `mpitrain.kernels`.
    make: inputs by name, from a generator that is the same each time.  Arrays of floats, made in float64, get the
        dtype that is tested, those in `Wide` at least float32; arrays of other dtypes, numbers and None stay.
    call: (kernels, arrays) -> results, an array or a tuple or list of them; None is left out.  The arrays are
        attributes by their names, beside `a.xp`, the module that makes new ones, and `a.dtype`, the one that is tested.
        What is written into an argument is a result, too: return it.  Views (strides, transposed) are made here.
    writes: names of inputs that may be written.
    oracle: as `call`, where float64 must round somewhere as storage does: `a.stored(x)` does it.  None: `call`.
    dtypes: in which the case is tried.
    factor: by which the bound is larger: of long sums, of differences of large numbers.
    rounded: how often a value is rounded to halves on the way beside once at the end, worth half of a last digit of the
        largest element each time.
    masks: numbers of results whose zeros must stand exactly where the reference has them, as a dropout mask's.
    exact: numbers of results that must have the bits of the reference's in the dtype tested.
    cost: "default"; "slow", tried without a GPU only when slow tests are; "gpu", tried on a GPU alone.
    by_address: which bits come out within the bound depends on where arrays lie, as with cuBLAS.
    by_reference: no kernel runs: the launcher passes this on to the reference, or there is nothing to do.
    """

    kernel: str
    make: Callable[[np.random.Generator], Mapping[str, Any]]
    call: Callable[[Any, Any], Any]
    writes: tuple[str, ...] = ()
    oracle: Callable[[Any, Any], Any] | None = None
    dtypes: tuple[str, ...] = DTYPES
    factor: float = 1.0
    rounded: float = 0.0
    masks: tuple[int, ...] = ()
    exact: tuple[int, ...] = ()
    cost: str = "default"
    by_address: bool = False
    by_reference: bool = False


@dataclass
class Outcome:
    """What was found: problems in words, none if all is well; and the largest difference as a share of its bound."""

    problems: list[str] = field(default_factory=list)
    share: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems


def measure(case: Case, kernels: Any, xp: Any, dtype: str, tell: Callable[[int], None] = lambda time: None) -> Outcome:
    """Run a case with the kernels and the arrays of `xp`, and compare.

    Args:
        case: what to run.
        kernels: where its kernel is taken from; it is to serve arrays of `xp`.
        xp: numpy or cupy.
        dtype: one of `case.dtypes`.
        tell: called with 0, 1, 2 before the three times that it is run.
    """
    with np.errstate(all="ignore"):
        return _measured(case, kernels, xp, dtype, tell)


def _measured(case: Case, kernels: Any, xp: Any, dtype: str, tell: Callable[[int], None]) -> Outcome:
    found = Outcome()
    inputs = stored(case.make(np.random.default_rng(1)), dtype)
    expected = _results((case.oracle or case.call)(reference, _exact(inputs, dtype)))
    alike = _results(case.call(reference, _copies(inputs, dtype)))
    first: list[np.ndarray] = []
    for time, (title, shift) in enumerate({"": 0, "when run again": 0, "one element further": 1}.items()):
        tell(time)
        arrays, guards = _placed(xp, inputs, dtype, shift)
        results = _results(case.call(kernels, arrays))
        first = first if title else results
        if not title or (shift and case.by_address):
            _compare(found, case, dtype, results, expected, alike)
        elif not all(map(_same_bits, results, first)):
            found.problems.append(f"{title}, other bits come out")
        for name, (x, buffer, before) in guards.items():
            after = to_host(buffer)
            inside = slice(*_place_of(x, shift))
            if not np.array_equal(np.delete(after, inside), np.delete(before, inside)):
                found.problems.append(f"{title or 'once'}: something beside {name} was written")
            if name not in case.writes and not np.array_equal(after[inside], before[inside]):
                found.problems.append(f"{title or 'once'}: {name} was written")
    return found


# ----------------------------------------------------------------------------------------------------------- inputs


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers around 0, most of them between -2 and 2."""
    return rng.standard_normal(shape)


def stored(inputs: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Inputs as a training in that dtype has them, NumPy's."""
    store = dtype_of(dtype)

    def held(x: Any) -> Any:
        if isinstance(x, Wide):
            return x.values.astype(wide(store))
        return x.astype(store) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x

    return {name: held(x) for name, x in inputs.items()}


def _exact(inputs: Mapping[str, Any], dtype: str) -> SimpleNamespace:
    """The same numbers in float64."""
    store = dtype_of(dtype)
    arrays = {name: x.astype(np.float64) if _is_floats(x) else _copy(x) for name, x in inputs.items()}
    return SimpleNamespace(
        **arrays, xp=np, dtype=np.dtype(np.float64), stored=lambda x: x.astype(store).astype(np.float64)
    )


def _copies(inputs: Mapping[str, Any], dtype: str) -> SimpleNamespace:
    return SimpleNamespace(**{k: _copy(x) for k, x in inputs.items()}, xp=np, dtype=dtype_of(dtype), stored=_same)


def _placed(xp: Any, inputs: Mapping[str, Any], dtype: str, shift: int) -> tuple[SimpleNamespace, dict[str, Any]]:
    """Inputs where `xp` has its arrays, each in a buffer between guards; and by name (array, buffer, its bytes)."""
    arrays: dict[str, Any] = {}
    guards = {}
    for name, x in inputs.items():
        arrays[name] = x
        if isinstance(x, np.ndarray):
            before = np.full((x.size + 2 * GUARD + shift) * x.itemsize, 0xFF if _is_floats(x) else 0x5A, np.uint8)
            if x.dtype == bool:
                before[...] = 1
            before[slice(*_place_of(x, shift))] = _bytes(x)
            buffer = xp.array(before)
            start, stop = _place_of(x, shift)
            arrays[name] = buffer[start:stop].view(x.dtype).reshape(x.shape)
            guards[name] = x, buffer, before
    return SimpleNamespace(**arrays, xp=xp, dtype=dtype_of(dtype), stored=_same), guards


def _place_of(x: np.ndarray, shift: int) -> tuple[int, int]:
    start = (GUARD + shift) * x.itemsize
    return start, start + x.nbytes


def _same(x: Any) -> Any:
    return x


def _copy(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray) else x


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _is_floats(x: Any) -> bool:
    return isinstance(x, np.ndarray) and (x.dtype.kind == "f" or is_half(x.dtype))


# ------------------------------------------------------------------------------------------------------- comparison


def _results(made: Any) -> list[np.ndarray]:
    several = made if isinstance(made, (tuple, list)) else [made]
    return [np.asarray(to_host(x)) for x in several if x is not None]


def _compare(
    found: Outcome,
    case: Case,
    dtype: str,
    results: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    alike: Sequence[np.ndarray],
) -> None:
    if not len(results) == len(expected) == len(alike):
        found.problems.append(f"{len(results)} results, the reference gives {len(expected)}")
        return
    for i, (y, z, like) in enumerate(zip(results, expected, alike, strict=True)):
        if (y.shape, y.dtype) != (like.shape, like.dtype):
            found.problems.append(f"result {i} is {y.dtype} {y.shape}, the reference's {like.dtype} {like.shape}")
            continue
        if i in case.exact and not _same_bits(_one_nan(y), _one_nan(like)):
            found.problems.append(f"result {i} has not the bits of the reference's")
        if i in case.masks and not np.array_equal(y == 0, like == 0):
            found.problems.append(f"result {i} has its zeros elsewhere: {np.count_nonzero((y == 0) != (like == 0))}")
        share, words = _difference(y, z.astype(np.float64), like, case, dtype)
        found.share = max(found.share, share)
        if words:
            found.problems.append(f"result {i}: {words}")


def _difference(y: np.ndarray, exact: np.ndarray, like: np.ndarray, case: Case, dtype: str) -> tuple[float, str]:
    """The largest difference as a share of what is allowed, and if it is too large where."""
    if not y.size:
        return 0.0, ""
    right, mine = exact, y.astype(np.float64)
    if _is_floats(y):
        right = exact.astype(y.dtype).astype(np.float64)  # infinite beyond its range
        if y.dtype.kind == "f":  # the lowest finite number stands for "none", and is another one in each precision
            is_none = np.abs(like) == np.finfo(like.dtype).max
            right, mine = np.where(is_none, np.inf, right), np.where(is_none & (mine == like), np.inf, mine)
    finite = np.isfinite(right)
    wrong = ~finite & (mine != right) & ~(np.isnan(mine) & np.isnan(right))
    if wrong.any():
        return np.inf, _where(wrong, y, right)
    largest = np.abs(exact[finite]).max(initial=0.0)
    allowed = BOUND[dtype] * case.factor * largest
    if is_half(dtype_of(dtype)):
        digit = _eps(dtype_of(dtype)) / 2
        allowed = allowed + case.rounded * digit * largest
        if is_half(y.dtype):
            allowed = allowed + 1.001 * digit * np.abs(exact) + _smallest(y.dtype)
    off = np.where(finite, np.abs(mine - np.where(finite, exact, 0.0)), 0.0)
    off[np.isnan(off)] = np.inf
    share = np.divide(off, allowed, out=np.where(off > 0, np.inf, 0.0), where=np.broadcast_to(allowed, off.shape) > 0)
    worst = float(share.max())
    return worst, _where(share == share.max(), y, exact) if worst > 1 else ""


def _where(wrong: np.ndarray, y: np.ndarray, exact: np.ndarray) -> str:
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{y[place]} for {exact[place]} at {place}, {np.count_nonzero(wrong)} of {wrong.size} elements"


def _eps(dtype: Any) -> float:
    return 2.0**-10 if dtype == np.float16 else 2.0**-7


def _smallest(dtype: Any) -> float:
    """The smallest number above zero."""
    return 2.0**-24 if dtype == np.float16 else 2.0**-133


def _one_nan(x: np.ndarray) -> np.ndarray:
    """With one NaN for all: which one a device makes of another is its own."""
    if not _is_floats(x):
        return x
    x = x.copy()
    x[np.isnan(x)] = np.nan
    return x


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and _bytes(one).tobytes() == _bytes(other).tobytes()

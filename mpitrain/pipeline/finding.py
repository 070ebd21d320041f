"""What an autopsy finds: a value that is not finite, where it was first seen, and of which values it was made.

A `Finding` is one rank's; it travels as JSON, so that all ranks choose the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.backend import Array, array_module, to_host
from mpitrain.comm.wire import is_inexact

FINITE, LOW, BAD = 0, 1, 2
"""All finite; some are minus infinity, which masks are made of; NaN or infinity."""

LIMITS = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 1.7976e308}
"""The largest finite number of each dtype."""

DIRECTIONS = {
    "message": "communication",
    "sum": "communication",
    "gradient": "backward",
    "norm": "backward",
    "state": "optimizer",
}
"""To which part of a step a kind of finding belongs, where it is not called so itself."""

AFTER = 1 << 30
"""Stands for the micro-batch of what comes after all of them."""


def verdict(value: Any) -> int:
    """FINITE, LOW or BAD."""
    if not hasattr(value, "dtype"):
        if not isinstance(value, float):
            return FINITE
        value = np.asarray(value)
    if not is_inexact(value.dtype) or not value.size:
        return FINITE
    xp = array_module(value)
    # Squares of single precision do not overflow in the double precision in which they are summed; one pass, no array.
    if value.dtype == np.float32 and value.flags.c_contiguous and bool(xp.isfinite(kernels.sum_of_squares(value))):
        return FINITE
    if bool(xp.isfinite(value).all()):
        return FINITE
    return BAD if bool(xp.isnan(value).any()) or bool((value == np.inf).any()) else LOW


@dataclass(frozen=True)
class Range:
    """The values of an array.

    Attributes:
        dtype, shape: of it.
        low, high: of its finite elements, as their dtype rounds them; None where there are none.
        nans, infs: how many elements are.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    nans: int
    infs: int

    @classmethod
    def of(cls, value: Any) -> Range:
        """The range of an array or a number."""
        array = to_host(value) if hasattr(value, "dtype") else np.asarray(value)
        numbers = array.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
        nans, infs = int(np.isnan(numbers).sum()), int(np.isinf(numbers).sum())
        return cls(array.dtype.name, tuple(array.shape), low, high, nans, infs)

    @property
    def largest(self) -> float:
        """The largest magnitude of a finite element; 0 where there are none."""
        return 0.0 if self.low is None or self.high is None else max(-self.low, self.high)

    def __str__(self) -> str:
        odd = [f"{count} {word}" for count, word in ((self.nans, "NaN"), (self.infs, "inf")) if count]
        size = int(np.prod(self.shape, dtype=np.int64))
        told = [f"{' and '.join(odd)} of {size}"] if odd else []
        if self.low is not None:
            told.append(f"{self.low:.3g}" if self.low == self.high else f"{self.low:.3g} ... {self.high:.3g}")
        return f"{self.dtype} {self.shape} {', else '.join(told)}".rstrip()


@dataclass(frozen=True)
class Finding:
    """The first value on a rank that is not finite.

    Attributes:
        kind: how it came to be:
            "forward", "backward": an op made it of finite inputs;
            "gradient": adding up gradients, or rounding one for a message, made it of finite ones;
            "message": it came in a message to which this rank gave nothing but finite values;
            "sum": the same, of a message to which all ranks gave finite values that are too large to be added;
            "data": it stood in the batch; "weight": in a weight; "state": in the optimizer's state;
            "norm": gradients are finite, their squares are not;
            "outside": neither an op nor a message made what an op was given.
        rank: that saw it.
        order: when, comparable between ranks: micro-batch, direction, stage along the direction, number of the op.
        step, micro: of the executor; micro is None outside of micro-batches.
        action: of the row, as `F3@1`.
        path: of the module, or name of a parameter.
        op: that made it or was at work: `gelu`, `gelu.backward`; of a state its kind; of data the attribute.
        inputs: what the op was given, as ranges: the ones of the largest numbers.
        result: what is not finite.
        message: where kind is "message": identifies the message on all its ranks.
        verb, axis, site: of it.
        at: where kind is "data": index of the first element that is NaN or infinity.
    """

    kind: str
    rank: int
    order: tuple[int, int, int, int]
    step: int
    micro: int | None
    action: str
    path: str
    op: str
    result: Range
    inputs: tuple[Range, ...] = ()
    message: str = ""
    verb: str = ""
    axis: str = ""
    site: str = ""
    at: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Finding:
        """The finding that `to_json` gave, also after JSON made lists of its tuples."""
        known = {field.name: told[field.name] for field in fields(cls)}
        ranges = [_range(one) for one in (known["result"], *known["inputs"])]
        return replace(
            cls(**known), order=tuple(known["order"]), at=tuple(known["at"]), result=ranges[0], inputs=tuple(ranges[1:])
        )

    @property
    def direction(self) -> str:
        """Which pass it belongs to: forward, backward, communication, optimizer or data."""
        return DIRECTIONS.get(self.kind, self.kind)

    @property
    def is_undefined(self) -> bool:
        """Whether an op made NaN of numbers too small for a product to pass the range: what it asks has no answer."""
        known = self.kind in ("forward", "backward") and self.result.nans and not self.result.infs and self.inputs
        return bool(known) and all(one.largest**2 < LIMITS.get(one.dtype, np.inf) for one in self.inputs)

    @property
    def passed(self) -> float | None:
        """The largest number of the result's dtype, where the result may have passed it: it holds an infinity."""
        return LIMITS.get(self.result.dtype) if self.result.infs else None


def _range(told: Mapping[str, Any]) -> Range:
    return Range(**{**told, "shape": tuple(told["shape"])})


def ranges(values: Iterable[Any], most: int = 3) -> tuple[Range, ...]:
    """The ranges of the arrays of numbers among `values`, those with the largest numbers first."""
    arrays: dict[int, Array] = {}
    for value in values:
        if hasattr(value, "dtype") and is_inexact(value.dtype) and value.size:
            arrays.setdefault(id(value), value)
    found = [Range.of(array) for array in arrays.values()]
    return tuple(sorted(found, key=lambda one: (one.nans + one.infs > 0, one.largest), reverse=True)[:most])

"""Arrays that one kernel takes together, where one kernel each would cost more to launch than to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from mpitrain.backend import Array

T = TypeVar("T")


class Several(list[T]):
    """A list that is handed over again and again.

    Attributes:
        prepared: what a device has found out about what is in it, so that it looks at it once; nobody else's business.
    """

    def __init__(self, items: Sequence[T] = ()) -> None:
        super().__init__(items)
        self.prepared: Any = None

    def renewed(self, items: Sequence[T]) -> Several[T]:
        """This list where it has these very items, else a new one."""
        same = len(items) == len(self) and all(mine is its for mine, its in zip(self, items, strict=True))
        return self if same else Several(items)


class AdamwRun(NamedTuple):
    """Vectors of one update of AdamW.

    p, g, m, v: as `adamw` takes them.
    halves: where the weights go once more, rounded to half precision; or None.
    rate: factor on the learning rate.
    decay: weight decay.
    """

    p: Array
    g: Array
    m: Array
    v: Array
    halves: Array | None
    rate: float
    decay: float


class SgdRun(NamedTuple):
    """Vectors of one update of gradient descent.

    p, g, u: as `sgd` takes them.
    halves, rate, decay: as in `AdamwRun`.
    """

    p: Array
    g: Array
    u: Array | None
    halves: Array | None
    rate: float
    decay: float

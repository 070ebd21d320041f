"""Buffers: what a module keeps from step to step though no gradient changes it, as the running mean of a batch norm.

A buffer is an array with a name and a spec, as a parameter is, and so it is part of a checkpoint, of any layout, and of
what replicas must hold alike.  No optimizer knows of it: the module itself gives it a new array, once a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array, wide
from mpitrain.nn.no_values import NoValues
from mpitrain.spec import Spec, State, slab, slab_shape


class Buffer:
    """One array.

    Args:
        name: path in the model, its place in checkpoints (`blocks.3.norm.mean`).
        full_shape: shape of the unsharded array.
        start: its values at the beginning.
        spec: how it lies across ranks, where not by default.

    After `Module.materialize`: `array` is this rank's slab, in at least float32, `rectangle` its slices in the full
    array.  Whoever changes it sets another array and writes into none, since a tape may have saved the one that is
    there.
    """

    def __init__(
        self,
        name: str,
        full_shape: Sequence[int],
        start: float = 0.0,
        spec: Mapping[str, State] | Spec | None = None,
    ) -> None:
        self.name = name
        self.full_shape = tuple(full_shape)
        self.start = start
        self.spec = spec if isinstance(spec, Spec) else Spec(spec)
        self.rectangle: tuple[slice, ...] = ()
        self.array: Array = NoValues(name)

    def materialize(self, coords: Mapping[str, int], sizes: Mapping[str, int], dtype: Any, xp: Any = np) -> None:
        """Make this rank's slab, with the values of the beginning.

        Args:
            coords, sizes: this rank's place in the layout, and the layout.
            dtype: of the model's weights.
            xp: where they live.
        """
        self.rectangle = slab(self.full_shape, self.spec, coords, sizes)
        self.array = xp.full(slab_shape(self.rectangle), self.start, wide(dtype))

    def __repr__(self) -> str:
        here = "" if isinstance(self.array, NoValues) else f"{self.array.shape} of "
        return f"Buffer({self.name} {here}{self.full_shape}, {self.spec})"

"""What every optimizer shares: its state, its blocks, and what a checkpoint keeps.

The mathematics of a method is a pure function over plain vectors (`kernels.adamw`, `sgd.momentum`).  Here stands the
loop that feeds it runs of neighbouring parameters.  State lies in one flat buffer a kind, in the order of the
parameters, in the dtype of the masters: at least float32, in which an epsilon of 1e-8 is not 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain import kernels
from mpitrain.backend import Array, array_module
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.runs import Run, join


class Joined(NamedTuple):
    """Runs, and the arrays of which they were joined."""

    arrays: Sequence[Array] = ()
    runs: Sequence[Run] = ()


class Optimizer(ABC):
    """Base of the optimizers.

    Args:
        parameters: what to train, in the order of the model; materialised, their masters of one dtype.
        lr: learning rate of a `step` that is given none.
        weight_decay: applies to the parameters with `decay`.

    Attributes:
        kinds: names of the state vectors that the method keeps for each weight.
        never_negative: those of them that are means of squares.
        updates: number of updates made; successes, not attempts.
        joined: the runs of the last step; joined anew by a step that finds other arrays.

    Raises:
        ConfigError: a hyper-parameter is out of its range.
    """

    kinds: tuple[str, ...] = ()
    never_negative: tuple[str, ...] = ()

    def __init__(self, parameters: Iterable[Parameter], *, lr: float, weight_decay: float) -> None:
        require("lr", lr, lr >= 0, "0 or more")
        require("weight_decay", weight_decay, weight_decay >= 0, "0 or more")
        self.parameters = tuple(parameters)
        self.lr = lr
        self.weight_decay = weight_decay
        self.updates = 0
        weights = [p.master for p in self.parameters]
        dtypes = {array.dtype for array in weights}
        assert len(dtypes) <= 1, f"parameters of one optimizer have one dtype, not {sorted(map(str, dtypes))}"
        xp, dtype = array_module(*weights), next(iter(dtypes), np.dtype(np.float64))
        self._size = sum(array.size for array in weights)
        self._state = {kind: xp.zeros(self._size, dtype) for kind in self.kinds}
        self.joined = Joined()

    def step(self, lr: float | None = None) -> None:
        """Update all weights in place from their gradients.

        A parameter that the step did not use has the gradient zero.

        Args:
            lr: learning rate of this update, from the schedule.
        """
        rate = self.lr if lr is None else lr
        for p in self.parameters:
            p.settle()
        self.updates += 1
        for run in self._current_runs():
            decay = self.weight_decay if run.decay else 0.0
            stop = run.start + run.weights.size
            state = [vector[run.start : stop] for vector in self._state.values()]
            self._update(run.weights, run.grads, *state, lr=rate, decay=decay)
            if run.halves is not None:
                kernels.narrow(run.weights, run.halves.dtype, out=run.halves)
        for p in self.parameters:
            p.version += 1

    @abstractmethod
    def _update(self, p: Array, g: Array, *state: Array, lr: float, decay: float) -> None:
        """One run: the method's pure function with its hyper-parameters."""

    def _current_runs(self) -> Sequence[Run]:
        """The runs, joined again where a parameter's arrays were exchanged since the last step."""
        arrays = [array for p in self.parameters for array in (p.data, p.master, p.grad)]
        known = self.joined.arrays
        if len(arrays) != len(known) or any(a is not b for a, b in zip(arrays, known, strict=True)):
            self.joined = Joined(arrays, join(self.parameters))
        return self.joined.runs

    def state_dict(self) -> dict[str, dict[str, Array]]:
        """The state for a checkpoint, besides `updates`: kind -> parameter's name -> view of its slab's shape."""
        state: dict[str, dict[str, Array]] = {kind: {} for kind in self.kinds}
        start = 0
        for p in self.parameters:
            stop = start + p.data.size
            for kind in self.kinds:
                state[kind][p.name] = self._state[kind][start:stop].reshape(p.data.shape)
            start = stop
        return state

    def load_state(self, state: Mapping[str, Mapping[str, Array]], updates: int) -> None:
        """Take over what `state_dict` gave, by copy, and the number of updates made.

        Raises:
            CheckpointError: a kind, a parameter or a shape is not what this optimizer has.  Nothing was changed then.
        """
        mine = self.state_dict()
        if updates < 0:
            raise CheckpointError(f"The optimizer's state was saved after {updates} updates, which cannot be.")
        if set(state) != set(mine):
            raise CheckpointError(
                f"The saved optimizer keeps {', '.join(sorted(state)) or 'no state'}; "
                f"{type(self).__name__} keeps {', '.join(sorted(mine)) or 'none'}."
            )
        for kind, arrays in mine.items():
            if odd := sorted(set(arrays) ^ set(state[kind])):
                where = "saved state has no" if odd[0] in arrays else "model has no"
                raise CheckpointError(f"Optimizer state {kind}: the {where} {odd[0]} ({len(odd)} such names).")
            for name, array in arrays.items():
                if array.shape != state[kind][name].shape:
                    raise CheckpointError(
                        f"Optimizer state {kind} of {name} is {state[kind][name].shape}, the model wants {array.shape}."
                    )
        for kind, arrays in mine.items():
            for name, array in arrays.items():
                array[...] = state[kind][name]
        self.updates = updates


def require(name: str, value: float, holds: bool, allowed: str) -> None:
    """Refuse a hyper-parameter that is out of its range or not a finite number."""
    if not (holds and math.isfinite(value)):
        raise ConfigError(f"{name} {value} of the optimizer is out of range; allowed: {allowed}.")

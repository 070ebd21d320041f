"""What every optimizer shares: which parameters it treats how, when an update counts, and what a checkpoint keeps.

The mathematics of a method is one pure function, `update(p, g, state, hyper)`, in the file of its name.  Two kinds of
loops feed it: over long runs of neighbouring parameters where every element is on its own (elementwise.py), and over
logical tensors where an element's step depends on others (adafactor.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.groups import Group, check_groups, treatments
from mpitrain.optim.runs import Run
from mpitrain.optim.sound import is_sound, look
from mpitrain.spec import Spec


class Joined(NamedTuple):
    """Runs, and the arrays of which they were joined."""

    arrays: Sequence[Array] = ()
    runs: Sequence[Run] = ()


class StateTensor(NamedTuple):
    """A tensor of an optimizer's state: this rank's part of it, and how it lies across ranks.

    It need not have its parameter's shape: what is summed over a dim of the parameter lacks that dim, and its spec is
    the parameter's without it.
    """

    array: Array
    full_shape: tuple[int, ...]
    rectangle: tuple[slice, ...]
    spec: Spec


class Optimizer(ABC):
    """Base of the optimizers.

    Args:
        parameters: of the model, in its order; materialised, their masters of one dtype.  What is frozen is left out.
        lr: learning rate of a `step` that is given none.
        weight_decay: applies to the parameters with `decay`.
        groups: other learning rates and decays by name.
        mesh: the layout; groups are then looked for in the whole model, not only in what this rank holds of it.

    Attributes:
        kinds: names of what the method keeps.
        treatments: decay and factor on the learning rate of each parameter.
        updates: number of updates made; successes, not attempts.
        joined: the runs of the last step; joined anew by a step that finds other arrays.

    Raises:
        ConfigError: a hyper-parameter is out of its range, or a group has no parameter; with a mesh on every rank.
    """

    kinds: tuple[str, ...] = ()

    def __init__(
        self,
        parameters: Iterable[Parameter],
        *,
        lr: float,
        weight_decay: float,
        groups: Sequence[Group] = (),
        mesh: Mesh | None = None,
    ) -> None:
        require("lr", lr, lr >= 0, "0 or more")
        require("weight_decay", weight_decay, weight_decay >= 0, "0 or more")
        given = tuple(parameters)
        self.parameters = tuple(p for p in given if not p.frozen)
        check_groups(groups, [p.name for p in given], None if mesh is None else mesh.world)
        self.treatments = treatments(self.parameters, groups, weight_decay)
        self.lr = lr
        self.weight_decay = weight_decay
        self.updates = 0
        dtypes = {p.master.dtype for p in self.parameters}
        assert len(dtypes) <= 1, f"parameters of one optimizer have one dtype, not {sorted(map(str, dtypes))}"
        self.dtype = next(iter(dtypes), np.dtype(np.float64))
        self.joined = Joined()

    def step(self, lr: float | None = None) -> None:
        """Update all weights in place from their gradients.

        A parameter that the step did not use has the gradient zero.

        Args:
            lr: learning rate of this update, from the schedule.
        """
        for p in self.parameters:
            p.settle()
        self.updates += 1
        self._update_all(self.lr if lr is None else lr)
        for p in self.parameters:
            p.version += 1

    @abstractmethod
    def _update_all(self, lr: float) -> None:
        """Write all masters, and the halves that are their rounding; `updates` counts this update already."""

    @abstractmethod
    def state_tensors(self) -> dict[str, dict[str, StateTensor]]:
        """The state for a checkpoint, besides `updates`: kind -> parameter's name -> tensor.

        Every kind is there on every rank, also where no parameter of this rank has one.  The same dicts each time.
        """

    def look(self) -> list[Any]:
        """What `is_sound` needs to know of the state: numbers, of arrays on a device arrays ()."""
        return look(self.state_dict())

    def is_sound(self, looks: Sequence[float]) -> bool:
        """Whether an update may use the state (`mpitrain.optim.sound`), given the numbers of `look`."""
        return is_sound(self.state_dict(), looks)

    def state_dict(self) -> dict[str, dict[str, Array]]:
        """The arrays of the state on this rank, which are views: kind -> parameter's name -> array."""
        return {kind: {name: tensor.array for name, tensor in of.items()} for kind, of in self.state_tensors().items()}

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

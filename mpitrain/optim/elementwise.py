"""Optimizers that treat every element on its own: parameters are passed over as long runs, and state lies flat.

State is one flat buffer a kind, in the order of the parameters, in the dtype of the masters: at least float32, in which
an epsilon of 1e-8 is not 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from mpitrain import kernels
from mpitrain.backend import Array, array_module
from mpitrain.comm.mesh import Mesh
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.groups import Group
from mpitrain.optim.optimizer import Joined, Optimizer, StateTensor
from mpitrain.optim.runs import Run, join


class Elementwise(Optimizer):
    """Base of AdamW and Sgd; arguments as in `Optimizer`."""

    def __init__(
        self,
        parameters: Iterable[Parameter],
        *,
        lr: float,
        weight_decay: float,
        groups: Sequence[Group] = (),
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, groups=groups, mesh=mesh)
        xp = array_module(*(p.master for p in self.parameters))
        size = sum(p.master.size for p in self.parameters)
        self._state = {kind: xp.zeros(size, self.dtype) for kind in self.kinds}
        self._tensors = self._views()

    def _update_all(self, lr: float) -> None:
        for run in self._current_runs():
            stop = run.start + run.weights.size
            state = [vector[run.start : stop] for vector in self._state.values()]
            self._update(run.weights, run.grads, state, lr * run.treatment.rate, run.treatment.decay)
            if run.halves is not None:
                kernels.narrow(run.weights, run.halves.dtype, out=run.halves)

    @abstractmethod
    def _update(self, p: Array, g: Array, state: Sequence[Array], lr: float, decay: float) -> None:
        """One run: the method's pure function with its hyper-parameters."""

    def _current_runs(self) -> Sequence[Run]:
        """The runs, joined again where a parameter's arrays were exchanged since the last step."""
        arrays = [array for p in self.parameters for array in (p.data, p.master, p.grad)]
        known = self.joined.arrays
        if len(arrays) != len(known) or any(a is not b for a, b in zip(arrays, known, strict=True)):
            self.joined = Joined(arrays, join(self.parameters, self.treatments))
        return self.joined.runs

    def state_tensors(self) -> dict[str, dict[str, StateTensor]]:
        return self._tensors

    def _views(self) -> dict[str, dict[str, StateTensor]]:
        """Each parameter's part of each buffer."""
        state: dict[str, dict[str, StateTensor]] = {kind: {} for kind in self.kinds}
        start = 0
        for p in self.parameters:
            stop = start + p.master.size
            for kind, vector in self._state.items():
                view = vector[start:stop].reshape(p.master.shape)
                state[kind][p.name] = StateTensor(view, p.full_shape, p.rectangle, p.spec)
            start = stop
        return state

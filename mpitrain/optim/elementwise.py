"""Optimizers that treat every element on its own: parameters are passed over as long runs, and state lies flat.

State is one flat buffer a kind, in the order of the parameters, in the dtype of the masters: at least float32, in which
an epsilon of 1e-8 is not 0.  Where it, or what is updated, lives elsewhere, the pass goes by windows (windows.py).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpitrain import kernels
from mpitrain.backend import Array, array_module
from mpitrain.comm.mesh import Mesh
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.groups import Group
from mpitrain.optim.optimizer import Joined, Optimizer, StateTensor
from mpitrain.optim.runs import Run, is_elsewhere, join
from mpitrain.optim.sound import MEANS_OF_SQUARES, is_sound, look, unsound
from mpitrain.optim.windows import AHEAD, Cut, Vector, pass_over, windows_of

WINDOW = 2**20
"""Elements of a window unless it is said."""

Keep = Callable[[str, int, Any], Any]
"""(kind, elements, dtype) -> a vector of zeros that lives elsewhere (mpitrain.memory.stored_array)."""


class Elementwise(Optimizer):
    """Base of AdamW and Sgd; arguments as in `Optimizer`, and

    Args:
        keep: makes the vectors of the state; None: they lie beside the weights.
        window: elements that are updated at a time, where some of what an update needs lives elsewhere.
        ahead: windows that are fetched while one is updated.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        *,
        lr: float,
        weight_decay: float,
        groups: Sequence[Group] = (),
        mesh: Mesh | None = None,
        keep: Keep | None = None,
        window: int = WINDOW,
        ahead: int = AHEAD,
    ) -> None:
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, groups=groups, mesh=mesh)
        xp = array_module(*(p.master for p in self.parameters))
        size = sum(p.master.size for p in self.parameters)
        self._window, self._ahead = window, ahead
        self._state = {
            kind: xp.zeros(size, self.dtype) if keep is None else keep(kind, size, self.dtype) for kind in self.kinds
        }
        self._looks: list[Any] | None = None if keep is None else []  # at the state that lives elsewhere, when it left
        self._is_seen = True
        for vector in self._state.values() if keep is not None else ():
            vector.watch(self.changed)
        self._tensors = self._views()

    def _update_all(self, lr: float) -> None:
        runs = self._current_runs()
        if self._looks is not None or any(is_elsewhere(array) for run in runs for array in run[:3]):
            self._update_windows(runs, lr)
            return
        self._update_runs(runs, lr)

    def _update_runs(self, runs: Sequence[Run], lr: float) -> None:
        """Runs of which all is here."""
        for run in runs:
            self._update(run.weights, run.grads, self._state_of(run), lr * run.treatment.rate, run.treatment.decay)
            if run.halves is not None:
                kernels.narrow(run.weights, run.halves.dtype, out=run.halves)

    def _state_of(self, run: Run) -> list[Array]:
        """Each kind's part for a run."""
        return [vector[run.start : run.start + run.weights.size] for vector in self._state.values()]

    def _update_windows(self, runs: Sequence[Run], lr: float) -> None:
        """The same, with what lives elsewhere fetched ahead and written behind."""
        windows = windows_of(runs, self._window)
        looks: list[Any] = []
        for cuts, arrays in zip(
            windows, pass_over([self._vectors(cuts) for cuts in windows], self._ahead), strict=True
        ):
            found = iter(arrays)
            for run, _, _ in cuts:
                weights, grads = next(found), next(found)
                halves = None if run.halves is None else next(found)
                state = [next(found) for _ in self.kinds]
                self._update(weights, grads, state, lr * run.treatment.rate, run.treatment.decay)
                if halves is not None:
                    kernels.narrow(weights, halves.dtype, out=halves)
                if self._looks is not None:
                    looks += self._look_at(state)
        if self._looks is not None:
            self._looks, self._is_seen = looks, True

    def _vectors(self, cuts: Sequence[Cut]) -> list[Vector]:
        """What an update of these elements needs, in the order in which it takes them."""
        vectors = []
        for run, start, stop in cuts:
            vectors += [Vector(run.weights, start, stop, True), Vector(run.grads, start, stop, False)]
            if run.halves is not None:
                vectors.append(Vector(run.halves, start, stop, True, is_read=False))
            vectors += [Vector(of, run.start + start, run.start + stop, True) for of in self._state.values()]
        return vectors

    def _look_at(self, state: Sequence[Array]) -> list[Any]:
        """Numbers that are finite and not negative where the state is as it must be."""
        numbers = []
        for kind, array in zip(self.kinds, state, strict=True):
            numbers.append(kernels.sum_of_squares(array))
            if kind in MEANS_OF_SQUARES:
                numbers.append(array.min())
        return numbers

    def changed(self) -> None:
        """State that lives elsewhere was written by others: what was seen of it holds no more."""
        self._is_seen = False

    def look(self) -> list[Any]:
        if self._looks is None:
            return look(self._whole())
        if not self._is_seen:
            size = next((vector.size for vector in self._state.values()), 0)
            starts = range(0, size, self._window)
            spans = [(start, min(start + self._window, size)) for start in starts]
            windows = [[Vector(of, *span, False) for of in self._state.values()] for span in spans]
            self._looks = [number for state in pass_over(windows, self._ahead) for number in self._look_at(state)]
            self._is_seen = True
        return self._looks

    def is_sound(self, looks: Sequence[float]) -> bool:
        if self._looks is None:
            return is_sound(self._whole(), looks)
        if any(number < 0.0 for number in looks):
            return False
        # As in sound.is_sound: squares may overflow when they are added up.
        return all(map(math.isfinite, looks)) or not any(True for _ in unsound(self.state_dict()))

    def _whole(self) -> dict[str, dict[str, Array]]:
        """The state as it lies, one vector a kind: fewer things to look at than parameters."""
        return {kind: {"all parameters": vector} for kind, vector in self._state.items()}

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
                if is_elsewhere(vector):
                    view = vector.part(start, p.master.shape)
                else:
                    view = vector[start:stop].reshape(p.master.shape)
                state[kind][p.name] = StateTensor(view, p.full_shape, p.rectangle, p.spec)
            start = stop
        return state

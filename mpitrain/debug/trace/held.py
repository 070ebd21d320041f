"""Who holds how much memory on a rank, as far as that is found without a look at each array of each op.

The owners are those of the memory ledger (mpitrain.debug.owners).  It notes every array, which takes its time; here the
sums that parts of the library keep themselves are read when an action ends, and a tape is looked through once when it
was made, and when something was done with it.  What only the running code holds (values, and gradients on their way
back) is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

from mpitrain.autograd.tape import Tape
from mpitrain.debug import owners
from mpitrain.debug.memory import SETTLED
from mpitrain.pipeline.action import Action
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.flight import Key, key_of

AT = ("F", "B", "W", "EVICT", "FETCH", "RECV_F", "RECV_B", "SEND_F", "SEND_B", "REDUCE", "STEP")
"""Actions at whose ends something else may be held than before."""
_OF_A_TAPE = ("B", "W", "EVICT", "FETCH")


class Held:
    """Reads what the parts of one executor hold."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._of_model: dict[str, int] = {}
        self._tapes: dict[
            Key, tuple[weakref.ref[Tape], int]
        ] = {}  # micro-batch and stage -> its tape, and the bytes on it

    def now(self, action: Action, tape: Tape | None) -> dict[str, int]:
        """Owner -> bytes.

        Args:
            action: that ends, one of `AT`.
            tape: that an F has recorded.

        Cost: a look at each array on the tape of the action.
        """
        executor = self._executor
        if tape is not None and action.kind == "F":
            self._tapes[key_of(action)] = weakref.ref(tape), tape.nbytes
        elif action.kind in _OF_A_TAPE and key_of(action) in self._tapes:
            ref, _ = self._tapes.pop(key_of(action))
            known = ref()
            left = 0 if known is None else known.nbytes
            if left:
                self._tapes[key_of(action)] = ref, left
        elif action.kind == "STEP" and executor.optimizer.updates <= SETTLED:
            self._of_model = {}
        if not self._of_model:
            self._of_model = self._model_state()
        resident = executor.model.resident
        return self._of_model | {
            owners.GATHERED: 0 if resident is None else resident.now,
            owners.PENDING: sum(array.nbytes for array in executor.reducer.pending_gradients),
            owners.ACTIVATIONS: sum(nbytes for _, nbytes in self._tapes.values()),
            owners.ARRIVED: sum(array.nbytes for array in executor.arrived),
            owners.MESSAGES: executor.links.unsent,
            owners.WIRE: executor.mesh.scratch,
        }

    def forget(self) -> None:
        """A row begins: nothing of the one before is on a tape."""
        self._tapes.clear()

    def _model_state(self) -> dict[str, int]:
        found = dict.fromkeys((owners.WEIGHTS, owners.MASTERS, owners.GRADIENTS, owners.STATE), 0)
        model = self._executor.model
        for flat in (*model.flats, *model.frozen_flats):
            found[owners.WEIGHTS] += _nbytes(flat.weights)
            found[owners.MASTERS] += 0 if flat.masters is flat.weights else _nbytes(flat.masters)
            found[owners.GRADIENTS] += _nbytes(flat.grads)
        for arrays in self._executor.optimizer.state_dict().values():
            found[owners.STATE] += sum(map(_nbytes, arrays.values()))
        return found


def _nbytes(array: Any) -> int:
    """Of an array that is here; 0 of one in a store."""
    return int(getattr(array, "nbytes", 0))

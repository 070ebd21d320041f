"""The most memory that a training process holds, mpitrain's and its twin's.

Two figures a side, both of the process as the kernel counts it (resident pages): the peak, which is what a user's
machine must have, and how far the peak is above what was resident when everything was imported and the text was read,
which is what training itself takes.  Both sides run with malloc as it is by default; mpitrain then asks for its own
setting, as in every run.

The two processes of a pair run at the same time: memory does not depend on speed.
"""

from __future__ import annotations

from typing import Any

from processes import Processes
from sides import SIZES, Task
from training import alive

STEPS = 4  # the optimizer's state exists after the first; the peak of the second is that of all others


def measure(size: str, *, rounds: int) -> dict[str, Any]:
    """Pairs of fresh processes.

    Returns:
        rounds: side -> one {peak, growth} in bytes a round.
    """
    task = Task(**SIZES[size], ranks=1, dropout=0.0, dtype="float32")
    found: dict[str, list[dict[str, int]]] = {"mpitrain": [], "torch": []}
    for _ in range(rounds):
        with alive(*((side, task, {}) for side in found), tuned_malloc=False) as started:
            for side, processes in zip(found, started, strict=True):
                found[side].append(_peak(processes))
    return {"size": size, "rounds": found}


def _peak(processes: Processes) -> dict[str, int]:
    peak = processes.run(STEPS, 0)["peak_bytes"]
    return {"peak": peak, "growth": peak - processes.before_model}

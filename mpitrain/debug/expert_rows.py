"""How many tokens went to experts: the one number of a mixture of experts that only the data knows.

    rows = ExpertRows()
    with listen(rows):
        executor.step(batch)
    print(traffic(replace(step, expert_rows=rows.found)).table())       # what this step sent, to the byte

A listener, on one rank.  A row is a token on its way to one of its experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.autograd.recompute import recomputing
from mpitrain.events import Event


class ExpertRows:
    """A listener that counts the rows of the last step."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[tuple[int, int], list[int]]] = {}  # block -> (micro-batch, slice) -> sent, arrived
        self._pass = 0, 0

    def __call__(self, event: Event) -> None:
        kind, phase, name, info = event
        if kind == "action" and phase == "begin":
            action = info["action"]
            if action is info["executor"].row[0]:
                self._rows.clear()
            self._pass = action.micro or 0, action.part or 0
        elif kind == "op" and phase == "end" and name in ("take_rows", "grouped_matmul") and not recomputing():
            if name == "take_rows":
                self._add(info["path"], 0, info["output"])
            elif getattr(info["tensors"][1], "name", "").endswith(".experts.up"):
                self._add(info["path"], 1, info["inputs"][0])

    def _add(self, path: str, which: int, rows: Any) -> None:
        _, block, *_ = path.split(".")
        self._rows.setdefault(int(block), {}).setdefault(self._pass, [0, 0])[which] += rows.shape[0]

    @property
    def found(self) -> Mapping[int, list[tuple[int, int]]]:
        """Block -> (rows that this rank sent, rows that arrived at its experts) of each pass, in their order."""
        return {
            block: [(sent, arrived) for _, (sent, arrived) in sorted(passes.items())]
            for block, passes in self._rows.items()
        }

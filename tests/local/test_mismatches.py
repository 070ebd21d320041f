"""Every mistake of the table in tests/mismatches.py, on ranks that are threads: told at once, and as it must be."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mismatches

from mpitrain import collectives
from mpitrain.autograd import Tape, Tensor
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.debug.states import StateChecker
from mpitrain.errors import CollectiveMismatch
from mpitrain.events import listen
from mpitrain.spec import PARTIAL

SLOW = {"one_rank_sleeps", "one_rank_loops"}  # nothing but a time limit ends them


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in mismatches.CASES]
)
def test_a_mistake_is_told_with_both_places_and_the_path(name: str) -> None:
    """C73."""
    case = mismatches.CASES[name]
    said = mismatches.on_threads(case, mismatches.TURNS)
    missing = [what for what, has in mismatches.verdict(case, said).items() if not has]
    assert not missing, f"{missing}\n{said.text}"
    assert name in SLOW or said.seconds < 2


def test_there_are_as_many_cases_as_asked_for() -> None:
    assert len(mismatches.CASES) >= 24
    functions = [
        name for name, item in vars(mismatches).items() if getattr(item, "__annotations__", {}).get("s") == "Scene"
    ]
    assert set(functions) == set(mismatches.CASES)


def test_a_report_has_the_states_of_what_is_sent_where_somebody_follows_them() -> None:
    def main() -> None:
        w = world()
        w.set_checked()
        mesh = Mesh(w, tp=3)
        checker = StateChecker([], mesh)
        x = Tensor(np.ones((3, 6)))
        with listen(checker), Tape():
            checker.start()
            checker.declare(x, {"tp": PARTIAL})
            collectives.all_reduce(x, mesh.tp)
            if w.rank == 2:
                collectives.reduce_scatter(x, mesh.tp, 1)
            else:
                collectives.all_reduce(x, mesh.tp)

    with pytest.raises(CollectiveMismatch) as caught:
        LocalWorld(3).run(main)
    said = str(caught.value)
    assert ", call 2: ranks 0,1 all_reduce (3, 6) float64 at test_mismatches.py:" in said
    assert " (all_reduce: Partial -> Invariant); rank 2 reduce_scatter (3, 6) float64 at test_mismatches.py:" in said
    assert " (reduce_scatter: Partial -> Shard(1))\n  Rank 2 left the path" in said

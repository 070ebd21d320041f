"""Saves under MPI: one rank is killed or refused by its disk, all end, and a complete checkpoint is left; C62, C63.

A selection; the table of all is kill_saves.py.
"""

import kill_saves
import pytest
from crash.training import SCENES, Reference

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("saves"))


DELETES, BACKGROUND = SCENES["a save that deletes an old one"], SCENES["saves in the background"]


@pytest.mark.parametrize(
    "case",
    [
        kill_saves.Case(DELETES, "kill", 0, 60),
        pytest.param(kill_saves.Case(BACKGROUND, "kill", 2, 30), marks=pytest.mark.slow),
        pytest.param(kill_saves.Case(DELETES, "ENOSPC", 1, 40), marks=pytest.mark.slow),
        pytest.param(kill_saves.Case(BACKGROUND, "EIO", 3, 40), marks=pytest.mark.slow),
        pytest.param(kill_saves.Case(DELETES, "limit", 0, 8000), marks=pytest.mark.slow),
    ],
    ids=lambda case: f"{case.scene.name}, {case.how} on rank {case.rank}",
)
def test_a_rank_that_is_struck_while_it_saves_ends_all_and_a_checkpoint_is_left(reference, case):
    outcome = kill_saves.run_case(reference, case)
    assert outcome.trouble == "", outcome.output

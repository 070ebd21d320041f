"""Any number of ranks and micro-batches is the same training run: checks_data_parallel.py on ranks that are threads."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_data_parallel as checks
from often import some

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world


def run(check, ranks):
    LocalWorld(ranks).run(lambda: check(world()))


@pytest.mark.parametrize("micros", some([2, 1, 4], 3))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_number_of_ranks_and_micro_batches_is_the_same_run(ranks, micros):
    run(lambda ranks: checks.equals_one_rank(ranks, micros), ranks)


@pytest.mark.parametrize("check", checks.CHECKS[3:], ids=lambda check: check.__name__)
def test_on_four_ranks(check):
    run(check, 4)

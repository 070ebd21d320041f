"""Twenty bad inputs again under mpirun: one message, printed once, and an exit code that says so.

Five of them run by default, the others with `-m slow`.
"""

import re
import sys
from pathlib import Path

import pytest
from bad_inputs import NEEDS_RANKS, TABLE
from mpi_launch import Launch

pytestmark = pytest.mark.mpi

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
FLAGS = [row for row in TABLE if row not in NEEDS_RANKS]
CHOSEN = [*NEEDS_RANKS[::3], *FLAGS[:: len(FLAGS) // 4]][:20]
ROWS = [pytest.param(row, marks=[pytest.mark.slow] if i % 4 else [], id=row.name) for i, row in enumerate(CHOSEN)]


@pytest.mark.parametrize("row", ROWS)
def test_a_bad_input_is_refused_once_under_mpirun(tmp_path, row):
    row.prepare_in(tmp_path)
    with Launch(row.ranks, sys.executable, str(SCRIPT), *row.command(tmp_path), timeout=30) as launch:
        run = launch.wait()
    assert run.code not in (0, None), run.output
    assert not run.left_behind
    assert "Traceback" not in run.output
    begins = [found.end() for found in re.finditer(r"^[A-Z]\w+Error: ", run.output, re.MULTILINE)]
    assert len(begins) == 1, run.output
    # Below the message the launcher may say something of its own.
    message = run.output[begins[0] :].partition("\n-----")[0].partition("\n[")[0]
    assert not row.complaint(message, tmp_path), run.output


def test_there_are_twenty():
    assert len(ROWS) == 20

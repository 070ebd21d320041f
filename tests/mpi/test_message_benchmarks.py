"""The benchmarks that need mpirun run there and print one result."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from processes import result_of
from rows import ROWS

pytestmark = pytest.mark.mpi
FIGURES = {row.measurement: row.figure for row in ROWS}


@pytest.fixture(autouse=True)
def ranks_find_mpitrain(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def test_the_cost_of_small_messages_is_measured_on_two_ranks():
    found = result_of("message_cost.py", "--rounds", "1", ranks=2)
    assert set(found["microseconds"]) == {
        f"{verb}, {size} bytes" for verb in ("all_reduce", "send and recv") for size in (8, 64)
    }
    figure = FIGURES["messages"](found)
    assert figure.value == figure.low == figure.high


def test_sums_in_rank_order_are_measured_beside_mpis():
    found = result_of("ordered_sums.py", "--rounds", "1", ranks=2)
    assert found["ranks"] == 2
    assert set(found["ms"]) == {"1", "4", "16"}
    assert FIGURES["ordered sums"]({"by_ranks": {"2": found["ms"]}}).low > 0


def test_a_script_that_fails_ends_the_measurement(capfd):
    with pytest.raises(SystemExit, match=r"message_cost\.py ended with exit code"):
        result_of("message_cost.py", "--no-such-flag", ranks=2)
    assert "--no-such-flag" in capfd.readouterr().err

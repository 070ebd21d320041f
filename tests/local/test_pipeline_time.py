"""Stages compute while messages travel: the executor takes as long as the simulator says; why sends do not block."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_boundary
from checks_boundary import MICROS, Rows, Thin, with_blocking_sends
from virtual_time import Clocks

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import CommError
from mpitrain.events import listen
from mpitrain.optim.sgd import Sgd
from mpitrain.pipeline.executor import CHECKED_STEPS, Executor
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.simulate import Costs, simulate

F, B, W = 0.05, 0.07, 0.04  # seconds of a stage
LATE = 0.02  # seconds of a message


def step_on_the_clock(schedule, pp, chunks, late, prepare=lambda executor: None):
    """Spans of all actions of each rank in one step, on the ranks' clocks."""
    rows = complete(schedule, ranks=pp, microbatches=MICROS, chunks=chunks)
    clocks = Clocks(pp, late, {"F": F, "B": B if schedule == "zb-h1" else B + W, "W": W})

    def main():
        mesh = Mesh(world(), pp=pp)
        model = Thin(mesh, pp * chunks)
        executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, rows)
        prepare(executor)
        clock = clocks.of(mesh.world.rank)
        with listen(clock):
            for _ in range(CHECKED_STEPS + 1):  # those in which fingerprints travel too, and one more
                mesh.world.barrier()
                clock.restart()
                executor.step(Rows(0, 16))
        return list(clock.spans)

    return rows, LocalWorld(pp, wrap=clocks.wrap).run(main)


def makespan(spans):
    return max(stop for row in spans for action, _, stop in row if action.kind in "FBW")


@pytest.mark.parametrize("late", [0.0, LATE])
@pytest.mark.parametrize(
    ("schedule", "pp", "chunks"),
    [("gpipe", 4, 1), ("1f1b", 2, 1), ("1f1b", 4, 1), ("interleaved", 4, 2), ("interleaved", 2, 3), ("zb-h1", 4, 1)],
)
def test_every_action_begins_and_ends_when_the_simulator_says(schedule, pp, chunks, late):
    """A send costs its rank nothing, and a receive no more than is left of the way of its message."""
    rows, found = step_on_the_clock(schedule, pp, chunks, late)
    expected = simulate(rows, Costs(f=F, b=B, w=W, message=late)).spans
    for mine, theirs in zip(found, expected, strict=True):
        for (action, *times), span in zip(mine, theirs, strict=True):
            assert action == span.action
            if action.kind != "STEP":  # where all meet, which the clocks do not know
                assert times == pytest.approx([span.start, span.stop], abs=1e-9), action
        sent = [stop for action, _, stop in mine if action.kind.startswith("SEND")]
        assert mine[-1][2] >= max(sent) + late  # a step is over when its messages have arrived


def test_messages_that_travel_for_20_ms_hide_behind_the_work_of_both_ends():
    """GPipe pays for the way of the first message into each stage and back, and for none of the 42 others.

    With sends that block, the sender pays for each of its own.
    """
    alone, late = (makespan(step_on_the_clock("gpipe", 4, 1, message)[1]) for message in (0.0, LATE))
    blocking = makespan(step_on_the_clock("gpipe", 4, 1, LATE, with_blocking_sends)[1])
    assert late - alone == pytest.approx(2 * 3 * LATE)
    assert blocking - alone >= (2 * 3 + 2 * (MICROS - 1)) * LATE - 1e-9


@pytest.mark.parametrize(
    ("schedule", "pp", "chunks"), [("1f1b", 2, 1), ("1f1b", 4, 1), ("interleaved", 2, 2), ("zb-h1", 4, 1)]
)
def test_blocking_sends_hang_where_the_checker_says_they_would(schedule, pp, chunks):
    """C41: ranks that are threads have no buffers, so messages of any size show it; the report names every rank."""
    with pytest.raises(CommError, match="deadlock: no rank can go on") as error:
        LocalWorld(pp).run(
            lambda: checks_boundary.train(world(), schedule, pp, chunks, checks_boundary.KIB, with_blocking_sends)
        )
    waits = re.findall(r"rank (\d+) waits in send on \S+ to rank (\d+) of it, tag (\d+)", str(error.value))
    expected = checks_boundary.blocked_at(schedule, pp, chunks)
    assert [tuple(map(int, wait)) for wait in waits] == expected
    assert len(expected) == pp


@pytest.mark.parametrize("schedule", ["gpipe", "terapipe"])
def test_blocking_sends_hang_nowhere_in_gpipe(schedule):
    """All go forward and then all back, so two neighbours never send to each other at once."""
    assert checks_boundary.blocked_at(schedule, 4, 1) == []
    LocalWorld(4).run(lambda: checks_boundary.train(world(), schedule, 4, 1, checks_boundary.KIB, with_blocking_sends))


@pytest.mark.parametrize("nbytes", [checks_boundary.KIB, 64 * checks_boundary.KIB])
def test_boundaries_of_any_size(nbytes):
    """C41; larger ones between processes: tests/mpi/test_pipeline_mpi.py."""
    LocalWorld(4).run(lambda: checks_boundary.equals_one_rank(world(), nbytes, checks_boundary.WAYS))

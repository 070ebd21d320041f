"""Pipelines between real MPI ranks: equal to one rank for messages of any size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_boundary
import checks_pipeline
from mpi_launch import Run

pytestmark = pytest.mark.mpi

NO_COPY = {"OMPI_MCA_smsc": "^cma,xpmem", "MPIR_CVAR_CH4_CMA_ENABLE": "0"}
"""Ranks of one host do not read each other's memory: a large message moves only while both of them are in MPI."""
SCRIPT = str(Path(__file__).with_name("blocking_script.py"))
KIB = 1 << 10


def names(checks: list[Callable[..., None]]) -> list[str]:
    return [check.__name__ for check in checks]


@pytest.mark.parametrize("name", names(checks_pipeline.CHECKS))
def test_a_pipeline_with_other_axes(checks: Callable[..., None], name: str) -> None:
    """C44."""
    checks("checks_pipeline", name, 8)


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, NO_COPY], ids=["with CMA", "without CMA"])
@pytest.mark.parametrize("name", names(checks_pipeline.MORE))
def test_every_layout_with_every_schedule(checks: Callable[..., None], name: str, env: dict[str, str]) -> None:
    """C44."""
    checks("checks_pipeline", name, 8, "MORE", **env)


@pytest.mark.parametrize("name", names(checks_boundary.CHECKS))
def test_boundaries_of_any_size(checks: Callable[..., None], name: str) -> None:
    """C41, with the harder way of moving messages."""
    checks("checks_boundary", name, 4, **NO_COPY)


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, NO_COPY], ids=["with CMA", "without CMA"])
@pytest.mark.parametrize("name", names(checks_boundary.MORE))
def test_large_boundaries(checks: Callable[..., None], name: str, env: dict[str, str]) -> None:
    """C41, T7.4: sends that are complete only when they are received, too."""
    checks("checks_boundary", name, 4, "MORE", **env)


@pytest.mark.slow
@pytest.mark.parametrize("name", names(checks_boundary.CHECKS))
def test_boundaries_of_any_size_where_ranks_read_each_other_s_memory(checks: Callable[..., None], name: str) -> None:
    checks("checks_boundary", name, 4)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks"),
    [
        ("1f1b", 2, 1),
        pytest.param("1f1b", 4, 1, marks=pytest.mark.slow),
        pytest.param("interleaved", 2, 2, marks=pytest.mark.slow),
        pytest.param("interleaved", 4, 2, marks=pytest.mark.slow),
        pytest.param("zb-h1", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_why_sends_do_not_block(mpirun: Callable[..., Run], schedule: str, ranks: int, chunks: int) -> None:
    """C41: blocking ones pass with 1 KiB and hang with 64 KiB, where the checker said; the watch reports it in time."""
    run = mpirun(ranks, sys.executable, SCRIPT, schedule, str(chunks), "3", str(KIB), str(64 * KIB), timeout=40)
    assert f"{KIB} bytes went well" in run.output
    assert run.code == 1
    assert run.seconds < 20
    assert "CommError: no answer for 3 s (--timeout)." in run.output
    for rank, peer, tag in checks_boundary.blocked_at(schedule, ranks, chunks):
        assert f"rank {rank} waits in send on pp to rank {peer} of it, tag {tag}, call 1" in run.output
    assert str(64 * KIB) not in run.output

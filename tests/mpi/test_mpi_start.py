"""How MPI is brought up: without a search for networks where there is none to use, and who drives messages on."""

from __future__ import annotations

import sys

import pytest
from mpi_launch import Launch, find_mpirun, vendor

pytestmark = pytest.mark.mpi

SAY = """
import os
from mpitrain.comm.world import world
ranks = world()
if ranks.rank == 0:
    print("progress:", ranks.progress, flush=True)
    print("pml:", os.environ.get("OMPI_MCA_pml"), "btl:", os.environ.get("OMPI_MCA_btl"), flush=True)
"""


def said(**env: str) -> str:
    mpirun = find_mpirun()
    if mpirun is None or vendor(mpirun) != "openmpi":
        pytest.skip("these settings are Open MPI's")
    with Launch(2, sys.executable, "-c", SAY, timeout=40, env=env) as job:
        return job.wait().check().output


def test_ranks_that_share_a_host_look_for_no_network() -> None:
    assert "pml: ob1 btl: ^ofi,uct" in said()


def test_who_says_how_messages_move_is_obeyed() -> None:
    assert "pml: None btl: self,sm" in said(OMPI_MCA_btl="self,sm")


def test_a_helper_thread_drives_messages_that_need_their_sender() -> None:
    assert "progress: a helper thread drives messages" in said(OMPI_MCA_smsc="^cma,xpmem")

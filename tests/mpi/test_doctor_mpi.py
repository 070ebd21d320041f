"""The doctor meets a real mpirun."""

import pytest

from mpitrain.doctor.launchers import check_mpi


@pytest.mark.mpi
def test_the_doctor_finds_that_two_ranks_meet():
    findings = {finding.topic: finding for finding in check_mpi()}
    assert findings["MPI"].level == "ok"
    assert findings["launcher"].level == "ok", findings["launcher"]
    assert "two ranks met" in findings["launcher"].text

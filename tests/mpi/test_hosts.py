"""Several hosts, played by ranks whose hosts have different names: what the flight board cannot carry, messages do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_launch import Launch, Run

pytestmark = pytest.mark.mpi
SCRIPT = str(Path(__file__).with_name("end_script.py"))
ON_A_HOST = """\
#!/bin/sh
# on_a_host.sh COMMAND...   ranks 0 and 2 on host0, ranks 1 and 3 on host1
rank=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}
exec unshare --uts sh -c 'hostname host$1 && shift && exec "$@"' _ $((rank % 2)) "$@"
"""


@pytest.fixture
def on_a_host(tmp_path: Path) -> str:
    try:
        done = subprocess.run(["unshare", "--uts", "hostname", "host0"], capture_output=True, text=True)
        trouble = done.stderr.strip()
    except FileNotFoundError as error:
        trouble = str(error)
    if trouble:
        pytest.skip(f"cannot give a process a host name of its own (unshare --uts): {trouble}")
    path = tmp_path / "on_a_host.sh"
    path.write_text(ON_A_HOST)
    path.chmod(0o755)
    return str(path)


def run(on_a_host: str, *scenario: str) -> Run:
    with Launch(4, on_a_host, sys.executable, SCRIPT, *scenario, timeout=40) as job:
        return job.wait()


def test_every_message_arrives_between_hosts_too(on_a_host: str, tmp_path: Path) -> None:
    worker = str(Path(__file__).with_name("worker.py"))
    with Launch(4, on_a_host, sys.executable, worker, "checks_comm", "CHECKS", str(tmp_path), "0", timeout=90) as job:
        job.wait().check()


def test_a_rank_that_left_another_host_is_missed_too(on_a_host: str) -> None:
    ended = run(on_a_host, "nobody_receives")
    assert ended.code == 1
    assert ended.output.count("CommError: rank 1 left, but rank 0 waits for it in send on world to rank 1 of it") == 1


@pytest.mark.slow
def test_early_leavers_on_other_hosts_are_no_reason_to_end(on_a_host: str) -> None:
    run(on_a_host, "all_is_well").check()


def test_a_user_error_is_printed_once_over_all_hosts(on_a_host: str) -> None:
    ended = run(on_a_host, "all_raise_a_user_error")
    assert ended.code == 2
    assert ended.output.count("MeshError: --pp 3 needs 3 ranks") == 1


def test_a_hang_report_shows_the_ranks_of_other_hosts_by_their_copies(on_a_host: str, tmp_path: Path) -> None:
    ended = run(on_a_host, "hangs", str(tmp_path))
    assert ended.code == 1
    assert ended.output.count("CommError: no answer for 3 s (--timeout).  Rank 1 is behind: it is in no call.") == 1
    assert "ranks 0,2,3 wait in all_reduce on world, call 2, (4, 3) float32, at end_script.py:" in ended.output
    assert re.search(r"rank 1 runs at end_script\.py:\d+, after all_reduce on world, call 1, \(4,\)", ended.output)

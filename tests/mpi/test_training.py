"""Training between real MPI ranks: equal to one rank, and bit by bit what ranks as threads compute."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_data_parallel
import checks_layouts
from mpi_launch import ROOT, environment

pytestmark = pytest.mark.mpi

SCRIPT = str(ROOT / "examples" / "train_gpt.py")
FLAGS = (
    "--model gpt-tiny --batch 24 --steps 8 --dropout 0.1 --lr 0.01 --sample-length 30 --eval-every 4 --save-every 8 "
    "--deterministic --data"
).split()
FLAGS.append(str(ROOT / "run_mpi.sh"))  # a short text: every process reads all of it


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", [check.__name__ for check in checks_data_parallel.CHECKS])
def test_data_parallel(checks: Callable[[str, str, int], None], name: str, ranks: int) -> None:
    checks("checks_data_parallel", name, ranks)


@pytest.mark.parametrize("name", [check.__name__ for check in checks_layouts.CHECKS])
def test_layouts(checks: Callable[[str, str, int], None], name: str) -> None:
    checks("checks_layouts", name, 4)


def outcome(run: Path) -> tuple[list[dict[str, object]], dict[str, str], str]:
    """Metrics without times, digests of the checkpoint's files, the sample."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("tokens_per_s")
    files = sorted((run / "checkpoints" / "step-00000008").glob("*.h5"))
    assert files
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return records, digests, (run / "sample.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["--reducer", "bucketed", "--bucket-mib", "0.02", "--microbatches", "2"], marks=pytest.mark.slow),
        pytest.param(["--tp", "2", "--sequence-parallel"], marks=pytest.mark.slow),
        ["--tp", "2", "--cp", "2"],
        ["--pp", "2", "--schedule", "interleaved", "--microbatches", "2", "--tied", "--check"],
        pytest.param(["--pp", "4", "--schedule", "zb-h1", "--microbatches", "6"], marks=pytest.mark.slow),
    ],
    ids=lambda more: " ".join(more),
)
def test_threads_and_mpi_ranks_compute_the_same_bits(mpirun, tmp_path, more):
    flags = [*FLAGS, *more]
    mpirun(4, sys.executable, SCRIPT, *flags, "--run", str(tmp_path / "mpi"), timeout=120).check()
    local = [sys.executable, "-m", "mpitrain", "local", "-n", "4", SCRIPT, *flags, "--run", str(tmp_path / "local")]
    subprocess.run(local, check=True, timeout=120, env=environment(), stdout=subprocess.DEVNULL)
    assert outcome(tmp_path / "mpi") == outcome(tmp_path / "local")


def test_the_same_run_again_gives_the_same_bits(mpirun, tmp_path):
    for name in ("first", "second"):
        mpirun(3, sys.executable, SCRIPT, *FLAGS, "--run", str(tmp_path / name), timeout=120).check()
    assert outcome(tmp_path / "first") == outcome(tmp_path / "second")


def test_a_run_stops_and_goes_on_between_processes_with_the_same_bits(mpirun, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    mpirun(2, sys.executable, SCRIPT, *FLAGS, "--run", str(whole), timeout=120).check()
    mpirun(2, sys.executable, SCRIPT, *FLAGS, "--run", str(parts), "--stop-after", "3", timeout=120).check()
    again = mpirun(2, sys.executable, SCRIPT, "--run", str(parts), "--resume", "latest", timeout=120).check()
    assert "go on after step 3" in again.output
    assert outcome(parts) == outcome(whole)


def test_only_one_rank_speaks_and_lines_are_plain(mpirun, tmp_path):
    default = FLAGS[: FLAGS.index("--data")]
    run = mpirun(3, sys.executable, SCRIPT, *default, "--run", str(tmp_path / "run"), timeout=120).check()
    assert run.output.count("corpus       Python standard library") == 1
    assert run.output.count("step 8/8") == 1
    assert "\r" not in run.output.replace("\r\n", "\n")
    assert "\033" not in run.output


def test_a_config_file_from_a_run_starts_the_same_run(mpirun, tmp_path):
    mpirun(2, sys.executable, SCRIPT, *FLAGS, "--run", str(tmp_path / "one"), timeout=120).check()
    config = str(tmp_path / "one" / "config.toml")
    mpirun(2, sys.executable, SCRIPT, "--config", config, "--run", str(tmp_path / "two"), timeout=120).check()
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    assert os.path.exists(tmp_path / "two" / "loss.svg")

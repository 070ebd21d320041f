"""A rank of a run under mpirun runs again alone, where no MPI can be imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_MPI = """
import sys

class NoMpi:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mpi4py":
            raise ImportError("there is no MPI")

sys.meta_path.insert(0, NoMpi())
from mpitrain.cli import main
sys.exit(main(sys.argv[1:]))
"""
# Activations of 128 KiB and gradients of 0.5 MiB: more than an MPI sends before the receiver has asked for it.
TRAINER = "--model gpt-mini --layers 2 --steps 3 --batch 8 --microbatches 2 --eval-every 2 --sample-length 3".split()
LAYOUTS = {
    "pp2dp2": "--pp 2 --dp 2 --reducer bucketed",
    "tp2cp2": "--tp 2 --cp 2 --sequence-parallel --dtype float16",
    "zero": "--dp 4 --zero 3 --prefetch 2",
    "ep2": "--dp 4 --ep 2 --experts 4 --expert-overlap --record-steps 2:3",
}


def replayed(folder, rank, *words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    command = [sys.executable, "-c", WITHOUT_MPI, "replay", str(folder), "--rank", str(rank), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120, check=False)


def check(mpirun, tmp_path, flags, ranks):
    (tmp_path / "text").write_text("All work and no play makes a rank a dull process; 0 and 1.\n" * 400)
    run = ["--data", str(tmp_path / "text"), "--run", str(tmp_path / "run"), "--record", str(tmp_path / "r")]
    script = str(ROOT / "examples" / "train_gpt.py")
    launched = mpirun(4, sys.executable, script, *TRAINER, *flags.split(), *run, timeout=150)
    assert launched.code == 0, launched.output
    for rank in ranks:
        found = replayed(tmp_path / "r", rank)
        assert found.returncode == 0, found.stderr
        assert f"rank {rank} replayed, bit by bit the same: " in found.stdout


@pytest.mark.mpi
def test_a_rank_of_mpirun_runs_again_without_mpi(mpirun, tmp_path):
    check(mpirun, tmp_path, LAYOUTS["pp2dp2"], [3])


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_other_layouts(mpirun, tmp_path, layout):
    check(mpirun, tmp_path, LAYOUTS[layout], range(4))


@pytest.mark.mpi
@pytest.mark.slow
def test_a_rank_that_was_killed_runs_again_up_to_there(mpirun, tmp_path):
    """What it got before the end of the other one is in its recording."""
    (tmp_path / "text").write_text("All work and no play makes a rank a dull process; 0 and 1.\n" * 400)
    run = ["--data", str(tmp_path / "text"), "--run", str(tmp_path / "run"), "--record", str(tmp_path / "r")]
    fault = ["--faults", "kill rank=1 at=action:STEP n=2"]
    script = str(ROOT / "examples" / "train_gpt.py")
    launched = mpirun(2, sys.executable, script, *TRAINER, *run, *fault, timeout=150)
    assert launched.code != 0
    for rank in (0, 1):
        found = replayed(tmp_path / "r", rank)
        assert found.returncode == 0, found.stderr
        assert f"rank {rank} ends " in found.stdout
        assert "all that outlives each of 1 steps" in found.stdout

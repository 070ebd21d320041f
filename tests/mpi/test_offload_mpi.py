"""Offload under real MPI ranks: the bits of threads, and a clear end for all when one disk fails or a rank dies."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_offload
from mpi_launch import ROOT, Run, launch

pytestmark = pytest.mark.mpi

SCRIPT = str(ROOT / "examples" / "train_gpt.py")
FLAGS = "--model gpt-tiny --batch 12 --steps 6 --lr 0.01 --sample-length 0 --eval-every 0 --save-every 2".split()
FLAGS += ["--deterministic", "--log-every", "1", "--data", str(ROOT / "run_mpi.sh")]
OFFLOAD = ["--offload", "optimizer,activations,parameters", "--offload-to"]

FAULTY = """
import errno, os, signal, sys
from pathlib import Path

write, after, calls = os.pwritev, Path(os.environ["TEST_AFTER"]), iter(range(10**9))

def full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def short(descriptor, data, at):
    os.ftruncate(descriptor, 4096)
    return write(descriptor, data, at)

def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def faulty(*args):
    mine = os.environ["TEST_RANK"] in ("all", str(ranks.rank))
    if mine and after.exists() and next(calls) > 20:  # in the middle of a step
        return {"full": full, "short": short, "kill": kill}[os.environ["TEST_FAULT"]](*args)
    return write(*args)

os.pwritev = faulty
from mpitrain.comm.world import world
from mpitrain.train import main
ranks = world()
main(sys.argv[1:])
"""


@pytest.mark.parametrize("name", [check.__name__ for check in checks_offload.FEW])
def test_the_same_bits_with_and_without(checks: Callable[..., None], name: str) -> None:
    checks("checks_offload", name, 2, which="FEW")


@pytest.mark.slow
@pytest.mark.parametrize("name", [check.__name__ for check in checks_offload.MORE])
def test_the_same_bits_with_and_without_on_more_layouts(checks: Callable[..., None], name: str) -> None:
    checks("checks_offload", name, 2, which="MORE")


def outcome(run: Path) -> tuple[list[dict[str, object]], dict[str, str]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("tokens_per_s")
    files = sorted((run / "checkpoints" / "step-00000006").glob("*.h5"))
    return records, {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run makes that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    disk = folder / "disk"
    launch(2, sys.executable, SCRIPT, *FLAGS, *OFFLOAD, f"hdf5:{disk}", "--run", str(folder), timeout=90).check()
    assert not list(disk.iterdir())
    return outcome(folder)


def disturbed(folder: Path, fault: str, rank: str) -> Run:
    """A run in which the store of a rank fails after the first checkpoint, in the middle of a step."""
    script, run = folder / "faulty.py", folder / "run"
    script.write_text(FAULTY)
    env = {"TEST_FAULT": fault, "TEST_RANK": rank, "TEST_AFTER": str(run / "checkpoints" / "step-00000002")}
    flags = [*FLAGS, *OFFLOAD, f"hdf5:{folder}/disk", "--run", str(run)]
    return launch(2, sys.executable, str(script), *flags, timeout=90, env=env)


def goes_on(folder: Path, whole: object) -> None:
    """The run is resumed, and is what it would have been."""
    launch(2, sys.executable, SCRIPT, "--run", str(folder / "run"), "--resume", "latest", timeout=90).check()
    assert not list((folder / "disk").iterdir())
    assert outcome(folder / "run") == whole


FAILS = {"full": "No space left on device", "short": "the file is shorter than it was"}


@pytest.mark.parametrize(("fault", "rank"), [("full", "1"), pytest.param("short", "0", marks=pytest.mark.slow)])
def test_a_store_that_fails_on_one_rank_ends_all_with_one_message_and_nothing_is_lost(whole, tmp_path, fault, rank):
    run = disturbed(tmp_path, fault, rank)
    assert run.code == 2
    assert run.output.count("StoreError") == 1
    assert f"cannot be used any more: {FAILS[fault]}" in run.output
    assert "Traceback" not in run.output
    assert not list((tmp_path / "disk").glob(f"*rank-0000{rank}*"))  # the other rank was ended, and cannot clean up
    goes_on(tmp_path, whole)


@pytest.mark.parametrize("rank", ["1", *(pytest.param(rank, marks=pytest.mark.slow) for rank in ("0", "all"))])
def test_killed_ranks_lose_nothing_that_a_checkpoint_holds_and_their_files_are_swept(whole, tmp_path, rank):
    run = disturbed(tmp_path, "kill", rank)
    assert run.code not in (0, None)
    assert list((tmp_path / "disk").iterdir())  # who is killed cannot clean up
    goes_on(tmp_path, whole)

"""NCCL as a transport behind the door, by stand-ins for NCCL and CuPy, between MPI ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi_launch import Run

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_nccl_mpi
from device_runs import LINE, SETTINGS, assert_same_bits

HERE = Path(__file__).resolve().parent
TRAIN = str(HERE.parents[1] / "examples" / "train_gpt.py")
STAND_IN = os.pathsep.join([str(HERE.parent / "device" / "as_cupy"), str(HERE.parents[1])])

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_nccl_mpi.CHECKS])
def test_two_ranks(checks: Callable[..., None], name: str) -> None:
    checks("checks_nccl_mpi", name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [check.__name__ for check in checks_nccl_mpi.ALL])
def test_three_ranks(checks: Callable[..., None], name: str) -> None:
    checks("checks_nccl_mpi", name, 3, which="ALL")


@pytest.mark.slow
@pytest.mark.parametrize("name", [check.__name__ for check in checks_nccl_mpi.LAYOUTS])
def test_data_and_tensor_parallel(checks: Callable[..., None], name: str) -> None:
    checks("checks_nccl_mpi", name, 4, which="LAYOUTS")


def stand_in(ranks: int, **more: str) -> dict[str, str]:
    """The environment in which each rank finds CuPy's stand-in, with a device for each, late to the end."""
    return {
        "PYTHONPATH": STAND_IN,
        "STRICT_DEVICES": str(ranks),
        "STRICT_LATE": "1",
        "MPITRAIN_KERNELS": "numpy",
        **more,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, "--pp 2 --schedule interleaved --chunks 2 --layers 4 --microbatches 4"),
        (4, "--pp 2 --tp 2 --sequence-parallel"),
        (2, "--zero 3 --dtype bfloat16 --reducer bucketed"),
        (2, "--experts 4 --ep 2 --expert-overlap"),
        (2, "--cp 2 --cp-attention ring --check"),
    ],
    ids=["pp", "tp", "zero", "experts", "ring"],
)
@pytest.mark.parametrize("order", ["--deterministic", ""])
def test_training_has_the_bits_of_staged_messages(
    mpirun: Callable[..., Run], tmp_path: Path, ranks: int, flags: str, order: str
) -> None:
    """Curve, sample and checkpoint; two ranks add in one order only, in groups of two so do four."""
    (tmp_path / "text").write_text("".join(LINE.format(n, n % 7) for n in range(200)))
    given: dict[str, list[str]] = {}
    for word in f"{SETTINGS.replace('--deterministic', order)} {flags} --data {tmp_path / 'text'}".split():
        if word.startswith("--"):
            last = given[word] = []
        else:
            last.append(word)
    words = [word for flag, values in given.items() for word in (flag, *values)]
    for how in ("staged", "nccl"):
        device = ["--device", "cuda", "--device-messages", how, "--run", str(tmp_path / how)]
        run = mpirun(ranks, sys.executable, TRAIN, *words, *device, timeout=120, env=stand_in(ranks))
        assert run.code == 0, run.output
        assert ("as they are, by NCCL" in run.output) == (how == "nccl"), run.output
    assert_same_bits(tmp_path / "nccl", tmp_path / "staged")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "raise", "exit code=0"])
def test_a_rank_that_dies_ends_the_job(mpirun: Callable[..., Run], tmp_path: Path, fault: str) -> None:
    """Also where its partners wait for their devices, which wait for it."""
    word, *keys = fault.split()
    faults = f"{word} rank=1 at=message:all_reduce step=2 {' '.join(keys)}"
    words = [str(HERE / "kill_script.py"), str(tmp_path / "run"), "--tp", "2", "--device", "cuda"]
    env = stand_in(2, MPITRAIN_FAULTS=faults)
    run = mpirun(2, sys.executable, *words, "--device-messages", "nccl", timeout=60, env=env)
    assert run.code not in (0, None), run.output
    assert run.seconds < 25.0
    assert "left" in run.output or "rank 1" in run.output, run.output


@pytest.mark.parametrize("way", ["nccl", pytest.param("auto", marks=pytest.mark.slow)])
def test_what_ranks_found_of_their_devices_is_replayed_and_not_asked_again(
    mpirun: Callable[..., Run], tmp_path: Path, way: str
) -> None:
    (tmp_path / "text").write_text("".join(LINE.format(n, n % 7) for n in range(50)))
    sizes = "--layers 1 --width 8 --heads 2 --seq-len 6 --batch 4 --steps 1 --sample-length 0 --tp 2"
    paths = ["--data", str(tmp_path / "text"), "--run", str(tmp_path / "run"), "--record", str(tmp_path / "recording")]
    words = [*sizes.split(), *paths, "--device", "cuda", "--device-messages", way]
    run = mpirun(2, sys.executable, TRAIN, *words, timeout=60, env=stand_in(2))
    assert run.code == 0, run.output
    words = [sys.executable, "-m", "mpitrain", "replay", str(tmp_path / "recording"), "--rank", "1"]
    again = subprocess.run(words, env={**os.environ, **stand_in(2)}, capture_output=True, text=True, timeout=60)
    assert "rank 1 replayed, bit by bit the same" in again.stdout, again.stdout + again.stderr

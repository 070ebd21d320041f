"""The trainer on a device beyond one run: stopped and resumed on either kind, generated from, recorded, replayed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from device_runs import SETTINGS, Runs, assert_same_bits, assert_same_curve, metrics
from strict_runtime import devices

from mpitrain import cli
from mpitrain.comm.local import LocalWorld
from mpitrain.errors import DeviceError
from mpitrain.pipeline.executor import Executor
from mpitrain.train import main


@pytest.fixture
def runs(tmp_path, numpy_kernels, cupy):
    return Runs(tmp_path)


def test_a_run_goes_on_where_there_is_no_device_and_back(runs):
    flags = "--layers 1 --dropout 0.1 --steps 4 --save-every 4"
    whole = runs.train("cpu", flags, 2)
    for device, until in (("cuda", "--stop-after 1"), ("cpu", "--stop-after 3 --resume latest")):
        runs.train(device, f"{flags} {until}", 2, "parts")
    assert_same_bits(runs.train("cuda", f"{flags} --resume latest", 2, "parts"), whole)


def test_the_saved_device_holds_until_a_flag_says_another(runs, tmp_path):
    """A run that goes on without --device goes on where it was."""
    run = runs.train("cuda", "--layers 1 --stop-after 1", 1)
    assert 'device = "cuda"' in (run / "config.toml").read_text()
    LocalWorld(1).run(main, ["--run", str(run), "--resume", "latest"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["device_memory_bytes"] > 0 for line in lines)


def test_a_run_with_a_budget_times_some_steps_and_leaves_nothing_of_them(runs):
    flags = "--layers 1 --optimizer sgd"
    timed = runs.train("cuda", f"{flags} --budget 1", 1)
    asked = runs.train("cpu", f"{flags} --steps {len(metrics(timed))}", 1)
    assert metrics(timed)[0] == metrics(asked)[0]


@pytest.mark.slow
def test_a_text_is_written_from_a_checkpoint_as_on_the_cpu(runs, capfd):
    run = runs.train("cuda", "", 2)
    texts = []
    for device, layout, ranks in (("cuda", "--tp 2", 2), ("cpu", "", 1), ("cuda", "--pp 2", 2)):
        capfd.readouterr()
        words = f"generate {run} --prompt bottles --length 12 --device {device} {layout}".split()
        assert LocalWorld(ranks).run(cli.main, words) == [0] * ranks
        texts.append(capfd.readouterr().out.splitlines()[0])
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].startswith("bottles")


@pytest.mark.slow
def test_a_rank_that_computed_on_a_device_is_replayed_on_one(runs, tmp_path, capfd):
    runs.train("cuda", f"--pp 2 --dropout 0.1 --record {tmp_path / 'recording'}", 2)
    assert cli.main(["replay", str(tmp_path / "recording"), "--rank", "1"]) == 0
    assert "bit by bit the same" in capfd.readouterr().out


def test_the_start_block_says_on_what_each_rank_computes(runs, capfd):
    with devices(2):
        runs.train("cuda", "--layers 1 --steps 1", 4)
    said = capfd.readouterr().out
    assert re.search(r"^  device +cuda: .*, device 0 of the 2 seen here; 2 ranks share one$", said, re.MULTILINE)
    assert re.search(r"^  kernels +formulas on the device; on the host numpy$", said, re.MULTILINE)
    assert "device memory" in said


def test_a_device_that_is_full_is_told_with_ways_out(runs, monkeypatch):
    def full(executor, batches):
        raise MemoryError("Out of memory allocating 512 bytes (allocated so far: 85899345920 bytes).")

    monkeypatch.setattr(Executor, "run", full)
    with pytest.raises(
        DeviceError, match=r"rank 0: the device has no memory left: Out of memory allocating 512 bytes"
    ) as told:
        runs.train("cuda", "--layers 1", 1)
    assert "--recompute full" in str(told.value)
    with pytest.raises(MemoryError):  # of the host: nothing is known of it
        runs.train("cpu", "--layers 1", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("mpitrain verify --layout dp2,tp2 --transport local {script} {flags}", "one rank: 2 steps of 17 tensors"),
        pytest.param(
            "mpirun -n 2 python {script} {flags} --run run --record recording", "cuda: Stand-in", marks=pytest.mark.mpi
        ),
        ("mpitrain debug -n 2 {script} {flags}", "cuda: Stand-in"),
    ],
)
def test_commands_that_run_a_script_run_it_on_a_device(tmp_path, command, said):
    """In processes of their own, which find the stand-in where they look for CuPy."""
    here = Path(__file__).parent
    (tmp_path / "text").write_text("".join(f"{n} bottles of milk on the wall.\n" for n in range(400)))
    flags = f"{SETTINGS} --layers 1 --data text --device cuda"
    words = command.format(script=here.parents[1] / "examples" / "train_gpt.py", flags=flags).split()
    words[:1] = {"mpitrain": [sys.executable, "-m", "mpitrain"], "mpirun": ["mpirun"]}[words[0]]
    path = os.pathsep.join(filter(None, (str(here / "as_cupy"), str(here.parents[1]), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        input="continue\nquit\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, "--dropout 0.1"),
        (2, "--model llama-tiny --heads 4 --kv-heads 2 --window 5"),
        (2, "--experts 4 --ep 2"),
        (2, "--pp 2 --zero 1 --recompute full"),
        (2, "--tp 2 --offload optimizer,activations"),
    ],
)
def test_cuda_kernels_give_the_curve_of_the_cpu(cupy, tmp_path, ranks, flags):
    """Compiled kernels on the host, CUDA's on the stand-in: their sums round elsewhere."""
    assert_same_curve(*Runs(tmp_path).both(flags, ranks), bound=1e-9)

"""The whole trainer with offload: the same curve and the same checkpoints, and it goes on from either."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.errors import ConfigError, StoreError
from mpitrain.memory import store_file
from mpitrain.train import main

TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk; take {n % 7} down.\n" for n in range(400))
TINY = "--model gpt-tiny --batch 12 --lr 0.01 --dropout 0.1 --sample-length 20 --deterministic --steps 4".split()
TINY += ["--save-every", "2", "--microbatches", "2"]
ALL = ["--offload", "optimizer,activations,parameters", "--offload-to"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def train(ranks, run, text, *flags):
    LocalWorld(ranks).run(main, [*TINY, "--data", text, "--run", str(run), *flags])


def outcome(run):
    """Metrics without times, digests of the files of tensors of the last checkpoint, the sample."""
    records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    records = [{key: value for key, value in record.items() if key != "tokens_per_s"} for record in records]
    files = sorted((Path(run) / "checkpoints" / "step-00000004").glob("*.h5"))
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return records, digests, (Path(run) / "sample.txt").read_text()


@pytest.mark.parametrize("more", [[], ["--dtype", "float16"]], ids=["float32", "float16"])
def test_with_all_on_disk_the_run_and_its_checkpoints_are_the_same(tmp_path, text, more):
    train(2, tmp_path / "here", text, "--zero", "3", *more)
    train(2, tmp_path / "there", text, *ALL, f"hdf5:{tmp_path}/disk", *more)
    assert outcome(tmp_path / "there") == outcome(tmp_path / "here")
    assert not list((tmp_path / "disk").iterdir())


def test_a_run_is_stopped_with_offload_and_goes_on_without_and_the_other_way_round(tmp_path, text):
    train(1, tmp_path / "whole", text)
    train(1, tmp_path / "a", text, "--offload", "optimizer", "--stop-after", "2")
    train(1, tmp_path / "a", text, "--resume", "latest", *ALL, "host")
    train(
        1, tmp_path / "c", text, "--offload", "optimizer", "--offload-to", f"hdf5:{tmp_path}/disk", "--stop-after", "2"
    )
    train(1, tmp_path / "c", text, "--resume", "latest", "--offload", "none")
    assert outcome(tmp_path / "c") == outcome(tmp_path / "whole")
    train(1, tmp_path / "b", text, "--stop-after", "2")
    train(1, tmp_path / "b", text, "--resume", "latest", "--offload", "optimizer,activations")
    assert outcome(tmp_path / "b") == outcome(tmp_path / "whole")
    assert outcome(tmp_path / "a")[0][:2] == outcome(tmp_path / "whole")[0][:2]


def test_the_trial_that_finds_the_number_of_steps_leaves_nothing_behind(tmp_path, text, monkeypatch):
    from mpitrain import train as module

    monkeypatch.setattr(module.Training, "_fixed_steps", lambda self: (self._trial(), 4)[1])
    train(1, tmp_path / "tried", text, *ALL, "host")
    monkeypatch.undo()
    train(1, tmp_path / "plain", text, *ALL, "host")
    assert outcome(tmp_path / "tried") == outcome(tmp_path / "plain")


def test_the_start_block_says_what_is_elsewhere_and_a_budget_what_it_takes(tmp_path, text, capsys):
    train(1, tmp_path / "a", text, "--offload", "optimizer")
    said = capsys.readouterr().out
    assert "offload      optimizer to host memory, 0.3 MiB a rank, fetched 1 ahead, windows of 5,360; here at" in said
    train(1, tmp_path / "b", text, "--memory-budget", "1.2MiB")
    said = capsys.readouterr().out
    assert "offload      activations" in said or "offload      optimizer" in said
    assert ", budget 1.2" in said
    train(1, tmp_path / "c", text, "--memory-budget", "1GiB")
    assert "offload      nothing: at most" in capsys.readouterr().out


def test_a_budget_that_cannot_be_kept_is_refused_with_numbers(tmp_path, text):
    with pytest.raises(ConfigError, match=r"--memory-budget 0\.1MiB cannot be kept: a rank needs [\d.]+ MiB with"):
        train(1, tmp_path / "run", text, "--memory-budget", "0.1MiB")
    assert not (tmp_path / "run").exists()


def test_a_disk_without_room_ends_all_ranks_before_the_first_step(tmp_path, text, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreError, match=r"hdf5:.*: rank \d on \S+ needs .* GiB there.*No space left on device"):
        train(2, tmp_path / "run", text, *ALL, f"hdf5:{tmp_path}/disk")
    assert not list((tmp_path / "disk").iterdir())


def test_where_one_rank_may_not_write_none_leaves_a_file_behind(tmp_path, text, monkeypatch):
    claim = store_file._claim

    def refuse(folder, rank):
        if rank == 1:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return claim(folder, rank)

    monkeypatch.setattr(store_file, "_claim", refuse)
    with pytest.raises(StoreError, match=r"rank 1 on \S+ cannot make its file there: Permission denied"):
        train(2, tmp_path / "run", text, *ALL, f"hdf5:{tmp_path}/disk")
    assert not list((tmp_path / "disk").iterdir())
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fails_in_a_step_ends_all_and_the_run_goes_on_elsewhere(tmp_path, text, monkeypatch):
    train(2, tmp_path / "whole", text, "--zero", "3")
    write, saved = os.pwritev, tmp_path / "run" / "checkpoints" / "step-00000002"

    def fail(*args):
        if saved.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*args)

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(StoreError, match="cannot be used any more: Input/output error"):
        train(2, tmp_path / "run", text, *ALL, f"hdf5:{tmp_path}/disk")
    monkeypatch.undo()
    assert sorted(path.name for path in saved.parent.iterdir()) == ["step-00000002"]
    train(2, tmp_path / "run", text, "--resume", "latest", "--offload-to", "host")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


HARD = """
import resource, sys
from pathlib import Path
import numpy as np
import mpitrain.train, h5py  # noqa: F401  what is loaded does not count
from mpitrain.comm.local import LocalWorld
np.ones((300, 300)) @ np.ones((300, 300))  # BLAS takes its buffers
used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
room = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
sys.exit(mpitrain.train.main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_a_model_four_times_the_budget_trains_under_a_hard_limit_of_address_space(tmp_path, text):
    """States of 4 x 4 bytes a weight; the process may have a quarter of them for all that it holds."""
    script = tmp_path / "hard.py"
    script.write_text(HARD)
    sizes = (
        "--layers 16 --width 512 --heads 8 --seq-len 32 --batch 4 --steps 2 --sample-length 0 --eval-every 0".split()
    )
    weights = 16 * 12 * 512**2
    states = 16 * weights  # 805 MB
    budget = states // 4
    flags = [*sizes, "--data", text, "--run", str(tmp_path / "run")]
    command = [sys.executable, str(script), str(budget), *flags]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert plain.returncode != 0
    assert "MemoryError" in plain.stderr + plain.stdout or "Unable to allocate" in plain.stderr + plain.stdout
    there = [*ALL, f"hdf5:{tmp_path}/disk", "--memory-budget", f"{budget // 2**20}MiB", "--run", str(tmp_path / "b")]
    found = subprocess.run([*command, *there], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "step 2/2" in found.stdout

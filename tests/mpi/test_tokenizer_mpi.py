"""A tokenizer that rank 0 makes is the one of all MPI ranks, and their run that of ranks as threads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi_launch import ROOT
from mpi_launch import Run as Launched

from mpitrain.comm.local import LocalWorld
from mpitrain.train import main

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
pytest.importorskip("tokenizers", reason="needs the tokenizers library: the extra hf")

SCRIPT = str(ROOT / "examples" / "train_gpt.py")
FLAGS = (
    "--model gpt-tiny --layers 1 --batch 8 --steps 4 --lr 0.01 --sample-length 20 --eval-every 2 --tp 2 --deterministic"
    " --tokenizer bpe:400 --metrics csv,tensorboard --data"
).split()
FLAGS.append(str(ROOT / "run_mpi.sh"))


def outcome(run: Path) -> tuple[list[dict[str, object]], str, str]:
    """Metrics without times, the tokenizer, the sample."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("tokens_per_s")
    assert len((run / "metrics.csv").read_text().splitlines()) == 5
    assert len(list((run / "tensorboard").iterdir())) == 1
    return records, (run / "tokenizer.json").read_text(), (run / "sample.txt").read_text(encoding="utf-8")


def test_a_run_with_a_tokenizer_is_the_same_under_mpi_and_on_threads(
    mpirun: Callable[..., Launched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX", reason="needs tensorboardX: the extra tensorboard")
    cache = {"MPITRAIN_CACHE": str(tmp_path / "cache")}
    monkeypatch.setenv("MPITRAIN_CACHE", cache["MPITRAIN_CACHE"])
    run = mpirun(4, sys.executable, SCRIPT, *FLAGS, "--run", str(tmp_path / "mpi"), timeout=120, env=cache)
    assert run.code == 0, run.output
    LocalWorld(4).run(main, [*FLAGS, "--run", str(tmp_path / "local")])
    assert outcome(tmp_path / "mpi") == outcome(tmp_path / "local")
    (kept,) = (tmp_path / "cache" / "tokens").iterdir()  # of both
    assert kept.suffix == ".tokens"

"""Checkpoints that real ranks wrote, read by real ranks in another layout; weights are far above any eager limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the watch is
from kept_state import TEXT, Watch, metrics, stored
from mpi_launch import ROOT
from resume_layouts import NO_LAYOUT, kinds

from mpitrain.comm.local import LocalWorld
from mpitrain.debug.compare import compare
from mpitrain.train import main

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

SCRIPT = str(ROOT / "tests" / "mpi" / "pair_script.py")
COMMON = (
    "--model gpt-tiny --layers 2 --width 384 --heads 6 --seq-len 12 --batch 12 --lr 0.001 --warmup 2 --tied --steps 8 "
    "--sample-length 0 --eval-every 0 --log-every 1 --dtype float64 --deterministic"
).split()
"""Its largest weights have 4.5 MiB: more than a block of a checkpoint, too."""

CHAIN = [
    (3, "--tp 3 --sequence-parallel"),
    (4, "--zero 3"),
    (4, "--pp 2 --schedule interleaved --microbatches 2 --zero 1"),
    (2, "--cp 2 --reducer bucketed"),
    (4, "--pp 2 --tp 2 --microbatches 3 --offload optimizer,activations --offload-to hdf5:{disk}"),
]
"""Each goes on from what the one before has saved."""


def test_a_run_goes_on_through_five_layouts_of_real_ranks(mpirun, tmp_path):
    text = tmp_path / "text"
    text.write_text(TEXT)
    words = [*COMMON, *NO_LAYOUT, "--data", str(text)]
    last = len(CHAIN) + 1
    with Watch() as watch:
        LocalWorld(1).run(main, [*words, "--run", str(tmp_path / "one"), "--stop-after", str(last)])
    run, before = tmp_path / "run", None
    for done, (ranks, flags) in enumerate(CHAIN, start=2):
        how = [*words, *flags.replace("{disk}", str(tmp_path / "disk")).split(), "--run", str(run)]
        how += ["--stop-after", str(done), *(["--resume", "latest"] if before else [])]
        env = {"TEST_CHECKPOINT": str(before)} if before else {}
        found = mpirun(ranks, sys.executable, SCRIPT, *how, timeout=170, env=env).check()
        assert found.output.count("tensors as they were stored") == (ranks if before else 0)
        before = run / "checkpoints" / f"step-{done:08}"
        mine, wanted = kinds(stored(before)), kinds(watch.states[done].tensors)
        for kind, of in wanted.items():
            odd = [str(difference) for difference in compare(mine[kind], of, kind=kind) if not difference.ok]
            assert not odd, f"{flags}: {odd}"
    for one, other in zip(metrics(run), metrics(tmp_path / "one"), strict=True):
        assert one == pytest.approx(other, rel=1e-9)

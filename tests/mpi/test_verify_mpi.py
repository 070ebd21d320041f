"""`mpitrain verify --transport mpi`: the same proof between real processes, and bit by bit that of threads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from mpi_launch import ROOT

from mpitrain.debug.capture import Record
from mpitrain.verify.command import BUILT_IN, TRAINER, main
from mpitrain.verify.launch import Run, run_all
from mpitrain.verify.layouts import parse

pytestmark = pytest.mark.mpi

SCRIPT = """
import os, signal, sys
from mpitrain import AdamW, Executor, GPT, GPTConfig, Mesh, Tokens, load, one_stage, with_update, world

how, *flags = sys.argv[1:]
if how == "dp only" and "--tp" in flags:
    print("usage: script.py\\nscript.py: error: unrecognized arguments: --tp 2", file=sys.stderr)
    sys.exit(2)
sizes = {flag[2:]: int(value) for flag, value in zip(flags[::2], flags[1::2])}
mesh = Mesh(world(), dp=sizes.get("dp"), tp=sizes.get("tp", 1))
model = GPT(GPTConfig(layers=1, width=16, heads=2, seq_len=8), mesh, seed=1)
executor = Executor(model, AdamW(model.parameters(), lr=1e-3), mesh, with_update(one_stage(1)), clip=1.0)
finish = executor.reducer.finish
def twice():
    finish()
    for flat in model.flats:
        flat.grads *= mesh.dp.size
if how == "doubles":
    executor.reducer.finish = twice
for batch in Tokens(load("text.txt"), seq_len=8).batches(4, mesh.dp.rank, mesh.dp.size, stop_step=50):
    if mesh.world.rank == 1 and batch.step == 2:
        if how == "raises":
            raise RuntimeError("it broke on rank 1")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    executor.step(batch)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "text.txt").write_text("".join(f"{n} bottles of beer\n" for n in range(200)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin")
    return "script.py"


def records(folder: Path, layout: str, transport: str, command: list[str]) -> list[list[Record]]:
    """What each rank records in a layout, on one transport."""
    some = parse(layout)
    run = Run(folder / transport, some.ranks, [*command, *some.flags, "--run", str(folder / f"run-{transport}")])
    (ended,) = run_all([run], 2, transport, 1, timeout=100)
    assert ended.code == 0, ended.output()
    return [list(found) for found in ended.records()]


@pytest.mark.parametrize("layout", ["dp2,tp2,sp", "cp2,tp2"])
def test_threads_and_processes_record_the_same_bits(script, tmp_path, layout):
    command = [TRAINER, *BUILT_IN, "--layers", "1", "--data", "text.txt"]
    mine, theirs = (records(tmp_path, layout, transport, command) for transport in ("local", "mpi"))
    assert len(mine) == len(theirs) == 4
    for rank in range(4):
        assert [r.facts for r in mine[rank]] == [r.facts for r in theirs[rank]]
        assert len(mine[rank]) == 3
        for a, b in zip(mine[rank], theirs[rank], strict=True):
            assert [(kind, array.tobytes()) for kind, array in a.arrays.items()] == [
                (kind, array.tobytes()) for kind, array in b.arrays.items()
            ]


def test_layouts_are_proven_between_processes_and_a_refusal_is_told_from_a_failure(script, capsys):
    assert main(["--transport", "mpi", "--layout", "dp2", "--layout", "tp2", script, "dp only"]) == 2
    text = capsys.readouterr().out
    assert "dp2  equal" in text
    assert "tp2  refused" in text
    assert "tp2 was refused by the script:\nunrecognized arguments: --tp 2\n" in text


def test_a_layout_that_the_trainer_refuses_is_refused_between_processes_too(script, capsys):
    assert main(["--transport", "mpi", "--layout", "tp2", "--", "--heads", "1", "--layers", "1"]) == 2
    assert (
        "tp2 was refused by the script:\nConfigError: --heads 1 is not divisible by --tp 2" in capsys.readouterr().out
    )


def test_a_difference_between_processes_is_found_with_its_axis(script, capsys, tmp_path):
    path = tmp_path / "found.json"
    assert main(["--transport", "mpi", "--layout", "dp2,tp2", "--json", str(path), script, "doubles"]) == 1
    text = capsys.readouterr().out
    assert "first     step 1, gradient of head.weight\n" in text
    assert "alone     dp2 differs, tp2 equal\n" in text
    assert "suspect   dp\n" in text
    assert json.loads(path.read_text())["layouts"][0]["first"]["factor"] == pytest.approx(2)


@pytest.mark.parametrize(("how", "said"), [("raises", "RuntimeError: it broke on rank 1"), ("is killed", "signal")])
def test_a_rank_that_dies_is_a_failure_with_its_own_words(script, capsys, how, said):
    assert main(["--transport", "mpi", "--layout", "dp2", script, how]) == 1
    text = capsys.readouterr().out
    assert "dp2  FAILED" in text
    assert said in text.lower() if how == "is killed" else said in text
    assert "the layout ended before the end of step" in text
    assert "MPI_ABORT" not in text

"""The ten hunts and the tutorial: the pages are walked through as a reader would, each tool names the culprit, and
what is mended comes out right."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where pages are walked through
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mpi"))
from mpi_launch import find_mpirun
from walked_pages import ROOT, Walk, masked, sections

from mpitrain import MLP, Executor, Mesh, Sgd, one_stage, with_update, world
from mpitrain.comm.local import LocalWorld
from mpitrain.debug.trace.files import read
from mpitrain.trace.command import main as trace
from mpitrain.trace.known import know
from mpitrain.trace.shares import shares

HUNTS = sections(ROOT / "docs/how-to/hunt-bugs.md")
TUTORIAL = ROOT / "docs/tutorials/your-first-distributed-bug.md"

CULPRITS = {
    # hunt: what stands in the line of the culprit (of its script), and what the session says of it
    1: (
        "all_reduce(linear(hidden, self.down, self.down_bias)",
        ["! at {at}: linear adds a bias to a Partial product over tp", "(from the spec of down_bias)"],
    ),
    2: (
        "",
        [
            "batch.targets   int64   step 1, micro-batch 0",
            "! rank 1 differs from rank 0 in 5 of 12 elements, first at [0]: 2 against 0",
            "! these ranks work on one micro-batch together, and were given other rows of the batch",
        ],
    ),
    3: (
        "ring.send(",
        [
            "rank 0 waits in send on dp to rank 1 of it, call 1, (1,) float64, at {at}",
            "! a ring: 0 -> 1 -> 2 -> 3 -> 0: none of them can ever go on",
        ],
    ),
    4: (
        "return x / sqrt(",
        ["rank 3, breakpoint 1: nonfinite", "> 3        6  F0@0      after div -> (12, 16)  blocks.2.scale", "{at}"],
    ),
    5: ("", [f"! down step {step}  STEP@0: no op of a forward used it in this step   (ranks 0,1)" for step in (1, 2)]),
    6: (
        "mesh.dp.all_reduce(is_right",
        ["ranks 0,1 all_reduce (13,) int64 at {at};", "ranks 2,3 all_reduce (12,) int64 at {at}"],
    ),
    7: (
        "for batch in batches(",
        [
            "Rank 3 left the path: a new turn for it alone.",
            "{below} main loss = executor.step(batch)",
            "> 3        7  -",
        ],
    ),
    8: (
        "",
        [
            "up.weight step 5  STEP@0: updated, lr 0.1                      |dw| 0.1064 step  4  loss",
            "up.weight step 6  F0@0: used by linear of blocks.0.up          |w| 4.528 (0)  4.937 (1,2,3)",
            "! here they part: rank 0 differs from ranks 1,2,3 in 6 of 64 elements, first at [0, 6]: -1 against",
        ],
    ),
    9: (
        "",
        [
            "! ranks 0,1: activations grow with each step: 0 B, 512.0 KiB, 1.0 MiB, 1.5 MiB, 2.0 MiB when steps",
            "! ranks 0,1: of step 1: activations of down (256, 256) float64, 512.0 KiB, kept as Net.activity",
        ],
    ),
}

ALONE = {1: 1, 2: 1, 5: 1, 6: 1, 8: 1}  # hunts whose mended script must print the same on so many ranks


@pytest.fixture(autouse=True)
def _as_the_pages_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checked mode, which says some things earlier."""
    monkeypatch.delenv("MPITRAIN_CHECK", raising=False)


def hunt(number: int) -> str:
    """The section of a hunt."""
    return next(text for name, text in HUNTS.items() if name.startswith(f"{number}. "))


def flat(text: str) -> str:
    """Without the breaks of lines, and with single blanks."""
    return " ".join(text.replace("\n!  ", "\n").split())


def place(walk: Walk, holding: str, below: int = 0) -> str:
    """file:line of a piece of the script, or so many lines below it."""
    source = (walk.folder / walk.script).read_text(encoding="utf-8")
    assert source.count(holding) == 1
    return f"{Path(walk.script).name}:{source[: source.index(holding)].count(chr(10)) + 1 + below}"


@pytest.mark.parametrize("number", CULPRITS)
def test_a_hunt_ends_at_the_culprit_and_the_mended_script_has_none(number: int, tmp_path: Path) -> None:
    holding, words = CULPRITS[number]
    walk = Walk(tmp_path)
    before = hunt(number).partition("```diff")[0]
    walk.through(before)
    told = next(shown for shown in walk.shown if shown.typed)
    at, below = (place(walk, holding, more) if holding else "" for more in (0, 1))
    for word in words:
        assert flat(word.format(at=at, below=below)) in flat(told.printed), f"{word}\nis not in\n{told.printed}"

    after = walk.through(hunt(number).removeprefix(before))
    assert all(shown.is_mended for shown in after)
    assert after
    for shown in walk.shown:
        assert shown.said is None or masked(shown.said) == masked(shown.printed), shown.printed

    code, printed = walk.debug(int(told.command.split()[3]), told.typed)
    assert code in (0, 2, 3)  # of a run that has come to its end nothing is left to be shown
    assert not [line for line in printed.split("\n") if line.startswith("!") and "-c:" not in line], printed
    if number in ALONE:
        assert walk.local(ALONE[number]) == (0, after[0].printed)


def test_the_tutorial_is_what_a_reader_sees(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    for shown in walk.through(TUTORIAL.read_text(encoding="utf-8")):
        assert masked(shown.said or "") == masked(shown.printed), shown.printed
    first, *_, last = [shown for shown in walk.shown if not shown.typed]
    assert first.code == last.code == 0
    assert first.printed == last.printed  # on one rank, and mended on four
    assert sum(bool(shown.typed) for shown in walk.shown) == 5


def test_the_mended_ring_is_a_smoothing_of_all_stretches() -> None:
    whole = np.arange(32.0)
    for _ in range(3):
        whole = (whole + np.roll(whole, 1)) / 2
    shown = re.findall(r"^rank (\d): (\[.*\])$", hunt(3), re.MULTILINE)
    assert {int(rank): text for rank, text in shown} == {rank: str(whole[8 * rank :][:8]) for rank in range(4)}


def test_the_mended_loop_trains_on_the_batches_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that is given the points of four at each step comes to the same loss."""
    monkeypatch.syspath_prepend(ROOT / "examples/bugs")
    points, last = (importlib.import_module(name) for name in ("points", "07_the_last_batch"))

    def joined(parts):
        return points.Points(*(np.concatenate([getattr(p, n) for p in parts]) for n in ("inputs", "targets")))

    def alone():
        mesh = Mesh(world())
        model = MLP((2, 32, points.CLASSES), mesh, seed=1, dtype=np.float64)
        executor = Executor(model, Sgd(model.parameters(), lr=0.3, momentum=0.9), mesh, with_update(one_stage(1)))
        for turn in zip(*map(last.batches, range(4)), strict=False):
            executor.step(joined(turn))
        return executor.evaluate([points.spirals(999)])

    assert f"loss {LocalWorld(1).run(alone)[0]:.4f}\n" in hunt(7)


def test_comparing_with_one_rank_says_that_weights_were_changed_between_steps(tmp_path: Path) -> None:
    walk = Walk(tmp_path, script="examples/bugs/08_drifts_apart.py")
    *_, last = walk.through(HUNTS["Without an idea: compare with one rank"])
    assert last.code == 1
    assert "They part at step 6, forward: linear in blocks.0.up\n" in last.printed
    assert masked(last.said or "") == masked(last.printed), last.printed


# ------------------------------------------------------------------------------------------------------- the slow one


def slow_walk(folder: Path) -> tuple[Walk, list[str]]:
    """A walk that stands before the mendings of hunt 10, and these: two of the trace, and the one of the culprit."""
    walk = Walk(folder, script="examples/bugs/10_slow.py")
    walk.replace("range(30)", "range(12)")  # enough to tell
    walk.replace("/ 30:", "/ 12:")
    return walk, re.findall(r"```diff\n(.*?)```", hunt(10), re.DOTALL)


def read_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, list[float]]:
    """The summary, and how long each rank is between steps."""
    assert trace([str(folder)]) == 0
    known = know(read(folder))
    return capsys.readouterr().out, [share.before for share in shares(known, known.judged)]


def test_a_trace_names_the_slow_rank_and_where_it_is_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    walk, (*traced, mended) = slow_walk(tmp_path)
    for diff in traced:
        walk.mend(diff)
    code, _ = walk.local(4)
    summary, before = read_trace(tmp_path / "runs/slow", capsys)
    assert code == 0
    assert "between steps, in the script: rank 2 " in summary
    assert before[2] == max(before)

    walk.mend(mended)
    code, _ = walk.local(4)
    _, after = read_trace(tmp_path / "runs/slow", capsys)
    assert code == 0
    assert after[2] < before[2] / 3


# ---------------------------------------------------------------------------------------------------------- processes

needs_mpirun = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun")


def launched(walk: Walk, **more: str) -> str:
    """What four processes print."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}", **more}
    command = [str(find_mpirun()), "-n", "4", sys.executable, walk.script]
    done = subprocess.run(
        command, cwd=walk.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.mpi
@pytest.mark.slow
@needs_mpirun
def test_a_trace_of_processes_says_who_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    walk, (*traced, mended) = slow_walk(tmp_path)
    for diff in traced:
        walk.mend(diff)
    assert "loss" in launched(walk)
    summary, before = read_trace(tmp_path / "runs/slow", capsys)
    assert "between steps, in the script: rank 2 " in summary
    rows = [line.split() for line in summary.split("TIME")[1].split("compute:")[0].splitlines()[2:] if line.strip()]
    delays = [float(row[-1]) for row in rows]
    assert delays[2] > 2 * max(delays[:2] + delays[3:])
    assert [row[-3] for row in rows][:2] == ["2", "2"]  # for whom ranks 0 and 1 wait
    walk.mend(mended)
    assert "loss" in launched(walk)
    assert read_trace(tmp_path / "runs/slow", capsys)[1][2] < before[2] / 3


@pytest.mark.mpi
@pytest.mark.slow
@needs_mpirun
def test_checked_mode_says_of_processes_what_the_console_says_of_threads(tmp_path: Path) -> None:
    walk = Walk(tmp_path, script="examples/bugs/06_fits_on_two.py")
    told = launched(walk, MPITRAIN_CHECK="1")
    at = place(walk, CULPRITS[6][0])
    assert f"ranks 0,1 all_reduce (13,) int64 at {at}; ranks 2,3 all_reduce (12,) int64 at {at}" in told


def test_the_table_of_the_hunts_has_each_and_no_answer() -> None:
    table = (ROOT / "examples/bugs/README.md").read_text(encoding="utf-8")
    for script in sorted((ROOT / "examples/bugs").glob("[01]?_*.py")):
        assert script.name in table
        source = script.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= 75
    assert not [words for _, told in CULPRITS.values() for words in told if words in table]

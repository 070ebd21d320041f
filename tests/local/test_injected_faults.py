"""Faults in a training on ranks that are threads: they strike where they should, and reports name rank and step."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain import faults
from mpitrain.cli import main
from mpitrain.events import LISTENERS

ROOT = Path(__file__).resolve().parents[2]
TINY = "--layers 1 --width 16 --heads 2 --seq-len 16 --batch 4 --sample-length 0 --steps 6 --save-every 2"


def train(run: Path, *flags: str) -> int:
    script = str(ROOT / "examples" / "train_gpt.py")
    return main(["local", "-n", "2", script, *TINY.split(), "--data", __file__, "--run", str(run), *flags])


def test_a_fault_of_a_step_strikes_there_also_after_a_resume_and_then_never_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "raise rank=1 at=message:all_reduce step=3; raise rank=0 at=disk:write step=4; raise rank=1 step=6"
    seen = []
    for _ in range(4):
        code = train(tmp_path, "--resume", "auto", "--faults", text)
        said = capsys.readouterr()
        ended = [line for line in said.err.splitlines() if "ended all ranks" in line]
        seen.append((code, *ended, *(line for line in said.out.splitlines() if line.startswith("go on after"))))
    after = f"from {tmp_path}/checkpoints/step-0000000"
    assert seen == [
        (1, "rank 1 of 2, step 3: InjectedFault ended all ranks"),
        (1, "rank 0 of 2, step 4: InjectedFault ended all ranks", f"go on after step 2 {after}2"),
        (1, "rank 1 of 2, step 6: InjectedFault ended all ranks", f"go on after step 2 {after}2"),
        (0, f"go on after step 4 {after}4"),
    ]
    assert len(list((tmp_path / faults.DONE).iterdir())) == 3
    assert not [listener for listener in LISTENERS.get() if isinstance(listener, faults.Injector)]


def test_a_script_that_knows_nothing_of_faults_is_given_them_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import numpy as np\nfrom mpitrain.comm.world import world\nworld().all_reduce(np.ones(3))\n")
    monkeypatch.setenv(faults.VARIABLE, "exit rank=1 at=message code=7")
    assert main(["local", "-n", "2", str(script)]) == 7
    assert "[rank 1] fault injected in step 0 as all_reduce begins" in capsys.readouterr().err
    monkeypatch.setenv(faults.VARIABLE, "exit rank=2 at=message")
    assert main(["local", "-n", "2", str(script)]) == 2
    said = "ConfigError: MPITRAIN_FAULTS 'exit rank=2 at=message': rank=2 must be from 0 to 1.\n"
    assert said in capsys.readouterr().err


def test_a_rank_that_does_not_exist_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--faults", "kill rank=2") == 2
    assert "ConfigError: --faults 'kill rank=2': rank=2 must be from 0 to 1.\n" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

"""How two sides are measured on a GPU: by turns, each on its own; one that fails costs no more than itself."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_speed
from gpu_ops import OPS

WORKS = 2 * len(OPS) - sum(name.endswith("(float32)") for name in OPS)
TASK = gpu_speed.Task({"vocab": 64, "layers": 2, "width": 32, "heads": 2, "seq_len": 16}, 4)
FACTS = {"name": "NVIDIA H200", "capability": "9.0"}
SIDE = """
import json, sys, time
library, log, fails = sys.argv[1], {log!r}, {fails!r}
print("words that are not for the check", flush=True)
def answer(**values): print("@" + json.dumps(values), flush=True)
answer(ready=library)
for line in sys.stdin:
    command = json.loads(line)
    what = command["do"]
    open(log, "a").write(json.dumps([library, what, command.get("dtype"), command.get("steps")]) + "\\n")
    fault = fails.get(library + " " + what)
    if fault == "dies": sys.exit(7)
    if fault == "hangs": time.sleep(60)
    if fault: answer(error=fault); continue
    if what == "build": answer(parameters=1000, loss=4.0, first_seconds=0.1)
    if what == "run": answer(seconds=(0.002 if library == "mpitrain" else 0.004) * command["steps"], loss=3.0)
    if what == "look": answer(host_ms=1.0, device_ms=1.5, waits=1, kernels={{}}, used=10, held=20)
    if what == "drop": answer()
    if what == "op": answer(ms=0.5)
"""


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is measured of sides of which some fail at something, and what they were asked for."""

    def run(seconds: float = 60.0, torch: bool = True, **fails: str) -> tuple[dict[str, Any], list[list[Any]]]:
        log = tmp_path / "log"
        log.write_text("")
        script = tmp_path / "side.py"
        script.write_text(SIDE.format(log=str(log), fails={name.replace("_", " "): how for name, how in fails.items()}))
        monkeypatch.setattr(gpu_speed, "SIDES", str(script))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if torch else None)
        left = gpu_speed.remember(time.monotonic(), seconds)
        found = gpu_speed.measured(TASK, FACTS, left, lambda line: None, rounds=3, seconds=0.02)
        return found, [json.loads(line) for line in log.read_text().splitlines()]

    return run


def test_sides_take_turns_and_the_other_begins_the_next_round(measured: Any) -> None:
    found, asked = measured()
    runs = [library for library, what, *_ in asked if what == "run"]
    warm, turns = runs[:2], runs[2:8]
    assert warm == ["mpitrain", "torch"]
    assert turns == ["mpitrain", "torch", "torch", "mpitrain", "mpitrain", "torch"]
    assert found["troubles"] == []
    assert [(row["side"], row["dtype"], row["mode"]) for row in found["rows"]] == [
        ("mpitrain", "bfloat16", "plain"),
        ("PyTorch", "bfloat16", "autocast"),
        ("mpitrain", "float32", "plain"),
        ("PyTorch", "float32", "plain"),
        ("mpitrain", "float16", "plain"),
        ("PyTorch", "bfloat16", "plain"),
    ]


def test_a_row_has_tokens_a_second_and_the_share_of_the_peak(measured: Any) -> None:
    row = measured()[0]["rows"][0]
    assert row["steps"] == 10  # 0.02 s of steps of 2 ms
    assert row["seconds"] == pytest.approx(0.002)
    assert row["tokens_per_s"] == pytest.approx(64 / 0.002)
    assert row["mfu"] == pytest.approx(TASK.flops / 0.002 / 989e12)
    assert (row["host_ms"], row["used"]) == (1.0, 10)


def test_every_operation_is_measured_on_both_sides(measured: Any) -> None:
    ops = measured()[0]["ops"]
    assert {row["name"] for row in ops} == set(OPS)
    assert all(row["mpitrain"] == row["PyTorch"] == 0.5 for row in ops)
    assert len(ops) == WORKS
    assert all(row["flops"] or row["bytes"] for row in ops)


def test_without_pytorch_mpitrain_is_measured_alone(measured: Any) -> None:
    found, asked = measured(torch=False)
    assert found["torch"] == "PyTorch is not installed"
    assert {library for library, *_ in asked} == {"mpitrain"}
    assert [row["dtype"] for row in found["rows"]] == ["bfloat16", "float32", "float16"]


def test_a_precision_that_a_side_cannot_do_is_a_trouble_and_the_others_are_measured(measured: Any) -> None:
    found, _ = measured(torch_build="out of memory")
    assert [row["side"] for row in found["rows"]] == ["mpitrain"] * 3
    assert any("out of memory" in trouble for trouble in found["troubles"])
    assert found["ops"]


def test_an_operation_that_fails_is_a_trouble_and_the_others_are_measured(measured: Any) -> None:
    found, _ = measured(mpitrain_op="RuntimeError: no such kernel")
    assert all(row["mpitrain"] is None and row["PyTorch"] == 0.5 for row in found["ops"])
    assert len(found["troubles"]) == len(found["ops"])


def test_a_side_that_dies_ends_the_measurement_and_keeps_what_was_found(measured: Any) -> None:
    found, _ = measured(mpitrain_look="dies")
    assert any("ended with exit code 7" in trouble for trouble in found["troubles"])
    assert found["ops"] == []


def test_a_side_that_hangs_is_not_waited_for(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "BUILD_LIMIT", 1.0)
    found, _ = measured(mpitrain_build="hangs")
    assert found["rows"] == []
    assert any("gave no answer within 1 s" in trouble for trouble in found["troubles"])


def test_without_time_it_is_said_that_something_was_left_out(measured: Any) -> None:
    found, asked = measured(seconds=1.0)
    assert found["rows"] == []
    assert found["troubles"] == []
    assert found["left"] == ["bfloat16", "float32", "float16", f"{WORKS} of {WORKS} operations"]
    assert asked == []


def test_what_there_was_time_for_is_kept(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds run down with each question whether any are left."""
    times = iter([60.0, *[16.0] * 9, *[12.0] * 12, *[9.0] * 99])
    monkeypatch.setattr(gpu_speed, "remember", lambda start, total: lambda: next(times))
    found, _ = measured()
    assert [row["dtype"] for row in found["rows"]] == ["bfloat16"] * 2
    assert found["troubles"] == []
    assert found["left"][:2] == ["float32", "float16"]
    assert found["left"][2] == f"{WORKS - len(found['ops'])} of {WORKS} operations"
    assert found["ops"]


def test_a_step_that_takes_longer_than_the_time_that_is_left_is_no_trouble(
    measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes more than the second for which an answer is waited for at least."""
    monkeypatch.setattr(gpu_speed, "LEAST", 1e9)
    limits: list[float] = []
    own = gpu_speed.Side.ask

    def ask(side: Any, limit: float, **command: Any) -> Any:
        limits.append(limit) if command["do"] == "run" else None
        return own(side, limit, **command)

    monkeypatch.setattr(gpu_speed.Side, "ask", ask)
    measured()
    assert set(limits) == {1e9}

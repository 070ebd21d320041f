"""The checks for a GPU, tried on the stand-in: tests/gpu and benchmarks/gpu_check.py, in small sizes.

What they measure means nothing here; that they find what is wrong is what is shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strict_stream import asynchronous

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import checks_gpu_streams as streams
import checks_gpu_training as training
import gpu_check
import gpu_parts
import gpu_timing

from mpitrain import backend, kernels
from mpitrain.device import open_device
from mpitrain.errors import DeviceError
from mpitrain.kernels import reference

ROOT = Path(__file__).resolve().parents[2]
PLAYED = os.pathsep.join([str(ROOT), str(Path(__file__).with_name("as_cupy"))])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PLAYED, "MPITRAIN_KERNELS": "numpy"}
"""Of processes in which `import cupy` gives the stand-in; whole trainings by emulated kernels would take minutes."""


# ---------------------------------------------------------------------------------------------------------- stale reads


@pytest.mark.parametrize("seed", [None, 1])
def test_nothing_is_stale_on_a_device_that_runs_late(cuda_kernels: Any, seed: int | None) -> None:
    with asynchronous(seed):
        assert streams.copies(cuda_kernels, 9, 8) == 0
        assert streams.messages(cuda_kernels, 2, 14, 8) == 0
        assert streams.offloaded(cuda_kernels, 9, 8) == 0


def test_a_copy_to_the_host_that_does_not_wait_is_found(
    cuda_kernels: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(streams, "to_host", lambda x: np.array(x._values))
    with asynchronous():
        assert streams.copies(cuda_kernels, 9, 8) == 9
        _, copies, *_ = run("streams", tmp_path / "lines")
    assert not copies["ok"]
    assert copies["found"] == "7 stale reads of 7"


# ------------------------------------------------------------------------------------------------------------- training

SHORT = training.Run(
    1, training.checks_layouts.train, {"sizes": training.checks_layouts.SIX, "sgd": True, "batch": 2, "steps": 2}
)


def test_a_training_that_differs_from_numpys_is_found(cupy: Any, numpy_kernels: None, monkeypatch: Any) -> None:
    assert training.judged(SHORT, cupy).ok
    assert training.gap(SHORT, "float32", cupy).ok
    own = reference.layer_norm_backward
    monkeypatch.setattr(reference, "layer_norm_backward", lambda grad, *args: own(slightly(cupy, grad), *args))
    found = training.judged(SHORT, cupy)
    assert not found.ok
    assert "gradients" in found.worst or "weights" in found.worst or "losses" in found.worst
    assert not training.gap(SHORT, "float32", cupy).ok


def slightly(cupy: Any, grad: Any) -> Any:
    """A mistake in the third digit, of the device alone."""
    return grad * grad.dtype.type(1.001) if isinstance(grad, cupy.ndarray) else grad


def test_a_training_that_tells_nothing_is_not_right(cupy: Any) -> None:
    assert not training.judged(training.Run(1, lambda world, xp: {"losses": {}}), cupy).ok


# ----------------------------------------------------------------------------------------------------------- the script


SMALL = gpu_parts.TINY._replace(most=3)


def run(part: str, result: Path, after: int = 0) -> list[dict[str, Any]]:
    assert gpu_parts.main(part, str(result), 60.0, after, SMALL) == 0
    return [json.loads(line) for line in result.read_text().splitlines()]


def test_a_part_writes_a_line_for_each_thing_that_it_tries(
    cupy: Any, numpy_kernels: None, tmp_path: Path, capsys: Any
) -> None:
    of, *things = run("streams", tmp_path / "lines")
    assert of == {"of": 3}
    assert [thing["ok"] for thing in things] == [True] * 3, things
    assert [thing["number"] for thing in things] == [0, 1, 2]
    assert run("streams", tmp_path / "again", after=2)[1]["name"] == things[2]["name"]
    assert "ok   copies to the host and back" in capsys.readouterr().out


def test_the_facts_of_a_device(cupy: Any, tmp_path: Path) -> None:
    (facts,) = run("device", tmp_path / "lines")
    assert facts["name"] == "Stand-in"
    assert facts["memory"] > 2**30
    assert float(facts["driver"]) >= float(facts["runtime"]) >= 12


def test_a_part_ends_in_time(cupy: Any, tmp_path: Path) -> None:
    assert gpu_parts.main("streams", str(tmp_path / "lines"), -1.0, 0, SMALL) == 0
    assert json.loads((tmp_path / "lines").read_text().splitlines()[-1]) == {"left": 3}


def test_a_part_ends_where_the_device_takes_no_more(cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> tuple[bool, Any]:
        monkeypatch.setattr(gpu_parts, "works", lambda device: False)
        raise RuntimeError("an illegal memory access was encountered")

    def two(device: Any, scale: Any) -> Any:
        yield gpu_parts.Thing("breaks", breaks)
        yield gpu_parts.Thing("follows", lambda: (True, ""))

    monkeypatch.setitem(gpu_parts.PARTS, "streams", two)
    assert gpu_parts.main("streams", str(tmp_path / "lines"), 60.0) == gpu_parts.BROKEN
    of, thing = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    assert (of["of"], thing["ok"]) == (2, False)
    assert "illegal memory access" in thing["found"]


def line(number: int, ok: bool = True) -> dict[str, Any]:
    return {"name": f"thing {number}", "ok": ok, "found": "", "number": number, "seconds": 0.0}


def test_a_part_goes_on_behind_what_broke_the_device_or_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter(
        [
            {"lines": [{"of": 5}, line(0), line(1, ok=False)], "code": gpu_parts.BROKEN, "error": ""},
            {"lines": [{"of": 5}, line(2)], "code": -1, "error": "it was ended after 40 s"},
            {"lines": [{"of": 5}, line(4)], "code": 0, "error": ""},
        ]
    )
    begun = []

    def part(name: str, limit: float, tiny: bool, after: int) -> dict[str, Any]:
        begun.append(after)
        return next(runs)

    monkeypatch.setattr(gpu_check, "_part", part)
    found = gpu_check._tried("kernels", 100.0, True)
    assert begun == [0, 2, 4]
    assert [thing["number"] for thing in found["things"]] == [0, 1, 2, 4]
    assert found["troubles"] == ["number 3 of 5: it was ended after 40 s"]


def test_where_there_is_no_gpu_the_script_says_that_it_was_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    said = 'Traceback\n  File "x"\nmpitrain.errors.DeviceError: --device cuda: there is no NVIDIA driver here\nhelp'
    monkeypatch.setattr(
        gpu_check, "_part", lambda *args: {"lines": [], "code": 1, "error": gpu_check._last_words(said, 1)}
    )
    assert gpu_check.main(["--json", str(tmp_path / "found.json")]) == 0
    assert "skipped, nothing was checked: --device cuda: there is no NVIDIA driver here" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["skipped"].startswith("--device cuda")
    assert "Skipped" in (tmp_path / "found.md").read_text()


def test_a_part_that_cannot_begin_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    try:
        open_device("cuda")
        pytest.skip("there is a GPU here")
    except DeviceError as error:
        words = str(error).splitlines()[0]
    found = gpu_check._part("device", 60.0, True)
    assert found["lines"] == []
    assert found["error"] == words


def test_what_was_not_asked_for_is_said_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    facts = {"name": "One", "memory": 2**36, "capability": "9.0", "cupy": "14", "runtime": "13.0", "driver": "13.0"}
    lines = {"device": [facts], "compile": [line(0)], "streams": [{"of": 1}, line(0)], "training": [{"of": 9}]}
    part = {name: {"lines": found, "code": 0, "error": ""} for name, found in lines.items()}
    monkeypatch.setattr(gpu_check, "_part", lambda name, *args: part[name])
    to = ["--json", str(tmp_path / "found.json"), "--parts"]
    assert gpu_check.main([*to, "streams", "training"]) == 0
    said = capsys.readouterr().out
    assert "One, compute capability 9.0, 64 GiB; CuPy 14 for CUDA 13.0, driver for CUDA 13.0" in said
    assert "\nok  1 of 1 ways to read something stale, and memory\n" in said
    assert "\n-   0 of 9 training runs, against NumPy in float64; 9 were left out for want of time\n" in said
    assert "\n-   not checked: kernels, commands, speed, which --parts did not ask for\n" in said
    part["streams"]["lines"][1]["ok"] = False
    assert gpu_check.main([*to, "streams"]) == 1
    assert "\nBAD 0 of 1 ways" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------------- timing


def test_waits_of_the_host_are_counted_and_kernels_are_stamped(cuda_kernels: Any) -> None:
    xp = cuda_kernels
    clock = gpu_timing.CupyClock(xp, 8)
    own = kernels.dropout, backend.to_host
    with gpu_timing.waits(xp) as waited, gpu_timing.by_kernel(clock) as found:
        y = kernels.dropout(xp.ones((3, 4)), xp.arange(3).astype(np.uint64), 0.5)
        assert set(backend.to_host(y).reshape(-1).tolist()) <= {0.0, 2.0}
        kernels.sum_of_squares(y)
        kernels.sum_of_squares(y)
    assert waited.times == 1
    assert {name: calls for name, (_, calls) in found().items()} == {"dropout": 1, "sum_of_squares": 2}
    assert (kernels.dropout, backend.to_host) == own
    assert gpu_timing.repeated_ms(clock, lambda: kernels.sum_of_squares(y), rounds=2, least=0.0) >= 0.0


# ----------------------------------------------------------------------------------------------------------- all of it


@pytest.mark.slow
def test_the_whole_script_on_the_stand_in(tmp_path: Path) -> None:
    """Its processes, both sides, the page: everything but a GPU."""
    pytest.importorskip("torch")
    script = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_check.py"),
        "--tiny",
        "--json",
        str(tmp_path / "found.json"),
    ]
    done = subprocess.run(script, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {(row["side"], row["dtype"], row["mode"]) for row in found["speed"]["rows"]}
    assert rows == {
        ("mpitrain", "bfloat16", "plain"),
        ("PyTorch", "bfloat16", "autocast"),
        ("mpitrain", "float32", "plain"),
        ("PyTorch", "float32", "plain"),
        ("mpitrain", "float16", "plain"),
        ("PyTorch", "bfloat16", "plain"),
    }
    assert all(row["kernels"]["matmul"][1] > 0 for row in found["speed"]["rows"] if row["side"] == "mpitrain")
    assert {row["name"] for row in found["speed"]["ops"] if row["mpitrain"] is not None}
    assert "BAD" not in done.stdout
    assert "## Training beside PyTorch" in (tmp_path / "found.md").read_text()


@pytest.mark.slow
def test_the_tests_for_a_gpu_pass_on_the_stand_in() -> None:
    tests = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(ROOT / "tests" / "gpu")]
    words = [*tests, "-k", "test_in_float64 or test_memory"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout

"""The page of a GPU check, and the figures that it is made of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_chips
import gpu_page
from gpu_speed import GPT_125M, Task, task_for

NAMES = {
    "NVIDIA H200": (67.0, 989.0),
    "NVIDIA H100 80GB HBM3": (67.0, 989.0),
    "NVIDIA H100 PCIe": (51.0, 756.0),
    "NVIDIA H20": (44.0, 148.0),
    "NVIDIA A100-SXM4-80GB": (19.5, 312.0),
    "NVIDIA A40": (37.4, 149.7),
    "NVIDIA A10G": (31.5, 70.0),
    "NVIDIA L40S": (91.6, 362.0),
    "NVIDIA L4": (30.3, 121.0),
    "Tesla V100-SXM2-16GB": (15.7, 125.0),
    "NVIDIA GeForce RTX 4090": (82.6, 165.2),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_chip_is_known_by_its_name(name: str) -> None:
    chip = gpu_chips.chip_of(name)
    assert chip is not None
    assert (chip.single, chip.half) == NAMES[name]


@pytest.mark.parametrize("name", ["NVIDIA RTX A4000", "NVIDIA T400", "Stand-in", "NVIDIA H2000"])
def test_what_is_not_in_the_table_has_no_peak(name: str) -> None:
    assert gpu_chips.chip_of(name) is None
    assert gpu_chips.peak(name, "float32") is None
    assert gpu_chips.mfu(1e12, 1.0, gpu_chips.peak(name, "float32")) is None


def test_a_volta_has_no_bfloat16() -> None:
    assert gpu_chips.peak("Tesla V100-SXM2-16GB", "bfloat16") is None
    assert gpu_chips.peak("Tesla V100-SXM2-16GB", "float16") == 125e12


def test_the_share_is_model_flops_over_peak() -> None:
    """72 B L s h^2 (1 + s/6h + V/12hL) of GPT-2's smallest, by hand: at 50 ms a step 0.15 of an H100."""
    flops = Task(GPT_125M, 8).flops
    b, l, s, h, v = 8, 12, 1024, 768, 50304  # noqa: E741 - the letters of the formula
    assert flops == pytest.approx(72 * b * l * s * h * h * (1 + s / (6 * h) + v / (12 * h * l)), rel=1e-12)
    assert gpu_chips.mfu(flops, 0.05, 989e12) == pytest.approx(flops / 0.05 / 989e12)
    assert 0.13 < gpu_chips.mfu(flops, 0.05, 989e12) < 0.16


def test_a_smaller_device_gets_fewer_sequences() -> None:
    assert [task_for(gib << 30).batch for gib in (139, 80, 24, 16)] == [8, 8, 4, 2]


def row(side: str, dtype: str, mode: str = "plain", **more: Any) -> dict[str, Any]:
    return {
        **{"side": side, "dtype": dtype, "mode": mode, "parameters": 124_000_000, "loss": 11.0, "times": [0.05, 0.06]},
        **{"seconds": 0.055, "tokens_per_s": 8192 / 0.055, "mfu": 0.13, "used": 2 << 30, "held": 3 << 30},
        **{"host_ms": 11.0, "device_ms": 44.0, "waits": 2, "kernels": {"matmul": [30.0, 96], "attention": [4.0, 12]}},
        **more,
    }


def found(**more: Any) -> dict[str, Any]:
    things = [{"name": "layer_norm 5x33, float32", "ok": True, "found": 0.3, "seconds": 0.1, "number": 0}]
    part = {"things": things, "of": 1, "troubles": [], "seconds": 1.0}
    speed = {
        "task": Task(GPT_125M, 8)._asdict(), "flops": Task(GPT_125M, 8).flops, "torch": "", "troubles": [], "left": [],
        "rows": [row("mpitrain", "bfloat16"), row("PyTorch", "bfloat16", "autocast", kernels={}, loss=11.001)],
        "ops": [
            {"name": "attention", "dtype": "bfloat16", "mpitrain": 0.2, "PyTorch": 0.1, "flops": 1e10, "bytes": 0},
            {"name": "GELU", "dtype": "bfloat16", "mpitrain": 0.1, "PyTorch": None, "flops": 0, "bytes": 1e8},
        ],
    }  # fmt: skip
    facts = {"name": "NVIDIA H200", "memory": 139 << 30, "capability": "9.0", "cupy": "14.2.0", "runtime": "13.0"}
    return {
        "machine": {"commit": "abc", "time": "now"}, "tiny": False, "seconds": 400.0,
        "device": {**facts, "driver": "13.2"},
        "compiled": part, "kernels": part, "streams": part, "training": part, "commands": part, "speed": speed, **more,
    }  # fmt: skip


def page(tmp_path: Path, result: dict[str, Any]) -> str:
    gpu_page.write(result, tmp_path / "page.md")
    return (tmp_path / "page.md").read_text()


def test_a_page_has_the_figures(tmp_path: Path) -> None:
    text = page(tmp_path, found())
    assert "| right | 1 of 1 kernels, against the reference in float64 |" in text
    assert "| mpitrain | bfloat16 | 148,945 | 136,533-163,840 | 55.0 | 13.0% | 2.00 | 3.00 | 11.00000 |" in text
    assert "| mpitrain | bfloat16 | 55.0 | 11.0 | 44.0 | 20% | 20% | 2 |" in text
    assert "| matmul | 30.00 | 96 | 68.2% |" in text
    assert "| everything else | 10.00 |  | 22.7% |" in text
    assert "| attention | bfloat16 | 0.200 | 0.100 | 2.00 | 50 TFLOP/s, 5% of the peak |" in text
    assert "| GELU | bfloat16 | 0.100 | - | - | 1,000 GB/s, 21% of the memory's |" in text
    assert "CuPy 14.2.0 for CUDA 13.0, driver for CUDA 13.2; 400 s in all" in text
    assert "GPT of 124 M parameters, 8 x 1024 tokens a step; 12 layers" in text
    assert "AdamW, clipping. 7.001 TFLOP a step" in text
    assert "What is wrong" not in text
    assert "not checked" not in text
    picture = (tmp_path / "page.svg").read_text()
    assert "148,945" in picture
    assert ">NVIDIA H200; GPT of 124 M parameters, 8 x 1024 tokens a step; bfloat16; * autocast<" in picture


def test_small_sizes_are_in_units_of_their_own(tmp_path: Path) -> None:
    speed = found()["speed"]
    speed["flops"] = 21_500_000
    for one in speed["rows"]:
        one["parameters"] = 14_880
    text = page(tmp_path, found(speed=speed))
    assert "GPT of 14.88 k parameters" in text
    assert " 21.5 MFLOP a step" in text


def test_a_page_says_that_nothing_was_checked(tmp_path: Path) -> None:
    assert "Skipped: nothing was checked or measured. no driver" in page(tmp_path, {"skipped": "no driver"})
    assert not (tmp_path / "page.svg").exists()


def bad(result: dict[str, Any]) -> list[str]:
    return [words for ok, words in gpu_page.verdicts(result) if ok is False]


def test_all_that_is_wrong_is_said(tmp_path: Path) -> None:
    assert bad(found()) == []
    wrong = {
        "name": "gelu 3, float16",
        "ok": False,
        "found": ["result 0: 1.0 for | 2.0\nat"],
        "number": 0,
        "seconds": 0,
    }
    for part in gpu_page.PARTS:
        assert "gelu 3, float16" in bad(found(**{part: {"things": [wrong], "of": 1, "troubles": []}}))[0]
        assert bad(found(**{part: {"things": [], "of": 0, "troubles": []}}))  # nothing tried is nothing shown
        assert "hung" in bad(found(**{part: {**found()[part], "troubles": ["hung"]}}))[0]
    text = page(tmp_path, found(kernels={"things": [wrong], "of": 1, "troubles": []}))
    assert "| **WRONG** | 0 of 1 kernels" in text
    assert "| kernels | gelu 3, float16 | ['result 0: 1.0 for / 2.0\\nat'] |" in text


def test_what_is_left_out_for_want_of_time_is_said_and_no_failure() -> None:
    result = found(kernels={**found()["kernels"], "of": 5})
    assert bad(result) == []
    assert "4 were left out for want of time" in gpu_page.verdicts(result)[1][1]


def test_speed_that_had_no_time_for_all_is_no_failure(tmp_path: Path) -> None:
    left = ["float32", "float16", "30 of 36 operations"]
    result = found(speed={**found()["speed"], "left": left})
    assert bad(result) == []
    words = "speed was measured in bfloat16; float32, float16, 30 of 36 operations were left out for want of time"
    assert f"| right | {words} |" in page(tmp_path, result)
    assert "What is wrong" not in page(tmp_path, result)


@pytest.mark.parametrize("part", ["kernels", "speed"])
def test_what_had_no_time_at_all_is_neither_right_nor_wrong(tmp_path: Path, part: str) -> None:
    nothing = {"things": [], "of": 5} if part != "speed" else {"rows": [], "left": ["bfloat16"]}
    result = found(**{part: {**found()[part], **nothing}})
    said = {words: ok for ok, words in gpu_page.verdicts(result) if "for want of time" in words}
    assert list(said.values()) == [None]
    assert f"| - | {next(iter(said))} |" in page(tmp_path, result)
    result[part]["troubles"] = ["it hung"]
    assert "it hung" in bad(result)[0]


def test_speed_that_measured_nothing_is_wrong() -> None:
    assert bad(found(speed={**found()["speed"], "rows": []})) == ["speed was measured in nothing"]


def test_parts_that_nobody_asked_for_are_said_to_be_not_checked(tmp_path: Path) -> None:
    result = {name: part for name, part in found().items() if name not in ("kernels", "streams", "speed")}
    assert bad(result) == []
    assert "| - | not checked: kernels, streams, speed, which --parts did not ask for |" in page(tmp_path, result)


def test_sides_that_train_something_else_are_no_comparison() -> None:
    speed = found()["speed"]
    speed["rows"][1]["loss"] = 10.0
    assert "differ by 1.0e-01" in bad(found(speed=speed))[0]


def test_a_side_that_failed_is_said() -> None:
    speed = {**found()["speed"], "rows": [], "troubles": ["float32: it ended"]}
    assert "it ended" in bad(found(speed=speed))[0]

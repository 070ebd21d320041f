"""The examples run on any number of ranks, print their lesson, and end with a difference as small as they say."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LESSONS = sorted(EXAMPLES.glob("[0-9][0-9]_*.py"))

# The differences that an example prints, and their largest allowed values.  A relative difference of sums in float64
# is some units of 1e-16; central differences with a step of 1e-6 are good to about 1e-9.
LIMITS = {
    "central differences": 1e-6,
    "an adjoint": 1e-12,
    "a loss to the serial run": 1e-10,
    "a weight": 1e-10,
    "a value or gradient": 1e-12,
    "a loss in halves": 0.01,
}


SHORT = {"10_experts": "--steps 2", "11_digits_cnn": "--epochs 1 --gist lossless", "15_digits_mlp": "--epochs 1"}
"""Flags of lessons that train for longer than a test should."""


DIGITS = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="scikit-learn is not installed, which brings the digits"
)


def differences(printed: str) -> dict[str, float]:
    """What a lesson says of itself in its last lines."""
    found = re.findall(r"^largest difference (?:of|to) (.+?):\s+([0-9.e+-]+)", printed, re.MULTILINE)
    return {what: float(value) for what, value in found}


def check(printed: str) -> None:
    found = differences(printed)
    assert found
    for what, value in found.items():
        limit = next(limit for name, limit in LIMITS.items() if what.startswith(name))
        assert value <= limit, (what, value)


@pytest.mark.parametrize(
    ("lesson", "ranks"),
    [
        ("01_autograd", 1),
        ("02_collectives", 1),
        ("02_collectives", 3),
        ("03_data_parallel", 1),
        ("03_data_parallel", 7),
        ("04_tensor_parallel", 1),
        ("04_tensor_parallel", 3),
        ("05_sequence_parallel", 1),
        ("05_sequence_parallel", 4),
        ("06_context_parallel", 1),
        ("06_context_parallel", 3),
        ("07_pipeline_timeline", 1),
        ("07_pipeline_timeline", 3),
        ("08_find_a_deadlock", 1),
        ("09_half_precision", 1),
        ("09_half_precision", 2),
        ("10_experts", 3),
        ("12_zero", 1),
        ("12_zero", 3),
        ("14_console", 1),
        ("14_console", 3),
        pytest.param("11_digits_cnn", 1, marks=DIGITS),
        pytest.param("11_digits_cnn", 3, marks=DIGITS),
        pytest.param("15_digits_mlp", 1, marks=DIGITS),
        pytest.param("15_digits_mlp", 3, marks=DIGITS),
    ],
)
def test_a_lesson_ends_with_a_small_difference(lesson: str, ranks: int, run: Callable[..., str]) -> None:
    launch = "python" if ranks == 1 else f"mpitrain local -n {ranks}"
    check(run(f"{launch} {EXAMPLES}/{lesson}.py {SHORT.get(lesson, '')}"))


def test_a_run_goes_on_from_a_checkpoint_and_a_flipped_bit_is_found(run: Callable[..., str]) -> None:
    printed = run(f"mpitrain local -n 3 {EXAMPLES}/13_checkpoints.py")
    check(printed)
    found = differences(printed)
    assert len(found) == 2
    assert found["a weight that went on, on the same layout"] == 0.0
    assert re.search(r"^rank-0000[0-2]\.h5 is damaged: weight/blocks\.0\.mlp\.up\.weight is not", printed, re.MULTILINE)


@pytest.mark.mpi
@pytest.mark.parametrize(
    "lesson",
    ["02_collectives", "03_data_parallel", "04_tensor_parallel", "05_sequence_parallel", "06_context_parallel"],
)
def test_a_lesson_prints_the_same_on_processes_as_on_threads(lesson: str, run: Callable[..., str]) -> None:
    printed = run(f"mpirun -n 2 python {EXAMPLES}/{lesson}.py")
    check(printed)
    local = run(f"mpitrain local -n 2 {EXAMPLES}/{lesson}.py")
    # All but the differences, whose last bits are the MPI library's order of sums.
    blurred = [re.sub(r"[0-9.]+e[+-][0-9]+", "?", text) for text in (printed, local)]
    assert blurred[0] == blurred[1]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("launch", "schedule"),
    [("mpitrain local -n 2", "gpipe"), ("mpitrain local -n 2", "interleaved"), ("mpirun -n 2 python", "zb-h1")],
)
def test_the_timeline_of_a_pipeline_is_printed_and_drawn(
    launch: str, schedule: str, run: Callable[..., str], tmp_path: Path
) -> None:
    printed = run(f"{launch} {EXAMPLES}/07_pipeline_timeline.py {schedule} --microbatches 4 --svg drawn.svg")
    check(printed)
    assert re.search(r"bubble +measured +[0-9.]+% +formula +[0-9.]+% +simulated +[0-9.]+%", printed)
    assert f"<title>{schedule}, measured" in (tmp_path / "drawn.svg").read_text(encoding="utf-8")


@pytest.mark.slow
@DIGITS
@pytest.mark.parametrize("gist", ["none", "lossless", "16", "10", "8"])
def test_digits_are_told_apart_also_with_encoded_activations(gist: str, run: Callable[..., str]) -> None:
    """98.5 % of the test images, and with losses within 0.3 points of that; lossless encodings are the same run."""
    printed = run(f"mpitrain local -n 2 {EXAMPLES}/11_digits_cnn.py --pp 2 --microbatches 2 --gist {gist}")
    check(printed)
    told = re.search(r"^test: .*?([0-9.]+)% of 360 images told right$", printed, re.MULTILINE)
    assert told is not None
    assert float(told[1]) >= (98.5 if gist in ("none", "lossless") else 98.2)
    saved = dict(re.findall(r"^ +--gist (\w+) .* ([0-9.]+)x$", printed, re.MULTILINE))
    assert float(saved["16"]) > float(saved["lossless"]) > 1.8


@pytest.mark.mpi
@DIGITS
def test_the_digits_are_learned_by_processes(run: Callable[..., str]) -> None:
    check(run(f"mpirun -n 2 python {EXAMPLES}/11_digits_cnn.py --epochs 1"))


def test_a_picture_in_no_folder_is_refused_before_the_training(run: Callable[..., str]) -> None:
    printed = run(f"! mpitrain local -n 2 {EXAMPLES}/10_experts.py --svg nowhere/x.svg 2>&1")
    assert printed.strip() == "ConfigError: --svg nowhere/x.svg: there is no folder nowhere."


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_is_short_and_says_how_it_is_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    docstring = text.split('"""')[1]
    assert docstring.startswith("Lesson ")
    assert f"examples/{path.name}" in docstring

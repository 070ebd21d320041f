"""The metrics of a run: every step once, in order, with all digits, whatever happened to the run."""

import json
import os
import resource
import signal

import numpy as np
import pytest

from mpitrain.errors import UserError
from mpitrain.metrics import MetricsWriter, line_of, read_metrics


def write_steps(path, first, last):
    with MetricsWriter(path, first) as metrics:
        for step in range(first, last + 1):
            metrics.write(step, loss=1 / step)


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_numbers_keep_all_their_digits():
    values = {"loss": 0.1 + 0.2, "lr": 1e-05, "grad": np.float32(0.1), "tokens": np.int64(1 << 60), "val_loss": None}
    back = json.loads(line_of(values))
    assert back == {"loss": 0.1 + 0.2, "lr": 1e-05, "grad": float(np.float32(0.1)), "tokens": 1 << 60}


def test_what_is_not_finite_is_null_and_named_in_strict_json():
    line = line_of({"step": 3, "loss": float("nan"), "grad_norm": np.float64("-inf"), "lr": 0.1})
    back = json.loads(line, parse_constant=lambda word: pytest.fail(word))
    assert back == {
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "lr": 0.1,
        "nonfinite": {"loss": "nan", "grad_norm": "-inf"},
    }


def test_every_line_is_on_the_disk_when_write_returns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsWriter(path)
    metrics.write(1, loss=5.5, val_loss=5.4)
    assert path.read_text() == '{"step": 1, "loss": 5.5, "val_loss": 5.4}\n'
    metrics.close()


def test_a_resumed_run_drops_the_steps_it_makes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 9)
    write_steps(path, 6, 7)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    assert os.listdir(tmp_path) == [path.name]


def test_a_fresh_run_starts_the_file_afresh(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 9)
    write_steps(path, 1, 2)
    assert steps(path) == [1, 2]


@pytest.mark.parametrize(
    "torn", [b'{"step": 4, "lo', b'{"step": 4}', b"\0\0\0", b'{"step": "4"}\n', b"[4]\n", b"\xff\n"]
)
def test_a_damaged_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    with open(path, "ab") as file:
        file.write(torn)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    write_steps(path, 4, 5)
    assert steps(path) == [1, 2, 3, 4, 5]


def test_a_step_that_stands_twice_is_read_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n{"step": 2, "loss": 3}\n{"step": 3, "loss": 4}\n')
    assert [record["loss"] for record in read_metrics(path)] == [1, 2, 4]


def test_steps_go_up(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(2, loss=1.0)
        with pytest.raises(AssertionError):
            metrics.write(2, loss=1.0)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no/metrics.jsonl: cannot be written: No such file"):
        MetricsWriter(tmp_path / "no" / "metrics.jsonl")


def test_what_is_not_a_regular_file_is_refused_and_left_alone(tmp_path):
    pipe = tmp_path / "metrics.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="not a regular file"):
        MetricsWriter(pipe)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == [pipe.name]


def test_a_full_disk_is_an_error_of_the_user(tmp_path):
    """The limit on file sizes stands for the full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(UserError, match=r"metrics.jsonl: cannot be written: File too large"):
            metrics.write(1, loss=1.0)
        metrics.close()  # has nothing left to write
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)

"""Metrics as a table and as TensorBoard's events: made of `metrics.jsonl`, whole after every stop and start."""

import csv
import errno
import json
import math
import os
import struct
import sys

import pytest

from mpitrain.errors import ConfigError, UserError
from mpitrain.metrics import read_metrics
from mpitrain.metrics.scalars import number, routed
from mpitrain.metrics.sinks import Sinks, check_libraries
from mpitrain.metrics.table import COLUMNS, row_of

BOTH = frozenset({"csv", "tensorboard"})


def write_steps(folder, first, last, asked=frozenset({"csv"}), **more):
    with Sinks(folder, first, asked, {"settings": "    layers = 2"}) as sinks:
        for step in range(first, last + 1):
            sinks.write(step, loss=1 / step, val_loss=0.5 if step % 5 == 0 else None, lr=1e-3, tokens=10 * step, **more)


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def routing(*loads):
    layers = {
        f"blocks.{n}.mlp": {"load": load, "dropped": n, "held_back": 0, "entropy": 0.5} for n, load in enumerate(loads)
    }
    return {"routing": layers, "balance_loss": 1.5}


# ------------------------------------------------------------------------------------------------------------ table


def test_a_row_has_every_number_in_its_column_with_all_digits(tmp_path):
    write_steps(tmp_path, 1, 7)
    for row, record in zip(rows(tmp_path), read_metrics(tmp_path / "metrics.jsonl"), strict=True):
        for name in COLUMNS:
            expected = record.get(name)
            assert row[name] == ("" if expected is None else repr(expected))
    assert rows(tmp_path)[2]["loss"] == "0.3333333333333333"


def test_the_columns_are_the_same_whatever_a_run_measures(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_steps(tmp_path / "a", 1, 1)
    write_steps(tmp_path / "b", 1, 1, loss_scale=2.0, skipped=0, **routing([3, 1]))
    headers = {(tmp_path / name / "metrics.csv").read_text().splitlines()[0] for name in "ab"}
    assert headers == {
        "step,loss,bits_per_byte,val_loss,val_bits_per_byte,grad_norm,lr,tokens_per_s,tokens,loss_scale,skipped,"
        "balance_loss,z_loss,experts_busiest,experts_dropped"
    }


def test_of_experts_the_busiest_and_the_most_that_was_dropped():
    record = {"step": 3, **routing([5, 5], [9, 1])}
    assert routed(record)["blocks.1.mlp"].busiest == pytest.approx(1.8)
    cells = dict(zip(COLUMNS, row_of(record).strip().split(","), strict=True))
    assert (float(cells["experts_busiest"]), float(cells["experts_dropped"])) == (1.8, 0.1)


def test_what_is_not_finite_is_named(tmp_path):
    with Sinks(tmp_path, 1, frozenset({"csv"}), {}) as sinks:
        sinks.write(1, loss=float("nan"), grad_norm=float("inf"), lr=-math.inf, skipped=1)
    (row,) = rows(tmp_path)
    assert (row["loss"], row["grad_norm"], row["lr"], row["skipped"]) == ("nan", "inf", "-inf", "1")
    assert math.isnan(number(next(read_metrics(tmp_path / "metrics.jsonl")), "loss"))


def test_a_resumed_run_goes_on_without_the_steps_it_makes_again(tmp_path):
    write_steps(tmp_path, 1, 9)
    write_steps(tmp_path, 6, 7)
    assert [row["step"] for row in rows(tmp_path)] == [str(step) for step in range(1, 8)]
    assert sorted(os.listdir(tmp_path)) == ["metrics.csv", "metrics.jsonl"]


def test_asked_for_in_the_middle_of_a_run_it_has_all_steps(tmp_path):
    write_steps(tmp_path, 1, 4, asked=frozenset())
    assert not (tmp_path / "metrics.csv").exists()
    write_steps(tmp_path, 5, 6)
    assert [row["loss"] for row in rows(tmp_path)] == [repr(1 / step) for step in range(1, 7)]


def test_rows_and_columns_of_another_program_are_replaced(tmp_path):
    write_steps(tmp_path, 1, 3)
    (tmp_path / "metrics.csv").write_text("foo,bar\n1,2\n1,2,3\n\0")
    write_steps(tmp_path, 4, 5)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3", "4", "5"]


def test_a_fresh_run_starts_the_table_afresh(tmp_path):
    write_steps(tmp_path, 1, 5)
    write_steps(tmp_path, 1, 2)
    assert len(rows(tmp_path)) == 2


def test_a_link_in_the_place_of_the_table_is_refused(tmp_path):
    (tmp_path / "bait").write_text("x")
    (tmp_path / "metrics.csv").symlink_to(tmp_path / "bait")
    with pytest.raises(UserError, match="not a regular file"):
        write_steps(tmp_path, 1, 2)
    assert (tmp_path / "bait").read_text() == "x"


def test_a_table_on_a_full_disk_is_a_message(tmp_path):
    sinks = Sinks(tmp_path, 1, frozenset({"csv"}), {})
    os.dup2(os.open("/dev/full", os.O_WRONLY), sinks._others[0]._file._file.fileno())
    with pytest.raises(UserError, match=r"metrics\.csv: cannot be written: No space left"):
        sinks.write(1, loss=1.0)
    sinks.close()


# ------------------------------------------------------------------------------------------------------ TensorBoard


def crc32c(data):
    """Castagnoli's, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8 & 0xFFFFFFFF


def events(path):
    """The events of a file, each with its checksums proven."""
    from tensorboardX.proto.event_pb2 import Event

    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        assert struct.unpack_from("<I", data, 8) == (crc32c(data[:8]),)
        body = data[12 : 12 + length]
        assert struct.unpack_from("<I", data, 12 + length) == (crc32c(body),)
        found.append(Event.FromString(body))
        data = data[16 + length :]
    return found


def files(folder):
    return sorted((folder / "tensorboard").iterdir(), key=lambda path: int(path.suffix[1:]))


def curves(folder):
    """tag -> step -> value, as TensorBoard shows them: a mark of a start makes it forget later steps."""
    shown = {}
    for path in files(folder):
        for event in events(path):
            if event.HasField("session_log"):
                assert event.session_log.status == event.session_log.START
                for curve in shown.values():
                    for step in [step for step in curve if step >= event.step]:
                        del curve[step]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    shown.setdefault(value.tag, {})[event.step] = value.simple_value
    return shown


@pytest.fixture
def _library(monkeypatch):
    if "tensorboardX" not in sys.modules:
        monkeypatch.setitem(sys.modules, "torch", None)  # it would import PyTorch, for pictures of networks
    pytest.importorskip("tensorboardX", reason="needs tensorboardX: the extra tensorboard")


@pytest.mark.usefixtures("_library")
def test_events_are_what_the_lines_say(tmp_path):
    write_steps(tmp_path, 1, 6, BOTH, bits_per_byte=2.0, loss_scale=4.0, **routing([3, 1]))
    shown = curves(tmp_path)
    assert shown["loss/train"] == {step: pytest.approx(1 / step) for step in range(1, 7)}
    assert shown["loss/validation"] == {5: 0.5}
    assert shown["optimizer/learning_rate"][1] == pytest.approx(1e-3)
    assert shown["experts/blocks.0.mlp/busiest"][4] == 1.5
    assert {"bits_per_byte/train", "optimizer/loss_scale", "progress/tokens", "experts/balance_loss"} < set(shown)
    (path,) = files(tmp_path)
    first, said = events(path)[:2]
    assert first.file_version == "brain.Event:2"
    (value,) = said.summary.value
    assert value.tensor.string_val[0] == b"    layers = 2"
    assert value.metadata.plugin_data.plugin_name == "text"


@pytest.mark.usefixtures("_library")
def test_a_resumed_run_has_tensorboard_forget_later_steps(tmp_path):
    write_steps(tmp_path, 1, 9, BOTH)
    write_steps(tmp_path, 6, 7, BOTH, grad_norm=3.0)
    shown = curves(tmp_path)
    assert sorted(shown["loss/train"]) == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(shown["optimizer/gradient_norm"]) == [6, 7]
    assert len(files(tmp_path)) == 2
    write_steps(tmp_path, 1, 2, BOTH)  # a run that begins anew in the same folder
    names = [path for path in files(tmp_path) if path.suffix == ".1"]
    newest = max(names, key=lambda path: path.stat().st_mtime_ns)
    assert [event.step for event in events(newest) if event.HasField("session_log")] == [1]


@pytest.mark.usefixtures("_library")
def test_asked_for_in_the_middle_of_a_run_events_have_all_steps(tmp_path):
    write_steps(tmp_path, 1, 4, asked=frozenset())
    write_steps(tmp_path, 5, 6, BOTH)
    assert sorted(curves(tmp_path)["loss/train"]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("_library")
def test_events_do_not_wait_longer_than_a_few_seconds(tmp_path, monkeypatch):
    from mpitrain.metrics import tensorboard

    monkeypatch.setattr(tensorboard, "PATIENCE", 0.0)
    sinks = Sinks(tmp_path, 1, BOTH, {})
    sinks.write(1, loss=2.0)
    assert curves(tmp_path)["loss/train"] == {1: 2.0}
    sinks.close()


@pytest.mark.usefixtures("_library")
def test_events_on_a_full_disk_are_a_message(tmp_path, monkeypatch):
    from mpitrain.metrics import tensorboard

    monkeypatch.setattr(tensorboard, "PATIENCE", 0.0)
    sinks = Sinks(tmp_path, 1, frozenset({"tensorboard"}), {})

    def fails():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sinks._others[0]._file, "flush", fails)
    with pytest.raises(UserError, match="tensorboard: cannot be written: No space left"):
        sinks.write(1, loss=2.0)
    sinks.close()


@pytest.mark.usefixtures("_library")
def test_a_link_in_the_place_of_the_events_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        write_steps(tmp_path / "run", 1, 2, BOTH)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_without_the_library_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r'pip install "mpitrain\[tensorboard\]"'):
        check_libraries(BOTH)
    check_libraries(frozenset({"csv"}))


def test_the_lines_are_written_whatever_else_is(tmp_path):
    write_steps(tmp_path, 1, 3)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]

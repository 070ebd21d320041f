"""The metrics of a run for TensorBoard: event files in `DIR/tensorboard`.

    tensorboard --logdir runs/

The file format is protobuf in TensorFlow's records with checksums; tensorboardX makes both (`pip install
"mpitrain[tensorboard]"`), imported when it is used.  Each start of a run has a file of its own.  That of a run that
goes on begins with a mark which tells TensorBoard to forget the steps that are made again.

Its writer of single records is used, without the thread and the queue around it: an error of the disk then ends the run
with a message, as for `metrics.jsonl`, and no event waits in memory for longer than `PATIENCE`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError, UserError
from mpitrain.metrics.lines import read_metrics, refused
from mpitrain.metrics.scalars import number, routed

FOLDER = "tensorboard"
PATIENCE = 5.0  # seconds that an event may wait for others before it is on the disk
TAGS = {
    "loss": "loss/train",
    "val_loss": "loss/validation",
    "bits_per_byte": "bits_per_byte/train",
    "val_bits_per_byte": "bits_per_byte/validation",
    "grad_norm": "optimizer/gradient_norm",
    "lr": "optimizer/learning_rate",
    "loss_scale": "optimizer/loss_scale",
    "skipped": "optimizer/skipped",
    "tokens": "progress/tokens",
    "tokens_per_s": "progress/tokens_per_s",
    "device_memory_bytes": "device/memory_bytes",
    "balance_loss": "experts/balance_loss",
    "z_loss": "experts/z_loss",
}
"""What a number of a step is called in TensorBoard; the word before the stroke is its group."""


class Events:
    """Writes events to a file of this start.

    Args:
        folder: of the run.
        first_step: the step that will be written first.  Where there is no file yet, the steps before it are written
            from `metrics.jsonl`.
        texts: title -> Markdown, shown beside the curves.

    Raises:
        ConfigError: tensorboardX is not installed.
        UserError: the file cannot be written.
    """

    def __init__(self, folder: Path, first_step: int, texts: Mapping[str, str]) -> None:
        load_library()
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.record_writer import RecordWriter

        self._path = folder / FOLDER
        self._flushed = time.monotonic()
        self._file: Any = None
        try:
            if self._path.is_symlink():  # it would lead out of the run
                raise UserError(f"{self._path}: is a link; event files cannot be written there.")
            self._path.mkdir(mode=0o700, exist_ok=True)
            is_new = not any("tfevents" in name for name in os.listdir(self._path))
            # TensorBoard finds a file by the middle of its name; the end tells two starts in one second apart.
            name = f"events.out.tfevents.{int(time.time())}.{platform.node()}.{os.getpid()}.{first_step}"
            self._file = RecordWriter(os.path.abspath(self._path / name))
            self._add(0, file_version="brain.Event:2")
            if first_step > 1 or not is_new:
                self._add(first_step, session_log=SessionLog(status=SessionLog.START))
            for title, text in texts.items():
                self._say(title, text)
            if is_new:
                for record in takewhile(lambda one: one["step"] < first_step, read_metrics(folder / "metrics.jsonl")):
                    self.write(record)
            self._file.flush()
        except OSError as error:
            raise refused(self._path, error) from None

    def write(self, record: Mapping[str, Any]) -> None:
        """Write what a line of `metrics.jsonl` has.

        Raises:
            UserError: the file cannot be written (a full disk).
        """
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record)]
        try:
            self._add(int(record["step"]), summary=Summary(value=values))
            if time.monotonic() - self._flushed > PATIENCE:
                self._file.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            raise refused(self._path, error) from None

    def close(self) -> None:
        """Write what waits, and close the file."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _say(self, title: str, text: str) -> None:
        from tensorboardX import summary

        self._add(0, summary=summary.text(title, text))

    def _add(self, step: int, **what: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time.time(), step=step, **what).SerializeToString())


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The curves that a line of `metrics.jsonl` has a point of, and the points."""
    for name, tag in TAGS.items():
        if (value := number(record, name)) is not None:
            yield tag, float(value)
    for layer, load in routed(record).items():
        for name, value in load._asdict().items():
            if value is not None:
                yield f"experts/{layer}/{name}", float(value)
    peaks = record.get("memory_peak_bytes")
    for owner, nbytes in peaks.items() if isinstance(peaks, dict) else ():
        if isinstance(nbytes, (int, float)):
            yield f"memory_peak_bytes/{owner}", float(nbytes)


def load_library() -> None:
    """Import the library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import tensorboardX.record_writer  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--metrics tensorboard needs tensorboardX, which cannot be loaded: {error}.\n"
            'Install it: pip install "mpitrain[tensorboard]", or take --metrics csv.'
        ) from None

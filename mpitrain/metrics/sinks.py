"""Everything that writes what a step measured: `metrics.jsonl`, and what `--metrics` asks for besides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from mpitrain.metrics import table, tensorboard
from mpitrain.metrics.lines import MetricsWriter, record_of
from mpitrain.metrics.table import Table
from mpitrain.metrics.tensorboard import Events, load_library


class Sink(Protocol):
    """Takes the lines of `metrics.jsonl` one by one."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take a line."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...


class Sinks:
    """Writes each step to all of them.

    Args:
        folder: of the run.
        first_step: the step that will be written first; see `MetricsWriter`.
        asked: which besides `metrics.jsonl`, as `config_rules.sinks` has them.
        texts: title -> Markdown, for those that show text.

    Raises:
        UserError: one of them cannot be written, or lacks its library.
    """

    def __init__(self, folder: Path, first_step: int, asked: frozenset[str], texts: Mapping[str, str]) -> None:
        self._others: list[Sink] = []
        self._lines = MetricsWriter(folder / "metrics.jsonl", first_step)
        try:
            if "csv" in asked:
                self._others.append(Table(folder, first_step))
            if "tensorboard" in asked:
                self._others.append(Events(folder, first_step, texts))
        except BaseException:
            self.close()
            raise

    def write(self, step: int, **values: float | int | Mapping[str, Any] | None) -> None:
        """Write a step; as `MetricsWriter.write`."""
        self._lines.write(step, **values)
        if self._others:
            record = record_of({"step": step, **values})
            for sink in self._others:
                sink.write(record)

    def close(self) -> None:
        """Close all files."""
        self._lines.close()
        for sink in self._others:
            sink.close()

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def files(asked: frozenset[str]) -> list[str]:
    """What is written besides `metrics.jsonl`, by its names in the folder of the run."""
    names = {"csv": table.NAME, "tensorboard": f"{tensorboard.FOLDER}/"}
    return [names[sink] for sink in sorted(asked)]


def check_libraries(asked: frozenset[str]) -> None:
    """Refuse what cannot be written here for want of a library.

    Raises:
        ConfigError: it is not installed.
    """
    if "tensorboard" in asked:
        load_library()

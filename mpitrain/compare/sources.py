"""What a run has left behind, of which it can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.folders import survey
from mpitrain.compare.sides import Side
from mpitrain.debug.digests import files
from mpitrain.errors import DataError, UserError
from mpitrain.metrics import read_metrics
from mpitrain.options import show
from mpitrain.recording.reading import ranks_in

Records = dict[int, Mapping[str, Any]]
"""Step -> its line of metrics."""


@dataclass
class Source:
    """One run.

    Attributes:
        number: 1 or 2.
        folder: of the run.
        digests: of its ranks; None: it has none.
        metrics: of its steps; empty: it has none.
        checkpoints: step -> folder of those that are whole as far as their names tell.
        recorded: whether the folder is a recording.
    """

    number: int
    folder: Path
    digests: Side | None
    metrics: Records
    checkpoints: dict[int, Path]
    recorded: bool = False

    @property
    def facts(self) -> Mapping[str, Any]:
        """What its digests say of versions and kernels."""
        found = {} if self.digests is None else self.digests.begin(self.digests.executors[0]).get("facts")
        return found if isinstance(found, dict) else {}


def source(folder: str, number: int) -> Source:
    """Look for what a run has left.

    Raises:
        DataError: there is no such folder, or nothing in it that could be compared.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"run {number}, {show(folder)}: is no folder of a run.")
    metrics: Records = {}
    if (path / "metrics.jsonl").is_file():
        try:
            metrics = {record["step"]: record for record in read_metrics(path / "metrics.jsonl")}
        except OSError as error:
            raise DataError(f"{show(folder)}/metrics.jsonl: {error.strerror}.") from None
    side = None
    if (path / files.FOLDER).is_dir() or any(path.glob("rank-?????.jsonl")):
        side = Side(files.read(path), number)
    found = Source(number, path, side, metrics, _checkpoints(path), bool(ranks_in(path)))
    if side is None and not metrics and not found.checkpoints and not found.recorded:
        raise DataError(
            f"run {number}, {show(folder)}: holds no digests, no metrics.jsonl, no checkpoints and no recording:"
            " nothing can\nbe compared.  Train with --digests, or name the folder of a run."
        )
    return found


def _checkpoints(path: Path) -> dict[int, Path]:
    try:
        of = [folder for folder, trouble in survey(path) if not trouble]
    except (OSError, UserError):
        return {}
    return {int(digits): folder for folder in of if (digits := folder.name.rpartition("-")[2]).isdecimal()}

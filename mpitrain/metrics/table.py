"""The metrics of a run as a table: `DIR/metrics.csv`, a header and one row a step.

    step,loss,bits_per_byte,val_loss,...
    1,5.598421096801758,8.076,,...

The columns are the same in every run, whatever it measures: programs that read the file find each number in its place,
and what a step did not measure is empty.  What is not finite is nan, inf or -inf.  Of experts it has the busiest one of
all layers, as a multiple of an even share, and the largest share of choices that were dropped; all of it is in
`metrics.jsonl`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from mpitrain import disk
from mpitrain.metrics.lines import Appended, read_metrics, refused, there
from mpitrain.metrics.scalars import number, routed

NAME = "metrics.csv"
NUMBERS = (
    "step",
    "loss",
    "bits_per_byte",
    "val_loss",
    "val_bits_per_byte",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "tokens",
    "loss_scale",
    "skipped",
    "balance_loss",
    "z_loss",
)
COLUMNS = (*NUMBERS, "experts_busiest", "experts_dropped")


class Table:
    """Appends rows to a table.

    Args:
        folder: of the run.
        first_step: the step that will be written first.  The rows before it are made of `metrics.jsonl`: none is
            missing, none stands twice, and those of steps that are made again are gone.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        path = folder / NAME
        lines = folder / "metrics.jsonl"
        try:
            there(path)
            _begin(path, takewhile(lambda record: record["step"] < first_step, read_metrics(lines)))
            self._file = Appended(path)
        except OSError as error:
            raise refused(path, error) from None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the row of a line of `metrics.jsonl`.

        Raises:
            UserError: the file cannot be written (a full disk).
        """
        self._file.write(row_of(record).encode())

    def close(self) -> None:
        """Close the file; nothing is lost without it."""
        self._file.close()


def row_of(record: Mapping[str, Any]) -> str:
    """One row; numbers have all their digits."""
    layers = routed(record).values()
    busiest = max((layer.busiest for layer in layers), default=None)
    dropped = max((layer.dropped for layer in layers), default=None)
    cells = [*(number(record, name) for name in NUMBERS), busiest, dropped]
    return ",".join("" if cell is None else repr(cell) for cell in cells) + "\n"


def _begin(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Header and rows in the place of what is there, under another name until it is whole."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.unlink(missing_ok=True)  # of a run that was killed
    with open(disk.create(draft), "wb") as file:
        file.write((",".join(COLUMNS) + "\n").encode())
        for record in records:
            file.write(row_of(record).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)

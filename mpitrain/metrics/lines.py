"""What a run measured, one JSON object a step: `DIR/metrics.jsonl`.

    {"step": 1, "loss": 5.598421096801758, "grad_norm": 3.1, "lr": 2.3e-05, "tokens_per_s": 41200.5, "tokens": 1024}

Every step has its line, in order and once, whatever is printed on the terminal and however often the run was resumed.
Numbers have all their digits.  The lines are strict JSON, which knows no NaN and no infinity: such a value is null, and
`"nonfinite": {"loss": "nan"}` says what it was.

One rank writes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from mpitrain import disk
from mpitrain.errors import UserError

_LONGEST = 1 << 24  # bytes of a line; what a step says of a thousand layers of experts is a hundredth of it


class MetricsWriter:
    """Appends lines to a file of metrics.

    Args:
        path: the file; its folder exists.
        first_step: the step that will be written first; 1 starts afresh.  Lines of this step and later ones, left by
            a run that stopped after its last checkpoint, are dropped, and so is a line that was cut short.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], first_step: int = 1) -> None:
        self._path = Path(path)
        self._last_step = first_step - 1
        try:
            if there(self._path):
                _drop_from(self._path, first_step)
            self._file = Appended(self._path)
        except OSError as error:
            raise refused(self._path, error) from None

    def write(self, step: int, **values: float | int | Mapping[str, Any] | None) -> None:
        """Append the line of a step and hand it to the operating system.

        Args:
            step: larger than every step before it.
            values: what was measured, a number, or whole numbers and lists of them by name; None is left out.

        Raises:
            UserError: the file cannot be written (a full disk).
        """
        assert step > self._last_step, (step, self._last_step)
        self._last_step = step
        self._file.write(line_of({"step": step, **values}).encode())

    def close(self) -> None:
        """Close the file; nothing is lost without it."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Appended:
    """A file of the run's own that grows at its end; what was written is with the operating system.

    Args:
        path: the file, made where it does not exist.

    Raises:
        OSError: it cannot be opened, or is a link.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0, opener=_to_append)  # noqa: SIM115  (closed by close)

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            UserError: the file cannot be written (a full disk).
        """
        left = memoryview(data)
        try:
            while left:  # nothing is held back, which `close` would try again to write
                left = left[self._file.write(left) :]
        except OSError as error:
            raise refused(self._path, error) from None

    def close(self) -> None:
        """Close the file; nothing is lost without it."""
        self._file.close()


def there(path: Path) -> bool:
    """Whether a file of metrics exists.

    Raises:
        UserError: something else has its name; a link would lead out of the run.
    """
    if not os.path.lexists(path):
        return False
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise UserError(f"{path}: is not a regular file; metrics cannot be written there.")
    return True


def refused(path: Path, error: OSError) -> UserError:
    """The message where a file of metrics cannot be written."""
    return UserError(f"{path}: cannot be written: {error.strerror}.  --run must be a folder with free space.")


def line_of(values: Mapping[str, Any]) -> str:
    """One line of the file; NumPy's scalars are written as the Python numbers they equal."""
    return json.dumps(record_of(values), allow_nan=False) + "\n"


def record_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the line holds."""
    record: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for key, value in values.items():
        if value is None:
            continue
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, float) and not math.isfinite(plain):
            nonfinite[key] = repr(plain)
            plain = None
        record[key] = plain
    if nonfinite:
        record["nonfinite"] = nonfinite
    return record


def read_metrics(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a file of metrics, in order, steps ascending; lines that are damaged are passed over."""
    with open(path, "rb") as file:
        for _, record in _records(file):
            yield record


def _records(file: BinaryIO) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Line and record, for every whole line whose step follows those before it."""
    last_step = -1
    while line := file.readline(_LONGEST):
        if not line.endswith(b"\n"):  # the writer was killed inside this line, or it is none
            return
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step = record.get("step") if isinstance(record, dict) else None
        if type(step) is int and last_step < step < 1 << 62:
            last_step = step
            yield line, record


def _drop_from(path: Path, first_step: int) -> None:
    """Rewrite the file without the lines of `first_step` and later, under another name until it is whole."""
    unfinished = path.with_name(path.name + ".tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unfinished)  # of a run that was killed
    with open(disk.open_to_read(path), "rb") as old, open(disk.create(unfinished), "wb") as new:
        for line, record in _records(old):
            if record["step"] >= first_step:
                break
            new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(unfinished, path)


def _to_append(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)

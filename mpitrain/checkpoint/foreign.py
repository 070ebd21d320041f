"""HDF5 files that come without a manifest: looked at in a child process with limits, read past HDF5.

A checkpoint's manifest says what its files hold, and checksums say that HDF5 is given what was written.  A single HDF5
file from somewhere else has neither, and the C library that parses it is large.  So this process never opens it with
HDF5: a child does (foreign_walk.py), which has 512 MiB, five seconds, and no right to open another file; it answers
where the bytes of each dataset lie.  Those are then read here with `pread`, and unpacked by unpack.py.

Accepted are groups and datasets behind hard links, one name an object, at most 8 components deep; little-endian
numbers; contiguous values, or chunks that are all there, with shuffle, deflate and fletcher32.  Anything else (other
links, external or virtual storage, text, references, committed types, cycles, huge attributes, values far larger than
the file) refuses the whole file, by name.  Attributes are not read.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mpitrain import disk
from mpitrain.checkpoint import foreign_walk as walk
from mpitrain.checkpoint.unpack import unpack
from mpitrain.errors import CheckpointError
from mpitrain.options import show

MEMORY = 512 << 20
"""Bytes of address space of the process that looks at a file."""
SECONDS = 5.0
"""Its CPU time; it may take four times as long by the clock."""


@dataclass(frozen=True)
class Dataset:
    """A dataset in a foreign file.

    Attributes:
        shape: of its values.
        dtype: NumPy's name.
        offset: of the values in the file where they are contiguous.
        chunk: shape of a chunk where they are not.
        filters: through which a chunk went, in this order.
        chunks: (offset, bytes, mask of filters that were left out) of every chunk, in order of their coordinates.
    """

    shape: tuple[int, ...]
    dtype: str
    offset: int | None = None
    chunk: tuple[int, ...] = ()
    filters: tuple[str, ...] = ()
    chunks: tuple[tuple[int, int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def stored(self) -> int:
        """Bytes in the file."""
        return self.nbytes if self.offset is not None else sum(size for _, size, _ in self.chunks)


class ForeignFile:
    """A file whose contents are known and plain; closed by `close`, or as a context manager.

    Attributes:
        path: as it was given.
        nbytes: size of the file.
        datasets: by name, in the order of names; of those asked for, in the order of asking.
    """

    def __init__(self, path: Path, descriptor: int, nbytes: int, datasets: Mapping[str, Dataset]) -> None:
        self.path, self.nbytes, self.datasets = path, nbytes, datasets
        self._descriptor = descriptor

    @property
    def total(self) -> int:
        """Bytes of all values."""
        return sum(dataset.nbytes for dataset in self.datasets.values())

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The values of a dataset, or its rows from `start` to `stop`.

        Raises:
            CheckpointError: the file became shorter, or what it holds cannot be unpacked.

        Cost: memory for the rows, and for one chunk where they are packed.
        """
        dataset = self.datasets[name]
        stop = dataset.shape[0] if stop is None and dataset.shape else stop
        shape = (stop - start, *dataset.shape[1:]) if dataset.shape else ()  # type: ignore[operator]
        kind = np.dtype(dataset.dtype).newbyteorder("<")
        values = np.empty(shape, kind)
        try:
            if dataset.offset is None:
                self._read_chunks(dataset, values, start)
            elif values.size:
                row = dataset.nbytes // dataset.shape[0] if dataset.shape else 0
                flat = values.reshape(-1).view(np.uint8)
                disk.read(self._descriptor, self.path, flat, dataset.offset + start * row)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise CheckpointError(f"{show(self.path)}: {name} cannot be read: {reason}.") from None
        return values.astype(kind.newbyteorder("="), copy=False)

    def _read_chunks(self, dataset: Dataset, values: np.ndarray, start: int) -> None:
        """Fill `values`, the rows from `start` on, from the chunks that hold them."""
        grid = [-(-length // part) for length, part in zip(dataset.shape, dataset.chunk, strict=True)]
        of_a_row = math.prod(grid[1:])
        first, last = start // dataset.chunk[0], -(-(start + len(values)) // dataset.chunk[0])
        for number in range(first * of_a_row, last * of_a_row):
            offset, size, mask = dataset.chunks[number]
            packed = np.empty(size, np.uint8)
            disk.read(self._descriptor, self.path, packed, offset)
            chunk = unpack(packed, dataset.filters, mask, dataset.chunk, values.dtype)
            source, target = [], []
            place = np.unravel_index(number, grid)
            low = (start,) + (0,) * (len(grid) - 1)
            for at, part, begin, length in zip(place, dataset.chunk, low, values.shape, strict=True):
                from_, to = max(int(at) * part, begin), min((int(at) + 1) * part, begin + length)
                source.append(slice(from_ - int(at) * part, to - int(at) * part))
                target.append(slice(from_ - begin, to - begin))
            values[tuple(target)] = chunk[tuple(source)]

    def close(self) -> None:
        """Close the file; what was read stays."""
        os.close(self._descriptor)

    def __enter__(self) -> ForeignFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_file(
    path: str | os.PathLike[str],
    names: Collection[str] | None = None,
    *,
    memory: int = MEMORY,
    seconds: float = SECONDS,
) -> ForeignFile:
    """Open an HDF5 file of unknown origin.

    Args:
        path: a regular file, or a link to one.
        names: datasets that are wanted; nothing else is looked at.  None: all, and all must be plain.
        memory: bytes of address space that looking may take.
        seconds: CPU time that it may take.

    Raises:
        CheckpointError: it is no HDF5 file, or holds what is not accepted; names the object and says why.

    Cost: a process, a quarter of a second, and some 50 us a dataset.
    """
    where = Path(os.path.realpath(path))
    try:
        descriptor = disk.open_to_read(where)
    except OSError as error:
        raise CheckpointError(f"{show(path)} cannot be read: {error.strerror}.") from None
    try:
        nbytes = os.fstat(descriptor).st_size
        wanted = None if names is None else list(names)
        answer = _ask(descriptor, wanted, show(path), memory, seconds)
        datasets = _believe(answer, wanted, nbytes, show(path))
        return ForeignFile(Path(path), descriptor, nbytes, datasets)
    except BaseException:
        os.close(descriptor)
        raise


def _ask(descriptor: int, names: list[str] | None, path: str, memory: int, seconds: float) -> Any:
    """What the child process says about an open file."""
    request = {
        "descriptor": descriptor,
        "names": names,
        "memory": memory,
        "seconds": seconds,
        "path": [os.path.abspath(entry) for entry in sys.path],  # where this process found h5py
    }
    keep = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG")
    surroundings = {name: os.environ[name] for name in keep if name in os.environ}
    # One BLAS thread, since each reserves memory; and no plug-ins of HDF5, which a file could ask for.
    surroundings |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HDF5_PLUGIN_PRELOAD": "::"}
    with tempfile.TemporaryFile() as told:
        try:
            done = subprocess.run(
                [sys.executable, "-I", walk.__file__],
                input=json.dumps(request).encode(),
                stdout=told,
                stderr=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                env=surroundings,
                cwd="/",
                timeout=4 * seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CheckpointError(f"{path} is refused: looking at it took longer than {4 * seconds:g} s.") from None
        told.seek(0)
        text = told.read(walk.MAX_ANSWER + 1)
    if done.returncode:
        ended = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"failed with {done.returncode}"
        raise CheckpointError(
            f"{path} is refused: the process that looked at it {ended}; the file is damaged, hostile, or takes more "
            f"than {seconds:g} s or {memory >> 20} MiB."
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _believe(answer: Any, names: list[str] | None, nbytes: int, path: str) -> dict[str, Dataset]:
    """The datasets in an answer; a child whose HDF5 was led astray may say anything.

    Raises:
        CheckpointError: the file was refused, or the answer is none.
    """
    if isinstance(answer, dict) and "refused" in answer:
        name, why = (str(word).encode("ascii", "backslashreplace").decode() for word in answer["refused"])
        what = f"{show(name)} {why}" if name else why if why.startswith("HDF5") else f"it {why}"
        raise CheckpointError(f"{path} is refused: {what}.")
    try:
        datasets = {
            name: _dataset(name, shape, dtype, place, nbytes) for name, shape, dtype, place in answer["datasets"]
        }
        if names is not None and list(datasets) != list(dict.fromkeys(names)):
            raise ValueError
        return datasets
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        raise CheckpointError(f"{path} is refused: HDF5 contradicts itself about what it holds.") from None


def _dataset(name: str, shape: list[int], dtype: str, place: dict[str, Any], nbytes: int) -> Dataset:
    """A dataset from its line in an answer.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError: there is no such dataset.
    """
    fine = all(walk.COMPONENT.fullmatch(part) for part in name.split("/")) and dtype in walk.DTYPES
    if "offset" in place:
        (offset,) = _counts([place["offset"]])
        dataset = Dataset(_counts(shape), dtype, offset)
        spans = [(offset, dataset.nbytes)]
    else:
        filters, chunks = tuple(place["filters"]), tuple(_chunk(*_counts(entry)) for entry in place["chunks"])
        dataset = Dataset(_counts(shape), dtype, None, _counts(place["chunk"]), filters, chunks)
        grid = [-(-length // part) for length, part in zip(dataset.shape, dataset.chunk, strict=True)]
        small = math.prod(dataset.chunk) * np.dtype(dtype).itemsize <= walk.MAX_CHUNK
        fine = fine and small and len(chunks) == math.prod(grid) and set(filters) <= set(walk.FILTERS.values())
        spans = [(offset, size) for offset, size, _ in chunks]
    allowed = max(walk.EXPANSION * nbytes, walk.ALWAYS_ALLOWED)
    if not fine or dataset.nbytes > allowed or any(offset + size > nbytes for offset, size in spans):
        raise ValueError(name)
    return dataset


def _chunk(offset: int, size: int, mask: int) -> tuple[int, int, int]:
    return offset, size, mask


def _counts(values: list[int]) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ValueError(values)
    return tuple(values)

"""Many arrays in one launch: `csrc/several.cu`.

The parameters of a model are views of a few buffers.  What a kernel is given are these buffers, and a table of the
parts; it is made when a list is first seen, and stays on the device with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, address, array_module, is_half
from mpitrain.kernels.cuda.arrays import precision
from mpitrain.kernels.cuda.halves import narrow
from mpitrain.kernels.cuda.launch import THREADS, launch
from mpitrain.kernels.cuda.update import adamw, sum_of_squares
from mpitrain.kernels.reference.update import adamw_numbers, each_run, each_sgd
from mpitrain.kernels.several import AdamwRun, Several, SgdRun

CHUNK = 16_384
"""Elements of a block; it does not depend on the device, and so sums do not."""


class _Group(NamedTuple):
    """Parts that lie in the same buffers, how many parts and chunks, and their tables on the device."""

    buffers: tuple[Array | None, ...]
    number: int
    chunks: int
    parts: Array
    rates: Array | None = None


def sums_of_squares(arrays: Several[Array]) -> Array:
    xp = array_module(arrays[0])
    if arrays.prepared is None:
        fit = all(precision(x) is not None and x.flags.c_contiguous and type(x) is type(arrays[0]) for x in arrays)
        arrays.prepared = _grouped(xp, [(x,) for x in arrays], [(i,) for i in range(len(arrays))]) if fit else ()
    if not arrays.prepared:
        return xp.stack([sum_of_squares(x) for x in arrays])
    totals = xp.empty(len(arrays), np.float64)
    for (x,), number, chunks, parts, _ in arrays.prepared:
        sums = xp.empty(chunks, np.float64)
        launch("several", "squares_of_parts", x.dtype, chunks, THREADS, x, parts, sums, number, CHUNK)
        launch("several", "sums_of_parts", x.dtype, number, THREADS, sums, parts, totals, number, chunks)
    return totals


def adamw_runs(runs: Several[AdamwRun], *, update: int, lr: float, beta1: float, beta2: float, eps: float) -> None:
    if runs.prepared is None:
        runs.prepared = _runs(runs) if all(map(_fits, runs)) else ()
    if not runs.prepared:
        each_run(adamw, narrow, runs, update=update, lr=lr, beta1=beta1, beta2=beta2, eps=eps)
        return
    *decays, eps, step, _ = adamw_numbers(update, 1.0, beta1, beta2, eps, 0.0)
    for (p, g, m, v, halves), number, chunks, parts, rates in runs.prepared:
        dtype = p.dtype if halves is None else halves.dtype
        arrays, numbers = (p, g, m, v, halves, parts, rates), (*decays, eps, np.float64(lr), np.float64(step))
        launch("several", "adamw_parts", dtype, chunks, THREADS, *arrays, number, CHUNK, *numbers)


def sgd_runs(runs: Several[SgdRun], *, lr: float, momentum: float, nesterov: bool) -> None:
    if runs.prepared is None:
        runs.prepared = _runs(runs) if all(map(_fits, runs)) else ()
    if not runs.prepared:
        each_sgd(narrow, runs, lr=lr, momentum=momentum, nesterov=nesterov)
        return
    for (p, g, u, halves), number, chunks, parts, rates in runs.prepared:
        dtype = p.dtype if halves is None else halves.dtype
        arrays, numbers = (p, g, u, halves, parts, rates), (np.float64(lr), float(momentum), nesterov)
        launch("several", "sgd_parts", dtype, chunks, THREADS, *arrays, number, CHUNK, *numbers)


def _fits(run: AdamwRun | SgdRun) -> bool:
    """Whether a kernel takes a run: vectors without gaps, of one length and precision."""
    p, *others, halves, _, _ = run
    if is_half(p.dtype) or precision(p, *others) is None:
        return False
    if halves is not None and not (type(halves) is type(p) and is_half(halves.dtype) and p.dtype == np.float32):
        return False
    vectors = [x for x in (p, *others, halves) if x is not None]
    return all(x.flags.c_contiguous and x.size == p.size for x in vectors)


def _runs(runs: Sequence[AdamwRun] | Sequence[SgdRun]) -> list[_Group]:
    rates = [(run.rate, run.decay) for run in runs]
    return _grouped(array_module(runs[0].p), [run[:-2] for run in runs], [()] * len(runs), rates)


def _grouped(
    xp: Any,
    rows: Sequence[tuple[Array | None, ...]],
    more: Sequence[tuple[int, ...]],
    rates: Sequence[tuple[float, float]] = (),
) -> list[_Group]:
    """The rows of arrays, which are parts of one size, by the buffers in which they lie.

    Args:
        rows: arrays of each part; None: not there.
        more: numbers that its line in the table ends with.
        rates: of each part, where the kernel has a table of them.
    """
    found: dict[Any, tuple[tuple[Array | None, ...], list[int], list[list[int]]]] = {}
    empty = {i for i, row in enumerate(rows) if not any(x.size for x in row if x is not None)}
    for i, row in enumerate(rows):
        if i in empty:
            continue
        places = [_place(x) for x in row]
        key = tuple(None if buffer is None else (address(buffer), buffer.dtype) for buffer, _ in places)
        _, numbers, offsets = found.setdefault(key, (tuple(buffer for buffer, _ in places), [], []))
        numbers.append(i)
        offsets.append([offset for _, offset in places])
    for i in sorted(empty):  # they lie nowhere: any group takes them
        first = next(iter(found.values()), None) or found.setdefault(None, (rows[i], [], []))
        first[1].append(i)
        first[2].append([0] * len(rows[i]))
    groups = []
    for buffers, numbers, offsets in found.values():
        chunks, lines = 0, []
        for i, line in zip(numbers, offsets, strict=True):
            (size,) = {x.size for x in rows[i] if x is not None}
            lines.append([*line, size, chunks, *more[i]])
            chunks += -(-size // CHUNK)
        of_parts = xp.asarray([rates[i] for i in numbers], np.float64) if rates else None
        groups.append(_Group(buffers, len(lines), chunks, xp.asarray(lines, np.int64), of_parts))
    return groups


def _place(x: Array | None) -> tuple[Array | None, int]:
    """The buffer that an array without gaps is a part of, as a vector of its dtype, and its offset there."""
    if x is None:
        return None, 0
    base = x.base
    if base is None or not base.flags.c_contiguous or base.nbytes % x.itemsize:
        return x.reshape(-1), 0
    whole = base.reshape(-1)
    offset, rest = divmod(address(x) - address(whole), x.itemsize)
    return (x.reshape(-1), 0) if rest else (whole if whole.dtype == x.dtype else whole.view(x.dtype), offset)

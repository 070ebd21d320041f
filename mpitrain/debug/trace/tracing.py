"""A trace of whatever a block runs, on all ranks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpitrain import disk
from mpitrain.comm.together import together
from mpitrain.comm.world import World
from mpitrain.debug.timeline import clock_name
from mpitrain.debug.trace.blocks import FACTS, segments
from mpitrain.debug.trace.tracer import OPS_EVERY, Tracer
from mpitrain.debug.trace.writer import LIMIT, MARK, SAID, Writer
from mpitrain.errors import ConfigError, UserError
from mpitrain.events import attest
from mpitrain.recording.outside import heard


@contextlib.contextmanager
def tracing(
    world: World,
    folder: str | os.PathLike[str],
    *,
    ops: int = OPS_EVERY,
    limit: int = LIMIT,
    facts: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Write a trace while the block runs; every rank enters it.

        with tracing(world(), "my-trace"):
            train()

    `mpitrain trace my-trace` shows it.

    Args:
        world: all ranks.
        folder: made if it is not there; a trace that is in it is replaced.
        ops: in each how many-th step ops are traced, besides the first three; 1: in all.
        limit: MiB that a rank writes: the first steps and the newest are kept.
        facts: about the run, anything that JSON can hold.

    Raises:
        UserError: the folder cannot be written; on every rank.

    Cost: see docs/how-to/trace-a-run.md.
    """
    for name, value in (("ops", ops), ("limit", limit)):
        if value < 1:
            raise ConfigError(f"tracing(..., {name}={value}): must be a whole number from 1 on.")
    try:
        length = len(json.dumps(facts, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tracing(..., facts=...): JSON cannot hold them: {error}.") from None
    if length > FACTS // 2:
        raise ConfigError(f"tracing(..., facts=...): {length:,} bytes of JSON, at most {FACTS // 2:,} are kept.")
    path = Path(folder)
    began = world.exchange(heard("time of the trace", time.time))[0]

    def refused(error: Exception) -> UserError:
        return UserError(f"{path}: a trace cannot be written there: {getattr(error, 'strerror', None) or error}.")

    together(world, lambda: _empty(path, None), here=world.rank == 0, refused=refused)
    head = {
        "rank": world.rank,
        "size": world.size,
        "host": world.host,
        "clock": clock_name(),
        "began": began,
        "facts": dict(facts or {}),
    }
    writer = together(world, lambda: _writer(path, head, limit), refused=refused)
    assert writer is not None
    tracer = Tracer(writer, ops)
    try:
        with attest(tracer):
            yield
    finally:
        tracer.close()


def _writer(folder: Path, head: Mapping[str, Any], limit: int) -> Writer:
    _empty(folder, head["rank"])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder / SAID)
    with contextlib.suppress(FileExistsError):
        os.close(disk.create(folder / MARK))
    return Writer(folder, head, limit)


def _empty(folder: Path, rank: int | None) -> None:
    """Make the folder, and remove what an earlier trace of a rank, or of all, has left there."""
    if not folder.is_dir():
        with contextlib.suppress(FileExistsError):  # another rank was faster
            disk.make_folder(folder)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    for of_rank, paths in segments(folder).items():
        for path in paths if rank in (None, of_rank) else ():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

"""The trainer's side of a recording: begun before its first message, its size told before the first step."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from mpitrain.assemble import step_of
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.config import Config
from mpitrain.data.tokens import Tokens
from mpitrain.debug.recorder import Recorder, record
from mpitrain.errors import RecordingError
from mpitrain.models.decoder import Decoder
from mpitrain.pipeline.executor import Executor
from mpitrain.recording.asked import ranks_of, steps_of
from mpitrain.recording.outside import OUTSIDE, heard
from mpitrain.replay import size
from mpitrain.replay.run import values

_MIB = 2**20
LONGEST_SETTINGS = 1 << 16


def recorded(config: Config, ranks: World, flags: Sequence[str]) -> contextlib.AbstractContextManager[Recorder | None]:
    """Record what follows, if it was asked for.  Collective over the world.

    Raises:
        RecordingError: the folder holds a recording, or cannot be made; a rank that does not exist; on every rank.
    """
    if config.record is None:
        return contextlib.nullcontext()
    return record(
        ranks,
        config.record,
        ranks=None if config.record_ranks is None else ranks_of(config.record_ranks),
        steps=None if config.record_steps is None else steps_of(config.record_steps),
        sent=config.record_sent,
        program="train",
        words=flags,
        settings=_file_of(flags),
    )


def _file_of(flags: Sequence[str]) -> str | None:
    """The text of the file of settings that the flags name: a replay must not depend on it."""
    paths = values(flags, "--config")
    if not paths:
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError), open(paths[-1], encoding="utf-8") as file:
        return file.read(LONGEST_SETTINGS)
    return None


def announce(
    config: Config,
    mesh: Mesh,
    model: Decoder,
    executor: Executor,
    steps: int,
    tokens: Tokens,
    say: Callable[[str], None],
    rows: int,
) -> None:
    """Say how much the recording will take.  Collective over the world.

    Args:
        config, mesh, model, executor, tokens: of the run.
        steps: of the run.
        say: tells people.
        rows: that a rank evaluates at once.

    Raises:
        RecordingError: the disk has less room; on every rank.
    """
    if config.record is None:
        return
    first, last = (1, steps) if config.record_steps is None else steps_of(config.record_steps)
    last = min(last, steps)
    here = config.record_ranks is None or mesh.world.rank in ranks_of(config.record_ranks)
    each, whole = _bytes(config, mesh, model, executor, (first, last), steps, tokens, rows) if here else (0, 0)
    free = heard("room for a recording", lambda: _free(Path(config.record or ".")))
    told = mesh.world.exchange([each, whole, free])
    total, room = sum(one[1] for one in told), min(one[2] for one in told)
    count = sum(one[1] > 0 for one in told)
    say(
        f"records steps {first} to {last} of {count} rank{'s' * (count > 1)} in {config.record}: about"
        f" {max(one[0] for one in told) / _MIB:.1f} MiB a step and rank, {total / _MIB:,.1f} MiB in all\n"
    )
    if total > room:
        if isinstance(recorder := OUTSIDE.get(), Recorder):
            recorder.discard()
        mesh.world.barrier()  # whoever raises first may end the others where they are
        raise RecordingError(
            f"--record {config.record}: needs about {total / _MIB:,.0f} MiB, {room / _MIB:,.0f} MiB are free there.\n"
            "Record fewer steps (--record-steps 100:103), fewer ranks (--record-ranks 0), or --record-sent digest."
        )


def _bytes(
    config: Config,
    mesh: Mesh,
    model: Decoder,
    executor: Executor,
    span: tuple[int, int],
    steps: int,
    tokens: Tokens,
    rows: int,
) -> tuple[int, int]:
    """Of this rank: of one step, and of all that is recorded."""
    first, last = span
    kept = config.record_sent == "values"
    step = step_of(config, mesh, model, 1 if executor.versions is None else 2)
    each = size.of_step(step, kept) + size.sums_of_state(executor)
    every = config.eval_interval(steps)
    evaluations = sum(number == steps or (every > 0 and number % every == 0) for number in range(first, last + 1))
    passes = tokens.num_validation_batches(rows * mesh.dp.size)
    whole = each * (last - first + 1) + evaluations * passes * size.of_evaluation(step, rows, kept)
    return each, whole + (size.of_state(executor) if first > 1 else 0)


def _free(folder: Path) -> int:
    """Bytes that the disk of a folder has left."""
    while not os.path.isdir(folder) and folder.parent != folder:
        folder = folder.parent
    return shutil.disk_usage(folder).free

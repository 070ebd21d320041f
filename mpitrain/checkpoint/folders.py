"""Where a run keeps its checkpoints, and how one comes to be there: whole, or not at all.

    RUN/checkpoints/step-00000100/            a checkpoint: it was renamed to this name when all of it was on the disk
    RUN/checkpoints/.tmp-step-00000200/       being written, or left by a save that was killed; nobody reads it
    RUN/checkpoints/.old-step-00000100/       replaced a moment ago by another checkpoint of the same step

One rank calls what changes anything.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from pathlib import Path

from mpitrain.checkpoint.layout import read_manifest
from mpitrain.errors import CheckpointError
from mpitrain.options import show

_STEP = re.compile(r"step-([0-9]{8,})")


def folder_of(run: str | os.PathLike[str], step: int) -> Path:
    """The checkpoint of a step."""
    return Path(run) / "checkpoints" / f"step-{step:08}"


def unfinished(folder: Path) -> Path:
    """The name of a checkpoint while it is written."""
    return folder.with_name(f".tmp-{folder.name}")


def publish(folder: Path) -> None:
    """Give an unfinished checkpoint its name; until then whoever looks sees the state before the save.

    Raises:
        OSError: the file system refused.
    """
    old = folder.with_name(f".old-{folder.name}")
    sync_folder(unfinished(folder))
    if folder.exists():  # the run went back to an earlier step and came here again
        os.rename(folder, old)
    os.rename(unfinished(folder), folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sweep(run: str | os.PathLike[str]) -> None:
    """Remove what killed saves left behind."""
    for folder in _entries(run, r"\.(?:tmp|old)-step-[0-9]{8,}"):
        kept = folder.with_name(folder.name[len(".tmp-") :])
        if folder.name.startswith(".old-") and not kept.exists():  # killed between the two renames of `publish`
            os.rename(folder, kept)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def retire_after(run: str | os.PathLike[str], step: int) -> list[Path]:
    """Rename the checkpoints of later steps, of a future that a run gives up by resuming from `step`.

    Otherwise a later `--resume latest` would leave the new branch for the old one.  Nothing is deleted.

    Returns:
        The new names.
    """
    retired = []
    for folder in _entries(run, _STEP.pattern):
        if int(folder.name[len("step-") :]) > step:
            numbers = (f"given-up-{number}-{folder.name}" for number in range(1, 1_000_000))
            target = next(folder.with_name(name) for name in numbers if not folder.with_name(name).exists())
            os.rename(folder, target)
            retired.append(target)
    return retired


def survey(run: str | os.PathLike[str]) -> list[tuple[Path, str]]:
    """All checkpoints of a run, newest first, each with what is wrong with it.

    An empty text means: nothing, as far as the manifest and the names and sizes of files tell.
    """
    found = []
    for folder in sorted(_entries(run, _STEP.pattern), key=lambda path: int(path.name[len("step-") :]), reverse=True):
        try:
            read_manifest(folder)
            found.append((folder, ""))
        except CheckpointError as error:
            found.append((folder, str(error)))
    return found


def latest(run: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint of a run."""
    return next((folder for folder, wrong in survey(run) if not wrong), None)


def locate(resume: str, run: str | None) -> tuple[Path, list[str]]:
    """What `--resume` means: `latest` of the run, a checkpoint, or a run whose newest one is meant.

    Returns:
        The folder, and what is wrong with newer ones that were passed over.

    Raises:
        CheckpointError: there is none.
    """
    if resume != "latest" and not os.path.isdir(resume):
        what = "is not a folder" if os.path.lexists(resume) else "does not exist"
        raise CheckpointError(
            f"--resume {show(resume)}: {what}; allowed: latest, or the folder of a checkpoint or a run."
        )
    if resume != "latest" and not os.path.isdir(os.path.join(resume, "checkpoints")):
        return Path(resume), []
    where = run if resume == "latest" and run is not None else resume
    passed: list[str] = []
    for folder, wrong in survey(where):
        if not wrong:
            return folder, passed
        passed.append(wrong)
    option = f"--resume latest: --run {where}" if resume == "latest" else f"--resume {resume}:"
    reason = (
        f"; the newest is damaged:\n{passed[0]}" if passed else "; save some with --save-every N or --stop-after N."
    )
    raise CheckpointError(f"{option} has no complete checkpoint{reason}")


def claim(run: str | os.PathLike[str]) -> None:
    """Make the folder of a run that starts afresh.

    Raises:
        CheckpointError: it cannot be made or written, or holds checkpoints, which would be mixed with the new ones.
    """
    try:
        os.makedirs(run, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"--run {show(run)}: cannot be made: {error.strerror}.  It must be a folder, or the name of one to make."
        ) from None
    if not os.access(run, os.W_OK | os.X_OK):
        raise CheckpointError(f"--run {show(run)}: cannot be written: Permission denied.  Choose another folder.")
    if found := survey(run):
        raise CheckpointError(
            f"--run {run}: holds checkpoints of another run, the newest {found[0][0].name}.\n"
            "Add --resume latest to go on with it, or choose another --run."
        )


def hold(run: str | os.PathLike[str]) -> int:
    """Lock the folder of a run against other jobs, for as long as the returned file descriptor is open.

    Two jobs in one folder would overwrite each other's checkpoints and metrics.  The lock goes with the process,
    however it ends; where the file system knows no locks, there is none.

    Raises:
        CheckpointError: another job holds it.
    """
    os.makedirs(run, exist_ok=True)
    descriptor = os.open(Path(run) / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            os.close(descriptor)
            raise CheckpointError(
                f"--run {show(run)}: another job trains in this folder just now.\nWait for it, or choose another --run."
            ) from None
    return descriptor


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where the file system can promise that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # network file systems that sync names by themselves
            raise
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> int:
    """Have a file on the disk; returns its size in bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a new file and have it on the disk."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
    sync_file(path)


def _entries(run: str | os.PathLike[str], pattern: str) -> list[Path]:
    folder = Path(run) / "checkpoints"
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if re.fullmatch(pattern, path.name) and path.is_dir()]

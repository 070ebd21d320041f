"""Where a run keeps its checkpoints, and how one comes to be there: whole, or not at all.

    RUN/checkpoints/step-00000100/            a checkpoint: it was renamed to this name when all of it was on the disk
    RUN/checkpoints/.tmp-step-00000200/       being written, or left by a save that was killed; nobody reads it
    RUN/checkpoints/.old-step-00000100/       replaced a moment ago by another checkpoint of the same step
    RUN/checkpoints/.gone-step-00000050/      being removed, since newer ones are kept

One rank calls what changes anything.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

from mpitrain import disk
from mpitrain.checkpoint.manifest import MANIFEST, read_manifest
from mpitrain.errors import CheckpointError
from mpitrain.options import show

OF_RUN = ("latest", "auto")
"""What `--resume` may say in the place of a folder: the newest checkpoint of the run; the same, if there is one."""

_STEP = re.compile(r"step-([0-9]{8,})")


def folder_of(run: str | os.PathLike[str], step: int) -> Path:
    """The checkpoint of a step."""
    return Path(run) / "checkpoints" / f"step-{step:08}"


def is_of(folder: Path, run: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint lies in the folder of this run."""
    return folder.resolve().parent == (Path(run) / "checkpoints").resolve()


def unfinished(folder: Path) -> Path:
    """The name of a checkpoint while it is written."""
    return folder.with_name(f".tmp-{folder.name}")


def publish(folder: Path) -> None:
    """Give an unfinished checkpoint its name; until then whoever looks sees the state before the save.

    Raises:
        OSError: the file system refused.
    """
    old = folder.with_name(f".old-{folder.name}")
    disk.sync_folder(unfinished(folder))
    again = os.path.lexists(folder)  # the run went back to an earlier step and came here again
    if again:
        disk.rename(folder, old)
    disk.rename(unfinished(folder), folder)
    disk.sync_folder(folder.parent)
    if again:
        disk.remove_tree(old)


def keep_newest(run: str | os.PathLike[str], count: int) -> None:
    """Remove all complete checkpoints of a run but the newest `count`.

    One that is not complete does not count, and stays: it is not what a run can go on from.
    """
    complete = [folder for folder, wrong in survey(run) if not wrong]
    gone = [folder.with_name(f".gone-{folder.name}") for folder in complete[count:]]
    for old, new in zip(complete[count:], gone, strict=True):
        disk.rename(old, new)  # so that nobody ever sees half of it under its name, also after a power failure
    if gone:
        disk.sync_folder(gone[0].parent)
    for folder in gone:
        disk.remove_tree(folder)


def sweep(run: str | os.PathLike[str]) -> None:
    """Remove what killed saves left behind, and whatever else has such a name."""
    for folder in _entries(run, r"\.(?:tmp|old|gone)-step-[0-9]{8,}", any_kind=True):
        if folder.is_symlink() or not folder.is_dir():
            os.unlink(folder)
            continue
        kept = folder.with_name(folder.name.partition("-")[2])
        if folder.name.startswith(".old-") and not kept.exists():  # killed between the two renames of `publish`
            disk.rename(folder, kept)
        else:
            disk.remove_tree(folder)


def retire_after(run: str | os.PathLike[str], step: int) -> list[Path]:
    """Rename the checkpoints of later steps, of a future that a run gives up by resuming from `step`.

    Otherwise a later `--resume latest` would leave the new branch for the old one.  Nothing is deleted.

    Returns:
        The new names.
    """
    sweep(run)  # else the next save would bring one back that was being replaced
    retired = []
    for folder in _entries(run, _STEP.pattern):
        if int(folder.name[len("step-") :]) > step:
            numbers = (f"given-up-{number}-{folder.name}" for number in range(1, 1_000_000))
            target = next(folder.with_name(name) for name in numbers if not folder.with_name(name).exists())
            disk.rename(folder, target)
            retired.append(target)
    return retired


def survey(run: str | os.PathLike[str]) -> list[tuple[Path, str]]:
    """All checkpoints of a run, newest first, each with what is wrong with it.

    An empty text means: nothing, as far as the manifest and the names and sizes of files tell.  One that was just being
    replaced when the run was killed is still the checkpoint of its step.
    """
    found, folders = [], _entries(run, _STEP.pattern)
    kept = {folder.name for folder in folders}
    folders += [old for old in _entries(run, r"\.old-step-[0-9]{8,}") if old.name[len(".old-") :] not in kept]
    for folder in sorted(folders, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        try:
            read_manifest(folder)
            found.append((folder, ""))
        except CheckpointError as error:
            found.append((folder, str(error)))
    return found


def latest(run: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint of a run."""
    return next((folder for folder, wrong in survey(run) if not wrong), None)


def locate(resume: str, run: str | None) -> tuple[list[Path], list[str]]:
    """What `--resume` means: the checkpoints to try, the first one first.

    Args:
        resume: `latest`, or `auto`, of the run; a checkpoint; or a run whose newest one is meant.
        run: this run's folder.

    Returns:
        All complete ones of a run, newest first, or the one that is named, or of `auto` none; and what is wrong with
        newer ones than the first, which are passed over.

    Raises:
        CheckpointError: there is none; with `auto`, if there are only damaged ones.
    """
    of_run = resume in OF_RUN
    if not of_run and not os.path.isdir(resume):
        what = "is not a folder" if os.path.lexists(resume) else "does not exist"
        made = "\nOf what reshard --one-file wrote, mpitrain checkpoint reshard FILE FOLDER --ranks 1 makes one."
        raise CheckpointError(
            f"--resume {show(resume)}: {what}; allowed: latest, auto, or the folder of a checkpoint or a run."
            f"{made if os.path.isfile(resume) else ''}"
        )
    if not of_run and not os.path.isdir(os.path.join(resume, "checkpoints")):
        return [Path(resume)], []
    where = run if of_run and run is not None else resume
    all_ = survey(where)
    complete = [folder for folder, wrong in all_ if not wrong]
    if complete:
        return complete, [wrong for _, wrong in all_[: all_.index((complete[0], ""))]]
    if resume == "auto" and not all_:
        return [], []
    option = f"--resume {resume}: --run {where}" if of_run else f"--resume {resume}:"
    reason = f"; the newest is damaged:\n{all_[0][1]}" if all_ else "; save some with --save-every N or --stop-after N."
    raise CheckpointError(f"{option} has no complete checkpoint{reason}")


def claim(run: str | os.PathLike[str]) -> None:
    """Make the folder of a run that starts afresh.

    Raises:
        CheckpointError: it cannot be made or written, or holds checkpoints, which would be mixed with the new ones.
    """
    try:
        os.makedirs(run, mode=0o700, exist_ok=True)
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
        CheckpointError: another job holds it, or nothing can be written there.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        os.makedirs(run, mode=0o700, exist_ok=True)
        descriptor = os.open(Path(run) / ".lock", flags, 0o600)
    except OSError as error:
        raise CheckpointError(
            f"--run {show(run)}: cannot be written: .lock: {error.strerror}.  Choose another folder, or mend this one."
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            os.close(descriptor)
            raise CheckpointError(
                f"--run {show(run)}: another job trains in this folder just now.\nWait for it, or choose another --run."
            ) from None
    return descriptor


def write_manifest(folder: Path, text: str) -> None:
    """Write the manifest of an unfinished checkpoint, and have it on the disk."""
    path = folder / MANIFEST
    file = disk.create(path)
    try:
        disk.write(file, path, text.encode(), 0)
        disk.sync(file, path)
    finally:
        os.close(file)


def _entries(run: str | os.PathLike[str], pattern: str, any_kind: bool = False) -> list[Path]:
    """Folders of such names; links are none, since what is renamed and removed here must be the run's own.

    Raises:
        CheckpointError: the folder of checkpoints is a link.
    """
    folder = Path(run) / "checkpoints"
    if folder.is_symlink():
        raise CheckpointError(
            f"{show(folder)} is a link; checkpoints of a run lie in the run's own folder.\n"
            "If they lie elsewhere, make the folder of the run a link, or name the other folder with --run."
        )
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(pattern, path.name)]
    return [path for path in found if any_kind or (path.is_dir() and not path.is_symlink())]

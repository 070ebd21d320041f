"""Refuse a training's disk operations, each in turn on each rank, and look whether all ranks end or go on together.

    PYTHONPATH=.:tests python tests/local/disk_trouble.py               every operation, the codes in turn; real disks
    PYTHONPATH=.:tests python tests/local/disk_trouble.py --all         every operation with every code
    PYTHONPATH=.:tests python tests/local/disk_trouble.py --real        real disks alone

What is refused is an operation of a save on one rank: ENOSPC, EIO, EDQUOT, EACCES, EROFS, ESTALE.  Real disks are full,
read-only, forbidden to the user, or of limited files; locks may be unknown to them.  Then either all ranks end with one
and the same message of at most five lines, or all go on; within ten seconds; the checkpoints of before load, bit for
bit; and the run, started again where it can be written, comes to the same end.

Exit code: 0 if all of that holds.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from crash.child import in_child
from crash.points import Points, Strike, on_rank, refuse
from crash.training import RANKS, SCENES, Reference, Scene, kept_later_steps

CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ESTALE)
LOCKS = (errno.EAGAIN, errno.ENOLCK, 524)
"""What a file system says that has no locks, or says that they are taken; 524 is ENOTSUPP, which NFS lets through."""
SECONDS = 10.0
LINES = 5
BESIDE = SCENES["a save beside others"]


@dataclass
class Tally:
    """What was found.

    Attributes:
        tried: trainings that were troubled.
        stopped: those that all ranks ended; the others went on.
        longest: seconds that the slowest took.
        messages: with which they ended.
        wrong: what must not be.
    """

    tried: int = 0
    stopped: int = 0
    longest: float = 0.0
    messages: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


def operations_of(reference: Reference, scene: Scene, start: bool = False) -> list[list[tuple[str, str]]]:
    """Of each rank, the disk operations of a training that nobody disturbs, from its first update or its start on."""
    listeners = [Points(("disk",), start) for _ in range(RANKS)]
    with _run(reference) as run, kept_later_steps():
        reference.train(run, *reference.prepare(scene, run), listener=lambda world: listeners[world.rank])
    return [listener.passed for listener in listeners]


def refuse_at(
    reference: Reference,
    scene: Scene,
    rank: int,
    number: int,
    code: int,
    tally: Tally,
    go_on: bool,
    start: bool = False,
) -> None:
    """Refuse one operation of one rank, counted from the first step on or from the start, and judge how that ends."""
    strike = Strike(number, refuse(code), ("disk",), start)
    with _run(reference) as run, kept_later_steps():
        flags = reference.prepare(scene, run)
        name = f"{scene.name}: rank {rank}, operation {number}, {errno.errorcode[code]}"
        trouble(
            reference, scene, run, name, lambda: reference.endings(run, *flags, listener=on_rank(rank, strike)), tally
        )
        if go_on:
            goes_on(reference, scene, run, name, tally)


def trouble(reference: Reference, scene: Scene, run: Path, name: str, work: Callable[[], object], tally: Tally) -> None:
    """Let a training get into trouble, and judge how it ends."""
    tally.tried += 1
    ended = in_child(work)
    tally.longest = max(tally.longest, ended.seconds)
    messages: list[str | None] = ended.result or []
    if ended.code != 0:
        tally.wrong.append(f"{name}: exit code {ended.code}: {ended.last_words}")
    elif len(set(messages)) != 1 or len(messages) != RANKS:
        tally.wrong.append(f"{name}: ranks do not end alike: {messages}")
    elif ended.output.strip():
        tally.wrong.append(f"{name}: it said, too:\n{ended.output}")
    elif messages[0] is not None:
        tally.stopped += 1
        tally.messages.add(messages[0].replace(str(run), "RUN"))
        if len(messages[0].splitlines()) > LINES:
            tally.wrong.append(f"{name}: a message of more than {LINES} lines:\n{messages[0]}")
    if ended.seconds > SECONDS:
        tally.wrong.append(f"{name}: {ended.seconds:.1f} s")
    verdict = reference.judge(run, scene)
    if verdict.lost or verdict.damaged:
        tally.wrong.append(f"{name}: {verdict}")


def goes_on(reference: Reference, scene: Scene, run: Path, name: str, tally: Tally) -> None:
    """Start a troubled training again, now that the disk is well."""
    ended = in_child(lambda: reference.go_on(run, scene))
    if ended.code != 0:
        tally.wrong.append(f"{name}: it does not go on: {ended.last_words}")


# ----------------------------------------------------------------------------------------------------------- real disks


def full(reference: Reference, tally: Tally, kibibytes: int) -> None:
    """A disk with so much room besides the checkpoints that are there."""
    with _run(reference) as run:
        flags = reference.prepare(BESIDE, run)
        there = sum(4096 * (path.stat().st_size // 4096 + 2) for path in run.rglob("*"))
        with _mounted(run, "-t", "tmpfs", "-o", f"size={there + 1024 * kibibytes}", "tmpfs"):
            reference.fill(BESIDE, run)
            trouble(reference, BESIDE, run, f"{kibibytes} KiB free", lambda: reference.endings(run, *flags), tally)


def read_only(reference: Reference, tally: Tally, what: str) -> None:
    """The folder of the run, or that of its checkpoints, on a disk that is read-only."""
    with _run(reference) as run:
        flags = reference.prepare(BESIDE, run)
        with _mounted(run / what, "--bind", str(run / what)):
            subprocess.run(["mount", "-o", "remount,ro,bind", str(run / what)], check=True)
            trouble(reference, BESIDE, run, f"read-only {what}", lambda: reference.endings(run, *flags), tally)
        goes_on(reference, BESIDE, run, f"read-only {what}", tally)


def forbidden(reference: Reference, tally: Tally, mode: int, what: str) -> None:
    """A folder in which the user may not write; as somebody who is not root."""

    def work() -> object:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        return reference.endings(run, *flags)

    with _run(reference) as run:
        flags = reference.prepare(BESIDE, run)
        for path in (run.parent, *run.parent.rglob("*")):
            if os.geteuid() == 0:
                os.chown(path, 65534, 65534)
        reference.folder.chmod(0o755)
        (run / what).chmod(mode)
        trouble(reference, BESIDE, run, f"mode {mode:o} of {what}", work, tally)
        (run / what).chmod(0o755)
        goes_on(reference, BESIDE, run, f"mode {mode:o} of {what}", tally)


def limited(reference: Reference, tally: Tally, size: int) -> None:
    """Files of at most so many bytes."""

    def work() -> object:
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
        endings = reference.endings(run, *flags)
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)  # what it says goes to a file
        return endings

    with _run(reference) as run:
        flags = reference.prepare(BESIDE, run)
        trouble(reference, BESIDE, run, f"files of {size} bytes", work, tally)
        goes_on(reference, BESIDE, run, f"files of {size} bytes", tally)


def without_locks(reference: Reference, tally: Tally, code: int) -> None:
    """A file system that refuses locks."""

    def work() -> object:
        with mock.patch.object(fcntl, "flock", side_effect=OSError(code, os.strerror(code))):
            return reference.endings(run, *flags)

    with _run(reference) as run:
        flags = reference.prepare(BESIDE, run)
        trouble(reference, BESIDE, run, f"locks refused with {code}", work, tally)
        goes_on(reference, BESIDE, run, f"locks refused with {code}", tally)


def may_mount() -> bool:
    """Whether this process may mount file systems."""
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False).returncode:
            return False
        subprocess.run(["umount", folder], check=True)
        return True


def real_troubles(mounts: bool) -> Iterator[tuple[str, Callable[[Reference, Tally], None]]]:
    """Name and work of each."""
    yield from ((f"locks {code}", lambda r, t, code=code: without_locks(r, t, code)) for code in LOCKS)
    for size in (0, 1000, 4096, 20000, 60000):
        yield f"files of {size} bytes", lambda r, t, size=size: limited(r, t, size)
    for what in (".", "checkpoints", "metrics.jsonl"):
        yield (
            f"forbidden {what}",
            lambda r, t, what=what: forbidden(r, t, 0o500 if what != "metrics.jsonl" else 0o400, what),
        )
    if mounts:
        for kibibytes in (0, 4, 8, 12, 16, 32, 64, 100, 200, 300, 350, 400, 450, 500):
            yield f"{kibibytes} KiB free", lambda r, t, kibibytes=kibibytes: full(r, t, kibibytes)
        for what in (".", "checkpoints"):
            yield f"read-only {what}", lambda r, t, what=what: read_only(r, t, what)


@contextlib.contextmanager
def _mounted(run: Path, *how: str) -> Iterator[None]:
    subprocess.run(["mount", *how, str(run)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(run)], check=True)


@contextlib.contextmanager
def _run(reference: Reference) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=reference.folder) as folder:
        yield Path(folder) / "run"


def tell(name: str, tally: Tally, seconds: float) -> None:
    print(
        f"{name:36}{tally.tried:8}{tally.stopped:9}{tally.longest:9.1f} s{len(tally.wrong):7}{seconds:8.0f} s",
        flush=True,
    )
    for text in tally.wrong[:10]:
        print(f"    {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scene", default="", help="only those whose name holds this")
    parser.add_argument("--all", action="store_true", help="every operation with every code, not one after the other")
    parser.add_argument("--real", action="store_true", help="real disks alone")
    parser.add_argument("--go-on", type=int, default=4, help="each so many-th run goes on to the end")
    parser.add_argument("--messages", action="store_true", help="show them")
    options = parser.parse_args()
    tallies = []
    print(f"{'scene':36}{'tried':>8}{'stopped':>9}{'longest':>11}{'wrong':>7}{'time':>10}")
    with tempfile.TemporaryDirectory() as folder:
        reference = Reference(Path(folder))
        rows = [(scene.name, scene, False) for scene in SCENES.values()]
        for name, scene, start in [("the start of a run that goes on", BESIDE, True), *rows]:
            if options.scene not in name or options.real:
                continue
            began, tally = time.monotonic(), Tally()
            all_, saves = (operations_of(reference, scene, begins) for begins in (start, False))
            lengths = [len(of) - (len(later) if start else 0) for of, later in zip(all_, saves, strict=True)]
            places = [(rank, number) for rank, count in enumerate(lengths) for number in range(1, count + 1)]
            for index, (rank, number) in enumerate(places):
                for code in CODES if options.all else (CODES[index % len(CODES)],):
                    refuse_at(reference, scene, rank, number, code, tally, tally.tried % options.go_on == 0, start)
            tell(name, tally, time.monotonic() - began)
            tallies.append(tally)
        for name, work in real_troubles(may_mount()):
            began, tally = time.monotonic(), Tally()
            work(reference, tally)
            tell(name, tally, time.monotonic() - began)
            tallies.append(tally)
    if options.messages:
        print(*sorted(set().union(*(tally.messages for tally in tallies))), sep="\n")
    wrong = sum(len(tally.wrong) for tally in tallies)
    print(f"\n{sum(tally.tried for tally in tallies)} troubles, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()

"""Saves that are killed, not synced, refused, and checkpoints that are damaged: a selection of what four commands do.

RELIABILITY 2.1 is kill_points.py, 2.2 lost_writes.py, 2.5 flipped_bits.py, 2.6 disk_trouble.py, all beside this file.
Here each finds what it should find; C62, C63.
"""

import errno
import json
import os
import random
import resource

import disk_trouble
import flipped_bits
import kill_points
import pytest
from crash.child import in_child
from crash.points import on_rank
from crash.training import RANKS, SCENES, Reference
from lost_writes import Finder

from mpitrain import checkpoint
from mpitrain.checkpoint import folders

OVER, DELETES, BACKGROUND = (
    SCENES[name] for name in ("a save over the only one", "a save that deletes an old one", "saves in the background")
)
PUBLISHING = ("rename", "sync_folder", "remove_tree")
MOUNTS = pytest.mark.skipif(not disk_trouble.may_mount(), reason="file systems can be mounted by root only")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("crash"))


# ---------------------------------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize("scene", [OVER, pytest.param(DELETES, marks=pytest.mark.slow)], ids=lambda scene: scene.name)
def test_killed_while_it_is_published_a_save_leaves_a_complete_checkpoint(reference, scene):
    points = kill_points.points_of(reference, scene)[0]
    numbers = [number for number, (_, name) in enumerate(points, 1) if name in PUBLISHING]
    tally = kill_points.Tally()
    for number in numbers[-3:]:
        kill_points.kill_at(reference, scene, 0, number, tally, number == numbers[-2])
    assert tally.troubles == []
    assert tally.killed == 3


def test_killed_in_the_background_a_save_leaves_a_complete_checkpoint(reference):
    tally = kill_points.Tally()
    kill_points.kill_at(reference, BACKGROUND, 1, 40, tally, True)
    assert tally.troubles == []
    assert tally.killed == 1


def test_a_killed_save_that_publishes_too_early_is_found(reference, monkeypatch):
    """The judge itself: a folder that has its name before its manifest is no checkpoint, and is told."""
    monkeypatch.setattr(folders, "unfinished", lambda folder: folder)
    monkeypatch.setattr("mpitrain.checkpoint.saving.unfinished", lambda folder: folder)
    tally = kill_points.Tally()
    kill_points.kill_at(reference, DELETES, 1, 30, tally, False)
    assert len(tally.damaged) == 1
    assert "has no manifest.json" in tally.damaged[0]


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_killed_anywhere_a_save_leaves_a_complete_checkpoint(reference, scene):
    tally = kill_points.Tally()
    for rank, points in enumerate(kill_points.points_of(reference, scene)):
        for number in range(1 + rank, len(points) + 1, 16):
            kill_points.kill_at(reference, scene, rank, number, tally, number % 3 == 0)
    assert tally.troubles == []
    assert tally.killed > 10


# ------------------------------------------------------------------------------------------------------- power failures


@pytest.mark.parametrize(("scene", "last"), [(DELETES, 7), (disk_trouble.BESIDE, 4)], ids=["deletes", "beside others"])
def test_after_a_power_failure_while_it_is_published_a_complete_checkpoint_loads(reference, scene, last):
    """What was published is there, also if nothing is deleted after it."""
    finder = Finder(reference, scene)
    finder.run(1, 40, last=last)
    assert finder.lost + finder.damaged == []
    assert finder.states == 6 * (last + 1)


def test_a_manifest_that_is_not_synced_is_found(reference, monkeypatch):
    """The finder itself: what loads is not what was promised where the last sync is missing."""

    def write_manifest(folder, text):
        path = folder / folders.MANIFEST
        file = folders.disk.create(path)
        folders.disk.write(file, path, text.encode(), 0)
        os.close(file)

    monkeypatch.setattr("mpitrain.checkpoint.saving.write_manifest", write_manifest)
    finder = Finder(reference, DELETES)
    finder.run(0, 0, last=4)
    assert any("nothing newer than step 2" in text for text in finder.lost)
    assert any("manifest.json is damaged" in text for text in finder.damaged)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_after_a_power_failure_at_any_time_a_complete_checkpoint_loads(reference, scene):
    finder = Finder(reference, scene)
    finder.run(1, 100)
    assert finder.lost + finder.damaged == []


# -------------------------------------------------------------------------------------------------------------- damages


def test_no_damaged_checkpoint_is_believed_and_file_and_tensor_are_named(reference, tmp_path):
    target, chance = flipped_bits.Target(reference, tmp_path), random.Random(9)
    for damages in (target.flips(24, chance), target.cuts(5, chance), target.exchanges(), target.moves(4, chance)):
        for kind, found in target.try_all(damages, 4).items():
            assert found.wrong + found.unnamed == [], kind
    assert target.load(1) == ("loaded", "the same")


def test_a_flip_that_no_sum_covers_is_found(reference, tmp_path, monkeypatch):
    """The judge itself: a file whose values changed is one that loads and differs, where sums are not compared."""

    class Same:
        def __eq__(self, other):
            return True

        __hash__ = None

    monkeypatch.setattr("mpitrain.checkpoint.hdf5.zlib.crc32", lambda *_: Same())
    target = flipped_bits.Target(reference, tmp_path)
    file, (start, _, name) = "rank-00001.h5", target.slabs["rank-00001.h5"][0]
    spoilt = bytearray(target.files[file])
    spoilt[start] ^= 1
    found = target.try_all(iter([flipped_bits.Damage("flip", {file: bytes(spoilt)}, name)]), 0)["flip"]
    assert found.wrong == [f"flip of {file} {name}: loaded: {name} differs"]


@pytest.mark.slow
def test_a_newest_checkpoint_with_a_flipped_bit_is_passed_over_with_a_message(reference, tmp_path):
    """C63: the manifest is whole, so it is only found while it is loaded."""
    run = tmp_path / "run"
    flags = reference.prepare(SCENES["a save beside others"], run)
    path = run / "checkpoints" / "step-00000002" / "rank-00002.h5"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    said = reference.train(run, *flags)
    assert f"Passed over: {path} is damaged" in said
    assert "go on after step 1 from" in said
    assert reference.judge(run, SCENES["a save beside others"], 3).lost == ""


# -------------------------------------------------------------------------------------------------------------- trouble


@pytest.mark.parametrize(
    ("rank", "name", "code"),
    [
        (3, "sync", errno.EIO),
        (0, "rename", errno.ESTALE),
        pytest.param(1, "write", errno.ENOSPC, marks=pytest.mark.slow),
        pytest.param(0, "create", errno.EDQUOT, marks=pytest.mark.slow),
    ],
)
def test_what_the_disk_of_one_rank_refuses_ends_all_ranks_with_one_message(reference, rank, name, code):
    operations = disk_trouble.operations_of(reference, DELETES)[rank]
    tally = disk_trouble.Tally()
    number = max(number for number, (_, found) in enumerate(operations, 1) if found == name)
    disk_trouble.refuse_at(reference, DELETES, rank, number, code, tally, rank == 3)
    assert tally.wrong == []
    assert tally.stopped == 1
    (message,) = tally.messages
    assert f"(rank {rank}): {os.strerror(code)}." in message
    assert "--resume latest" in message


def test_a_save_that_fails_in_the_background_ends_all_ranks_after_the_same_step(reference, tmp_path):
    run = tmp_path / "run"
    flags = reference.prepare(BACKGROUND, run)
    strike = disk_trouble.Strike(20, disk_trouble.refuse(errno.ENOSPC), kinds=("disk",))
    steps = [disk_trouble.Points(kinds=("action",)) for _ in range(RANKS)]

    def listener(world):
        both = (steps[world.rank], on_rank(2, strike)(world))
        return lambda event: [each(event) for each in both]

    messages = reference.endings(run, *flags, listener=listener)
    assert len(set(messages)) == 1
    assert "rank-00002.h5 cannot be written (rank 2): No space left on device" in messages[0]
    made = [sum(name.startswith("STEP") for _, name in points.passed) for points in steps]
    assert made == [1] * RANKS  # more: the first one's end is where counting begins
    assert checkpoint.latest(run).name == "step-00000002"
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(lambda *of: disk_trouble.without_locks(*of, errno.ENOLCK), id="locks are unknown"),
        pytest.param(lambda *of: disk_trouble.forbidden(*of, 0o500, "checkpoints"), id="a folder is forbidden"),
        pytest.param(lambda *of: disk_trouble.limited(*of, 20_000), id="files are limited", marks=pytest.mark.slow),
        pytest.param(
            lambda *of: disk_trouble.read_only(*of, "checkpoints"), id="read-only", marks=[MOUNTS, pytest.mark.slow]
        ),
    ],
)
def test_a_real_disk_that_refuses_ends_all_ranks_or_none(reference, trouble):
    tally = disk_trouble.Tally()
    trouble(reference, tally)
    assert tally.wrong == []
    assert tally.tried == 1


@MOUNTS
def test_a_disk_that_is_full_ends_all_ranks(reference):
    tally = disk_trouble.Tally()
    disk_trouble.full(reference, tally, 16)
    assert tally.wrong == []
    assert tally.stopped == 1


def test_metrics_that_find_no_room_end_the_run_with_one_message(reference, tmp_path):
    run = tmp_path / "run"
    flags = reference.prepare(DELETES, run)
    metrics = run / "metrics.jsonl"
    first, second = metrics.read_text().splitlines()
    metrics.write_text(f"{first}{' ' * 8000}\n{second}\n")

    def work():
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 20, usual[1]))
        with pytest.raises(ValueError, match="cannot be written") as caught:
            reference.train(run, *flags)
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        return str(caught.value)

    message = in_child(work).result
    assert message.startswith(f"{metrics}: cannot be written: File too large.")
    assert reference.judge(run, DELETES).step == 2
    reference.go_on(run, DELETES)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_whatever_the_disk_refuses_all_ranks_end_alike(reference, scene):
    tally = disk_trouble.Tally()
    for rank, operations in enumerate(disk_trouble.operations_of(reference, scene)):
        for number in range(1 + rank, len(operations) + 1, 12):
            code = disk_trouble.CODES[number % len(disk_trouble.CODES)]
            disk_trouble.refuse_at(reference, scene, rank, number, code, tally, number % 3 == 0)
    assert tally.wrong == []

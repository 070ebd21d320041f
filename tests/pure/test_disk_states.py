"""What a disk may hold after a power failure: the model, and that it finds the mistakes it is for."""

import os
import random

import pytest
from crash.disk_states import FATES, Disk, Fate, found_below, recorded

from mpitrain import disk


def write(path, data, *, sync):
    file = disk.create(path)
    disk.write(file, path, data, 0)
    if sync:
        disk.sync(file, path)
    os.close(file)


def states(tmp_path, work, chances=40):
    """All that may be found after some work in a folder, as sets of (path, bytes)."""
    before = Disk(tmp_path / "folder")
    with recorded() as operations:
        work(tmp_path / "folder")
    for operation in operations:
        before.do(operation)
    assert before.shows() == found_below(tmp_path / "folder")
    found = []
    chance = [Fate(True, True, number % 2 == 0, random.Random(number)) for number in range(chances)]
    for number, fate in enumerate([*FATES.values(), *chance]):
        before.lay_out(tmp_path / f"state {number}", fate)
        found.append(found_below(tmp_path / f"state {number}"))
    return found


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"old")
    return folder


def test_a_file_that_was_not_synced_may_have_its_name_and_length_without_its_data(tmp_path, folder):
    data = b"x" * 3000
    found = states(tmp_path, lambda folder: write(folder / "new", data, sync=False))
    contents = {state.get("new") for state in found}
    assert {None, b"", bytes(3000), data} <= contents
    assert any(torn and torn.startswith(b"x" * 512) and torn != data for torn in contents)
    assert all(state["file"] == b"old" for state in found)


def test_a_synced_file_has_its_data_wherever_its_name_is(tmp_path, folder):
    found = states(tmp_path, lambda folder: write(folder / "new", b"data", sync=True))
    assert {state.get("new") for state in found} == {None, b"data"}


@pytest.mark.parametrize(("sync", "contents"), [(True, {b"old", b"new"}), (False, {b"old", b"new", b"", bytes(3)})])
def test_a_rename_is_whole_and_what_it_names_is_what_was_synced(tmp_path, folder, sync, contents):
    def work(folder):
        write(folder / "draft", b"new", sync=sync)
        disk.rename(folder / "draft", folder / "file")

    assert {state.get("file") for state in states(tmp_path, work)} == contents


def test_a_folder_that_was_synced_has_its_names(tmp_path, folder):
    def work(folder):
        disk.make_folder(folder / "deep" / "deeper")
        write(folder / "deep" / "deeper" / "new", b"data", sync=True)
        disk.sync_folder(folder / "deep" / "deeper")
        disk.sync_folder(folder / "deep")

    assert all(state["deep/deeper/new"] == b"data" for state in states(tmp_path, work))


def test_a_folder_that_is_removed_may_be_found_half_full_until_its_parent_is_synced(tmp_path, folder):
    def work(folder):
        disk.make_folder(folder / "some")
        for name in "ab":
            write(folder / "some" / name, b"data", sync=True)
        disk.sync_folder(folder / "some")
        disk.sync_folder(folder)
        disk.remove_tree(folder / "some")

    found = [sorted(name for name in state if name.startswith("some")) for state in states(tmp_path, work)]
    assert [] in found
    assert ["some", "some/a"] in found
    assert ["some", "some/a", "some/b"] in found


def test_a_small_file_is_replaced_whole_or_not_at_all(tmp_path, folder):
    found = states(tmp_path, lambda folder: disk.replace(folder / "file", b"n" * 2000))
    assert {state.get("file") for state in found} == {b"old", b"n" * 2000}

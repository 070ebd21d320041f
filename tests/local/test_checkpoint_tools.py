"""`mpitrain checkpoint inspect | verify | diff | reshard`: nothing is lost, nothing damaged is missed, nothing of the
user's is overwritten."""

import contextlib
import hashlib
import json
import math
import os
import shutil
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reseal import rewrite

from mpitrain import checkpoint
from mpitrain.checkpoint import SlabRef
from mpitrain.checkpoint.manifest import BLOCK, Logical, read_manifest, sealed
from mpitrain.checkpoint.tools import command, onefile
from mpitrain.checkpoint.tools.dealing import SMALL, deal
from mpitrain.checkpoint.tools.source import Source, cut
from mpitrain.cli import guarded
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.debug.compare import compare
from mpitrain.errors import CheckpointError, ConfigError, LaunchError, UserError
from mpitrain.events import listen
from mpitrain.spec import Shard, Spec, slab, slab_shape

SPECS = {
    "weight/blocks.0.up": ((6, 5), {"tp": Shard(1)}, "float32"),
    "weight/blocks.1.up": ((6, 5), {"tp": Shard(1)}, "float32"),
    "weight/norm": ((7,), {}, "float64"),
    "weight/none": ((0, 3), {}, "float32"),
    "first_moment/rows": ((3, 4), {"dp": Shard(0)}, "float16"),
    "seen": ((), {}, "int64"),
}
BIG = {
    "weight/table": ((2100, 800), {"tp": Shard(1)}, "float32"),
    "weight/head": ((1, 4, 999), {"tp": Shard(2)}, "int32"),
}
SCALARS = {
    "updates": 41,
    "tokens": 123456,
    "data": {"next_step": 100, "sha256": "ab" * 32},
    "config": {"lr": 0.1 + 0.2, "model": "gpt-tiny", "layers": 2, "width": 64, "tied": True, "run": "runs/x", "tp": 2},
    "scaler": {"scale": 65536.0, "clean": 3},
    "position": 1 << 60,
}


def full(name, specs):
    shape, _, dtype = specs[name]
    values = np.random.default_rng(list(specs).index(name)).standard_normal(shape) * 100
    return np.asarray(values, dtype)


def save_on(run, specs=SPECS, step=100, change=None, **sizes):
    """Save on the ranks of this world; `change` may alter the full tensors."""
    mesh = Mesh(world(), **sizes)
    slabs = []
    for name, (shape, states, _) in specs.items():
        spec, values = Spec(states), full(name, specs)
        if change is not None:
            change(name, values)
        rectangle = slab(shape, spec, mesh.coords, mesh.sizes)
        array = values[rectangle].reshape(slab_shape(rectangle)).copy()
        slabs.append(SlabRef(name, shape, rectangle, array, checkpoint.holder(spec, mesh)))
    return checkpoint.save(run, step, slabs, SCALARS, mesh.world, layout=mesh.sizes)


def saved(run, ranks=1, specs=SPECS, **more):
    return LocalWorld(ranks).run(lambda: save_on(run, specs, **more))[0]


@pytest.fixture
def small(tmp_path):
    return saved(tmp_path / "run", 4, tp=2)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("big"), 2, {**SPECS, **BIG}, tp=2)


def tool(*words):
    return command.main([str(word) for word in words])


def said(capsys, *words, code=0):
    assert tool(*words) == code
    return capsys.readouterr().out


def as_json(capsys, *words, code=0):
    return json.loads(said(capsys, *words, "--json", code=code))


def refused(*words, error=CheckpointError):
    with pytest.raises(UserError) as caught:
        tool(*words)
    assert type(caught.value) is error or isinstance(caught.value, error)
    assert len(str(caught.value).splitlines()) <= 5
    return str(caught.value)


def values_of(path, specs):
    source = Source.of(str(path))
    return {name: source.read(name, tuple(slice(0, n) for n in specs[name][0])) for name in specs}


# -------------------------------------------------------------------------------------------------------------- reshard


@pytest.mark.parametrize("files", [1, 2, 3, 7])
def test_a_checkpoint_over_other_files_is_the_same_checkpoint(tmp_path, big, capsys, files):
    target = tmp_path / "deep" / "run" / "checkpoints" / "step-00000100"
    assert "10 tensors" not in said(capsys, "reshard", big, target, "--ranks", files)
    assert said(capsys, "diff", big, target).endswith("the same: 8 tensors with the same bits\n")
    assert "whole" in said(capsys, "verify", target)
    manifest = read_manifest(target)
    assert (manifest.step, manifest.scalars, manifest.layout) == (100, SCALARS, read_manifest(big).layout)
    assert sorted(os.listdir(target)) == ["manifest.json", *sorted(manifest.files)]
    sizes = [entry.nbytes for entry in manifest.files.values()]
    assert len(sizes) == files
    assert max(sizes) - min(sizes) < 30_000  # a row, a tensor that is not cut, and HDF5's own
    assert os.listdir(target.parent) == [target.name]


def test_what_was_resharded_loads_on_ranks(tmp_path, big):
    specs = {**SPECS, **BIG}
    assert tool("reshard", big, tmp_path / "new", "--ranks", 3) == 0

    def body():
        mesh = Mesh(world(), tp=2)
        slabs = []
        for name, (shape, states, dtype) in specs.items():
            rectangle = slab(shape, Spec(states), mesh.coords, mesh.sizes)
            slabs.append(SlabRef(name, shape, rectangle, np.zeros(slab_shape(rectangle), dtype), None))
        scalars = checkpoint.load(tmp_path / "new", slabs, mesh.world)
        for ref in slabs:
            np.testing.assert_array_equal(ref.array, full(ref.name, specs)[ref.rectangle])
        return scalars

    assert LocalWorld(4).run(body)[3] == {**SCALARS, "step": 100}


def test_one_file_holds_whole_tensors_for_any_tool_and_becomes_a_checkpoint_again(tmp_path, big, capsys):
    one, back = tmp_path / "all.h5", tmp_path / "step-00000100"
    assert "8 tensors in 1 file" in said(capsys, "reshard", big, "--one-file", one)
    with h5py.File(one) as file:
        for name in [name for name in {**SPECS, **BIG} if name != "weight/none"]:
            np.testing.assert_array_equal(file[name][()], full(name, {**SPECS, **BIG}))
        index = json.loads(file["index"][:].tobytes())
    assert (index["step"], index["scalars"]) == (100, SCALARS)
    assert said(capsys, "verify", one).startswith(f"{one}: whole; 8 tensors, 1 file")
    assert tool("diff", big, one) == 0
    assert tool("reshard", one, back, "--ranks", 2) == 0
    again = tmp_path / "again.h5"
    assert tool("reshard", back, "--one-file", again) == 0
    assert again.read_bytes() == one.read_bytes()
    assert read_manifest(back).scalars == SCALARS
    capsys.readouterr()
    assert said(capsys, "diff", big, back).endswith("the same: 8 tensors with the same bits\n")
    assert os.stat(one).st_mode & 0o777 == 0o600


def test_weights_alone_are_kept_on_request(tmp_path, small, capsys):
    one = tmp_path / "w.h5"
    assert tool("reshard", small, "--one-file", one, "--weights-only") == 0
    with h5py.File(one) as file:
        assert sorted(file) == ["index", "weight"]
        assert sorted(file["weight"]) == ["blocks.0.up", "blocks.1.up", "norm"]
    capsys.readouterr()
    text = said(capsys, "diff", one, small, code=1)
    assert "only in B: first_moment/rows, seen\n" in text
    assert text.endswith("DIFFERENT: 4 tensors with the same bits, 2 that cannot be compared\n")


def test_a_run_goes_on_with_the_same_bits_from_what_was_one_file(tmp_path):
    from mpitrain.train import main

    text = tmp_path / "text"
    text.write_text("".join(f"{n} bottles; take {n % 7} down.\n" for n in range(300)))
    tiny = (
        "--model gpt-tiny --layers 1 --batch 4 --seq-len 16 --dropout 0.1 --sample-length 0 --deterministic --steps 6"
    )

    def train(run, *flags):
        LocalWorld(1).run(main, [*tiny.split(), "--dtype", "float16", "--data", str(text), "--run", str(run), *flags])

    train(tmp_path / "a", "--save-every", "3")
    third, sixth = (tmp_path / "a" / "checkpoints" / f"step-0000000{step}" for step in (3, 6))
    assert tool("reshard", third, "--one-file", tmp_path / "one.h5") == 0
    copy = tmp_path / "b" / "checkpoints" / third.name
    assert tool("reshard", tmp_path / "one.h5", copy, "--ranks", "3") == 0
    train(tmp_path / "b", "--resume", str(copy), "--save-every", "3")
    resumed = tmp_path / "b" / "checkpoints" / sixth.name
    assert tool("diff", sixth, resumed) == 0
    digests = [hashlib.sha256((path / "rank-00000.h5").read_bytes()).hexdigest() for path in (sixth, resumed)]
    assert digests[0] == digests[1]


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 400), max_size=3), max_size=12),
    files=st.integers(1, 9),
    dtype=st.sampled_from(["float16", "float64"]),
)
def test_files_are_balanced_and_together_hold_everything_once(shapes, files, dtype):
    width = np.dtype(dtype).itemsize
    tensors = {f"t{i}": Logical(tuple(shape), dtype, ()) for i, shape in enumerate(shapes)}
    shares = deal(tensors, files)
    assert len(shares) == files
    for name, tensor in tensors.items():
        of = [share.rectangle for file in shares for share in file if share.name == name]
        assert sum(math.prod(p.stop - p.start for p in rectangle) for rectangle in of) == math.prod(tensor.shape)
        for one, other in pairwise(of):
            assert any(a.stop == b.start for a, b in zip(one, other, strict=True))
        assert len({tuple((p.start, p.stop) for p in rectangle) for rectangle in of}) == len(of)
        assert len(of) <= 1 or math.prod(tensor.shape) * width >= SMALL
    sizes = [sum(math.prod(share.shape) for share in file) * width for file in shares]
    row = max((math.prod(t.shape[1:]) * width for t in tensors.values() if t.shape and t.shape[0] > 1), default=0)
    thin = max((math.prod(t.shape[2:]) * width for t in tensors.values() if t.shape[:1] == (1,)), default=0)
    assert max(sizes) <= sum(sizes) / files + max(SMALL, row, thin)


@settings(max_examples=100, deadline=None)
@given(shape=st.lists(st.integers(0, 12), max_size=4), most=st.integers(1, 200))
def test_a_tensor_is_cut_into_pieces_in_the_order_of_its_elements(shape, most):
    numbers = np.arange(math.prod(shape)).reshape(shape)
    pieces = [numbers[rectangle].reshape(-1) for rectangle in cut(shape, most)]
    assert all(0 < piece.size <= most for piece in pieces)
    assert np.concatenate([np.empty(0, int), *pieces]).tolist() == list(range(numbers.size))


# ----------------------------------------------------------------------------------------- what must not be overwritten


def test_nothing_is_replaced_without_force_and_nothing_that_is_no_checkpoint_ever(tmp_path, small):
    one, folder = tmp_path / "one.h5", tmp_path / "new"
    assert tool("reshard", small, "--one-file", one) == tool("reshard", small, folder, "--ranks", 2) == 0
    assert "is there already" in refused("reshard", small, "--one-file", one)
    assert "is there already" in refused("reshard", small, folder, "--ranks", 3)
    before = one.read_bytes()
    assert tool("reshard", small, "--one-file", one, "--force") == 0
    assert one.read_bytes() == before
    assert tool("reshard", folder, folder, "--ranks", 3, "--force") == 0  # onto itself
    assert len(read_manifest(folder).files) == 3
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis").write_text("years")
    for force in ((), ("--force",)):
        assert "is no checkpoint; it is left alone" in refused("reshard", small, mine, "--ranks", 2, *force)
        assert "is the folder of a run" in refused("reshard", small, small.parent.parent, "--ranks", 2, *force)
        assert "not a regular file" in refused("reshard", small, "--one-file", mine, *force)
        assert "step-00000100" in refused("reshard", small, tmp_path / "step-00000101", "--ranks", 2, *force)
        assert "stays as it is" in refused("reshard", small, small / "new", "--ranks", 2, *force)
        assert "stays as it is" in refused("reshard", small, "--one-file", small / "rank-00000.h5", *force)
    assert (mine / "thesis").read_text() == "years"
    assert sorted(os.listdir(tmp_path)) == ["mine", "new", "one.h5", "run"]


def operations(work):
    """Names of what `work` asks of the disk."""
    names = []
    with listen(lambda event: names.append(event.name) if counted(event) else None):
        work()
    return names


def counted(event):
    """An operation begins that the disk may refuse; removing goes as far as it can and never fails."""
    return (event.kind, event.phase) == ("disk", "begin") and event.name != "remove_tree"


class _Fails:
    """Raises, or ends the process, at the n-th operation on the disk."""

    def __init__(self, number, how):
        self.left, self.how = number, how

    def __call__(self, event):
        if counted(event):
            self.left -= 1
            if self.left < 0:
                self.left = 10**9
                self.how()


def _full():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("kind", ["files", "one file"])
@pytest.mark.parametrize("forced", [False, True])
def test_a_disk_that_refuses_at_any_moment_leaves_the_old_or_nothing(tmp_path, small, kind, forced):
    target = tmp_path / ("new" if kind == "files" else "new.h5")
    words = ["reshard", small, target, "--ranks", 2] if kind == "files" else ["reshard", small, "--one-file", target]
    number = len(operations(lambda: tool(*words)))
    if forced:
        words.append("--force")
    for n in range(number):
        if not forced:
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        with listen(_Fails(n, _full)), contextlib.suppress(CheckpointError):
            tool(*words)
        assert set(os.listdir(tmp_path)) - {"run"} <= {target.name}, n
        if forced or target.exists():
            assert tool("verify", target) == 0, n


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads: none holds a lock here
@pytest.mark.parametrize("which", ["names change", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["files", "one file"])
def test_a_reshard_that_is_killed_at_any_moment_is_done_again_over_its_remains(tmp_path, small, kind, which):
    target = tmp_path / ("new" if kind == "files" else "new.h5")
    words = ["reshard", small, target, "--ranks", 2] if kind == "files" else ["reshard", small, "--one-file", target]
    assert tool(*words) == 0
    words.append("--force")
    done = operations(lambda: tool(*words))
    for n in [n for n, name in enumerate(done) if which == "all" or name in ("make_folder", "rename", "sync_folder")]:
        child = os.fork()
        if not child:
            with listen(_Fails(n, lambda: os._exit(9))):
                tool(*words)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 9)
        assert tool("verify", target if target.exists() else tmp_path / ".old-new") == 0  # between two renames
        assert tool(*words) == 0
        assert sorted(os.listdir(tmp_path)) == sorted(["run", target.name])
        assert tool("diff", small, target) == 0


def test_two_jobs_do_not_write_the_same_target_at_once(tmp_path, small):
    import fcntl

    draft = tmp_path / ".tmp-new"
    draft.mkdir()
    lock = os.open(draft, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        assert "another job writes it just now" in refused("reshard", small, tmp_path / "new", "--ranks", 2)
    finally:
        os.close(lock)
    assert tool("reshard", small, tmp_path / "new", "--ranks", 2) == 0


def test_nothing_is_put_into_a_run_in_which_a_job_trains(tmp_path, small):
    run = tmp_path / "other"
    run.mkdir()
    (run / "config.toml").write_text("steps = 3\n")
    lock = checkpoint.hold(run)
    try:
        words = ("reshard", small, run / "checkpoints" / "step-00000100", "--ranks", 2)
        assert "a job trains in" in refused(*words)
    finally:
        os.close(lock)
    assert tool(*words) == 0


# --------------------------------------------------------------------------------------------------------------- verify


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def where(manifest, file, at):
    """The tensor that has a byte of a file; "" where it is nobody's."""
    for name, tensor in manifest.tensors.items():
        for part in tensor.slabs:
            nbytes = part.elements * np.dtype(tensor.dtype).itemsize
            if part.file == file and part.offset <= at < part.offset + nbytes:
                return name
    return ""


def test_every_flipped_bit_is_found_and_named_by_file_and_tensor(small, capsys):
    manifest, random = read_manifest(small), np.random.default_rng(1)
    for number in range(40):
        file = list(manifest.files)[number % len(manifest.files)]
        at = int(random.integers(manifest.files[file].nbytes))
        flip(small / file, at, number % 8)
        (found,) = as_json(capsys, "verify", small, code=1)["checkpoints"]
        assert [(d["file"], d["tensor"]) for d in found["damages"]] == [(file, where(manifest, file, at))]
        if not found["damages"][0]["tensor"]:  # HDF5 is not asked about bytes that nobody wrote
            assert found["damages"][0]["what"] == "its HDF5 metadata are not what was written"
        flip(small / file, at, number % 8)
    for at in random.integers(os.stat(small / "manifest.json").st_size, size=10):
        flip(small / "manifest.json", at)
        assert "manifest.json" in said(capsys, "verify", small, code=1)
        flip(small / "manifest.json", at)
    assert tool("verify", small) == 0


def test_every_flipped_bit_of_one_file_is_found_too(tmp_path, small, capsys):
    one = tmp_path / "one.h5"
    assert tool("reshard", small, "--one-file", one) == 0
    manifest = Source.of(str(one)).manifest
    head = onefile.read_head(one)
    capsys.readouterr()
    places = [40, 300, onefile.HEAD - 1, head.offset + 30, head.offset + head.length - 1]
    places += list(range(onefile.HEAD, head.nbytes, 149))
    for at in map(int, places):
        flip(one, at)
        (found,) = as_json(capsys, "verify", one, code=1)["checkpoints"]
        tensor = where(manifest, onefile.FILE, at)
        (damage,) = found["damages"]
        assert (damage["file"], damage["tensor"]) == (one.name, tensor), at
        places_of_index = range(head.offset, head.offset + head.length)
        if not tensor and at >= onefile.HEAD and at not in places_of_index:
            assert damage["what"] == "its HDF5 metadata are not what was written", at
        flip(one, at)
    flip(one, 0)
    assert "is not a checkpoint of mpitrain" in refused("verify", one)


def resealed(path, at, length, change):
    """Change one of the two JSON objects of a file as somebody does who can also make its sum fit."""
    data = bytearray(path.read_bytes())
    whole = json.loads(data[at : at + length])
    del whole["sha256"]
    change(whole)
    data[at : at + length] = sealed(json.dumps(whole).removesuffix("}")).encode().ljust(length)[:length]
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("where_", "change"),
    [
        ("head", lambda head: head.update(bytes=1 << 50)),
        ("head", lambda head: head["index"].update(bytes=1 << 61)),
        ("head", lambda head: head["index"].update(offset=-1)),
        ("head", lambda head: head["index"].update(offset=0)),
        ("head", lambda head: head.update(index=[])),
        ("head", lambda head: head.update(metadata_crc32="x")),
        ("index", lambda index: index["tensors"]["weight/norm"].update(shape=[1 << 40])),
        ("index", lambda index: index["tensors"]["weight/norm"].update(shape="x")),
        ("index", lambda index: index["tensors"]["weight/norm"].update(offset=-8)),
        ("index", lambda index: index["tensors"]["weight/norm"].pop("offset")),
        ("index", lambda index: index["tensors"]["weight/norm"].update(crc32=7)),
        ("index", lambda index: index["tensors"].update({"../x": index["tensors"].pop("seen")})),
        ("index", lambda index: index.update(tensors=[1])),
        ("index", lambda index: index.update(format=3)),
        ("index", lambda index: index.update(scalars=None)),
    ],
)
def test_one_file_that_was_made_up_with_right_sums_is_refused_before_memory_is_taken(tmp_path, small, where_, change):
    one = tmp_path / "one.h5"
    assert tool("reshard", small, "--one-file", one) == 0
    head = onefile.read_head(one)
    resealed(one, *((0, onefile.HEAD) if where_ == "head" else (head.offset, head.length)), change)
    tracemalloc.start()
    try:
        assert "one.h5" in refused("reshard", one, tmp_path / "new", "--ranks", 1)
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


def test_all_damage_is_told_not_only_the_first(tmp_path, big, capsys):
    path = tmp_path / "step-00000100"
    shutil.copytree(big, path)
    manifest = read_manifest(path)
    first, second = manifest.files
    table = next(part for part in manifest.tensors["weight/table"].slabs if part.file == first)
    norm = next(part for part in manifest.tensors["weight/norm"].slabs)
    flip(path / first, table.offset + 7)
    flip(path / norm.file, norm.offset)
    with open(path / second, "r+b") as file:
        file.truncate(manifest.files[second].nbytes // 2)
    (path / "notes.txt").write_text("mine")
    text = said(capsys, "verify", path, code=1)
    assert f"{first}: weight/table: its bytes from {table.offset} to" in text
    assert f"{norm.file}: weight/norm: its bytes from {norm.offset} to {norm.offset + 56} are not" in text
    assert f"{second}: has {manifest.files[second].nbytes // 2} bytes" in text
    assert f"{second}: weight/table: its last " in text
    assert "not part of it: notes.txt" in text
    (path / second).unlink()
    text = said(capsys, "verify", path, code=1)
    assert f"{second}: is missing" in text
    assert f"{second}: weight/table: lies in it" in text


def test_only_the_blocks_that_are_damaged_are_named(tmp_path, big, capsys):
    path = tmp_path / "step-00000100"
    assert tool("reshard", big, path, "--ranks", 1) == 0
    (part,) = read_manifest(path).tensors["weight/table"].slabs
    assert len(part.crc32) == 2
    flip(path / "rank-00000.h5", part.offset + BLOCK)
    capsys.readouterr()
    end = part.offset + 2100 * 800 * 4
    assert f"its bytes from {part.offset + BLOCK} to {end} are not" in said(capsys, "verify", path, code=1)


def test_files_that_changed_places_are_damaged_though_each_is_whole(small, capsys):
    first, second = sorted(read_manifest(small).files)[:2]
    os.rename(small / first, small / "x")
    os.rename(small / second, small / first)
    os.rename(small / "x", small / second)
    text = said(capsys, "verify", small, code=1)
    assert f"\n  {first}: " in text
    assert f"\n  {second}: " in text


def test_a_manifest_that_was_made_up_with_right_sums_is_held_against_hdf5(tmp_path, capsys):
    path = saved(tmp_path)

    def swap(whole):
        tensors = whole["tensors"]
        one, other = (tensors[f"weight/blocks.{n}.up"]["slabs"] for n in (0, 1))
        one[:], other[:] = other[:], one[:]

    rewrite(path, swap)
    text = said(capsys, "verify", path, code=1)
    assert "weight/blocks.0.up: must be a contiguous dataset of float32" in text
    assert "weight/blocks.1.up: must be a contiguous dataset of float32" in text


def test_the_sum_of_a_whole_file_counts_beside_the_sums_of_its_parts(small, capsys):
    file = sorted(read_manifest(small).files)[0]
    rewrite(small, lambda whole: whole["files"][file].update(sha256="0" * 64))
    assert f"{file}: its SHA-256 is not the manifest's" in said(capsys, "verify", small, code=1)


def test_all_checkpoints_of_a_run_are_verified(tmp_path, capsys):
    run = tmp_path / "run"
    for step in (0, 1, 2, 3):
        path = saved(run, step=step)
    (run / "checkpoints" / "step-00000000" / "manifest.json").unlink()
    os.rename(path, path.with_name("given-up-1-step-00000003"))
    (run / "checkpoints" / ".tmp-step-00000004").mkdir()
    flip(run / "checkpoints" / "step-00000001" / "rank-00000.h5", 100)
    text = said(capsys, "verify", run, code=1)
    lines = [line.removeprefix(f"{run}/checkpoints/") for line in text.splitlines() if line.startswith(str(run))]
    assert [line.partition(";")[0] for line in lines] == [
        "step-00000002: whole",
        "step-00000001: DAMAGED",
        "step-00000000: DAMAGED",
        "given-up-1-step-00000003: whole",
    ]
    assert "4 checkpoints: 2 of 4 damaged; " in text
    assert text.rstrip().endswith("/s")


# ----------------------------------------------------------------------------------------------------------------- diff


def test_the_same_state_saved_by_other_layouts_is_the_same(tmp_path, capsys):
    one, four = saved(tmp_path / "a", 1), saved(tmp_path / "b", 4, dp=2, tp=2)
    assert said(capsys, "diff", one, four).endswith("\nthe same: 6 tensors with the same bits\n")


def test_differences_are_counted_and_the_worst_is_shown(tmp_path, capsys):
    def change(name, values):
        if name == "weight/norm":
            values[2] += 1.0
            values[5] += 0.5
        if name == "seen":
            np.add(values, 3, out=values)
        if name == "weight/blocks.0.up":
            values[1, 4] = np.nan
        if name == "weight/blocks.1.up":
            values[0, 0] = 0.0

    def minus(name, values):
        if name == "weight/blocks.1.up":
            values[0, 0] = -0.0

    a, b = saved(tmp_path / "a", change=minus), saved(tmp_path / "b", 2, change=change, tp=2)
    found = as_json(capsys, "diff", a, b, code=1)
    tensors = found["tensors"]
    norm = full("weight/norm", SPECS)
    assert (tensors["weight/norm"]["other"], tensors["weight/norm"]["at"]) == (2, [2])
    assert (tensors["weight/norm"]["error"], tensors["weight/norm"]["a"]) == (1.0, norm[2])
    assert (tensors["seen"]["other"], tensors["seen"]["error"], tensors["seen"]["at"]) == (1, 3.0, [])
    assert (tensors["weight/blocks.0.up"]["error"], tensors["weight/blocks.0.up"]["at"]) == ("nan", [1, 4])
    assert (tensors["weight/blocks.1.up"]["error"], tensors["weight/blocks.1.up"]["other"]) == (0.0, 1)
    assert not tensors["weight/blocks.1.up"]["same_bits"]
    assert tensors["first_moment/rows"]["same_bits"]
    text = said(capsys, "diff", a, b, code=1)
    rows = [line.split() for line in text.splitlines() if "weight/" in line or "seen" in line]
    assert rows[0][0] == "NaN"
    assert rows[-1][0] == "0"
    assert text.endswith("DIFFERENT: 2 tensors with the same bits, 4 that differ\n")


def test_large_integers_are_compared_exactly(tmp_path, capsys):
    specs = {"t/i": ((2,), {}, "int64"), "t/j": ((2,), {}, "int64"), "t/u": ((2,), {}, "uint8")}
    one = {"t/i": [2**62, -(2**62)], "t/j": [2**62, 7], "t/u": [0, 255]}
    two = {"t/i": [2**62 + 1, 2**62 + 2**61], "t/j": [2**62 + 1, 7], "t/u": [255, 255]}

    def filled(run, numbers):
        return saved(tmp_path / run, specs=specs, change=lambda name, values: values.__setitem__(..., numbers[name]))

    a, b = filled("a", one), filled("b", two)
    tensors = as_json(capsys, "diff", a, b, code=1)["tensors"]
    assert (tensors["t/i"]["other"], tensors["t/i"]["error"], tensors["t/i"]["at"]) == (2, 2.0**63 + 2.0**61, [1])
    assert (tensors["t/j"]["other"], tensors["t/j"]["error"], tensors["t/j"]["at"]) == (1, 1.0, [0])
    assert (tensors["t/u"]["error"], tensors["t/u"]["at"]) == (255.0, [0])


def test_a_difference_deep_in_a_large_tensor_is_found_at_its_place(tmp_path, big, capsys):
    def change(name, values):
        if name == "weight/table":
            values[[3, 2000], [4, 700]] += [1.0, 5.0]

    other = saved(tmp_path, 1, {**SPECS, **BIG}, change=change)
    table = as_json(capsys, "diff", big, other, code=1)["tensors"]["weight/table"]
    assert (table["other"], table["at"], table["elements"]) == (2, [2000, 700], 2100 * 800)
    assert table["error"] == pytest.approx(5.0, rel=1e-5)


def test_the_tolerance_is_that_of_the_proofs_of_layouts(tmp_path, capsys):
    random = np.random.default_rng(3)

    def small(name, values):
        if name == "weight/norm":  # beside the others it is noise
            values *= 1e-9

    def noise(name, values):
        small(name, values)
        if values.dtype.kind == "f" and values.size:
            values *= (1 + random.standard_normal(values.shape) * 1e-4 * random.choice([1, 100])).astype(values.dtype)

    a, b = saved(tmp_path / "a", change=noise), saved(tmp_path / "b", change=small)
    mine, theirs = values_of(a, SPECS), values_of(b, SPECS)
    seen = set()
    for tolerance in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1.0):
        want = {}
        for kind in ("weight", "first_moment"):
            names = [name for name in SPECS if name.startswith(kind)]
            sides = [{name: of[name].astype(np.float64) for name in names} for of in (mine, theirs)]
            want |= {d.name: d.ok for d in compare(*sides, tolerance)}
        code = 0 if all(want.values()) else 1
        found = as_json(capsys, "diff", a, b, "--tolerance", tolerance, code=code)["tensors"]
        assert {name: found[name]["same"] for name in want} == want
        seen.add(tuple(want.values()))
    assert len(seen) > 2  # some within, some not


def test_tensors_shapes_dtypes_and_settings_of_one_only_are_named(tmp_path, capsys):
    specs = {
        "weight/blocks.0.up": ((6, 6), {}, "float32"),
        "weight/norm": ((7,), {}, "float32"),
        "weight/new": ((2,), {}, "float32"),
        "seen": ((), {}, "int64"),
    }
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", specs=specs, step=101)

    def change(whole):
        config = whole["scalars"]["config"]
        config |= {"lr": 1, "run": "elsewhere", "tp": 1, "escape": "\x1b[2J"}
        del config["tied"], whole["scalars"]["scaler"]

    rewrite(b, change)
    assert not as_json(capsys, "diff", a, b, "--tolerance", 1e6, code=1)["tensors"]["weight/norm"]["same"]
    text = said(capsys, "diff", a, b, code=1)
    for line in (
        "only in A: weight/blocks.1.up, weight/none, first_moment/rows",
        "only in B: weight/new",
        "(6, 5) (6, 6) weight/blocks.0.up",
        "float64 | float32",
        "step 100 101",
        "not counted: config.tp 2 | 1, config.run runs/x | elsewhere",
    ):
        assert line in " ".join(text.split()), (line, text)
    assert "config.lr" in text
    assert "config.tied" in text
    assert "\x1b" not in text
    assert "DIFFERENT: " in text


def test_damage_is_trouble_not_a_difference(tmp_path, small):
    assert tool("reshard", small, tmp_path / "other", "--ranks", 1) == 0
    part = read_manifest(small).tensors["weight/norm"].slabs[0]
    flip(small / part.file, part.offset)
    assert "weight/norm" in refused("diff", small, tmp_path / "other")
    assert guarded(lambda: tool("diff", small, tmp_path / "other")) == 2
    assert "weight/norm" in refused("reshard", small, tmp_path / "third", "--ranks", 1)
    assert sorted(os.listdir(tmp_path)) == ["other", "run"]


def test_a_run_without_a_complete_checkpoint_is_named_as_the_user_named_it(tmp_path, small):
    run = small.parent.parent
    os.truncate(small / "rank-00000.h5", 100)
    text = refused("diff", tmp_path / "run", run)
    assert text.startswith(
        f"{run}: has no complete checkpoint; the newest is damaged:\n{small} is damaged: rank-00000.h5"
    )
    shutil.rmtree(small)
    assert refused("diff", run, run).startswith(
        f"{run}: has no complete checkpoint; it has saved none.\nTrain with --save-every N"
    )


# -------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_shows_a_checkpoint_in_groups(small, capsys):
    text = said(capsys, "inspect", small)
    for words in (
        "step 100; 41 updates; learned from 123,456 tokens",
        "on dp 2, tp 2",
        "settings --model gpt-tiny --width 64 --tied --lr 0.3 --tp 2",
        "next is step 100 of the text with sha256 abababababab...",
        "loss scale scale 65536.0, clean 3",
        "also position",
        "blocks.0-1.up 2 x (6, 5) float32 240 B",
        "none (0, 3) float32 0 B",
        "all 6",
    ):
        assert words in " ".join(text.split()), (words, text)


def test_inspect_shows_where_each_part_of_a_tensor_lies(small, capsys):
    text = said(capsys, "inspect", small, "--tensors", "weight/*.up")
    assert "weight/blocks.0.up  (6, 5)  float32  120 B" in text
    assert "weight/norm" not in text
    assert "[0:6, 0:3]  rank-0000" in text
    part = read_manifest(small).tensors["weight/blocks.1.up"].slabs[1]
    assert f"at byte {part.offset}" in text
    assert f"CRC-32 {part.crc32[0]:08x}" in text


def test_inspect_as_json_has_all_that_the_manifest_says(small, capsys):
    found = as_json(capsys, "inspect", small)
    assert (found["step"], found["scalars"]) == (100, SCALARS)
    assert set(found["tensors"]) == set(SPECS)
    assert found["tensors"]["weight/norm"] == {
        "shape": [7],
        "dtype": "float64",
        "bytes": 56,
        "files": [read_manifest(small).tensors["weight/norm"].slabs[0].file],
    }


def test_inspect_lists_a_run_newest_first_with_what_is_wrong(tmp_path, capsys):
    run = tmp_path / "run"
    for step in (9, 10, 11, 12):
        path = saved(run, step=step)
    os.rename(path, path.with_name("given-up-1-step-00000012"))
    (run / "checkpoints" / ".tmp-step-00000013").mkdir()
    with open(run / "checkpoints" / "step-00000010" / "rank-00000.h5", "a") as file:
        file.write("x")
    text = said(capsys, "inspect", run)
    rows = [line.split() for line in text.splitlines()]
    assert rows[0][1:4] == ["2", "complete", "checkpoints,"]
    steps = [(row[0], row[-1]) for row in rows if row and row[0].isdigit()]
    assert steps[:3] == [("11", "complete"), ("10", "damaged"), ("9", "complete")]
    assert sorted(steps[3:]) == [("12", "given-up-1-step-00000012"), ("13", ".tmp-step-00000013")]
    assert "rank-00000.h5 must be a regular file of" in text
    states = [entry["state"] for entry in as_json(capsys, "inspect", run)["checkpoints"]]
    assert states == ["complete", "damaged", "complete", "left behind", "given up"]


def test_inspect_shows_the_file_of_another_program(tmp_path, capsys):
    path = tmp_path / "foreign.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("layers/0/kernel", data=np.ones((30, 4), "float32"))
        file.create_dataset("bias", data=np.ones(4), chunks=(2,), compression="gzip")
    text = said(capsys, "inspect", path)
    assert "not a checkpoint of mpitrain" in text
    assert "layers/0/kernel  (30, 4)  float32  480 B" in text
    assert "deflate" in text
    assert as_json(capsys, "inspect", path, "--tensors", "bias")["tensors"] == {
        "bias": {"shape": [4], "dtype": "float64", "bytes": 32}
    }


def test_what_a_file_says_does_not_reach_the_terminal_as_it_is(small, capsys):
    def change(whole):
        whole["versions"]["\x1b[31m"] = "\x1b]0;title\x07"
        whole["layout"] = {"\x1b[1m": 2, "tp": 2}
        whole["scalars"] |= {
            "\x1b[2J": 1,
            "scaler": {"\x1b": "\x9b31m"},
            "data": {"next_step": "\x1b", "sha256": "\x1b"},
        }
        whole["scalars"]["config"] = {"\x1b[5m": "\x1b", "model": "\x1b"}

    rewrite(small, change)
    other = saved(small.parent.parent.parent / "b")
    for words in (["inspect", small], ["verify", small], ["diff", small, other], ["inspect", small.parent.parent]):
        with contextlib.suppress(CheckpointError):
            tool(*words)
        out = capsys.readouterr().out
        assert [line for line in out.splitlines() if not line.isprintable()] == [], words


# ----------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("words", "error", "part"),
    [
        (["inspet", "x"], ConfigError, "Did you mean inspect?"),
        (["inspect"], ConfigError, "takes one path, not 0"),
        (["inspect", "a", "b"], ConfigError, "takes one path, not 2: a b"),
        (["diff", "{small}"], ConfigError, "takes two paths, not 1"),
        (["diff", "{small}", ""], ConfigError, "takes two paths, not an empty one: "),
        (["inspect", "{small}", "--tensor", "x"], ConfigError, "Did you mean --tensors?"),
        (["inspect", "{small}", "--tensors", "wieght/*"], CheckpointError, "there are weight/*, first_moment/*"),
        (["inspect", "{small}", "--tensors"], ConfigError, "its value is missing"),
        (["inspect", "no/such"], CheckpointError, "there is no such file or folder"),
        (["verify", "{text}"], CheckpointError, "is not a checkpoint of mpitrain"),
        (["inspect", "{text}"], CheckpointError, "is refused"),
        (["diff", "{text}", "{small}"], CheckpointError, "is neither a folder nor a file that"),
        (["verify", "{folder}"], CheckpointError, "is neither a checkpoint"),
        (["reshard", "{folder}", "y", "--ranks", "2"], CheckpointError, "is neither a checkpoint"),
        (["diff", "{small}", "{small}", "--tolerance", "-1"], ConfigError, "must be a number from 0"),
        (["reshard", "{small}", "x"], ConfigError, "give either DST and --ranks N, or --one-file"),
        (["reshard", "{small}", "--ranks", "2"], ConfigError, "DST, the new checkpoint, stands behind SRC"),
        (["reshard", "{small}", "x", "--one-file", "y"], ConfigError, "leave DST out"),
        (["reshard", "{small}", "x", "--ranks", "0"], ConfigError, "must be a whole number from 1"),
        (["reshard", "{small}", "--one-file", "{folder}/no/x.h5"], CheckpointError, "there is no folder"),
        (["reshard", "{small}", "{text}/x", "--ranks", "2"], CheckpointError, "text is not a folder"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_few_lines(tmp_path, small, words, error, part):
    text, folder = tmp_path / "text", tmp_path / "folder"
    text.write_text("no checkpoint\n" * 10)
    folder.mkdir()
    assert part in refused(*(word.format(small=small, text=text, folder=folder) for word in words), error=error)
    assert sorted(os.listdir(tmp_path)) == ["folder", "run", "text"]


def test_several_processes_are_refused_before_anything_is_touched(monkeypatch, small):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    for word in command.TOOLS:
        assert "is one process: run it without mpirun" in refused(word, small, error=LaunchError)


def test_help_lists_every_tool_and_its_options(capsys):
    text = said(capsys, "--help")
    assert all(f"mpitrain checkpoint {word}" in text for word in command.TOOLS)
    for word, about in command.TOOLS.items():
        text = said(capsys, word, "--help")
        assert all(option.flag in text for option in about.options)


def test_a_name_that_begins_with_a_dash_stands_behind_two(tmp_path, small, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tool("reshard", "--ranks", "1", small, "--", "-odd") == 0
    capsys.readouterr()
    assert "-odd: whole" in said(capsys, "verify", "--", "-odd")


def test_progress_is_drawn_where_a_person_watches_and_taken_away(monkeypatch, capsys, big):
    from mpitrain.checkpoint.tools import progress

    monkeypatch.setattr(progress, "_FIRST", 0.0)
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    tool("verify", big)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    tool("verify", big)
    drawn = capsys.readouterr().err.split("\r\x1b[K")
    assert any(part.startswith("verify  ") and part.endswith(" s left") for part in drawn)
    assert drawn[-1] == ""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """A tensor of 320 MB passes through each tool in less than 80 MB."""
    specs = {"weight/table": ((40, 1000, 1000), {"tp": Shard(1)}, "float64"), "weight/x": ((3,), {}, "float32")}
    path = saved(tmp_path / "run", 2, specs, tp=2)
    commands = (
        ["reshard", path, tmp_path / "new", "--ranks", 3],
        ["reshard", path, "--one-file", tmp_path / "one.h5"],
        ["verify", tmp_path / "new"],
        ["diff", tmp_path / "new", tmp_path / "one.h5"],
    )
    for words in commands:
        tracemalloc.start()
        try:
            assert tool(*words) == 0
            assert tracemalloc.get_traced_memory()[1] < 80e6, words
        finally:
            tracemalloc.stop()


def test_paths_are_not_followed_out_of_a_checkpoint(tmp_path, small, capsys):
    file = sorted(read_manifest(small).files)[0]
    shutil.move(small / file, tmp_path / "elsewhere.h5")
    (small / file).symlink_to(tmp_path / "elsewhere.h5")
    assert f"{file}: is not a regular file" in said(capsys, "verify", small, code=1)
    assert "must be a regular file" in refused("diff", small, small)
    assert Path(small / file).is_symlink()

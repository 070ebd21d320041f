"""Checkpoints under ranks that are threads: what is saved comes back, and a save that fails leaves no trace."""

import errno
import hashlib
import json
import os
import resource
import signal
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from reseal import rewrite

from mpitrain import checkpoint
from mpitrain.checkpoint import SlabRef, hdf5, saving
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import CheckpointError
from mpitrain.spec import REPLICATE, Shard, Spec, slab, slab_shape

SPECS = {
    "weight/blocks.0.up": ((6, 5), {"tp": Shard(1)}, "float32"),
    "weight/blocks.0.down": ((5, 4), {"tp": Shard(0)}, "float64"),
    "weight/norm": ((7,), {}, "float32"),
    "first_moment/rows": ((3, 4), {"dp": Shard(0)}, "float16"),
    "seen": ((), {}, "int64"),
}
SCALARS = {"updates": 41, "position": 1 << 60, "config": {"lr": 0.1 + 0.2, "name": "aß\n"}, "tensors": {}}


def full(name):
    shape, _, dtype = SPECS[name]
    count = int(np.prod(shape, dtype=int))
    return (np.arange(count) + 100 * list(SPECS).index(name)).reshape(shape).astype(dtype)


def slabs(mesh, fill=True):
    made = []
    for name, (shape, states, dtype) in SPECS.items():
        spec = Spec(states)
        rectangle = slab(shape, spec, mesh.coords, mesh.sizes)
        array = np.zeros(slab_shape(rectangle), dtype)
        if fill:
            array[...] = full(name)[rectangle]
        made.append(SlabRef(name, shape, rectangle, array, checkpoint.holder(spec, mesh)))
    return made


def save_on(run, step=100, **sizes):
    mesh = Mesh(world(), **sizes)
    return checkpoint.save(run, step, slabs(mesh), SCALARS, mesh.world, layout=mesh.sizes)


def load_on(path, **sizes):
    mesh = Mesh(world(), **sizes)
    empty = slabs(mesh, fill=False)
    scalars = checkpoint.load(path, empty, mesh.world)
    for ref in empty:
        np.testing.assert_array_equal(ref.array, full(ref.name)[ref.rectangle], err_msg=ref.name)
    return scalars


def saved(run, ranks=2, step=100, **sizes):
    return LocalWorld(ranks).run(lambda: save_on(run, step, **sizes))[0]


def refused(ranks, function):
    """The message of the CheckpointError that every rank raises."""

    def body():
        with pytest.raises(CheckpointError) as caught:
            function()
        return str(caught.value)

    messages = LocalWorld(ranks).run(body)
    assert len(set(messages)) == 1, messages
    assert len(messages[0].splitlines()) <= 5, messages[0]
    return messages[0]


LAYOUTS = [(1, {}), (2, {"tp": 2}), (4, {"dp": 2, "tp": 2}), (4, {"dp": 4}), (3, {"tp": 3})]


@pytest.mark.parametrize(("ranks", "sizes"), LAYOUTS)
@pytest.mark.parametrize(("others", "other_sizes"), LAYOUTS)
def test_what_was_saved_comes_back_on_every_layout(tmp_path, ranks, sizes, others, other_sizes):
    path = saved(tmp_path, ranks, **sizes)
    for scalars in LocalWorld(others).run(lambda: load_on(path, **other_sizes)):
        assert scalars == {**SCALARS, "step": 100}


def test_every_element_is_written_once_and_ranks_with_nothing_write_no_file(tmp_path):
    """C66: 3 rows over 4 ranks; a scalar and a replicated tensor have one writer."""
    path = saved(tmp_path, 4, dp=4)
    manifest = checkpoint.read_manifest(path)
    assert sorted(manifest.files) == ["rank-00000.h5", "rank-00001.h5", "rank-00002.h5"]
    assert sorted(os.listdir(path)) == ["manifest.json", *sorted(manifest.files)]
    stored = 0
    for name in manifest.files:
        with h5py.File(path / name, "r") as file:
            stored += sum(file[tensor].size for tensor in SPECS if tensor in file)
    assert stored == sum(full(name).size for name in SPECS)


def test_everything_is_on_the_disk_before_the_name_is_given_and_the_name_after(tmp_path, monkeypatch):
    saved(tmp_path, 1, step=1)  # the folder of checkpoints exists
    done = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda old, new: (done.append("rename"), rename(old, new)))
    path = saved(tmp_path, 2, step=2, tp=2)
    names = [name.replace(str(path.parent), "") for name in done]
    draft = f"/.tmp-{path.name}"
    assert sorted(names[:2]) == [f"{draft}/rank-00000.h5", f"{draft}/rank-00001.h5"]
    assert names[2:] == [f"{draft}/manifest.json", draft, "rename", ""]


def test_the_manifest_says_where_every_slab_lies_and_the_sums_of_everything(tmp_path):
    path = saved(tmp_path, 2, tp=2)
    text = (path / "manifest.json").read_text()
    whole = json.loads(text)
    assert (whole["format"], whole["step"], whole["layout"]["tp"]) == (2, 100, 2)
    assert {"mpitrain", "python", "numpy", "h5py", "hdf5"} <= set(whole["versions"])
    head, _, last = text.rpartition(',\n "sha256": ')
    assert json.loads(last.removesuffix("\n}\n")) == hashlib.sha256(head.encode()).hexdigest()
    tensor = whole["tensors"]["weight/blocks.0.up"]
    assert (tensor["shape"], tensor["dtype"]) == ([6, 5], "float32")
    assert [(s["start"], s["stop"], s["file"]) for s in tensor["slabs"]] == [
        ([0, 0], [6, 3], "rank-00000.h5"),
        ([0, 3], [6, 5], "rank-00001.h5"),
    ]
    for told in tensor["slabs"]:
        data = full("weight/blocks.0.up")[:, told["start"][1] : told["stop"][1]].tobytes()
        stored = (path / told["file"]).read_bytes()
        assert stored[told["offset"] : told["offset"] + len(data)] == data
        assert told["crc32"] == [zlib.crc32(data)]
    for name, about in whole["files"].items():
        stored = (path / name).read_bytes()
        assert (about["bytes"], about["sha256"]) == (len(stored), hashlib.sha256(stored).hexdigest())


def test_ranks_that_hold_the_same_share_the_writing(tmp_path):
    """Of a large tensor each writes some rows; of small ones each some whole ones."""
    names = [f"small/{number}" for number in range(24)]

    def body():
        mesh = Mesh(world(), dp=4)
        large = np.arange(4 * 65536.0).reshape(512, 512)
        arrays = {
            "large": large,
            "odd": np.arange(3 * 65536.0).reshape(3, 65536),
            **{n: np.full(7, 1.0) for n in names},
        }
        refs = [
            SlabRef(name, a.shape, tuple(slice(0, n) for n in a.shape), a, checkpoint.holder(Spec(), mesh))
            for name, a in arrays.items()
        ]
        path = checkpoint.save(tmp_path, 1, refs, {}, world())
        for ref in refs:
            want, ref.array[...] = ref.array.copy(), 0
            arrays[ref.name] = want
        checkpoint.load(path, refs, world())
        assert all((ref.array == arrays[ref.name]).all() for ref in refs)
        return path

    manifest = checkpoint.read_manifest(LocalWorld(4).run(body)[0])
    rows = [(s.start[0], s.stop[0], s.file) for s in manifest.tensors["large"].slabs]
    assert rows == [(128 * r, 128 * r + 128, f"rank-{r:05}.h5") for r in range(4)]
    assert len(manifest.tensors["odd"].slabs) == 1  # of 3 rows, fewer than ranks
    writers = [manifest.tensors[name].slabs[0].file for name in names]
    assert all(len(manifest.tensors[name].slabs) == 1 for name in names)
    assert len(set(writers)) == 4


def test_along_axes_on_which_workers_part_the_first_one_writes_all():
    def body():
        mesh = Mesh(world(), dp=2, tp=2)
        return checkpoint.holder(Spec(), mesh), checkpoint.holder(Spec(), mesh, ["edp"])

    assert LocalWorld(4).run(body) == [((0, 4), (0, 2)), ((1, 4), (1, 2)), ((2, 4), None), ((3, 4), None)]


@pytest.mark.parametrize("shape", [(3_000_000,), (700, 1500), (5, 300, 1000), (2, 3_000_000)])
def test_blocks_are_checked_and_rectangles_taken_from_them(tmp_path, shape):
    """Slabs of several blocks of 4 MiB: whole ones, rows, columns, and what begins in the middle of a block."""
    values = np.random.default_rng(0).standard_normal(shape)

    def ref(rectangle, array, holder=(0, 1)):
        return SlabRef("w", shape, rectangle, array, holder)

    def body():
        whole = tuple(slice(0, n) for n in shape)
        path = checkpoint.save(tmp_path, 1, [ref(whole, values)], {}, world())
        assert len(checkpoint.read_manifest(path).tensors["w"].slabs[0].crc32) == -(-values.nbytes // 2**22)
        for rectangle in [
            whole,
            (slice(shape[0] // 3, shape[0] - 1), *whole[1:]),
            (*whole[:-1], slice(shape[-1] // 3, shape[-1] // 2)),
            (slice(1, 2), *whole[1:-1], slice(5, shape[-1] // 2)) if len(shape) > 1 else (slice(7, 8),),
        ]:
            found = np.zeros([part.stop - part.start for part in rectangle])
            checkpoint.load(path, [ref(rectangle, found)], world())
            np.testing.assert_array_equal(found, values[rectangle])
            apart = np.zeros((*found.shape, 2))[..., 0]  # not contiguous
            checkpoint.load(path, [ref(rectangle, apart)], world())
            np.testing.assert_array_equal(apart, values[rectangle])

    LocalWorld(1).run(body)


def test_tied_and_pipeline_tensors_are_counted_once():
    assert [checkpoint.counted_here(Spec(), {"pp": stage, "edp": 0}) for stage in (0, 1)] == [True, True]
    assert not checkpoint.counted_here(Spec(), {"pp": 0, "edp": 1})
    assert [checkpoint.counted_here(Spec({"ends": REPLICATE}), {"pp": stage}) for stage in (0, 3)] == [True, False]
    assert checkpoint.counted_here(Spec({"ep": Shard(0)}), {"pp": 1, "edp": 0, "ep": 1, "cp": 0, "tp": 0})


def test_nothing_is_saved_where_some_part_is_counted_by_nobody_or_twice(tmp_path):
    def body(counted):
        ref = SlabRef("w", (2,), (slice(0, 2),), np.ones(2), (0, 1) if counted else None)
        checkpoint.save(tmp_path, 1, [ref], {}, world())

    for counted in (True, False):
        assert "writes some part of w" in refused(2, lambda counted=counted: body(counted))
    assert os.listdir(tmp_path / "checkpoints") == []


# ------------------------------------------------------------------------------------------------------ failing writes


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_write_that_fails_on_one_rank_raises_on_all_and_leaves_the_old_checkpoint(tmp_path, monkeypatch, rank, code):
    old = saved(tmp_path, 2, step=50, tp=2)
    write = hdf5.write

    def failing(path, parts):
        written = write(path, parts)
        if path.name == f"rank-{rank:05}.h5":
            raise OSError(code, os.strerror(code))
        return written

    monkeypatch.setattr(hdf5, "write", failing)
    message = refused(2, lambda: save_on(tmp_path, 100, tp=2))
    assert f"rank {rank}" in message
    assert os.strerror(code) in message
    assert os.listdir(old.parent) == [old.name]
    LocalWorld(2).run(lambda: load_on(old, tp=2))


@pytest.mark.parametrize("broken", ["write_manifest", "publish"])
def test_a_manifest_or_a_rename_that_fails_raises_on_all_ranks(tmp_path, monkeypatch, broken):
    old = saved(tmp_path, 2, step=50)

    def failing(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving, broken, failing)
    assert "No space left on device" in refused(2, lambda: save_on(tmp_path, 100))
    assert os.listdir(old.parent) == [old.name]
    assert checkpoint.latest(tmp_path) == old


@pytest.mark.parametrize(("count", "size"), [(1, 1 << 20), (300, 1000)])  # at once; while the file is closed, too
def test_a_file_that_the_system_cuts_off_is_an_error_of_all_ranks(tmp_path, monkeypatch, count, size):
    """The limit on file sizes stands for a full disk.  HDF5, told of it, would go on complaining, or crash."""
    complaints = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: complaints.append(error))  # what h5py cannot raise goes there
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)

    def body():
        rank = world().rank
        arrays = [np.ones(size) for _ in range(count)] if rank == 1 else [np.ones(1)]
        slabs = [SlabRef(f"w{rank}.{i}", a.shape, (slice(0, a.size),), a, (0, 1)) for i, a in enumerate(arrays)]
        checkpoint.save(tmp_path, 1, slabs, {}, world())

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        message = refused(2, body)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "rank-00001.h5 cannot be written (rank 1): File too large" in message
    assert complaints == []
    assert os.listdir(tmp_path / "checkpoints") == []


def test_a_folder_that_cannot_be_made_is_an_error_of_all_ranks(tmp_path):
    (tmp_path / "run").write_text("a file")
    assert "Not a directory" in refused(2, lambda: save_on(tmp_path / "run"))


# ---------------------------------------------------------------------------------------------------- which checkpoint


def test_the_newest_complete_checkpoint_is_the_latest(tmp_path):
    """C63: a newer folder without a manifest, with a cut file or with a missing one is passed over, and said so."""
    assert checkpoint.latest(tmp_path) is None
    paths = [saved(tmp_path, 2, step, tp=2) for step in (9, 10, 11, 12)]
    (paths[3] / "manifest.json").unlink()
    os.truncate(paths[2] / "rank-00001.h5", 100)
    (paths[1] / "rank-00000.h5").unlink()
    assert checkpoint.latest(tmp_path) == paths[0]
    said = []
    assert LocalWorld(2).run(lambda: checkpoint.find("latest", str(tmp_path), world(), said.append)) == [[paths[0]]] * 2
    assert [word in line for word, line in zip(("no manifest", "bytes", "No such file"), said, strict=True)] == [
        True
    ] * 3


def test_resume_names_a_checkpoint_or_a_run_or_is_refused(tmp_path):
    path = saved(tmp_path, 1)

    def find(resume, run=None):
        return LocalWorld(2).run(lambda: checkpoint.find(resume, run, world()))[1][0]

    assert find(str(path)) == path
    assert find(str(tmp_path)) == path
    for resume, run, words in [
        ("latest", str(tmp_path / "nothing"), "has no complete checkpoint; save some"),
        (str(tmp_path / "nothing"), None, "does not exist"),
        (str(path / "manifest.json"), None, "is not a folder"),
    ]:
        assert words in refused(2, lambda resume=resume, run=run: checkpoint.find(resume, run, world()))
    (path / "manifest.json").unlink()
    assert "no manifest.json" in refused(1, lambda: checkpoint.find("latest", str(tmp_path), world()))


def test_what_killed_saves_left_is_swept_by_the_next_save(tmp_path):
    path = saved(tmp_path, 1, step=100)
    for name in (".tmp-step-00000150", ".tmp-step-00000200", ".old-step-00000100"):
        (path.parent / name).mkdir()
        (path.parent / name / "rank-00000.h5").write_text("half")
    (path.parent / "notes").mkdir()
    newer = saved(tmp_path, 1, step=200)
    assert sorted(os.listdir(path.parent)) == ["notes", path.name, newer.name]


def test_a_save_that_was_killed_between_its_two_renames_is_undone(tmp_path):
    path = saved(tmp_path, 1)
    os.rename(path, path.with_name(f".old-{path.name}"))
    checkpoint.sweep(tmp_path)
    assert checkpoint.latest(tmp_path) == path


def test_a_step_is_saved_again_over_the_old_one(tmp_path):
    saved(tmp_path, 2, tp=2)
    path = saved(tmp_path, 1)
    assert os.listdir(path.parent) == [path.name]
    assert sorted(os.listdir(path)) == ["manifest.json", "rank-00000.h5"]
    LocalWorld(1).run(lambda: load_on(path))


def test_a_run_that_goes_back_gives_up_its_later_checkpoints(tmp_path):
    paths = [saved(tmp_path, 1, step) for step in (10, 20, 30)]
    assert len(checkpoint.retire_after(tmp_path, 10)) == 2
    assert checkpoint.latest(tmp_path) == paths[0]
    saved(tmp_path, 1, 20)
    checkpoint.retire_after(tmp_path, 10)
    assert sorted(path.name[:11] for path in paths[0].parent.glob("given-up-*")) == [
        "given-up-1-",
        "given-up-1-",
        "given-up-2-",
    ]


def test_a_run_folder_that_cannot_be_made_is_refused_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointError, match=r"--run .*: cannot be made"):
            checkpoint.claim(path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpoint.claim(tmp_path)


def test_a_fresh_run_does_not_mix_with_the_checkpoints_of_another(tmp_path):
    checkpoint.claim(tmp_path / "run")
    checkpoint.claim(tmp_path)
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="step-00000100"):
        checkpoint.claim(tmp_path)


# ---------------------------------------------------------------------------------------------- what is refused on load


def test_missing_unexpected_and_misshapen_tensors_are_listed(tmp_path):
    path = saved(tmp_path, 2, tp=2)

    def other_model():
        mesh = Mesh(world(), tp=2)
        refs = [ref for ref in slabs(mesh, fill=False) if ref.name != "weight/norm"]
        refs[0] = SlabRef(refs[0].name, (6, 7), (slice(0, 6), slice(0, 7)), np.zeros((6, 7), "float32"), (0, 1))
        refs[1] = refs[1]._replace(array=refs[1].array.astype("float32"))
        refs.append(SlabRef("weight/new", (1,), (slice(0, 1),), np.zeros(1), (0, 1)))
        checkpoint.load(path, refs, mesh.world)

    assert refused(2, other_model).splitlines() == [
        f"{path} does not fit the model:",
        "missing in it: weight/new",
        "unexpected in it: weight/norm",
        "of another shape: weight/blocks.0.up is (6, 5), the model wants (6, 7)",
        "of another type: weight/blocks.0.down is float64, the model wants float32",
    ]


def slab_of(whole, name):
    return whole["tensors"][name]["slabs"][0]


def first_slab(whole):
    return slab_of(whole, "weight/blocks.0.up")


ENTRY = {"bytes": 1, "sha256": "0" * 64, "metadata_crc32": 0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.update(format=3), "format 3"),
        (lambda w: w.update(format="1"), "damaged"),
        (lambda w: w.pop("tensors"), "damaged"),
        (lambda w: w.update(step=-1), "step"),
        (lambda w: w.update(step=True), "step"),
        (lambda w: w.update(step=500), "says step 500"),
        (lambda w: w.update(scalars=[]), "scalars"),
        (lambda w: w.update(files=[]), "damaged"),
        (lambda w: w["files"].update({"../x.h5": ENTRY}), "not allowed"),
        (lambda w: w["files"].update({"/etc/passwd": ENTRY}), "not allowed"),
        (lambda w: w["files"].update({"rank-00000.h5": {**ENTRY, "bytes": 1 << 70}}), "not allowed"),
        (lambda w: w["tensors"].update({"../x": {}}), "not allowed"),
        (lambda w: first_slab(w).update(file="rank-00009.h5"), "no file"),
        (lambda w: first_slab(w).update(stop=[60, 3]), "outside"),
        (lambda w: first_slab(w).update(stop=[6]), "outside"),
        (lambda w: first_slab(w).update(start=[-1, 0]), "list of numbers"),
        (lambda w: first_slab(w).update(start=[1.0, 0]), "list of numbers"),
        (lambda w: first_slab(w).update(stop=[6, 2]), "whole tensor"),
        (lambda w: first_slab(w).update(offset=1 << 40), "outside of rank-00000.h5"),
        (lambda w: first_slab(w).update(offset=-1), "outside of rank-00000.h5"),
        (lambda w: first_slab(w).update(crc32=[]), "sum for each of its blocks"),
        (lambda w: first_slab(w).update(crc32=[1 << 32]), "sum for each of its blocks"),
        (lambda w: first_slab(w).update(offset=slab_of(w, "weight/blocks.0.down")["offset"] + 4), "over each other"),
        (lambda w: w["files"]["rank-00000.h5"].update(sha256="0" * 63), "not allowed"),
        (
            lambda w: w["tensors"]["weight/blocks.0.up"]["slabs"][1].update(start=[0, 1], stop=[6, 3]),
            "whole tensor",
        ),
        (
            lambda w: w["tensors"]["weight/norm"]["slabs"].append(w["tensors"]["weight/norm"]["slabs"][0]),
            "two slabs",
        ),
        (lambda w: w["tensors"]["weight/norm"].update(dtype="object"), "dtype"),
        (lambda w: w["tensors"]["weight/norm"].update(dtype=["float32"]), "damaged"),
    ],
)
def test_a_damaged_manifest_is_refused_before_any_file_is_opened(tmp_path, monkeypatch, change, words):
    path = saved(tmp_path, 2, tp=2)
    rewrite(path, change)
    monkeypatch.setattr(hdf5, "read", lambda *_: pytest.fail("a file was opened"))
    message = refused(2, lambda: load_on(path, tp=2))
    assert words in message
    assert str(path) in message


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"format": 2}', "\xff"])
def test_a_manifest_that_is_no_manifest_is_refused(tmp_path, text):
    path = saved(tmp_path, 1)
    (path / "manifest.json").write_bytes(text.encode("latin-1"))
    assert "damaged" in refused(1, lambda: load_on(path))


def replace_dataset(name, make):
    def change(path):
        with h5py.File(path, "r+") as file:
            values = file[name][()]
            del file[name]
            make(file, name, values)

    return change


UP = "weight/blocks.0.up"


def with_link(link):
    return replace_dataset(UP, lambda file, name, values: file.__setitem__(name, link))


def in_the_middle(path):
    with h5py.File(path, "r+") as file:
        file.move("weight", "hidden")
        file["weight"] = h5py.SoftLink("/hidden")


TRICKS = {
    "soft link": with_link(h5py.SoftLink("/weight/blocks.0.down")),
    "external link": with_link(h5py.ExternalLink("rank-00001.h5", f"/{UP}")),
    "soft link in the middle": in_the_middle,
    "group": replace_dataset(UP, lambda f, n, v: f.create_group(n)),
    "chunked": replace_dataset(UP, lambda f, n, v: f.create_dataset(n, data=v, chunks=v.shape)),
    "compressed": replace_dataset(UP, lambda f, n, v: f.create_dataset(n, data=v, compression="gzip")),
    "other shape": replace_dataset(UP, lambda f, n, v: f.create_dataset(n, data=v[:5])),
    "other type": replace_dataset(UP, lambda f, n, v: f.create_dataset(n, data=v.astype("float64"))),
    "other byte order": replace_dataset(UP, lambda f, n, v: f.create_dataset(n, data=v.astype(">f4"))),
    "never written": replace_dataset(UP, lambda f, n, v: f.create_dataset(n, v.shape, "float32")),
    "external storage": replace_dataset(
        UP, lambda f, n, v: f.create_dataset(n, v.shape, "float32", external=[("/etc/passwd", 0, 72)])
    ),
    "missing": replace_dataset(UP, lambda f, n, v: None),
    "damaged head": lambda path: path.write_bytes(path.read_bytes()[:300] + bytes(path.stat().st_size - 300)),
    "not HDF5": lambda path: path.write_bytes(b"x" * 1000),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_file_that_is_not_what_was_written_is_refused_by_name(tmp_path, trick):
    path = saved(tmp_path, 2, tp=2)
    file = path / "rank-00000.h5"
    TRICKS[trick](file)
    if trick != "cut":
        rewrite(path, lambda whole: whole["files"][file.name].update(bytes=file.stat().st_size))
    assert "rank-00000.h5" in refused(2, lambda: load_on(path, tp=2))


@pytest.mark.parametrize("trick", [trick for trick in TRICKS if trick != "cut"])
def test_a_file_is_not_what_the_manifest_says_though_all_sums_fit(tmp_path, trick):
    """Who changes a file can change the manifest too: then the structure must still be plain, and at its place."""
    path = saved(tmp_path, 2, tp=2)
    file = path / "rank-00000.h5"
    TRICKS[trick](file)

    def fit(whole):
        held = {n: s for n, t in whole["tensors"].items() for s in t["slabs"] if s["file"] == file.name}
        data, at, crc = file.read_bytes(), 0, 0
        for name, told in sorted(held.items(), key=lambda item: item[1]["offset"]):
            shape = [stop - start for start, stop in zip(told["start"], told["stop"], strict=True)]
            width = np.dtype(whole["tensors"][name]["dtype"]).itemsize
            stop = told["offset"] + int(np.prod(shape, dtype=int)) * width
            told["crc32"] = [zlib.crc32(data[told["offset"] : stop])]
            crc, at = zlib.crc32(data[at : told["offset"]], crc), stop
        whole["files"][file.name].update(bytes=len(data), metadata_crc32=zlib.crc32(data[at:], crc))

    rewrite(path, fit)
    message = refused(2, lambda: load_on(path, tp=2))
    assert "rank-00000.h5" in message
    assert "metadata are not" not in message


def test_a_symbolic_link_in_place_of_a_file_is_refused(tmp_path):
    path = saved(tmp_path, 1)
    file = path / "rank-00000.h5"
    file.rename(tmp_path / "elsewhere.h5")
    file.symlink_to(tmp_path / "elsewhere.h5")
    assert "regular file" in refused(1, lambda: load_on(path))


@pytest.mark.parametrize("name", ["", "a b", "../x", "/x", "a//b", ".", "a/..", "x\n", "ü"])
def test_a_tensor_name_that_could_leave_the_file_is_refused(tmp_path, name):
    ref = SlabRef(name, (1,), (slice(0, 1),), np.ones(1), (0, 1))
    assert "name" in refused(1, lambda: checkpoint.save(Path(tmp_path), 1, [ref], {}, world()))

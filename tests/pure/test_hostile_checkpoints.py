"""Checkpoints whose maker lies, with sums that all fit: refused before a value is used, and nothing else is opened.

Each call is made in a process of 512 MiB and 5 s of a core.
"""

import ast
import os
import random
import socket

import h5py
import hostile_checkpoints as checkpoints
import hostile_hdf5
import numpy as np
import pytest
from access_trace import opened_in
from confined import SECRET, outcomes
from test_hostile_files import REASONS

from mpitrain.checkpoint.manifest import Logical, Slab


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return checkpoints.make(tmp_path_factory.mktemp("good"))


def ends_refused(names, found, kinds=("CheckpointDamaged", "CheckpointError")):
    for name, outcome in zip(names, found, strict=True):
        assert outcome.end == "refused", (name, outcome)
        assert outcome.kind in kinds, (name, outcome)
        assert 0 < len(outcome.text.splitlines()) <= 5, (name, outcome)
        assert outcome.text.isprintable() or "\n" in outcome.text, (name, outcome)
        assert len(outcome.text) < 3000, (name, outcome)


def test_a_good_checkpoint_and_one_whose_sums_were_made_anew_are_loaded(good, tmp_path):
    """Of the tests below: what they refuse is not refused for another reason."""
    with h5py.File(good / checkpoints.FILE) as file:
        offset = file[checkpoints.NAME].id.get_offset()
    checkpoints.with_file(good, good / checkpoints.FILE, tmp_path / "again", offset)
    for outcome in outcomes("hostile_calls", [["load", str(good)], ["load", str(tmp_path / "again")]]):
        assert outcome.end == "returned", outcome
        assert outcome.text == repr(({"updates": 1, "step": 1}, hostile_hdf5.VALUES.tolist()))


def test_files_with_tricks_are_refused_though_all_their_sums_fit(good, tmp_path):
    (tmp_path / "bait").mkdir()
    bait = tmp_path / "bait" / "bait.h5"
    hostile_hdf5.make_bait(bait)
    calls = []
    for name in hostile_hdf5.TRICKS:
        file = tmp_path / f"{name}.h5"
        hostile_hdf5.make(name, file, bait)
        checkpoints.with_file(good, file, tmp_path / name)
        calls += [["load", str(tmp_path / name)], ["tool", "verify", str(tmp_path / name)]]
    with opened_in(bait.parent) as opened:
        found = outcomes("hostile_calls", calls)
    assert not opened
    ends_refused(hostile_hdf5.TRICKS, found[::2], ("CheckpointDamaged",))
    for name, loaded, verified in zip(hostile_hdf5.TRICKS, found[::2], found[1::2], strict=True):
        assert f"{tmp_path / name}/rank-00000.h5 " in loaded.text
        assert verified.text.startswith("(1, "), (name, verified)
        if REASONS[name].startswith("weight") and name not in ("two_names_of_a_dataset", "groups_that_meet_again"):
            expected = "weight/x is not a dataset" if name == "hard_link_cycle" else REASONS[name]
            assert expected in loaded.text, (name, loaded)


# ---------------------------------------------------------------------------------------------------------------- names

TENSORS = [
    *("", ".", "..", "../x", "/x", "x/", "x//y", "x/../y", "x/./y", "x/..", ".x", "x/.y", "x.", "x/y.", "x..y", "..."),
    *(
        "a b",
        "a\0b",
        "a\nb",
        "a\x1b[2J",
        "a\tb",
        "a\\b",
        "C:\\x",
        "~",
        "~/x",
        "$HOME",
        "a;b",
        "a|b",
        "`a`",
        "a*",
        "a:0",
    ),
    *(
        "\u0445",
        "\uff41",
        "a\u202eb",
        "a\u200bb",
        "\u0661",
        "e\u0301",
        "\udc80",
        "{0.__class__}",
        "%s",
        "%n",
        "<a>",
        '"',
    ),
    *("x" * 1025, "a/" * 8 + "a", "/" * 1000, "a/" * 500 + "a"),
]
FILES = [
    *("", ".", "..", "../rank-00000.h5", "/etc/passwd", "./rank-00000.h5", "rank-00000.h5/", "x/rank-00000.h5"),
    *("rank-00000.h5\0", "rank-00000.h5\n", " rank-00000.h5", "rank-00000.h5 ", "rank-00000.h5.", "RANK-00000.H5"),
    *(
        "rank-\u0660\u0660\u0660\u0660\u0660.h5",
        "rank-0.h5",
        "rank-" + "0" * 300 + ".h5",
        "rank-00000.hdf5",
        "manifest.json",
    ),
    *(
        "rank-0000\uff10.h5",
        "rank-00000\u200b.h5",
        "rank\u201000000.h5",
        ".lock",
        "rank-00000.h5\u202e",
        "~",
        "rank-+0000.h5",
    ),
    *("rank--0000.h5", "rank-00000.h5/../rank-00000.h5", "\\rank-00000.h5", "rank-0_000.h5", "rank-00000.h5\0.txt"),
]


def test_names_of_tensors_and_files_that_are_not_plain_are_refused(good, tmp_path):
    assert len(TENSORS) >= 30
    assert len(FILES) >= 30
    folders = []
    for number, name in enumerate([*TENSORS, *FILES]):
        manifest = checkpoints.read(good)
        if number < len(TENSORS):
            manifest["tensors"] = {name: manifest["tensors"][checkpoints.NAME]}
        else:
            manifest["files"] = {name: manifest["files"][checkpoints.FILE]}
            manifest["tensors"][checkpoints.NAME]["slabs"][0]["file"] = name
        folder = tmp_path / f"{number:03}"
        folder.mkdir()
        (folder / checkpoints.FILE).symlink_to(good / checkpoints.FILE)
        checkpoints.write(folder, manifest)
        folders.append(folder)
    found = outcomes("hostile_calls", [["load", str(folder)] for folder in folders])
    ends_refused([*TENSORS, *FILES], found, ("CheckpointDamaged",))
    for name, outcome in zip([*TENSORS, *FILES], found, strict=True):
        assert "is not allowed" in outcome.text, (name, outcome)


def _replaced(path, by):
    """Put something else in the place of a file."""
    path.unlink()
    if by == "pipe":
        os.mkfifo(path)
    elif by == "folder":
        path.mkdir()
    elif by == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.getcwd()
            os.chdir(path.parent)  # the name of a socket is short
            made.bind(path.name)
            os.chdir(here)
    elif by == "hole":
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    elif by != "nothing":
        path.symlink_to(by)


@pytest.mark.parametrize("file", ["manifest.json", checkpoints.FILE])
def test_what_is_no_regular_file_is_neither_followed_nor_waited_for(good, tmp_path, file):
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / file).write_bytes((good / file).read_bytes())
    things = [
        "pipe",
        "folder",
        "socket",
        "hole",
        "nothing",
        "/dev/zero",
        "/dev/stdin",
        "dangling",
        str(tmp_path / "away" / file),
    ]
    folders = []
    for number, by in enumerate(things):
        folder = tmp_path / f"{number:03}"
        folder.mkdir()
        for name in ("manifest.json", checkpoints.FILE):
            (folder / name).write_bytes((good / name).read_bytes())
        _replaced(folder / file, by)
        folders.append(folder)
    with opened_in(tmp_path / "away") as opened:
        ends_refused(things, outcomes("hostile_calls", [["load", str(folder)] for folder in folders]))
        outcomes("hostile_calls", [["tool", "verify", str(folder)] for folder in folders])
        ends_refused(things, outcomes("hostile_calls", [["tool", "inspect", str(folder)] for folder in folders]))
    assert not opened


def test_links_out_of_a_run_are_not_its_checkpoints(good, tmp_path):
    steps, whole = tmp_path / "steps", tmp_path / "whole"
    (steps / "checkpoints").mkdir(parents=True)
    (steps / "checkpoints" / "step-00000001").symlink_to(good)
    whole.mkdir()
    (whole / "checkpoints").symlink_to(good.parent)
    found = outcomes("hostile_calls", [["resume", str(steps)], ["resume", str(whole)]])
    ends_refused([steps, whole], found)
    assert "has no complete checkpoint" in found[0].text
    assert "is a link" in found[1].text


# --------------------------------------------------------------------------------------------------------- the manifest


def _changed(good, change):
    manifest = checkpoints.read(good)
    return change(manifest) or manifest


def _in(*path, to):
    """A change of one value of the manifest."""

    def change(manifest):
        *above, last = path
        value = manifest
        for key in above:
            value = value[key]
        value[last] = to

    return change


TENSOR = ("tensors", checkpoints.NAME)
SHAPE, SLABS, SLAB = (*TENSOR, "shape"), (*TENSOR, "slabs"), (*TENSOR, "slabs", 0)
STOP = (*SLAB, "stop")
MANIFESTS = {
    "nothing": lambda m: " ",
    "a list": lambda m: "[1",
    "deep": lambda m: '{"format": 2, "x": ' + "[" * 100_000,
    "deep enough": lambda m: '{"format": 2, "x": ' + "[" * 5_000,
    "deep objects": lambda m: '{"format": 2, "x": ' + '{"a":' * 100_000,
    "a key twice": lambda m: '{"format": 2, "format": 2',
    "nan": lambda m: '{"format": 2, "step": NaN',
    "many digits": lambda m: '{"format": 2, "step": ' + "9" * 100_000,
    "not UTF-8": lambda m: '{"format": 2, "x": "\udc80"',
    "a format of text": _in("format", to="2"),
    "a truth": _in("format", to=True),
    "a negative step": _in("step", to=-1),
    "a large step": _in("step", to=1 << 62),
    "a true step": _in("step", to=True),
    "a step with a fraction": _in("step", to=1.0),
    "scalars that are a list": _in("scalars", to=[]),
    "layout that is text": _in("layout", to="dp8"),
    "files that are a list": _in("files", to=[]),
    "tensors that are text": _in("tensors", to="x"),
    "negative size": _in("files", checkpoints.FILE, "bytes", to=-1),
    "another size": _in("files", checkpoints.FILE, "bytes", to=10**9),
    "size of text": _in("files", checkpoints.FILE, "bytes", to="9"),
    "upper case": _in("files", checkpoints.FILE, "sha256", to="A" * 64),
    "crc of text": _in("files", checkpoints.FILE, "metadata_crc32", to="1"),
    "another crc": _in("files", checkpoints.FILE, "metadata_crc32", to=1),
    "object dtype": _in(*TENSOR, "dtype", to="object"),
    "python code": _in(*TENSOR, "dtype", to="__import__('os').system('x')"),
    "a dtype of fields": _in(*TENSOR, "dtype", to=[["a", "f4"]]),
    "dtype with an order": _in(*TENSOR, "dtype", to=">f4"),
    "a shape of 256 GiB": lambda m: [_in(*where, to=[1 << 18, 1 << 18])(m) for where in (SHAPE, STOP)][1],
    "a shape that overflows": _in(*SHAPE, to=[1 << 61, 1 << 61]),
    "a shape with a fraction": _in(*SHAPE, to=[3.0, 4]),
    "a negative shape": _in(*SHAPE, to=[-3, -4]),
    "a shape of 10,000 dims": _in(*SHAPE, to=[10**18] * 10_000),
    "another shape": _in(*SHAPE, to=[4, 3]),
    "one row too many": _in(*STOP, to=[4, 4]),
    "one row too few": _in(*STOP, to=[2, 4]),
    "an empty slab": _in(*SLAB, "start", to=[3, 4]),
    "no slab": _in(*SLABS, to=[]),
    "a slab twice": lambda m: m["tensors"][checkpoints.NAME]["slabs"].extend(m["tensors"][checkpoints.NAME]["slabs"]),
    "no sums": _in(*SLAB, "crc32", to=[]),
    "another sum": _in(*SLAB, "crc32", to=[1]),
    "behind the end": _in(*SLAB, "offset", to=10**9),
    "before the beginning": _in(*SLAB, "offset", to=-48),
    "in the header": _in(*SLAB, "offset", to=8),
    "one tensor more": lambda m: m["tensors"].update({"weight/y": {"shape": [0], "dtype": "int8", "slabs": []}}),
    "no tensor": _in("tensors", to={}),
}  # fmt: skip
WHY = {
    "deep": "more lists or values than a manifest of this size",
    "deep enough": "is not a JSON object",
    "a key twice": "is not a JSON object",
    "many digits": "is not a JSON object",
    "object dtype": "weight/x has dtype object",
    "a shape of 256 GiB": "a slab of weight/x lies outside of rank-00000.h5",
    "a shape of 10,000 dims": "has a shape that cannot be",
    "another shape": "a slab of weight/x lies outside of it",
    "one row too few": "the slabs of weight/x do not make a whole tensor",
    "a slab twice": "a file holds two slabs of weight/x",
    "no sums": "does not have a sum for each of its blocks",
    "another size": "must be a regular file of 1000000000 bytes",
    "another crc": "its metadata are not what was written",
    "another sum": "weight/x is not what was written",
    "one tensor more": "unexpected in it: weight/y",
    "no tensor": "missing in it: weight/x",
}
"""What some of the messages say."""
LARGE = {
    "empty lists": lambda m: '{"format": 2, "x": [' + "[]," * 5_000_000 + "[]]",
    "zeros": lambda m: '{"format": 2, "x": [' + "0," * 8_000_000 + "0]",
    "long text": lambda m: '{"format": 2, "x": "' + "a" * 60_000_000 + '"',
    "too long": lambda m: '{"format": 2, "x": "' + "a" * 70_000_000 + '"',
    "a shape of a million dims": _in(*SHAPE, to=[10**18] * 1_000_000),
    "a million sums": _in(*SLAB, "crc32", to=[0] * 1_000_000),
}


def _crowded(count):
    """A manifest of many files, each with a slab of one tensor that overlaps the others."""
    entry = {"bytes": 4096, "sha256": "0" * 64, "metadata_crc32": 0}
    files = {f"rank-{n:05}.h5": entry for n in range(count)}
    slabs = [
        {"start": [0, n % 7], "stop": [1 + n % 5, 8 + n % 3], "file": name, "offset": 0, "crc32": [0]}
        for n, name in enumerate(files)
    ]
    return lambda m: m.update(
        files=files, tensors={checkpoints.NAME: {"shape": [9, 11], "dtype": "int8", "slabs": slabs}}
    )


def _written(good, tmp_path, manifests):
    """A checkpoint for each of them."""
    for number, change in enumerate(manifests.values()):
        folder = tmp_path / f"{number:03}"
        folder.mkdir()
        os.link(good / checkpoints.FILE, folder / checkpoints.FILE)
        checkpoints.write(folder, _changed(good, change))
        yield folder


def test_a_manifest_that_contradicts_itself_or_the_model_is_refused(good, tmp_path):
    folders = list(_written(good, tmp_path, MANIFESTS))
    (tmp_path / "cut").mkdir()
    text = (good / "manifest.json").read_bytes()
    for size in range(0, len(text), 97):
        folders.append(tmp_path / "cut" / f"{size}")
        folders[-1].mkdir()
        (folders[-1] / "manifest.json").write_bytes(text[:size])
    names = [*MANIFESTS, *(f"the first {folder.name} bytes" for folder in folders[len(MANIFESTS) :])]
    found = outcomes("hostile_calls", [["load", str(folder)] for folder in folders])
    ends_refused(names, found)
    for name, why in WHY.items():
        assert why in found[names.index(name)].text, (name, found[names.index(name)])
    found = outcomes("hostile_calls", [["tool", "inspect", str(folder)] for folder in folders])
    for name, outcome in zip(names, found, strict=True):
        assert outcome.end in ("refused", "returned"), (name, outcome)


@pytest.mark.slow
def test_a_manifest_of_many_megabytes_is_refused(good, tmp_path):
    manifests = {**LARGE, "overlapping slabs of 50,000 files": _crowded(50_000)}
    folders = list(_written(good, tmp_path, manifests))
    ends_refused(manifests, outcomes("hostile_calls", [["load", str(folder)] for folder in folders]))


def _cut(draw, low, high, count):
    """A box, cut from side to side and each part again, into at most so many."""
    dim = draw.randrange(len(low))
    if count < 2 or high[dim] - low[dim] < 2:
        return [(low, high)]
    at, first = draw.randrange(low[dim] + 1, high[dim]), draw.randrange(1, count)
    inner_high, inner_low = list(high), list(low)
    inner_high[dim] = inner_low[dim] = at
    return _cut(draw, low, inner_high, first) + _cut(draw, inner_low, high, count - first)


def test_slabs_are_a_whole_exactly_if_each_element_lies_in_one_of_them():
    draw, wholes = random.Random(0), 0
    for _ in range(400):
        shape = [draw.randrange(1, 7) for _ in range(draw.randrange(1, 4))]
        boxes = [(list(low), list(high)) for low, high in _cut(draw, [0] * len(shape), shape, draw.randrange(1, 9))]
        draw.shuffle(boxes)
        if draw.random() < 0.5:
            (low, high), dim = draw.choice(boxes), draw.randrange(len(shape))
            low[dim], high[dim] = draw.choice([(draw.randrange(high[dim]), high[dim]), (low[dim], shape[dim])])
        if draw.random() < 0.2:
            boxes.pop()
        covered = np.zeros(shape, int)
        for low, high in boxes:
            covered[tuple(slice(*ends) for ends in zip(low, high, strict=True))] += 1
        slabs = tuple(Slab(tuple(low), tuple(high), "f", 0, ()) for low, high in boxes)
        assert Logical(tuple(shape), "int8", slabs).is_whole == (covered == 1).all(), (shape, boxes)
        wholes += (covered == 1).all()
    assert 100 < wholes < 350


SHOWN = "\x1b]0;owned\x07\x1b[2J\r\u202e"


def test_text_of_a_file_does_not_steer_the_terminal(good, tmp_path):
    manifest = checkpoints.read(good)
    manifest["layout"] = {SHOWN: 2, "dp": SHOWN, "tp": 2}
    manifest["versions"] = {SHOWN: SHOWN, "mpitrain": SHOWN, "numpy": [SHOWN]}
    manifest["scalars"] = {
        SHOWN: SHOWN,
        "updates": SHOWN,
        "tokens": SHOWN,
        "data": {"sha256": SHOWN, "next_step": SHOWN},
    }
    manifest["scalars"]["config"] = {
        "model": SHOWN,
        "data": SHOWN,
        "lr": SHOWN,
        SHOWN: 1,
        "layers": [SHOWN],
        "steps": SHOWN,
    }
    manifest["scalars"]["scaler"] = {"scale": SHOWN, SHOWN: SHOWN}
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / checkpoints.FILE).write_bytes((good / checkpoints.FILE).read_bytes())
    checkpoints.write(folder, manifest)
    words = [["inspect", folder], ["inspect", folder.parent.parent], ["diff", folder, good], ["verify", folder]]
    words += [["inspect", folder, "--tensors", "*"]]
    for outcome in outcomes("hostile_calls", [["tool", *map(str, words_)] for words_ in words]):
        assert outcome.end in ("returned", "refused"), outcome
        said = outcome.text if outcome.end == "refused" else ast.literal_eval(outcome.text)[1]
        assert all(line.isprintable() for line in said.split("\n")), said


# -------------------------------------------------------------------------------------------------------- planted links

DRAFTS = [
    *(
        "config.toml.tmp",
        "config.toml",
        "metrics.jsonl.tmp",
        "loss.svg",
        "loss.svg.tmp",
        "sample.txt",
        "sample.txt.tmp",
    ),
    *("checkpoints/.tmp-step-00000001", "checkpoints/.old-step-00000001", "checkpoints/.gone-step-00000001"),
    *("checkpoints/step-00000002", "checkpoints/.tmp-step-00000002", "board", "hang-report.txt"),
]
REFUSED = [".lock", "metrics.jsonl"]
TINY = "--model gpt-tiny --layers 1 --batch 2 --steps 2 --save-every 1 --sample-length 3 --eval-every 0".split()


def _planted(run, names, target):
    """A run folder with links at these names, each to a file or folder of its own with the same name."""
    (run / "checkpoints").mkdir(parents=True)
    target.mkdir()
    for name in names:
        victim = target / name.replace("/", "-")
        if "step" in name or name == "board":
            victim.mkdir()
            (victim / "kept").write_text("kept")
        else:
            victim.write_text("kept")
        (run / name).symlink_to(victim)
    return run


def _kept(target):
    files = [path for path in target.rglob("*") if path.is_file()]
    return all(path.read_text() == "kept" for path in files), sorted(str(path.relative_to(target)) for path in files)


def test_links_planted_at_every_name_that_a_run_writes_do_no_harm_and_no_secret_is_written(tmp_path):
    text = tmp_path / "text"
    text.write_text("".join(f"{n} bottles of milk on the wall.\n" for n in range(200)))
    runs = {"drafts": DRAFTS, **{name: [name] for name in REFUSED}}
    calls = []
    for name, planted in runs.items():
        run = _planted(tmp_path / f"run-{name}", planted, tmp_path / f"target-{name}")
        calls.append(["train", *TINY, "--data", str(text), "--run", str(run)])
    before = {name: _kept(tmp_path / f"target-{name}") for name in runs}
    found = outcomes("hostile_calls", calls, tmp_path)
    assert before == {name: _kept(tmp_path / f"target-{name}") for name in runs}
    assert all(whole for whole, _ in before.values())
    assert found[0].end == "returned", found[0]
    for outcome in found[1:]:
        assert outcome.end == "refused", outcome
    run = tmp_path / "run-drafts"
    for name in (
        "config.toml",
        "metrics.jsonl",
        "loss.svg",
        "sample.txt",
        ".lock",
        "checkpoints/step-00000002/manifest.json",
    ):
        assert not (run / name).is_symlink()
        assert (run / name).stat().st_mode & 0o777 == 0o600, name
    for name in ("checkpoints/step-00000001", "checkpoints/step-00000002"):
        assert not (run / name).is_symlink()
        assert (run / name).stat().st_mode & 0o777 == 0o700
    written = [path for path in run.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(written) > 5
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]

"""Files for the fuzz of files: of each kind a good one, how it is changed, and what a user does with it.

A `Case` writes its file or folder, says which call of hostile_calls.py to make, and judges what came of it.
"""

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import compared_runs
import h5py
import hf_models
import hostile_checkpoints as checkpoints
import hostile_hdf5
import numpy as np
import recorded
from fuzz.mangle import changed, mangled

from mpitrain.checkpoint.tools import command
from mpitrain.config import Config
from mpitrain.data import encoded
from mpitrain.data.corpus import fingerprint
from mpitrain.interchange.command import TOOLS as OF_OTHERS

VALUES = hostile_hdf5.VALUES.tolist()


class Case(NamedTuple):
    """A call of hostile_calls.py, and whether values that it returns must be those that were saved."""

    call: list[str]
    exact: bool = False


class Bases:
    """The good files, and files with tricks, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.bait = folder / "bait" / "bait.h5"
        self.bait.parent.mkdir(parents=True)
        hostile_hdf5.make_bait(self.bait)
        self.checkpoint = checkpoints.make(folder / "run")
        self.one_file = folder / "one.h5"
        with contextlib.redirect_stdout(io.StringIO()):
            command.main(["reshard", str(self.checkpoint), "--one-file", str(self.one_file)])
        with h5py.File(self.checkpoint / checkpoints.FILE) as file:
            self.offset = file[checkpoints.NAME].id.get_offset()
        self.hdf5 = []
        for name in hostile_hdf5.TRICKS:
            path = folder / f"{name}.h5"
            hostile_hdf5.make(name, path, self.bait)
            if path.stat().st_size < 1 << 16:
                self.hdf5.append(path.read_bytes())
        for libver in ("earliest", "v110", "latest"):
            self.hdf5 += 8 * [_plain(folder / f"plain-{libver}.h5", libver)]
        self.hdf5.append((self.checkpoint / checkpoints.FILE).read_bytes())
        self.recordings = {name: folder / f"recorded-{name}" for name in recorded.PROGRAMS}
        for name, path in self.recordings.items():
            recorded.made(path, name, steps=(3, 4) if name == "steps" else None)
        self.digests = folder / "digested"
        compared_runs.run(self.digests, compared_runs.case("dp2"), compared_runs.case("dp2").layout)
        self.settings = Config(steps=3, data="text").to_toml().encode()
        self.weights = {}
        for name, shards in (("gpt2", 1), ("llama-groups", 2)):
            held = hf_models.tensors(hf_models.CASES[name])
            self.weights[name] = hf_models.write(folder / name, hf_models.CASES[name], held, shards)
        self.tokenizer = json.dumps(_words()).encode()
        self.encoded = _encoded()
        self.model = folder / "model"
        with contextlib.redirect_stdout(io.StringIO()):
            command.main(["import", str(self.weights["llama-groups"]), str(self.model)], OF_OTHERS)
        self.metrics = b"".join(
            b'{"step": %d, "loss": 5.%d, "lr": 1e-3, "val_loss": 4.5}\n' % (n, n) for n in range(1, 30)
        )


def _words():
    """A tokenizer.json with every kind of part that is taken."""
    letters = [*"abcdefghijklmnopqrstuvwxyzĠĊ▁", *(f"<0x{n:02X}>" for n in range(256)), "<unk>"]
    merges = [["t", "h"], ["th", "e"], ["Ġ", "c"]]
    every = letters + ["".join(pair) for pair in merges]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    split = {"type": "Split", "pattern": {"Regex": r" ?\p{L}+|\s+"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(every), "content": "<|endoftext|>", **added}],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}, replace],
        },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level, metaspace]},
        "post_processor": byte_level,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, byte_level, strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {word: number for number, word in enumerate(every)},
            "merges": merges,
        },
    }


def _encoded():
    """What `data.encoded` keeps of a text."""
    tokens = np.arange(300, dtype="<u2")
    ends = np.array([90, 300], "<i8")
    sums = fingerprint(tokens[:280], tokens[280:]), encoded._sha256_of(ends)
    about = encoded._About("text", ("a.txt", "b.txt"), (), (280, 20), (700, 50), 2, *sums)
    return encoded._header(about, 4096) + tokens.tobytes() + ends.tobytes()


def _plain(path, libver):
    draw = np.random.default_rng(0)
    with h5py.File(path, "w", libver=libver) as file:
        file["weight/x"] = hostile_hdf5.VALUES
        file["weight/y"] = np.float64(0.1)
        options = {"chunks": (4, 3), "compression": "gzip", "shuffle": True, "fletcher32": True}
        file.create_dataset("c/all", data=np.arange(54).reshape(9, 6), **options)
        file.create_dataset("c/grows", data=draw.integers(0, 9, (20, 2)), chunks=(1, 2), maxshape=(None, 2))
        file.create_dataset("c/one", data=np.arange(9), chunks=(9,))
        file["weight/x"].attrs["unit"] = "m"
    return path.read_bytes()


def hdf5(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """A file that comes alone."""
    path = folder / "a.h5"
    path.write_bytes(mangled(draw, draw.choice(bases.hdf5), draw.choice(bases.hdf5)))
    return Case(["look_and_read", str(path)])


def sealed_hdf5(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """A file in a checkpoint whose sums were made anew."""
    path = folder / "a.h5"
    good = (bases.checkpoint / checkpoints.FILE).read_bytes()
    base = good if draw.random() < 0.5 else draw.choice(bases.hdf5)
    data = mangled(draw, base, draw.choice(bases.hdf5)).ljust(200, b"\0")
    path.write_bytes(data)
    offset = bases.offset if bases.offset + 48 <= len(data) else draw.randrange(len(data) - 48)
    checkpoints.with_file(bases.checkpoint, path, folder / "made", offset)
    return Case(["load", str(folder / "made")])


def damaged_checkpoint(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """A checkpoint with other bytes in one of its files, whose sums nobody made anew."""
    shutil.copytree(bases.checkpoint, folder / "made")
    path = folder / "made" / draw.choice((checkpoints.FILE, "manifest.json"))
    path.write_bytes(mangled(draw, path.read_bytes(), path.read_bytes()))
    return Case(["load", str(folder / "made")], exact=True)


def sealed_manifest(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """A manifest with other values, or other text, and the sum that it needs."""
    shutil.copytree(bases.checkpoint, folder / "made")
    manifest = checkpoints.read(bases.checkpoint)
    manifest.pop("sha256")
    if draw.random() < 0.7:
        manifest = changed(draw, manifest)
        text = json.dumps(manifest)[:-1]
    else:
        text = mangled(draw, json.dumps(manifest)[:-1].encode(), b'[]{}:,"0').decode("utf-8", "surrogateescape")
    checkpoints.write(folder / "made", text)
    return Case([draw.choice(("load", "load", "inspect", "verify")), str(folder / "made")])


def one_file(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """A consolidated file; its head and its index have the sums that they need, or not."""
    data = bytearray(bases.one_file.read_bytes())
    head = json.loads(data[:4096].rstrip(b" "))
    place = slice(head["index"]["offset"], head["index"]["offset"] + head["index"]["bytes"])
    match draw.randrange(3):
        case 0:
            data = bytearray(mangled(draw, bytes(data), bytes(data)))
        case 1:
            head.pop("sha256")
            data[:4096] = _sealed(changed(draw, head)).ljust(4096)[:4096]
        case 2:
            index = json.loads(data[place].rstrip(b" "))
            index.pop("sha256")
            text = _sealed(changed(draw, index))
            data[place] = text.ljust(place.stop - place.start)[: place.stop - place.start]
    (folder / "one.h5").write_bytes(data)
    return Case([draw.choice(("inspect", "verify", "read_all")), str(folder / "one.h5")])


def _sealed(value) -> bytes:
    text = json.dumps(value)[:-1].encode()
    return text + b',\n "sha256": "%s"\n}\n' % sha256(text).hexdigest().encode()


def settings(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """A file of settings."""
    path = folder / "a.toml"
    pieces = b"[[a]]\n[a.b]\n{}=,\"\"\"'''#\\u0000\\x00 inf nan 2026-01-01T00:00:00Z 0x1f 1e999 true a.b.c"
    path.write_bytes(mangled(draw, bases.settings, draw.choice((pieces, bases.settings))))
    return Case(["settings", str(path)])


def data(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """A corpus: text, tokens, or a folder of them."""
    raw = mangled(draw, b"text \xc3\xa9 and more \xe2\x82\xac" * draw.choice((1, 9, 400)), draw.randbytes(64))
    kind = draw.choice(("text.txt", "tokens.bin", "folder"))
    if kind == "folder":
        for name in draw.sample(("train.bin", "val.bin", "a.txt", "b", ".hidden", "c.py"), 3):
            (folder / name).write_bytes(mangled(draw, raw, raw))
        return Case(["corpus", str(folder)])
    (folder / kind).write_bytes(raw)
    return Case(["corpus", str(folder / kind)])


def metrics(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """What a run measured, gone on with and drawn."""
    path = folder / "metrics.jsonl"
    text = mangled(draw, bases.metrics, b'{"step": 1e999, "loss": [1e308, -1e308, "x", null, {}]}\n')
    if draw.random() < 0.5:
        lines = [json.loads(line) for line in bases.metrics.splitlines()]
        text = b"".join(json.dumps(line).encode() + b"\n" for line in changed(draw, lines))
    path.write_bytes(text)
    return Case(["metrics", str(path), draw.choice((1, 3, 12, 40))])


def tokenizer(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """A tokenizer.json with other bytes, or other values."""
    path = folder / "tokenizer.json"
    text = bases.tokenizer
    if draw.random() < 0.2:
        text = mangled(draw, text, b'[]{}:,"0\\u001b')
    else:
        held = json.loads(text)
        words = {name: held["model"].pop(name) for name in ("vocab", "merges") if draw.random() < 0.8}
        for _ in range(draw.choice((1, 1, 2, 5))):
            held = changed(draw, held)
        if isinstance(held, dict) and isinstance(held.get("model"), dict):
            held["model"] |= words
        text = json.dumps(held).encode()
    path.write_bytes(text)
    return Case(["tokenizer", str(path)])


def encoded_text(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """An encoded text in the cache: other bytes anywhere, another header, another length."""
    (folder / "tokens").mkdir()
    text = bases.encoded
    match draw.randrange(3):
        case 0:
            text = mangled(draw, text, text[:200])
        case 1:
            about = json.dumps(changed(draw, json.loads(text[16:4096]))).encode()
            text = text[:16] + about.ljust(4080) + text[4096:]
        case 2:
            text = mangled(draw, text[:16], text[:8]) + text[16:]
    (folder / "tokens" / "key.tokens").write_bytes(text)
    return Case(["encoded_text", str(folder), "key"])


def page(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """A copy of a rank's page of the flight board."""
    (folder / "board").mkdir()
    (folder / "board" / "rank-00001.page").write_bytes(
        draw.randbytes(draw.choice((0, 9, 4096, 4104, 4105, 8200, 8192 + 8)))
    )
    return Case(["board", str(folder)])


def recording(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """What a rank sent and received: an index with other bytes, or other values and the sums they need; cut files."""
    program = draw.choice(tuple(recorded.PROGRAMS))
    made = folder / "r"
    shutil.copytree(bases.recordings[program], made)
    index, held = (draw.choice(sorted(made.glob(names))) for names in ("*.jsonl", "*.h5"))
    match draw.randrange(5):
        case 0:
            index.write_bytes(mangled(draw, index.read_bytes(), index.read_bytes()))
        case 1:
            lines = recorded.lines_of(index)
            place = draw.randrange(len(lines))
            other = changed(draw, lines[place])
            recorded.write_lines(index, [*lines[:place], other if isinstance(other, dict) else {}, *lines[place + 1 :]])
        case 2:
            held.write_bytes(mangled(draw, held.read_bytes(), index.read_bytes()))
        case 3:
            path = draw.choice((index, held))
            path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
        case 4:
            lines = recorded.lines_of(index)
            draw.shuffle(lines)
            recorded.write_lines(index, lines[: draw.randrange(1, len(lines) + 1)])
    return Case(["replayed", str(made), program])


def digests(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """Sums of what a run has computed: one rank's with other bytes, or other values in a line; beside sound ones."""
    for name in ("sound", "changed"):
        shutil.copytree(bases.digests, folder / name)
    path = draw.choice(sorted((folder / "changed" / "digests").iterdir()))
    text = path.read_bytes()
    if draw.random() < 0.4:
        text = mangled(draw, text, text)
    else:
        lines = text.splitlines(keepends=True)
        place = draw.randrange(len(lines))
        lines[place] = json.dumps(changed(draw, json.loads(lines[place]))).encode() + b"\n"
        text = b"".join(lines)
    path.write_bytes(text)
    return Case(["compared", str(folder / "sound"), str(folder / "changed")])


def weights(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """A folder of another tool's weights: a header, an index or settings with other values, or other bytes anywhere."""
    made = folder / "theirs"
    shutil.copytree(bases.weights[draw.choice(tuple(bases.weights))], made)
    path = draw.choice(sorted(made.iterdir()))
    whole = path.read_bytes()
    is_json = path.suffix == ".json"
    length = 0 if is_json else int.from_bytes(whole[:8], "little")
    text, rest = (whole, b"") if is_json else (whole[8 : 8 + length], whole[8 + length :])
    match draw.randrange(4):
        case 0:
            whole = mangled(draw, whole, whole)
        case 1:
            text = mangled(draw, text, b'[]{}:,"0\\u001b')
            whole = text if is_json else len(text).to_bytes(8, "little") + text + rest
        case 2 | 3:
            text = json.dumps(changed(draw, json.loads(text))).encode()
            whole = text if is_json else len(text).to_bytes(8, "little") + text + rest
    path.write_bytes(whole)
    return Case(["imported", str(made), str(folder / "run")])


def model(draw: random.Random, bases: Bases, folder: Path) -> Case:
    """A checkpoint that is whole, with other settings of its model, or other tensors, than it was saved with."""
    shutil.copytree(bases.model, folder / "run")
    saved = folder / "run" / "checkpoints" / "step-00000000"
    manifest = checkpoints.read(saved)
    manifest.pop("sha256")
    part = draw.choice(("scalars", "scalars", "tensors"))
    manifest[part] = changed(draw, manifest[part])
    checkpoints.write(saved, json.dumps(manifest)[:-1])
    return Case(["exported", str(folder / "run"), str(folder / "theirs")])


KINDS: dict[str, Callable[[random.Random, Bases, Path], Case]] = {
    function.__name__: function
    for function in (
        hdf5,
        sealed_hdf5,
        damaged_checkpoint,
        sealed_manifest,
        one_file,
        settings,
        data,
        metrics,
        page,
        recording,
        digests,
        weights,
        model,
        tokenizer,
        encoded_text,
    )
}
